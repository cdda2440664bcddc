"""Scales for formats with little range: how the operands of products are rounded to eight bits.

Values are multiplied by a scale that takes the largest of them to the format's largest numbers,
rounded, and divided by it again. Scales are powers of two, so only the rounding is inexact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Optional

from mpgluon.formats.float_format import FloatFormat, as_floats, round_to

import numpy as np
import numpy.typing as npt

__all__ = ["SHARED_BY", "ScaledOperands", "round_scaled", "scale_exponents"]

SHARED_BY = {
    "none": "without a scale",
    "tensor": "with a scale per operand",
    "mx": "with a scale per block of 32",
}
"""Which values share a scale, by the name that a policy has for it."""


@dataclass(frozen=True)
class ScaledOperands:
    """Products of convolutions and dense layers whose operands have 8 bits or fewer.

    The products are summed in FP32, and rounded to the policy's ``compute_dtype``. The first and
    the last of these layers of a network, and all other operators, compute in that format.

    Parameters
    ----------
    value, gradient : FloatFormat
        Formats of data and weights, and of the gradient that arrives in the backward pass.
    shared_by : {"none", "tensor", "mx"}
        Which values are multiplied by one power of two before they are rounded: all of an
        operand, by its largest one, or each block of 32 along the dimension that the product sums
        over. With ``"none"`` a value that is too large becomes infinite or NaN, as the format has
        it, so that dynamic loss scaling skips the step.
    amax_history : int
        With ``"tensor"``: from the largest values of how many earlier steps the scale of an operand
        follows ("delayed scaling": larger values saturate); 0: from its own ("current scaling").

    Raises
    ------
    ValueError
        If a format has more than 8 bits, or arguments contradict each other.
    """

    value: FloatFormat
    gradient: FloatFormat
    shared_by: str = "none"
    amax_history: int = 0

    def __post_init__(self) -> None:
        for fmt in (self.value, self.gradient):
            if fmt.exponent_bits + fmt.significand_bits > 8 or fmt.exponent_bits > 5:
                raise ValueError(
                    "a format between products is for operands of 8 bits or fewer, such as "
                    f"float8_e4m3; received {fmt.name!r}"
                )
        if self.shared_by not in SHARED_BY:
            raise ValueError(
                f"scaling must be one of {', '.join(SHARED_BY)}; received {self.shared_by!r}"
            )
        steps = self.amax_history
        if type(steps) is not int or steps < 0 or (steps and self.shared_by != "tensor"):
            raise ValueError(
                "amax_history is a number of steps from which the scale of scaling='tensor' "
                f"follows, or 0; received {steps!r} with scaling={self.shared_by!r}"
            )

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
        A format with at most 5 exponent bits. Values too large for the scale saturate.
    block : int, optional
        How many values along ``axis`` share a scale, 32 in MX formats; the last block may be
        shorter. Without it, all values do.

    Raises
    ------
    TypeError
        If ``x`` has a dtype other than float32, float64 or an integer.
    ValueError
        If ``block`` is below 1, or ``x`` has no such axis.

    References
    ----------
    Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023, 6.3;
    Mishra et al., "Recipes for pre-training LLMs with MXFP8", 2025, for the scale.
    """
    values = as_floats(x, "round_scaled")
    if block is None:
        return _rounded(values, fmt, shared_axis=None)
    if block < 1 or not -values.ndim <= axis < values.ndim:
        raise ValueError(
            f"block counts values along an axis of x and is at least 1; received block={block} "
            f"and axis={axis} for values of shape {values.shape}"
        )
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
