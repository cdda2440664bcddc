"""Growth: the points of the sweeps, the exponents, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.cases import CaseOptions
from benchmarks.contestant import Contestant
from benchmarks.growth import growth, measure, sweeps
from benchmarks.race import Case, CaseResult, Conditions, Failure, Result
from benchmarks.report import case_report, growth_table

TINY = str(Path(__file__).with_name("tiny_contestants.py"))


def point(amount: int, seconds: float, memory=1100.0, imported=100.0) -> Result:
    facts = {"multiply_adds": amount}
    return Result(f"{amount}", [seconds] * 3, memory, imported, 0, facts)


def sweep(*points: Result, failures=()) -> CaseResult:
    return CaseResult("scale", "a sweep", {}, "", list(points), list(failures))


def test_the_sweeps_vary_one_thing_each_in_every_format():
    cases = sweeps(
        CaseOptions("resnet50_v1", batch_sizes=(4,), image_size=64, dtypes=["float32", "float16"])
    )
    middle = {"model": "resnet50_v1", "batch_size": 4, "image_size": 64}
    points = [
        ("batch size", "batch_size", [1, 2, 4, 8, 16, 32, 64], "batch 1"),
        ("image size", "image_size", [32, 64, 96, 128, 160, 192, 224], "32 px"),
        ("depth", "model", [f"resnet{n}_v1" for n in (18, 34, 50, 101, 152)], "resnet18_v1"),
    ]
    expected = [(dtype, *one) for dtype in ("float32", "float16") for one in points]
    for case, (dtype, sweep, option, values, first) in zip(cases, expected):
        assert (case.settings["sweep"], case.settings["dtype"]) == (sweep, dtype)
        assert case.contestants[0].name == first
        assert [one.options[option] for one in case.contestants] == values
        for one in case.contestants:
            fixed = {name: one.options[name] for name in middle if name != option}
            assert fixed.items() <= middle.items()
            assert one.options["dtype"] == dtype
    assert len(cases) == 6
    assert cases[0].title == "training step against batch size: resnet50_v1, 64 px, float32"


@pytest.mark.parametrize("power", [0.5, 1.0, 1.75])
def test_the_exponents_of_powers_are_found(power):
    amounts = [10, 30, 200, 1000]
    found = growth(
        sweep(*(point(a, 3e-3 * a**power, 100 + 0.25 * a ** (power / 2)) for a in amounts))
    )
    assert found.time_exponent == pytest.approx(power)
    assert found.memory_exponent == pytest.approx(power / 2)  # without what was imported
    assert found.multiply_adds == amounts
    assert found.memory_mib == pytest.approx([0.25 * a ** (power / 2) for a in amounts])


def test_the_fit_is_that_of_least_squares_in_the_logarithms():
    amounts, seconds = np.array([1, 2, 4, 8, 16]), np.array([1.0, 1.5, 4.5, 6.0, 20.0])
    found = growth(sweep(*(point(int(a), s) for a, s in zip(amounts, seconds))))
    x, y = np.log(amounts), np.log(seconds)
    covariance = ((x - x.mean()) * (y - y.mean())).sum()
    assert found.time_exponent == pytest.approx(covariance / ((x - x.mean()) ** 2).sum())


def test_one_point_or_unknown_memory_has_no_exponent():
    found = growth(sweep(point(10, 1.0)))
    assert (found.time_exponent, found.memory_exponent) == (None, None)
    found = growth(sweep(point(10, 1.0), point(20, 2.0, memory=None)))
    assert found.time_exponent == pytest.approx(1)
    assert (found.memory_mib, found.memory_exponent) == (None, None)
    assert [row[-1] for row in growth_table(sweep(point(10, 1.0, memory=None))).rows] == ["-"]


def test_the_report_has_a_row_for_each_point_the_exponents_and_what_failed():
    report = case_report(
        sweep(
            point(2 * 10**9, 0.5),
            point(4 * 10**9, 1.0, memory=2100.0),
            failures=[Failure("8", "was ended by SIGKILL", "line")],
        )
    )
    title, heading, first, second, *rest = report.splitlines()
    assert title == "a sweep"
    words = " ".join(heading.split())
    assert words == "10^9 multiply-adds seconds quartiles 10^9 multiply-adds/s own peak MiB"
    assert first.split() == ["2000000000", "2.00", "0.500", "0.500", "to", "0.500", "4.00", "1000"]
    assert second.split()[1:3] == ["4.00", "1.00"]
    assert rest == [
        "time grows as the multiply-adds to the power of 1.00",
        "memory grows as the multiply-adds to the power of 1.00",
        "no result for 8: it was ended by SIGKILL",
        "    line",
    ]
    assert case_report(sweep()) == "a sweep"


def test_points_run_one_after_the_other_and_never_two_at_a_time(tmp_path):
    path = tmp_path / "order"
    letters = [
        Contestant(letter, f"{TINY}:notes", {"path": str(path), "letter": letter})
        for letter in "abc"
    ]
    wrong = Contestant("wrong", f"{TINY}:exits", {"status": 3})
    case = Case("scale", "a sweep", [*letters, wrong], {"sweep": "depth"})
    result = measure(case, Conditions(threads=1, rounds=2, warm_up=1, limit_s=60))
    assert path.read_text() == "aaabbbccc"
    assert [(one.name, len(one.seconds)) for one in result.results] == [(x, 2) for x in "abc"]
    assert [one.name for one in result.failures] == ["wrong"]
    assert (result.name, result.settings) == ("scale", {"sweep": "depth"})
    assert result.relative(result.results[1]) is None
