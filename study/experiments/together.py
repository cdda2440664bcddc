"""FP16 against FP32 in all experiments on photographs, in one test."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from study.experiments.statistics import SignFlips, sign_flips
from study.experiments.training_runs import PER_CLASS

__all__ = ["Together"]


@dataclass(frozen=True)
class Together:
    """Comparisons over several groups, of their views."""

    views: Any

    @cached_property
    def float16(self) -> SignFlips:
        """The accuracy of each experiment's own test; of eight networks, the mean by seed."""
        v = self.views
        return sign_flips([
            v.imagenet_weights.paired_differences("float16", figure=PER_CLASS),
            v.caltech101.paired_differences("float16", figure=PER_CLASS),
            v.cifar10.paired_differences("float16"),
            v.parity.differences("float16").mean(axis=0),
        ])  # fmt: skip

    @property
    def costs_accuracy(self) -> bool:
        """Whether FP16 has a lower accuracy by more than chance."""
        return self.float16.upper < 0
