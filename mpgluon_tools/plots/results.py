"""Figures of what functions of :mod:`mpgluon_tools.diagnostics` return."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from mpgluon_tools.diagnostics.alignment import AlignmentReport
from mpgluon_tools.diagnostics.compare import Comparison
from mpgluon_tools.diagnostics.exponents import BatchExponents, ExponentHistogram
from mpgluon_tools.diagnostics.ranges import RangeReport
from mpgluon_tools.diagnostics.scales import LossScales
from mpgluon_tools.diagnostics.sums import SumsReport
from mpgluon_tools.extras import extra
from mpgluon_tools.plots.exponents import draw_exponents
from mpgluon_tools.plots.looks import CROSSES, FOUR_LOOKS, legend_beside

import numpy as np

__all__ = [
    "DRAWINGS",
    "draw",
    "draw_alignment",
    "draw_errors",
    "draw_loss_scales",
    "draw_ranges",
    "draw_sums",
    "png",
]

_MOST_ROWS = 20


def draw(result: Any, axes: Optional[Any] = None) -> Any:
    """Draw what a function of :mod:`mpgluon_tools.diagnostics` returned.

    Parameters
    ----------
    result : Comparison, RangeReport, LossScales, AlignmentReport, SumsReport, BatchExponents or
        ExponentHistogram
    axes : Axes, optional
        By default, those of a new figure of Matplotlib's pyplot, which a notebook shows.

    Raises
    ------
    TypeError
        If there is no drawing of such a result.
    """
    if type(result) not in DRAWINGS:
        kinds = ", ".join(kind.__name__ for kind in DRAWINGS)
        raise TypeError(f"draw takes one of {kinds}; received {type(result).__name__}")
    if axes is None:
        with extra("plots"):
            from matplotlib import pyplot
        _, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    return DRAWINGS[type(result)](axes, result)


def png(draw: Callable[[Any], Any], *, width: float = 9.0, height: float = 4.0) -> bytes:
    """Return a PNG file of the Axes on which ``draw`` drew; width and height in inches."""
    with extra("plots"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.add_subplot())
    file = io.BytesIO()
    figure.savefig(file, dpi=110, format="png")
    return file.getvalue()


def draw_errors(axes: Any, comparison: Comparison) -> Any:
    """Draw what each layer introduces and the error of its result, of the 20 worst in their order.

    Errors that are not finite are crosses at the right edge.
    """
    worst = comparison.ranked()[:_MOST_ROWS]
    layers = [layer for layer in comparison.layers if layer in worst]
    errors = {
        "introduced": [layer.introduced for layer in layers],
        "of its result": [layer.output for layer in layers],
    }
    _draw_dots(axes, [layer.block.name for layer in layers], errors)
    axes.set_xlabel(f"relative error; of the network's result: {comparison.result:.2g}")
    return axes


def draw_sums(axes: Any, report: SumsReport) -> Any:
    """Draw the largest change of each layer by each way of summing, in units of the format's own.

    Above 1.5, it exceeds what other roundings would change.
    """
    blocks = list(report.beside_fp32)[:_MOST_ROWS]
    ratios = {
        accumulation: [report.ratio(accumulation, block) for block in blocks]
        for accumulation in report.changes
    }
    _draw_dots(axes, [block.name for block in blocks], ratios)
    axes.axvline(1.5, color="0.5", linewidth=1)
    axes.set_xlabel(f"largest change, in units of the error of {report.dtype}")
    return axes


def draw_ranges(axes: Any, report: RangeReport) -> Any:
    """Draw which shares of the 20 worst arrays overflow, become zero, and become subnormal."""
    parts = ("overflow_fraction", "underflow_fraction", "subnormal_fraction")
    looks = ({"color": "black"}, {"color": "white", "hatch": "xxx"}, {"color": "0.8"})
    worst = report.worst(_MOST_ROWS)
    lefts = np.zeros(len(worst))
    for part, label, look in zip(parts, ("overflow", "lost (zero)", "subnormal"), looks):
        widths = np.array([100 * getattr(array, part) for array in worst])
        bars = {"edgecolor": "black", "linewidth": 0.5, **look}
        axes.barh(range(len(worst)), widths, left=lefts, label=label, **bars)
        lefts += widths
    _name_rows(axes, [f"{array.name}: {array.kind}" for array in worst])
    axes.set_xlim(0, 100)
    power = round(math.log2(report.loss_scale))
    scale = f"$2^{{{power}}}$" if report.loss_scale == 2.0**power else f"{report.loss_scale:g}"
    axes.set_xlabel(f"share of the values (%), {report.fmt.name} at S = {scale}")
    legend_beside(axes)
    return axes


def draw_loss_scales(axes: Any, scales: LossScales) -> Any:
    """Draw how many gradients overflow, and how many lose over 1 %, at each loss scale."""
    low, high = scales.powers
    powers = range(low, high + 1)
    shares = [scales.shares(2.0**power) for power in powers]
    overflowing = [sum(one["overflow"] > 0 for one in at_scale) for at_scale in shares]
    losing = [sum(one["lost"] > 0.01 for one in at_scale) for at_scale in shares]
    axes.plot(powers, losing, label="lose more than 1 %", **FOUR_LOOKS[1])
    axes.plot(powers, overflowing, label="overflow in part", **FOUR_LOOKS[0])
    axes.axvline(scales.power, color="0.5", linewidth=1, label=f"$2^{{{scales.power}}}$")
    ticks = range(low - low % 4, high + 1, 4)
    axes.set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    axes.set_xlabel("loss scale S")
    axes.set_ylabel(f"of {len(scales.gradients)} gradients")
    legend_beside(axes)
    return axes


def draw_alignment(axes: Any, report: AlignmentReport) -> Any:
    """Draw the shares of the multiply-adds of the 20 largest products, misaligned ones in black."""
    largest = sorted(report.products, key=lambda one: one.multiply_adds, reverse=True)[:_MOST_ROWS]
    products = [product for product in report.products if product in largest]
    shares = [100 * product.multiply_adds / report.multiply_adds for product in products]
    for misaligned, color, label in ((True, "black", "misaligned"), (False, "0.8", "aligned")):
        places = [n for n, one in enumerate(products) if bool(one.misaligned) == misaligned]
        bars = {"color": color, "edgecolor": "black", "linewidth": 0.5, "label": label}
        axes.barh(places, [shares[place] for place in places], **bars)
    _name_rows(axes, [product.layer for product in products])
    axes.set_xlabel(f"share of the multiply-adds (%); aligned to {report.multiple}")
    legend_beside(axes)
    return axes


def _draw_dots(axes: Any, names: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draw a row for each name with a dot for each series, on a logarithmic axis."""
    beyond: list[int] = []
    marks = ("o", "s", "^", "v")
    for number, (label, values) in enumerate(series.items()):
        drawn = [place for place, value in enumerate(values) if math.isfinite(value) and value > 0]
        beyond += [place for place, value in enumerate(values) if not math.isfinite(value)]
        look = {**FOUR_LOOKS[number % 4], "linestyle": "none", "marker": marks[number % 4]}
        axes.plot([values[place] for place in drawn], drawn, label=label, **look)
    axes.set_xscale("log")
    if beyond:
        places, transform = sorted(set(beyond)), axes.get_yaxis_transform()
        edge = [0.98] * len(places)
        axes.plot(edge, places, transform=transform, label="not finite", **CROSSES)
    _name_rows(axes, names)
    axes.grid(axis="x", color="0.9")
    legend_beside(axes)


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    """Name rows from top to bottom."""
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


DRAWINGS: Mapping[type, Callable[[Any, Any], Any]] = {
    Comparison: draw_errors,
    RangeReport: draw_ranges,
    LossScales: draw_loss_scales,
    AlignmentReport: draw_alignment,
    SumsReport: draw_sums,
    BatchExponents: lambda axes, result: draw_exponents(axes, result.overall()),
    ExponentHistogram: lambda axes, result: draw_exponents(axes, {"values": result}),
}
