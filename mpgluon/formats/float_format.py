"""Floating-point formats as numbers: what float16, bfloat16, float8_e4m3 and others can hold.

A format is a few numbers, and rounding to it follows from them, without a table. Networks are
cast in :mod:`mpgluon.cast`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from mpgluon.errors import did_you_mean

import numpy as np
import numpy.typing as npt

__all__ = [
    "BFLOAT16",
    "FLOAT4_E2M1",
    "FLOAT6_E2M3",
    "FLOAT6_E3M2",
    "FLOAT8_E4M3",
    "FLOAT8_E5M2",
    "FLOAT16",
    "FLOAT32",
    "SMALL",
    "TFLOAT32",
    "FloatFormat",
    "format_named",
    "integers_beyond",
    "lost_values",
    "random_key",
    "round_to",
]

_MODES = ("nearest", "toward_zero", "stochastic")


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format with subnormals; as a rule with infinities and NaN.

    Parameters
    ----------
    name : str
        The name that MXNet and NumPy code uses, such as ``"float16"``.
    significand_bits : int, 2 to 53
        Significant bits, the hidden one included (11 for float16).
    exponent_bits : int, 2 to 11
        Width of the exponent field (5 for float16).
    finite_only : bool
        Whether the largest exponent holds numbers, as in the OCP formats of 4, 6 and 8 bits other
        than E5M2, and not infinities and NaN, as IEEE 754 has it.
    saturates : bool
        Whether rounding turns values that are too large, infinities too, into the largest number.
        Otherwise they become infinite or, in a finite-only format, NaN.
    has_nan : bool
        Whether a finite-only format keeps the code with all bits set for NaN (E4M3).

    Raises
    ------
    TypeError
        If a width is not an integer.
    ValueError
        If a width is out of range, or float64 cannot hold the numbers, or if overflow has no code:
        a format without NaN has to be finite only and to saturate.

    References
    ----------
    IEEE 754-2019, 3.3; Open Compute Project, "8-bit Floating Point Specification", 1.0, 2023, 5,
    and "Microscaling Formats (MX) Specification", 1.0, 2023, 5.3.
    """

    name: str
    significand_bits: int
    exponent_bits: int
    finite_only: bool = False
    saturates: bool = False
    has_nan: bool = True

    def __post_init__(self) -> None:
        for width in ("significand_bits", "exponent_bits"):
            if not isinstance(getattr(self, width), (int, np.integer)):
                raise TypeError(
                    f"{width} must be an int, received {getattr(self, width)!r} for {self.name}"
                )
        if not 2 <= self.significand_bits <= 53:
            raise ValueError(
                "significand_bits counts the hidden bit and is 2 to 53 (float64's); received "
                f"{self.significand_bits!r} for {self.name}"
            )
        if not 2 <= self.exponent_bits <= 11 - self.finite_only:
            raise ValueError(
                f"exponent_bits is 2 to 11 (float64's), 2 to 10 with finite_only; received "
                f"{self.exponent_bits!r} for {self.name}"
            )
        if not (self.has_nan or (self.finite_only and self.saturates)):
            raise ValueError(
                f"{self.name} has no NaN, so it needs finite_only=True and saturates=True: "
                "overflow can become nothing but the largest number"
            )

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite numbers: they lie in ``[2**e, 2**(e + 1))``."""
        return int(2 ** (self.exponent_bits - 1) - 1) + self.finite_only

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return int(2 - 2 ** (self.exponent_bits - 1))

    @property
    def max(self) -> float:
        """The largest finite number (65504 for float16, 448 for float8_e4m3)."""
        steps_below = 1 + (self.finite_only and self.has_nan)
        return float((2.0 - steps_below * self.epsilon) * 2.0**self.max_exponent)

    @property
    def overflow(self) -> float:
        """The result for positive numbers that are too large: infinity, NaN or ``max``."""
        if self.saturates:
            return self.max
        return math.nan if self.finite_only else math.inf

    @property
    def fits_float32(self) -> bool:
        """Whether every number of the format is one of float32."""
        return self.significand_bits <= 24 and self.exponent_bits <= 8 and self.max_exponent < 128

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

    def loses(self, x: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return which of some finite numbers other than 0 become 0, or are too large."""
        size = np.abs(np.asarray(x, np.float64))
        is_zero = (size != 0) & (size <= self.smallest_subnormal / 2)
        is_beyond = size >= self.max + self.epsilon / 2 * 2.0**self.max_exponent
        return np.asarray(np.isfinite(size) & (is_zero | is_beyond))

    def __str__(self) -> str:
        return self.name


