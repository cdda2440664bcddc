"""Colours, marks, line styles and legends that the figures share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CROSSES", "FORMAT_LOOKS", "FOUR_LOOKS", "legend_beside", "make_room"]

FORMAT_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "float32": {"color": "black", "marker": "o", "linestyle": "-"},
    "float16": {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    "mixed_float16": {"color": "#56B4E9", "marker": "D", "linestyle": "-."},
    "bfloat16": {"color": "#D55E00", "marker": "^", "linestyle": ":"},
    "mixed_float8": {"color": "#009E73", "marker": "v", "linestyle": (0, (6, 1, 1, 1, 1, 1))},
}
# of lines that are not of formats
FOUR_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "black", "linestyle": "-"},
    {"color": "#0072B2", "linestyle": "--"},
    {"color": "#D55E00", "linestyle": ":"},
    {"color": "#009E73", "linestyle": "-."},
)
# at steps that were skipped, and in place of values that are not finite
CROSSES: dict[str, Any] = {"color": "black", "marker": "x", "markersize": 6, "linestyle": "none"}
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}


def legend_beside(axes: Any) -> None:
    """Draw the legend right of the axes, in a figure that makes room for it."""
    make_room(axes)
    axes.legend(**_BESIDE)


def make_room(axes: Any) -> None:
    """Give a figure without a layout engine one that leaves room outside the axes."""
    if axes.figure.get_layout_engine() is None:
        axes.figure.set_layout_engine("constrained")
