"""Parity: six networks in four formats on photographs, with the same hyperparameters and seeds.

A row is a format, or the control.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.experiment import Experiment, Outcome, Place
from experiments.photographs import mini_tree
from experiments.training_runs import config_of, train_or_find
from mpgluon.training import TrainingConfig

__all__ = [
    "BASE",
    "COMMON",
    "CONTROL",
    "FIRST_SEEDS",
    "FORMATS",
    "NETWORKS",
    "ROWS",
    "SEEDS",
    "Network",
    "experiments",
    "run_name",
    "seeds_of",
    "training_config",
]


@dataclass(frozen=True)
class Network:
    """What the runs of one network have in common, in all formats.

    Attributes
    ----------
    name : str
    image_size : int
        Pixels.
    learning_rate : float
        Its peak.
    epochs : int
    """

    name: str
    image_size: int
    learning_rate: float
    epochs: int = 12


NETWORKS = (
    Network("alexnet", 64, 0.0005),
    Network("vgg16_bn", 32, 0.0003),
    Network("googlenet", 64, 0.0005),
    Network("inceptionv3", 75, 0.001),
    Network("mobilenet1.0", 96, 0.002),
    Network("resnet50_v2", 64, 0.001),
)
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "mixed_float16": {"dtype": "float16", "amp": True},
    "bfloat16": {"dtype": "bfloat16"},
}
# A scale at which hardly a run overflows: what do the steps cost that a dynamic one skips?
CONTROL = "static_float16"
ROWS: dict[str, dict[str, Any]] = {
    **FORMATS,
    CONTROL: {"dtype": "float16", "loss_scale": "32"},
}
BASE = "float32"  # what the others are compared with
SEEDS = (0, 1, 2, 3, 4)
FIRST_SEEDS = SEEDS[:3]  # after which the others, and the control with these, were added
COMMON: dict[str, Any] = {
    "train_per_class": 40,
    "batch_size": 20,
    "optimizer": "adam",
    "min_crop_area": 0.5,
    "weight_decay": 1e-4,
    "workers": 0,
}


def training_config(network: Network, row: str, seed: int) -> TrainingConfig:
    """Return the config of one run; its folders are nobody's."""
    return TrainingConfig(
        **ROWS[row],
        **COMMON,
        model=network.name,
        image_size=network.image_size,
        learning_rate=network.learning_rate,
        epochs=network.epochs,
        seed=seed,
    )


def run_name(network: str, row: str, seed: int) -> str:
    """Return the name of an experiment."""
    return f"parity/{network}/{row}/seed-{seed}"


def experiments() -> list[Experiment]:
    """Return a run for each network, row and seed of the row."""
    return [
        _experiment(network, row, seed)
        for network in NETWORKS
        for row in ROWS
        for seed in seeds_of(row)
    ]


def seeds_of(row: str) -> tuple[int, ...]:
    """Return the seeds that a row has."""
    return FIRST_SEEDS if row == CONTROL else SEEDS


def _experiment(network: Network, row: str, seed: int) -> Experiment:
    config = training_config(network, row, seed)
    return Experiment(
        run_name(network.name, row, seed),
        {"photographs": "caltech101-mini", **config_of(config)},
        partial(_run, config),
        needs_photographs=True,
    )


def _run(config: TrainingConfig, place: Place) -> Outcome:
    return train_or_find(config, mini_tree(place), place)
