"""The accuracy that the format of a sum of gradients costs, by simulation; nothing is sent.

Each worker's gradient has a part that all have in common and noise of the same size, and their
magnitudes spread evenly over powers of two, as gradients of a scaled loss do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpgluon_tools.tables import Table

import numpy as np

__all__ = ["WAYS", "SumError", "simulate", "sum_table", "summed"]

_ELEMENTS = 4000
_SMALLEST, _LARGEST = -20, 8  # exponents of the common parts: in float16, with room for noise
# The format of the additions, and whether each gradient is divided by the workers first.
WAYS = {
    "float16": ("float16", False),
    "float16, divided first": ("float16", True),
    "FP32": ("float32", False),
    "FP32, divided first": ("float32", True),
}


class SumError(NamedTuple):
    """The median relative error of a sum's elements; the shares that became infinite or zero."""

    median: float
    infinite: float
    lost: float

    def __str__(self) -> str:
        words = [f"{self.median:.1e}"]
        words += [f"{100 * self.infinite:.2g} % infinite"] * bool(self.infinite)
        words += [f"{100 * self.lost:.2g} % lost"] * bool(self.lost)
        return ", ".join(words)


def summed(gradients: Any, way: str) -> Any:
    """Return the float16 sum or mean over axis 0, one addition after the other."""
    dtype, is_mean = WAYS[way]
    divisor = np.dtype(dtype).type(len(gradients) if is_mean else 1)
    total = np.zeros(gradients.shape[1], dtype)
    for row in gradients:
        total += row.astype(dtype) / divisor
    return total.astype(np.float16)


def simulate(workers: int) -> dict[str, SumError]:
    """Return the error of each of `WAYS` for so many workers, a power of two up to 4096.

    The exact sum is taken in float64, which holds every sum of 2**12 float16 numbers exactly:
    it is a multiple of 2**-24 below 2**28, 52 bits in all.
    """
    random = np.random.RandomState(0)  # a stream that NumPy has promised not to change
    common = 2.0 ** random.uniform(_SMALLEST, _LARGEST, _ELEMENTS)
    noise = common * random.standard_normal((workers, _ELEMENTS))
    gradients = (common + noise).astype(np.float16)
    errors = {}
    for way, (_, is_mean) in WAYS.items():
        with np.errstate(over="ignore"):  # infinities are counted
            found = summed(gradients, way).astype(np.float64)
        exact = gradients.sum(axis=0, dtype=np.float64) / (workers if is_mean else 1)
        known = exact != 0
        relative = np.abs(found - exact)[known] / np.abs(exact[known])
        lost = np.mean((found == 0) & known)
        errors[way] = SumError(float(np.median(relative)), np.isinf(found).mean(), lost)
    return errors


def sum_table(workers: Sequence[int] = (2, 8, 64, 512, 4096)) -> Table:
    """Return a row for each number of workers and a column for each way."""
    rows = [[f"{count:,}", *map(str, simulate(count).values())] for count in workers]
    return Table(["workers", *WAYS], rows)
