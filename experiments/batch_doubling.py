"""A batch of twice the size: FP32 at a batch, FP16 at the same, and FP16 at larger ones.

The learning rate grows in proportion to the batch. All runs see the photographs equally often, so
that a batch of twice the size takes half the steps. Accuracies are in points.

References
----------
Apache MXNet, "Mixed precision training using float16", whose example is ResNet-50 on ImageNet with
batches of 1024 and 2048.
Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1, on the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Optional

from mpgluon.errors import MpgluonError

from benchmarks.cases import CaseOptions
from benchmarks.contestant import Contestant
from benchmarks.machine import usable_cores
from benchmarks.memory import memory, peaks_by_batch, with_largest_batches
from benchmarks.race import Case, CaseResult, Conditions, race
from experiments import figures
from experiments.cells import mean_and_interval, one_or_range, plus_minus
from experiments.experiment import Experiment, Group, Outcome, Place, Record, Records
from experiments.photographs import mini_tree
from experiments.seeds import SeededRows
from experiments.statistics import CONFIDENCE, PairedComparison, holm
from experiments.training_runs import config_of, train_or_find
from recipes.training import TrainingConfig

__all__ = ["BASE", "BATCH", "GROUP", "RECIPE", "ROWS"]

_GROUP = "batch_doubling"
BATCH = 40  # images
SEEDS = (0, 1, 2)
RECIPE = TrainingConfig(
    model="cifar_resnet20_v1",  # a quarter of a million weights: activations take the memory
    image_size=32,
    train_per_class=40,
    min_crop_area=0.5,
    batch_size=BATCH,
    reference_batch_size=BATCH,
    epochs=16,
    warmup_epochs=3,
    learning_rate=0.05,
    workers=0,
)
# Format and batch.
ROWS = {
    f"{dtype}-{batch}": (dtype, batch)
    for dtype, batch in (
        ("float32", BATCH),
        ("float16", BATCH),
        ("float16", 3 * BATCH // 2),
        ("float16", 2 * BATCH),
        ("float32", 2 * BATCH),  # a control: the batch without the format
    )
}
BASE = next(iter(ROWS))


def _run(config: TrainingConfig, place: Place) -> Outcome:
    return train_or_find(config, mini_tree(place), place)


_EXPERIMENTS = [
    Experiment(
        f"{_GROUP}/{row}/seed-{seed}",
        {
            "photographs": "caltech101-mini",
            **config_of(config := replace(RECIPE, dtype=dtype, batch_size=batch, seed=seed)),
        },
        partial(_run, config),
        needs_photographs=True,
    )
    for seed in SEEDS
    for row, (dtype, batch) in ROWS.items()
]

GROUP = Group(_GROUP, _EXPERIMENTS, dict)
