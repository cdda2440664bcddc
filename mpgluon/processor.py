"""The processor of this machine, as the system describes it. It imports no MXNet."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["have_hyperthreads", "parse_cpuinfo", "processor", "usable_cores"]


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
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        cores = os.sched_getaffinity(0)
        return len({Path(siblings.format(one)).read_text() for one in cores}) < len(cores)
    except (AttributeError, OSError):
        return False
