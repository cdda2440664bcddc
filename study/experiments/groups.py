"""The groups of experiments, and their rows and claims on the pages of results."""

from __future__ import annotations

from study.experiments import (
    ablations,
    batch_doubling,
    bfloat16_weights,
    caltech101,
    cifar10,
    eight_bits,
    engines,
    exponents,
    fine_tuning,
    growing_resolution,
    imagenet_weights,
    lost_batches,
    parity,
    recurrent,
    sequences,
    step_times,
    tensor_core_sums,
    two_losses,
)
from study.experiments.claims import CLAIMS
from study.experiments.experiment import Group
from study.experiments.page import Document
from study.experiments.quoted_texts import QUOTES
from study.experiments.tables import ROWS, draw_summary

__all__ = ["DOCUMENT", "GROUPS"]

GROUPS: tuple[Group, ...] = (
    imagenet_weights.GROUP,
    lost_batches.GROUP,
    engines.GROUP,
    cifar10.GROUP,
    exponents.GROUP,
    caltech101.GROUP,
    fine_tuning.GROUP,
    parity.GROUP,
    bfloat16_weights.GROUP,
    eight_bits.GROUP,
    tensor_core_sums.GROUP,
    ablations.GROUP,
    recurrent.GROUP,
    sequences.GROUP,
    two_losses.GROUP,
    growing_resolution.GROUP,
    batch_doubling.GROUP,
    step_times.GROUP,
)

DOCUMENT = Document(
    GROUPS,
    ROWS,
    CLAIMS,
    QUOTES,
    more_pages=(
        "docs/deployment.md",
        "docs/gpu.md",
        "docs/how-to/leaving-mxnet.md",
        "docs/performance.md",
        "docs/performance-log.md",
    ),
    pictures={"summary": draw_summary},
)
