"""The groups of experiments; results.md.jinja and readme.md.jinja beside this file show them."""

from __future__ import annotations

from experiments import (
    ablations,
    bfloat16_weights,
    caltech101,
    fine_tuning,
    parity,
    recurrent,
    step_times,
    two_losses,
)
from experiments.experiment import Group

__all__ = ["GROUPS"]

GROUPS: tuple[Group, ...] = (
    caltech101.GROUP,
    fine_tuning.GROUP,
    parity.GROUP,
    bfloat16_weights.GROUP,
    ablations.GROUP,
    recurrent.GROUP,
    two_losses.GROUP,
    step_times.GROUP,
)
