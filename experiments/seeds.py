"""Rows of runs with several seeds, and their paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from experiments.experiment import Record, Records
from experiments.statistics import PairedComparison, compare

__all__ = ["SeededRows"]


@dataclass(frozen=True)
class SeededRows:
    """The records of a group whose experiments are named ``group/row/seed-N``.

    Attributes
    ----------
    records : mapping
        Those that exist, of other groups too.
    """

    records: Records
    group: ClassVar[str]
    seeds: ClassVar[Sequence[int]]

    @classmethod
    def name(cls, row: str, seed: int) -> str:
        """Return the name of an experiment."""
        return f"{cls.group}/{row}/seed-{seed}"

    def runs(self, row: str) -> dict[int, Record]:
        """Return the runs of a row by seed."""
        names = {seed: self.name(row, seed) for seed in self.seeds}
        return {seed: self.records[name] for seed, name in names.items() if name in self.records}

    def points(self, row: str, figure: str = "test_accuracy") -> dict[int, float]:
        """Return an accuracy of each run of a row by seed, in points."""
        runs = self.runs(row).items()
        return {seed: 100 * run.outcome.figures[figure] for seed, run in runs}

    def comparison(self, row: str, base: str, figure: str = "test_accuracy") -> PairedComparison:
        """Compare the accuracies of two rows, in points, in the seeds that both have."""
        ours, others = self.points(row, figure), self.points(base, figure)
        return compare([ours[seed] - others[seed] for seed in ours if seed in others])
