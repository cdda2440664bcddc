"""Long series of numbers made short enough for a record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

__all__ = ["changes", "means"]


def means(values: Sequence[float], window: int) -> list[Optional[float]]:
    """Return the mean of each ``window`` values to six digits, ``None`` where it is not finite.

    The last window may be shorter.
    """
    found = []
    for start in range(0, len(values), window):
        part = values[start : start + window]
        mean = sum(part) / len(part)
        found.append(float(f"{mean:.6g}") if math.isfinite(mean) else None)
    return found


def changes(values: Sequence[float]) -> list[tuple[int, float]]:
    """Return where a series takes a new value: pairs of place, from 1, and value."""
    return [
        (place, value)
        for place, value in enumerate(values, 1)
        if place == 1 or value != values[place - 2]
    ]
