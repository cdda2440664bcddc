"""The parity runs that there are, compared in pairs.

Accuracies are in points: hundredths of the test images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Optional

from mpgluon.evidence import parity, step_times
from mpgluon.evidence.experiment import Record
from mpgluon.evidence.parity import BASE, FORMATS, NETWORKS, SEEDS
from mpgluon.evidence.statistics import (
    CONFIDENCE,
    Comparison,
    compare,
    holm,
    pooled_spread,
)

__all__ = ["OTHERS", "Parity", "step_time"]

OTHERS = tuple(name for name in FORMATS if name != BASE)


@dataclass(frozen=True)
class Parity:
    """The records of parity runs, and what follows from them.

    Attributes
    ----------
    records : mapping
        All that there are, of other groups too.
    """

    records: Mapping[str, Record]

    def runs(self, network: str, number_format: str) -> dict[int, Record]:
        """Return the runs of a row by seed."""
        names = {seed: parity.run_name(network, number_format, seed) for seed in SEEDS}
        return {seed: self.records[name] for seed, name in names.items() if name in self.records}

    def points(self, network: str, number_format: str) -> dict[int, float]:
        """Return the test accuracies of a row by seed, in points."""
        runs = self.runs(network, number_format)
        return {seed: 100 * run.outcome.figures["test_accuracy"] for seed, run in runs.items()}

    def comparison(self, number_format: str, *networks: str) -> Optional[Comparison]:
        """Compare a format with FP32, paired by network and seed; ``None`` without a pair."""
        values, base = [], []
        for network in networks:
            ours, theirs = self.points(network, number_format), self.points(network, BASE)
            for seed in sorted(ours.keys() & theirs.keys()):
                values.append(ours[seed])
                base.append(theirs[seed])
        return compare(values, base) if values else None

    @cached_property
    def pooled(self) -> dict[str, Comparison]:
        """Each format over all networks and seeds, as far as there are pairs."""
        everything = [one.name for one in NETWORKS]
        found = {name: self.comparison(name, *everything) for name in OTHERS}
        return {name: one for name, one in found.items() if one is not None}

    @cached_property
    def corrected(self) -> dict[str, float]:
        """The p-values of the t-tests after Holm's correction, by format."""
        return dict(zip(self.pooled, holm([one.t_test for one in self.pooled.values()])))

    @cached_property
    def base_spread(self) -> float:
        """The standard deviation of FP32 between seeds, over all networks, in points."""
        samples = [list(self.points(one.name, BASE).values()) for one in NETWORKS]
        return pooled_spread(samples)

    @property
    def different(self) -> list[str]:
        """The formats that differ from FP32 by more than chance, after the correction."""
        return [name for name, p in self.corrected.items() if p < 1 - CONFIDENCE]

    @cached_property
    def equal_float16(self) -> bool:
        """Whether float16 and mixed float16 have the same figures and curves wherever both ran."""
        pairs = [
            (ours.outcome, both[seed].outcome)
            for network in NETWORKS
            if (both := self.runs(network.name, "mixed_float16"))
            for seed, ours in self.runs(network.name, "float16").items()
            if seed in both
        ]
        return bool(pairs) and all(
            (ours.figures, ours.curves) == (theirs.figures, theirs.curves) for ours, theirs in pairs
        )

    @property
    def missing(self) -> list[str]:
        """The runs without a record; those of a row, or of a network, by their common name."""
        names = []
        for network in NETWORKS:
            rows = {name: self._missing_of(network.name, name) for name in FORMATS}
            if all(len(row) == len(SEEDS) for row in rows.values()):
                names.append(f"parity/{network.name}")
                continue
            for name, row in rows.items():
                all_seeds = len(row) == len(SEEDS)
                names += [f"parity/{network.name}/{name}"] if all_seeds else row
        return names

    def _missing_of(self, network: str, number_format: str) -> list[str]:
        names = [parity.run_name(network, number_format, seed) for seed in SEEDS]
        return [name for name in names if name not in self.records]


def step_time(records: Mapping[str, Record], network: str, name: str) -> tuple[str, str]:
    """Return the seconds of a step and their ratio to FP32's; dashes if they were not measured."""
    record = records.get(step_times.run_name(network))
    if record is None:
        return "-", "-"
    times = record.outcome.times
    return f"{times[f'{name}/seconds']:.3f}", f"{times[f'{name}/relative']:.2f}"
