"""Keeping NaN where MXNet's operators on a CPU return a number for it.

ReLU and max pooling by oneDNN return 0, or the largest of the other numbers, for NaN, and so hide
an overflow of an earlier layer: in 16 bits, a value too large becomes infinite, a normalization
makes NaN of that, and a ReLU makes 0 of the NaN. In a cast network these operators keep NaN, as
``F.relu`` does; all other numbers have the same bits. What is compared, selected or masked
(``sign``, ``where``, ``argmax``) may still drop NaN, as in FP32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from itertools import count
from typing import Any, Callable

from mpgluon import kernels
from mpgluon.graph.nodes import Entry, Graph, Node

import mxnet as mx
from mxnet.symbol import Symbol

__all__ = ["KEPT_NAN", "keep_nan_in", "keeping_nan"]

_NATIVE = "_mpgluon_keep_nan_"
_NATIVE_OPERATORS = ("Activation", "Pooling")
_NUMBERS = count()


def _at(F: Any, array: Any) -> Any:  # noqa: N803 - Gluon's name
    """Return 1 where an array is NaN and 0 elsewhere, without a gradient."""
    array = F.BlockGrad(array)
    return F.broadcast_not_equal(array, array)


def _with(F: Any, result: Any, places: Any) -> Any:  # noqa: N803 - Gluon's name
    """Return a result, with NaN where ``places`` is positive; the square root of -0 is -0."""
    return F.broadcast_add(result, F.BlockGrad(F.sqrt(F.negative(places))))


def _relu(F: Any, operands: Sequence[Any], _: Mapping[str, Any]) -> Any:  # noqa: N803
    return F.relu(operands[0])


def _leaky(F: Any, operands: Sequence[Any], options: Mapping[str, Any]) -> Any:  # noqa: N803
    return _with(F, F.LeakyReLU(*operands, **options), _at(F, operands[0]))


def _pooling(F: Any, operands: Sequence[Any], options: Mapping[str, Any]) -> Any:  # noqa: N803
    result = F.Pooling(*operands, **options)
    return _with(F, result, F.Pooling(_at(F, operands[0]), **options))


def _regions(F: Any, operands: Sequence[Any], options: Mapping[str, Any]) -> Any:  # noqa: N803
    data, regions = operands
    result = F.ROIPooling(data, regions, **options)
    return _with(F, result, F.ROIPooling(_at(F, data), F.BlockGrad(regions), **options))


def _recurrent(F: Any, operands: Sequence[Any], options: Mapping[str, Any]) -> Any:  # noqa: N803
    """Let a sequence with a NaN (data: (time, batch, channels)) have NaN results and states."""
    sequences = F.max(_at(F, operands[0]), axis=(0, 2), keepdims=True)
    results = F.RNN(*operands, **options)
    if not options.get("state_outputs", False):
        return _with(F, results, sequences)
    return [_with(F, results[number], sequences) for number in range(2)]


# The operators, when they drop NaN, and what keeps it.
_KEEPING: dict[str, tuple[Callable[[Mapping[str, Any]], bool], Callable[..., Any]]] = {
    "Activation": (lambda options: options.get("act_type") == "relu", _relu),
    "LeakyReLU": (
        lambda options: options.get("act_type", "leaky") == "leaky" and not options.get("slope", 1),
        _leaky,
    ),
    "Pooling": (lambda options: options.get("pool_type", "max") == "max", _pooling),
    "ROIPooling": (lambda _: True, _regions),
    "RNN": (lambda options: options.get("mode") == "rnn_relu", _recurrent),
}

KEPT_NAN = frozenset(_KEEPING)
"""Names of the operators that return a number for NaN, with some options at least."""


def keeping_nan(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator of ``mx.nd`` that keeps NaN; ``function`` itself where nothing drops it.

    Parameters
    ----------
    name : str
        Its name in ``F``.
    function : callable
        Arrays on other devices than a CPU, and symbols, it receives as they are: a graph is
        rewritten as a whole by :func:`keep_nan_in`.
    """
    if name not in _KEEPING or function is not getattr(mx.nd, name):
        return function
    drops, composed = _KEEPING[name]

    @wraps(function)
    def operator(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        operands, options = kernels.operands_and_options(function, args, kwargs)
        if not drops(options) or operands[0].ctx.device_type != "cpu":
            return function(*args, out=out, **kwargs)
        if name == "Pooling" and kernels.available():
            return kernels.invoke(_NATIVE + name, *operands, out=out, **options)
        result = composed(mx.nd, operands, options)
        return result if out is None else result.copyto(out)

    return operator


def keep_nan_in(symbol: Symbol) -> Symbol:
    """Return a graph for a CPU with the same results, except that its operators keep NaN.

    In the body of a loop, without native operators, only ReLU does.
    """
    graph = Graph.read(symbol)
    changed = False
    for node in graph.nodes:
        for body in node.rest.get("subgraphs", ()):
            changed |= _rename_in(body)
        if node.operator not in _KEEPING or not _KEEPING[node.operator][0](node.options):
            continue
        changed = True
        if kernels.available() and node.operator in _NATIVE_OPERATORS:
            node.operator = _NATIVE + node.operator
        else:
            _compose(graph, node)
    return Graph(graph.heads).symbol() if changed else symbol


def _rename_in(graph: dict[str, Any]) -> bool:
    """Let the operators of a loop's body, as MXNet's JSON has it, keep NaN; return whether any."""
    changed = False
    for record in graph["nodes"]:
        for body in record.get("subgraphs", ()):
            changed |= _rename_in(body)
        name, options = record["op"], record.get("attrs", {})
        if name not in _KEEPING or not _KEEPING[name][0](options):
            continue
        if kernels.available() and name in _NATIVE_OPERATORS:
            record["op"], changed = _NATIVE + name, True
        elif name == "Activation":
            record["op"], changed = "relu", True
            del options["act_type"]
    return changed


def _compose(graph: Graph, node: Node) -> None:
    """Replace a node by operators that keep NaN together."""
    number = next(_NUMBERS)
    names = [f"kept_nan{number}_{position}" for position in range(len(node.inputs))]
    operands = [mx.sym.var(name) for name in names]
    with mx.name.Prefix(f"{node.name}_kept_nan{number}_"):
        result = _KEEPING[node.operator][1](mx.sym, operands, node.options)
    result = mx.sym.Group(result) if isinstance(result, list) else result
    entries = dict(zip(names, node.inputs))
    inner = Graph.read(result)

    def outer(entry: Entry) -> Entry:
        return entries.get(entry.node.name, entry) if entry.node.is_variable else entry

    for one in inner.nodes:
        one.inputs = [outer(entry) for entry in one.inputs]
    new = {(node, position): head for position, head in enumerate(inner.heads)}
    for other in graph.nodes:
        other.inputs = [new.get(entry.key, entry) for entry in other.inputs]
    graph.heads = [new.get(entry.key, entry) for entry in graph.heads]
