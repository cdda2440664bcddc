"""Scales for formats with little range: how the operands of products are rounded to eight bits.

Values are multiplied by a scale that takes the largest of them to the format's largest numbers,
rounded, and divided by it again. Scales are powers of two, so only the rounding is inexact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from mpgluon.numerics.formats import FloatFormat, round_to

__all__ = ["SHARED_BY", "Scaling", "round_scaled", "scale_exponents"]

SHARED_BY = ("none", "tensor", "mx")
"""Which values share a scale: none has one, all of an operand, or blocks of 32."""

_BLOCK = 32
_MOST = 100  # so that FP32 holds the format's numbers divided by the scale


@dataclass(frozen=True)
class Scaling:
    """How products round their operands.

    Parameters
    ----------
    value, gradient : FloatFormat
        Of the data and the weight, and of the gradient that arrives in the backward pass.
    shared_by : {"none", "tensor", "mx"}
        As in :data:`SHARED_BY`.
    """

    value: FloatFormat
    gradient: FloatFormat
    shared_by: str


def round_scaled(
    x: npt.ArrayLike, fmt: FloatFormat, *, block: Optional[int] = None, axis: int = -1
) -> npt.NDArray[Any]:
    """Round to the numbers of a format divided by a scale, ties to even.

    The scale is the largest power of two from 2**-100 to 2**100 that keeps the largest absolute
    value within ``fmt.max``. If that value is infinite or NaN, all become NaN, so that a
    failed computation stays visible.

    Parameters
    ----------
    x : array_like, any shape, float32 or float64
    fmt : FloatFormat
        A format with at most 5 exponent bits. What is too large for the scale saturates.
    block : int, optional
        How many values along ``axis`` share a scale, 32 in MX formats; the last block of each row
        may be shorter. Without it, all values do.
    axis : int

    Returns
    -------
    ndarray, same shape and dtype as ``x``

    References
    ----------
    Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023, 6.3,
    for blocks; Mishra et al., "Recipes for pre-training LLMs with MXFP8", 2025, 3, for a scale
    with which the largest value does not saturate.
    """
    values = np.asarray(x)
    if block is not None:
        rows = np.moveaxis(values, axis, -1)
        starts = range(0, rows.shape[-1], block)
        parts = [_rounded(rows[..., i : i + block], fmt, shared_axis=-1) for i in starts]
        return np.moveaxis(np.concatenate(parts, axis=-1), -1, axis) if parts else values.copy()
    return _rounded(values, fmt, shared_axis=None)


def scale_exponents(largest: npt.ArrayLike, fmt: FloatFormat) -> npt.NDArray[np.int64]:
    """Return the exponents of the scales for values of which these, finite, are the largest."""
    fraction, exponent = np.frexp(np.asarray(largest, np.float64))
    most, highest = np.frexp(fmt.max)
    scale = np.where(fraction > 0, highest - exponent - (fraction > most), 0)
    return np.asarray(scale.clip(-_MOST, _MOST))


def _rounded(
    values: npt.NDArray[Any], fmt: FloatFormat, shared_axis: Optional[int]
) -> npt.NDArray[Any]:
    largest = np.max(np.abs(values), axis=shared_axis, keepdims=True, initial=0).astype(np.float64)
    finite = np.isfinite(largest)
    scale = scale_exponents(np.where(finite, largest, 0), fmt)
    scaled = np.ldexp(values.astype(np.float64), scale)
    rounded = np.ldexp(round_to(scaled, replace(fmt, saturates=True)), -scale)
    return np.asarray(np.where(finite, rounded, np.nan).astype(values.dtype))
