"""Operators that are output and loss in one: they ignore the gradient that they receive.

A factor S on the loss does not reach their gradients, so a step would divide them by S without a
multiplication. They are searched for in the recorded graph of a loss. Where an operator has a
``grad_scale``, the recorded node's is multiplied by S before the backward pass reads it; the
operator then makes S times its gradient, bit for bit. The others, and those inside a hybridized
block, whose gradient was compiled before, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

from mpgluon.base.blocks import living_blocks
from mpgluon.errors import PrecisionError, TrainerStateError
from mpgluon.graph.nodes import Graph, Node
from mpgluon.graph.operators import operators_with

from mxnet import autograd, gluon
from mxnet.base import MXNetError
from mxnet.ndarray import NDArray
from mxnet.symbol import Symbol

__all__ = ["HAS_GRAD_SCALE", "OWN_GRADIENT", "GraphsSeen", "mark_factor", "prepare_graph"]

OWN_GRADIENT = operators_with("own_gradient")
"""Operators whose gradient is their own: the option that scales it, or what to use instead."""

HAS_GRAD_SCALE = frozenset(n for n, instead in OWN_GRADIENT.items() if instead == "grad_scale")
"""Those whose gradient can be multiplied by S, outside of hybridized blocks."""

_SEARCH_AGAIN = 100  # losses
_ORIGINAL = "__mpgluon_grad_scale__"  # the attribute that keeps a node's first grad_scale
_FACTOR = "__mpgluon_loss_scale__"  # the attribute of variables that are factors S of a loss


class GraphsSeen:
    """Which recorded graphs were searched and found harmless, by their numbers of nodes and inputs.

    Counting takes 0.1 to 0.3 ms for ResNet-50, and writing the graph out several times as much. Two
    graphs may have the same counts, so each hundredth one is searched all the same.
    """

    def __init__(self) -> None:
        self._harmless: dict[tuple[int, int], int] = {}  # and how often they were met since
        self.blocks: set[tuple[Any, ...]] = set()  # hybridized ones, as their nodes show them

    def is_harmless(self, graph: Symbol) -> bool:
        """Whether a graph needs no search."""
        key = _key(graph)
        if key is None:
            return False
        met = self._harmless.pop(key, _SEARCH_AGAIN) + 1
        if met >= _SEARCH_AGAIN:
            return False
        self._harmless[key] = met
        return True

    def remember(self, graph: Symbol) -> None:
        """Record that a graph is harmless."""
        key = _key(graph)
        if key is not None:
            self._harmless[key] = 0


def _key(graph: Symbol) -> Optional[tuple[int, int]]:
    internals = _internals(graph)
    return None if internals is None else (len(internals), len(graph.list_inputs()))


def _internals(graph: Symbol) -> Optional[Symbol]:
    """Return every output in a graph; ``None`` where MXNet fails, after ``create_graph=True``."""
    try:
        return graph.get_internals()
    except MXNetError:
        return None


def mark_factor(variable: NDArray) -> None:
    """Mark a variable of autograd, in recorded graphs, as a factor S of a loss."""
    autograd.get_symbol(variable)._set_attr(**{_FACTOR: "True"})


def prepare_graph(losses: Sequence[NDArray], scale: float, seen: GraphsSeen) -> None:
    """Make operators with a gradient of their own return S times this gradient, or refuse.

    Parameters
    ----------
    losses : sequence of NDArray
        Before they are multiplied by S.
    scale : float
        S.
    seen : GraphsSeen
        Graphs of the Trainer's earlier losses.

    Raises
    ------
    PrecisionError
        If S does not reach one of these operators; with its name, and what to write.
    TrainerStateError
        If a loss contains one that was scaled already.
    """
    for loss in losses:
        graph = _recorded_graph(loss)
        if graph is None or seen.is_harmless(graph):
            continue
        text = graph.tojson(remove_amp_cast=False)
        if f'"{_FACTOR}"' in text:
            raise TrainerStateError(
                "this loss contains one that amp.scale_loss has multiplied already, and would be "
                "multiplied twice; scale it once: amp.scale_loss(loss, [trainer_a, trainer_b])"
            )
        if "_CachedOp" in text:
            _refuse_hidden_operators(Graph.from_json(text), seen)
        if not _scale_operators(graph, text, scale):
            seen.remember(graph)


def _recorded_graph(loss: NDArray) -> Optional[Symbol]:
    """Return the graph that autograd has recorded, whose nodes are autograd's own."""
    try:
        return autograd.get_symbol(loss)
    except MXNetError:  # scaled outside of autograd.record, or after its backward pass
        return None


