"""Questions about many arrays at once: are all finite, and how long are they together.

Questions change nothing and keep no state. Sums are float32 or wider, whatever the dtype of the
arrays; each question waits for the devices once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from mpgluon.dtypes import cast, dtype_name

__all__ = ["all_finite", "global_norm"]

_ARRAYS_PER_CALL = 200  # operators with a variable number of inputs have a limit


def _values(array: NDArray) -> NDArray:
    """Return an array's values, 16-bit ones and integers widened; of a sparse one, the stored."""
    dense = array.data if isinstance(array, BaseSparseNDArray) else array
    wide = cast(dense, "float32")
    return wide if dtype_name(wide) in ("float32", "float64") else wide.astype("float32")


def _sums_of_squares(arrays: Sequence[NDArray]) -> npt.NDArray[np.float64]:
    """Return the sum of the squares of each array, in any order; waits for the devices once."""
    if not arrays:
        raise ValueError(
            "received no arrays; a network without gradients is a mistake: does any parameter "
            "have a grad_req other than 'null'?"
        )
    kinds: dict[tuple[str, Optional[str]], list[NDArray]] = {}
    for array in arrays:
        values = _values(array)
        kinds.setdefault((str(values.context), dtype_name(values)), []).append(values)
    sums = [
        mx.nd.multi_sum_sq(*chunk, num_arrays=len(chunk)).as_in_context(mx.cpu())
        for members in kinds.values()
        for chunk in (
            members[start : start + _ARRAYS_PER_CALL]
            for start in range(0, len(members), _ARRAYS_PER_CALL)
        )
    ]
    return np.asarray(mx.nd.concat(*sums, dim=0).asnumpy(), dtype=np.float64)


def all_finite(arrays: Sequence[NDArray]) -> bool:
    """Whether no element of any array is infinite or NaN.

    Waits for the devices once where all are finite: a finite sum of squares has finite terms,
    and MXNet sums squares ten times faster than it looks for infinities. Where the sum is not
    finite, a second look tells an infinite element from a finite one above 2**64.

    Parameters
    ----------
    arrays : sequence of NDArray, any shapes, dtypes and devices, mixed as they come
        Of a sparse array, the rows that are stored.

    Returns
    -------
    bool

    Raises
    ------
    ValueError
        If ``arrays`` is empty; a network without gradients is a mistake.
    """
    with autograd.pause():
        if np.isfinite(_sums_of_squares(arrays)).all():
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
        total = float(_sums_of_squares(arrays).sum())
        # Below this, squares that float32 flushes to zero could matter.
        if 2.0**-70 < total < np.inf:
            return math.sqrt(total)
        largest = max(_largest(array) for array in arrays if array.size)
        if largest == 0 or not math.isfinite(largest):
            return math.nan if math.isnan(total) else largest
        scaled = [_values(array) / largest for array in arrays]
        return largest * math.sqrt(float(_sums_of_squares(scaled).sum()))


def _largest(array: NDArray) -> float:
    """Return the largest magnitude in an array."""
    return float(mx.nd.max(mx.nd.abs(_values(array))).asscalar())
