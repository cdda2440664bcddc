"""Arrays and symbols inside a network that know their format and follow the operator table.

They are plain MXNet objects of another class: an MXNet array has no room for attributes, and a
Symbol does not say what it will hold. What their Python operators do is given to them in
:mod:`mpgluon.precision.namespace`.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import mxnet as mx
from mxnet.symbol import Symbol

from mpgluon.dtypes import Array, cast, dtype_name, is_array

__all__ = [
    "Bfloat16Symbol",
    "Convert",
    "Float16Array",
    "Float16Symbol",
    "Float32Symbol",
    "arrays_in",
    "borrow",
    "convert_arrays",
    "mark",
    "widen",
]

Convert = Callable[[Array], Array]


class Float16Array(mx.nd.NDArray):
    """A float16 NDArray inside a network; its Python operators follow the operator table."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> mx.nd.NDArray:
        """Return a part, of the same format."""
        return mark(mx.nd.NDArray.__getitem__(self, key), "float16")


class _BorrowedFloat16Array(Float16Array):
    """Another array's handle under the operator table; freeing it stays the lender's affair."""

    __slots__ = ("lender",)

    # MXNet makes views through this signature; a view has a handle of its own, and no lender.
    def __init__(
        self, handle: Any, writable: bool = True, lender: Optional[mx.nd.NDArray] = None
    ) -> None:
        super().__init__(handle, writable)
        self.lender = lender

    def __del__(self) -> None:
        """Free the handle, unless it is borrowed."""
        if self.lender is None:
            super().__del__()


class Float16Symbol(Symbol):
    """A Symbol that is known to be float16; its Python operators follow the operator table."""

    __slots__ = ()
    dtype_of_values = "float16"

    def __getitem__(self, index: Any) -> Symbol:
        """Return one of several outputs, of the same format."""
        return mark(Symbol.__getitem__(self, index), "float16")


class Float32Symbol(Symbol):
    """A Symbol that is known to be FP32; its Python operators follow the operator table."""

    __slots__ = ()
    dtype_of_values = "float32"

    def __getitem__(self, index: Any) -> Symbol:
        """Return one of several outputs, of the same format."""
        return mark(Symbol.__getitem__(self, index), "float32")


class Bfloat16Symbol(Symbol):
    """A Symbol that is known to be bfloat16; its Python operators follow the operator table."""

    __slots__ = ()
    dtype_of_values = "bfloat16"

    def __getitem__(self, index: Any) -> Symbol:
        """Return one of several outputs, of the same format."""
        return mark(Symbol.__getitem__(self, index), "bfloat16")


_SYMBOL_CLASSES = {
    "float16": Float16Symbol,
    "bfloat16": Bfloat16Symbol,
    "float32": Float32Symbol,
}


def convert_arrays(value: Any, convert: Convert) -> Any:
    """Return ``value`` with every array in it, and in lists and tuples in it, converted."""
    if is_array(value):
        return convert(value)
    if isinstance(value, (list, tuple)):
        return type(value)(convert_arrays(item, convert) for item in value)
    return value


def arrays_in(value: Any) -> list[Array]:
    """Return every array in ``value``, in the order in which they are converted."""
    found: list[Array] = []

    def note(array: Array) -> Array:
        found.append(array)
        return array

    convert_arrays(value, note)
    return found


def mark(result: Any, dtype: Optional[str]) -> Any:
    """Give what an operator has just returned the class of its format.

    Parameters
    ----------
    result : NDArray, Symbol or a list of them
        Fresh from an operator, so nobody else sees its class change.
    dtype : str, optional
        What the caller knows of a symbol's format; arrays are asked themselves.
    """

    def reclass(array: Array) -> Array:
        if type(array) in (Symbol, *_SYMBOL_CLASSES.values()):
            array.__class__ = _SYMBOL_CLASSES.get(dtype or "", Symbol)
        elif type(array) in (mx.nd.NDArray, Float16Array):  # neither sparse nor a borrowed one
            is_float16 = dtype_name(array) == "float16"
            array.__class__ = Float16Array if is_float16 else mx.nd.NDArray
        return array

    return convert_arrays(result, reclass)


def borrow(array: Array) -> Array:
    """Return a float16 array of the user's as one that follows the operator table.

    It is the same array to MXNet: no copy, and gradients arrive where they did. The user's own
    object keeps its class.
    """
    if type(array) is mx.nd.NDArray and dtype_name(array) == "float16":
        return _BorrowedFloat16Array(array.handle, array.writable, lender=array)
    return array


def widen(array: Array) -> Array:
    """Cast 16-bit values to FP32, exactly."""
    return cast(array, "float32")
