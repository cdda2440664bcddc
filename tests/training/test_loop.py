"""A run from its config to its results: its files, and that they agree."""

import logging
import math
import os

from mpgluon import CheckpointError, DataError, PrecisionError
from mpgluon.base.archive import read_archive

import mxnet as mx
import numpy as np
import pytest
from helpers import assert_same_bits
from PIL import Image
from training_helpers import STEPS, STEPS_PER_EPOCH, Run, quick_config, run

from recipes.options import in_options
from recipes.training import TrainingConfig
from recipes.training.checkpoints import RunCheckpoints
from recipes.training.dataset import open_dataset
from recipes.training.networks import build_network


@pytest.fixture(params=["float32_run", "float16_run"])
def finished(request) -> Run:
    return request.getfixturevalue(request.param)


def test_a_run_leaves_results_history_curves_parameters_and_checkpoints(finished):
    pictures = ["curves.png", "predictions.jpg", "mistakes.jpg"]
    tables = ["predictions.csv", "confusion.csv"]
    names = ["checkpoints", "final.params", "history.jsonl", *pictures, *tables, "results.json"]
    assert set(os.listdir(finished.folder)) == set(names)
    assert finished.checkpoints == ["step-00000004.npz", "step-00000008.npz"]
    for name, kind in zip(pictures, ("PNG", "JPEG", "JPEG")):
        with Image.open(finished.folder / name) as picture:
            assert picture.format == kind
            picture.load()


def test_results_agree_with_the_history(finished):
    results = finished.results
    steps, epochs = finished.events("step"), finished.events("epoch")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert [event["epoch"] for event in steps] == [0] * STEPS_PER_EPOCH + [1] * STEPS_PER_EPOCH
    assert [event["step"] for event in epochs] == [STEPS_PER_EPOCH, STEPS]
    assert results["steps"] == STEPS
    assert results["skipped_steps"] == sum(event["skipped"] for event in steps)
    assert results["test_accuracy"] == epochs[-1]["test_accuracy"]
    assert results["best_test_accuracy"] == max(event["test_accuracy"] for event in epochs)
    assert results["training_seconds"] == epochs[-1]["training_seconds"]
    assert results["images_per_second"] * results["training_seconds"] == pytest.approx(10 * STEPS)
    for epoch in epochs:
        own = [event for event in steps if event["epoch"] == epoch["epoch"]]
        assert epoch["train_loss"] == np.mean([event["loss"] for event in own])
        assert epoch["train_accuracy"] == sum(event["correct"] for event in own) / 40
    (start,), (end,) = finished.events("start"), finished.events("end")
    assert start["config"] == results["config"]
    assert start["dataset"] == results["dataset"]
    assert end == {"event": "end", "step": STEPS, "test_accuracy": results["test_accuracy"]}


def test_the_time_left_is_estimated_from_the_third_to_the_tenth_step(shapes, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("recipes.training.loop._tell_time_left", told.append)
    trained = run(shapes, tmp_path, epochs=3, test_image_size=40)
    timed = trained.events("step")[2:10]
    seconds = sum(event["images"] / event["images_per_second"] for event in timed) / 8
    # Left are two of twelve steps and the third test: 20 images of 40 x 40 pixels, of which each
    # pixel costs a third of one of 32 x 32 in a step of ten images.
    assert len(told) == 3
    assert told[2] == pytest.approx(seconds * (2 + 20 / 10 * (40 / 32) ** 2 / 3), rel=1e-3)


def test_the_loss_scale_follows_the_rule_from_what_was_skipped(float16_run):
    steps = float16_run.events("step")
    assert any(event["skipped"] for event in steps)
    assert not all(event["skipped"] for event in steps)
    scale = 2.0**16
    for event in steps:  # 8 steps: too few for growth, after 10
        assert event["loss_scale"] == scale
        if event["skipped"]:
            scale /= 2
    assert float16_run.results["final_loss_scale"] == scale


def test_the_learning_rate_climbs_to_its_peak_and_goes_down_a_cosine(float32_run):
    rates = [event["learning_rate"] for event in float32_run.events("step")]
    peak = float32_run.config.learning_rate
    climb = [peak * step / 4 for step in (1, 2, 3)]
    cosine = [peak * (1 + math.cos(math.pi * step / 4)) / 2 for step in (0, 1, 2, 3, 4)]
    # One rounding per operation: at most 4 of them on the way.
    assert rates == pytest.approx(climb + cosine, rel=8 * 2.0**-53, abs=8 * 2.0**-53 * peak)


def test_the_newest_checkpoint_holds_the_final_parameters_and_the_position(finished):
    parameters = {
        name.removeprefix("parameter/"): array
        for name, array in finished.arrays.items()
        if name.startswith("parameter/")
    }
    assert_same_bits(parameters, finished.parameters)
    assert finished.results["parameters"] == sum(array.size for array in parameters.values())
    header, _ = read_archive(finished.folder / "checkpoints" / finished.checkpoints[-1])
    assert header["extra"]["config"] == finished.results["config"]
    position = header["extra"]["position"]
    assert (position["step"], position["epoch"]) == (STEPS, 2)


def test_the_test_accuracy_is_that_of_the_saved_network_on_each_image_by_itself(float32_run):
    config = float32_run.config
    net = build_network(config.model, classes=10, image_size=32, devices=[mx.cpu()])
    net.load_parameters(str(float32_run.folder / "final.params"))
    _, batches = open_dataset(config).loaders(config, 1)
    right = [
        int(net(images[k : k + 1]).asnumpy().argmax()) == int(labels[k].asscalar())
        for images, labels in batches
        for k in range(len(labels))
    ]
    assert len(right) == 20
    assert float32_run.results["test_accuracy"] == sum(right) / 20
    # As many test images of each class: both means are the same number.
    assert float32_run.results["test_accuracy_per_class"] == pytest.approx(sum(right) / 20)


def test_a_config_gives_the_same_weights_again_and_a_new_seed_others(shapes, tmp_path, float32_run):
    again = run(shapes, tmp_path / "again")
    assert_same_bits(again.parameters, float32_run.parameters)
    other = run(shapes, tmp_path / "other", seed=1, epochs=1, warmup_epochs=0)
    assert (other.parameters["output.weight"] != again.parameters["output.weight"]).any()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, "float16"),
        ({"amp": True}, "float32"),
        ({"dtype": "bfloat16"}, "float32"),
        ({"amp": True, "devices": "cpu:0,1", "batch_size": 5}, "float32"),
        ({"optimizer": "adam", "learning_rate": 1e-3}, "float16"),
        ({"optimizer": "nag"}, "float16"),
        ({"optimizer": "rmsprop", "learning_rate": 1e-3}, "float16"),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_every_way_trains_and_stores_its_weights_in_its_format(shapes, tmp_path, options, weights):
    # A scale of 128 overflows nowhere here, so that each step counts.
    done = run(shapes, tmp_path, **{"dtype": "float16", "loss_scale": "128", **options})
    parameters = done.parameters
    assert parameters["output.weight"].dtype == weights
    assert {v.dtype.name for n, v in parameters.items() if "running" in n} == {"float32"}
    assert all(np.isfinite(value).all() for value in parameters.values())
    assert done.results["skipped_steps"] == 0
    losses = [event["loss"] for event in done.events("step")]
    assert len(losses) == STEPS
    assert np.isfinite(losses).all()
    assert min(losses[-2:]) < max(losses[:2])


