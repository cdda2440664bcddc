"""Figures of the exponents of numbers, and of the ranges of FP16 that they fall into."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Union, runtime_checkable

from mpgluon.formats.float_format import FLOAT16
from mpgluon_tools.extras import extra
from mpgluon_tools.plots.looks import FOUR_LOOKS, make_room

import numpy as np
import numpy.typing as npt

__all__ = ["draw_exponent_heatmap", "draw_exponents"]


@runtime_checkable
class Counted(Protocol):
    """The exponents of numbers and how often each occurs, as diagnostics return them."""

    @property
    def exponents(self) -> npt.ArrayLike:
        """Array of int, shape (E,), consecutive."""

    @property
    def counts(self) -> npt.ArrayLike:
        """Array of int, shape (E,), the count of each."""

    @property
    def zeros(self) -> int:
        """The number of zeros."""


Histogram = Union[Counted, tuple[npt.ArrayLike, npt.ArrayLike, int]]
# Exponents at which a range of float16 begins; 65504 is one rounding step below 2**16.
_SUBNORMAL = FLOAT16.min_exponent - FLOAT16.significand_bits + 1
_NORMAL = FLOAT16.min_exponent
_TOO_LARGE = FLOAT16.max_exponent + 1
# Exponents that are always shown: a strip on each side of float16's range, in which its name fits.
_LOW, _HIGH = _SUBNORMAL - 5, _TOO_LARGE + 8
_FIRST, _LAST = -70, 30  # the most that is shown, so that float16's ranges are never too narrow


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
        look = FOUR_LOOKS[number % len(FOUR_LOOKS)]
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
    make_room(axes)
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
    if isinstance(histogram, Counted):
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
