"""Ablations: mixed precision with one measure left out, against runs that keep it.

All runs have one seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable

from study.experiments.ablations import pictures, runs
from study.experiments.ablations.batch_norm import batch_norm
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records

__all__ = ["ABLATIONS", "GROUP", "Ablation"]


@dataclass(frozen=True)
class Ablation:
    """One measure of mixed precision, and what happens without it.

    Attributes
    ----------
    name : str
        The second part of its experiments' names; its picture is ``ablation-<name>``.
    train : callable
        Takes one of ``variants`` and ``settings`` as attributes, and returns the outcome.
    draw : callable
        Takes a Matplotlib figure and the records of all variants by name.
    variants : sequence of str
        The last parts of the experiments' names.
    settings : mapping
        The config that all variants share, as JSON holds it. ``every`` is the number of steps of
        one point of the curves.
    """

    name: str
    train: Callable[[str, Any], Outcome]
    draw: Callable[[Any, Records], None]
    variants: Sequence[str]
    settings: Mapping[str, Any]

    @property
    def picture(self) -> str:
        """The name of the picture."""
        return f"ablation-{self.name.replace('_', '-')}"

    def run(self, variant: str, place: Place) -> Outcome:  # noqa: ARG002 - it needs no files
        """Run a variant with the settings."""
        return self.train(variant, SimpleNamespace(**self.settings))

    def experiment(self, variant: str) -> Experiment:
        """Return a variant as an experiment."""
        name = f"ablations/{self.name}/{variant}"
        return Experiment(name, {"variant": variant, **self.settings}, partial(self.run, variant))

    def records(self, records: Records) -> Records:
        """Return its records by variant, as far as they exist."""
        names = {variant: f"ablations/{self.name}/{variant}" for variant in self.variants}
        return {variant: records[name] for variant, name in names.items() if name in records}

    def draw_from(self, figure: Any, records: Records) -> None:
        """Draw the picture."""
        figure.set_figheight(4)
        self.draw(figure, self.records(records))


ABLATIONS = (
    Ablation(
        "masters", runs.masters, pictures.draw_masters, ("float32", "with", "without"),
        {"steps": 2400, "learning_rate": 3e-4, "images_per_class": 40, "image_size": 16,
         "batch_size": 40, "every": 50},
    ),
    Ablation(
        "underflow", runs.underflow, pictures.draw_underflow, ("float32", "scaled", "unscaled"),
        {"steps": 100, "learning_rate": 1.0, "images_per_class": 8, "image_size": 224,
         "batch_size": 16, "every": 5},
    ),
    Ablation(
        "batch_norm", batch_norm, pictures.draw_batch_norm, ("float32", "float16", "float16-bytes"),
        {"steps": 80, "learning_rate": 0.05, "images_per_class": 20, "image_size": 24,
         "batch_size": 32, "every": 4},
    ),
    Ablation(
        "loss_reduction", runs.loss_reduction, pictures.draw_loss_reduction, ("float32", "float16"),
        {"steps": 150, "learning_rate": 0.5, "vocabulary": 32768, "features": 32, "pairs": 50000,
         "batch_size": 16, "every": 10},
    ),
    # Class centres have a standard deviation of 1 in each coordinate, and points around them one
    # of `spread`.
    Ablation(
        "labels", runs.labels, pictures.draw_labels, ("int32", "float16"),
        {"steps": 300, "learning_rate": 2.0, "classes": 4096, "features": 64,
         "samples_per_class": 8, "spread": 0.8, "batch_size": 512, "every": 20},
    ),
    Ablation(
        "back_off", runs.back_off, pictures.draw_back_off, ("mpgluon", "contrib"),
        {"steps": 400, "learning_rate": 0.005, "growth_interval": 20, "images_per_class": 20,
         "image_size": 16, "batch_size": 40},
    ),
)  # fmt: skip


def _view(records: Records) -> dict[str, Any]:
    """Return figures and settings of each variant, by ablation and variant."""
    return {
        one.name: {
            variant: {**record.config, **record.outcome.figures}
            for variant, record in one.records(records).items()
        }
        for one in ABLATIONS
    }


GROUP = Group(
    "ablations",
    [one.experiment(variant) for one in ABLATIONS for variant in one.variants],
    _view,
    {one.picture: one.draw_from for one in ABLATIONS},
)
