"""A benchmark's results in words: a table for each case, and what else is to be said."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Callable, Optional

from benchmarks.race import CaseResult, Result
from benchmarks.record import Record
from benchmarks.timing import Quartiles
from mpgluon.tables import Table

__all__ = ["case_report", "case_table", "duration", "failure_lines", "figures", "heading"]


def _carried_out(machine: Mapping[str, Any]) -> list[str]:
    """Return how 16 bits were carried out; earlier records do not say."""
    if "instruction_set" not in machine:
        return []
    return [
        f"oneDNN with {machine['instruction_set']}, bfloat16 {machine['bfloat16']}, "
        f"native operators {machine['native_operators']}"
    ]


def heading(record: Record) -> str:
    """Return what was measured on what, in a few lines."""
    machine, conditions = record.machine, record.conditions
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    commit = record.source["commit"]
    source = f"commit {commit[:10]}" if commit else "no commit known"
    lines = [
        f"{', '.join([machine['processor'], *machine['gpus']])}, {machine['cores']} cores, "
        f"{' '.join(machine['cpu_flags'])}",
        *_carried_out(machine),
        f"{versions}; {source}{' with changes' if record.source['has_changes'] else ''}; "
        f"{record.date}",
        f"{conditions.threads} threads each, {conditions.rounds} rounds after "
        f"{conditions.warm_up} that do not count",
    ]
    if record.load_average > 0.5:
        lines.append(
            f"the machine was busy: {record.load_average:.1f} processes wanted to run before this "
            "began; do not trust the seconds, and the ratios only as far as the quartiles go"
        )
    return "\n".join(lines)


def case_report(case: CaseResult) -> str:
    """Return a title, the table, notes and failures."""
    lines = [case.title]
    if case.results:
        lines.append(str(case_table(case)))
    lines += [
        f"{result.name}: {result.facts['note']}"
        for result in case.results
        if "note" in result.facts
    ]
    return "\n".join([*lines, *failure_lines(case)])


def failure_lines(case: CaseResult) -> list[str]:
    """Return why contestants have no result, with the last lines of what they printed."""
    lines = []
    for failure in case.failures:
        lines.append(f"no result for {failure.name}: it {failure.reason}")
        lines += [f"    {line}" for line in failure.output.splitlines()]
    return lines


def case_table(case: CaseResult) -> Table:
    """Return a row for each contestant.

    Quartiles follow each median. ``relative`` is the time of a run over the baseline's in the
    same round; below 1 is faster.
    """
    headings = ["", "seconds", "quartiles", "relative", "quartiles", "images/s", "peak MiB"]
    rows = [_row(case, result) for result in case.results]
    used = [column for column in range(len(headings)) if any(row[column] != "-" for row in rows)]
    return Table(
        [headings[column] for column in used], [[row[column] for column in used] for row in rows]
    )


def _row(case: CaseResult, result: Result) -> list[str]:
    relative = case.relative(result)
    speed = result.images_per_second
    memory = result.peak_memory_mib
    return [
        result.name,
        *_with_quartiles(result.time, figures),
        *_with_quartiles(relative, lambda ratio: f"{ratio:.3f}"),
        "-" if speed is None else figures(speed),
        "-" if memory is None else f"{memory:.0f}",
    ]


def _with_quartiles(
    value: Optional[Quartiles], in_words: Callable[[float], str]
) -> tuple[str, str]:
    if value is None:
        return "-", "-"
    return in_words(value.median), f"{in_words(value.lower)} to {in_words(value.upper)}"


def figures(value: float) -> str:
    """Return a positive number with three significant digits, or all before the point."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def duration(seconds: float) -> str:
    """Return a time in seconds, or in milliseconds if it is short."""
    return f"{figures(seconds)} s" if seconds >= 0.1 else f"{figures(1000 * seconds)} ms"
