"""Reductions over many arrays at once: whether all are finite, and their norm.

They change nothing and keep no state. Sums are float32 or wider, whatever the dtype of the arrays;
each reduction to Python numbers waits for the devices once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence

from mpgluon import kernels
from mpgluon.kernels.dtypes import cast, convert_into, dtype_name

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

__all__ = ["all_finite", "global_norm", "numbers_of", "sums_of_squares", "widened"]

_SUMS = "_mpgluon_sums_of_squares"
_ARRAYS_PER_CALL = 200  # operators with a variable number of inputs have a limit
_ELEMENTS_PER_CALL = 2**20  # FP32 copies of so many stay in a cache


class _Widened(threading.local):
    """FP32 copies of 16-bit arrays in memory that is reused.

    New memory costs more time in page faults than the arithmetic. The copies are valid until the
    next call on the same thread.
    """

    def __init__(self) -> None:
        self._buffers: dict[mx.Context, NDArray] = {}

    def __call__(self, arrays: Sequence[NDArray]) -> list[NDArray]:
        """Return FP32 values of arrays on one device; FP32 arrays themselves."""
        sizes = [array.size if dtype_name(array) == "float16" else 0 for array in arrays]
        needed = sum(sizes)
        context = arrays[0].context
        if needed and (context not in self._buffers or self._buffers[context].size < needed):
            self._buffers[context] = mx.nd.empty((needed,), ctx=context, dtype="float32")
        used = 0
        wide = []
        for array, size in zip(arrays, sizes):
            if size:
                copy = self._buffers[context][used : used + size].reshape(array.shape)
                wide.append(convert_into(copy, array))
                used += size
            else:
                wide.append(_values(array))
        return wide


widened = _Widened()


def _values(array: NDArray) -> NDArray:
    """Return an array's values in FP32 or float64; of a sparse array, the stored ones."""
    stored = _stored(array)
    dtype = dtype_name(stored)
    if dtype in ("float32", "float64"):
        return stored
    return cast(stored, "float32") if dtype in ("float16", "bfloat16") else stored.astype("float32")


def _stored(array: NDArray) -> NDArray:
    return array.data if isinstance(array, BaseSparseNDArray) else array.as_nd_ndarray()


def sums_of_squares(arrays: Sequence[NDArray], *, in_any_order: bool = False) -> NDArray:
    """Return the sum of the squares of each array, in FP32; does not wait.

    Parameters
    ----------
    arrays : sequence of NDArray, any shapes, dtypes and devices, mixed as they come
        A sparse array counts with its stored rows.
    in_any_order : bool
        Whether a native operator may add, three times as fast; other last bits than MXNet's.

    Returns
    -------
    NDArray, shape (len(arrays),), on the CPU
        S times the gradients have exactly S squared times the sums, if S is a power of two.

    Raises
    ------
    ValueError
        If ``arrays`` is empty; a network without gradients is a mistake.
    """
    if not arrays:
        raise ValueError(
            "received no arrays; a network without gradients is a mistake: does any parameter "
            "have a grad_req other than 'null'?"
        )
    with autograd.pause():
        sums = []
        for chunk in _chunks([_stored(array) for array in arrays]):
            dtypes = {dtype_name(array) for array in chunk}
            on_cpu = chunk[0].context.device_type == "cpu" and kernels.available()
            if in_any_order and on_cpu and dtypes <= {"float16", "float32"}:
                of_chunk = kernels.invoke(_SUMS, *chunk, num_arrays=len(chunk))
            else:
                of_chunk = mx.nd.multi_sum_sq(*widened(chunk), num_arrays=len(chunk))
            sums.append(of_chunk.as_in_context(mx.cpu()))
        return mx.nd.concat(*sums, dim=0)


def numbers_of(arrays: Sequence[NDArray]) -> list[float]:
    """Return the elements of one-dimensional FP32 arrays; waits for the devices once."""
    if not arrays:
        return []
    values = mx.nd.concat(*(array.as_in_context(mx.cpu()) for array in arrays), dim=0)
    return list(values.asnumpy().tolist())


def _chunks(arrays: Sequence[NDArray]) -> Iterator[list[NDArray]]:
    """Yield neighbours that one call of an operator can take: on one device, not too many."""
    chunk: list[NDArray] = []
    elements, kind = 0, None
    for array in arrays:  # a network has hundreds, and each property goes through ctypes
        shape, its_kind = array.shape, (array.context, dtype_name(array) == "float64")
        size = math.prod(shape)
        if chunk and (
            its_kind != kind or len(chunk) == _ARRAYS_PER_CALL or elements > _ELEMENTS_PER_CALL
        ):
            yield chunk
            chunk, elements = [], 0
        # To these operators, as to all of mx.nd, an array without dimensions has an unknown shape.
        chunk.append(array if shape else array.reshape((1,)))
        elements += size
        kind = its_kind
    yield chunk


def all_finite(arrays: Sequence[NDArray]) -> bool:
    """Whether no element of any array is infinite or NaN.

    Waits for the devices once where all are finite: a finite sum of squares has finite terms, and
    MXNet sums squares faster than it looks for infinities. Where the sum is not finite, the
    elements are compared as well, because a finite one above 2**64 has an infinite square.

    Parameters
    ----------
    arrays : sequence of NDArray, any shapes, dtypes and devices, mixed as they come
        A sparse array counts with its stored rows.

    Raises
    ------
    ValueError
        If ``arrays`` is empty; a network without gradients is a mistake.
    """
    with autograd.pause():
        if np.isfinite(sums_of_squares(arrays, in_any_order=True).asnumpy()).all():
            return True
        return all(bool(np.isfinite(_values(array).asnumpy()).all()) for array in arrays)


def global_norm(arrays: Sequence[NDArray]) -> float:
    """Return the Euclidean norm of all elements of ``arrays`` taken together.

    Squares are summed in float32 whatever the dtype: in float16 a single element of 256
    already squares to infinity. Waits for the device; once more where the squares of the
    elements, but not the elements, leave float32's range.

    Parameters
    ----------
    arrays : sequence of NDArray, any shapes, any floating dtype
        Usually one gradient per parameter.

    Returns
    -------
    float
        In the unit of the elements: gradients still multiplied by a loss scale S give S times
        the true norm. ``inf`` or ``nan`` if any element is.

    Raises
    ------
    ValueError
        If ``arrays`` is empty; a network without gradients is a mistake.

    References
    ----------
    Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013, 3.2.
    """
    with autograd.pause():
        total = _total(sums_of_squares(arrays))
        # Below the lower limit, squares that float32 flushes to zero could matter.
        if 2.0**-70 < total < np.inf:
            return math.sqrt(total)
        filled = [_values(array) for array in arrays if _stored(array).size]
        largest = max((float(mx.nd.max(mx.nd.abs(one)).asscalar()) for one in filled), default=0.0)
        if largest == 0 or not math.isfinite(largest):
            return math.nan if math.isnan(total) else largest
        scaled = [_values(array) / largest for array in arrays]
        return largest * math.sqrt(_total(sums_of_squares(scaled)))


def _total(sums: NDArray) -> float:
    return math.fsum(sums.asnumpy())
