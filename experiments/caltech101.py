"""All of Caltech 101: a run of the field's protocol on small images, and its cost on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from experiments import parity
from experiments.experiment import Experiment, Group, Outcome, Place, Records
from experiments.training_runs import config_of, train_or_find
from mpgluon.data import CALTECH101
from mpgluon.training import TrainingConfig

__all__ = ["GROUP", "run", "training_hours"]

# Images per second of training ResNet-50 on ImageNet at 224 pixels, data loading included: the
# rows for one GPU of the tables "Training performance" for DGX-1 and DGX A100, whose source the
# page names.
_PUBLISHED = (
    ("V100 16 GB", "FP32", 384),
    ("V100 16 GB", "mixed precision", 1376),
    ("A100 80 GB", "TF32", 1022),
    ("A100 80 GB", "mixed precision", 2180),
)
_MODEL = "resnet50_v2"
_FORMATS = ("float32", "float16", "bfloat16")
_TRAIN_PER_CLASS = 30
_FORWARD_SHARE = 1 / 3  # of the arithmetic of forward and backward
_CONTENTS = CALTECH101.contents
_TRAINING_IMAGES = _TRAIN_PER_CLASS * _CONTENTS.categories
_TEST_IMAGES = _CONTENTS.category_images - _TRAINING_IMAGES


def _config(number_format: str) -> TrainingConfig:
    (network,) = (one for one in parity.NETWORKS if one.name == _MODEL)
    config = parity.training_config(network, number_format, seed=0)
    return replace(config, train_per_class=_TRAIN_PER_CLASS)


def _experiment(number_format: str) -> Experiment:
    config = _config(number_format)
    return Experiment(
        f"caltech101/{_MODEL}/{number_format}",
        {"photographs": "Caltech 101", **config_of(config)},
        partial(run, config),
        needs_photographs=True,
        categories=_CONTENTS.categories,
    )


def run(config: TrainingConfig, place: Place) -> Outcome:
    """Train on all categories that exist."""
    return train_or_find(config, place.data_dir, place)


def training_hours(epochs: int, images_per_second: float) -> float:
    """Return how long a run takes that trains at such a speed, its tests included."""
    images = epochs * (_TRAINING_IMAGES + _FORWARD_SHARE * _TEST_IMAGES)
    return images / images_per_second / 3600


@dataclass(frozen=True)
class _Caltech101:
    """The runs that exist, and what runs cost by published and by measured speeds."""

    records: Records
    small = _config(_FORMATS[0])
    large = TrainingConfig(train_per_class=_TRAIN_PER_CLASS)  # scripts/train_caltech.py's
    training_images, test_images = _TRAINING_IMAGES, _TEST_IMAGES
    forward_share = _FORWARD_SHARE

    def table(self) -> list[list[str]]:
        """Return the cells of the table of the runs that exist."""
        rows = []
        for one in GROUP.experiments:
            if one.name in self.records:
                figures = self.records[one.name].outcome.figures
                loss = figures["train_loss"]
                rows.append([
                    one.config["dtype"],
                    f"{100 * figures['test_accuracy']:.1f}",
                    "not finite" if loss is None else f"{loss:.3f}",
                    f"{figures['skipped_steps']} of {figures['steps']}",
                    f"{figures['final_loss_scale']:g}",
                    f"`python scripts/evidence.py run {one.name}`",
                ])  # fmt: skip
        return rows

    def gpu_table(self) -> list[list[str]]:
        """Return the cells of the table of costs on a GPU."""
        return [
            [gpu, form, f"{speed:,}", f"{60 * training_hours(self.large.epochs, speed):.1f}"]
            for gpu, form, speed in _PUBLISHED
        ]

    @property
    def race(self) -> str:
        """The experiment that measured the network's time per step."""
        return f"step_times/{_MODEL}"

    def hours(self) -> dict[str, float]:
        """Return the hours of a small run by the measured times per step, by format."""
        times = self.records[self.race].outcome.times
        return {
            name: training_hours(
                self.small.epochs, self.small.batch_size / times[f"{name}/seconds"]
            )
            for name in _FORMATS
        }


GROUP = Group("caltech101", [_experiment(name) for name in _FORMATS], _Caltech101)
