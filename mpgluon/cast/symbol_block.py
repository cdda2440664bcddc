"""Imported graphs: calling a SymbolBlock's operators one by one, as a ``hybrid_forward`` would.

Gluon composes such a graph as a whole, without an ``F`` that could be replaced. While it is cast,
the block computes like a HybridBlock whose ``hybrid_forward`` calls the graph's operators.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mxnet as mx
from mxnet import gluon
from mxnet.symbol import Symbol

from mpgluon.errors import PrecisionError
from mpgluon.graph.nodes import Key, Node, options_of, read_graph

__all__ = ["ImportedGraph", "operator_named"]

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
        If an operator holds a graph of its own, as control flow does, or the graph casts to 16 bits
        itself.
    """

    def __init__(self, block: gluon.SymbolBlock) -> None:
        self.block = block
        self.original = block._cached_graph
        inputs, symbol = self.original
        self.inputs = [one.name for one in inputs]
        self.nodes, self.heads = read_graph(symbol)
        narrow = [node for node in self.nodes if node.attrs.get("dtype") in _NARROW]
        if narrow:
            raise PrecisionError(
                f"{block.name} is an imported graph with casts to {narrow[0].attrs['dtype']} of "
                f"its own ({narrow[0].name}): it computes in 16 bits as it is. Keep it so with "
                "keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, that_block), or import a graph in FP32"
            )
        nested = [node for node in self.nodes if "subgraphs" in node.rest]
        if nested:
            raise PrecisionError(
                f"{block.name} is an imported graph with control flow ({nested[0].op} "
                f"{nested[0].name}), whose body a cast cannot reach. Keep it in FP32 with "
                "keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, that_block), or build the network from "
                "layers"
            )

    def normalization_parameters(self) -> set[gluon.Parameter]:
        """Return the parameters and statistics of normalization operators."""
        names = {
            node.inputs[position].node.name
            for node in self.nodes
            for position in _NORMALIZATIONS.get(node.op, ())
            if position < len(node.inputs)
        }
        return {p for p in self.block.collect_params().values() if p.name in names}

    def attach(self) -> None:
        """Let the block trace its graph as a HybridBlock does."""
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
        given = dict(zip(self.inputs, inputs))
        names = {key: parameter.name for key, parameter in self.block._reg_params.items()}
        given |= {names[key]: value for key, value in parameters.items()}
        found: dict[Key, Any] = {}
        for node in self.nodes:
            results = [given[node.name]] if node.op == "null" else self._call(F, node, found)
            found.update({(node, number): one for number, one in enumerate(results)})
        outputs = [found[entry.key] for entry in self.heads]
        return outputs[0] if len(outputs) == 1 else outputs

    @staticmethod
    def _call(F: Any, node: Node, found: dict[Key, Any]) -> list[Any]:  # noqa: N803
        operands = [found[entry.key] for entry in node.inputs]
        function = operator_named(F, node.op)
        result = function(*operands, name=node.name, **options_of(node.attrs))
        if isinstance(result, Symbol) and len(result) > 1:
            return [result[number] for number in range(len(result))]
        return list(result) if isinstance(result, (list, tuple)) else [result]


def _forward(block: gluon.SymbolBlock, x: Any, *args: Any) -> Any:
    """Run the block's graph on arrays, as a SymbolBlock does hybridized or not."""
    if isinstance(x, mx.nd.NDArray):
        with x.ctx:
            return block._call_cached_op(x, *args)
    return gluon.HybridBlock.forward(block, x, *args)


def operator_named(F: Any, name: str) -> Any:  # noqa: N803 - Gluon's name
    """Return the function that calls an operator, which ``F`` keeps in several places."""
    for part in ("contrib", "linalg"):
        if name.startswith(f"_{part}_"):
            return getattr(getattr(F, part), name.removeprefix(f"_{part}_"))
    return getattr(F._internal if name.startswith("_") else F, name)
