"""Figures of plain data: each ``draw_`` function draws on Axes of Matplotlib and returns them.

The training functions take events of :mod:`recipes.training.history`: ``steps`` have ``step``,
``epoch``, ``loss``, ``loss_scale`` (of that step), ``skipped`` and, where they are known,
``images``, ``images_per_second`` and ``gradient_norm``; ``epochs`` have ``step`` (its last),
``train_loss``, and in [0, 1] ``train_accuracy``, ``test_accuracy`` and, if known,
``test_accuracy_per_class``, the mean of the classes' accuracies.

What :mod:`mpgluon.diagnostics` returns is drawn by :func:`draw`, which the results' ``plot`` calls.

Matplotlib is imported only when a figure is drawn. Every figure can be read without colour: grey
for single steps, black for means, and line styles, marks and hatches besides. ``FORMAT_LOOKS`` has
the colour, mark and line style of each number format, as keywords of ``Axes.plot``; the colours are
those of Wong, "Color blindness", Nature Methods 8, 2011, which the colour-blind tell apart.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Optional, Union

from mpgluon.diagnostics.alignment import AlignmentReport
from mpgluon.diagnostics.compare import Comparison
from mpgluon.diagnostics.exponents import BatchExponents, ExponentHistogram
from mpgluon.diagnostics.ranges import RangeReport
from mpgluon.diagnostics.scales import LossScales
from mpgluon.diagnostics.sums import SumsReport
from mpgluon.formats.float_format import FLOAT16
from mpgluon.tools import extra

import numpy as np
import numpy.typing as npt

__all__ = [
    "FORMAT_LOOKS",
    "draw",
    "draw_accuracy",
    "draw_alignment",
    "draw_errors",
    "draw_exponent_heatmap",
    "draw_exponents",
    "draw_gradient_norm",
    "draw_loss",
    "draw_loss_scale",
    "draw_loss_scales",
    "draw_ranges",
    "draw_speed",
    "draw_sums",
    "draw_training",
    "png",
    "save_training_curves",
]

Event = dict[str, Any]
Histogram = Union[ExponentHistogram, tuple[npt.ArrayLike, npt.ArrayLike, int]]

FORMAT_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "float32": {"color": "black", "marker": "o", "linestyle": "-"},
    "float16": {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    "mixed_float16": {"color": "#56B4E9", "marker": "D", "linestyle": "-."},
    "bfloat16": {"color": "#D55E00", "marker": "^", "linestyle": ":"},
    "mixed_float8": {"color": "#009E73", "marker": "v", "linestyle": (0, (6, 1, 1, 1, 1, 1))},
}

_EACH_STEP: dict[str, Any] = {"color": "0.65", "linewidth": 1}
_EACH_EPOCH: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 4}
_SKIPPED: dict[str, Any] = {"color": "black", "marker": "x", "markersize": 6, "linestyle": "none"}
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}

# --- training --------------------------------------------------------------------------------


def save_training_curves(
    path: Path, steps: Sequence[Event], epochs: Sequence[Event], *, title: str
) -> None:
    """Write the figure of :func:`draw_training` to a PNG file, 1200 pixels wide."""
    with extra("plots"):
        from matplotlib.figure import Figure  # no pyplot: nothing global, no display needed

    figure = Figure(figsize=(10, 1), layout="constrained")
    panels = draw_training(figure, steps, epochs)
    figure.set_figheight(0.6 + 1.9 * len(panels))
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def draw_training(figure: Any, steps: Sequence[Event], epochs: Sequence[Event]) -> list[Any]:
    """Draw the history of a run in an empty figure; return the panels from top to bottom.

    Loss and accuracy; the loss scale if there was one, gradient norm and speed where they are
    known. The panels share the step axis. There must be a step and an epoch.
    """
    norms = (event.get("gradient_norm") for event in steps)
    draw: list[Any] = [
        lambda axes: draw_loss(axes, steps, epochs),
        lambda axes: draw_accuracy(axes, epochs),
    ]
    if any(event["loss_scale"] != 1 or event["skipped"] for event in steps):
        draw.append(lambda axes: draw_loss_scale(axes, steps))
    if any(norm is not None and 0 < norm < math.inf for norm in norms):
        draw.append(lambda axes: draw_gradient_norm(axes, steps))
    if any("images_per_second" in event for event in steps):
        draw.append(lambda axes: draw_speed(axes, steps))
    panels = figure.subplots(len(draw), 1, sharex=True, squeeze=False)[:, 0]
    for axes, draw_one in zip(panels, draw):
        draw_one(axes)
    panels[-1].set_xlabel("step")
    figure.align_ylabels(panels)
    return list(panels)


def draw_loss(axes: Any, steps: Sequence[Event], epochs: Sequence[Event]) -> Any:
    """Draw the training loss of each step and its mean over each epoch, from 0 upwards.

    Losses that are not finite are gaps, with a cross near the upper edge.
    """
    axes.plot(*_points(steps, "loss"), label="each step", **_EACH_STEP)
    axes.plot(*_points(epochs, "train_loss"), label="mean of epoch", **_EACH_EPOCH)
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    _mark_not_finite(axes, steps, "loss")
    _legend_beside(axes)
    return axes


def draw_accuracy(axes: Any, epochs: Sequence[Event]) -> Any:
    """Draw the accuracy in training and in the test.

    The mean of the classes' test accuracies is drawn where it is known and another number, as it is
    with classes of different sizes.
    """
    training = {**_EACH_EPOCH, "color": "0.5", "marker": "s", "linestyle": "--"}
    axes.plot(*_points(epochs, "train_accuracy"), label="training", **training)
    of_average = any(event.get("tested") == "average" for event in epochs)
    label = "test of\nthe average" if of_average else "test"
    axes.plot(*_points(epochs, "test_accuracy"), label=label, **_EACH_EPOCH)
    per_class = [event for event in epochs if "test_accuracy_per_class" in event]
    if any(not math.isclose(e["test_accuracy"], e["test_accuracy_per_class"]) for e in per_class):
        look = {**_EACH_EPOCH, "marker": "^", "linestyle": ":", "markerfacecolor": "white"}
        label += ", mean of\nthe classes"
        axes.plot(*_points(per_class, "test_accuracy_per_class"), label=label, **look)
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1.05)
    _legend_beside(axes)
    return axes


def draw_loss_scale(axes: Any, steps: Sequence[Event]) -> Any:
    """Draw the loss scale, in powers of two, and the steps that were skipped."""
    skipped = [event for event in steps if event["skipped"]]
    axes.step(*_points(steps, "loss_scale"), "k", where="mid", label="loss scale")
    label = f"skipped: {len(skipped)} of {len(steps)}"
    places = Counter(event.get("overflow_began_in") for event in skipped)
    for place, number in places.most_common(3) if any(places) else ():
        label += f"\n{number} in {place or 'an unknown layer'}"
    axes.plot(*_points(skipped, "loss_scale"), label=label, **_SKIPPED)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale S")
    _legend_beside(axes)
    return axes


def draw_gradient_norm(axes: Any, steps: Sequence[Event]) -> Any:
    """Draw the norm of each step's gradients in powers of two.

    Norms are in true units, divided by loss scale and batch size. Steps whose norm is infinite or
    NaN are crosses near the upper edge; ``None`` is a gap.
    """
    events = [event for event in steps if event.get("gradient_norm") is not None]
    axes.plot(*_points(events, "gradient_norm"), "k", linewidth=1, label="each step")
    axes.set_yscale("log", base=2)
    if _mark_not_finite(axes, events, "gradient_norm"):
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.15)  # room for them
    axes.set_ylabel("gradient norm")
    _legend_beside(axes)
    return axes


def draw_speed(axes: Any, steps: Sequence[Event]) -> Any:
    """Draw the images per second of each step and each epoch, from 0 upwards.

    An epoch's speed is that of its steps, without the time between them.
    """
    timed = [event for event in steps if "images_per_second" in event]
    ends, means = [], []
    for epoch in sorted({event["epoch"] for event in timed}):
        own = [event for event in timed if event["epoch"] == epoch]
        ends.append(own[-1]["step"])
        seconds = sum(event["images"] / event["images_per_second"] for event in own)
        means.append(sum(event["images"] for event in own) / seconds)
    axes.plot(*_points(timed, "images_per_second"), label="each step", **_EACH_STEP)
    axes.plot(ends, means, label="mean of epoch", **_EACH_EPOCH)
    axes.set_ylabel("images per second")
    axes.set_ylim(bottom=0)
    _legend_beside(axes)
    return axes


def _points(events: Sequence[Event], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values; what is not finite becomes NaN, which is drawn as a gap."""
    for event in events:
        missing = {name, "step"} - event.keys()
        if missing:
            raise ValueError(
                f"each event needs {name!r} and 'step'; received one without "
                f"{' and '.join(map(repr, sorted(missing)))}: {event}"
            )
    values = [event[name] if math.isfinite(event[name]) else math.nan for event in events]
    return [event["step"] for event in events], values


