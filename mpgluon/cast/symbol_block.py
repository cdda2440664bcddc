"""Imported graphs: calling a SymbolBlock's operators one by one, as a ``hybrid_forward`` would.

Gluon composes such a graph as a whole, without an ``F`` that could be replaced. While it is cast,
the block computes like a HybridBlock whose ``hybrid_forward`` calls the graph's operators.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mpgluon.cast.given import product_weights
from mpgluon.errors import PrecisionError
from mpgluon.graph.nodes import Graph, Node
from mpgluon.graph.replay import replay

import mxnet as mx
from mxnet import gluon

__all__ = ["ImportedGraph"]

# The positions of the operands that are parameters or statistics.
_NORMALIZATIONS = {
    "BatchNorm": range(1, 5),
    "_contrib_SyncBatchNorm": range(1, 5),
    "LayerNorm": range(1, 3),
    "GroupNorm": range(1, 3),
    "InstanceNorm": range(1, 3),
}


_NARROW = ("float16", "bfloat16")


class ImportedGraph:
    """The graph of a SymbolBlock, and the methods that the block has while it is cast.

    Parameters
    ----------
    block : gluon.SymbolBlock

    Raises
    ------
    PrecisionError
        If an operator holds a graph of its own, as control flow and the operators of a quantized
        network do, or asks for 16 bits itself.
    """

    def __init__(self, block: gluon.SymbolBlock) -> None:
        self.block = block
        self.original = block._cached_graph
        inputs, symbol = self.original
        self.inputs = [one.name for one in inputs]
        self.graph = Graph.read(symbol)
        nodes = self.graph.nodes
        narrow = next((one for one in nodes if one.attributes.get("dtype") in _NARROW), None)
        if narrow:
            raise PrecisionError(
                f"{block.name} is an imported graph with an operator that asks for "
                f"{narrow.attributes['dtype']} itself ({narrow.operator} {narrow.name}): it "
                "computes in 16 bits as it is. Keep it so with keep_fp32=[that_block], or import "
                "a graph in FP32"
            )
        nested = next((one for one in nodes if one.has_subgraph), None)
        if nested:
            what, instead = nested.kind_of_subgraph
            raise PrecisionError(
                f"{block.name} is an imported graph with {what} ({nested.operator} "
                f"{nested.name}), whose inside a cast cannot reach. Keep it as it is with "
                f"keep_fp32=[that_block], or cast {instead}"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which reads the graph again."""
        return {name: value for name, value in vars(self).items() if name != "graph"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy."""
        vars(self).update(state)
        self.graph = Graph.read(self.original[1])

    @property
    def normalizations(self) -> list[Node]:
        """The normalization operators."""
        return [node for node in self.graph.nodes if node.operator in _NORMALIZATIONS]

    def normalization_parameters(self) -> set[gluon.Parameter]:
        """Return the parameters and statistics of normalization operators."""
        names = {
            node.inputs[position].node.name
            for node in self.normalizations
            for position in _NORMALIZATIONS[node.operator]
            if position < len(node.inputs)
        }
        return {p for p in self.block.collect_params().values() if p.name in names}

    def product_weights(self) -> set[gluon.Parameter]:
        """Return the parameters that products alone read."""
        names = product_weights(self.graph)
        return {p for p in self.block.collect_params().values() if p.name in names}

    def attach(self) -> None:
        """Make the block trace its graph as a HybridBlock does."""
        block = self.block
        block.hybrid_forward = self.hybrid_forward
        block.forward = partial(_forward, block)
        block._clear_cached_op = partial(gluon.HybridBlock._clear_cached_op, block)
        block._clear_cached_op()

    def detach(self) -> None:
        """Give the block its own graph and methods back."""
        block = self.block
        for name in ("hybrid_forward", "forward", "_clear_cached_op"):
            vars(block).pop(name, None)
        block._clear_cached_op()
        block._cached_graph = self.original

    def hybrid_forward(self, F: Any, *inputs: Any, **parameters: Any) -> Any:  # noqa: N803
        """Call the graph's operators.

        Parameters
        ----------
        F : module
            ``mx.sym`` or a stand-in for it.
        inputs : Symbol
        parameters : Symbol
            By the names under which the block keeps them.
        """
        variables = dict(zip(self.inputs, inputs))
        names = {key: parameter.name for key, parameter in self.block._reg_params.items()}
        variables |= {names[key]: value for key, value in parameters.items()}
        values = replay(self.graph, F, variables, shapes=self._shapes_made(variables))
        outputs = [values[entry.key] for entry in self.graph.heads]
        return outputs[0] if len(outputs) == 1 else outputs

    def _shapes_made(self, variables: dict[str, Any]) -> dict[Node, tuple[int, ...]]:
        """Return the shapes of arrays that the graph makes and whose sizes follow from its inputs.

        Their operators have a 0 for such a size, as in a recurrent layer's first states. A Symbol
        is made with it.
        """
        makers = [
            node
            for node in self.graph.nodes
            if not (node.is_variable or node.inputs) and "0" in node.attributes.get("shape", "")
        ]
        if not makers or not all(isinstance(one, mx.nd.NDArray) for one in variables.values()):
            return {}
        results = self.original[1].get_internals()
        _, shapes, _ = results.infer_shape(**{name: one.shape for name, one in variables.items()})
        of = dict(zip(results.list_outputs(), shapes))
        return {node: of[f"{node.name}_output"] for node in makers}


def _forward(block: gluon.SymbolBlock, x: Any, *args: Any) -> Any:
    """Run the block's graph on arrays, as a SymbolBlock does hybridized or not."""
    if isinstance(x, mx.nd.NDArray):
        with x.ctx:
            return block._call_cached_op(x, *args)
    return gluon.HybridBlock.forward(block, x, *args)
