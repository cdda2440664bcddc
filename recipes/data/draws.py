"""Reproducible random numbers: one seed gives independent streams, one for each purpose."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["Purpose", "generator", "permutation"]


class Purpose(IntEnum):
    """The part of the pipeline that draws; the values are part of the random state."""

    SPLIT = 1
    SHAPES = 2
    ORDER = 3
    CROPS = 4


def generator(purpose: Purpose, *key: int) -> np.random.Generator:
    """Return a generator that depends on the purpose and the integers of ``key`` only."""
    return np.random.Generator(_bits(purpose, *key))


def permutation(count: int, purpose: Purpose, *key: int) -> NDArray[np.int64]:
    """Return a permutation of ``range(count)``, the same with every version of NumPy.

    It is the order of raw random numbers, whose stream NumPy guarantees; it gives no such
    guarantee for ``Generator.permutation``.
    """
    return np.argsort(_bits(purpose, *key).random_raw(count), kind="stable")


def _bits(purpose: Purpose, *key: int) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence([int(purpose), *key]))
