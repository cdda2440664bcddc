"""Fine-tuning: weights trained on 81 categories of Caltech 101 start a network for the other 20."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable

from experiments import caltech101
from experiments.experiment import Experiment, Group, Outcome, Place
from experiments.photographs import link_categories, whole_tree
from experiments.training_runs import config_of, train_or_find
from mpgluon.data import CALTECH101
from mpgluon.data import caltech101 as photographs
from mpgluon.training import TrainingConfig

__all__ = ["FORMATS", "GROUP", "NEW_CATEGORIES", "STARTS"]

FORMATS = ("float32", "float16")
STARTS = ("scratch", "pretrained")
# Every fifth in the order of the alphabet. Faces and Faces_easy, which share photographs, are both
# among the others.
NEW_CATEGORIES = (
    "accordion", "bass", "brontosaurus", "car_side", "cougar_body", "crocodile_head", "dragonfly",
    "ewer", "gerenuk", "hedgehog", "kangaroo", "lobster", "metronome", "pagoda", "pyramid",
    "schooner", "soccer_ball", "strawberry", "watch", "wrench",
)  # fmt: skip


def _experiment(seed: int) -> Experiment:
    config = replace(caltech101.RECIPE, seed=seed)
    return Experiment(
        f"fine_tuning/seed-{seed}",
        {
            "photographs": "Caltech 101",
            "new_categories": list(NEW_CATEGORIES),
            "test_per_class": caltech101.TEST_PER_CLASS,
            **config_of(config),
        },
        partial(_run, config),
        needs_photographs=True,
        categories=CALTECH101.contents.categories,
    )


def _run(config: TrainingConfig, place: Place) -> Outcome:
    """Train on the old categories, then on the new ones from both starts in both formats."""
    tree = whole_tree(place)
    everything = photographs.list_images(tree).classes
    old = [name for name in everything if name not in NEW_CATEGORIES]
    work = place.work_dir
    old_tree = link_categories(tree, old, work / "old-categories")
    new_tree = link_categories(tree, NEW_CATEGORIES, work / "new-categories")
    weights = work / "weights"
    parts = {"weights": _train(config, old_tree, place, weights)}
    for start in STARTS:
        for dtype in FORMATS:
            pretrained = str(weights / "final.params") if start == "pretrained" else None
            one = replace(config, dtype=dtype, pretrained=pretrained)
            name = f"{dtype}/{start}"
            parts[name] = _train(one, new_tree, place, work / dtype / start)
    return _together(parts)


def _train(config: TrainingConfig, tree: Path, place: Place, folder: Path) -> Outcome:
    return train_or_find(config, tree, replace(place, work_dir=folder), per_class=True)


def _together(parts: Mapping[str, Outcome]) -> Outcome:
    """Return one outcome with all figures, curves and times, each below the name of its part."""

    def below(of: Callable[[Outcome], Mapping[str, Any]]) -> dict[str, Any]:
        return {f"{part}/{name}": v for part, one in parts.items() for name, v in of(one).items()}

    return Outcome(
        below(lambda one: one.figures), below(lambda one: one.curves), below(lambda one: one.times)
    )


GROUP = Group("fine_tuning", [_experiment(seed) for seed in caltech101.SEEDS], dict)
