"""How fast sums over MPI's processes are here, and the link for which a ring would take as long."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median

from mpgluon.distributed import MpiProcesses, Processes
from mpgluon_tools.tables import Table

import numpy as np

__all__ = ["fit_link", "measure_sums", "measured_link"]

_SIZES = [2**power for power in (14, 16, 18, 20, 22, 23, 25)]  # bytes


def measured_link(rounds: int) -> str:
    """Measure sums over mpirun's processes; return a report in the first, "" in the others.

    Raises
    ------
    ValueError
        If there is only one process.
    """
    with MpiProcesses() as processes:
        count, is_first = processes.world_size, processes.is_first
        seconds = measure_sums(processes, _SIZES, rounds=rounds) if count > 1 else {}
    if count < 2:
        raise ValueError("one process sums nothing; start this with mpirun")
    if not is_first:
        return ""
    gbit_per_s, latency_us = fit_link(count, seconds)
    rows = [[f"{size / 1e6:.3f}", f"{1e3 * one:.3f}"] for size, one in seconds.items()]
    return (
        f"{Table(['MB', 'median of the sum, ms'], rows)}\n{count} processes, {rounds} rounds; as a "
        f"ring: --link-gbit-per-s {gbit_per_s:.3g} --latency-us {latency_us:.3g}\n"
    )


def measure_sums(processes: Processes, sizes: Sequence[int], *, rounds: int) -> dict[int, float]:
    """Return median seconds, by size in bytes, of sums of FP32 arrays; all processes call this.

    The sizes take turns. All processes begin together, and the last to end counts.
    """
    arrays = {size: np.zeros(size // 4, np.float32) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds + 1):
        for size, array in arrays.items():
            processes.gather(None, "the beginning of a sum")
            began = time.perf_counter()
            processes.sum_in_place(array, "a sum that is timed")
            ended = processes.gather(time.perf_counter() - began, "the end of a sum")
            seconds[size].append(max(ended))
    return {size: median(times[1:]) for size, times in seconds.items()}  # the first warms up


def fit_link(gpus: int, seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return Gbit/s and microseconds of a hop with which a ring comes closest to times by bytes.

    Relative errors are squared, so that small messages count as much as large ones.

    Raises
    ------
    ValueError
        If large messages were no slower than small ones.
    """
    times, sizes = np.array(list(seconds.values())), np.array(list(seconds))
    hops = 2 * (gpus - 1)
    columns = np.stack([np.full_like(times, hops), hops / gpus * sizes], axis=1) / times[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    if per_byte <= 0:
        raise ValueError(f"sums of more bytes took no longer: {dict(seconds)}; measure again")
    return 8e-9 / per_byte, max(0.0, 1e6 * latency)
