"""Figures with a row for each name: dots on a logarithmic axis, and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpgluon_tools.plots.looks import CROSSES, FOUR_LOOKS, legend_beside

import numpy as np

__all__ = ["draw_bars", "draw_dots"]

_BLACK, _HATCHED, _GREY = {"color": "black"}, {"color": "white", "hatch": "xxx"}, {"color": "0.8"}
_BARS = {2: (_BLACK, _GREY), 3: (_BLACK, _HATCHED, _GREY)}  # by the number of parts


def draw_dots(axes: Any, names: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draw a row for each name with a dot for each series, on a logarithmic axis.

    Values that are not finite are crosses at the right edge.

    Parameters
    ----------
    axes : Axes
    names : sequence of str
        From top to bottom.
    series : mapping from str to sequence of float
        For the legend, with a value for each name; 0 is not drawn.
    """
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
    axes.grid(axis="x", color="0.9")
    _name_rows(axes, names)


def draw_bars(axes: Any, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Draw a row for each name with the parts of a bar, the first black and the last grey.

    Parameters
    ----------
    axes : Axes
    names : sequence of str
        From top to bottom.
    parts : mapping from str to sequence of float
        Two or three, for the legend, with a width for each name; in a row they follow each other.
    """
    lefts = np.zeros(len(names))
    for (label, widths), look in zip(parts.items(), _BARS[len(parts)]):
        bars = {"edgecolor": "black", "linewidth": 0.5, **look}
        axes.barh(range(len(names)), widths, left=lefts, label=label, **bars)
        lefts += widths
    _name_rows(axes, names)


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    legend_beside(axes)