def _mark_not_finite(axes: Any, events: Sequence[Event], name: str) -> bool:
    """Draw a cross near the upper edge for each value that is not finite, if there are any."""
    places = [event["step"] for event in events if not math.isfinite(event[name])]
    if places:
        transform = axes.get_xaxis_transform()
        label, heights = f"not finite: {len(places)}", [0.93] * len(places)
        axes.plot(places, heights, transform=transform, label=label, **_SKIPPED)
    return bool(places)


def _legend_beside(axes: Any) -> None:
    """Draw the legend right of the axes, in a figure that makes room for it."""
    _make_room(axes)
    axes.legend(**_BESIDE)


def _make_room(axes: Any) -> None:
    """Let a figure without a layout of its own fit what stands outside of the axes."""
    if axes.figure.get_layout_engine() is None:
        axes.figure.set_layout_engine("constrained")


# --- exponents -------------------------------------------------------------------------------

# Exponents at which a range of float16 begins; 65504 is one rounding step below 2**16.
_SUBNORMAL = FLOAT16.min_exponent - FLOAT16.significand_bits + 1
_NORMAL = FLOAT16.min_exponent
_TOO_LARGE = FLOAT16.max_exponent + 1
# Exponents that are always shown: a strip on each side of float16's range, in which its name fits.
_LOW, _HIGH = _SUBNORMAL - 5, _TOO_LARGE + 8
_FIRST, _LAST = -70, 30  # the most that is shown, so that float16's ranges are never too narrow
_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "black", "linestyle": "-"},
    {"color": "#0072B2", "linestyle": "--"},
    {"color": "#D55E00", "linestyle": ":"},
    {"color": "#009E73", "linestyle": "-."},
)


