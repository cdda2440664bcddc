"""Networks trained in several ways that differ from a base in one thing, with parity's settings.

Images, split, hyperparameters and seeds are as in :mod:`study.experiments.parity`.
Accuracies are in points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, ClassVar

import numpy as np

from recipes.training import TrainingConfig
from study.experiments import figures, parity
from study.experiments.cells import mean_and_interval, one_or_range, plus_minus
from study.experiments.experiment import Experiment, Group, Outcome, Place, Record, Records
from study.experiments.photographs import mini_tree
from study.experiments.seeds import SeededRows
from study.experiments.statistics import (
    CONFIDENCE,
    PairedComparison,
    compare,
    detectable_difference,
    holm,
)
from study.experiments.training_runs import config_of, train_or_find

__all__ = ["NETWORKS", "Variants", "Ways", "group_of"]

Ways = Mapping[str, Mapping[str, Any]]

NETWORKS = tuple(
    one for one in parity.NETWORKS if one.name in ("alexnet", "mobilenet1.0", "resnet50_v2")
)


@dataclass(frozen=True)
class Variants(SeededRows):
    """The runs that exist, and results computed from them; a row is ``network/way``.

    Comparisons need all runs of the group, and the base.

    Attributes
    ----------
    networks : sequence of Network
    ways : mapping of str to mapping
        The fields of the training config that make each way, by its name.
    base : str
        The base of the comparison: a row of parity, or one of the ways.
    """

    seeds = parity.SEEDS
    networks: ClassVar[Sequence[parity.Network]] = NETWORKS
    ways: ClassVar[Ways]

    @classmethod
    def experiment(cls, network: parity.Network, way: str, seed: int) -> Experiment:
        """Return the experiment of one run."""
        changes = cls.ways[way]
        config = replace(parity.training_config(network, parity.BASE, seed), **changes)
        return Experiment(
            cls.name(f"{network.name}/{way}", seed),
            {"photographs": "caltech101-mini", **config_of(config), **changes},
            partial(_run, config),
            needs_photographs=True,
        )

    def compared(self) -> list[str]:
        """Return the ways other than the base."""
        return [way for way in self.ways if way != self.base]

    def base_runs(self, network: parity.Network) -> dict[int, Record]:
        """Return the runs that a network's others are compared with, by seed."""
        ours = self if self.base in self.ways else parity.Parity(self.records)
        return ours.runs(f"{network.name}/{self.base}")

    def figures(self, way: str, name: str) -> Any:
        """Return a figure of all runs, shape (networks, seeds); NaN without a finite one."""
        found = np.full((len(self.networks), len(self.seeds)), np.nan)
        for place, network in enumerate(self.networks):
            is_base = way == self.base
            runs = self.base_runs(network) if is_base else self.runs(f"{network.name}/{way}")
            for seed, run in runs.items():
                value = run.outcome.figures[name]
                found[place, self.seeds.index(seed)] = np.nan if value is None else value
        return found

    def accuracies(self, way: str) -> Any:
        """Return test accuracies in points, shape (networks, seeds); NaN without a record."""
        return 100 * self.figures(way, "test_accuracy")

    def differences(self, way: str) -> Any:
        """Return a way's accuracies minus the base's, shape (networks, seeds)."""
        return self.accuracies(way) - self.accuracies(self.base)

    @cached_property
    def pooled(self) -> dict[str, PairedComparison]:
        """The accuracy of each way against the base's, over all networks and seeds."""
        return {way: compare(self.differences(way)) for way in self.compared()}

    @cached_property
    def losses(self) -> dict[str, PairedComparison]:
        """The final training loss of each way against the base's, over all networks and seeds."""
        base = self.figures(self.base, "train_loss")
        return {way: compare(self.figures(way, "train_loss") - base) for way in self.compared()}

    @cached_property
    def corrected(self) -> dict[str, float]:
        """The p-values of the t-tests after Holm's correction."""
        return dict(zip(self.pooled, holm([one.t_test for one in self.pooled.values()])))

    @property
    def least_p(self) -> float:
        """The least of the corrected p-values."""
        return min(self.corrected.values())

    @property
    def different(self) -> list[str]:
        """The ways that differ from the base by more than chance, after the correction."""
        return [way for way, p in self.corrected.items() if p < 1 - CONFIDENCE]

    def detectable(self, way: str) -> float:
        """Return the difference to the base that so many pairs find four times in five."""
        one = self.pooled[way]
        return detectable_difference(one.spread, one.pairs)

    def table(self) -> list[list[str]]:
        """Return the cells of the table of all rows with a run."""
        rows = []
        for (place, network), way in product(enumerate(self.networks), self.ways):
            row = f"{network.name}/{way}"
            found = [one.figures for one in self.outcomes(row).values()]
            if not found:
                continue
            pairs = self.differences(way)[place]
            paired = way != self.base and np.isfinite(pairs).sum() > 1
            rows.append([
                network.name,
                way,
                plus_minus([100 * one["test_accuracy"] for one in found], 1),
                mean_and_interval(compare(pairs), 1) if paired else "-",
                plus_minus([one["train_loss"] for one in found], 3),
                f"{one_or_range([one['skipped_steps'] for one in found])} of {found[0]['steps']}",
                f"`{self.group}/{row}`",
            ])  # fmt: skip
        return rows

    def pooled_table(self) -> list[list[str]]:
        """Return the cells of the table of the ways over all networks and seeds."""
        return [
            [
                *(way, str(one.pairs), mean_and_interval(one), f"{self.corrected[way]:.2g}"),
                mean_and_interval(self.losses[way]),
            ]
            for way, one in self.pooled.items()
        ]

    def draw(self, figure: Any) -> None:
        """Draw the accuracy of each run against the base's."""
        order = self.ways if self.base in self.ways else (self.base, *self.ways)
        points = {way: self.accuracies(way) for way in order}
        figures.draw_accuracies(figure, points, [one.name for one in self.networks], self.base)


def _run(config: TrainingConfig, place: Place) -> Outcome:
    return train_or_find(config, mini_tree(place), place)


def group_of(view: type[Variants], picture: str) -> Group:
    """Return the group of all runs of a view, with its picture."""

    def draw(figure: Any, records: Records) -> None:
        view(records).draw(figure)

    runs = [view.experiment(*one) for one in product(view.networks, view.ways, view.seeds)]
    return Group(view.group, runs, view, {picture: draw})
