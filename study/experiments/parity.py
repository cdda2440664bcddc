"""Parity: networks in four formats on photographs, with the same hyperparameters and seeds.

A row is a format, or the control. Accuracies are in points: hundredths of the test images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from recipes.training import TrainingConfig
from study.experiments import figures
from study.experiments.cells import interval, mean_and_interval, one_or_range, plus_minus, signed
from study.experiments.experiment import Experiment, Group, Outcome, Place, Record, Records
from study.experiments.photographs import mini_tree
from study.experiments.seeds import SeededRows
from study.experiments.statistics import (
    CONFIDENCE,
    PairedComparison,
    compare,
    detectable_difference,
    holm,
    pooled_spread,
)
from study.experiments.training_runs import config_of, train_or_find

__all__ = ["BASE", "COMMON", "CONTROL", "FIRST_NETWORKS", "FIRST_SEEDS", "FORMATS", "GROUP",
           "NETWORKS", "ROWS", "SEEDS", "Network", "Parity", "seeds_of", "step_time",
           "training_config"]  # fmt: skip


@dataclass(frozen=True)
class Network:
    """The settings that the runs of one network share, in all formats.

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
    Network("bn_inception", 32, 0.0005),
    # VGG-D. At the rate of vgg16_bn it had 28 points after nine epochs, in a seed not used here.
    Network("vgg16", 32, 0.0001),
)
FIRST_NETWORKS = NETWORKS[:6]  # the others were added when the results of these were known
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "mixed_float16": {"dtype": "float16", "amp": True},
    "bfloat16": {"dtype": "bfloat16"},
}
# A loss scale at which hardly a run overflows, to tell what skipped steps cost.
CONTROL = "static_float16"
ROWS: dict[str, dict[str, Any]] = {**FORMATS, CONTROL: {"dtype": "float16", "loss_scale": "32"}}
BASE = "float32"  # the row that the others are compared with
OTHERS = tuple(row for row in ROWS if row != BASE)
SEEDS = (0, 1, 2, 3, 4)
FIRST_SEEDS = SEEDS[:3]  # the others, and the control with these, were added later
COMMON: dict[str, Any] = {
    "train_per_class": 40,
    "batch_size": 20,
    "optimizer": "adam",
    "min_crop_area": 0.5,
    "weight_decay": 1e-4,
    "workers": 0,
}


def training_config(network: Network, row: str, seed: int) -> TrainingConfig:
    """Return the config of one run, without folders."""
    return TrainingConfig(
        **ROWS[row],
        **COMMON,
        model=network.name,
        image_size=network.image_size,
        learning_rate=network.learning_rate,
        epochs=network.epochs,
        seed=seed,
    )


def seeds_of(row: str) -> Sequence[int]:
    """Return the seeds that a row has: the control has the first ones."""
    return FIRST_SEEDS if row == CONTROL else SEEDS


def _experiment(network: Network, row: str, seed: int) -> Experiment:
    config = training_config(network, row, seed)
    return Experiment(
        Parity.name(f"{network.name}/{row}", seed),
        {"photographs": "caltech101-mini", **config_of(config)},
        partial(_run, config),
        needs_photographs=True,
    )


def _run(config: TrainingConfig, place: Place) -> Outcome:
    return train_or_find(config, mini_tree(place), place)


