"""All of Caltech 101 by the protocol of the literature, on small images, in three formats.

Li, Fei-Fei, M. Andreeto, M. Ranzato, P. Perona, "Caltech 101", CaltechDATA, 2022; 30 images per
category for training, up to 50 of the others for testing, and the mean of the categories'
accuracies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Callable, ClassVar

from mpgluon_tools.plots import FORMAT_LOOKS

from recipes.data import CALTECH101
from recipes.training import TrainingConfig
from study.experiments import figures, parity
from study.experiments.cells import mean_and_interval, number, one_or_range, plus_minus
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.photographs import whole_tree
from study.experiments.seeds import ComparedRows
from study.experiments.statistics import PairedComparison, detectable_difference
from study.experiments.training_runs import PER_CLASS, config_of, train_or_find

__all__ = [
    "BASE",
    "FORMATS",
    "GROUP",
    "MODEL",
    "RECIPE",
    "SEEDS",
    "TEST_PER_CLASS",
    "TRIALS",
    "ProtocolRows",
    "experiment",
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


# Other recipes, for one run each: the first seed in FP32. The recipe was chosen among them by the
# mean of the classes' accuracies, before any run in 16 bits.
TRIALS = {f"trial-learning-rate-{rate:g}": replace(RECIPE, learning_rate=rate) for rate in (0.002,)}


def experiment(
    name: str,
    config: TrainingConfig,
    run: Callable[[TrainingConfig, Place], Outcome],
    **more: Any,
) -> Experiment:
    """Return a run on all photographs; ``more`` is what else decides its outcome."""
    return Experiment(
        name,
        {
            "photographs": "Caltech 101",
            **more,
            "test_per_class": TEST_PER_CLASS,
            **config_of(config),
        },
        partial(run, config),
        needs_photographs=True,
        categories=CALTECH101.contents.categories,
    )


def _experiment(row: str, config: TrainingConfig) -> Experiment:
    return experiment(_Caltech101.name(row, config.seed), config, _run)


def _run(config: TrainingConfig, place: Place) -> Outcome:
    return train_or_find(config, whole_tree(place), place, per_class=True)


class ProtocolRows(ComparedRows):
    """Rows of formats in runs by this protocol; comparisons need all of them."""

    base = BASE
    formats: ClassVar[Sequence[str]] = FORMATS

    def table(self) -> list[list[str]]:
        """Return the cells of the table of accuracies, in points."""
        rows = []
        for row in self.formats:
            found = [one.figures for one in self.outcomes(row).values()]
            if found:
                rows.append([
                    row,
                    plus_minus(list(self.points(row, PER_CLASS).values()), 1),
                    self.difference(row),
                    plus_minus(list(self.points(row).values()), 1),
                    f"{one_or_range([one['skipped_steps'] for one in found])} of "
                    f"{found[0]['steps']:,}",
                    f"`{self.group}/{row}`",
                ])  # fmt: skip
        return rows

    def difference(self, row: str) -> str:
        """Return a row's difference from FP32 in words, ``"-"`` without two pairs to compare."""
        if row == self.base or len(self.points(row).keys() & self.points(self.base)) < 2:
            return "-"
        return mean_and_interval(self.comparison(row, figure=PER_CLASS))

    def long_table(self) -> list[list[str]]:
        """Return the cells of the table of single runs."""
        return [
            [
                row,
                str(seed),
                f"{100 * one.figures[PER_CLASS]:.2f}",
                f"{100 * one.figures['test_accuracy']:.2f}",
                number(one.figures["train_loss"]),
                str(one.figures["skipped_steps"]),
                f"{one.figures['final_loss_scale']:g}",
                f"{one.times['training_seconds'] / 60:.1f}",
            ]
            for row in self.formats
            for seed, one in self.outcomes(row).items()
        ]

    @cached_property
    def compared(self) -> dict[str, PairedComparison]:
        """The rows in fewer bits against FP32, by the mean of the classes' accuracies."""
        return {
            row: self.comparison(row, figure=PER_CLASS) for row in self.formats if row != self.base
        }

    def detectable(self, row: str) -> float:
        """Return the difference to FP32 that a t-test of these seeds finds four times in five."""
        return detectable_difference(self.compared[row].spread, self.compared[row].pairs)


@dataclass(frozen=True)
class _Caltech101(ProtocolRows):
    """The runs that exist, and results computed from them."""

    group, seeds = "caltech101", SEEDS

    def trial_table(self) -> list[list[str]]:
        """Return the cells of the table of recipes that were tried, the chosen one first."""
        tried = [(RECIPE, self.name(BASE, SEEDS[0]))]
        tried += [(config, self.name(name, SEEDS[0])) for name, config in TRIALS.items()]
        return [
            [
                f"{config.learning_rate:g}",
                f"{100 * config.min_crop_area:g} %",
                str(config.epochs),
                *(f"{100 * figures[name]:.1f}" for name in (PER_CLASS, "test_accuracy")),
                number(figures["train_loss"]),
                f"`{name}`",
            ]
            for config, name in tried
            if name in self.records and (figures := self.records[name].outcome.figures)
        ]


def _draw(figure: Any, records: Records) -> None:
    view = _Caltech101(records)
    rows = {row: (FORMAT_LOOKS[row], list(view.outcomes(row).values())) for row in FORMATS}
    figures.draw_learning(figure, rows)


def _draw_loss_scales(figure: Any, records: Records) -> None:
    title = f"{MODEL} on Caltech 101: halved at each overflow, whose step is skipped"
    figures.draw_loss_scales(figure, {"float16": _Caltech101(records).runs("float16")}, title)


GROUP = Group(
    "caltech101",
    [
        *(
            _experiment(dtype, replace(RECIPE, dtype=dtype, seed=seed))
            for seed in SEEDS
            for dtype in FORMATS
        ),
        *(_experiment(name, config) for name, config in TRIALS.items()),
    ],
    _Caltech101,
    {"caltech101": _draw, "caltech101-loss-scale": _draw_loss_scales},
)
