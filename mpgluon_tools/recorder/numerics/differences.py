"""How one tensor differs between two recordings, and whether rounding can explain it.

Two orders of a sum of n numbers in FP32 differ by about sqrt(n) roundings of 2^-24. Each addition
rounds its partial sum; if terms have random signs, a sum of k has the size sqrt(k), so that n
independent roundings make 2^-24 n / sqrt(2) together, where the sum has the size sqrt(n): relative
to it, sqrt(n / 2) in each order. If all have one sign, it is sqrt(n / 3). The bound for the worst
case has n in place of sqrt(n), and would explain nearly everything.

References
----------
Higham, Mary, "A new approach to probabilistic rounding error analysis", 2019, 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from mpgluon_tools.recorder.numerics.files import NumericsStep, Tensor, TensorName

import numpy as np

__all__ = ["ROUNDINGS", "Difference", "differ", "difference_of", "size_of", "terms_of"]

ROUNDINGS = 32
"""How many roundings of FP32 rounding explains in the shortest sum: exp and its like have some."""

_FP32_ROUNDOFF = 2.0**-24
_OPERANDS = ("input", "activation")
_SUMS = 2  # of a result that are rounded one after the other, such as a mean and a variance


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
        The norm of the difference divided by the norm of the values; NaN as ``units``.
    differing, values : int
        How many of these values differ, and their number: 16 of each tensor, or all of them.
    norms : (float, float)
        The norms of all finite values.
    roundoff : float
        The largest relative error of a rounding to the coarser format.
    terms : int
        How many numbers the longest sum behind a value has; 0 where nothing is summed, as in an
        update, and where it is not known.
    is_rounding : bool or None
        Whether sums in another order can explain it, which does not prove that they do; ``None`` if
        ``terms`` is 0 or too few values are kept to know. In FP32 it is then within twice the
        square root of ``terms`` in roundings, or 32. A narrower format rounds such sums: few
        numbers, those next to a tie, change, by one unit.
    is_mask : bool
        Whether each value that differs is zero in one of the two, and others are not zero.
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
    terms: int = 0
    is_rounding: Optional[bool] = None
    is_mask: bool = False

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


def difference_of(a: Tensor, b: Tensor, terms: int = 0, size: float = 0.0) -> Difference:
    """Compare the values that are kept of both: all, or up to 16.

    Parameters
    ----------
    a, b : Tensor
    terms : int
        See `Difference`.
    size : float
        How large a value would be if the numbers that it sums did not cancel; 0 if that is not
        known: as large as it is.
    """
    coarser = max((a.float_format, b.float_format), key=lambda f: -f.significand_bits)
    roundoff = 2.0**-coarser.significand_bits
    units = relative = math.nan
    differing, is_rounding, is_mask = 0, None, False
    kept = [one.values for one in (a, b)]
    if kept[0].size != kept[1].size:  # all values of one, some of the other
        kept = [one.sample for one in (a, b)]
    values = min(one.size for one in kept)
    norms = (a.statistics.norm, b.statistics.norm)
    of_sums = max(ROUNDINGS, _SUMS * math.sqrt(terms)) * _FP32_ROUNDOFF
    if a.shape == b.shape:
        x, y = (one.astype(np.float64) for one in kept)
        other = (x != y) & ~(np.isnan(x) & np.isnan(y))
        differing = int(other.sum())
        if differing:
            finite = np.isfinite(x) & np.isfinite(y)
            both = (x != 0) & (y != 0)
            is_mask = bool(both.any() and not (both & other).any())
            units = relative = math.inf
            if finite[other].all():
                x, y, other = x[finite], y[finite], other[finite]
                exponents = np.frexp(np.maximum(np.abs(x), np.abs(y)))[1] - 1
                exponents = np.maximum(exponents, coarser.min_exponent)
                spacing = np.ldexp(1.0, exponents - coarser.significand_bits + 1)
                distance, norm = np.abs(x - y), float(np.linalg.norm(x))
                units = float((distance / spacing).max())
                error = float(np.linalg.norm(distance))
                relative = error / norm if norm else math.inf
                expected = of_sums * max(norm / math.sqrt(x.size), size)
                is_rounding = error <= expected * math.sqrt(x.size)
                if roundoff > _FP32_ROUNDOFF:  # the few sums that are so near to a tie pass it
                    most = float(np.minimum(1.0, expected / spacing).sum())
                    one_unit = bool((distance <= spacing + expected).all())
                    is_rounding = one_unit and differing <= most + 3 * math.sqrt(most) + 1
        elif not size:
            near = math.isclose(*norms, rel_tol=max(of_sums, ROUNDINGS * roundoff))
            is_rounding = None if near else False
    formats, shapes = (a.format, b.format), (a.shape, b.shape)
    if formats[0] != formats[1] or shapes[0] != shapes[1]:
        is_rounding = False
    elif not terms:
        is_rounding = None
    return Difference(
        a.id, a.block, formats, shapes, units, relative, differing, values, norms, roundoff,
        terms, is_rounding, is_mask,
    )  # fmt: skip


def terms_of(step: NumericsStep, name: TensorName) -> int:
    """Return how many numbers the longest sum behind a value has; 0 if that is not known.

    As far as the recorded shapes tell: of a product, a row of the weight; of a normalization, and
    of the gradient of a parameter, the batch and its pixels; of a block without weights, such as a
    pooling or a loss, the size of the largest possible operand over the result's.
    """
    if name.kind in ("gradient", "running statistic"):
        weight, results = step.tensors.get(TensorName("weight", name.name)), _of_layer(step, name)
        if weight is None or not results:
            return 0
        channels = weight.shape[1 if results[0].block == "Embedding" else 0]
        return max(1, sum(t.statistics.size for t in results) // channels)
    if name.kind not in ("activation", "loss", "activation gradient"):
        return 0
    tensor = step.tensors[name]
    size = tensor.statistics.size
    if name.kind == "activation gradient":
        products = [t for t in step.of("weight") if len(t.shape) > 1]
        return max(1, size // max(1, *tensor.shape[1:2]), *map(_of_column, products))
    own = [t for t in step.of("weight") if (_layer(t.id) or tensor.block) == name.name]
    if own:
        channels = own[0].shape[0]
        rows = [t.statistics.size // t.shape[0] for t in own if len(t.shape) > 1]
        return max(rows or (size // channels, channels, 1))
    before = list(step.tensors)[: list(step.tensors).index(name)]
    operands = [step.tensors[n].statistics.size for n in before if n.kind in _OPERANDS]
    return max(1, max(operands, default=0) // max(1, size), *tensor.shape[1:])


def size_of(step: NumericsStep, name: TensorName) -> float:
    """Return how large the gradient of a bias would be without cancellation; 0 for other tensors.

    It is a sum of the gradients of the layer's results, which are 0 together before a BatchNorm.
    """
    weight = step.tensors.get(TensorName("weight", name.name))
    if name.kind != "gradient" or weight is None or len(weight.shape) != 1:
        return 0.0
    arrived = _of_layer(step, name, "activation gradient")
    norm = math.hypot(*(t.statistics.norm for t in arrived))
    return norm / math.sqrt(weight.statistics.size)


def _layer(parameter: TensorName) -> str:
    return parameter.name.rpartition(".")[0]


def _of_layer(step: NumericsStep, parameter: TensorName, kind: str = "activation") -> list[Tensor]:
    """Return the results of a parameter's layer; the network itself has the name of its class."""
    return [t for t in step.of(kind) if t.id.name == (_layer(parameter) or t.block)]


def _of_column(weight: Tensor) -> int:
    return weight.statistics.size // max(1, weight.shape[1])
