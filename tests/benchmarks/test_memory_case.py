"""Memory: the search for the largest batch within a limit, and what is said of it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import memory as memory_module
from benchmarks.cases import CaseOptions
from benchmarks.contestant import Contestant
from benchmarks.growth import measure
from benchmarks.memory import (
    Peak,
    largest_batch,
    memory,
    next_batch,
    parse_memory,
    peaks_by_batch,
    with_largest_batches,
)
from benchmarks.race import Case, CaseResult, Conditions, Failure, Result
from benchmarks.report import memory_table

TINY = str(Path(__file__).with_name("tiny_contestants.py"))
NAMES = ["Gluon float32", "mpgluon float16"]


def result_of(case: Case, peaks) -> CaseResult:
    """Measure a case by a function of the contestant's name and the batch size."""
    batch = case.settings["batch_size"]
    mib = {one.name: peaks(one.name, batch) for one in case.contestants}
    results = [Result(n, [1.0], m, 100.0, 0) for n, m in mib.items() if m is not None]
    failures = [Failure(n, "was ended by SIGKILL") for n, m in mib.items() if m is None]
    return CaseResult(case.name, case.title, dict(case.settings), "", results, failures)


def search(options: CaseOptions, peaks) -> list[CaseResult]:
    def run(case):
        return result_of(case, peaks)

    return list(with_largest_batches(map(run, memory(options)), options, run))


def found_batches(results: list[CaseResult], limit: float) -> dict[str, int]:
    return {name: largest_batch(peaks, limit) for name, peaks in peaks_by_batch(results).items()}


# --- the cases -------------------------------------------------------------------------------


def test_memory_is_measured_for_three_batches_of_resnet_50_in_float32_and_float16():
    cases = memory(CaseOptions())
    assert [case.settings["batch_size"] for case in cases] == [8, 16, 32]
    for case in cases:
        assert [one.name for one in case.contestants] == [*NAMES, "mpgluon autocast float16"]
        assert case.settings["model"] == "resnet50_v1"
        assert case.settings["image_size"] == 224
        assert case.settings["memory_limit_mib"] is None
    (case,) = memory(CaseOptions(batch_sizes=[4], dtypes=["bfloat16"], memory_limit_mib=512.0))
    assert [one.name for one in case.contestants] == ["Gluon float32", "mpgluon bfloat16"]
    assert case.settings["memory_limit_mib"] == 512


def test_the_memory_of_a_gpu_is_not_that_of_the_process():
    with pytest.raises(ValueError, match=r"on the CPU only, received --device gpu:0"):
        memory(CaseOptions(device="gpu:0"))


# --- the search ------------------------------------------------------------------------------


@given(
    fixed=st.floats(0, 900),
    per_image=st.floats(0.5, 200),
    bend=st.floats(0.7, 1.3),
    limit=st.floats(100, 1000),
    first=st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True),
)
def test_the_search_ends_at_the_largest_batch_that_fits_and_never_far_above(
    fixed, per_image, bend, limit, first
):
    def mib(batch):
        return fixed + per_image * batch**bend

    peaks = {batch: Peak(mib(batch), 0.0) for batch in first}
    measured = set(first)
    while largest_batch(peaks, limit) is None:
        batch = next_batch(peaks, limit)
        assert batch not in measured
        fitting = max((n for n in measured if mib(n) <= limit), default=0)
        assert batch <= 2 * fitting or batch < max(measured)
        measured.add(batch)
        peaks[batch] = Peak(mib(batch), 0.0)
    largest = largest_batch(peaks, limit)
    assert mib(largest + 1) > limit
    assert largest == 0 or mib(largest) <= limit


@given(st.randoms(use_true_random=False), st.floats(100, 1000))
def test_the_search_ends_where_peaks_are_not_quite_equal_in_equal_runs(random, limit):
    peaks = {n: Peak((80 + 5 * n) * random.uniform(0.99, 1.01), 0.0) for n in (8, 16)}
    while largest_batch(peaks, limit) is None:
        batch = next_batch(peaks, limit)
        assert batch <= 400  # of which the limit allows no half
        peaks[batch] = Peak((80 + 5 * batch) * random.uniform(0.99, 1.01), 0.0)
    assert largest_batch(peaks, limit) == pytest.approx((limit - 80) / 5, abs=1 + limit / 250)


def test_few_runs_are_needed_where_memory_grows_in_a_straight_line():
    peaks = {batch: Peak(500.0 + 96 * batch, 0.0) for batch in (8, 16, 32)}
    asked = []
    while largest_batch(peaks, 8192) is None:
        asked.append(next_batch(peaks, 8192))
        peaks[asked[-1]] = Peak(500.0 + 96 * asked[-1], 0.0)
    assert asked == [64, 80, 81]  # 80 images take 8180 MiB; 64 is twice the largest before
    assert largest_batch(peaks, 8192) == 80


