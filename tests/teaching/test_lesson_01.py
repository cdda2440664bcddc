"""The exercises of lesson 01: right answers, and what wrong ones are told."""

from __future__ import annotations

from mpgluon import BFLOAT16, FLOAT16, FLOAT32, FloatFormat

import numpy as np
import pytest

from teaching import lesson_01


@pytest.mark.parametrize("answer", [4, 4.0, np.float16(4)])
def test_a_sum_of_thousandths_stops_at_4(answer):
    verdict = lesson_01.where_a_sum_of_thousandths_stops(answer)
    assert verdict.right
    assert "4 + 0.001 is rounded back to 4" in verdict.meaning
    # np.cumsum adds one by one, in float16
    sums = np.cumsum(np.full(10_000, 0.001, dtype=np.float16))
    assert f"After {np.argmax(sums == 4) + 1:,} additions" in verdict.meaning


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (2, "At 2 the sum goes on: half the spacing there is 0.00098, less than 0.001"),
        (0, "At 0 the sum goes on"),
        (8, "never reaches 8: after"),
        (2048, "never reaches 2048: after"),
        (-1, "never reaches -1: it begins at 0 and grows"),
    ],
)
def test_another_sum_does_not_stop_or_is_never_reached(answer, told):
    verdict = lesson_01.where_a_sum_of_thousandths_stops(answer)
    assert not verdict.right
    assert told in verdict.meaning


@pytest.mark.parametrize(
    ("answer", "weight"),
    [
        (FloatFormat("1-6-9", significand_bits=10, exponent_bits=6), "1.00195"),
        (FloatFormat("1-7-8", significand_bits=9, exponent_bits=7), "1.00391"),
        (FloatFormat("no inf", significand_bits=11, exponent_bits=5, finite_only=True), "1.00195"),
    ],
)
def test_a_format_between_the_two_holds_both_numbers(answer, weight):
    verdict = lesson_01.a_format_between_float16_and_bfloat16(answer)
    assert verdict.right
    assert f"1 + 0.002 becomes {weight}." in verdict.meaning


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (FLOAT16, "100,000 becomes inf: the largest number of the format is 65504"),
        (BFLOAT16, "half the spacing above 1 is 0.00390625, and 1.002 is rounded to 1"),
        (FLOAT32, "The format has 32 bits"),
        (FloatFormat("17", significand_bits=11, exponent_bits=6), "The format has 17 bits"),
    ],
)
def test_another_format_is_told_what_it_loses(answer, told):
    verdict = lesson_01.a_format_between_float16_and_bfloat16(answer)
    assert not verdict.right
    assert told in verdict.meaning


def test_what_is_no_format_is_refused():
    with pytest.raises(TypeError, match="the answer is a FloatFormat, received 16"):
        lesson_01.a_format_between_float16_and_bfloat16(16)


def test_the_root_of_the_last_number_below_4_is_the_only_wrong_one():
    digits = 1 + np.arange(1024) / 1024
    found = [
        value
        for value in np.concatenate([digits, 2 * digits]).tolist()
        if lesson_01.the_root_that_is_rounded_wrongly(value).right
    ]
    assert found == [4 - 2**-9]
    meaning = lesson_01.the_root_that_is_rounded_wrongly(4 - 2**-9).meaning
    assert "becomes 2.000000000 in FP16, but rounded once it is 1.999023438" in meaning


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (2, "the same as if it is rounded once"),
        (4, "4.0 is not an FP16 number from 1 up to 4"),
        (3.999, "3.999 is not an FP16 number from 1 up to 4"),
    ],
)
def test_another_root_is_right_or_not_asked_for(answer, told):
    verdict = lesson_01.the_root_that_is_rounded_wrongly(answer)
    assert not verdict.right
    assert told in verdict.meaning
