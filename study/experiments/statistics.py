"""Paired comparisons: what differs by more than chance, and what could have been found at all.

References
----------
Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
Statistics 6, 1979.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

__all__ = [
    "CONFIDENCE",
    "PairedComparison",
    "compare",
    "detectable_difference",
    "holm",
    "pooled_spread",
]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class PairedComparison:
    """Paired differences in a few numbers, in the unit of the values.

    Attributes
    ----------
    pairs : int
    mean : float
    lower, upper : float
        The confidence interval of the mean, by Student's t.
    spread : float
        The standard deviation of the differences.
    t_test, wilcoxon : float
        Two-sided p-values of the paired t-test and of Wilcoxon's signed-rank test. Pairs without a
        difference do not count in the second, which is a normal approximation where there are ties.
    """

    pairs: int
    mean: float
    lower: float
    upper: float
    spread: float
    t_test: float
    wilcoxon: float

    @property
    def differs(self) -> bool:
        """Whether the mean differs from 0 by more than chance, before any correction."""
        return self.t_test < 1 - CONFIDENCE


def compare(differences: Any) -> PairedComparison:
    """Compare paired values by their differences.

    Parameters
    ----------
    differences : array
        Arrays of any shape; a NaN is not a pair.

    Raises
    ------
    ValueError
        If there are fewer than two pairs.
    """
    differences = np.asarray(differences, dtype=float)
    differences = differences[~np.isnan(differences)]
    if len(differences) < 2:
        raise ValueError(f"a comparison needs at least two pairs, received {len(differences)}")
    mean, spread = float(differences.mean()), float(differences.std(ddof=1))
    if spread == 0:  # SciPy's t statistic divides by it
        alike = float(mean == 0)
        return PairedComparison(len(differences), mean, mean, mean, spread, alike, alike)
    test = stats.ttest_1samp(differences, 0)
    interval = test.confidence_interval(CONFIDENCE)
    # Subtraction leaves different last bits in equal differences, which are to count as ties.
    ranked = stats.wilcoxon(np.round(differences, 9), correction=True)
    return PairedComparison(
        len(differences), mean, float(interval.low), float(interval.high), spread,
        float(test.pvalue), float(ranked.pvalue),
    )  # fmt: skip


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values with Holm's correction for several tests, in their order."""
    return [float(p) for p in multipletests(p_values, method="holm")[1]] if p_values else []


def pooled_spread(samples: Any) -> float:
    """Return the standard deviation within samples, each around its own mean.

    Parameters
    ----------
    samples : array, shape (samples, values)
        NaN where a sample has fewer values.
    """
    squares = np.nansum((samples - np.nanmean(samples, axis=1, keepdims=True)) ** 2)
    freedom = np.count_nonzero(~np.isnan(samples)) - len(samples)
    return math.sqrt(squares / freedom)


def detectable_difference(spread: float, pairs: int, *, power: float = 0.8) -> float:
    """Return the true difference that a paired t-test finds with a probability of ``power``.

    Parameters
    ----------
    spread : float
        The standard deviation of the differences; the result has its unit.
    pairs : int
        At least 2.
    power : float
    """
    effect = TTestPower().solve_power(nobs=pairs, alpha=1 - CONFIDENCE, power=power)
    return spread * float(effect)