def test_a_limit_at_a_peak_is_kept_and_batches_have_to_be_neighbours():
    peaks = {batch: Peak(100.0 * batch, 0.0) for batch in (2, 3, 5)}
    assert largest_batch(peaks, 200) == 2
    assert largest_batch(peaks, 299) == 2
    assert largest_batch(peaks, 300) is None  # 4 is not known
    assert largest_batch({1: Peak(100.0, 0.0)}, 99) == 0


def test_every_contestant_is_searched_alone_at_sizes_of_its_own():
    options = CaseOptions(
        model="alexnet", dtypes=["float16"], batch_sizes=[2, 4], memory_limit_mib=1000.0
    )

    def peaks(name, batch):
        return 200 + batch * {"Gluon float32": 80, "mpgluon float16": 45}.get(name, 30)

    results = search(options, peaks)
    assert found_batches(results, 1000) == {
        "Gluon float32": 10,
        "mpgluon float16": 17,
        "mpgluon autocast float16": 26,
    }
    assert [len(result.results) for result in results] == [3, 3] + [1] * (len(results) - 2)
    assert {result.settings["model"] for result in results} == {"alexnet"}
    assert len(search(replace(options, memory_limit_mib=None), peaks)) == 2


def test_a_contestant_that_fails_is_searched_no_further_and_has_no_largest_batch():
    options = CaseOptions(batch_sizes=[2], dtypes=["float32"], memory_limit_mib=1000.0)
    results = search(options, lambda _, batch: 100.0 * batch if batch < 6 else None)
    assert [one.failures[0].name for one in results if one.failures] == ["Gluon float32"]
    assert found_batches(results, 1000) == {"Gluon float32": None}
    assert memory_table(results).rows[-1][1] == "-"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are known on Linux only")
def test_peaks_are_those_of_processes_of_their_own_with_and_without_their_libraries():
    def run(case):
        batch = case.settings["batch_size"]
        options = {"multiply_adds": 1, "mebibytes": 4 * batch}
        alone = [Contestant("tiny", f"{TINY}:counts", options)]
        return measure(replace(case, contestants=alone), Conditions(threads=1, rounds=1, warm_up=0))

    results = map(run, memory(CaseOptions(batch_sizes=[2, 8], dtypes=["float32"])))
    peaks = peaks_by_batch(results)["tiny"]
    assert list(peaks) == [2, 8]
    assert peaks[8].mib - peaks[2].mib == pytest.approx(24, abs=4)  # bytearray(...) * n
    assert 31 < peaks[8].own_mib < peaks[8].mib - 5  # an interpreter takes more than that


# --- the table and the option ----------------------------------------------------------------


def test_the_table_has_peaks_ratios_and_the_largest_batches():
    options = CaseOptions(dtypes=["float16"], batch_sizes=[2, 4], memory_limit_mib=1000.0)
    results = search(options, lambda name, n: 200.0 + n * (100 if name == "Gluon float32" else 50))
    table = memory_table(results)
    assert table.headings[:4] == ("batch", "Gluon float32 (MiB)", "own", "relative")
    assert table.headings[4:7] == ("mpgluon float16 (MiB)", "own", "relative")
    assert table.rows[0][:7] == ("2", "400", "300", "1.000", "300", "200", "0.750")
    by_batch = {row[0]: row for row in table.rows}
    assert by_batch["16"][1:7] == ("-", "-", "-", "1000", "900", "-")
    assert table.rows[-1][:7] == ("largest within 1000 MiB", "8", "", "", "16", "", "")
    without = memory_table(search(replace(options, memory_limit_mib=None), lambda _, n: 200.0 + n))
    assert [row[0] for row in without.rows] == ["2", "4"]


def test_a_limit_has_a_unit():
    assert parse_memory("1MiB") == 1
    assert parse_memory("0.25GiB") == parse_memory("256 MiB") == 256


@pytest.mark.parametrize("wrong", ["8", "8GB", "-1GiB", "0MiB", "", "eightGiB"])
def test_other_limits_are_refused(wrong):
    with pytest.raises(argparse.ArgumentTypeError, match="must be such as 8GiB or 512MiB"):
        parse_memory(wrong)


def test_a_limit_above_what_is_free_and_other_systems_are_refused(monkeypatch, tmp_path):
    with pytest.raises(argparse.ArgumentTypeError, match=r"at most what is free, \d+ MiB"):
        parse_memory("1000000GiB")
    monkeypatch.setattr(memory_module, "_MEMORY", tmp_path / "meminfo")
    with pytest.raises(argparse.ArgumentTypeError, match="on Linux only"):
        parse_memory("1MiB")
