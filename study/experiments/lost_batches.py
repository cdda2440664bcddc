"""Does FP16 cost accuracy, and is it the batches that its loss scale skips? The protocol's runs.

`docs/protocol.md` names the runs and the tests; it was written before the runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Callable, Optional

from mpgluon.cast.plain_graph import use_own_operators
from mpgluon.distributed import OneProcess
from mpgluon.formats.loss_scale import LossScale

import mxnet as mx
import numpy as np

from recipes.training import TrainingConfig
from recipes.training.dataset import open_dataset
from recipes.training.runs import open_run
from recipes.training.steps import evaluate
from study.experiments import caltech101, cifar10, imagenet_weights
from study.experiments.cells import mean_and_interval, one_or_range, plus_minus
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.figures import draw_pairs
from study.experiments.photographs import whole_tree
from study.experiments.statistics import CONFIDENCE, SignFlips, holm, sign_flips
from study.experiments.training_runs import PER_CLASS, config_of, run_beside, train_or_find

__all__ = ["GROUP", "MARGIN", "ROWS", "TASKS", "DroppedSteps", "Task", "experiment_of"]

_GROUP = "lost_batches"
MARGIN = 0.25
"""Points within which two arms count as equal."""

BASE = "float32"
DYNAMIC = "float16-dynamic"
MEASURED = "float16-measured"
DROPPED = "float32-dropped"
_MAIN = (DYNAMIC, MEASURED, DROPPED)
# The dynamic runs first: the runs that drop the same steps need them.
ROWS: Mapping[str, Mapping[str, Any]] = {
    DYNAMIC: {"dtype": "float16", "loss_scale": "dynamic"},
    BASE: {"dtype": "float32"},
    MEASURED: {"dtype": "float16", "loss_scale": "measured"},
    "float16-static": {"dtype": "float16", "loss_scale": "128"},
    "bfloat16": {"dtype": "bfloat16"},
    DROPPED: {"dtype": "float32"},
}
"""The fields of the training config that make each arm."""

_NAMES = {
    BASE: "FP32",
    DYNAMIC: "FP16, dynamic loss scale",
    MEASURED: "FP16, measured loss scale",
    "float16-static": "FP16, static loss scale of 128",
    DROPPED: "FP32 without the batches that FP16 skipped",
    "bfloat16": "BF16",
}


class DroppedSteps(LossScale):
    """S is 1, and infinite in some steps, which are skipped as steps that overflow are.

    Parameters
    ----------
    steps : collection of int
        From 1.
    """

    def __init__(self, steps: Collection[int]) -> None:
        self._dropped, self.step = frozenset(steps), 0

    @property
    def scale(self) -> float:  # type: ignore[override]  # computed, so no state holds an infinity
        """The factor of the next loss."""
        return math.inf if self.step + 1 in self._dropped else 1.0

    @property
    def can_shrink(self) -> bool:
        """True: the next S is 1."""
        return True

    def update(self, grads_finite: bool) -> None:  # noqa: ARG002
        """Count a step."""
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"kind": type(self).__name__, "step": self.step}


@dataclass(frozen=True)
class Task:
    """A network and its images.

    Attributes
    ----------
    name, title : str
    images : str
    recipe : TrainingConfig
    figure : str
        The accuracy that is compared: a figure of the outcome.
    seeds : sequence of int
    rows : sequence of str
        Its arms, of ``ROWS`` and in that order.
    images_of : callable
        Returns the folder of images of a place.
    experiment : callable
        Takes name, config and run, returns an experiment.
    """

    name: str
    title: str
    images: str
    recipe: TrainingConfig
    figure: str
    seeds: Sequence[int]
    rows: Sequence[str]
    images_of: Callable[[Place], Path]
    experiment: Callable[..., Experiment]


def _of_cifar10(name: str, config: TrainingConfig, run: Any, **more: Any) -> Experiment:
    settings = {"photographs": "CIFAR-10", "shifts": config.shifts, **more, **config_of(config)}
    return Experiment(name, settings, partial(run, config))


def _of_caltech101(name: str, config: TrainingConfig, run: Any, **more: Any) -> Experiment:
    more |= {field: getattr(config, field) for field in ("test_image_size", "head_rate")}
    return caltech101.experiment(name, config, run, **more)


TASKS = (
    Task(
        "cifar10",
        "ResNet-20 on CIFAR-10, three epochs",
        "CIFAR-10",
        replace(cifar10.RECIPE, epochs=3, warmup_epochs=1),
        "test_accuracy",
        range(10),
        tuple(ROWS),
        cifar10.images_of,
        _of_cifar10,
    ),
    Task(
        "caltech101",
        "EfficientNet-Lite0 with ImageNet's weights on Caltech 101",
        "Caltech 101",
        imagenet_weights.RECIPE,
        PER_CLASS,
        range(5, 15),  # the first five raised the question
        tuple(row for row in ROWS if row in (BASE, *_MAIN)),
        whole_tree,
        _of_caltech101,
    ),
)


def _name(task: Task, row: str, seed: int) -> str:
    return f"{_GROUP}/{task.name}/{row}/seed-{seed}"


def experiment_of(task: Task, row: str, seed: int) -> Experiment:
    """Return the run of an arm."""
    config = replace(task.recipe, seed=seed, **ROWS[row])
    more = {"dropped": DYNAMIC} if row == DROPPED else {}
    run = task.experiment(_name(task, row, seed), config, partial(_run, task, row), **more)
    return replace(run, block=f"{_GROUP}/{task.name}/*/seed-{seed}")  # pairs are of one seed


def _run(task: Task, row: str, config: TrainingConfig, place: Place) -> Outcome:
    if config.pretrained is not None:
        config = replace(config, pretrained=str(imagenet_weights.weights_of(place)))
    images, scale = task.images_of(place), None
    if row == DROPPED:
        scale = DroppedSteps(_skipped_steps(task, config.seed, place))
    per_class = task.figure == PER_CLASS
    outcome = train_or_find(config, images, place, per_class=per_class, loss_scale=scale)
    tested = _tested_in_float32(replace(config, data_dir=str(images)), place)
    return replace(outcome, figures={**outcome.figures, **tested})


def _skipped_steps(task: Task, seed: int, place: Place) -> list[int]:
    """Return the numbers of the steps that the run with a dynamic scale skipped, from 1."""
    run = experiment_of(task, DYNAMIC, seed)
    folder, _ = run_beside(place, run, name=run.name)
    events = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    return [event["step"] for event in events if event["event"] == "step" and event["skipped"]]


def _tested_in_float32(config: TrainingConfig, place: Place) -> dict[str, float]:
    """Test the FP32 values of a finished run in FP32, on images that are not rounded."""
    config = replace(config, dtype=BASE, loss_scale="auto")
    opened, dataset = open_run(place.work_dir, mx.cpu()), open_dataset(config)
    use_own_operators(opened.net)
    opened.net.hybridize(static_alloc=True, static_shape=True)
    train_batches, test_batches = dataset.loaders(config, 1, rank=0, world_size=1)
    try:
        figures, answers = evaluate(
            opened.net, test_batches, len(opened.classes), [mx.cpu()], OneProcess()
        )
    finally:
        train_batches.close()
        test_batches.close()
    return {
        "float32_test_accuracy": figures["test_accuracy"],
        f"float32_{PER_CLASS}": figures[PER_CLASS],
        "float32_test_loss": float(-np.log(np.maximum(answers.of_right, 1e-30)).mean()),
    }


def _experiments(task: Task) -> list[Experiment]:
    return [experiment_of(task, row, seed) for seed in task.seeds for row in task.rows]


class _AllSeeds(imagenet_weights.ImageNetWeights):
    seeds = (*imagenet_weights.SEEDS, *TASKS[1].seeds)


@dataclass(frozen=True)
class _LostBatches:
    """The runs that exist, and results computed from them."""

    records: Records

    def values(self, task: Task, row: str, figure: str) -> Any:
        """Return a figure of each seed's run."""
        runs = (self.records[_name(task, row, seed)].outcome.figures for seed in task.seeds)
        return np.array([figures[figure] for figures in runs])

    def minus(self, row: str, base: str, task: Task) -> Any:
        """Return a row's accuracies minus another's, in points, by seed."""
        return 100 * (self.values(task, row, task.figure) - self.values(task, base, task.figure))

    def in_float32(self, row: str, task: Task) -> Any:
        """Return a row's accuracies in FP32 minus those in its own format, in points, by seed."""
        tested = self.values(task, row, f"float32_{task.figure}")
        return 100 * (tested - self.values(task, row, task.figure))

    def compare(self, row: str, base: str = BASE) -> SignFlips:
        """Test a row against another in all tasks that have it."""
        tasks = [task for task in TASKS if row in task.rows]
        return _test([self.minus(row, base, task) for task in tasks])

    @property
    def all_seeds(self) -> imagenet_weights.ImageNetWeights:
        """EfficientNet-Lite0 with these seeds and the earlier ones."""
        _, task = TASKS
        new = {
            _AllSeeds.name(fmt, seed): self.records[_name(task, row, seed)]
            for fmt, row in (("float32", BASE), ("float16", DYNAMIC))
            for seed in task.seeds
        }
        return _AllSeeds({**self.records, **new})

    def spread(self, row: str) -> float:
        """Return the standard deviation of a row's differences from FP32, in a task."""
        differences = [self.minus(row, BASE, task) for task in TASKS if row in task.rows]
        within = [one - one.mean() for one in differences]
        squares = float(np.sum(np.square(np.concatenate(within))))
        return math.sqrt(squares / sum(len(one) - 1 for one in differences))

    def table(self) -> list[list[str]]:
        """Return the cells of the table of arms by task."""
        return [
            [
                task.title,
                _NAMES[row],
                plus_minus([100 * one for one in self.values(task, row, task.figure)], 2),
                "-" if row == BASE else mean_and_interval(_test([self.minus(row, BASE, task)])),
                mean_and_interval(_test([self.in_float32(row, task)])),
                self._skipped(task, row),
                f"`{_GROUP}/{task.name}/{row}`",
            ]
            for task in TASKS
            for row in _NAMES
            if row in task.rows
        ]

    def _skipped(self, task: Task, row: str) -> str:
        steps = self.values(task, row, "steps")[0]
        return f"{one_or_range(self.values(task, row, 'skipped_steps').tolist())} of {steps:,}"

    @property
    def batches_are_the_cause(self) -> bool:
        """Whether lost batches cause a loss of FP16, as the protocol means it."""
        costs = [
            self.corrected[row] < 1 - CONFIDENCE and self.compare(row).mean < 0
            for row in (DYNAMIC, DROPPED)
        ]
        return costs[0] and (costs[1] or self.compare(MEASURED, DYNAMIC).lower > 0)

    @property
    def measured_becomes_the_default(self) -> bool:
        """Whether the measured scale loses nothing to the dynamic one, as the protocol means it."""
        return self.compare(MEASURED, DYNAMIC).lower > -MARGIN

    @cached_property
    def corrected(self) -> dict[str, float]:
        """The p-values of the three main comparisons after Holm's correction."""
        return dict(zip(_MAIN, holm([self.compare(row).p for row in _MAIN])))

    @cached_property
    def comparisons(self) -> list[tuple[str, dict[str, Any], SignFlips, float]]:
        """The protocol's tests: a title, the differences by task, their test, the p-value.

        The p-values of the main comparisons are corrected.
        """

        def compared(
            title: str, row: str, differences: Callable[[Task], Any], p: Optional[float] = None
        ) -> tuple[str, dict[str, Any], SignFlips, float]:
            by_task = {one.images: differences(one) for one in TASKS if row in one.rows}
            test = _test([*by_task.values()])
            return title, by_task, test, test.p if p is None else p

        return [
            *(
                compared(f"{_NAMES[row]}, minus FP32", row, partial(self.minus, row, BASE),
                         self.corrected.get(row))
                for row in _NAMES if row != BASE
            ),
            compared("FP16, measured minus dynamic", MEASURED,
                     partial(self.minus, MEASURED, DYNAMIC)),
            compared("FP16, dynamic, tested in FP32 minus in FP16", DYNAMIC,
                     partial(self.in_float32, DYNAMIC)),
        ]  # fmt: skip

    def pooled_table(self) -> list[list[str]]:
        """Return the cells of the table of comparisons."""
        return [
            [title, f"{test.pairs} ({', '.join(by_task)})", mean_and_interval(test),
             f"{p:.2g}", _verdict(test, p)]
            for title, by_task, test, p in self.comparisons
        ]  # fmt: skip


def _test(differences: Sequence[Any]) -> SignFlips:
    return sign_flips(differences, equal_weights=True)


def _verdict(found: SignFlips, p: float) -> str:
    words = []
    if p < 1 - CONFIDENCE:
        words.append("lower" if found.mean < 0 else "higher")
    if found.lower > -MARGIN and found.upper < MARGIN:
        words.append(f"equal within {MARGIN} points")
    return ", and ".join(words) or "not decided"


def _draw(figure: Any, records: Records) -> None:
    compared = _LostBatches(records).comparisons
    draw_pairs(figure, [(title, by_task, test) for title, by_task, test, _ in compared], MARGIN)


GROUP = Group(
    _GROUP,
    [one for task in TASKS for one in _experiments(task)],
    _LostBatches,
    {"lost-batches": _draw},
)
