"""Formats of MXNet arrays and symbols: their names, and casts between them.

An NDArray has a dtype. A Symbol has none until the whole graph is bound, so the class of a symbol
that a cast returns says its dtype (an instance has no room for attributes). Other symbols have
the dtype ``None`` here, and a cast of them works for every dtype that they turn out to have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Optional, Union

from mpgluon import kernels
from mpgluon.formats.float_format import FLOAT16, FloatFormat, random_key, round_to

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet.symbol import Symbol

__all__ = [
    "BFLOAT16_DTYPE",
    "CAST_NUMBER",
    "Array",
    "cast",
    "convert_into",
    "dtype_name",
    "is_array",
    "name_of",
    "number_of_cast",
    "round_array",
    "round_stochastically",
]

Array = Union[mx.nd.NDArray, Symbol]

# MXNet's own spelling of the type; NumPy has none.
BFLOAT16_DTYPE = np.dtype([("bfloat16", np.uint16)])

CAST_NUMBER = "__mpgluon_cast__"  # the attribute of a cast's nodes in a graph
_CAST_NUMBERS = count()
_AMP_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": BFLOAT16_DTYPE}


def number_of_cast() -> dict[str, str]:
    """Return an attribute for the nodes of one cast in a graph.

    MXNet merges equal nodes of a graph, and then adds gradients before rounding them where an
    imperative run rounds each. A unique number keeps the nodes apart, and the results equal.
    """
    return {CAST_NUMBER: str(next(_CAST_NUMBERS))}


def is_array(value: object) -> bool:
    """Whether ``value`` is an NDArray or a Symbol."""
    return isinstance(value, (mx.nd.NDArray, Symbol))


def dtype_name(array: Array) -> Optional[str]:
    """Return ``"float16"``, ``"int32"`` and so on, or ``None`` for a symbol that does not say."""
    if isinstance(array, Symbol):
        return getattr(array, "dtype_of_values", None)
    return name_of(array.dtype)


@cache  # NumPy takes microseconds for a name, and a step asks for hundreds
def name_of(dtype: npt.DTypeLike) -> str:
    """Return the name of a dtype; MXNet's bfloat16 has it as that of a field."""
    numpy_dtype = np.dtype(dtype)
    return numpy_dtype.names[0] if numpy_dtype.names else numpy_dtype.name


def cast(array: Array, dtype: str) -> Array:
    """Round or widen between float32, float16 and bfloat16; return other dtypes as they are.

    Rounds to nearest even and overflows to infinity; widening is exact. Subnormals are kept,
    in bfloat16 only where oneDNN keeps them; on processors without bfloat16 instructions
    oneDNN also drops the sign of a zero. On the CPU this is several times faster than ``Cast``.
    Gradients are cast back. Does not wait.

    Parameters
    ----------
    array : NDArray or Symbol, any shape
        Integers and float64 pass through, whatever ``dtype`` says.
    dtype : {"float32", "float16", "bfloat16"}

    Returns
    -------
    NDArray or Symbol
        ``array`` itself where it is known to have that dtype, else one of ``mx.nd`` or ``mx.sym``.
    """
    now = dtype_name(array)
    if now == dtype or (now is not None and now not in _AMP_DTYPES):
        return array
    array = array.as_nd_ndarray()
    if dtype == "bfloat16" and now != "float32":
        array, now = cast(array, "float32"), "float32"  # MXNet's own way from float16 is wrong
    # oneDNN runs casts from or to bfloat16 and casts to the same dtype, and its backward overwrites
    # a gradient that it should add to: with grad_req="add", or of a value with several casts. The
    # identity adds. Behind a symbol of unknown dtype it also keeps from oneDNN the dtypes that
    # oneDNN does not support.
    through_identity = now != "float16" and (dtype != "float16" or now is None)
    if not isinstance(array, Symbol):
        array = mx.nd.identity(array) if through_identity else array
        return mx.nd.amp_cast(array, dtype=_AMP_DTYPES[dtype])
    number = number_of_cast()
    array = mx.sym.identity(array, attr=number) if through_identity else array
    return mx.sym.amp_cast(array, dtype=_AMP_DTYPES[dtype], attr=number)


def convert_into(out: mx.nd.NDArray, array: mx.nd.NDArray) -> mx.nd.NDArray:
    """Write float16 values as FP32, or FP32 values as float16, as :func:`cast` would, to ``out``.

    Both have one shape and device. Not recorded by autograd; does not wait.
    """
    dtype = dtype_name(out)
    if array.ctx.device_type == "cpu" and kernels.available():
        operator = kernels.operator("narrow" if dtype == "float16" else "widen", FLOAT16)
        return kernels.invoke(operator, array, out=out)
    return mx.nd.amp_cast(array, dtype=dtype, out=out)


def round_array(
    array: mx.nd.NDArray, fmt: FloatFormat, *, out: Optional[mx.nd.NDArray] = None
) -> mx.nd.NDArray:
    """Round an FP32 array to the nearest numbers of a format, with the bits of :func:`round_to`.

    Returns ``out``, FP32 (``array`` itself, too) or float16, or a new FP32 array. Formats other
    than float16 are for a CPU. Not recorded; waits only without native operators.
    """
    if fmt == FLOAT16:
        if out is not None and dtype_name(out) == "float16":
            return convert_into(out, array)
        return mx.nd.amp_cast(cast(array, "float16"), dtype="float32", out=out)
    if kernels.available():
        return kernels.invoke(kernels.operator("plain_value", fmt), array, out=out)
    rounded = mx.nd.array(round_to(array.asnumpy(), fmt), dtype="float32")
    return rounded if out is None else rounded.copyto(out)


def round_stochastically(
    arrays: Sequence[mx.nd.NDArray], fmt: FloatFormat, keys: Sequence[Sequence[int]]
) -> None:
    """Round FP32 arrays on a CPU in place, with the bits of :func:`round_to` for a key of each."""
    if not kernels.available():
        for array, key in zip(arrays, keys):
            array[:] = round_to(array.asnumpy(), fmt, "stochastic", key=key)
        return
    words = np.stack([random_key(key) for key in keys]).view(np.int32).reshape(-1, 2)
    for array, one in zip(arrays, mx.nd.array(words, dtype="int32")):
        kernels.invoke(kernels.operator("stochastic", fmt), array, one, out=array)
