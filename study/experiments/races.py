"""Races of the benchmark as experiments: all contestants have a result, and times for a record."""

from __future__ import annotations

from mpgluon.errors import MpgluonError

from study.benchmarks.race import Case, CaseResult, Conditions, Result, race

__all__ = ["complete_race", "times_of"]


def complete_race(case: Case, *, threads: int, rounds: int) -> CaseResult:
    """Return the result of a race.

    Raises
    ------
    MpgluonError
        If a contestant has none; the message has its last lines.
    """
    result = race(case, Conditions(threads=threads, rounds=rounds))
    if result.failures:
        reasons = (f"{one.name} {one.reason}\n{one.output}" for one in result.failures)
        raise MpgluonError(f"{case.title} was not measured: {'; '.join(reasons)}")
    return result


def times_of(result: CaseResult, one: Result, name: str) -> dict[str, float]:
    """Return median seconds, quartiles relative to the baseline, and peak memory, below a name."""
    relative = result.relative(one)
    assert relative is not None  # the baseline has not failed
    times = {
        f"{name}/seconds": one.time.median,
        f"{name}/relative": relative.median,
        f"{name}/relative_lower": relative.lower,
        f"{name}/relative_upper": relative.upper,
    }
    if one.peak_memory_mib is not None:
        times[f"{name}/peak_memory_mib"] = one.peak_memory_mib
    return times
