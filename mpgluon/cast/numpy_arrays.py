"""Arrays and symbols of MXNet's NumPy interface inside a cast network.

Those that arithmetic works on are of ``mx.nd`` and ``mx.sym`` (:mod:`mpgluon.cast.arrays`). Here
are their counterparts, which share the values, and know the same formats.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Optional

from mpgluon.cast.arrays import (
    Format,
    FormatArray,
    FormatSymbol,
    WidenedArray,
    WidenedSymbol,
    convert_arrays,
    format_of,
    mark,
    onto_grid,
    widen,
)
from mpgluon.formats.float_format import FloatFormat
from mpgluon.kernels.dtypes import Array

import mxnet as mx
import numpy.typing as npt
from mxnet.symbol import Symbol
from mxnet.symbol.numpy import _Symbol as NumPySymbol

__all__ = ["as_nd", "as_np", "in_current_interface", "is_numpy"]


class _NumPyGridArray(mx.np.ndarray):
    """An FP32 array whose values are numbers of another format; one class for each format."""

    format: FloatFormat

    def __getitem__(self, key: Any) -> Any:
        """Return a part, of the same format."""
        return as_np(mark(mx.np.ndarray.__getitem__(self, key).as_nd_ndarray(), self.format))

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write values, rounded to the format."""
        mx.np.ndarray.__setitem__(self, key, value)
        plain = self.detach().as_nd_ndarray()
        mx.nd.NDArray.__setitem__(plain, slice(None), onto_grid(plain, self.format))

    def astype(self, dtype: npt.DTypeLike, *args: Any, **kwargs: Any) -> Any:
        """Return a copy in a dtype of MXNet's, whose gradient is rounded to the format."""
        wide = as_np(widen(as_nd(self)))
        values = wide.astype(dtype, *args, **kwargs)
        return self if values is wide else values


class _NumPyFormatSymbol(NumPySymbol):
    """A symbol whose format is known; one class for each format."""

    format: Format


class _NumPyWidenedArray(mx.np.ndarray):
    """The counterpart of :class:`WidenedArray`."""


class _NumPyWidenedSymbol(NumPySymbol):
    """The counterpart of :class:`WidenedSymbol`."""


def is_numpy(array: Any) -> bool:
    """Whether an array or a symbol belongs to the NumPy interface."""
    return isinstance(array, (mx.np.ndarray, NumPySymbol))


def as_nd(value: Any) -> Any:
    """Return arrays and symbols of the NumPy interface as ones of ``mx.nd`` and ``mx.sym``.

    They share the values and what autograd has recorded.
    """

    def convert(array: Array) -> Array:
        if not is_numpy(array):
            return array
        kind = NumPySymbol if isinstance(array, Symbol) else mx.np.ndarray
        converted = mark(kind.as_nd_ndarray(array), getattr(array, "format", None))
        if isinstance(array, (_NumPyWidenedArray, _NumPyWidenedSymbol)):
            converted.__class__ = WidenedSymbol if kind is NumPySymbol else WidenedArray
        return converted

    return convert_arrays(value, convert)


def as_np(value: Any) -> Any:
    """Return arrays and symbols of ``mx.nd`` and ``mx.sym`` as ones of the NumPy interface."""

    def convert(array: Array) -> Array:
        if is_numpy(array):
            return array
        kind = Symbol if isinstance(array, Symbol) else mx.nd.NDArray
        fmt, converted = format_of(array), kind.as_np_ndarray(array)
        if isinstance(array, (WidenedArray, WidenedSymbol)):
            converted.__class__ = _NumPyWidenedSymbol if kind is Symbol else _NumPyWidenedArray
        elif isinstance(array, Symbol) or isinstance(fmt, FloatFormat):
            converted.__class__ = _class_of(fmt, isinstance(array, Symbol))
        return converted

    return convert_arrays(value, convert)


def in_current_interface(value: Any) -> Any:
    """Return arrays and symbols as ones of the interface that is switched on."""
    return as_np(value) if mx.util.is_np_array() else as_nd(value)


@cache
def _class_of(fmt: Optional[Format], is_symbol: bool) -> type:
    if fmt is None:
        symbol: type = NumPySymbol
        return symbol
    base = _NumPyFormatSymbol if is_symbol else _NumPyGridArray
    return type(f"NumPy{fmt}{'Symbol' if is_symbol else 'Array'}", (base,), {"format": fmt})


# MXNet's own methods would lose the format.
for _class in (FormatArray, FormatSymbol, WidenedArray, WidenedSymbol):
    _class.as_np_ndarray = as_np
for _class in (_NumPyGridArray, _NumPyFormatSymbol, _NumPyWidenedArray, _NumPyWidenedSymbol):
    _class.as_nd_ndarray = as_nd
