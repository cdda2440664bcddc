"""The processor of this machine, and with how many threads MXNet computes. It imports no MXNet."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

__all__ = [
    "computing_threads",
    "first_number",
    "have_hyperthreads",
    "parse_cpuinfo",
    "processor",
    "recorded_threads",
    "unasked_threads",
    "usable_cores",
    "use_every_core",
]

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_MOST_THREADS = 2**12  # that a file may ask for


def processor() -> tuple[str, frozenset[str]]:
    """Return the processor's name and instructions; empty if the system does not tell them."""
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text())
    except OSError:
        return "", frozenset()


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Return name and instructions of the first processor in the text of ``/proc/cpuinfo``."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    flags = values.get("flags", values.get("Features", ""))
    return values.get("model name", ""), frozenset(flags.split())


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def have_hyperthreads() -> bool:
    """Return whether some of the usable cores are two threads of one; False if nothing says so."""
    return 0 < _whole_cores() < usable_cores()


def _whole_cores() -> int:
    """Return how many usable cores there are without their hyperthreads; 0 if nothing says so."""
    try:
        return len({Path(_SIBLINGS.format(one)).read_text() for one in os.sched_getaffinity(0)})
    except (AttributeError, OSError):  # not Linux
        return 0


def use_every_core() -> None:
    """Make MXNet compute with all cores, unless ``OMP_NUM_THREADS`` is set; before its import.

    Unasked, it takes every second one for another core's hyperthread, and leaves it out. Processes
    that mpirun starts share the cores. Once MXNet is imported, its workers keep their number.
    """
    cores = _whole_cores()
    if cores and "mxnet" not in sys.modules:
        others = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))  # Open MPI's
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // others)))


def computing_threads() -> int:
    """Return with how many OpenMP threads MXNet computes, on which the order of its sums depends.

    It reads the environment when it is imported.
    """
    asked, most = (
        first_number(os.environ.get(name, ""))
        for name in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS")
    )
    cores = usable_cores()
    return asked or min(most, cores) or unasked_threads(cores, platform.machine())


def unasked_threads(cores: int, architecture: str) -> int:
    """Return how many of the cores MXNet uses unasked: on x86-64 it halves them."""
    return max(1, cores // 2) if architecture == "x86_64" else cores


def first_number(text: str) -> int:
    """Return the first number of a variable such as OMP_NUM_THREADS, 0 if it has none."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def recorded_threads(record: Mapping[str, Any]) -> Optional[int]:
    """Return with how many threads the process computed that wrote a record.

    None if it does not say so: mpgluon 0.2.0 wrote ``OMP_NUM_THREADS``, where that was set.
    """
    asked = dict(record.get("environment") or {}).get("OMP_NUM_THREADS", "")
    threads = dict(record.get("machine") or {}).get("threads") or first_number(str(asked))
    return threads if isinstance(threads, int) and 0 < threads <= _MOST_THREADS else None