def draw_exponents(
    axes: Any, histograms: Mapping[str, Histogram], *, loss_scale: float = 1.0
) -> Any:
    """Draw histograms of exponents, and which of the values float16 can hold.

    A value with exponent e lies between 2**e and 2**(e + 1). Behind the histograms are float16's
    ranges. The legend has the shares that are lost (below 2**-24, of which rounding to nearest
    saves some), subnormal (below 2**-14: fewer significant bits) and too large (from 2**16). Zeros
    have no exponent and count in none of these shares. The axis ends at 2**-70 and 2**30; values
    beyond count in the shares.

    Parameters
    ----------
    axes : Axes
        Wider than high; the legend is above it.
    histograms : mapping from str to ExponentHistogram, or to (exponents, counts, zeros)
        By name: two arrays of int, shape (E,), consecutive exponents and the count of each; and the
        number of zeros. Four can be distinguished, without colour too.
    loss_scale : float
        If it is not 1, each histogram is drawn twice: thin and grey as it is, thick and black
        multiplied by this power of two, which moves it along the axis.

    Raises
    ------
    ValueError
        If ``loss_scale`` is not a power of two, or there is no histogram.
    """
    if not histograms:
        raise ValueError("there is no histogram to draw; received an empty mapping")
    mantissa, exponent = math.frexp(loss_scale)
    if mantissa != 0.5:
        raise ValueError(f"loss_scale must be a power of two, received {loss_scale!r}")
    shift = exponent - 1
    as_it_is: dict[str, Any] = {"color": "0.5", "linewidth": 1}
    for number, (name, histogram) in enumerate(histograms.items()):
        exponents, counts, zeros = _parts(histogram)
        look = _LOOKS[number % len(_LOOKS)]
        places = np.asarray(exponents)
        if shift:
            thin = {**look, **as_it_is}
            _draw_histogram(axes, name, (places, counts, zeros), **thin)
            places, name = places + shift, rf"{name} $\times\,2^{{{shift}}}$"
        _draw_histogram(axes, name, (places, counts, zeros), linewidth=2, **look)
    low, high = axes.dataLim.intervalx
    axes.set_xlim(min(low, _LOW), max(high, _HIGH))
    axes.set_ylim(0, 1.2 * axes.dataLim.ymax or 1)  # the ranges' names have room at the top
    axes.set_ylabel("share of non-zero values (%)")
    _make_room(axes)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize="small")
    _draw_ranges(axes, hatched=True)
    return axes


