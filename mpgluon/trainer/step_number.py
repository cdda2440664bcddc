"""The number of a Trainer's step, which a run that goes on from a checkpoint counts on."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Counts", "StepNumber"]


class Counts(NamedTuple):
    """Counts of a Trainer that change with each step, and that a checkpoint restores."""

    updates: int  # stands still while steps update parameters that were updated less often
    skipped: int  # steps
    single_updates: int  # of one parameter on one device each


class StepNumber:
    """Numbers the steps of a Trainer from 1: one more than the updates and the skipped steps.

    Steps have different numbers also where some update nothing, or only some of the parameters. A
    load that sets counts back sets the number back.
    """

    def __init__(self) -> None:
        self._number = 0
        self._counts = Counts(0, 0, 0)

    def at(self, counts: Counts) -> int:
        """Return the number of the step that is next at these counts."""
        if any(now < then for now, then in zip(counts, self._counts)):
            self._number = 0
        self._counts = counts
        self._number = max(self._number, counts.updates + counts.skipped + 1)
        return self._number

    def end_step(self, counts: Counts) -> None:
        """Record that a step has ended, and the counts after it."""
        self._number += 1
        self.at(counts)
