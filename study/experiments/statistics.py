"""Paired comparisons: what differs by more than chance, and what could have been found at all.

References
----------
Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
Statistics 6, 1979.

Fisher, "The Design of Experiments", 1935, section 21: a test by all signs of the differences.
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
    "SignFlips",
    "compare",
    "detectable_difference",
    "holm",
    "pooled_spread",
    "sign_flips",
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


@dataclass(frozen=True)
class SignFlips:
    """Paired differences of several experiments in one test, in the unit of the values.

    Attributes
    ----------
    pairs, negative : int
        All pairs, and those whose difference is below 0.
    mean : float
        Weighted by the inverse variance of each experiment's differences, or not.
    lower, upper : float
        The means that the test does not reject: a confidence interval.
    p : float
        Share of all choices of signs whose mean is at least as far from 0. Exact, two-sided.
    """

    pairs: int
    negative: int
    mean: float
    lower: float
    upper: float
    p: float


def sign_flips(experiments: Sequence[Any], *, equal_weights: bool = False) -> SignFlips:
    """Test whether paired differences of several experiments have a mean of 0.

    Parameters
    ----------
    experiments : sequence of array, shapes (pairs,)
        The differences of each, two pairs or more; at most 20 pairs together.
    equal_weights : bool
        Whether each pair has the same weight, in place of its experiment's inverse variance.
    """
    differences = np.concatenate(experiments)
    if equal_weights:
        weights = np.ones(len(differences))
    else:
        variances = [np.full(len(one), np.var(one, ddof=1)) for one in experiments]
        weights = 1 / np.concatenate(variances)
    weights /= weights.sum()
    count, mean = len(differences), float(weights @ differences)
    means, shares = _with_all_signs(weights * differences), _with_all_signs(weights)

    def p_value(true_mean: float) -> float:
        distance = abs(mean - true_mean) * (1 - 1e-12)
        return float(np.mean(np.abs(means - true_mean * shares) >= distance))

    def end(direction: int) -> float:
        inside, outside = mean, mean + direction * float(np.ptp(differences))
        for _ in range(24):  # to a ten-millionth of the range
            middle = (inside + outside) / 2
            if p_value(middle) > 1 - CONFIDENCE:
                inside = middle
            else:
                outside = middle
        return inside

    return SignFlips(count, int((differences < 0).sum()), mean, end(-1), end(1), p_value(0.0))


def _with_all_signs(values: Any) -> Any:
    """Return the sums of numbers with all choices of signs but the first's, which is +.

    The others are these sums negated. Shape (2 ** (numbers - 1),).
    """
    sums = np.asarray(values[:1], dtype=float)
    for value in values[1:]:
        sums = np.concatenate([sums + value, sums - value])
    return sums
