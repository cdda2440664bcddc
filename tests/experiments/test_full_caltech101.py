"""All of Caltech 101: the protocol, and the cost worked out by hand."""

from __future__ import annotations

import pytest

from experiments import caltech101, step_times
from experiments.caltech101 import training_hours
from experiments.experiment import Outcome

EXPERIMENTS = caltech101.GROUP.experiments


def test_it_needs_all_categories_and_takes_30_of_each():
    assert [one.name.split("/")[-1] for one in EXPERIMENTS] == ["float32", "float16", "bfloat16"]
    for one in EXPERIMENTS:
        assert (one.needs_photographs, one.categories) == (True, 101)
        assert (one.config["train_per_class"], one.config["image_size"]) == (30, 64)


def test_hours_are_those_of_training_and_test_images():
    # 3,030 images forward and backward and 5,647 forward, thirty times over.
    images = 30 * (3030 + 5647 / 3)
    assert training_hours(30, 100.0) == pytest.approx(images / 100 / 3600)


def test_without_records_the_section_has_commands_costs_and_sources(page_of):
    text = page_of({}, "All of Caltech 101")
    assert "python scripts/download_caltech.py --data-dir data" in text
    assert "python scripts/train_caltech.py --dtype float16 --devices gpu:0" in text
    assert "python scripts/evidence.py run caltech101 --data-dir data" in text
    assert "github.com/NVIDIA/DeepLearningExamples" in text
    assert "Not run yet: caltech101." in text
    minutes = 30 * (3030 + 5647 / 3) / 1376 / 60
    assert f"| V100 16 GB | mixed precision |    1,376 | {minutes:19.1f} |" in text


def test_results_and_costs_on_this_machine_are_shown_once_they_are_there(record_of, page_of):
    figures = {
        "test_accuracy": 0.25, "train_loss": None, "skipped_steps": 2, "steps": 9,
        "final_loss_scale": 1.0,
    }  # fmt: skip
    records = {one.name: record_of(one, Outcome(figures)) for one in EXPERIMENTS}
    (race,) = (one for one in step_times.GROUP.experiments if one.name.endswith("/resnet50_v2"))
    times = {
        f"{name}/{what}": 2.0
        for name in ("float32", "float16", "mixed_float16", "bfloat16")
        for what in ("seconds", "relative", "relative_lower", "relative_upper")
    }
    records[race.name] = record_of(race, Outcome({}, {}, times))
    text = page_of(records, "All of Caltech 101")
    assert "| float16  |                   25.0 | not finite" in text
    # 20 images in 2 seconds, twelve epochs.
    hours = 12 * (3030 + 5647 / 3) / 10 / 3600
    assert f"{hours:.2f} hours in float32" in text
    assert "Not run yet" not in text