def draw_exponent_heatmap(
    axes: Any, layers: Sequence[str], histograms: Sequence[Histogram], *, low: int = _LOW
) -> Any:
    """Draw a row of exponents for each layer, darker where there are more values.

    Parameters
    ----------
    axes : Axes
        Axes of a figure with a constrained layout; 0.2 inches in height per layer are enough.
    layers : sequence of str
        Their names in forward order; the first is drawn at the top.
    histograms : sequence of (exponents, counts, zeros)
        One for each layer, as :func:`draw_exponents` takes them.
    low : int
        The exponent at which the axis begins, if none is smaller.

    Raises
    ------
    ValueError
        If there are not as many histograms as layers, or none.
    """
    with extra("plots"):
        from matplotlib.colors import LogNorm

    if not layers or len(layers) != len(histograms):
        raise ValueError(
            f"each layer needs one histogram; received {len(layers)} layers and "
            f"{len(histograms)} histograms"
        )
    trimmed = [_trim(histogram) for histogram in histograms]
    low = min([low, *(places[0] for places, _ in trimmed if len(places))])
    high = max([_HIGH, *(places[-1] + 1 for places, _ in trimmed if len(places))])
    table = np.zeros((len(layers), high - low))
    for row, (places, counts) in zip(table, trimmed):
        row[places - low] = counts
    mesh = axes.pcolormesh(
        np.arange(low, high + 1),
        np.arange(len(layers) + 1),
        np.where(table > 0, table, np.nan),
        cmap="Greys",
        norm=LogNorm(vmin=0.5, vmax=max(table.max(), 10)),  # a single value is not quite white
    )
    axes.figure.colorbar(mesh, ax=axes, label="number of values", pad=0.01)
    axes.set_yticks(np.arange(len(layers)) + 0.5, layers, fontsize="small")
    axes.set_ylim(len(layers), 0)
    axes.tick_params(axis="y", length=0)
    _draw_ranges(axes, hatched=False)
    return axes


def _parts(histogram: Histogram) -> tuple[npt.ArrayLike, npt.ArrayLike, int]:
    if isinstance(histogram, ExponentHistogram):
        return histogram.exponents, histogram.counts, histogram.zeros
    return histogram


def _trim(histogram: Histogram) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return exponents and counts from the first to the last that occurs."""
    exponents, counts = map(np.asarray, _parts(histogram)[:2])
    used = np.flatnonzero(counts)
    if not len(used):
        return exponents[:0], counts[:0]
    return exponents[used[0] : used[-1] + 1], counts[used[0] : used[-1] + 1]


def _draw_histogram(axes: Any, name: str, histogram: Histogram, **look: Any) -> None:
    exponents, counts = _trim(histogram)
    zeros = _parts(histogram)[2]
    shares = counts / max(counts.sum(), 1)
    words = [
        f"{_percent(shares[exponents < _SUBNORMAL].sum())} lost",
        f"{_percent(shares[(exponents >= _SUBNORMAL) & (exponents < _NORMAL)].sum())} subnormal",
        f"{_percent(shares[exponents >= _TOO_LARGE].sum())} too large",
    ]
    if zeros:
        words.append(f"zeros: {_percent(zeros / (zeros + counts.sum()))}")
    edges = [*exponents, exponents[-1] + 1] if len(exponents) else [_NORMAL]
    axes.stairs(100 * shares, edges, label=f"{name}: {', '.join(words)}", **look)


def _percent(share: float) -> str:
    """Return a share in percent, with two digits; only 0 becomes "0 %"."""
    if share == 0 or share >= 0.0995:
        return f"{100 * share:.0f} %"
    return f"{100 * share:.2g} %" if share >= 1e-4 else "< 0.01 %"


def _draw_ranges(axes: Any, *, hatched: bool) -> None:
    """Draw the borders and the names of float16's ranges on an axis of exponents."""
    low, high = max(axes.get_xlim()[0], _FIRST), min(axes.get_xlim()[1], _LAST)
    ranges = (
        ("lost", low, _SUBNORMAL, "xx"),
        ("subnormal", _SUBNORMAL, _NORMAL, "//"),
        ("normal in FP16", _NORMAL, _TOO_LARGE, ""),
        ("too large", _TOO_LARGE, high, "xx"),
    )
    place = {"y": 0.97, "va": "top"} if hatched else {"y": 1.01, "va": "bottom"}
    for name, begin, end, hatch in ranges:
        if hatched:
            axes.axvspan(begin, end, facecolor="none", edgecolor="0.88", hatch=hatch, zorder=0)
        middle = (begin + end) / 2
        axes.text(middle, s=name, ha="center", transform=axes.get_xaxis_transform(), **place)
    borders = (_SUBNORMAL, _NORMAL, _TOO_LARGE)
    for border in borders:
        if not hatched:
            axes.axvline(border, color="white", linewidth=3)  # a rim on a dark background
        axes.axvline(border, color="black", linewidth=1)
    axes.set_xlim(low, high)
    inches = axes.get_window_extent().width / axes.figure.dpi
    step = 4 if high - low < 10 * inches else 8  # labels that do not touch
    others = range(math.ceil(low / step) * step, math.floor(high) + 1, step)
    ticks = [*borders, *(tick for tick in others if min(abs(tick - b) for b in borders) > step / 2)]
    axes.set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    axes.set_xlabel("magnitude of a value")


