"""Instruction sets of this machine's processor, as the system reports them, not by its name.

The levels are from the x86-64 psABI, and GCC and clang take them after ``-march=``. A processor
of a level runs libraries compiled for every lower one.
"""

from __future__ import annotations

import platform
from functools import cache

from mpgluon.base.processor import processor

__all__ = ["LEVELS", "features", "level", "levels"]

_NEEDS = {
    "x86-64-v2": "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}
LEVELS = tuple(_NEEDS)


@cache
def features() -> frozenset[str]:
    """Return the names of the processor's instructions; empty where the system does not say."""
    return processor()[1]


def levels() -> tuple[str, ...]:
    """Return the levels that the processor runs, the lowest first."""
    runs: list[str] = []
    for name, needs in _NEEDS.items():
        if not features().issuperset(needs.split()):
            break
        runs.append(name)
    return tuple(runs)


def level() -> str:
    """Return the highest level that the processor runs, or its kind where there are no levels."""
    return (levels() or (platform.machine(),))[-1]
