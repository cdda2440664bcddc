"""A training run as an experiment: trained or found finished, reduced to figures and curves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from mpgluon.base.files import exclusive
from mpgluon.errors import DataError
from mpgluon.formats.loss_scale import LossScale

from recipes.training import TrainingConfig, train
from recipes.training.history import describe_machine, installed_versions
from study.experiments.experiment import Experiment, Outcome, Place
from study.experiments.series import changes

__all__ = ["PER_CLASS", "config_of", "run_beside", "train_or_find"]

PER_CLASS = "test_accuracy_per_class"  # the mean of the classes' accuracies

_MOST_POINTS = 400  # of a curve
# The fields that decide the outcome of a run on photographs by one process. A new field of the
# training config, with a default that changes nothing, leaves records current.
_DECISIVE = (
    "model", "dtype", "amp", "loss_scale", "growth_interval", "pretrained", "train_per_class",
    "image_size", "min_crop_area", "batch_size", "epochs", "warmup_epochs", "learning_rate",
    "reference_batch_size", "momentum", "weight_decay", "optimizer", "devices", "seed",
)  # fmt: skip


def config_of(config: TrainingConfig) -> dict[str, Any]:
    """Return the fields of a training config that decide the outcome; no folders."""
    return {name: getattr(config, name) for name in _DECISIVE}


def train_or_find(
    config: TrainingConfig,
    data_dir: Path,
    place: Place,
    *,
    per_class: bool = False,
    loss_scale: Optional[LossScale] = None,
) -> Outcome:
    """Train, resume an interrupted run, or read a finished one.

    Parameters
    ----------
    config : TrainingConfig
        Its folders are replaced.
    data_dir : Path
        The folder with the images.
    place : Place
        Its work folder becomes the run's output folder.
    per_class : bool
        Whether the outcome has the mean of the classes' test accuracies too. Where every class has
        as many test images, it is the test accuracy.
    loss_scale : LossScale, optional
        One that no option of the config makes.

    Returns
    -------
    Outcome
        The loss of each step, or of each k-th where there are many; the loss scale as pairs of a
        step and the scale from there on; the test accuracy after each epoch.

    Raises
    ------
    DataError
        If the folder holds a finished run of another config, version or processor.
    """
    config = replace(config, data_dir=str(data_dir), output_dir=str(place.work_dir))
    if not (place.work_dir / "results.json").exists():
        train(config, resume="auto", loss_scale=loss_scale)
    results = json.loads((place.work_dir / "results.json").read_text())
    _check_origin(place.work_dir, config, results)
    lines = (place.work_dir / "history.jsonl").read_text().splitlines()
    outcome = _reduce(results, events := [json.loads(line) for line in lines])
    return _with_per_class(outcome, events) if per_class else outcome


def run_beside(
    place: Place, experiment: Experiment, *, name: str = "group/name"
) -> tuple[Path, Outcome]:
    """Train, resume or find another experiment's run; return its folder and its outcome.

    ``place`` belongs to an experiment called ``name``, of which only the number of parts matters.
    Processes wait for each other.
    """
    root = place.work_dir.parents[name.count("/")]
    folder = root.joinpath(*experiment.name.split("/"))
    with exclusive(folder.with_suffix(".lock")):
        return folder, experiment.run(replace(place, work_dir=folder))


def _check_origin(folder: Path, config: TrainingConfig, results: dict[str, Any]) -> None:
    """Refuse a finished run of another config, version or processor."""
    differences = config.differences(results["config"])
    for what, found, wanted in (
        ("batch_size", results["config"]["batch_size"], config.batch_size),
        ("the versions", results["versions"], installed_versions()),
        ("the processor", results["machine"]["processor"], describe_machine()["processor"]),
    ):
        if found != wanted:
            differences.append(f"{what} was {found}, is {wanted}")
    if differences:
        raise DataError(
            f"{folder} holds a run of another kind: {'; '.join(differences)}; delete that folder, "
            "or choose another --work-dir"
        )


def _reduce(results: dict[str, Any], events: list[dict[str, Any]]) -> Outcome:
    steps = [event for event in events if event["event"] == "step"]
    epochs = [event for event in events if event["event"] == "epoch"]
    losses = [_finite(event["loss"]) for event in steps]
    every = math.ceil(len(losses) / _MOST_POINTS)
    test_images = results["dataset"]["test_images"]
    lost = [number for number, loss in enumerate(losses, 1) if loss is None]
    return Outcome(
        figures={
            "test_accuracy": results["test_accuracy"],
            "best_test_accuracy": results["best_test_accuracy"],
            "correct_test_images": round(results["test_accuracy"] * test_images),
            "test_images": test_images,
            "train_images": results["dataset"]["train_images"],
            "train_loss": _finite(results["train_loss"]),
            "not_finite_from_step": lost[0] if lost else None,
            "steps": results["steps"],
            "skipped_steps": results["skipped_steps"],
            "final_loss_scale": results["final_loss_scale"],
            "parameters": results["parameters"],
            "steps_per_point": every,
        },
        curves={
            "loss": losses[::every],
            "loss_scale": changes([_finite(event["loss_scale"]) for event in steps]),
            "test_accuracy": [event["test_accuracy"] for event in epochs],
        },
        times={"training_seconds": results["training_seconds"]},
    )


def _with_per_class(outcome: Outcome, events: list[dict[str, Any]]) -> Outcome:
    curve = [event[PER_CLASS] for event in events if event["event"] == "epoch"]
    figures = {**outcome.figures, PER_CLASS: curve[-1]}
    return replace(outcome, figures=figures, curves={**outcome.curves, PER_CLASS: curve})


def _finite(value: Any) -> Optional[float]:
    """Return a number of a history, where "NaN" and "Infinity" are strings."""
    number = float(value)
    return number if math.isfinite(number) else None
