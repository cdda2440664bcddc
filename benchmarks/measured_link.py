"""How fast sums over processes really are, and the link that the model of a ring takes for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.scaling import Link, ring_bytes
from benchmarks.timing import quartiles, turns
from mpgluon.distributed import Processes

__all__ = ["fit_link", "measure_sums"]


def measure_sums(
    processes: Processes, sizes: Sequence[int], *, rounds: int = 15
) -> dict[int, float]:
    """Time sums of FP32 arrays over all processes, which all call this; medians of the rounds.

    The sizes take turns, so that a busy machine is as slow for one as for another. All begin
    together, and the last to end counts.

    Parameters
    ----------
    processes : Processes
        Entered; at least two.
    sizes : sequence of int
        Bytes of the arrays.
    rounds : int
        How often each is timed.

    Returns
    -------
    dict from int to float
        Seconds by size.
    """
    names = {str(size): size for size in sizes}
    arrays = {name: np.zeros(size // 4, dtype=np.float32) for name, size in names.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number, name in enumerate(turns(names, rounds + 1)):
        processes.gather(None, "the beginning of a sum")
        began = time.perf_counter()
        processes.sum_in_place(arrays[name], "a sum that is timed")
        slowest = max(processes.gather(time.perf_counter() - began, "the end of a sum"))
        if number >= len(names):  # the first round only warms up
            seconds[name].append(slowest)
    return {size: quartiles(seconds[name]).median for name, size in names.items()}


def fit_link(gpus: int, seconds: Mapping[int, float], name: str = "measured") -> Link:
    """Return the link with which a ring of so many comes closest to the times that were measured.

    Relative errors are squared, so that small messages count as much as large ones. A ring of one
    process per machine, or of processes of one machine.

    Parameters
    ----------
    gpus : int
        At least 2.
    seconds : mapping from int to float
        By bytes; at least two sizes.

    Raises
    ------
    ValueError
        If there is nothing to fit, or large messages were no slower than small ones.
    """
    if gpus < 2 or len(seconds) < 2:
        raise ValueError(
            f"a link takes two processes and two sizes, received {gpus} and {len(seconds)}"
        )
    times = np.array(list(seconds.values()))
    hops, sent = 2 * (gpus - 1), ring_bytes(gpus, 1) * np.array(list(seconds))
    columns = np.stack([np.full_like(times, hops), sent], axis=1) / times[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    if per_byte <= 0:
        raise ValueError(f"sums of more bytes took no longer: {dict(seconds)}; measure again")
    return Link(name, 8e-9 / per_byte, max(0.0, 1e6 * latency))
