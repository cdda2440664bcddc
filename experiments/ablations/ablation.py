"""What an ablation is: one measure left out, beside runs that keep it, on the same data.

Also what their texts and pictures share. Nothing is run here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

from experiments.experiment import Outcome, Record

__all__ = [
    "REFERENCE",
    "RIGHT",
    "WRONG",
    "Ablation",
    "Variants",
    "draw_curve",
    "figure_of",
    "number",
    "percent",
]

Variants = Mapping[str, Record]
"""The records of one ablation, by the last part of their names."""

REFERENCE: dict[str, Any] = {"color": "0.75", "linewidth": 4}
RIGHT: dict[str, Any] = {"color": "black", "linestyle": "--"}
WRONG: dict[str, Any] = {"color": "black", "marker": "x", "markersize": 4, "linewidth": 1}


@dataclass(frozen=True)
class Ablation:
    """One measure of mixed precision, and what happens without it.

    Attributes
    ----------
    name : str
        The second part of its experiments' names; its picture is ``ablation-<name>``.
    title : str
        Heading of its subsection.
    run : callable
        Takes one of ``variants`` and the settings by name, and returns the outcome.
    variants : sequence of str
        The last part of the experiments' names.
    wrong, right : str
        Those of them that the summary compares.
    settings : mapping
        What all variants have in common, as JSON has it.
    figure, unit : str
        The figure of the outcomes that the summary shows, and what it is.
    text : callable
        Takes the records of all variants and returns a paragraph.
    draw : callable
        Takes a Matplotlib figure and the records of all variants.
    """

    name: str
    title: str
    run: Callable[..., Outcome]
    variants: Sequence[str]
    wrong: str
    right: str
    settings: Mapping[str, Any]
    figure: str
    unit: str
    text: Callable[[Variants], str]
    draw: Callable[[Any, Variants], None]


def figure_of(record: Record, name: str) -> str:
    """Return a figure of an outcome as text; "not finite" for ``None``."""
    return number(record.outcome.figures[name])


def number(value: Optional[float]) -> str:
    """Return a number with three digits, larger ones grouped; "not finite" for ``None``."""
    if value is None:
        return "not finite"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:#.3g}"


def percent(share: float) -> str:
    """Return a share in percent with one decimal; only 0 is shown as 0."""
    if 0 < share < 0.0005:
        return "less than 0.1 %"
    return f"{100 * share:.1f} %" if share else "0 %"


def draw_curve(axes: Any, record: Record, curve: str, **look: Any) -> None:
    """Draw a curve over its steps; what is not finite is a gap.

    The curve's means belong to equally long parts of the run, and stand at the end of each.
    """
    values = record.outcome.curves[curve]
    length = record.config["steps"] / len(values)
    places = [length * (place + 1) for place in range(len(values))]
    axes.plot(places, [math.nan if value is None else value for value in values], **look)
    axes.set_xlabel("step")
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
