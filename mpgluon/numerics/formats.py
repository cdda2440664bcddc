"""Floating-point formats as numbers: what float16, bfloat16 and float32 can hold.

A format is a few numbers, and rounding to it follows from them, without a table. Networks are
cast in :mod:`mpgluon.cast`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "FloatFormat", "format_named", "round_to"]


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format with subnormals, infinities and NaN (IEEE 754-2019, 3.3).

    Parameters
    ----------
    name : str
        The name that MXNet and NumPy code uses, such as ``"float16"``.
    significand_bits : int
        Significant bits, the hidden one included (11 for float16).
    exponent_bits : int
        Width of the exponent field (5 for float16).
    """

    name: str
    significand_bits: int
    exponent_bits: int

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite numbers: they lie in ``[2**e, 2**(e + 1))``."""
        return int(2 ** (self.exponent_bits - 1) - 1)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.max_exponent

    @property
    def max(self) -> float:
        """The largest finite number (65504 for float16)."""
        return float((2.0 - self.epsilon) * 2.0**self.max_exponent)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with all significant bits (2**-14 for float16)."""
        return float(2.0**self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number at all (2**-24 for float16)."""
        return float(2.0 ** (self.min_exponent - self.significand_bits + 1))

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number (2**-10 for float16)."""
        return float(2.0 ** (1 - self.significand_bits))

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of one rounding in the normal range: half of ``epsilon``."""
        return self.epsilon / 2

    def __str__(self) -> str:
        return self.name


FLOAT32 = FloatFormat("float32", significand_bits=24, exponent_bits=8)
FLOAT16 = FloatFormat("float16", significand_bits=11, exponent_bits=5)
BFLOAT16 = FloatFormat("bfloat16", significand_bits=8, exponent_bits=8)

_NAMED = {fmt.name: fmt for fmt in (FLOAT32, FLOAT16, BFLOAT16)}


def format_named(name: str) -> FloatFormat:
    """Return the format with a name such as ``"float16"``.

    Raises
    ------
    ValueError
        If there is none.
    """
    if name not in _NAMED:
        raise ValueError(f"formats are {', '.join(_NAMED)}; received {name!r}")
    return _NAMED[name]


def round_to(x: npt.ArrayLike, fmt: FloatFormat) -> npt.NDArray[Any]:
    """Round to the nearest number of ``fmt``, ties to even, and return it in the dtype of ``x``.

    Correct for every finite input: subnormals of ``fmt`` are kept, values that round past the
    largest number become infinite, the sign of zero, infinities and NaN pass through.

    Parameters
    ----------
    x : array_like, any shape, float32 or float64
        Integers and lists are taken as float64. The dtype must be at least as wide as ``fmt``.
    fmt : FloatFormat
        The format whose numbers are the result's only values.

    Returns
    -------
    ndarray, same shape and dtype as ``x``
        A new array; a 0-d array for a scalar.

    Raises
    ------
    TypeError
        If ``x`` has a dtype other than float32, float64 or an integer, in particular one that
        cannot hold the result.

    References
    ----------
    IEEE 754-2019, 4.3.1 (roundTiesToEven) and 7.4 (overflow).
    """
    values = np.asarray(x)
    if values.dtype.kind in "iub":
        values = values.astype(np.float64)
    if values.dtype not in (np.float32, np.float64):
        raise TypeError(
            f"round_to takes float32 or float64 values, received {values.dtype}; "
            "convert with .astype('float32') first"
        )
    too_wide = fmt.significand_bits > 24 or fmt.exponent_bits > 8
    if too_wide and values.dtype == np.float32:
        raise TypeError(f"float32 cannot hold every {fmt} number; pass float64 values")
    # Work in float64: the product with a power of two and np.rint are then exact for every
    # float32 and float64 input that can round to a finite, nonzero number of `fmt`.
    wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    with np.errstate(over="ignore", invalid="ignore"):  # of NaN, on some processors, even frexp
        _, exponent = np.frexp(wide)  # |wide| lies in [2**(exponent - 1), 2**exponent)
        spacing_exponent = np.maximum(exponent - 1, fmt.min_exponent) - fmt.significand_bits + 1
        spacing_exponent = np.where(finite, spacing_exponent, 0)
        rounded = np.ldexp(np.rint(np.ldexp(wide, -spacing_exponent)), spacing_exponent)
        rounded = np.where(np.abs(rounded) > fmt.max, np.copysign(np.inf, wide), rounded)
        rounded = np.where(finite, rounded, wide)
        return np.asarray(rounded.astype(values.dtype))
