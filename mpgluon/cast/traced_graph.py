"""The graph of a hybridized cast block: traced for the formats of its inputs, and run.

Gluon traces a block once. Which operators a cast block's graph has depends on the formats of the
arrays that come in, so it is traced again when those change.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from threading import RLock
from typing import Any, Callable, Optional, Protocol

from mpgluon import kernels
from mpgluon.base.blocks import blocks_of
from mpgluon.base.threads import release_threads
from mpgluon.cast import fp32
from mpgluon.cast.arithmetic import Arithmetic, Emulated, NativeBfloat16
from mpgluon.cast.arrays import Format, arrays_in, convert_arrays, format_of, mark, narrow_again
from mpgluon.cast.calls import is_inside, ungoverned
from mpgluon.cast.frozen import attach_gradients
from mpgluon.cast.network_cast import NetworkCast
from mpgluon.cast.numpy_arrays import as_nd, as_np, is_numpy
from mpgluon.cast.status_flags import at_layer
from mpgluon.cast.sums import SumsOfOneShape
from mpgluon.graph.nan import keep_nan_in
from mpgluon.graph.nodes import Entry, Graph, Node
from mpgluon.kernels.dtypes import dtype_name

import mxnet as mx
from mxnet import gluon
from mxnet.base import MXNetError
from mxnet.symbol import Symbol

__all__ = ["TRACING", "ForwardMethod", "TracedGraph", "compile_graph"]


# Gluon's name scopes, a block's graph and MXNet's CachedOp are not thread-safe. A call only queues
# its operators, so the lock is held briefly.
TRACING = RLock()


class ForwardMethod(Protocol):
    """The members of a cast block's forward method, a ``PolicyForward``, that its graph uses."""

    block: gluon.HybridBlock
    network_cast: NetworkCast
    kept: bool

    def arithmetic_on(self, device_type: str) -> Arithmetic:
        """Return the arithmetic of the block's operators on such devices."""

    def leaving(self, result: Any) -> Any:
        """Return results of a part of the network as code outside receives them."""

    def explain(self, error: MXNetError, args: tuple[Any, ...]) -> None:
        """Raise our own error in place of MXNet's if it is about formats."""


