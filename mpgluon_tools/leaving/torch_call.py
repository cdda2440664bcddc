"""An operator of MXNet that is being written in PyTorch, and a layer that it becomes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

from mpgluon_tools.leaving.mxnet_files import Node
from mpgluon_tools.leaving.refusal import UnsupportedError, require

__all__ = ["Call", "Layer", "Translation", "flattened", "number", "one_or_all"]


@dataclass
class Layer:
    """A module of ``torch.nn`` with its parameters.

    Attributes
    ----------
    definition : str
        Such as ``"nn.Linear(512, 10)"``.
    state : dict of str to ndarray
        Parameters and buffers by their names in the module.
    """

    definition: str
    state: dict[str, Any] = field(default_factory=dict)


@dataclass
class Call:
    """One operator with its operands.

    Attributes
    ----------
    node : Node
    operands : sequence of str
        Expressions; of a parameter that no layer takes, ``self.`` and its name.
    values : sequence of ndarray, list of ndarray or None
        The values of the operands that are parameters; a list of those that are packed in one.
    shapes : sequence of tuple or None
        Shapes of the operands, where they are known.
    kinds : sequence of str
        The operators that compute the operands; ``"null"`` of variables.
    rank : int or None
        The axes of the first operand, where they are known.
    integers : bool
        Whether all operands are integers, or truth values.
    layer : Layer or None
        Set by the translation.
    results : sequence of str
        The ends of the expression, one for each result.
    unpacked : str
        The assignment's left side for all of them, with a ``{}`` for each.
    """

    node: Node
    operands: Sequence[str]
    values: Sequence[Any]
    shapes: Sequence[Optional[tuple[int, ...]]]
    kinds: Sequence[str]
    rank: Optional[int] = None
    integers: bool = False
    layer: Optional[Layer] = None
    results: Sequence[str] = ("",)
    unpacked: str = "{}"

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option of the operator as a Python value."""
        return self.node.value(name, default)

    def axis(self, name: str = "axis", default: Any = None) -> Any:
        """Return the option that names an axis; without one MXNet takes all axes as one."""
        require(self.node.attrs.get(name, default) not in ("None", None), "it names no axis")
        return self.option(name, default)

    def number(self, value: float) -> str:
        """Return a number for the operands; MXNet drops its fraction if they are integers."""
        if not self.integers:
            return number(value)
        whole = float(value).is_integer()
        require(whole, "integers and a number that may make fractions; cast them first")
        return str(int(value))

    def scalar(self) -> str:
        """Return the second operand of an operator that takes a number."""
        return self.number(float(self.option("scalar")))

    @property
    def keepdim(self) -> str:
        """The end of the arguments of a reduction that keeps its axes, else nothing."""
        return ", keepdim=True" if self.option("keepdims", False) else ""

    def parameter(self, place: int) -> Any:
        """Return the value of an operand that must be a parameter."""
        if place >= len(self.values) or self.values[place] is None:
            raise UnsupportedError("an operand that must be a parameter is computed")
        return self.values[place]

    def set_parts(self, count: int) -> None:
        """Make the expression a sequence of so many results."""
        self.results = [f"[{place}]" for place in range(count)]
        self.unpacked = ", ".join(["{}"] * count)

    def module(self, kind: str, *arguments: Any, state: Mapping[str, Any], **options: Any) -> str:
        """Define a layer that is called with the first operand."""
        words = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
        self.layer = Layer(f"nn.{kind}({', '.join(words)})", dict(state))
        return f"self.LAYER({self.operands[0]})"


def number(value: float) -> str:
    """Return a number as Python writes it; infinities have no literal."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def flattened(call: Call) -> str:
    """Return the first operand with two axes, of which the first one is the same."""
    x = call.operands[0]
    return f"{x}[:, None]" if call.rank == 1 else f"torch.flatten({x}, 1)"


def one_or_all(sizes: Sequence[int]) -> Any:
    """Return a size that is the same along all axes, or all of them."""
    return sizes[0] if len(set(sizes)) == 1 else tuple(sizes)


Translation = Callable[[Call], str]
"""Takes an operator with the names of its operands in ``forward``, returns an expression."""
