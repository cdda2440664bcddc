"""Numbers of a table's cell in words: means with spreads, ranges, intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

from experiments.statistics import Comparison, mean_and_spread

__all__ = ["interval", "one_or_range", "plus_minus", "signed"]


def plus_minus(values: Sequence[Optional[float]], digits: int) -> str:
    """Return the mean of a row's runs, ± one standard deviation; ``None`` is not finite."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return f"not finite in {len(values) - len(numbers)} of {len(values)}"
    mean, spread = mean_and_spread(numbers)
    if math.isnan(spread):
        return f"{mean:.{digits}f} (one seed)"
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def one_or_range(values: Sequence[float]) -> str:
    """Return what all runs of a row have, or from where to where it goes."""
    low, high = min(values), max(values)
    return f"{low:.10g}" if low == high else f"{low:.10g} to {high:.10g}"


def signed(value: float, digits: int = 2) -> str:
    """Return a difference with its sign; what is rounded to zero has none that means anything."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"  # the sum makes -0.0 a 0.0


def interval(one: Comparison, digits: int = 2) -> str:
    """Return the ends of a confidence interval."""
    if not math.isfinite(one.lower):
        return "unknown"
    return f"{signed(one.lower, digits)} to {signed(one.upper, digits)}"
