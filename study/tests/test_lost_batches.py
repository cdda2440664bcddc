"""The protocol's arms: FP32 drops the steps that FP16 skipped; verdicts follow the tests."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from recipes.data import render_shapes
from study.experiments.experiment import Outcome, Place
from study.experiments.lost_batches import GROUP, TASKS, DroppedSteps, experiment_of

CIFAR10, CALTECH101 = TASKS


def outcome(accuracy, **figures):
    same = {"test_accuracy": accuracy, "test_accuracy_per_class": accuracy}
    tested = {f"float32_{name}": value for name, value in same.items()}
    return Outcome({**same, **tested, "steps": 2343, "skipped_steps": 0, **figures})


def records_of(record_of, differences):
    """Records in which an arm differs from FP32 by so many points in each seed."""
    records = {}
    for task in TASKS:
        for row in task.rows:
            for place, seed in enumerate(task.seeds):
                one = experiment_of(task, row, seed)
                more = differences.get(row, [0.0])
                accuracy = 0.8 + 0.01 * seed + more[place % len(more)] / 100
                records[one.name] = record_of(one, outcome(accuracy))
    return records


def test_arms_of_a_seed_differ_in_format_and_loss_scale_alone():
    arithmetic = {"dtype", "loss_scale", "dropped"}
    common = {}
    for one in GROUP.experiments:
        _, task, _, seed = one.name.split("/")
        config = {key: value for key, value in one.config.items() if key not in arithmetic}
        assert config == common.setdefault((task, seed), config)
    assert len({json.dumps(one.config) for one in GROUP.experiments}) == len(GROUP.experiments)
    assert len(GROUP.experiments) == 10 * len(CIFAR10.rows) + 10 * len(CALTECH101.rows) == 100


def test_runs_of_one_seed_alone_come_from_one_kind_of_processor():
    blocks = Counter(one.block for one in GROUP.experiments)
    assert blocks == {
        f"lost_batches/{task.name}/*/seed-{seed}": len(task.rows)
        for task in TASKS
        for seed in task.seeds
    }


def test_dropped_steps_have_an_infinite_scale_and_continue_where_they_were():
    scale = DroppedSteps([2, 3])
    seen = []
    for _ in range(4):
        seen.append(scale.scale)
        scale.update(grads_finite=math.isfinite(scale.scale))
    assert seen == [1, math.inf, math.inf, 1]
    before = DroppedSteps([2, 3])
    before.update(grads_finite=True)
    again = DroppedSteps([2, 3])
    again.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert again.scale == math.inf


def test_verdicts_are_those_of_the_protocol(record_of):
    noise = [-0.1, 0.1]
    records = records_of(
        record_of,
        {
            "float16-dynamic": [-0.5, -0.3],
            "float16-measured": noise,
            "float16-static": [-1.5, 1.4],
            "float32-dropped": [-0.2, 0.0],
            "bfloat16": [0.4, 0.6],
        },
    )
    view = GROUP.view(records)
    both, cifar10 = "20 (CIFAR-10, Caltech 101)", "10 (CIFAR-10)"
    assert {title: (pairs, found) for title, pairs, _, _, found in view.pooled_table()} == {
        "FP16, dynamic loss scale, minus FP32": (both, "lower"),
        "FP16, measured loss scale, minus FP32": (both, "equal within 0.25 points"),
        "FP16, static loss scale of 128, minus FP32": (cifar10, "not decided"),
        "FP32 without the batches that FP16 skipped, minus FP32": (
            both,
            "lower, and equal within 0.25 points",
        ),
        "BF16, minus FP32": (cifar10, "higher"),
        "FP16, measured minus dynamic": (both, "higher"),
        "FP16, dynamic, tested in FP32 minus in FP16": (both, "equal within 0.25 points"),
    }
    table = view.table()
    assert len(table) == len(CIFAR10.rows) + len(CALTECH101.rows)
    assert table[0][:2] == [CIFAR10.title, "FP32"]
    assert table[0][3] == "-"
    assert view.compare("float16-measured", "float16-dynamic").lower > 0.25
    assert view.spread("float16-dynamic") == pytest.approx(math.sqrt(20 * 0.1**2 / 18))
    assert view.all_seeds.points("float16")[6] == pytest.approx(85.7)
    assert view.batches_are_the_cause
    assert view.measured_becomes_the_default
    figure = Figure()
    GROUP.pictures["lost-batches"](figure, records)
    axes = figure.axes[0]
    seeds = [len(line.get_xdata()) for line in axes.lines if line.get_marker() in ("o", "s")]
    assert seeds == [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]
    assert [one.get_text() for one in axes.texts] == [row[0] for row in view.pooled_table()]
    better = {"float32-dropped": [0.3, 0.4], "float16-measured": [-0.5, -0.4]}
    view = GROUP.view(records_of(record_of, better))
    assert not view.batches_are_the_cause
    assert not view.measured_becomes_the_default


@pytest.mark.slow  # trains three times
def test_float32_drops_the_steps_that_float16_skipped(tmp_path):
    images = render_shapes(tmp_path, images_per_class=12)
    recipe = replace(CIFAR10.recipe, epochs=2, train_per_class=8, batch_size=16, shifts=False)
    task = replace(CIFAR10, recipe=recipe, images_of=lambda _: images)
    skipped, outcomes = {}, {}
    for row in ("float16-dynamic", "float32", "float32-dropped"):
        one = experiment_of(task, row, 0)
        place = Place(tmp_path, tmp_path / "work" / one.name)
        outcomes[row] = one.run(place).figures
        lines = map(json.loads, (place.work_dir / "history.jsonl").read_text().splitlines())
        steps = [event for event in lines if event["event"] == "step"]
        skipped[row] = [event["step"] for event in steps if event["skipped"]]
    assert skipped["float32-dropped"] == skipped["float16-dynamic"] != []
    assert skipped["float32"] == []
    fp32 = outcomes["float32"]
    assert fp32["float32_test_accuracy"] == fp32["test_accuracy"]
    assert np.isfinite([one["float32_test_loss"] for one in outcomes.values()]).all()
    assert outcomes["float32-dropped"]["float32_test_loss"] != fp32["float32_test_loss"]