def test_fine_tuning_starts_from_a_file_of_another_number_of_classes(tmp_path, float32_run, caplog):
    caplog.set_level(logging.INFO)

    def fine_tuned(name, head_rate):
        return run(
            *(tmp_path / "data", tmp_path / name),
            pretrained=str(float32_run.folder / "final.params"),
            **{"classes": 11, "images_per_class": 2, "train_per_class": 1, "epochs": 2},
            learning_rate=2.0**-120,  # leaves weights as they are, to the last bit
            head_rate=head_rate,
        )

    done = fine_tuned("run", 1.0)
    fresh = done.results["fresh_parameters"]
    assert sorted(fresh) == ["output.bias", "output.weight"]
    assert "new head, not from" in caplog.text
    before, after = float32_run.parameters, done.parameters
    assert after["output.weight"].shape == (11, before["output.weight"].shape[1])
    loaded = [name for name in before if name not in fresh and "running" not in name]
    assert_same_bits({n: after[n] for n in loaded}, {n: before[n] for n in loaded})
    # A rate of the head's own moves the head alone.
    moved = fine_tuned("moved", 2.0**117).parameters
    assert_same_bits({n: moved[n] for n in loaded}, {n: before[n] for n in loaded})
    assert all((moved[name] != after[name]).any() for name in fresh)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": "resnet51"}, ValueError, "no model zoo has a network called 'resnet51'"),
        ({"model": "alexnet"}, ValueError, "alexnet does not work on images of 32 x 32"),
        (
            *({"model": "alexnet", "image_size": 224, "test_image_size": 320}, ValueError),
            "alexnet does not work on images of 320 x 320",
        ),
        ({"optimizer": "sgdd"}, ValueError, "MXNet has no optimizer 'sgdd'; it has .*adam.*sgd"),
        ({"devices": "tpu"}, ValueError, "received 'tpu'"),
        ({"devices": "gpu:99"}, PrecisionError, r"names gpu\(99\)"),
        ({"train_per_class": 6}, ValueError, "train_per_class=6 leaves nothing to test on"),
        ({"classes": 9}, ValueError, "classes must be from 10 to 101, received 9"),
        ({"dataset": "caltech101"}, DataError, "Caltech 101 is not in .*--dataset shapes"),
        ({"pretrained": "/nowhere"}, CheckpointError, "there is no parameter file /nowhere"),
    ],
)
def test_what_is_not_there_is_refused_before_a_step(shapes, tmp_path, changes, kind, message):
    with pytest.raises(kind, match=message):
        run(shapes, tmp_path, **changes)
    assert not (tmp_path / "history.jsonl").exists()
    RunCheckpoints(quick_config(shapes, tmp_path), resume=False)  # the folder can be used again


def test_a_step_of_more_images_than_there_are_names_both_options(shapes, tmp_path):
    with pytest.raises(ValueError, match=r"a step needs 41 training .* 40: ") as error:
        run(shapes, tmp_path, batch_size=41)
    said = in_options(str(error.value), TrainingConfig, {})
    assert said.endswith("; choose --accumulate or --batch-size smaller, or more images")


def test_parameters_that_cannot_be_written_leave_no_half_file(shapes, tmp_path, monkeypatch):
    def half(_, path):
        with open(path, "wb") as file:
            file.write(b"half")
        raise mx.MXNetError("FileStream.Write incomplete")

    monkeypatch.setattr("mxnet.gluon.Block.save_parameters", half)
    with pytest.raises(DataError, match=r"cannot write .*final.params: FileStream.Write"):
        run(shapes, tmp_path, epochs=1, warmup_epochs=0)
    assert not [path for path in tmp_path.iterdir() if "params" in path.name]
