"""Parity runs: what they have in common, and how a run becomes an outcome."""

from __future__ import annotations

import json
from dataclasses import fields, replace

from mpgluon.errors import DataError

import pytest

from experiments import caltech101, parity, training_runs
from experiments.experiment import Place
from experiments.training_runs import config_of, train_or_find
from recipes.data import render_shapes
from recipes.training import TrainingConfig
from recipes.training.loop import _Run

BY_NAME = {one.name: one for one in parity.GROUP.experiments}


def test_there_is_a_run_for_each_network_row_and_seed():
    assert len(BY_NAME) == 6 * (4 * 5 + 3)
    one = BY_NAME["parity/vgg16_bn/mixed_float16/seed-2"]
    assert one.needs_photographs
    chosen = ("model", "dtype", "amp", "seed", "photographs")
    assert [one.config[name] for name in chosen] == [
        "vgg16_bn", "float16", True, 2, "caltech101-mini",
    ]  # fmt: skip


def test_rows_of_a_network_differ_in_nothing_else():
    common = {}
    for name, one in BY_NAME.items():
        _, network, row, seed = name.split("/")
        config = dict(one.config)
        assert (config["loss_scale"] != "auto") == (row == parity.CONTROL)
        assert f"seed-{config['seed']}" == seed
        del config["dtype"], config["amp"], config["loss_scale"]
        assert config == common.setdefault((network, seed), config)
    assert len(common) == 6 * 5


def test_a_record_says_what_decides_a_run_and_names_no_folder():
    config = TrainingConfig(data_dir="/home/somebody/data", output_dir="/home/somebody/runs")
    told = config_of(config)
    assert "somebody" not in str(told)
    # What is left out is where things are, how they are kept, what only a stand-in, several
    # processes or a damaged tree need, and what came later: experiments add that themselves.
    assert {one.name for one in fields(TrainingConfig)} - told.keys() == {
        "data_dir", "output_dir", "dataset", "test_per_class", "classes", "images_per_class",
        "kvstore", "timeout", "sync_batch_norm", "workers", "skip_unreadable", "keep_checkpoints",
        "tensorboard", "accumulate", "ema", "record_overflows",
        "update_rounding",
    }  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a finished run on a tree of 101 categories, its config, its images and its place."""
    folder = tmp_path_factory.mktemp("full")
    tree = render_shapes(folder, classes=101, images_per_class=2)
    (folder / "data").mkdir()
    tree.rename(folder / "data" / "101_ObjectCategories")
    small = {"model": "cifar_resnet20_v1", "image_size": 32, "train_per_class": 1, "epochs": 2}
    config = replace(caltech101.RECIPE, dtype="float16", **small, warmup_epochs=1)
    place = Place(folder / "data", folder / "work")
    return config, place, train_or_find(config, place.data_dir, place)


def test_all_categories_of_a_full_tree_are_trained_on_without_change(finished):
    config, place, outcome = finished
    figures, curves = outcome.figures, outcome.curves
    results = json.loads((place.work_dir / "results.json").read_text())
    assert len(results["dataset"]["classes"]) == 101
    assert (figures["train_images"], figures["test_images"]) == (101, 101)
    assert figures["steps"] == len(curves["loss"]) == config.epochs * (101 // config.batch_size)
    assert figures["test_accuracy"] == curves["test_accuracy"][-1] == results["test_accuracy"]
    assert figures["correct_test_images"] / 101 == figures["test_accuracy"]
    assert figures["not_finite_from_step"] is None
    assert outcome.times == {"training_seconds": results["training_seconds"]}


def test_the_loss_scale_is_kept_as_its_changes(finished):
    _, place, outcome = finished
    lines = map(json.loads, (place.work_dir / "history.jsonl").read_text().splitlines())
    scales = [event["loss_scale"] for event in lines if event["event"] == "step"]
    ends = [step for step, _ in outcome.curves["loss_scale"][1:]] + [len(scales) + 1]
    unfolded = [
        scale
        for (step, scale), end in zip(outcome.curves["loss_scale"], ends)
        for _ in range(step, end)
    ]
    assert unfolded == scales


def test_a_finished_run_is_found_and_not_trained_again(finished, monkeypatch):
    config, place, outcome = finished
    monkeypatch.setattr(training_runs, "train", None)
    assert train_or_find(config, place.data_dir, place) == outcome


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 7}, "seed was 0, is 7"),
        ({"batch_size": 5}, "batch_size was 20, is 5"),
    ],
)
def test_a_finished_run_of_another_config_is_refused(change, words, finished):
    config, place, _ = finished
    with pytest.raises(DataError, match=f"a run of another kind: {words}; delete that folder"):
        train_or_find(replace(config, **change), place.data_dir, place)


def test_a_finished_run_of_other_versions_or_another_processor_is_refused(finished, monkeypatch):
    config, place, _ = finished
    monkeypatch.setattr(training_runs, "installed_versions", lambda: {"mxnet": "2"})
    monkeypatch.setattr(training_runs, "describe_machine", lambda: {"processor": "another"})
    with pytest.raises(DataError, match=r"the versions was .*the processor was .*, is another"):
        train_or_find(config, place.data_dir, place)


def test_an_interrupted_run_goes_on(finished, tmp_path, monkeypatch):
    config, place, outcome = finished
    end_epoch = _Run._end_epoch

    def interrupt_in_the_second(run, epoch):
        if epoch == 1:
            raise KeyboardInterrupt
        end_epoch(run, epoch)

    place = Place(place.data_dir, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(_Run, "_end_epoch", interrupt_in_the_second)
        with pytest.raises(KeyboardInterrupt):
            train_or_find(config, place.data_dir, place)
    resumed = train_or_find(config, place.data_dir, place)
    assert (resumed.figures, resumed.curves) == (outcome.figures, outcome.curves)
    events = map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())
    assert [event["step"] for event in events if event["event"] == "start"] == [0, 5]


def test_long_curves_are_thinned_and_what_is_not_finite_is_none():
    results = {
        "test_accuracy": 0.5, "best_test_accuracy": 0.5, "train_loss": "NaN", "steps": 1000,
        "skipped_steps": 0, "final_loss_scale": 1.0, "parameters": 1, "training_seconds": 1.0,
        "dataset": {"test_images": 4, "train_images": 4},
    }  # fmt: skip
    losses = [0.5] * 900 + ["NaN", "Infinity"] * 50
    events = [
        {"event": "step", "step": step, "loss": loss, "loss_scale": 1.0}
        for step, loss in enumerate(losses, 1)
    ]
    outcome = training_runs._reduce(results, [*events, {"event": "epoch", "test_accuracy": 0.5}])
    assert outcome.figures["steps_per_point"] == 3  # of at most 400 points
    assert outcome.curves["loss"] == [0.5] * 300 + [None] * 34
    assert outcome.figures["not_finite_from_step"] == 901
    assert outcome.figures["train_loss"] is None
