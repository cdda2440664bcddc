"""Batches of twice the size: rows, the search in FP32's memory, and the pages about them."""

from __future__ import annotations

from pathlib import Path

from mpgluon.errors import MpgluonError

import pytest

from recipes.training import TrainingConfig
from study.benchmarks.race import CaseResult, Failure, Result
from study.experiments import batch_doubling, races
from study.experiments.batch_doubling import BATCH, GROUP, ROWS
from study.experiments.experiment import Outcome, Place

PLACE = Place(Path("none"), Path("none"))
TITLE = "A batch of twice the size"
BY_NAME = {one.name: one for one in GROUP.experiments}


def test_the_learning_rate_is_in_proportion_to_the_batch_and_nothing_else_differs():
    configs = {}
    for row, (dtype, batch) in ROWS.items():
        config = dict(BY_NAME[f"batch_doubling/{row}/seed-0"].config)
        config.pop("photographs")
        trained = TrainingConfig(**config)
        assert trained.peak_learning_rate(batch) == config["learning_rate"] * batch / BATCH
        assert (config.pop("dtype"), config.pop("batch_size")) == (dtype, batch)
        configs[row] = config
    assert all(config == configs["float32-40"] for config in configs.values())
    assert [batch / BATCH for _, batch in ROWS.values()] == [1, 1, 1.5, 2, 2]


def fake_race(case, *, threads, rounds):
    """Return results of a machine on which FP32 takes 2 MiB an image and FP16 1.1, after 200."""
    results = []
    for one in case.contestants:
        batch, dtype = one.options["batch_size"], one.options["dtype"]
        peak = 200 + batch * (2.0 if dtype == "float32" else 1.1)
        seconds = [batch / 100 + 0.002 * number for number in range(rounds)]
        results.append(Result(one.name, seconds, peak, 150.0, 0.0, {"threads": threads}))
    name = case.contestants[0].name
    return CaseResult(case.name, case.title, dict(case.settings), name, results)


def test_the_largest_fp16_batch_in_fp32s_memory_is_searched(monkeypatch):
    monkeypatch.setattr(batch_doubling, "complete_race", fake_race)
    times = BY_NAME["batch_doubling/memory"].run(PLACE).times
    assert times["largest_batch"] == 72  # 200 + 72 * 1.1 = 279.2, at most 200 + 40 * 2
    assert times["float32-40/mib"] == 280
    assert times["float16-80/own_mib"] == pytest.approx(200 + 88 - 150)
    for row in ROWS:
        assert f"{row}/mib" in times


def test_times_are_those_of_the_rows_on_all_cores(monkeypatch):
    monkeypatch.setattr(batch_doubling, "complete_race", fake_race)
    monkeypatch.setattr(batch_doubling, "usable_cores", lambda: 3)
    times = BY_NAME["batch_doubling/times"].run(PLACE).times
    assert BY_NAME["batch_doubling/times"].needs_quiet
    assert times["threads"] == 3
    for row, (_, batch) in ROWS.items():
        assert times[f"{row}/seconds"] == pytest.approx(batch / 100 + 0.01)


def test_a_contestant_that_fails_ends_the_measurement(monkeypatch):
    failure = Failure("mpgluon float16", "died", "its last line")
    failed = CaseResult("memory", "a step", {}, "x", [], [failure])
    monkeypatch.setattr(races, "race", lambda *_: failed)
    with pytest.raises(MpgluonError, match="not measured: mpgluon float16 died\nits last line"):
        BY_NAME["batch_doubling/memory"].run(PLACE)


# Shares of right answers by row and seed.
ACCURACIES = {
    "float32-40": (0.70, 0.72, 0.74),
    "float16-40": (0.71, 0.71, 0.74),
    "float16-60": (0.68, 0.69, 0.70),
    "float16-80": (0.66, 0.73, 0.70),
    "float32-80": (0.69, 0.71, 0.72),
}


@pytest.fixture
def records(record_of, monkeypatch):
    monkeypatch.setattr(batch_doubling, "complete_race", fake_race)
    found = {}
    for row, accuracies in ACCURACIES.items():
        steps = 16 * (400 // ROWS[row][1])
        for seed, accuracy in enumerate(accuracies):
            one = BY_NAME[f"batch_doubling/{row}/seed-{seed}"]
            figures = {
                "test_accuracy": accuracy, "train_loss": 0.5, "steps": steps,
                "skipped_steps": seed, "final_loss_scale": 512.0,
            }  # fmt: skip
            found[one.name] = record_of(one, Outcome(figures))
    one = BY_NAME["batch_doubling/memory"]
    found[one.name] = record_of(one, one.run(PLACE))
    return found


def rows_of(section):
    lines = [line for line in section.splitlines() if line.startswith("| float")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_says_which_batch_fits_and_how_much_more_twice_the_batch_takes(records, page_of):
    page = page_of(records, TITLE, "docs/results.md")
    assert "for batches of 40, float16 has room for batches of 72**" in page
    assert "twice the batch takes 3 % more than float32, one and a half times 5 % less" in page
    # Differences of 4, -1 and 4: standard deviation 2.89, and Student's t is 4.30.
    assert "minus float32 at 40 is -2.3 (-9.5 to +4.8) points" in page
    assert "float32 at twice the batch -1.3 (-2.8 to +0.1)." in page
    last = rows_of(page)[3]
    assert last[:5] == ["float16", "80", "0.1", "80", "69.7 ± 3.5"]
    assert last[-2:] == ["288", "-"]
    assert page.count("results/batch-doubling.png") == 1


def test_with_the_times_the_page_has_the_seconds_of_an_epoch(records, record_of, page_of):
    one = BY_NAME["batch_doubling/times"]
    page = page_of({**records, one.name: record_of(one, one.run(PLACE))}, TITLE, "docs/results.md")
    # 10 steps of 0.41 s, 6 of 0.61 s and 5 of 0.81 s.
    assert [row[-1] for row in rows_of(page)] == ["4.10", "4.10", "3.66", "4.05", "4.05"]


def test_a_format_that_differs_does_not_support_the_conclusion(records, record_of, supported):
    words = "float32 takes for batches of 40, float16 has room for batches of"
    assert supported(records, words)
    for seed, accuracy in enumerate((0.3, 0.31, 0.35)):
        name = f"batch_doubling/float16-80/seed-{seed}"
        figures = {**records[name].outcome.figures, "test_accuracy": accuracy}
        records[name] = record_of(BY_NAME[name], Outcome(figures))
    assert not supported(records, words)
