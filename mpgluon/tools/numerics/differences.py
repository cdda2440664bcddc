"""How one tensor differs between two recordings, and whether rounding explains it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from mpgluon.tools.numerics.files import Tensor, TensorName

import numpy as np

__all__ = ["ROUNDINGS", "Difference", "differ", "difference_of"]

ROUNDINGS = 32
"""How many roundings of FP32 an error of an FP32 tensor may be that rounding explains."""

_FP32_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class Difference:
    """How one tensor differs between two recordings, at one step.

    Attributes
    ----------
    id : TensorName
    block : str
        The class of the layer, of an activation or its gradient.
    formats : (str, str)
    shapes : (tuple of int, tuple of int)
    units : float
        The largest difference in units in the last place of the coarser format; NaN if none of the
        values that both keep differs, infinite if one of them is not finite.
    relative : float
        The norm of the difference of these values over that of the values; NaN as ``units``.
    differing, values : int
        How many of these values differ, and their number: 16 of each tensor, or all of them.
    norms : (float, float)
        The norms of all finite values.
    roundoff : float
        The largest relative error of a rounding to the coarser format.
    """

    id: TensorName
    block: str
    formats: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    units: float
    relative: float
    differing: int
    values: int
    norms: tuple[float, float]
    roundoff: float

    @property
    def is_rounding(self) -> Optional[bool]:
        """Whether sums in another order explain it; ``None`` if too few values are kept to know.

        In FP32 they change a result by a few roundings. A narrower format rounds sums of FP32,
        which differ by much less than its units, so that few numbers change, by one unit.
        """
        if self.formats[0] != self.formats[1] or self.shapes[0] != self.shapes[1]:
            return False
        if math.isnan(self.relative):
            return None if math.isclose(*self.norms, rel_tol=ROUNDINGS * self.roundoff) else False
        if self.roundoff <= _FP32_ROUNDOFF:
            return self.relative <= ROUNDINGS * self.roundoff
        return self.units <= 2 and self.differing <= self.values / 2

    def __str__(self) -> str:
        if self.shapes[0] != self.shapes[1]:
            return f"shape {self.shapes[0]} and {self.shapes[1]}"
        if self.formats[0] != self.formats[1]:
            return f"{self.formats[0]} and {self.formats[1]}"
        if math.isnan(self.units):
            return (
                f"the bits differ, but not in the {self.values} values that are kept; norms "
                f"{self.norms[0]:.9g} and {self.norms[1]:.9g}"
            )
        whole = self.shapes[0] == () or self.values == math.prod(self.shapes[0])
        size = math.prod(self.shapes[0])
        of = f"{size:,} values" if whole else f"{self.values} values that are kept of {size:,}"
        return (
            f"{self.differing:,} of the {of} differ, by up to {self.units:.3g} "
            f"unit{'s' * (self.units != 1)} in the last place ({self.relative:.2g} of their norm)"
        )


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether any bit, the format or the shape differs."""
    return a.checksum != b.checksum or a.format != b.format or a.shape != b.shape


def difference_of(a: Tensor, b: Tensor) -> Difference:
    """Compare the values that are kept of both: all, or up to 16."""
    coarser = max((a.float_format, b.float_format), key=lambda f: -f.significand_bits)
    units = relative = math.nan
    differing = 0
    kept = [one.values for one in (a, b)]
    if kept[0].size != kept[1].size:  # all values of one, some of the other
        kept = [one.sample for one in (a, b)]
    values = min(one.size for one in kept)
    if a.shape == b.shape:
        x, y = (one.astype(np.float64) for one in kept)
        other = (x != y) & ~(np.isnan(x) & np.isnan(y))
        differing = int(other.sum())
        if differing:
            distance = np.abs(x - y)[other]
            exponents = np.frexp(np.maximum(np.abs(x), np.abs(y))[other])[1] - 1
            spacing = np.ldexp(
                1.0, np.maximum(exponents, coarser.min_exponent) - coarser.significand_bits + 1
            )
            finite = np.isfinite(x) & np.isfinite(y)
            units = float((distance / spacing).max()) if finite[other].all() else math.inf
            norm = float(np.linalg.norm(x[finite]))
            error = float(np.linalg.norm((x - y)[finite]))
            relative = math.inf if not finite[other].all() else error / norm if norm else math.inf
    return Difference(
        a.id,
        a.block,
        (a.format, b.format),
        (a.shape, b.shape),
        units,
        relative,
        differing,
        values,
        (a.statistics.norm, b.statistics.norm),
        2.0**-coarser.significand_bits,
    )
