"""The graph of a hybridized FP32 block that has own operators, with the bits of MXNet's slow ones.

It is for a CPU. Gluon exports its own graph, without them, and a copy of the block is a plain one.
"""

from __future__ import annotations

from typing import Any

from mpgluon.base.blocks import blocks_of
from mpgluon.base.threads import release_threads
from mpgluon.cast.forward import forward_of
from mpgluon.cast.numpy_arrays import is_numpy
from mpgluon.cast.traced_graph import TRACING, compile_graph
from mpgluon.graph.any_layout import compute_between_convolutions

import mxnet as mx
from mxnet import gluon

__all__ = ["PlainGraph", "use_own_operators"]

_ATTRIBUTES = ("mpgluon_graph", "_call_cached_op", "__reduce_ex__")  # of the block


def use_own_operators(net: gluon.Block) -> None:
    """Give the blocks of a network own operators for when they are hybridized, on a CPU.

    Blocks that are cast stay as they are.
    """
    for block in blocks_of(net):
        is_plain = isinstance(block, gluon.HybridBlock) and forward_of(block) is None
        if is_plain and "mpgluon_graph" not in vars(block):
            PlainGraph(block)


class PlainGraph:
    """The graph of a plain block, run in the place of Gluon's.

    Parameters
    ----------
    block : HybridBlock
        Its call of a graph is replaced on the instance at once, until :meth:`detach`.
    """

    def __init__(self, block: gluon.HybridBlock) -> None:
        self._block = block
        self._compiled: Any = None  # with own operators, which no other device has
        methods = (self, self._run, self._reduce)
        vars(block).update(zip(_ATTRIBUTES, methods))
        if not block._backend:
            block._cached_op = None  # it is compiled again, from the same graph

    def detach(self) -> None:
        """Give the block its own methods back."""
        self._discard()
        for name in _ATTRIBUTES:
            vars(self._block).pop(name, None)

    def _run(self, *args: Any) -> Any:
        block, on_cpu = self._block, mx.current_context().device_type == "cpu"  # the inputs'
        if not on_cpu:
            self._discard()
        elif block._cached_op is None and not block._backend:  # which knows MXNet's operators
            with TRACING:
                self._build(args)
        release_threads()
        return type(block)._call_cached_op(block, *args)

    def _build(self, args: tuple[Any, ...]) -> None:
        data, graph = type(self._block)._get_graph(self._block, *args)
        faster = compute_between_convolutions(graph.as_nd_ndarray())
        faster = faster.as_np_ndarray() if is_numpy(graph) else faster
        compile_graph(self._block, lambda *_: (data, faster), args)
        self._compiled = self._block._cached_op

    def _discard(self) -> None:
        if self._block._cached_op is self._compiled:
            self._block._cached_op = None

    def _reduce(self, protocol: int) -> tuple[Any, ...]:
        """Return the values that Python's protocol for copies asks for, without own attributes."""
        kind: Any = type(self._block)
        return tuple(
            {name: part[name] for name in part if name not in _ATTRIBUTES}
            if isinstance(part, dict)
            else part
            for part in kind.__reduce_ex__(self._block, protocol)
        )
