"""Arrays and symbols inside a network that know their format and follow the operator table.

They are plain MXNet objects of another class: an MXNet array has no room for attributes, and a
Symbol does not know its dtype. :mod:`mpgluon.cast.stand_in` defines their Python operators, and
:mod:`mpgluon.cast.numpy_arrays` their ``as_np_ndarray``.

A format is the name of a dtype that MXNet computes with ("float32", "float16", and "bfloat16" in a
graph), or a :class:`FloatFormat` where its values are held on its grid, as FP32 numbers.
"""

from __future__ import annotations

from copy import copy
from functools import cache
from numbers import Number
from typing import Any, Callable, Optional, Union

from mpgluon import kernels
from mpgluon.cast.status_flags import layer_option
from mpgluon.formats.float_format import BFLOAT16, FLOAT16, FloatFormat
from mpgluon.graph.nodes import ROUNDING
from mpgluon.kernels.dtypes import Array, cast, dtype_name, is_array, number_of_cast

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet.symbol import Symbol

__all__ = [
    "Convert",
    "Float16Array",
    "Format",
    "FormatArray",
    "FormatSymbol",
    "GridArray",
    "WidenedArray",
    "WidenedSymbol",
    "arrays_in",
    "borrow",
    "cast_here",
    "convert_arrays",
    "format_of",
    "leave",
    "mark",
    "narrow_again",
    "number_in_float16",
    "onto_grid",
    "widen",
]

Convert = Callable[[Array], Array]
Format = Union[str, FloatFormat]

_SYMBOL_DTYPES = (
    *("float32", "float16", "bfloat16", "float64"),
    *("bool", "int8", "uint8", "int32", "int64"),
)


class _EqualToNDArray(type):
    """Metaclass of array classes that compare equal to MXNet's own, and to one another.

    MXNet asks ``type(value) == self.__class__`` before it assigns an array to a part of another
    one; if they differ, it first makes an array from the value, by an assignment. Whatever
    assigns an array of these classes (``mx.nd.array``, ``buffer[:] = out``,
    ``autograd.Function``, a parameter's ``set_data``) would so recurse without end. The classes
    add operators to an array, and nothing that a copy of its values could lose.
    """

    def __eq__(cls, other: object) -> bool:
        return other is mx.nd.NDArray or isinstance(other, _EqualToNDArray)

    def __ne__(cls, other: object) -> bool:  # type's own would not ask __eq__
        return not cls == other

    def __hash__(cls) -> int:
        return hash(mx.nd.NDArray)


class FormatArray(mx.nd.NDArray, metaclass=_EqualToNDArray):
    """An NDArray inside a network; its Python operators follow the operator table."""

    __slots__ = ()
    format: Format

    def __getitem__(self, key: Any) -> mx.nd.NDArray:
        """Return a part, of the same format."""
        return mark(mx.nd.NDArray.__getitem__(self, key), self.format)


class Float16Array(FormatArray):
    """A float16 array."""

    __slots__ = ()
    format = "float16"


class _BorrowedFloat16Array(FormatArray):
    """A second object for another array's handle, which that array frees.

    It does not derive from `Float16Array`: Python asks a derived class's comparison first.
    """

    __slots__ = ("owner",)
    format = "float16"

    # MXNet makes views through this signature; a view has a handle of its own, and no owner.
    def __init__(
        self, handle: Any, writable: bool = True, owner: Optional[mx.nd.NDArray] = None
    ) -> None:
        super().__init__(handle, writable)
        self.owner = owner

    def __del__(self) -> None:
        """Free the handle, unless it is borrowed."""
        if self.owner is None:
            super().__del__()


class GridArray(FormatArray):
    """An FP32 array whose values are numbers of another format; one class for each format."""

    __slots__ = ()
    format: FloatFormat

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write values, rounded to the format."""
        mx.nd.NDArray.__setitem__(self, key, value)
        rounded = onto_grid(self.detach(), self.format)
        mx.nd.NDArray.__setitem__(self, slice(None), rounded)

    def astype(self, dtype: npt.DTypeLike, copy: bool = True) -> mx.nd.NDArray:
        """Return a copy in a dtype of MXNet's, whose gradient is rounded to the format."""
        wide = widen(self)
        values = wide.astype(dtype, copy)
        return self if values is wide else values


class WidenedArray(mx.nd.NDArray, metaclass=_EqualToNDArray):
    """An FP32 array of float16's numbers, which a part of a cast network gave to code outside."""

    __slots__ = ()


class WidenedSymbol(Symbol):
    """The symbol of such an array."""

    __slots__ = ()
    dtype_of_values = "float32"


class FormatSymbol(Symbol):
    """A Symbol whose format is known; its Python operators follow the operator table."""

    __slots__ = ()
    format: Format
    dtype_of_values: str

    def __getitem__(self, index: Any) -> Symbol:
        """Return one of several outputs, of the same format."""
        return mark(Symbol.__getitem__(self, index), self.format)


@cache
def _grid_array_class(fmt: FloatFormat) -> type:
    return _EqualToNDArray(f"{fmt.name}Array", (GridArray,), {"__slots__": (), "format": fmt})


@cache
def _symbol_class(fmt: Format) -> type:
    dtype = "float32" if isinstance(fmt, FloatFormat) else fmt  # of what MXNet computes
    members = {"__slots__": (), "format": fmt, "dtype_of_values": dtype}
    return type(f"{getattr(fmt, 'name', fmt)}Symbol", (FormatSymbol,), members)


def format_of(array: Array) -> Optional[Format]:
    """Return the format of an array's values; ``None`` for a symbol whose format is unknown."""
    if isinstance(array, (FormatArray, FormatSymbol)):
        return array.format
    return dtype_name(array)


