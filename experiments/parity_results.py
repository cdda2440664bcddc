"""The parity runs that there are, compared in pairs.

Accuracies are in points: hundredths of the test images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Optional

from experiments import parity, step_times
from experiments.experiment import Record
from experiments.parity import BASE, NETWORKS, ROWS, SEEDS
from experiments.statistics import (
    CONFIDENCE,
    Comparison,
    compare,
    holm,
    pooled_spread,
)

__all__ = ["OTHERS", "Parity", "step_time"]

OTHERS = tuple(name for name in ROWS if name != BASE)


@dataclass(frozen=True)
class Parity:
    """The records of parity runs, and what follows from them.

    Attributes
    ----------
    records : mapping
        All that there are, of other groups too.
    """

    records: Mapping[str, Record]

    def runs(self, network: str, row: str) -> dict[int, Record]:
        """Return the runs of a row by seed."""
        names = {seed: parity.run_name(network, row, seed) for seed in SEEDS}
        return {seed: self.records[name] for seed, name in names.items() if name in self.records}

    def points(self, network: str, row: str) -> dict[int, float]:
        """Return the test accuracies of a row by seed, in points."""
        runs = self.runs(network, row)
        return {seed: 100 * run.outcome.figures["test_accuracy"] for seed, run in runs.items()}

    def comparison(
        self, row: str, *networks: str, base: str = BASE, seeds: Sequence[int] = SEEDS
    ) -> Optional[Comparison]:
        """Compare rows, paired by network (of all by default) and seed; ``None`` without a pair."""
        pairs = []
        for network in networks or [one.name for one in NETWORKS]:
            ours, theirs = self.points(network, row), self.points(network, base)
            pairs += [(ours[s], theirs[s]) for s in seeds if s in ours and s in theirs]
        return compare(*zip(*pairs)) if pairs else None

    def by_seed(self, row: str) -> Optional[Comparison]:
        """Compare a row's means over the networks with FP32's: a pair for each complete seed."""
        pairs = []
        for seed in SEEDS:
            runs = [(self.points(n.name, row), self.points(n.name, BASE)) for n in NETWORKS]
            if all(seed in ours and seed in theirs for ours, theirs in runs):
                ours_theirs = [(ours[seed], theirs[seed]) for ours, theirs in runs]
                pairs.append([sum(values) / len(values) for values in zip(*ours_theirs)])
        return compare(*zip(*pairs)) if pairs else None

    @cached_property
    def pooled(self) -> dict[str, Comparison]:
        """Each row over all networks and seeds, as far as there are pairs."""
        found = {name: self.comparison(name) for name in OTHERS}
        return {name: one for name, one in found.items() if one is not None}

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

    @cached_property
    def base_spread(self) -> float:
        """The standard deviation of FP32 between seeds, over all networks, in points."""
        samples = [list(self.points(one.name, BASE).values()) for one in NETWORKS]
        return pooled_spread(samples)

    @property
    def different(self) -> list[str]:
        """The rows that differ from FP32 by more than chance, after the correction."""
        return [name for name, p in self.corrected.items() if p < 1 - CONFIDENCE]

    @cached_property
    def equal_float16(self) -> bool:
        """Whether float16 and mixed float16 ran alike, with the same figures and curves."""
        found = [
            [
                (run.outcome.figures, run.outcome.curves)
                for network in NETWORKS
                for run in self.runs(network.name, row).values()
            ]
            for row in ("float16", "mixed_float16")
        ]
        return bool(found[0]) and found[0] == found[1]

    @property
    def missing(self) -> list[str]:
        """The runs without a record; those of a row, or of a network, by their common name."""
        names = []
        for network in NETWORKS:
            rows = {row: self._missing_of(network.name, row) for row in ROWS}
            nothing_yet = {row for row in ROWS if len(rows[row]) == len(parity.seeds_of(row))}
            if nothing_yet == set(ROWS):
                names.append(f"parity/{network.name}")
                continue
            for row, missing in rows.items():
                names += [f"parity/{network.name}/{row}"] if row in nothing_yet else missing
        return names

    def _missing_of(self, network: str, row: str) -> list[str]:
        names = [parity.run_name(network, row, seed) for seed in parity.seeds_of(row)]
        return [name for name in names if name not in self.records]


def step_time(records: Mapping[str, Record], network: str, name: str) -> tuple[str, str]:
    """Return the seconds of a step and their ratio to FP32's; dashes if they were not measured."""
    record = records.get(step_times.run_name(network))
    times = {} if record is None else record.outcome.times
    if f"{name}/seconds" not in times:
        return "-", "-"
    return f"{times[f'{name}/seconds']:.3f}", f"{times[f'{name}/relative']:.2f}"
