"""The effect of a format on each array of one batch at a loss scale, and which scale to choose.

Nothing is cast: the FP32 values, times the loss scale, are rounded to the format and counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpgluon.formats.float_format import FLOAT16, FloatFormat, round_to
from mpgluon.formats.loss_scale import LARGEST_SCALE
from mpgluon.formats.scaling import scale_exponents
from mpgluon_tools.diagnostics.exponents import ExponentHistogram, exponent_histogram
from mpgluon_tools.diagnostics.observe import Batch, Seen, observed_batch, values_of
from mpgluon_tools.plots.axes import axes_or_new
from mpgluon_tools.plots.rows import draw_bars
from mpgluon_tools.tables import Result, Table, percent

import numpy as np
import numpy.typing as npt
from mxnet import gluon

__all__ = ["ArrayRange", "RangeReport", "range_report"]


@dataclass(frozen=True)
class ArrayRange:
    """How one array fits into a format.

    Attributes
    ----------
    name : str
        Name of the parameter, or of the block.
    kind : {"handed on", "output", "output gradient", "gradient"}
        As of :class:`mpgluon_tools.diagnostics.observe.Seen`, of arrays that the block computed
        itself.
    largest : float
        The absolute maximum, without the loss scale; infinite if a value is not finite.
    overflow_fraction, underflow_fraction, subnormal_fraction : float
        The shares in [0, 1] of elements that are too large, whether they become infinite, NaN or
        the largest number, or are not finite; that become zero from another value; and that
        become subnormal.
    exponents : ExponentHistogram
        Without the loss scale.
    """

    name: str
    kind: str
    largest: float
    overflow_fraction: float
    underflow_fraction: float
    subnormal_fraction: float
    exponents: ExponentHistogram


@dataclass(frozen=True)
class RangeReport(Result):
    """How everything that a network computes on one batch fits into a format.

    Attributes
    ----------
    arrays : sequence of ArrayRange
        Outputs in the order of computation, then gradients in the order of the backward pass.
    fmt : FloatFormat
    loss_scale : float
        That the gradients were multiplied by; outputs have none.
    scaled : bool
        Whether each array was multiplied by a scale of its own too.
    """

    arrays: Sequence[ArrayRange]
    fmt: FloatFormat
    loss_scale: float
    scaled: bool = False

    def gradients(self) -> list[ArrayRange]:
        """Return the arrays that a loss scale multiplies."""
        return [a for a in self.arrays if a.kind in ("output gradient", "gradient")]

    def broken_gradients(self) -> list[str]:
        """Return the names of gradients that are not finite without any scale."""
        return [a.name for a in self.gradients() if not math.isfinite(a.largest)]

    def recommended_loss_scale(self, headroom: float = 2.0) -> float:
        """Return the largest power of two at which no gradient of this batch overflows.

        Parameters
        ----------
        headroom : float
            The factor by which gradients of other batches may be larger. A dynamic scale settles
            where the largest gradient of many batches just fits: near a headroom of 1 to 2.

        Returns
        -------
        float
            A power of two, at most 2^126, or 1 if every gradient is zero.

        Raises
        ------
        ValueError
            If ``headroom`` is not a finite number from 1 on, or a gradient is infinite whatever
            the scale.
        """
        if not 1 <= headroom < math.inf:
            raise ValueError(f"headroom must be at least 1 and finite, received {headroom!r}")
        broken = self.broken_gradients()
        if broken:
            raise ValueError(f"gradients are not finite without any scale: {', '.join(broken[:5])}")
        largest = max((array.largest for array in self.gradients()), default=0.0)
        if largest == 0:
            return 1.0
        power = math.floor(math.log2(self.fmt.max / headroom / largest))
        return min(2.0**power, LARGEST_SCALE)

    def worst(self, count: int) -> list[ArrayRange]:
        """Return the arrays that overflow most, then those that lose most."""

        def loss(array: ArrayRange) -> tuple[float, float]:
            return array.overflow_fraction, array.underflow_fraction + array.subnormal_fraction

        return sorted(self.arrays, key=loss, reverse=True)[:count]

    def table(self, worst: int = 20) -> Table:
        """Return the arrays that lose most."""
        rows = []
        for a in self.worst(worst):
            shares = (a.overflow_fraction, a.underflow_fraction, a.subnormal_fraction)
            rows.append((a.name, a.kind, f"{a.largest:.3g}", *map(percent, shares)))
        beyond = "saturated" if self.fmt.saturates else "overflow"
        return Table(("array", "what", "largest", beyond, "underflow", "subnormal"), rows)

    def plot(self, ax: Any = None) -> Any:
        """Draw which shares of the 20 worst arrays overflow, become zero, and become subnormal.

        Draws on ``ax``, Axes of Matplotlib, by default of a new figure, and returns them.
        """
        axes = axes_or_new(ax)
        worst = self.worst(20)
        parts = {
            "overflow": [100 * array.overflow_fraction for array in worst],
            "lost (zero)": [100 * array.underflow_fraction for array in worst],
            "subnormal": [100 * array.subnormal_fraction for array in worst],
        }
        draw_bars(axes, [f"{array.name}: {array.kind}" for array in worst], parts)
        axes.set_xlim(0, 100)
        power = round(math.log2(self.loss_scale))
        scale = f"$2^{{{power}}}$" if self.loss_scale == 2.0**power else f"{self.loss_scale:g}"
        axes.set_xlabel(f"share of the values (%), {self.fmt.name} at S = {scale}")
        return axes

    def __str__(self) -> str:
        count = sum(array.overflow_fraction > 0 for array in self.arrays)
        scaled = ", each array times a scale of its own" if self.scaled else ""
        return (
            f"{self.fmt.name} at a loss scale of {self.loss_scale:g}{scaled}: {count} of "
            f"{len(self.arrays)} arrays {'saturate' if self.fmt.saturates else 'overflow'}\n"
            f"{self.table()}"
        )


def range_report(
    net: gluon.Block,
    batch: Batch,
    *,
    loss_scale: float = 1.0,
    fmt: FloatFormat = FLOAT16,
    scaled: bool = False,
) -> RangeReport:
    """Run one batch and return how all its arrays fit into a format.

    Parameters
    ----------
    net : gluon.Block
        In FP32. A cast network has lost values already, which are not counted; it is run with
        ``loss_scale``.
    batch : Batch
    loss_scale : float
        Multiplies the gradients.
    fmt : FloatFormat
    scaled : bool
        Whether each array is multiplied by the power of two that takes its largest value to the
        format's largest numbers, as under ``Policy.parse("mixed_float8")``.
    """
    outputs: list[ArrayRange] = []
    gradients: list[ArrayRange] = []

    def note(seen: Seen) -> None:
        if not seen.made:  # an inner block computed it
            return
        values = values_of(seen.array).astype(np.float64)
        if seen.kind in ("handed on", "output"):
            outputs.append(_range_of(seen.block.name, seen.kind, values, 1.0, fmt, scaled))
        else:
            name = seen.operator or seen.block.name
            values /= loss_scale
            gradients.append(_range_of(name, seen.kind, values, loss_scale, fmt, scaled))

    observed_batch(net, batch, note, loss_scale=loss_scale, handed_on=True)
    return RangeReport([*outputs, *gradients], fmt, loss_scale, scaled)


def _range_of(
    name: str,
    kind: str,
    values: npt.NDArray[np.float64],
    scale: float,
    fmt: FloatFormat,
    scaled: bool,
) -> ArrayRange:
    size = np.abs(values)
    multiplied = size * scale
    if scaled and np.isfinite(multiplied).all():
        exponent = scale_exponents(multiplied.max(initial=0.0), fmt)
        multiplied = np.ldexp(multiplied, exponent)
    rounded = round_to(multiplied, fmt)
    # With float64's exponents, so that a format that saturates does not hide overflows.
    without_limit = round_to(multiplied, FloatFormat("", fmt.significand_bits, 11))
    subnormal = (rounded > 0) & (rounded < fmt.smallest_normal)
    return ArrayRange(
        name=name,
        kind=kind,
        largest=float(size.max(initial=0.0)) if np.isfinite(size).all() else math.inf,
        overflow_fraction=_share(~(without_limit <= fmt.max)),
        underflow_fraction=_share((rounded == 0) & (size > 0)),
        subnormal_fraction=_share(subnormal),
        exponents=exponent_histogram([values]),
    )


def _share(chosen: npt.NDArray[np.bool_]) -> float:
    return float(chosen.mean()) if chosen.size else 0.0
