"""Interleaved timing: order, rounds, and the arithmetic of quartiles and ratios."""

from __future__ import annotations

import pytest

from benchmarks.timing import Quartiles, interleave, quartiles, ratios, turns


def test_every_case_runs_once_a_round_in_an_order_that_is_reversed_each_time():
    calls = []
    cases = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = interleave(cases, rounds=3, warm_up=1)
    assert "".join(calls) == "abc" + "abc" + "cba" + "abc"
    assert list(seconds) == ["a", "b", "c"]
    assert all(len(times) == 3 and min(times) >= 0 for times in seconds.values())


@pytest.mark.parametrize(("cases", "rounds"), [({}, 3), ({"a": lambda: None}, 0)])
def test_nothing_to_time_is_refused(cases, rounds):
    with pytest.raises(ValueError, match="nothing to time"):
        interleave(cases, rounds=rounds)


def test_a_slow_round_cancels_in_its_ratio():
    assert ratios([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == [2, 2, 2]


def test_quartiles_are_those_of_the_sorted_values():
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == Quartiles(2, 3, 4)
    assert quartiles([7.0]) == Quartiles(7, 7, 7)


def test_turns_are_reversed_from_round_to_round():
    assert "".join(turns("abc", 3)) == "abc" + "cba" + "abc"
    assert list(turns([], 3)) == list(turns("abc", 0)) == []
