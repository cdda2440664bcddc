"""A GAN whose images grow: what its loss scales and its gradients do with the resolution."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from experiments.experiment import Experiment, Group, Outcome, Place
from experiments.photographs import mini_tree
from experiments.players import cut_crops
from experiments.progressive_gan import ProgressiveSettings, train

__all__ = ["GROUP", "RUNS"]

_GROUP = "growing_resolution"
RUNS = {
    f"{_GROUP}/float32": ProgressiveSettings(),
    f"{_GROUP}/float16": ProgressiveSettings(dtype="float16"),
}


def _run(settings: ProgressiveSettings, place: Place) -> Outcome:
    crops = cut_crops(mini_tree(place), settings, settings.pixels[-1])
    return train(settings, crops)


GROUP = Group(
    _GROUP,
    [
        Experiment(name, asdict(settings), partial(_run, settings), needs_photographs=True)
        for name, settings in RUNS.items()
    ],
    dict,
)