FLOAT32 = FloatFormat("float32", significand_bits=24, exponent_bits=8)
FLOAT16 = FloatFormat("float16", significand_bits=11, exponent_bits=5)
BFLOAT16 = FloatFormat("bfloat16", significand_bits=8, exponent_bits=8)
TFLOAT32 = FloatFormat("tfloat32", significand_bits=11, exponent_bits=8)
FLOAT8_E5M2 = FloatFormat("float8_e5m2", significand_bits=3, exponent_bits=5)
FLOAT8_E4M3 = FloatFormat("float8_e4m3", significand_bits=4, exponent_bits=4, finite_only=True)
_NUMBERS_ONLY = {"finite_only": True, "saturates": True, "has_nan": False}
FLOAT6_E3M2 = FloatFormat("float6_e3m2", significand_bits=3, exponent_bits=3, **_NUMBERS_ONLY)
FLOAT6_E2M3 = FloatFormat("float6_e2m3", significand_bits=4, exponent_bits=2, **_NUMBERS_ONLY)
FLOAT4_E2M1 = FloatFormat("float4_e2m1", significand_bits=2, exponent_bits=2, **_NUMBERS_ONLY)

SMALL = (FLOAT8_E4M3, FLOAT8_E5M2, FLOAT6_E3M2, FLOAT6_E2M3, FLOAT4_E2M1)
_NAMED = {fmt.name: fmt for fmt in (FLOAT32, TFLOAT32, FLOAT16, BFLOAT16, *SMALL)}


def format_named(name: str, what: str = "a format") -> FloatFormat:
    """Return the format with a name such as ``"float16"``, or of widths such as ``"e3m4"``.

    ``"e3m4"`` has 3 exponent bits, 4 significant bits after the hidden one, and infinities.

    Raises
    ------
    ValueError
        If there is none that FP32 can hold.
    """
    widths = re.fullmatch(r"e([2-8])m([1-9]|1\d|2[0-3])", str(name))
    if widths is not None:
        return FloatFormat(name, int(widths[2]) + 1, int(widths[1]))
    if name not in _NAMED:
        named = ", ".join(_NAMED)
        raise ValueError(
            f"{what} must be one of {named}, e2m1 to e8m23; received {name!r}"
            f"{did_you_mean(str(name), _NAMED, count=2)}"
        )
    return _NAMED[name]


