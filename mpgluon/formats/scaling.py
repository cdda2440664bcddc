"""Scales for formats with little range: how the operands of products are rounded to eight bits.

Values are multiplied by a scale that takes the largest of them to the format's largest numbers,
rounded, and divided by it again. Scales are powers of two, so only the rounding is inexact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Optional

from mpgluon.formats.float_format import FloatFormat, round_to

import numpy as np
import numpy.typing as npt

__all__ = ["SHARED_BY", "Scaling", "round_scaled", "scale_exponents"]

SHARED_BY = {
    "none": "without a scale",
    "tensor": "with a scale per operand",
    "mx": "with a scale per block of 32",
}
"""Which values share a scale, by the name that a policy has for it."""


class Scaling(NamedTuple):
    """How products round: data and weight, the gradient that arrives, a key of `SHARED_BY`."""

    value: FloatFormat
    gradient: FloatFormat
    shared_by: str
    amax_history: int = 0  # steps, as in a Policy

    def __str__(self) -> str:
        """Return it in words."""
        delayed = f" from the largest values of {self.amax_history} steps" * bool(self.amax_history)
        return f"{self.value}, gradients to {self.gradient}, {SHARED_BY[self.shared_by]}{delayed}"


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
        How many values along ``axis`` share a scale, 32 in MX formats; the last block may be
        shorter. Without it, all values do.

    References
    ----------
    Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023, 6.3;
    Mishra et al., "Recipes for pre-training LLMs with MXFP8", 2025, for the scale.
    """
    values = np.asarray(x)
    if block is None:
        return _rounded(values, fmt, shared_axis=None)
    parts = np.split(values, range(block, values.shape[axis], block), axis)
    return np.concatenate([_rounded(part, fmt, shared_axis=axis) for part in parts], axis)


def scale_exponents(largest: npt.ArrayLike, fmt: FloatFormat) -> npt.NDArray[np.int64]:
    """Return the exponents of the scales for values of which these, finite, are the largest."""
    fraction, exponent = np.frexp(np.asarray(largest, np.float64))
    most, highest = np.frexp(fmt.max)
    scale = np.where(fraction > 0, highest - exponent - (fraction > most), 0)
    return np.asarray(scale.clip(-100, 100))  # so that FP32 holds the numbers divided by it


def _rounded(values: Any, fmt: FloatFormat, shared_axis: Optional[int]) -> npt.NDArray[Any]:
    largest = np.max(np.abs(values), axis=shared_axis, keepdims=True, initial=0)
    finite = np.isfinite(largest)
    scale = scale_exponents(np.where(finite, largest, 0), fmt)
    scaled = np.ldexp(values.astype(np.float64), scale)
    rounded = np.ldexp(round_to(scaled, replace(fmt, saturates=True)), -scale)
    return np.asarray(np.where(finite, rounded, np.nan).astype(values.dtype))
