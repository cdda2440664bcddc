"""The graph of a network, with shapes and dtypes, and nothing computed.

Gluon calls a HybridBlock with symbols as well as with arrays, and MXNet infers every shape and
dtype from the shape of the input. No array is made, and the network is left as it was, whether
initialized, hybridized, cast or none of these.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional, Union

from mpgluon.base.blocks import blocks_of, forget_symbol
from mpgluon.graph.nodes import Graph

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.base import MXNetError
from mxnet.symbol import Symbol

__all__ = ["InputShape", "symbol_of", "trace", "unchanged"]

_ADVICE = "give a name (inputs) or a shape (input_shapes) for each array that it takes"

InputShape = Union[Sequence[int], Sequence[Sequence[int]]]


@contextmanager
def unchanged(net: gluon.Block) -> Iterator[None]:
    """Undo on leaving whatever was done to the blocks and parameters of a network.

    Inside, parameters have shapes and dtypes but no values, so that a cast converts none.

    Raises
    ------
    TypeError
        If ``net`` is not a ``HybridBlock``: only those can be called with symbols.
    """
    if not isinstance(net, gluon.HybridBlock):
        raise TypeError(
            f"only a HybridBlock has a graph that can be read without computing, received "
            f"{type(net).__name__}; use nn.HybridSequential in place of nn.Sequential, or write "
            "the block as a HybridBlock with hybrid_forward(F, …)"
        )
    parameters = list(net.collect_params().values())
    saved = [(vars(part), dict(vars(part))) for part in (*blocks_of(net), *parameters)]
    try:
        for parameter in parameters:
            parameter._data = parameter._grad = None
            forget_symbol(parameter)
        yield
    finally:
        for attributes, before in saved:
            attributes.clear()
            attributes.update(before)


def symbol_of(net: gluon.HybridBlock, inputs: Sequence[str]) -> Symbol:
    """Return a network's results for variables with these names as one symbol, all in one row.

    Raises
    ------
    TypeError
        If the network does not take so many inputs.
    """
    _check_number(net, inputs)
    variables = [mx.sym.var(name) for name in inputs]
    if mx.util.is_np_array():  # the network computes with MXNet's NumPy interface
        variables = [variable.as_np_ndarray() for variable in variables]
    try:
        result = net(*variables)
    except IndexError as error:  # it takes *inputs, or a list
        raise TypeError(
            f"{type(net).__name__} cannot be called with {', '.join(inputs)}, an array each: "
            f"{error!r}; {_ADVICE}"
        ) from error
    return mx.sym.Group([symbol.as_nd_ndarray() for symbol in _symbols_in(result)])


def _check_number(net: gluon.HybridBlock, inputs: Sequence[str]) -> None:
    """Raise TypeError if a network takes another number of inputs, as far as its code says."""
    kind = type(net)
    if isinstance(net, gluon.SymbolBlock):
        taken = [one.name for one in net._cached_graph[0]] if net._cached_graph else list(inputs)
        fits = len(taken) == len(inputs)
    elif kind.__call__ is gluon.Block.__call__ and kind.forward is gluon.HybridBlock.forward:
        signature = inspect.signature(net.hybrid_forward)
        others = list(signature.parameters.values())[1:]  # without F
        taken = [str(one) for one in others if one.name not in net._reg_params]
        try:
            fits = bool(signature.bind(mx.sym, *inputs, **net._reg_params))
        except TypeError:
            fits = False
    else:
        return
    if not fits:
        raise TypeError(
            f"{kind.__name__} takes the inputs {', '.join(taken)}, received {len(inputs)} "
            f"({', '.join(inputs)}); {_ADVICE}"
        )


def trace(
    net: gluon.HybridBlock,
    input_shape: InputShape,
    *,
    ctx: Optional[mx.Context] = None,
) -> Graph:
    """Return the graph that a network computes for FP32 inputs of given shapes.

    Parameters
    ----------
    net : gluon.HybridBlock
        With or without values and shapes of its parameters. It is not changed.
    input_shape : tuple of int, or sequence of such tuples
        Shape of its input, batch included; or of all its inputs in their order.
    ctx : Context, optional
        The device whose arithmetic a cast network would use; the current one by default. It is not
        used and need not exist.

    Returns
    -------
    Graph
        Its nodes have ``outputs`` with dtype and shape, and ``layer``.

    Raises
    ------
    TypeError
        If ``net`` is not a ``HybridBlock``: only those can be called with symbols; or takes another
        number of inputs.
    ValueError
        If ``input_shape`` is not made of positive integers, or does not fit the network.
    """
    shapes = _input_shapes(input_shape)
    names = ["data"] if len(shapes) == 1 else [f"data{i}" for i in range(len(shapes))]
    with unchanged(net), ctx or mx.current_context():
        symbol = symbol_of(net, names)
    graph = Graph.read(symbol)
    listed = ", ".join(map(str, shapes))
    try:
        complete = graph.infer(dict.fromkeys(names, "float32"), dict(zip(names, shapes)))
    except MXNetError as error:
        raise ValueError(
            f"the network does not work on input of shape {listed}: "
            f"{str(error).strip().splitlines()[-1]}"
        ) from error
    if not complete:
        raise ValueError(
            f"shapes or dtypes in the network do not follow from input of shape {listed}; give its "
            "layers their input sizes (in_units, in_channels)"
        )
    # The name of an operator begins with the prefix of its block.
    layers = {block.prefix: block.name for block in blocks_of(net) if block.prefix}
    for node in graph.nodes:
        fitting = [prefix for prefix in layers if node.name.startswith(prefix)]
        node.layer = layers[max(fitting, key=len)] if fitting else node.name
    return graph


def _symbols_in(result: Any) -> Iterator[Symbol]:
    if isinstance(result, Symbol):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _symbols_in(item)


def _input_shapes(input_shape: InputShape) -> list[tuple[int, ...]]:
    parts: list[Any] = list(input_shape) if isinstance(input_shape, (tuple, list)) else []
    several = [tuple(p) if isinstance(p, (tuple, list)) else None for p in parts]
    shapes = [tuple(parts)] if parts and not any(several) else several
    for shape in shapes:
        if not shape or not all(isinstance(s, (int, np.integer)) and s > 0 for s in shape):
            shapes = []
    if not shapes:
        raise ValueError(
            "input_shape is a tuple of positive integers with the batch, such as "
            f"(32, 3, 224, 224), or a list of such tuples; received {input_shape!r}"
        )
    return [tuple(int(size) for size in shape or ()) for shape in shapes]
