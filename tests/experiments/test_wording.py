"""Cells of tables: what is rounded, what is not finite, and what is alike."""

from __future__ import annotations

import pytest

from experiments.statistics import compare
from experiments.wording import interval, one_or_range, plus_minus, signed


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0, 2.0, 3.0], "2.0 ± 1.0"),
        ([2.0], "2.0 (one seed)"),
        ([1.0, None, 3.0], "not finite in 1 of 3"),
        ([None], "not finite in 1 of 1"),
    ],
)
def test_a_mean_has_its_spread(values, text):
    assert plus_minus(values, 1) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [([4096.0, 4096.0], "4096"), ([13, 12, 14], "12 to 14"), ([2.0**24], "16777216")],
)
def test_a_range_of_one_value_is_that_value(values, text):
    assert one_or_range(values) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1.239, "+1.24"), (-1.239, "-1.24"), (-0.001, "+0.00"), (-0.0, "+0.00")]
)
def test_what_rounds_to_zero_is_not_negative(value, text):
    assert signed(value) == text


def test_a_single_pair_has_no_interval():
    assert interval(compare([1.0], [2.0])) == "unknown"
    assert interval(compare([1.0, 2.0], [1.0, 2.0]), 1) == "+0.0 to +0.0"