class TracedGraph:
    """The graph that a cast block has of its own when it is hybridized.

    Parameters
    ----------
    forward : ForwardMethod
        The forward method of the block.

    Attributes
    ----------
    is_traced_now : bool
        Whether the block is called with symbols, to trace this graph.
    """

    def __init__(self, forward: ForwardMethod) -> None:
        self._forward = forward
        self.is_traced_now = False
        # Formats of the inputs for which the graph was traced, while there is one.
        self._formats: Optional[list[Optional[Format]]] = None
        self._output_formats: list[Optional[Format]] = []
        self._blocks: list[gluon.Block] = []  # in the graph, with matrices of their own
        self._frozen_matrices: list[gluon.Parameter] = []  # of those, with a gradient nevertheless
        self._sums = SumsOfOneShape()

    def __getstate__(self) -> ForwardMethod:
        """Return the state for a copy, which has no graph yet."""
        return self._forward

    def __setstate__(self, forward: ForwardMethod) -> None:
        """Become a copy."""
        TracedGraph.__init__(self, forward)

    @property
    def _block(self) -> gluon.HybridBlock:
        return self._forward.block

    def run(self, *args: Any) -> Any:
        """Compute with the graph, traced for the formats of ``args``."""
        forward, network_cast = self._forward, self._forward.network_cast
        is_part = self._block is not network_cast.root and not is_inside()
        try:
            with at_layer(network_cast.layers.slot_of(self._block)):
                args = convert_arrays(as_nd(args), narrow_again)
                args = as_np(args) if network_cast.in_numpy else args
                release_threads()
                with TRACING, ungoverned():
                    output_formats = self._prepare(args)
                    result = as_nd(type(self._block)._call_cached_op(self._block, *args))
                # Its outputs are new objects, which may change their class.
                result = convert_arrays(result, lambda array: mark(array, next(output_formats)))
                result = forward.leaving(result) if is_part else result
            return as_np(result) if network_cast.in_numpy else result
        except MXNetError as error:
            forward.explain(error, args)
            raise

    def trace_inputs(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs as symbols that know their formats, and options of `governed`."""
        formats = iter(self._formats or ())
        marked = convert_arrays(inputs, lambda symbol: mark(symbol, next(formats, None)))
        self._sums.names = names = [symbol.name for symbol in arrays_in(marked)]
        about = {
            "input_formats": dict(zip(names, self._formats or ())),
            "have_one_shape": self._sums.note,
            "axes_of": self._sums.axes,
        }
        return marked, about

    def note_outputs(self, result: Any) -> None:
        """Record the formats of the block's results, with which arrays will leave the graph."""
        # One Symbol may be all results of an operator, as MultiBoxTarget's is.
        symbols = arrays_in(result)
        self._output_formats = [format_of(one) for one in symbols for _ in one.list_outputs()]

    def _prepare(self, args: tuple[Any, ...]) -> Iterator[Optional[Format]]:
        """Trace the block's own graph if necessary, and return the formats of its results."""
        arrays = arrays_in(args)
        formats = [format_of(array) for array in arrays]
        thawed = any(parameter.grad_req != "null" for parameter in self._frozen_matrices)
        fits = self._sums.fit(arrays)
        # A static graph would continue to write the unused gradient.
        if formats != self._formats or thawed or not fits:
            self._block._clear_cached_op()
            self._formats = formats
        if self._block._cached_op is None:
            self._sums.begin(arrays)
            self.is_traced_now = True
            try:
                self._build(args)
            finally:
                self.is_traced_now = False
        self._frozen_matrices = attach_gradients(self._blocks)
        return iter(self._output_formats)

    def _build(self, args: tuple[Any, ...]) -> None:
        """Build the block's own graph; on a CPU a faster one with the same bits that keeps NaN."""
        from mpgluon.graph.any_layout import compute_between_convolutions  # for hybridized networks

        block, device_type = self._block, arrays_in(args)[0].ctx.device_type
        on_cpu = device_type == "cpu"
        if on_cpu:  # the network may have been on another device when it was cast
            kernels.load()
        used = set(type(block)._get_graph(block, *args)[1].list_inputs())
        if any(p._deferred_init and p.name in used for p in block.collect_params().values()):
            block._deferred_infer_shape(*args)  # how a graph is rewritten depends on shapes
        rewrite = self._rewrite_for(device_type)
        self._blocks = [
            inner
            for inner in blocks_of(block)
            if any(len(parameter.shape or ()) == 2 for parameter in inner._reg_params.values())
        ]

        def rewritten(*args: Any) -> tuple[list[Symbol], Symbol]:
            data, graph = type(block)._get_graph(block, *args)
            in_numpy = is_numpy(graph)
            graph = _without_inputs_as_results(graph.as_nd_ndarray())
            formats = iter(self._formats or ())
            dtypes: dict[str, Format] = {symbol.name: next(formats) or "" for symbol in data}
            dtypes |= {p.name: str(dtype_name(p)) for p in block.collect_params().values()}
            graph = graph if rewrite is None else rewrite(graph, dtypes)
            falls_back = rewrite is not None and not kernels.available()
            if falls_back and Graph.read(graph).adds_gradients_in_place():
                # With static_alloc, MXNet loses gradients of casts that it adds in place.
                block._flags = [flag for flag in flags if not flag[0].startswith("static")]
            elif any(node.has_subgraph for node in Graph.read(graph).nodes):
                # With static_shape, operators behind a loop, such as casts, read other values.
                block._flags = [flag for flag in flags if flag[0] != "static_shape"]
            # A backend fuses operators that it knows by name, as oneDNN a ReLU into a convolution.
            if not block._backend:
                graph = keep_nan_in(graph, device_type)
                if on_cpu:
                    graph = compute_between_convolutions(graph)
            if dict(block._flags).get("static_alloc"):
                graph = _without_variables_as_addends(graph)
            return data, graph.as_np_ndarray() if in_numpy else graph

        flags = block._flags
        try:
            compile_graph(block, rewritten, args)
        finally:
            block._flags = flags

    def _rewrite_for(
        self, device_type: str
    ) -> Optional[Callable[[Symbol, dict[str, Format]], Symbol]]:
        """Return a function that rewrites a traced graph for faster arithmetic, or ``None``."""
        from mpgluon.graph.bfloat16 import compute_natively  # for hybridized networks
        from mpgluon.graph.grid import hold_on_grid

        arithmetic, kept = self._forward.arithmetic_on(device_type), self._forward.kept
        parameters = self._block.collect_params().values()
        if isinstance(arithmetic, Emulated) and arithmetic.kind == "emulated":
            if kept and arithmetic.format not in (self._formats or ()):
                return None
            return partial(
                hold_on_grid,
                fmt=arithmetic.format,
                rounded={p.name for p in parameters if fp32.is_rounded(p)},
                with_kernels=kernels.available(),
                slot_of=self._forward.network_cast.layers.slot_by_name(blocks_of(self._block)),
            )
        if isinstance(arithmetic, NativeBfloat16) and not kept and kernels.available():
            return partial(
                compute_natively,
                shapes={p.name: p.shape or () for p in parameters},
                for_backend=self._block._backend is not None,
            )
        return None


def compile_graph(
    block: gluon.HybridBlock,
    get_graph: Callable[..., tuple[list[Symbol], Symbol]],
    args: tuple[Any, ...],
) -> None:
    """Make Gluon compile the graph of a block that a function returns."""
    block._get_graph = get_graph
    try:
        type(block)._build_cache(block, *args)
    finally:
        del block._get_graph


def _without_inputs_as_results(graph: Symbol) -> Symbol:
    """Return a graph each of whose results is an operator's.

    The backward pass of one that returns an input fails in MXNet, or gives it no gradient.
    """
    results = list(graph)
    if all(result.get_children() is not None for result in results):
        return graph
    return mx.sym.Group(
        [
            result if result.get_children() is not None else mx.sym.identity(result)
            for result in results
        ]
    )


def _without_variables_as_addends(symbol: Symbol) -> Symbol:
    """Return a graph whose sums take copies of variables that nothing else uses.

    If such a variable, a mask as a rule, has no gradient, MXNet's backward pass with static_alloc
    reads the other addend's gradient from memory that holds something else.
    """
    graph = Graph.read(symbol)
    uses = graph.uses()
    for node in graph.nodes:
        if node.operator == "elemwise_add":
            for place, one in enumerate(node.inputs):
                if one.node.is_variable and uses[one.key] == 1:
                    copy = Node("_copy", f"{node.name}_addend{place}", inputs=[one])
                    node.inputs[place] = Entry(copy)
    return Graph(graph.heads).symbol()