def convert_arrays(value: Any, convert: Convert) -> Any:
    """Return ``value`` with all arrays converted, also in lists, tuples and dicts in it."""
    if is_array(value):
        return convert(value)
    if isinstance(value, (list, tuple)):
        made_of = getattr(value, "_make", type(value))  # a namedtuple's takes an iterable
        return made_of(convert_arrays(item, convert) for item in value)
    if isinstance(value, dict):
        changed = copy(value)  # of the same class, such as a defaultdict
        changed.update({key: convert_arrays(item, convert) for key, item in value.items()})
        return changed
    return value


def arrays_in(value: Any) -> list[Array]:
    """Return every array in ``value``, in the order in which they are converted."""
    arrays: list[Array] = []

    def note(array: Array) -> Array:
        arrays.append(array)
        return array

    convert_arrays(value, note)
    return arrays


def mark(result: Any, fmt: Optional[Format]) -> Any:
    """Give the results of an operator the class of their format.

    Parameters
    ----------
    result : NDArray, Symbol or a list of them
        Fresh from an operator, so no other code sees its class change.
    fmt : str or FloatFormat, optional
        The known format of a symbol, or the grid that an FP32 array's values are on. Of other
        arrays the dtype decides.
    """

    def reclass(array: Array) -> Array:
        kind = type(array)
        if kind is Symbol or issubclass(kind, FormatSymbol):
            is_known = isinstance(fmt, FloatFormat) or fmt in _SYMBOL_DTYPES
            array.__class__ = _symbol_class(fmt) if is_known else Symbol
        # Neither sparse nor a borrowed one, whose class compares equal to these two.
        elif kind is mx.nd.NDArray or kind is Float16Array or issubclass(kind, GridArray):
            dtype = dtype_name(array)
            if isinstance(fmt, FloatFormat) and dtype == "float32":
                array.__class__ = _grid_array_class(fmt)
            else:
                array.__class__ = Float16Array if dtype == "float16" else mx.nd.NDArray
        return array

    return convert_arrays(result, reclass)


def borrow(array: Array) -> Array:
    """Return an array of the user's as one that follows the operator table.

    A float16 array is the same array to MXNet: no copy, and gradients are written to the user's.
    The user's own object keeps its class.
    """
    array = narrow_again(array)
    if type(array) is mx.nd.NDArray and dtype_name(array) == "float16":
        return _BorrowedFloat16Array(array.handle, array.writable, owner=array)
    return array


def narrow_again(array: Array) -> Array:
    """Return an array in float16 if :func:`leave` widened it, and any other array as it is."""
    if isinstance(array, (WidenedArray, WidenedSymbol)):
        return mark(cast_here(array, "float16"), "float16")
    return array


def leave(array: Array) -> Array:
    """Return 16-bit values as FP32, for code that is not cast.

    Operators outside read them as FP32, and a block of a cast network as the 16-bit numbers that
    they are: the parts of a network, called one after the other, have the bits of the whole.
    """
    fmt = format_of(array)
    if fmt not in ("float16", "bfloat16"):
        return array
    array = widen(array)
    if fmt == "float16":
        array.__class__ = WidenedSymbol if isinstance(array, Symbol) else WidenedArray
    return array


def widen(array: Array) -> Array:
    """Return 16-bit values, and those on a grid, as FP32, exactly; gradients are rounded."""
    fmt = format_of(array)
    if isinstance(fmt, FloatFormat):
        return mark(_rounded(array, fmt, "gradient"), "float32")
    return cast_here(array, "float32")


def cast_here(array: Array, dtype: str) -> Array:
    """Cast between float16 and FP32; on a CPU the roundings raise flags of the layer at work.

    The rounding of the gradient does so too.
    """
    if isinstance(array, Symbol) or not kernels.available() or array.ctx.device_type != "cpu":
        return cast(array, dtype)
    if {dtype_name(array), dtype} != {"float16", "float32"}:
        return cast(array, dtype)
    operator = kernels.operator("narrow" if dtype == "float16" else "widen", FLOAT16)
    return kernels.invoke(operator, array, **layer_option())


def onto_grid(array: Array, fmt: FloatFormat) -> Array:
    """Round to the numbers of a format; integers and float64 pass.

    The gradient is rounded too. Where several operators take the array, the sum of their gradients
    in FP32 is rounded here, once.

    Parameters
    ----------
    array : NDArray or Symbol
    fmt : FloatFormat
        One that is held on its grid, so not float16, which MXNet's arrays have.
    """
    if format_of(array) == fmt:
        return array
    wide = mark(widen(array), "float32")
    if dtype_name(wide) != "float32":
        return array
    return mark(_rounded(wide, fmt, "both"), fmt)


def _rounded(array: Array, fmt: FloatFormat, what: str) -> Array:
    """Return FP32 values with the value or the gradient rounded, or both.

    Like a cast this leaves plain arrays: MXNet's operators add in an order that depends on the
    layout. In a graph bfloat16 is made of MXNet's casts, so that the graph needs nothing but MXNet,
    which lacks every other format.
    """
    in_graph = isinstance(array, Symbol)
    if not in_graph and kernels.available() and array.ctx.device_type == "cpu":
        return kernels.invoke(kernels.operator(f"plain_{what}", fmt), array, **layer_option())
    with mx.AttrScope(**{ROUNDING: what}):
        if fmt == BFLOAT16:
            return cast(cast(array, fmt.name), "float32")
        rounding = kernels.function(kernels.operator(f"plain_{what}", fmt), of_symbols=in_graph)
        return rounding(array, attr=number_of_cast())


def number_in_float16(number: Number) -> float:
    """Return a number as MXNet's float16 kernels receive it."""
    with np.errstate(over="ignore"):
        return float(np.float16(np.float32(float(number))))  # type: ignore[arg-type]
