"""Statistics against numbers worked out by hand, and numbers as the cells of tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from study.experiments import cells
from study.experiments.statistics import (
    compare,
    detectable_difference,
    holm,
    pooled_spread,
    sign_flips,
)


def test_a_comparison_by_hand():
    # Differences 1, 2, 3: mean 2, standard deviation 1, standard error 1/sqrt(3). With 2 degrees
    # of freedom the t distribution is known: P(|T| > t) = 1 - t / sqrt(2 + t**2). So t = sqrt(12)
    # gives 1 - sqrt(12/14), and 95 % lie within 0.95 * sqrt(2 / (1 - 0.95**2)).
    one = compare([[1, 2], [math.nan, 3]])  # a NaN makes no pair
    reach = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3)
    assert (one.pairs, one.mean, one.spread) == (3, 2.0, 1.0)
    assert (one.lower, one.upper) == pytest.approx((2 - reach, 2 + reach))
    assert one.t_test == pytest.approx(1 - math.sqrt(12 / 14))
    assert one.wilcoxon == 2 / 2**3  # all three signs alike, of eight choices, on two sides


def test_wilcoxons_test_is_close_to_the_exact_one_with_ties_and_without_zeros():
    differences = np.random.default_rng(4).integers(-3, 5, 13) / 2
    changed = differences[differences != 0]
    every_sign = stats.PermutationMethod(n_resamples=2**11)
    exact = stats.wilcoxon(changed, method=every_sign).pvalue
    assert compare(differences).wilcoxon == pytest.approx(exact, rel=0.1)


def test_equal_accuracies_are_ties_whatever_the_last_bits_of_their_difference():
    images = np.array([[109, 108], [150, 149], [115, 116], [160, 158], [130, 133]])
    points = 100 * (images / 200)
    assert points[0, 0] - points[0, 1] != points[1, 0] - points[1, 1]  # both are one image
    found, expected = (compare(-np.diff(one, axis=1)) for one in (points, images))
    assert found.wilcoxon == expected.wilcoxon


@pytest.mark.parametrize("pairs", [[], [1]])
def test_fewer_than_two_pairs_are_refused_and_equal_differences_have_no_spread(pairs):
    with pytest.raises(ValueError, match=f"at least two pairs, received {len(pairs)}"):
        compare(pairs)
    none, some = compare([0, 0, 0]), compare([1, 1, 1])
    assert (none.mean, none.lower, none.upper, none.t_test, none.wilcoxon) == (0, 0, 0, 1, 1)
    assert (some.lower, some.upper, some.t_test) == (1, 1, 0)
    assert cells.mean_and_interval(none, 1) == "0.0 (0.0 to 0.0)"


def test_holms_correction_by_hand():
    # The least times 3, the next times 2, the last as it is; never below the one before.
    assert holm([0.02, 0.01, 0.04]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.03, 0.04, 0.03]) == pytest.approx([0.09, 0.09, 0.09])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_pooled_spread_is_around_each_samples_own_mean():
    # Squares 2 and 8 around the means, over 2 + 1 degrees of freedom.
    samples = np.array([[1, 2, 3], [100, 104, math.nan], [7, math.nan, math.nan]])
    assert pooled_spread(samples) == pytest.approx(math.sqrt(10 / 3))


def test_signs_are_flipped_in_all_ways():
    one = sign_flips([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])  # of one variance
    assert (one.pairs, one.negative, one.mean, one.p) == (6, 0, 2.5, 2 / 64)
    # 5 % are 3 of the 64 choices, and all signs alike are 2 of them, until one difference is 0.
    assert (one.lower, one.upper) == pytest.approx((1, 4), abs=1e-6)
    two = sign_flips([[-1.0, -3.0], [0.5, -0.5]])
    assert two.negative == 3
    assert two.mean == pytest.approx((-4 / 2 + 0 / 0.5) / (2 / 2 + 2 / 0.5))
    shifted = sign_flips([[-2.0, -4.0], [-0.5, -1.5]])
    assert (shifted.lower, shifted.upper) == pytest.approx((two.lower - 1, two.upper - 1))


@pytest.mark.parametrize("pairs", [3, 18])
def test_a_detectable_difference_is_found_four_times_in_five(pairs):
    difference = detectable_difference(2.0, pairs)
    rng = np.random.default_rng(pairs)
    trials = 20_000
    samples = rng.normal(difference, 2.0, size=(trials, pairs))
    found = (stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.05).mean()
    # Three standard deviations of a share of so many trials.
    assert found == pytest.approx(0.8, abs=3 * math.sqrt(0.8 * 0.2 / trials))


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (lambda values: cells.plus_minus(values, 1), [1.0, 2.0, 3.0], "2.0 ± 1.0"),
        (lambda values: cells.plus_minus(values, 1), [2.0], "2.0 (one seed)"),
        (lambda values: cells.plus_minus(values, 1), [1.0, None, 3.0], "not finite in 1 of 3"),
        (cells.one_or_range, [4096.0, 4096.0], "4096"),
        (cells.one_or_range, [13, 12, 14], "12 to 14"),
        (cells.one_or_range, [2.0**24], "16777216"),
        (cells.signed, 1.239, "+1.24"),
        (cells.signed, -1.239, "-1.24"),
        (cells.signed, -0.004, "0.00"),
        (cells.signed, 0.0, "0.00"),
        (cells.number, 1.6, "1.60"),
        (cells.number, 0.01794, "0.0179"),
        (cells.number, 16.0, "16"),
        (cells.number, 65536.0, "65,536"),
        (cells.number, None, "not finite"),
        (cells.percent, 0.0, "0 %"),
        (cells.percent, 1e-5, "less than 0.1 %"),
        (cells.percent, 0.4957, "49.6 %"),
        (cells.percent, 1, "100.0 %"),
    ],
)
def test_a_number_as_text(show, value, text):
    assert show(value) == text
