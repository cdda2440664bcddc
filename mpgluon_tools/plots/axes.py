"""Axes to draw on, in a new figure that a notebook shows or in a PNG file."""

from __future__ import annotations

import io
from typing import Any, Callable, Optional

from mpgluon_tools.extras import extra

__all__ = ["axes_or_new", "png"]


def axes_or_new(axes: Optional[Any]) -> Any:
    """Return the Axes or, for None, the Axes of a new figure of Matplotlib's pyplot."""
    if axes is not None:
        return axes
    with extra("plots"):
        from matplotlib import pyplot
    return pyplot.subplots(figsize=(9, 4.5), layout="constrained")[1]


def png(draw: Callable[[Any], Any], *, width: float = 9.0, height: float = 4.0) -> bytes:
    """Return a PNG file of the Axes on which ``draw`` drew; width and height in inches."""
    with extra("plots"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.add_subplot())
    file = io.BytesIO()
    figure.savefig(file, dpi=110, format="png")
    return file.getvalue()
