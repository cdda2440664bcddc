"""Numbers as text for the cells of tables: means with spreads, ranges, intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

import numpy as np

from study.experiments.statistics import PairedComparison, SignFlips

__all__ = ["interval", "mean_and_interval", "number", "one_or_range", "percent", "plus_minus",
           "signed"]  # fmt: skip


def plus_minus(values: Sequence[Optional[float]], digits: int) -> str:
    """Return the mean of a row's runs, ± one standard deviation; ``None`` is not finite."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return f"not finite in {len(values) - len(numbers)} of {len(values)}"
    if len(numbers) == 1:
        return f"{numbers[0]:.{digits}f} (one seed)"
    return f"{np.mean(numbers):.{digits}f} ± {np.std(numbers, ddof=1):.{digits}f}"


def one_or_range(values: Sequence[float]) -> str:
    """Return the value that all runs of a row have, or the range."""
    low, high = min(values), max(values)
    return f"{low:.10g}" if low == high else f"{low:.10g} to {high:.10g}"


def signed(value: float, digits: int = 2) -> str:
    """Return a difference with its sign; a zero after rounding has none."""
    text = f"{value:+.{digits}f}"
    return text if float(text) else text[1:]


def interval(one: Union[PairedComparison, SignFlips], digits: int = 2) -> str:
    """Return the ends of a confidence interval."""
    return f"{signed(one.lower, digits)} to {signed(one.upper, digits)}"


def mean_and_interval(one: Union[PairedComparison, SignFlips], digits: int = 2) -> str:
    """Return a mean difference, with its confidence interval in parentheses."""
    return f"{signed(one.mean, digits)} ({interval(one, digits)})"


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