@dataclass(frozen=True)
class Parity(SeededRows):
    """The records of parity runs by network and row, and results computed from them.

    Rows are compared over the networks of which all runs have a record; there must be one.
    """

    group, seeds, base = "parity", SEEDS, BASE

    @cached_property
    def networks(self) -> list[Network]:
        """The networks of which all runs have a record."""
        return [
            network
            for network in NETWORKS
            if all(
                self.name(f"{network.name}/{row}", seed) in self.records
                for row in ROWS
                for seed in seeds_of(row)
            )
        ]

    @property
    def later_networks(self) -> list[Network]:
        """Those that were added when the results of the first ones were known."""
        return [network for network in self.networks if network not in FIRST_NETWORKS]

    def all_runs(self, *rows: str) -> list[Record]:
        """Return the runs of rows, all by default, of the networks that are compared."""
        return [
            run
            for row, network in product(rows or ROWS, self.networks)
            for run in self.runs(f"{network.name}/{row}").values()
        ]

    @cached_property
    def accuracies(self) -> dict[str, Any]:
        """Test accuracies by row, shape (networks, seeds); NaN without a record."""
        points = {row: np.full((len(self.networks), len(SEEDS)), np.nan) for row in ROWS}
        for (place, network), row in product(enumerate(self.networks), ROWS):
            for seed, run in self.runs(f"{network.name}/{row}").items():
                points[row][place, SEEDS.index(seed)] = 100 * run.outcome.figures["test_accuracy"]
        return points

    def differences(self, row: str) -> Any:
        """Return a row's accuracies minus FP32's, shape (networks, seeds)."""
        return self.accuracies[row] - self.accuracies[BASE]

    def table(self) -> list[list[str]]:
        """Return the cells of the table of all runs that exist."""
        rows = []
        for network, row in product(NETWORKS, ROWS):
            found = [run.outcome.figures for run in self.runs(f"{network.name}/{row}").values()]
            if found:
                rows.append([
                    f"{network.name}, {network.image_size} px, {network.learning_rate:g}, "
                    f"{network.epochs} epochs",
                    row,
                    plus_minus([100 * one["test_accuracy"] for one in found], 1),
                    plus_minus([one["train_loss"] for one in found], 3),
                    one_or_range([one["skipped_steps"] for one in found]),
                    str(found[0]["steps"]),
                    one_or_range([one["final_loss_scale"] for one in found]),
                    *step_time(self.records, network.name, row),
                    f"`parity/{network.name}/{row}`",
                ])  # fmt: skip
        return rows

    @cached_property
    def pooled(self) -> dict[str, PairedComparison]:
        """Each row against FP32 over all networks and seeds."""
        return {row: compare(self.differences(row)) for row in OTHERS}

    def by_seed(self, row: str) -> PairedComparison:
        """Compare a row's means over the networks with FP32's: a pair for each seed."""
        return compare(self.differences(row).mean(axis=0))

    def first_in(self, row: str, seeds: Sequence[int]) -> PairedComparison:
        """Compare a row of the first networks with FP32 in some of the seeds."""
        places = [network in FIRST_NETWORKS for network in self.networks]
        return compare(self.differences(row)[places][:, [SEEDS.index(seed) for seed in seeds]])

    def of_later_networks(self, row: str) -> PairedComparison:
        """Compare a row of the networks that were added later with FP32."""
        places = [network in self.later_networks for network in self.networks]
        return compare(self.differences(row)[places])

    @cached_property
    def control(self) -> PairedComparison:
        """The control against float16, in the seeds that both have."""
        return compare(self.accuracies[CONTROL] - self.accuracies["float16"])

    @cached_property
    def corrected(self) -> dict[str, float]:
        """The p-values of the t-tests after Holm's correction; equal rows count as one test."""
        twins = {"mixed_float16": "float16"} if self.equal_float16 else {}
        tests = {name: one.t_test for name, one in self.pooled.items() if name not in twins}
        found = dict(zip(tests, holm(list(tests.values()))))
        return {name: found[twins.get(name, name)] for name in self.pooled}

    @property
    def tests(self) -> int:
        """How many tests there are to correct for."""
        return len(self.pooled) - self.equal_float16

    @property
    def different(self) -> list[str]:
        """The rows that differ from FP32 by more than chance, after the correction."""
        return [name for name, p in self.corrected.items() if p < 1 - CONFIDENCE]

    def pooled_table(self) -> list[list[str]]:
        """Return the cells of the table of the rows over all networks and seeds."""
        return [
            [name, str(one.pairs), signed(one.mean), interval(one), f"{one.t_test:.2g}",
             f"{self.corrected[name]:.2g}", f"{one.wilcoxon:.2g}"]
            for name, one in self.pooled.items()
        ]  # fmt: skip

    def short_table(self) -> list[list[str]]:
        """Return the cells of `pooled_table` that a reader needs first."""
        return [[name, pairs, mean, ends, holm] for name, pairs, mean, ends, _, holm, _ in
                self.pooled_table()]  # fmt: skip

    @property
    def worst(self) -> str:
        """The format whose interval leaves room for the largest loss of accuracy."""
        return min(set(FORMATS) - {BASE}, key=lambda row: (self.pooled[row].lower, row))

    @property
    def base_spread(self) -> float:
        """The standard deviation of FP32 between seeds, over all networks, in points."""
        return pooled_spread(self.accuracies[BASE])

    @property
    def pair_spread(self) -> float:
        """The standard deviation of differences to FP32 within a network and row, in points."""
        return pooled_spread(np.concatenate([self.differences(row) for row in OTHERS]))

    def detectable(self, pairs: int) -> float:
        """Return the difference that a t-test of so many pairs finds four times in five."""
        return detectable_difference(self.pair_spread, pairs)

    def skipped_percent(self, row: str) -> float:
        """Return which share of a row's steps was skipped, in percent."""
        found = [run.outcome.figures for run in self.all_runs(row)]
        skipped, steps = (sum(one[name] for one in found) for name in ("skipped_steps", "steps"))
        return float(100 * skipped / steps)

    @cached_property
    def equal_float16(self) -> bool:
        """Whether float16 and mixed float16 ran alike, with the same figures and curves."""
        one, other = (
            [(run.outcome.figures, run.outcome.curves) for run in self.all_runs(row)]
            for row in ("float16", "mixed_float16")
        )
        return one == other

    @property
    def hours(self) -> float:
        """The training time of all runs."""
        return float(sum(run.outcome.times["training_seconds"] for run in self.all_runs())) / 3600

    def network_table(self) -> list[list[str]]:
        """Return the cells of the mean differences of each network."""
        return [
            [
                network.name,
                *(mean_and_interval(compare(self.differences(row)[place]), 1) for row in OTHERS),
                f"{self.accuracies[BASE][place].std(ddof=1):.1f}",
            ]
            for place, network in enumerate(self.networks)
        ]


