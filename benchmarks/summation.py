"""What the format of a sum of gradients costs in accuracy, by simulation; nothing is sent.

Each worker's gradient has a part that all have in common and noise of the same size, and their
magnitudes spread evenly over powers of two, as those of a scaled loss do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

import numpy as np
import numpy.typing as npt

from mpgluon.tables import Table

__all__ = ["WAYS", "WORKERS", "SumError", "simulate", "sum_table"]

WORKERS = (2, 8, 64, 512, 4096)
ELEMENTS = 4000
SMALLEST, LARGEST = -20, 8  # exponents of the common parts: inside float16, with room for noise
Rows = npt.NDArray[np.float16]


def _one_by_one(rows: Rows) -> Rows:
    """Add in float16 as a ring does: each worker adds its gradient to what comes, and rounds."""
    total: Rows = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def _in_float32(rows: Rows, factor: float = 1.0) -> Rows:
    """Add in FP32 and round to float16 once."""
    total: npt.NDArray[np.float32] = np.zeros(rows.shape[1], dtype=np.float32)
    for row in rows:
        total += row.astype(np.float32) * np.float32(factor)
    return total.astype(np.float16)


# Name, how it is computed from the workers' gradients, and whether the result is their mean.
WAYS: tuple[tuple[str, Callable[[Rows], Rows], bool], ...] = (
    ("float16", _one_by_one, False),
    ("float16, divided first", lambda rows: _one_by_one(rows / np.float16(len(rows))), True),
    ("FP32", _in_float32, False),
    ("FP32, divided first", lambda rows: _in_float32(rows, 1 / len(rows)), True),
)


@dataclass(frozen=True)
class SumError:
    """How good a sum is.

    Attributes
    ----------
    workers : int
    way : str
        One of `WAYS`.
    median_error : float
        Relative error of an element, the median of all.
    infinite, lost : float
        Shares in [0, 1] of the elements that became infinite, and zero.
    """

    workers: int
    way: str
    median_error: float
    infinite: float
    lost: float


def simulate(workers: int, *, elements: int = ELEMENTS, seed: int = 0) -> list[SumError]:
    """Return the errors of all ways for so many workers, a power of two.

    The exact sum is taken in float64, which holds every sum of 2**12 float16 numbers exactly:
    it is a multiple of 2**-24 below 2**28, 52 bits in all.

    Raises
    ------
    ValueError
        If ``workers`` is no power of two up to 4096: dividing by it would round by itself.
    """
    if workers not in (2**power for power in range(13)):
        raise ValueError(f"workers is a power of two from 1 to 4096, received {workers}")
    random = np.random.RandomState(seed)  # a stream that NumPy has promised not to change
    common = 2.0 ** random.uniform(SMALLEST, LARGEST, elements)
    noise = common * random.standard_normal((workers, elements))
    gradients = (common + noise).astype(np.float16)
    exact = gradients.sum(axis=0, dtype=np.float64)
    errors = []
    for way, add, is_mean in WAYS:
        with np.errstate(over="ignore"):  # infinities are counted
            found = add(gradients).astype(np.float64)
        true = exact / workers if is_mean else exact
        known = true != 0
        relative = np.abs(found[known] - true[known]) / np.abs(true[known])
        errors.append(
            SumError(
                workers,
                way,
                float(np.median(relative)),
                float(np.mean(np.isinf(found))),
                float(np.mean((found == 0) & known)),
            )
        )
    return errors


def sum_table(workers: Sequence[int] = WORKERS) -> Table:
    """Return a row for each number of workers and a column for each way."""
    rows = [[f"{count:,}", *(_in_words(error) for error in simulate(count))] for count in workers]
    return Table(["workers", *(way for way, *_ in WAYS)], rows)


def _in_words(error: SumError) -> str:
    words = [f"{error.median_error:.1e}"]
    if error.infinite:
        words.append(f"{100 * error.infinite:.2g} % infinite")
    if error.lost:
        words.append(f"{100 * error.lost:.2g} % lost")
    return ", ".join(words)