def round_to(
    x: npt.ArrayLike,
    fmt: FloatFormat,
    mode: str = "nearest",
    *,
    key: Optional[Sequence[int]] = None,
) -> npt.NDArray[Any]:
    """Round to numbers of ``fmt``, and return them in the dtype of ``x``.

    Correct for every input: subnormals of ``fmt`` are kept, and so is the sign of zero.
    Infinities, and values that round past the largest number, become ``fmt.overflow`` with their
    sign. NaN stays NaN in every format: one that has no code for it must not hide a failure.

    Parameters
    ----------
    x : array_like, any shape, float32 or float64
        Integers and lists are taken as float64. The dtype must be at least as wide as ``fmt``.
    fmt : FloatFormat
        The format whose numbers are the result's only values.
    mode : {"nearest", "toward_zero", "stochastic"}
        Ties go to even. Toward zero, finite values stay finite. ``"stochastic"`` takes one of the
        two neighbours so that the mean is the value; its probabilities are multiples of 2**-24.
    key : sequence of int, not negative
        For ``"stochastic"``: the random bits of each element depend on it, and on the place in
        ``x``; such as a seed and the numbers of the step and of the array.

    Returns
    -------
    ndarray, same shape and dtype as ``x``
        A new array; a 0-d array for a scalar.

    Raises
    ------
    TypeError
        If ``x`` has a dtype other than float32, float64 or an integer, in particular one that
        cannot hold the result; or ``fmt`` is not a format.
    ValueError
        If ``mode`` is unknown, or ``key`` does not fit it.

    References
    ----------
    IEEE 754-2019, 4.3.1 (roundTiesToEven), 4.3.2 (roundTowardZero) and 7.4 (overflow); Croci et
    al., "Stochastic rounding: implementation, error analysis and applications", 2022, 2.
    """
    if mode not in _MODES or (mode == "stochastic") != (key is not None):
        raise ValueError(
            f"the rounding mode is one of {', '.join(_MODES)}, and stochastic with a key "
            f"such as (seed, step); received {mode!r} with key={key!r}"
        )
    if not isinstance(fmt, FloatFormat):
        raise TypeError(f"fmt must be a FloatFormat such as mpgluon.FLOAT16, received {fmt!r}")
    values = as_floats(x, "round_to")
    if values.dtype == np.float32 and not fmt.fits_float32:
        raise TypeError(f"float32 cannot hold every {fmt} number; pass float64 values")
    # Work in float64: the product with a power of two and np.rint are then exact for every
    # float32 and float64 input that can round to a finite, nonzero number of `fmt`.
    wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    with np.errstate(over="ignore", invalid="ignore"):  # of NaN, on some processors, even frexp
        _, exponent = np.frexp(wide)  # |wide| lies in [2**(exponent - 1), 2**exponent)
        spacing_exponent = np.maximum(exponent - 1, fmt.min_exponent) - fmt.significand_bits + 1
        spacing_exponent = np.where(finite, spacing_exponent, 0)
        steps = np.ldexp(wide, -spacing_exponent)
        whole = np.rint(steps) if mode == "nearest" else np.trunc(steps)
        if key is not None:
            cut = np.abs(steps - whole)
            whole += np.copysign(np.ldexp(cut, 24) > _draws(key, cut.size).reshape(cut.shape), wide)
        rounded = np.ldexp(whole, spacing_exponent)
        beyond = np.copysign(fmt.overflow, wide)
        if mode == "toward_zero":
            beyond = np.where(finite, np.copysign(fmt.max, wide), beyond)
        rounded = np.where(np.abs(rounded) > fmt.max, beyond, rounded)  # not so for NaN
        return np.asarray(rounded.astype(values.dtype))


def as_floats(x: npt.ArrayLike, function: str) -> npt.NDArray[Any]:
    """Return values as an array of float32 or float64, or raise TypeError; integers are float64."""
    values = np.asarray(x)
    if values.dtype.kind in "iub":
        values = values.astype(np.float64)
    if values.dtype not in (np.float32, np.float64):
        raise TypeError(
            f"{function} takes float32 or float64 values, received {values.dtype}; "
            "convert with .astype('float32') first"
        )
    return values


def integers_beyond(values: npt.NDArray[np.float32], fmt: FloatFormat) -> bool:
    """Whether all values are integers, and some are not in ``fmt``: positions, not weights."""
    return bool((values == np.rint(values)).all() and (values != round_to(values, fmt)).any())


def lost_values(values: npt.NDArray[np.float32], fmt: FloatFormat) -> tuple[int, int]:
    """Return how many values become infinite, and how many 0 in an array without normal numbers.

    In an array with normal numbers, a value that becomes 0 is within their rounding error.
    """
    size, lost = np.abs(values), fmt.loses(values)
    infinite = int((lost & (size > 1)).sum())
    has_normal = not size.max(initial=0) < fmt.smallest_normal
    return infinite, 0 if has_normal else int(lost.sum())


def random_key(key: Sequence[int]) -> np.uint64:
    """Return the word that a key's random bits are made from, or refuse a bad key."""
    is_sequence = isinstance(key, (Sequence, np.ndarray)) and len(key) > 0
    if not is_sequence or not all(isinstance(one, (int, np.integer)) and one >= 0 for one in key):
        raise ValueError(f"a key is integers from 0 on, such as (seed, step); received {key!r}")
    return np.uint64(np.random.SeedSequence([len(key), *key]).generate_state(1, np.uint64)[0])


def _draws(key: Sequence[int], count: int) -> npt.NDArray[Any]:
    """Return a random number in [0, 2**24) for each element; kernels/modes.h has the same ones."""
    row, lane = np.arange(-(-count // 64), dtype=np.uint64), np.arange(64, dtype=np.uint32)
    with np.errstate(over="ignore"):
        x = random_key(key) + row * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        low, high = (part.astype(np.uint32)[:, None] for part in (x, x >> np.uint64(32)))
        y = (low + lane * np.uint32(0x9E3779B9)) * np.uint32(0x7FEB352D)
        y = ((y ^ y >> np.uint32(15)) + high) * np.uint32(0x846CA68B)
    return np.asarray((y >> np.uint32(8)).ravel()[:count])