def step_time(records: Records, network: str, row: str) -> tuple[str, str]:
    """Return the seconds of a step and their ratio to FP32's; dashes if they were not measured."""
    record = records.get(f"step_times/{network}")
    times = {} if record is None else record.outcome.times
    if f"{row}/seconds" not in times:
        return "-", "-"
    return f"{times[f'{row}/seconds']:.3f}", f"{times[f'{row}/relative']:.2f}"


_SHOWN = "resnet50_v2"  # the network whose curves are drawn


def _draw_accuracies(figure: Any, records: Records) -> None:
    view = Parity(records)
    figures.draw_accuracies(figure, view.accuracies, [one.name for one in view.networks], BASE)


def _draw_curves(figure: Any, records: Records) -> None:
    runs = {row: Parity(records).runs(f"{_SHOWN}/{row}")[SEEDS[0]] for row in FORMATS}
    figures.draw_curves(figure, runs, f"{_SHOWN}: the same run in each format", SEEDS[0])


def _draw_loss_scales(figure: Any, records: Records) -> None:
    runs = {row: Parity(records).runs(f"{_SHOWN}/{row}") for row in ("float16", "mixed_float16")}
    title = f"{_SHOWN}: halved at each overflow, whose step is skipped"
    figures.draw_loss_scales(figure, runs, title)


GROUP = Group(
    "parity",
    [
        _experiment(network, row, seed)
        for network, row in product(NETWORKS, ROWS)
        for seed in seeds_of(row)
    ],
    Parity,
    {
        "parity-accuracy": _draw_accuracies,
        "parity-curves": _draw_curves,
        "parity-loss-scale": _draw_loss_scales,
    },
)
