"""bfloat16 weights without FP32 masters: three ways to round their updates, against masters.

The base is parity's bfloat16: autocast has FP32 parameters, which are the masters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from study.experiments.variants import Variants, Ways, group_of

__all__ = ["GROUP"]


@dataclass(frozen=True)
class _Weights(Variants):
    group, base = "bfloat16_weights", "bfloat16"
    ways: ClassVar[Ways] = {
        way: {"dtype": "params=bfloat16,compute=bfloat16", "update_rounding": way}
        for way in ("nearest", "stochastic", "kahan")
    }


GROUP = group_of(_Weights, "bfloat16-weights")
