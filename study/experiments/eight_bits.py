"""Products in eight bits: a scale for each tensor, for each block of 32 values, or none.

The base is parity's float32. E4M3 forward, E5M2 for gradients, bfloat16 between products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from study.experiments.variants import Variants, Ways, group_of

__all__ = ["GROUP"]


@dataclass(frozen=True)
class _EightBits(Variants):
    group = "eight_bits"
    ways: ClassVar[Ways] = {  # "tensor" is mixed_float8
        scaling: {
            "dtype": "params=float32,compute=float8_e4m3,gradient=float8_e5m2,between=bfloat16,"
            f"scaling={scaling}"
        }
        for scaling in ("tensor", "mx", "none")
    }


GROUP = group_of(_EightBits, "eight-bits")
