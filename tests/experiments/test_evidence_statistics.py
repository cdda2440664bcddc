"""Statistics against SciPy's own tests, and against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from experiments.statistics import (
    compare,
    detectable_difference,
    holm,
    mean_and_spread,
    pooled_spread,
)


def test_a_comparison_by_hand():
    # Differences 1, 2, 3: mean 2, standard deviation 1, standard error 1/sqrt(3). With 2 degrees
    # of freedom the t distribution is known: P(|T| > t) = 1 - t / sqrt(2 + t**2). So t = sqrt(12)
    # gives 1 - sqrt(12/14), and 95 % lie within 0.95 * sqrt(2 / (1 - 0.95**2)).
    one = compare([11, 22, 33], [10, 20, 30])
    reach = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3)
    assert (one.pairs, one.mean, one.spread) == (3, 2.0, 1.0)
    assert (one.lower, one.upper) == pytest.approx((2 - reach, 2 + reach))
    assert one.t_test == pytest.approx(1 - math.sqrt(12 / 14))
    assert one.wilcoxon == 2 / 2**3  # all three signs alike, of eight choices, on two sides


@pytest.mark.parametrize("pairs", [4, 9, 18])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_p_values_and_interval_are_scipys(pairs, shift):
    rng = np.random.default_rng(pairs)
    base, noise = rng.normal(size=(2, pairs))
    one = compare(base + noise + shift, base)
    test = stats.ttest_rel(base + noise + shift, base)
    assert one.t_test == pytest.approx(test.pvalue)
    interval = test.confidence_interval(0.95)
    assert (one.lower, one.upper) == pytest.approx((interval.low, interval.high))
    exact = stats.wilcoxon(base + noise + shift - base, method="exact").pvalue
    assert one.wilcoxon == pytest.approx(exact)


def test_wilcoxons_test_is_exact_with_ties_and_leaves_out_pairs_without_a_difference():
    differences = np.array([0, 0.5, 0.5, -0.5, 1, 1.5, 1.5, 0, -1])
    every_sign = stats.PermutationMethod(n_resamples=2**7)
    exact = stats.wilcoxon(differences[differences != 0], method=every_sign).pvalue
    assert compare(70 + differences, np.full(9, 70.0)).wilcoxon == pytest.approx(exact)


def test_equal_accuracies_are_ties_whatever_the_last_bits_of_their_difference():
    images = np.array([[109, 108], [150, 149], [115, 116], [160, 158], [130, 133]])
    points = 100 * (images / 200)
    assert points[0, 0] - points[0, 1] != points[1, 0] - points[1, 1]  # both are one image
    assert compare(*points.T).wilcoxon == compare(*images.T).wilcoxon


def test_differences_that_are_all_alike():
    none = compare([1, 2, 3], [1, 2, 3])
    assert (none.mean, none.lower, none.upper, none.t_test, none.wilcoxon) == (0, 0, 0, 1, 1)
    some = compare([2, 3, 4], [1, 2, 3])
    assert (some.lower, some.upper, some.t_test, some.wilcoxon) == (1, 1, 0, 0.25)


def test_a_single_pair_says_nothing_of_chance():
    one = compare([2], [1])
    assert (one.mean, one.lower, one.upper) == (1, -math.inf, math.inf)
    assert (one.t_test, one.wilcoxon) == (1, 1)
    assert math.isnan(one.spread)


@pytest.mark.parametrize(("values", "base"), [([], []), ([1], [1, 2])])
def test_what_has_no_pair_is_refused(values, base):
    with pytest.raises(ValueError, match="nothing to pair"):
        compare(values, base)


def test_holms_correction_by_hand():
    # The least times 3, the next times 2, the last as it is; never below the one before.
    assert holm([0.02, 0.01, 0.04]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.03, 0.04, 0.03]) == pytest.approx([0.09, 0.09, 0.09])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_never_claims_more_than_bonferroni_allows_nor_less():
    rng = np.random.default_rng(0)
    for p_values in rng.uniform(size=(50, 5)):
        corrected = np.array(holm(list(p_values)))
        assert (corrected >= p_values).all()
        assert (corrected <= np.minimum(1, 5 * p_values) + 1e-15).all()
        assert (np.diff(corrected[np.argsort(p_values)]) >= 0).all()


def test_mean_and_spread_by_hand():
    assert mean_and_spread([1, 2, 3]) == (2, 1)
    mean, spread = mean_and_spread([5])
    assert mean == 5
    assert math.isnan(spread)


def test_the_pooled_spread_is_around_each_samples_own_mean():
    # Squares 2 and 8 around the means, over 2 + 1 degrees of freedom.
    assert pooled_spread([[1, 2, 3], [100, 104], [7]]) == pytest.approx(math.sqrt(10 / 3))
    assert math.isnan(pooled_spread([[1], []]))


@pytest.mark.parametrize("pairs", [3, 18])
def test_a_detectable_difference_is_found_four_times_in_five(pairs):
    difference = detectable_difference(2.0, pairs)
    rng = np.random.default_rng(pairs)
    trials = 20_000
    samples = rng.normal(difference, 2.0, size=(trials, pairs))
    found = (stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.05).mean()
    # Three standard deviations of a share of so many trials.
    assert found == pytest.approx(0.8, abs=3 * math.sqrt(0.8 * 0.2 / trials))
