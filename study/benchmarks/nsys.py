"""The share of a GPU's time on Tensor Cores, from the SQLite export of NVIDIA's Nsight Systems.

The name of a kernel says whether it uses Tensor Cores, as NVIDIA's guides read it: cuDNN and cuBLAS
put the instruction's shape into it (``884`` on Volta, ``1688`` on Turing, ``16816`` on Ampere).
Hopper's have ``warpgroup`` or ``nvjet`` in them, as an H100 showed.
"""

from __future__ import annotations

import re
import sqlite3
import sys
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from mpgluon.errors import DataError
from mpgluon_tools.tables import Table

__all__ = ["Kernel", "TensorCoreShare", "read_export", "uses_tensor_cores"]

_TENSOR_CORE = re.compile(
    r"(?<!\d)(884|1688|16816|16832|16864)(?!\d)|tensorop|tensor\d+x\d+x\d+|[hi]mma|wgmma"
    r"|warpgroup|nvjet",
    re.IGNORECASE,
)
_PUSH_POP = 59  # the type of an NVTX event that has a beginning and an end on one thread

_KERNELS = """
    SELECT names.value, kernel.end - kernel.start, launch.start, launch.globalTid
    FROM CUPTI_ACTIVITY_KIND_KERNEL AS kernel
    JOIN StringIds AS names ON names.id = kernel.demangledName
    LEFT JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS launch
        ON launch.correlationId = kernel.correlationId
        AND launch.globalTid / 0x1000000 = kernel.globalPid / 0x1000000
"""
_RANGES = """
    SELECT COALESCE(event.text, names.value), event.start, event.end, event.globalTid
    FROM NVTX_EVENTS AS event LEFT JOIN StringIds AS names ON names.id = event.textId
    WHERE event.eventType = ? AND event.end IS NOT NULL
"""


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel.

    Attributes
    ----------
    name : str
    nanoseconds : int
        On the GPU.
    layer : str or None
        The innermost NVTX range in which it was launched; ``None`` outside of all.
    """

    name: str
    nanoseconds: int
    layer: str | None


@dataclass(frozen=True)
class TensorCoreShare:
    """The time of kernels with and without Tensor Cores; ``print`` it."""

    kernels: tuple[Kernel, ...]

    @property
    def share(self) -> float:
        """The part of all kernels' time that is on Tensor Cores, in [0, 1]."""
        total = sum(kernel.nanoseconds for kernel in self.kernels)
        used = sum(k.nanoseconds for k in self.kernels if uses_tensor_cores(k.name))
        return used / total if total else 0.0

    def layers_without(self) -> dict[str, int]:
        """Return the layers without a kernel on Tensor Cores, with nanoseconds, longest first."""
        times: dict[str, int] = defaultdict(int)
        using = {k.layer for k in self.kernels if uses_tensor_cores(k.name)}
        for kernel in self.kernels:
            if kernel.layer is not None and kernel.layer not in using:
                times[kernel.layer] += kernel.nanoseconds
        return dict(sorted(times.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        total = sum(kernel.nanoseconds for kernel in self.kernels)
        lines = [
            f"{self.share:.1%} of {total / 1e6:.2f} ms in {len(self.kernels)} kernels are on "
            "Tensor Cores",
            "",
            str(_table("kernel", _by_name(self.kernels), total)),
        ]
        layers = self.layers_without()
        if layers:
            rows = [(name, time, False) for name, time in layers.items()]
            lines += ["", "Layers without Tensor Cores", str(_table("layer", rows, total))]
        elif all(kernel.layer is None for kernel in self.kernels):
            lines += ["", "No NVTX ranges: profile with MXNet's profiler on to see layers."]
        return "\n".join(lines)


def uses_tensor_cores(kernel: str) -> bool:
    """Whether the name of a kernel says that it computes on Tensor Cores."""
    return _TENSOR_CORE.search(kernel) is not None


def read_export(path: Path) -> TensorCoreShare:
    """Read a file that ``nsys export --type sqlite`` wrote.

    Raises
    ------
    DataError
        If it is missing, not such a file, or has no kernels.
    """
    if not path.is_file():
        found = "is not a file" if path.exists() else "does not exist"
        raise DataError(f"{path} {found}; make it with nsys export --type sqlite")
    try:
        with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            if "CUPTI_ACTIVITY_KIND_KERNEL" not in tables:
                raise DataError(f"{path} has no kernels; profile with nsys profile --trace cuda")
            rows = database.execute(_KERNELS).fetchall()
            ranges = (
                database.execute(_RANGES, (_PUSH_POP,)).fetchall()
                if "NVTX_EVENTS" in tables
                else []
            )
    except sqlite3.DatabaseError as error:
        raise DataError(f"{path} is not an SQLite export of nsys: {error}") from error
    layers = _Ranges(ranges)
    return TensorCoreShare(
        tuple(Kernel(name, time, layers.at(launch, thread)) for name, time, launch, thread in rows)
    )


class _Ranges:
    """NVTX ranges by thread; ranges of one thread contain each other or are apart."""

    def __init__(self, rows: list[tuple[str, int, int, int]]) -> None:
        self.by_thread: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for text, start, end, thread in rows:
            self.by_thread[thread].append((start, end, text))
        for ranges in self.by_thread.values():
            ranges.sort()

    def at(self, moment: int | None, thread: int | None) -> str | None:
        """Return the innermost range of a thread at a moment."""
        if moment is None or thread is None:
            return None
        ranges = self.by_thread.get(thread, [])
        before = bisect_right(ranges, (moment, sys.maxsize))
        return next((text for _, end, text in reversed(ranges[:before]) if end >= moment), None)


def _by_name(kernels: tuple[Kernel, ...]) -> list[tuple[str, int, bool]]:
    times: dict[str, int] = defaultdict(int)
    for kernel in kernels:
        times[kernel.name] += kernel.nanoseconds
    longest = sorted(times.items(), key=lambda item: -item[1])
    return [(name, time, uses_tensor_cores(name)) for name, time in longest]


def _table(what: str, rows: list[tuple[str, int, bool]], total: int) -> Table:
    """Return the ten longest as a table of at most 80 columns."""
    cells = [
        [
            name if len(name) <= 44 else f"{name[:43]}…",
            f"{time / 1e6:.2f}",
            f"{time / total:.1%}",
            "yes" if used else "no",
        ]
        for name, time, used in rows[:10]
    ]
    return Table((what, "ms", "share", "Tensor Cores"), cells)
