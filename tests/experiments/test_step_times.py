"""The race of a network's formats: who runs, what is kept, and how it is shown."""

from __future__ import annotations

from mpgluon.errors import MpgluonError

import pytest

from benchmarks.race import CaseResult, Failure, Result
from experiments import parity, step_times
from experiments.experiment import Outcome, Place

SECONDS = {
    "float32": [2.0, 4.0],
    "float16": [3.0, 6.0],
    "mixed_float16": [4.0, 8.0],
    "bfloat16": [1.0, 2.0],
}


@pytest.fixture
def raced(monkeypatch):
    """Let no time pass; return the cases that were raced, and what is to fail."""
    cases, failures = [], []

    def race(case, conditions):
        cases.append((case, conditions))
        results = [
            Result(one.name, seconds, 100.0, 50.0, 0.0)
            for one, seconds in zip(case.contestants, SECONDS.values())
        ]
        return CaseResult(case.name, case.title, {}, case.contestants[0].name, results, failures)

    monkeypatch.setattr(step_times, "race", race)
    return cases, failures


def run(number: int, tmp_path) -> Outcome:
    return step_times.GROUP.experiments[number].run(Place(tmp_path, tmp_path))


def test_all_formats_of_a_network_race_in_the_size_of_its_parity_runs(raced, tmp_path):
    outcome = run(4, tmp_path)
    ((case, conditions),) = raced[0]
    assert [one.name for one in case.contestants] == [
        "mpgluon float32",
        "mpgluon float16",
        "mpgluon autocast float16",
        "mpgluon bfloat16",
    ]
    for one in case.contestants:
        chosen = [one.options[name] for name in ("model", "image_size", "batch_size")]
        assert chosen == ["mobilenet1.0", 96, 20]
    assert conditions.rounds == 11
    # Seconds differ from run to run: no figure and no curve has them.
    assert (outcome.figures, outcome.curves) == ({}, {})
    assert outcome.times["float16/seconds"] == 4.5
    assert [outcome.times[f"{name}/relative"] for name in SECONDS] == [1, 1.5, 2, 0.5]
    assert outcome.times["threads"] == conditions.threads
    assert outcome.times["bfloat16/peak_memory_mib"] == 100


def test_it_runs_alone_and_needs_no_photographs():
    assert all(
        one.needs_quiet and not one.needs_photographs for one in step_times.GROUP.experiments
    )
    assert len(step_times.GROUP.experiments) == len(parity.NETWORKS)


def test_a_contestant_without_a_result_is_an_error(raced, tmp_path):
    raced[1].append(Failure("mpgluon float16", "ended with status 1", "no memory"))
    with pytest.raises(MpgluonError, match="no times of alexnet: mpgluon float16 ended with"):
        run(0, tmp_path)


@pytest.mark.usefixtures("raced")
def test_a_row_has_times_and_its_command_and_missing_ones_are_named(record_of, page_of, tmp_path):
    experiments = step_times.GROUP.experiments
    record = record_of(experiments[0], run(0, tmp_path))
    text = page_of({record.name: record}, "Time per step")
    (row,) = [line for line in text.splitlines() if "| mixed_float16 |" in line]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:6] == ["alexnet", "64", "mixed_float16", "6.00 s", "2.00", "2.00 to 2.00"]
    assert cells[6:] == ["100", "`python scripts/evidence.py run step_times/alexnet`"]
    assert f"Not run yet: {', '.join(one.name for one in experiments[1:])}." in text