def png(draw: Callable[[Any], Any], *, width: float = 9.0, height: float = 4.0) -> bytes:
    """Return a PNG file of the Axes on which ``draw`` drew; width and height in inches."""
    with extra("plots"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.add_subplot())
    file = io.BytesIO()
    figure.savefig(file, dpi=110, format="png")
    return file.getvalue()


# --- results of diagnostics ------------------------------------------------------------------

_MOST_ROWS = 20


def draw(result: Any, axes: Optional[Any] = None) -> Any:
    """Draw what a function of :mod:`mpgluon.diagnostics` returned.

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
    if type(result) not in _DRAWINGS:
        kinds = ", ".join(kind.__name__ for kind in _DRAWINGS)
        raise TypeError(f"draw takes one of {kinds}; received {type(result).__name__}")
    if axes is None:
        with extra("plots"):
            from matplotlib import pyplot
        _, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    return _DRAWINGS[type(result)](axes, result)


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
    _legend_beside(axes)
    return axes


def draw_loss_scales(axes: Any, scales: LossScales) -> Any:
    """Draw how many gradients overflow, and how many lose over 1 %, at each loss scale."""
    low, high = scales.powers
    powers = range(low, high + 1)
    shares = [scales.shares(2.0**power) for power in powers]
    overflowing = [sum(one["overflow"] > 0 for one in at_scale) for at_scale in shares]
    losing = [sum(one["lost"] > 0.01 for one in at_scale) for at_scale in shares]
    axes.plot(powers, losing, label="lose more than 1 %", **_LOOKS[1])
    axes.plot(powers, overflowing, label="overflow in part", **_LOOKS[0])
    axes.axvline(scales.power, color="0.5", linewidth=1, label=f"$2^{{{scales.power}}}$")
    ticks = range(low - low % 4, high + 1, 4)
    axes.set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    axes.set_xlabel("loss scale S")
    axes.set_ylabel(f"of {len(scales.gradients)} gradients")
    _legend_beside(axes)
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
    _legend_beside(axes)
    return axes


def _draw_dots(axes: Any, names: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draw a row for each name with a dot for each series, on a logarithmic axis."""
    beyond: list[int] = []
    marks = ("o", "s", "^", "v")
    for number, (label, values) in enumerate(series.items()):
        drawn = [place for place, value in enumerate(values) if math.isfinite(value) and value > 0]
        beyond += [place for place, value in enumerate(values) if not math.isfinite(value)]
        look = {**_LOOKS[number % 4], "linestyle": "none", "marker": marks[number % 4]}
        axes.plot([values[place] for place in drawn], drawn, label=label, **look)
    axes.set_xscale("log")
    if beyond:
        places, transform = sorted(set(beyond)), axes.get_yaxis_transform()
        edge = [0.98] * len(places)
        axes.plot(edge, places, transform=transform, label="not finite", **_SKIPPED)
    _name_rows(axes, names)
    axes.grid(axis="x", color="0.9")
    _legend_beside(axes)


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    """Name rows from top to bottom."""
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


_DRAWINGS: Mapping[type, Callable[[Any, Any], Any]] = {
    Comparison: draw_errors,
    RangeReport: draw_ranges,
    LossScales: draw_loss_scales,
    AlignmentReport: draw_alignment,
    SumsReport: draw_sums,
    BatchExponents: lambda axes, result: draw_exponents(axes, result.overall()),
    ExponentHistogram: lambda axes, result: draw_exponents(axes, {"values": result}),
}
