"""Long series of numbers made short enough for a record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

__all__ = ["changes", "means", "rounded"]

_DIGITS = 6  # of a number in a record


def rounded(value: float) -> Optional[float]:
    """Return a number with as many digits as a record keeps; ``None`` for infinities and NaN."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def means(values: Sequence[float], window: int) -> list[Optional[float]]:
    """Return the rounded mean of every ``window`` values; the last may be of fewer."""
    parts = [values[start : start + window] for start in range(0, len(values), window)]
    # Not fsum: a sum of inf and -inf is an error there, and NaN here.
    return [rounded(sum(part) / len(part)) for part in parts]


def changes(values: Sequence[Optional[float]]) -> list[tuple[int, Optional[float]]]:
    """Return where a series takes a new value: pairs of position, from 1, and value."""
    return [
        (place, value)
        for place, value in enumerate(values, 1)
        if place == 1 or value != values[place - 2]
    ]
