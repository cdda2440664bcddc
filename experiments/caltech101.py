"""All of Caltech 101 by the protocol of the literature, on small images, in three formats.

Li, Fei-Fei, M. Andreeto, M. Ranzato, P. Perona, "Caltech 101", CaltechDATA, 2022; 30 images per
category for training, up to 50 of the others for testing, and the mean of the categories'
accuracies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from experiments import parity
from experiments.experiment import Experiment, Group, Outcome, Place
from experiments.photographs import whole_tree
from experiments.seeds import SeededRows
from experiments.training_runs import config_of, train_or_find
from mpgluon.data import CALTECH101
from mpgluon.training import TrainingConfig

__all__ = [
    "BASE",
    "FORMATS",
    "GROUP",
    "MODEL",
    "RECIPE",
    "SEEDS",
    "TEST_PER_CLASS",
    "training_config",
]

MODEL = "resnet50_v2"
BASE = "float32"
FORMATS = (BASE, "float16", "bfloat16")
SEEDS = (0, 1, 2)
TEST_PER_CLASS = 50
RECIPE = replace(
    parity.training_config(
        next(one for one in parity.NETWORKS if one.name == MODEL), BASE, seed=SEEDS[0]
    ),
    train_per_class=30,
    test_per_class=TEST_PER_CLASS,
)


def training_config(dtype: str, seed: int) -> TrainingConfig:
    """Return the config of one run, without folders."""
    return replace(RECIPE, dtype=dtype, seed=seed)


def _experiment(dtype: str, seed: int) -> Experiment:
    config = training_config(dtype, seed)
    return Experiment(
        _Caltech101.name(dtype, seed),
        {"photographs": "Caltech 101", "test_per_class": TEST_PER_CLASS, **config_of(config)},
        partial(_run, config),
        needs_photographs=True,
        categories=CALTECH101.contents.categories,
    )


def _run(config: TrainingConfig, place: Place) -> Outcome:
    return train_or_find(config, whole_tree(place), place, per_class=True)


@dataclass(frozen=True)
class _Caltech101(SeededRows):
    group, seeds = "caltech101", SEEDS


GROUP = Group(
    "caltech101",
    [_experiment(dtype, seed) for seed in SEEDS for dtype in FORMATS],
    _Caltech101,
)
