"""The exercises of lesson 02: right answers, and what wrong ones are told."""

from __future__ import annotations

import pytest

from teaching import lesson_02


def test_masters_and_adam_take_the_bytes_of_fp32():
    verdict = lesson_02.bytes_of_a_weight(2 + 2 + 4 + 8)
    assert verdict.right
    assert "Training in FP32 takes 16 bytes" in verdict.meaning


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (8, "8 bytes hold the weight, the gradient, the master, but not the averages"),
        (4, "hold the weight, the gradient, but not the master and the averages"),
        (12, "but not the master"),
        (14, "but not the gradient"),
        (32, "more than all the arrays take together"),
        (5, "no set of them has 5"),
    ],
)
def test_other_bytes_are_told_what_they_leave_out(answer, told):
    verdict = lesson_02.bytes_of_a_weight(answer)
    assert not verdict.right
    assert told in verdict.meaning


@pytest.mark.parametrize("answer", [2**-9, 0.00195, 0.002])
def test_a_rate_above_two_thousandths_moves_the_weight_and_not_far(answer):
    verdict = lesson_02.smallest_rate_that_moves_the_weight(answer)
    assert verdict.right
    assert "stops there, far from 1.25" in verdict.meaning


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (0.0005, "stays at 1 for ever. The first update is 0.000125; half the spacing"),
        (0.01, "But it also moves with 0.0095"),
        (0, "lies between 0 and 1"),
    ],
)
def test_another_rate_moves_nothing_or_is_not_the_smallest(answer, told):
    verdict = lesson_02.smallest_rate_that_moves_the_weight(answer)
    assert not verdict.right
    assert told in verdict.meaning


def test_bfloat16_loses_all_updates_below_one_part_in_512():
    verdict = lesson_02.ratio_below_which_bfloat16_loses_all(1 / 512)
    assert verdict.right
    assert "weight / 512 a BF16 weight loses 100%" in verdict.meaning


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (1 / 4096, "the limit is higher: of twice as large ones it loses 100%"),
        (1 / 256, "the others survive"),
        (2, "lies between 0 and 1"),
    ],
)
def test_another_ratio_loses_fewer_or_is_not_the_limit(answer, told):
    verdict = lesson_02.ratio_below_which_bfloat16_loses_all(answer)
    assert not verdict.right
    assert told in verdict.meaning
