"""`scripts/train_caltech.py` under mpirun: what it computes, writes, survives and refuses."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpgluon import PrecisionError
from mpgluon.distributed import OneProcess

import mxnet as mx
import numpy as np
import pytest
from distributed_helpers import HERE, Job, mpirun, succeeded
from faults import seconds_after

from recipes.data import render_shapes
from recipes.training import TrainingConfig, train
from recipes.training.dataset import open_dataset
from recipes.training.networks import build_network

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

SCRIPT = HERE.parents[1] / "scripts" / "train_caltech.py"
AT_ONCE_S = 10
# 4 of 6 images of 10 classes train, 8 of them in a step, over all processes.
GLOBAL_BATCH, STEPS_PER_EPOCH, STEPS = 8, 5, 10
OPTIONS = {
    "model": "cifar_resnet20_v1", "dataset": "shapes", "images_per_class": 6, "train_per_class": 4,
    "image_size": 32, "epochs": 2, "warmup_epochs": 1, "workers": 1, "kvstore": "mpi",
    "reference_batch_size": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    render_shapes(folder, classes=10, images_per_class=6, seed=0)
    return folder


def as_arguments(options: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def options_of(ranks: int, shapes: Path, output: Path) -> dict[str, Any]:
    places = {"data_dir": str(shapes), "output_dir": str(output)}
    return {**OPTIONS, **places, "batch_size": GLOBAL_BATCH // ranks}


def run(ranks: int, shapes: Path, output: Path, *more: str) -> Job:
    return mpirun(ranks, SCRIPT, *as_arguments(options_of(ranks, shapes, output)), *more)


def run_with_fault(
    kind: str, culprit: int, step: int, ranks: int, shapes: Path, output: Path, *more: str
) -> Job:
    arguments = as_arguments(options_of(ranks, shapes, output))
    moment = output.with_suffix(".moment")
    job = mpirun(ranks, HERE / "ranks_script.py", kind, culprit, step, moment, *arguments, *more)
    assert job.status != 0
    assert job.left_behind == []
    assert seconds_after(moment, job.ended) < AT_ONCE_S
    return job


@dataclass(frozen=True)
class Left:
    """Files that a run left in its folder."""

    folder: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "history.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.folder / "results.json").read_text())

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        loaded = mx.nd.load(str(self.folder / "final.params"))
        return {name: array.asnumpy() for name, array in loaded.items()}


@pytest.fixture(scope="module")
def two_ranks(shapes, tmp_path_factory) -> Left:
    folder = tmp_path_factory.mktemp("two") / "run"
    succeeded(run(2, shapes, folder))
    return Left(folder)


def test_only_rank_0_writes_and_it_writes_what_one_process_does(two_ranks):
    assert sorted(os.listdir(two_ranks.folder)) == [
        "checkpoints",
        "confusion.csv",
        "curves.png",
        "final.params",
        "history.jsonl",
        "mistakes.jpg",
        "predictions.csv",
        "predictions.jpg",
        "results.json",
    ]
    assert [event["step"] for event in two_ranks.events("step")] == list(range(1, STEPS + 1))
    assert len(two_ranks.events("start")) == len(two_ranks.events("end")) == 1
    assert two_ranks.checkpoints == ["step-00000005.npz", "step-00000010.npz"]


def test_figures_are_those_of_all_processes(two_ranks):
    results = two_ranks.results
    assert (results["processes"], results["global_batch_size"]) == (2, GLOBAL_BATCH)
    assert {event["images"] for event in two_ranks.events("step")} == {GLOBAL_BATCH}
    assert sum(event["correct"] for event in two_ranks.events("step")[:STEPS_PER_EPOCH]) == (
        pytest.approx(two_ranks.events("epoch")[0]["train_accuracy"] * 40)
    )


def accuracy_of(folder: Path, shapes: Path) -> float:
    """Return the accuracy of a saved network on all test images, from one process."""
    config = TrainingConfig(**options_of(1, shapes, folder))
    net = build_network(config.model, classes=10, image_size=32, devices=[mx.cpu()])
    net.load_parameters(str(folder / "final.params"))
    _, batches = open_dataset(config).loaders(config, 1)
    right = [net(images).asnumpy().argmax(axis=1) == labels.asnumpy() for images, labels in batches]
    assert sum(map(len, right)) == 20
    with open(folder / "predictions.csv", newline="") as file:  # in the order of one process
        rows = list(csv.DictReader(file))
    assert [row["right category"] == row["answer"] for row in rows] == np.concatenate(
        right
    ).tolist()
    return np.concatenate(right).mean()


def test_the_test_accuracy_is_that_of_the_saved_network_on_all_test_images(two_ranks, shapes):
    assert two_ranks.results["test_accuracy"] == accuracy_of(two_ranks.folder, shapes)


def test_batches_that_accumulate_and_the_average_of_the_weights_are_those_of_all_processes(
    shapes, tmp_path
):
    folder = tmp_path / "run"
    options = {**options_of(4, shapes, folder), "accumulate": 2, "ema": 0.5}
    succeeded(mpirun(2, SCRIPT, *as_arguments(options)))
    done = Left(folder)
    assert (done.results["global_batch_size"], done.results["steps"]) == (GLOBAL_BATCH, STEPS)
    assert {event["images"] for event in done.events("step")} == {GLOBAL_BATCH}
    assert done.results["tested"] == "average"
    # Each rank has tested half of the images with an average of its own.
    assert done.results["test_accuracy"] == accuracy_of(folder, shapes)


def test_the_learning_rate_is_scaled_to_the_global_batch_and_warmed_up(two_ranks):
    rates = [event["learning_rate"] for event in two_ranks.events("step")]
    peak = TrainingConfig().learning_rate * GLOBAL_BATCH / OPTIONS["reference_batch_size"]
    climb = [peak * step / STEPS_PER_EPOCH for step in range(1, STEPS_PER_EPOCH)]
    assert rates[: len(climb)] == pytest.approx(climb, rel=1e-12)
    assert max(rates) == pytest.approx(peak, rel=1e-12)


def test_a_run_whose_rank_was_killed_goes_on_to_the_same_bits(two_ranks, shapes, tmp_path):
    job = run_with_fault("kill", 1, 7, 2, shapes, tmp_path / "run")
    killed = Left(tmp_path / "run")
    assert re.search(r"process rank 1 with PID \d+ .*exited on\s*signal 9", job.output, re.DOTALL)
    assert killed.checkpoints == ["step-00000005.npz"]
    succeeded(run(2, shapes, tmp_path / "run", "--resume"))
    assert [event["step"] for event in killed.events("start")] == [0, 5]
    assert [event["loss"] for event in killed.events("step")] == [
        event["loss"] for event in two_ranks.events("step")
    ]
    for name, value in two_ranks.parameters.items():
        assert np.array_equal(killed.parameters[name], value), name


def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_with_other_numbers_of_ranks(
    shapes, tmp_path
):
    folder = tmp_path / "run"
    job = run_with_fault("terminate", 1, 2, 2, shapes, folder)
    assert job.status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; continue with --resume" in job.output
    stopped = Left(folder)
    assert stopped.checkpoints == ["step-00000002.npz"]
    job = run_with_fault("raise", 3, 4, 4, shapes, folder, "--resume")
    assert "rank 3 of 4 failed and ends the job" in job.output
    assert "RuntimeError: the roof is on fire" in job.output
    assert stopped.checkpoints == ["step-00000002.npz", "step-00000005.npz"]
    options = options_of(1, shapes, folder)
    assert train(TrainingConfig(**{**options, "kvstore": "device"}), resume=True)["steps"] == STEPS
    steps = stopped.events("step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert {event["images"] for event in steps} == {GLOBAL_BATCH}
    assert all(math.isfinite(event["loss"]) for event in steps)
    starts = [(event["step"], event["processes"]) for event in stopped.events("start")]
    assert starts == [(0, 2), (2, 4), (5, 1)]


def test_another_global_batch_is_refused_with_the_numbers(two_ranks, shapes):
    options = {**options_of(1, shapes, two_ranks.folder), "batch_size": 9, "kvstore": "device"}
    with pytest.raises(ValueError, match="the batch over all devices and processes was 8, is 9 "):
        train(TrainingConfig(**options), resume=True)


def test_batch_norm_cannot_be_synchronized_over_cpu_devices(shapes, tmp_path):
    options = {**options_of(1, shapes, tmp_path), "devices": "cpu:0,1", "sync_batch_norm": True}
    with pytest.raises(PrecisionError, match="hangs on several CPU devices"):
        train(TrainingConfig(**options))


def test_several_processes_without_a_kvstore_that_joins_them_are_refused(shapes, tmp_path):
    class OneOfTwo(OneProcess):
        world_size = 2

    options = {**options_of(2, shapes, tmp_path / "run"), "kvstore": "device"}
    with pytest.raises(ValueError, match="2 processes train together only with kvstore 'mpi'"):
        train(TrainingConfig(**options), processes=OneOfTwo())
    assert not (tmp_path / "run").exists()
    job = mpirun(2, SCRIPT, *as_arguments(options))
    assert job.status == 2
    message = "mpirun has started 2 processes, and without --kvstore mpi each of them"
    assert job.output.count(message) == 1


def test_mpirun_passes_sigusr1_on_and_the_run_stops_with_a_checkpoint(shapes, tmp_path):
    job = run_with_fault("ask", 1, 2, 2, shapes, tmp_path / "run")
    assert job.status == 128 + signal.SIGUSR1
    assert "stopped by SIGUSR1; continue with --resume" in job.output
    (checkpoint,) = Left(tmp_path / "run").checkpoints
    # The signal takes a way through mpirun, and may arrive some steps later than it was sent.
    assert 2 <= int(checkpoint.removeprefix("step-").removesuffix(".npz")) <= STEPS
