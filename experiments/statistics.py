"""Paired comparisons: what differs by more than chance, and what could have been found at all.

SciPy is needed here only.

References
----------
Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
Statistics 6, 1979.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

__all__ = [
    "CONFIDENCE",
    "Comparison",
    "compare",
    "detectable_difference",
    "holm",
    "mean_and_spread",
    "pooled_spread",
]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Comparison:
    """Paired differences in a few numbers, in the unit of the values.

    Attributes
    ----------
    pairs : int
    mean : float
    lower, upper : float
        The confidence interval of the mean, of Student's t; infinite for a single pair.
    spread : float
        The standard deviation of the differences; NaN for a single pair.
    t_test, wilcoxon : float
        Two-sided p-values of the paired t-test and of Wilcoxon's signed-rank test. The second is
        exact; pairs without a difference do not count in it.
    """

    pairs: int
    mean: float
    lower: float
    upper: float
    spread: float
    t_test: float
    wilcoxon: float


def compare(values: Sequence[float], base: Sequence[float]) -> Comparison:
    """Compare values with those that they are paired with.

    Raises
    ------
    ValueError
        If there is no pair, or a value has none.
    """
    if len(values) != len(base) or not len(values):
        raise ValueError(f"nothing to pair: {len(values)} values with {len(base)}")
    differences = np.asarray(values, dtype=float) - np.asarray(base, dtype=float)
    pairs, mean = len(differences), float(differences.mean())
    if pairs == 1:
        return Comparison(1, mean, -math.inf, math.inf, math.nan, 1.0, 1.0)
    spread = float(differences.std(ddof=1))
    error = spread / math.sqrt(pairs)
    reach = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, pairs - 1))
    return Comparison(
        pairs, mean, mean - reach, mean + reach, spread, _t_test(mean, error, pairs),
        _wilcoxon(differences),
    )  # fmt: skip


def _t_test(mean: float, error: float, pairs: int) -> float:
    if error == 0:  # all differences are alike
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(mean) / error, pairs - 1))


def _wilcoxon(differences: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    # SciPy's own exact test with ties goes through all choices of signs: a quarter of a minute.
    # Equal accuracies may differ in the last bits of their subtraction, and ties are to be ties.
    changed = np.round(differences[np.abs(differences) > 1e-12], 12)
    if not len(changed):
        return 1.0
    ranks = np.rint(2 * stats.rankdata(np.abs(changed))).astype(int)  # ties have half ranks
    # How many of all choices of signs give each sum of the positive ranks.
    counts = np.zeros(ranks.sum() + 1)
    counts[0] = 1
    for rank in ranks:
        counts[rank:] = counts[rank:] + counts[:-rank]
    positive = int(ranks[changed > 0].sum())
    least = min(positive, ranks.sum() - positive)
    return float(min(1.0, 2 * counts[: least + 1].sum() / counts.sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that are corrected for being several, in their order."""
    corrected = [0.0] * len(p_values)
    least = 0.0
    ascending = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for left, index in zip(range(len(p_values), 0, -1), ascending):
        least = max(least, min(1.0, left * p_values[index]))
        corrected[index] = least
    return corrected


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation of a sample; NaN for a single value."""
    array = np.asarray(values, dtype=float)
    return float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else math.nan


def pooled_spread(samples: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation within samples, each around its own mean; NaN if unknown."""
    squares = sum(float(((np.asarray(s) - np.mean(s)) ** 2).sum()) for s in samples if len(s))
    freedom = sum(len(sample) - 1 for sample in samples if len(sample))
    return math.sqrt(squares / freedom) if freedom else math.nan


def detectable_difference(spread: float, pairs: int, *, power: float = 0.8) -> float:
    """Return the true difference that a paired t-test would find with a given probability.

    Parameters
    ----------
    spread : float
        The standard deviation of the differences.
    pairs : int
        At least 2.
    power : float
        That probability.

    Returns
    -------
    float
        In the unit of ``spread``.
    """
    critical = stats.t.ppf((1 + CONFIDENCE) / 2, pairs - 1)
    # Significance on the wrong side is next to impossible then, and is left out.
    shift = special.nctdtrinc(pairs - 1, 1 - power, critical)
    return spread * float(shift) / math.sqrt(pairs)
