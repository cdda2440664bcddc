"""One operator with its operands, and the ONNX model that its nodes are added to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

from mpgluon_tools.leaving.refusal import require

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = [
    "TYPES",
    "Nodes",
    "Operand",
    "OperatorCall",
    "Translation",
]

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bool": TensorProto.BOOL,
         "int8": TensorProto.INT8, "uint8": TensorProto.UINT8}  # fmt: skip

Operand = Union[str, int, float, Sequence[int], npt.NDArray[Any]]


class Nodes:
    """The nodes and constants of an ONNX model, as they are added.

    ``sources`` has the name and axis of an input for each open size, as its sizes in two examples.
    """

    def __init__(
        self, sources: dict[tuple[int, int], tuple[str, int]], *, batch_is_fixed: bool
    ) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.sources, self.batch_is_fixed = sources, batch_is_fixed

    def add(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Add a node with one output, and return its name."""
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def constant(self, name: str, values: Any, dtype: str) -> str:
        """Add a constant, rounded to ``dtype``, and return its name."""
        self.constants[name] = numpy_helper.from_array(np.asarray(values).astype(dtype), name)
        return name


@dataclass(frozen=True)
class OperatorCall:
    """One operator with its operands, and the model that its nodes are added to.

    Operands of a new node are names, or values that become constants: integers of int64, other
    numbers and arrays of the operator's format.
    """

    model: Nodes
    name: str  # of the output
    options: dict[str, Any]  # as Python values
    inputs: list[str]  # names of the operands in ONNX
    shapes: list[tuple[int, ...]]  # of the operands in the example
    larger_shapes: list[tuple[int, ...]]  # of the operands in a larger example
    output_shape: tuple[int, ...]
    larger_shape: tuple[int, ...]  # of the output in the larger example: other sizes are open
    values: list[Optional[npt.NDArray[np.float32]]]  # of the operands that are parameters
    dtype: str  # of the operands: "float32" or "float16"
    in_mxnet: tuple[str, ...] = ("float32",)  # MXNet's formats of the result and the operands
    integer: bool = False  # whether MXNet's result has integers or truth values

    @property
    def rank(self) -> int:
        """The number of axes of the first operand."""
        return len(self.shapes[0])

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option; MXNet writes some defaults as None."""
        value = self.options.get(name)
        return default if value in (None, "None") else value

    def number(self, option: str, default: float = 0) -> float:
        """Return a number; MXNet cuts off its fraction among integers, and ONNX does not."""
        value = float(self.option(option, default))
        require(not self.integer or value.is_integer(), f"{option}={value} among integers")
        return value

    def axis(self, option: str = "axis", default: int = 0, more: int = 0) -> int:
        """Return an axis, counted from the first, of an array with so many more axes."""
        return int(self.option(option, default)) % (self.rank + more)

    def axes(self, option: str, default: Sequence[int]) -> list[int]:
        """Return axes, counted from the first; none means the default."""
        axes = self.option(option)
        axes = [axes] if isinstance(axes, int) else axes or default
        return sorted(axis % self.rank for axis in axes)

    def node(self, operator: str, *operands: Operand, **attributes: Any) -> str:
        """Add the node of the result, by default of all operands, and return its name."""
        inputs = [self._named(one) for one in operands or self.inputs]
        return self.model.add(operator, inputs, self.name, **attributes)

    def step(self, operator: str, *operands: Operand, **attributes: Any) -> str:
        """Add a node of an intermediate result, and return its name."""
        return self.several(operator, 1, *operands, **attributes)[0]

    def several(self, operator: str, count: int, *operands: Operand, **more: Any) -> list[str]:
        """Add a node with several results, and return their names."""
        inputs = [self._named(one) for one in operands]
        name = f"{self.name}_{len(self.model.nodes)}"
        names = [f"{name}_{operator}{place}" for place in range(count)]
        self.model.nodes.append(helper.make_node(operator, inputs, names, name=name, **more))
        return names

    def _named(self, operand: Operand) -> str:
        if isinstance(operand, str):
            return operand
        values = np.array(operand)
        dtype = "int64" if values.dtype.kind == "i" or values.size == 0 else self.dtype
        return self.model.constant(f"{self.name}_c{len(self.model.constants)}", values, dtype)

    def cut(self, operand: str) -> str:
        """Return numbers as integers; like MXNet, it cuts off fractions."""
        return self.step("Cast", operand, to=TensorProto.INT64)

    def truth(self, operand: str) -> str:
        """Return numbers as truth values: whether they are not 0."""
        return self.step("Cast", operand, to=TensorProto.BOOL)

    def as_numbers(self, operand: str) -> str:
        """Return the result from integers or truth values, in the operator's format."""
        return self.node("Cast", operand, to=TYPES[self.dtype])

    def size(self, axis: int, operand: int = 0) -> int:
        """Return a size of an operand, which must not be open."""
        size = self.shapes[operand][axis]
        require(size == self.larger_shapes[operand][axis], f"the size of its axis {axis} is open")
        return size

    def open_shape(self) -> Operand:
        """Return the result's shape for a Reshape of the first operand, or of nothing.

        One open size follows from the others; several come from inputs of the model.
        """
        pairs = list(zip(self.output_shape, self.larger_shape))
        sizes = [size if size == larger else -1 for size, larger in pairs]
        if self.inputs and sizes.count(-1) < 2:
            return sizes
        parts: list[Operand] = [[size] for size in sizes]
        for place in (place for place, pair in enumerate(pairs) if pair in self.model.sources):
            name, axis = self.model.sources[pairs[place]]
            parts[place] = self.step("Gather", self.step("Shape", name), [axis])
        require(parts.count([-1]) <= len(self.inputs), "several of its sizes are open")
        return self.step("Concat", *parts, axis=0)


Translation = Callable[[OperatorCall], Union[str, Sequence[str]]]
"""Adds the nodes of an operator, and returns the name of its result, or of each."""
