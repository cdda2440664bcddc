"""The experiments that start from ImageNet's weights."""

from mpgluon.errors import DataError

import pytest

from study.experiments import imagenet_weights
from study.experiments.experiment import Outcome, Place
from study.experiments.training_runs import PER_CLASS

RUNS = [one for one in imagenet_weights.GROUP.experiments if one.needs_photographs]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path, tmp_path / "work")


def test_without_the_weights_a_run_says_how_to_get_them(place, monkeypatch):
    monkeypatch.setattr(imagenet_weights, "WEIGHTS", "nowhere.pth")
    with pytest.raises(DataError, match=r"there is no nowhere.pth in .*make data/nowhere.pth"):
        RUNS[0].run(place)


@pytest.mark.parametrize("content", [b"", b"half of the weights"])
def test_other_weights_are_refused(place, content):
    (place.data_dir / imagenet_weights.WEIGHTS).write_bytes(content)
    with pytest.raises(
        DataError, match=r"has the SHA-256 .*, and the published weights have 57934"
    ):
        RUNS[0].run(place)
    assert not place.work_dir.exists()


def test_rows_show_what_has_been_run_and_differences_from_two_seeds_on(record_of):
    def view(seeds):
        outcome = Outcome(
            {PER_CLASS: 0.9, "test_accuracy": 0.91, "skipped_steps": 1, "steps": 9,
             "train_loss": 0.2, "final_loss_scale": 1.0},
            times={"training_seconds": 60.0},
        )  # fmt: skip
        records = {one.name: record_of(one, outcome) for one in RUNS if one.config["seed"] in seeds}
        return imagenet_weights.GROUP.view(records)

    assert view(()).short_table() == []
    assert [row[:5] for row in view((0,)).short_table()] == [
        ["FP32", "90.0 (one seed)", "1", "-", "1 of 9"],
        ["FP16", "90.0 (one seed)", "1", "-", "1 of 9"],
        ["BF16", "90.0 (one seed)", "1", "-", "1 of 9"],
        ["FP8 products (`mixed_float8`)", "90.0 (one seed)", "1", "-", "1 of 9"],
    ]
    differences = [row[2] for row in view((0, 1)).table()]
    assert differences == ["-", *["0.00 (0.00 to 0.00)"] * 3]


def test_times_are_those_of_the_record(record_of):
    (one,) = [one for one in imagenet_weights.GROUP.experiments if not one.needs_photographs]
    assert one.needs_quiet
    run = record_of(RUNS[0], Outcome({PER_CLASS: 0.9, "skipped_steps": 0, "steps": 9}))
    times = {"float32/relative": 1.0, "float32/peak_memory_mib": 1234.4}
    records = {RUNS[0].name: run, one.name: record_of(one, Outcome({}, times=times))}
    (row,) = imagenet_weights.GROUP.view(records).short_table()
    assert row == ["FP32", "90.0 (one seed)", "1", "-", "0 of 9", "1.00", "1234"]
