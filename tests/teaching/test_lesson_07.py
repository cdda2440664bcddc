"""The exercises of lesson 07."""

from __future__ import annotations

import time

import pytest

from teaching import check
from teaching.lesson_07 import batch_that_keeps_a_v100_busy, fair_ratio, images_that_fit


@pytest.fixture(autouse=True)
def _exact_clock(monkeypatch):
    """Let sleeping take as long as it should, and nothing else take any time."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])


def seconds_of(*calls):
    began = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - began


def in_rounds(a, b, wait):
    found = []
    for number in range(8):
        if number % 2:
            seconds_b, seconds_a = seconds_of(b, wait), seconds_of(a, wait)
        else:
            seconds_a, seconds_b = seconds_of(a, wait), seconds_of(b, wait)
        found.append(seconds_b / seconds_a)
    return sorted(found)[len(found) // 2]


def one_after_the_other(a, b, wait):
    of_a = [seconds_of(a, wait) for _ in range(8)]
    of_b = [seconds_of(b, wait) for _ in range(8)]
    return sum(of_b) / sum(of_a)


def without_waiting(a, b, _):
    return (1e-9 + seconds_of(b)) / (1e-9 + seconds_of(a))


def test_07_1_rounds_of_two_that_wait_find_the_ratio():
    assert fair_ratio(in_rounds).right


@pytest.mark.parametrize(
    ("function", "meaning"),
    [
        (one_after_the_other, "what comes later meets a slower machine"),
        (without_waiting, "the clock sees how fast Python asks"),
    ],
)
def test_07_1_other_clocks_are_told_what_they_saw(function, meaning):
    verdict = fair_ratio(function)
    assert not verdict.right
    assert meaning in verdict.meaning


def test_07_1_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"a function of a, b and wait, received 1\.5"):
        fair_ratio(1.5)


def test_07_2_the_smallest_batch_that_keeps_a_v100_busy(capsys):
    assert check("07.2", 176)
    assert "a V100 needs 138.9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("batch", "meaning"),
    [
        (139, "would be busy 82 % of the time"),  # as many as operations per byte
        (175, "would be busy 99 % of the time"),
        (512, "a smaller batch is, too"),
        (0, "at least one image"),
    ],
)
def test_07_2_other_batches_are_told_how_busy_they_keep_it(batch, meaning):
    verdict = batch_that_keeps_a_v100_busy(batch)
    assert not verdict.right
    assert meaning in verdict.meaning


@pytest.mark.parametrize(
    ("batch", "meaning"),
    [(100, "one more image would fit, too"), (1000, "more than 8,192"), (0, "at least one image")],
)
def test_07_3_other_batches_are_told_what_they_take(batch, meaning):
    verdict = images_that_fit(batch)
    assert not verdict.right
    assert meaning in verdict.meaning
