"""Peak memory of a training step against its batch size, and the largest batch within a limit.

Each point runs alone in a process of its own, as in :mod:`study.benchmarks.growth`. Its peak is the
resident memory of that process, as Linux counts it, with interpreter and libraries.

A batch fits if its measured peak is at most the limit. The search ends with two neighbours of which
one fits and the other does not. A limit enforced by the system would be a worse measure:
``RLIMIT_DATA`` and ``RLIMIT_AS`` count addresses that are reserved and not used, too, 0.6 to 0.7
and 1.3 to 1.4 GiB of them in a step of ResNet-50, and MXNet ends in a segmentation fault or in an
exception of one of its threads, so that a run that did not fit and one with another fault look
alike. Control groups count resident memory as this does, but need rights. Peaks of equal runs
differ by about a hundredth, and so do the batches found.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Callable, NamedTuple, Optional

from study.benchmarks.cases import CaseOptions, training_in_formats
from study.benchmarks.race import Case, CaseResult

__all__ = [
    "Peak",
    "largest_batch",
    "memory",
    "next_batch",
    "parse_memory",
    "peaks_by_batch",
    "with_largest_batches",
]

_MEMORY = Path("/proc/meminfo")
_UNITS = {"MiB": 1.0, "GiB": 2.0**10}


def parse_memory(text: str) -> float:
    """Return MiB from a number with a unit, such as ``8GiB``; ``type=parse_memory`` in argparse.

    Raises
    ------
    ArgumentTypeError
        If it has another form, is zero, or is more than is free: the search runs a training step
        on both sides of the limit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MiB|GiB)", text)
    limit = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not limit:
        raise argparse.ArgumentTypeError(f"must be such as 8GiB or 512MiB, received {text!r}")
    available = _available_mib()
    if available is None:
        raise argparse.ArgumentTypeError("memory is measured on Linux only")
    if limit > available:
        raise argparse.ArgumentTypeError(
            f"must be at most the free memory, {available:.0f} MiB, received {text!r}"
        )
    return limit


def _available_mib() -> Optional[float]:
    if not _MEMORY.exists():
        return None
    lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 2**10  # from KiB


def memory(options: CaseOptions) -> list[Case]:
    """Return the training step of a network with batches of several sizes, for its peak memory.

    Raises
    ------
    ValueError
        If the device is not a CPU: the process's memory does not include a GPU's.
    """
    if options.device != "cpu":
        raise ValueError(f"memory is measured on the CPU only, received --device {options.device}")
    cases = training_in_formats("memory", "peak memory of a training step", options, (8, 16, 32))
    limit = {"memory_limit_mib": options.memory_limit_mib}
    return [replace(case, settings={**case.settings, **limit}) for case in cases]


class Peak(NamedTuple):
    """The largest memory of a process in MiB, and the same without interpreter and libraries."""

    mib: float
    own_mib: float


def peaks_by_batch(cases: Iterable[CaseResult]) -> dict[str, dict[int, Peak]]:
    """Return the known peaks by contestant and, ascending, by batch size."""
    found: dict[str, dict[int, Peak]] = {}
    for case in sorted(cases, key=lambda case: int(case.settings["batch_size"])):
        for result in case.results:
            peak, imported = result.peak_memory_mib, result.imported_mib
            if peak is not None and imported is not None:
                of_one = found.setdefault(result.name, {})
                of_one[case.settings["batch_size"]] = Peak(peak, peak - imported)
    return found


def largest_batch(peaks: Mapping[int, Peak], limit_mib: float) -> Optional[int]:
    """Return the largest batch size whose peak is at most the limit.

    Returns
    -------
    int or None
        0 if not even one image fits; ``None`` if the next batch size has not been measured.
    """
    fitting = max((batch for batch, peak in peaks.items() if peak.mib <= limit_mib), default=0)
    return fitting if fitting + 1 in peaks else None


def next_batch(peaks: Mapping[int, Peak], limit_mib: float) -> int:
    """Return the batch size to measure next, if `largest_batch` of some peaks is not known yet.

    It is the one at which a line through two peaks reaches the limit: those on both sides of it,
    or the smallest and the largest that fit. It is at most twice the largest that fits, so no run
    takes more than about twice the limit.
    """
    known = {0: 0.0, **{batch: peak.mib for batch, peak in peaks.items()}}
    fitting = max(batch for batch, mib in known.items() if mib <= limit_mib)
    too_large = [batch for batch in known if batch > fitting]
    largest = min(too_large) - 1 if too_large else 2 * fitting
    below = min((batch for batch in peaks if batch != fitting), default=0)
    other = min(too_large, default=below)
    slope = (known[other] - known[fitting]) / (other - fitting)
    guess = math.floor(fitting + (limit_mib - known[fitting]) / slope) if slope > 0 else largest
    return min(max(guess, fitting + 1), largest)


def with_largest_batches(
    results: Iterable[CaseResult], options: CaseOptions, run: Callable[[Case], CaseResult]
) -> Iterator[CaseResult]:
    """Yield results of the cases of `memory`, then of a search for the largest batches.

    Parameters
    ----------
    results : iterable of CaseResult
    options : CaseOptions
        That the cases were made with; without a memory limit there is no search.
    run : callable
        Measures a case. A contestant that fails is not searched any further.
    """
    measured = []
    for result in results:
        measured.append(result)
        yield result
    limit = options.memory_limit_mib
    if limit is None:
        return
    for name, peaks in peaks_by_batch(measured).items():
        while largest_batch(peaks, limit) is None:
            (case,) = memory(replace(options, batch_sizes=[next_batch(peaks, limit)]))
            alone = [one for one in case.contestants if one.name == name]
            result = run(replace(case, contestants=alone))
            yield result
            if result.failures:
                break
            peaks.update(peaks_by_batch([result])[name])