def _named_in(text: str) -> list[str]:
    """Return the operators with a gradient of their own in a graph as JSON, subgraphs included."""
    return sorted(name for name in OWN_GRADIENT if f'"op": "{name}"' in text)


def _scale_operators(graph: Symbol, text: str, scale: float) -> bool:
    """Multiply the ``grad_scale`` of recorded nodes by S; return whether there is any."""
    names = _named_in(text)
    for name in names:
        if name not in HAS_GRAD_SCALE:
            raise PrecisionError(
                f"the loss contains {name}, which makes a gradient of its own that no loss scale "
                f"reaches; {OWN_GRADIENT[name]}, or train without a loss scale: "
                'amp.init_trainer(trainer, "none")'
            )
    if not names:
        return False
    internals = _internals(graph)
    if internals is None:
        raise PrecisionError(
            f"the loss contains {', '.join(names)} and a gradient of a gradient, where no loss "
            "scale reaches it; use a loss of gluon.loss"
        )
    products = {}
    for node in Graph.from_json(text).nodes:
        if node.operator in HAS_GRAD_SCALE:
            original = node.attributes.get(_ORIGINAL, node.attributes.get("grad_scale", "1.0"))
            products[node.name] = product = repr(float(original) * scale)
            recorded = internals[f"{node.name}_output"]
            recorded._set_attr(**{_ORIGINAL: original, "grad_scale": product})
    for node in Graph.read(graph).nodes:
        if node.name in products:
            assert node.attributes["grad_scale"] == products[node.name]
    return True


def _refuse_hidden_operators(graph: Graph, seen: GraphsSeen) -> None:
    """Refuse operators with a gradient of their own in the hybridized blocks of a graph.

    A recorded graph shows a hybridized block as one node, without its operators. Blocks with
    parameters are recognised by their names in the graph, others by the number of their inputs and
    outputs only: where several have the same, the block that has such an operator is refused.
    """
    outputs: dict[Node, int] = {}
    for node in graph.nodes:
        for entry in node.inputs:
            outputs[entry.node] = max(outputs.get(entry.node, 1), entry.number + 1)
    for node in graph.nodes:
        if node.operator != "_CachedOp":
            continue
        inputs = [entry.node.name for entry in node.inputs]
        variables = tuple(name for name in inputs if name.startswith("var"))
        signature = (len(inputs), outputs.get(node, 1), variables)
        if signature in seen.blocks:
            continue
        for block, compiled in _hybridized_blocks():
            if _may_be(block, compiled, *signature):
                _refuse_block(block, compiled)
        seen.blocks.add(signature)


def _hybridized_blocks() -> Iterator[tuple[gluon.HybridBlock, Symbol]]:
    """Yield all that have a graph of their own; nothing leads from a recorded node to its block."""
    for block in living_blocks(gluon.HybridBlock):
        if block._cached_op is not None:
            for graph in block._cached_graph[1:]:  # none if another thread discards it now
                yield block, graph


def _may_be(
    block: gluon.HybridBlock,
    graph: Symbol,
    inputs: int,
    outputs: int,
    variables: tuple[str, ...],
) -> bool:
    """Whether a recorded node with these inputs and so many outputs may be the block's."""
    trained = [p for p in block.collect_params().values() if p._grad is not None]
    if not trained:
        return len(graph.list_inputs()) == inputs and len(graph.list_outputs()) >= outputs
    names = set(variables)
    return any(
        names >= {autograd.get_symbol(weight).name for weight in weights}
        for weights in zip(*(p.list_data() for p in trained))
    )


def _refuse_block(block: gluon.HybridBlock, graph: Symbol) -> None:
    for name in _named_in(graph.tojson(remove_amp_cast=False)):
        raise PrecisionError(
            f"{block.name} ({type(block).__name__}) is hybridized and contains {name}, which makes "
            "a gradient of its own that no loss scale reaches there; call "
            f"{block.name}.hybridize(False), or take {name} out of it into a loss that is not "
            "hybridized, or use a loss of gluon.loss. (If the loss is another block's, call "
            "hybridize(False) on that one: without parameters a recorded graph cannot tell them "
            "apart)"
        )
