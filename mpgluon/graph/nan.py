"""Keeping NaN where MXNet's operators on a CPU return a number for it, and PReLU's gradient.

ReLU and max pooling by oneDNN return 0, or the largest of the other numbers, for NaN, and so hide
an overflow of an earlier layer: in 16 bits, a value too large becomes infinite, a normalization
makes NaN of that, and a ReLU makes 0 of the NaN. In a cast network these operators keep NaN, as
``F.relu`` does; all other numbers have the same bits. Comparisons, selections and masks
(``sign``, ``where``, ``argmax``) may still drop NaN, as in FP32.

Within a graph, the backward pass of MXNet's PReLU writes its input's gradient over the arriving
one and computes the slope's from it. Here other operators compute PReLU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import wraps
from itertools import count
from typing import Any, Callable, Optional

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
    """Make the results and states of a sequence with a NaN (data: (time, batch, channels)) NaN."""
    sequences = F.max(_at(F, operands[0]), axis=(0, 2), keepdims=True)
    results = F.RNN(*operands, **options)
    if not options.get("state_outputs", False):
        return _with(F, results, sequences)
    return [_with(F, results[number], sequences) for number in range(2)]


def _prelu(F: Any, operands: Sequence[Any], options: Mapping[str, Any]) -> Any:  # noqa: N803
    """Return ``relu(x) + slope * min(x, 0)``; the gradient at 0 is the slope's, as MXNet's is."""
    data, slope = operands
    # At every place, whichever shape the slope has. This PReLU's input has no gradient to write.
    negative_slopes = F.LeakyReLU(F.negative(F.ones_like(F.BlockGrad(data))), slope, **options)
    return F.elemwise_sub(F.relu(data), F.elemwise_mul(negative_slopes, F.minimum(data, 0)))


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


def _substitute(
    name: str, options: Mapping[str, Any], device_type: str
) -> Optional[Callable[..., Any]]:
    """Return a function to call in an operator's place; ``None``: the operator itself."""
    if name == "LeakyReLU" and options.get("act_type") == "prelu":
        return _prelu
    drops, composed = _KEEPING[name]
    return composed if device_type == "cpu" and drops(options) else None


def keeping_nan(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator of ``mx.nd`` that keeps NaN; ``function`` itself where nothing drops it.

    Parameters
    ----------
    name : str
        Its name in ``F``.
    function : callable
        Symbols it receives as they are: a graph is rewritten as a whole by :func:`keep_nan_in`. So
        do arrays on other devices than a CPU, except for PReLU.
    """
    if name not in _KEEPING or function is not getattr(mx.nd, name):
        return function

    @wraps(function)
    def operator(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        operands, options = kernels.operands_and_options(function, args, kwargs)
        composed = _substitute(name, options, operands[0].ctx.device_type)
        if composed is None:
            return function(*args, out=out, **kwargs)
        if name == "Pooling" and kernels.available():
            return kernels.invoke(_NATIVE + name, *operands, out=out, **options)
        result = composed(mx.nd, operands, options)
        return result if out is None else result.copyto(out)

    return operator


def keep_nan_in(symbol: Symbol, device_type: str = "cpu") -> Symbol:
    """Return a graph for a kind of device with the same results, whose operators keep NaN there."""
    graph = Graph.read(symbol)
    return Graph(graph.heads).symbol() if _keep_nan_in(graph, device_type) else symbol


def _keep_nan_in(graph: Graph, device_type: str) -> bool:
    """Make operators of a graph and of its loops' bodies keep NaN; return whether there are any."""
    changed = False
    for node in graph.nodes:
        bodies = node.rest.get("subgraphs", ())
        for number, body in enumerate(bodies):
            inner = Graph.from_json(json.dumps(body))
            if _keep_nan_in(inner, device_type):
                text = Graph(inner.heads).symbol().tojson(remove_amp_cast=False)
                bodies[number], changed = json.loads(text), True
        known = node.operator in _KEEPING
        if not known or _substitute(node.operator, node.options, device_type) is None:
            continue
        changed = True
        if kernels.available() and node.operator in _NATIVE_OPERATORS:
            node.operator = _NATIVE + node.operator
        else:
            _compose(graph, node, device_type)
    return changed


def _compose(graph: Graph, node: Node, device_type: str) -> None:
    """Replace a node by operators that keep NaN together."""
    number = next(_NUMBERS)
    names = [f"kept_nan{number}_{position}" for position in range(len(node.inputs))]
    operands = [mx.sym.var(name) for name in names]
    composed = _substitute(node.operator, node.options, device_type)
    assert composed is not None
    with mx.name.Prefix(f"{node.name}_kept_nan{number}_"):
        result = composed(mx.sym, operands, node.options)
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
