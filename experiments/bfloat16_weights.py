"""bfloat16 weights without FP32 masters: three ways to round their updates, beside masters.

The networks, images and seeds are those of parity, whose bfloat16 runs are the base: autocast has
FP32 parameters, which are the masters. Accuracies are in points.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from experiments import parity
from experiments.cells import mean_and_interval, plus_minus
from experiments.experiment import Experiment, Group, Outcome, Place
from experiments.photographs import mini_tree
from experiments.seeds import SeededRows
from experiments.statistics import PairedComparison, compare
from experiments.training_runs import config_of, train_or_find
from mpgluon.training import TrainingConfig

__all__ = ["BASE", "GROUP", "NETWORKS", "WAYS"]

BASE = "bfloat16"  # a row of parity
NETWORKS = tuple(
    one for one in parity.NETWORKS if one.name in ("alexnet", "mobilenet1.0", "resnet50_v2")
)
WAYS = ("nearest", "stochastic", "kahan")


def _experiment(network: parity.Network, way: str, seed: int) -> Experiment:
    config = replace(
        parity.training_config(network, BASE, seed),
        dtype="params=bfloat16,compute=bfloat16",
        update_rounding=way,
    )
    settings = {**config_of(config), "update_rounding": way}
    return Experiment(
        _Weights.name(f"{network.name}/{way}", seed),
        {"photographs": "caltech101-mini", **settings},
        partial(_run, config),
        needs_photographs=True,
    )


def _run(config: TrainingConfig, place: Place) -> Outcome:
    return train_or_find(config, mini_tree(place), place)


@dataclass(frozen=True)
class _Weights(SeededRows):
    """The runs that exist, and what follows from them; a row is ``network/way``."""

    group, seeds = "bfloat16_weights", parity.SEEDS

    def differences(self, network: parity.Network, way: str) -> list[float]:
        """Return a row's accuracies minus the base's, in the seeds that both have."""
        ours = self.points(f"{network.name}/{way}")
        base = parity.Parity(self.records).points(f"{network.name}/{BASE}")
        return [ours[seed] - base[seed] for seed in ours if seed in base]

    def table(self) -> list[list[str]]:
        """Return the cells of the table of all rows with a run."""
        rows = []
        for network, way in product(NETWORKS, WAYS):
            row = f"{network.name}/{way}"
            found = [one.figures for one in self.outcomes(row).values()]
            if found:
                pairs = self.differences(network, way)
                rows.append([
                    network.name,
                    way,
                    plus_minus([100 * one["test_accuracy"] for one in found], 1),
                    mean_and_interval(compare(pairs), 1) if len(pairs) > 1 else "-",
                    plus_minus([one["train_loss"] for one in found], 3),
                    f"`python scripts/evidence.py run {self.group}/{row}`",
                ])  # fmt: skip
        return rows

    @property
    def pooled(self) -> dict[str, PairedComparison]:
        """Each way beside masters, over all networks and seeds."""
        return {
            way: compare([one for network in NETWORKS for one in self.differences(network, way)])
            for way in WAYS
        }

    def pooled_table(self) -> list[list[str]]:
        """Return the cells of the table of the ways over all networks and seeds."""
        return [
            [way, str(one.pairs), mean_and_interval(one), f"{one.t_test:.2g}"]
            for way, one in self.pooled.items()
        ]


GROUP = Group(
    "bfloat16_weights",
    [_experiment(*one) for one in product(NETWORKS, WAYS, parity.SEEDS)],
    _Weights,
)
