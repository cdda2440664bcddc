"""Rows of runs with several seeds, and their paired differences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Optional

import numpy as np

from study.experiments.experiment import Outcome, Record, Records
from study.experiments.statistics import CONFIDENCE, PairedComparison, compare, holm
from study.experiments.training_runs import PER_CLASS

__all__ = ["ComparedRows", "SeededRows"]


@dataclass(frozen=True)
class SeededRows:
    """The records of a group whose experiments are named ``group/row/seed-N``.

    Attributes
    ----------
    records : mapping
        Those that exist, of other groups too.
    group : str
    seeds : sequence of int
    base : str
        The row that others are compared with.
    """

    records: Records
    group: ClassVar[str]
    seeds: ClassVar[Sequence[int]]
    base: ClassVar[str] = "float32"

    @classmethod
    def name(cls, row: str, seed: int) -> str:
        """Return the name of an experiment."""
        return f"{cls.group}/{row}/seed-{seed}"

    def runs(self, row: str) -> dict[int, Record]:
        """Return the runs of a row by seed."""
        names = {seed: self.name(row, seed) for seed in self.seeds}
        return {seed: self.records[name] for seed, name in names.items() if name in self.records}

    def outcomes(self, row: str) -> Mapping[int, Outcome]:
        """Return the outcomes of a row by seed."""
        return {seed: run.outcome for seed, run in self.runs(row).items()}

    def points(self, row: str, figure: str = "test_accuracy") -> dict[int, float]:
        """Return an accuracy of each run of a row by seed, in points."""
        return {seed: 100 * one.figures[figure] for seed, one in self.outcomes(row).items()}

    def mean(self, row: str, figure: str = PER_CLASS) -> float:
        """Return the mean of an accuracy over a row's seeds, in points."""
        return float(np.mean(list(self.points(row, figure).values())))

    def comparison(
        self, row: str, base: Optional[str] = None, figure: str = "test_accuracy"
    ) -> PairedComparison:
        """Compare a row's accuracies with another's, in points, in the seeds that both have."""
        return compare(self.paired_differences(row, base, figure))

    def paired_differences(
        self, row: str, base: Optional[str] = None, figure: str = "test_accuracy"
    ) -> list[float]:
        """Return the differences of accuracies in points, of the seeds that both rows have."""
        ours, others = self.points(row, figure), self.points(base or self.base, figure)
        return [ours[seed] - others[seed] for seed in ours if seed in others]


class ComparedRows(SeededRows, ABC):
    """Rows of which some are compared with a base; comparisons need all runs of both."""

    @property
    @abstractmethod
    def compared(self) -> Mapping[str, PairedComparison]:
        """The comparisons by row."""

    @cached_property
    def least_p(self) -> float:
        """The least p-value of the t-tests, after Holm's correction."""
        return min(holm([one.t_test for one in self.compared.values()]))

    @property
    def none_differs(self) -> bool:
        """Whether no row differs from its base by more than chance, after the correction."""
        return self.least_p >= 1 - CONFIDENCE
