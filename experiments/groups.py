"""The groups of experiments, in the order of the page."""

from __future__ import annotations

from experiments import (
    ablations,
    caltech101,
    parity_page,
    recurrent,
    step_times,
    two_losses,
)
from experiments.experiment import Group

__all__ = ["GROUPS"]

GROUPS: tuple[Group, ...] = (
    parity_page.GROUP,
    ablations.GROUP,
    recurrent.GROUP,
    two_losses.GROUP,
    caltech101.GROUP,
    step_times.GROUP,
)
