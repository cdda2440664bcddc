"""A network's graph as plain data: operators, shapes and formats, with nothing computed.

Gluon calls a HybridBlock with a symbol as well as with an array. What comes out is walked here,
and MXNet infers every shape and format from the shape of the input. No array is made, and the
network is left as it was, whether initialized, hybridized, cast or none of it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Optional, Union

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.base import MXNetError

from mpgluon.cast.arrays import arrays_in
from mpgluon.cast.block import blocks_of

__all__ = ["Graph", "InputShape", "Node", "Value", "trace", "unchanged"]

InputShape = Union[Sequence[int], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Value:
    """What one output of an operator, or a variable, will be.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
        ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int32"`` and so on.
    itemsize : int
        Bytes of one element.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Node:
    """One operator of a graph, or a variable.

    Attributes
    ----------
    operator : str
        MXNet's name, such as ``"Convolution"``; ``"null"`` for a parameter or an input.
    name : str
    layer : str
        The name of the innermost block that it belongs to.
    attributes : dict of str to str
        The operator's options as MXNet writes them.
    inputs : tuple of (int, int)
        The number of a node and which of its outputs.
    outputs : tuple of Value
        Those that other operators can see.
    has_subgraph : bool
        Whether it is control flow, with operators inside that are not listed.
    """

    operator: str
    name: str
    layer: str
    attributes: dict[str, str]
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[Value, ...]
    has_subgraph: bool


@dataclass(frozen=True)
class Graph:
    """The operators of a network, each after those that it depends on."""

    nodes: tuple[Node, ...]

    def value(self, entry: tuple[int, int]) -> Value:
        """Return what an input of a node is."""
        return self.nodes[entry[0]].outputs[entry[1]]

    def shapes(self, node: Node) -> list[tuple[int, ...]]:
        """Return the shapes of the inputs of a node."""
        return [self.value(entry).shape for entry in node.inputs]


@contextmanager
def unchanged(net: gluon.Block) -> Iterator[None]:
    """Undo on leaving whatever is done to the blocks and parameters of a network inside.

    In between, parameters know shapes and formats but have no values, so that a cast moves none.

    Raises
    ------
    TypeError
        If ``net`` is not a ``HybridBlock``: only those can be called without computing.
    """
    if not isinstance(net, gluon.HybridBlock):
        raise TypeError(
            f"only the graph of a HybridBlock can be had without computing, received "
            f"{type(net).__name__}; use nn.HybridSequential in place of nn.Sequential, or write "
            "the block as a HybridBlock with hybrid_forward(F, …)"
        )
    parameters = list(net.collect_params().values())
    saved = [(vars(part), dict(vars(part))) for part in (*blocks_of(net), *parameters)]
    try:
        for parameter in parameters:
            parameter._data = parameter._grad = None
            # A parameter keeps its symbol, and with it the format that it had then.
            parameter._var = None
        yield
    finally:
        for attributes, before in saved:
            attributes.clear()
            attributes.update(before)


def trace(
    net: gluon.HybridBlock, input_shape: InputShape, *, ctx: Optional[mx.Context] = None
) -> Graph:
    """Return the graph that a network computes for FP32 inputs of given shapes.

    Parameters
    ----------
    net : gluon.HybridBlock
        With or without values and shapes of its parameters. It is not changed.
    input_shape : tuple of int, or sequence of such tuples
        Of its input, batch included; of all its inputs in their order.
    ctx : Context, optional
        Whose arithmetic a cast network would use; the current one by default. The device is not
        used and need not exist.

    Raises
    ------
    TypeError
        If ``net`` is not a ``HybridBlock``: only those can be called without computing.
    ValueError
        If ``input_shape`` is not made of positive integers, or does not fit the network.
    """
    shapes = _input_shapes(input_shape)
    names = ["data"] if len(shapes) == 1 else [f"data{i}" for i in range(len(shapes))]
    with unchanged(net), ctx or mx.current_context():
        result = net(*(mx.sym.var(name) for name in names))
    internals = mx.sym.Group(arrays_in((result,))).get_internals()
    described = json.loads(internals.tojson(remove_amp_cast=False))
    outputs = _outputs(internals, dict(zip(names, shapes)))
    values: list[list[Value]] = [[] for _ in described["nodes"]]
    for (node, *_), value in zip(described["heads"], outputs):
        values[node].append(value)
    layers = _Layers(net)
    return Graph(
        tuple(
            Node(
                operator=node["op"],
                name=node["name"],
                layer=layers.of(node["name"]),
                attributes=node.get("attrs", {}),
                inputs=tuple((source, index) for source, index, _ in node["inputs"]),
                outputs=tuple(found),
                has_subgraph="subgraphs" in node,
            )
            for node, found in zip(described["nodes"], values)
        )
    )


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


def _outputs(internals: Any, shapes: dict[str, tuple[int, ...]]) -> list[Value]:
    """Return every output of a graph, in the order of its internals."""
    try:
        with warnings.catch_warnings():  # which it gives for what it returns None for
            warnings.simplefilter("ignore")
            _, found, _ = internals.infer_shape(**shapes)
            _, dtypes, _ = internals.infer_type(**dict.fromkeys(shapes, np.float32))
    except MXNetError as error:
        raise ValueError(
            f"the network does not work on input of shape {_listed(shapes)}: "
            f"{str(error).strip().splitlines()[-1]}"
        ) from error
    if found is None or dtypes is None:
        raise ValueError(
            f"shapes or formats in the network do not follow from input of shape "
            f"{_listed(shapes)}; give its layers their input sizes (in_units, in_channels)"
        )
    return [_value(shape, dtype) for shape, dtype in zip(found, dtypes)]


def _value(shape: tuple[int, ...], dtype: Any) -> Value:
    kind = np.dtype(dtype)
    return Value(shape, kind.names[0] if kind.names else kind.name, kind.itemsize)


def _listed(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes.values()))


class _Layers:
    """Finds the block that an operator belongs to by its name, which begins with the block's."""

    def __init__(self, net: gluon.Block) -> None:
        self._names = {block.prefix: block.name for block in blocks_of(net) if block.prefix}

    def of(self, name: str) -> str:
        fitting = [prefix for prefix in self._names if name.startswith(prefix)]
        return self._names[max(fitting, key=len)] if fitting else name
