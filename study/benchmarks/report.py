"""A benchmark's results in words: a table for each case, notes and failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from statistics import geometric_mean
from typing import Callable, Optional

from mpgluon_tools.tables import Table
from mpgluon_tools.timing import Quartiles

from study.benchmarks.growth import growth
from study.benchmarks.memory import largest_batch, peaks_by_batch
from study.benchmarks.race import CaseResult, Result
from study.benchmarks.record import BenchmarkRecord
from study.benchmarks.tuning import tuning_table

__all__ = [
    "case_report",
    "case_table",
    "compared",
    "duration",
    "growth_table",
    "heading",
    "memory_table",
    "networks_table",
    "rounded",
]


def heading(record: BenchmarkRecord) -> str:
    """Return machine, versions, source and conditions in a few lines."""
    machine, conditions = record.machine, record.conditions
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    commit = record.source["commit"]
    source = f"commit {commit[:10]}" if commit else "no commit known"
    changes = " with changes" if record.source["has_changes"] else ""
    lines = [
        f"{', '.join([machine['processor'], *machine['gpus']])}, {machine['cores']} "
        f"core{'s' * (machine['cores'] > 1)}, "
        f"{' '.join(machine['cpu_flags'])}",
    ]
    if "instruction_set" in machine:  # which the first records lack
        lines.append(
            f"oneDNN with {machine['instruction_set']}, bfloat16 {machine['bfloat16']}, "
            f"native operators {machine['native_operators']}"
        )
    lines += [
        f"{versions}; {source}{changes}; {record.date}",
        f"{conditions.threads} thread{'s' * (conditions.threads > 1)} each, "
        f"{conditions.rounds} round{'s' * (conditions.rounds > 1)} after "
        f"{conditions.warm_up} that do not count",
    ]
    if record.load_average > 0.5:
        lines.append(
            f"the machine was busy: {record.load_average:.1f} processes were ready to run before "
            "this began; do not trust the seconds, and the ratios only as far as the quartiles go"
        )
    return "\n".join(lines)


def case_report(case: CaseResult) -> str:
    """Return a title, the table, the exponents of a sweep, notes and failures."""
    lines = [case.title]
    if case.results and case.name == "scale":
        lines.append(str(growth_table(case)))
        found = growth(case)
        exponents = {"time": found.time_exponent, "memory": found.memory_exponent}
        lines += [
            f"{cost} grows as the multiply-adds to the power of {exponent:.2f}"
            for cost, exponent in exponents.items()
            if exponent is not None
        ]
    elif case.results and case.name == "tuning":
        lines.append(str(tuning_table(case)))
    elif case.results:
        lines.append(str(case_table(case)))
    lines += [
        f"{result.name}: {result.facts['note']}"
        for result in case.results
        if "note" in result.facts
    ]
    for failure in case.failures:
        lines.append(f"no result for {failure.name}: it {failure.reason}")
        lines += [f"    {line}" for line in failure.output.splitlines()]
    return "\n".join(lines)


def case_table(case: CaseResult) -> Table:
    """Return a row for each contestant; columns that no contestant fills are left out.

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
    speed, memory = result.images_per_second, result.peak_memory_mib
    return [
        result.name,
        *_with_quartiles(result.time, rounded),
        *_with_quartiles(case.relative(result), _ratio),
        "-" if speed is None else rounded(speed),
        "-" if memory is None else f"{memory:.0f}",
    ]


def _with_quartiles(
    value: Optional[Quartiles], in_words: Callable[[float], str]
) -> tuple[str, str]:
    if value is None:
        return "-", "-"
    return in_words(value.median), f"{in_words(value.lower)} to {in_words(value.upper)}"


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def compared(cases: Sequence[CaseResult]) -> dict[str, dict[int, Quartiles]]:
    """Return the ratios of each contestant but the baseline, by the places of their cases.

    Cases without the baseline or the contestant are left out.
    """
    found: dict[str, dict[int, Quartiles]] = {}
    for place, case in enumerate(cases):
        for result in case.results:
            relative = case.relative(result)
            if result.name != case.baseline and relative is not None:
                found.setdefault(result.name, {})[place] = relative
    return found


def networks_table(cases: Sequence[CaseResult]) -> Table:
    """Return a row for each network, the baseline's time and the ratios of the others to it.

    Below are the geometric mean of the networks' medians and the largest, with its network.
    """
    found = compared(cases)
    rows = []
    for place, case in enumerate(cases):
        network = [str(case.settings[name]) for name in ("model", "batch_size", "image_size")]
        base = [one.time for one in case.results if one.name == case.baseline]
        cells = [_with_quartiles(base[0] if base else None, rounded)]
        cells += [_with_quartiles(ratios.get(place), _ratio) for ratios in found.values()]
        rows.append([*network, *(words for pair in cells for words in pair)])
    means, largest = ["geometric mean", *[""] * 4], ["largest", *[""] * 4]
    for ratios in found.values():
        medians = {place: ratio.median for place, ratio in ratios.items()}
        worst = max(medians, key=lambda place: medians[place])
        means += [_ratio(geometric_mean(medians.values())), f"of {len(medians)}"]
        largest += [_ratio(medians[worst]), cases[worst].settings["model"]]
    headings = ["network", "batch", "px", f"{cases[0].baseline} (s)", "quartiles"]
    headings += [words for name in found for words in (name, "quartiles")]
    return Table(headings, [*rows, means, largest])


def memory_table(cases: Sequence[CaseResult]) -> Table:
    """Return a row for each batch size: peaks, the same without the libraries, and their ratios.

    ``relative`` is the peak over the first contestant's. With a limit of memory the last row has
    the largest batches that fit, "-" for one that was not found.
    """
    found = peaks_by_batch(cases)
    base = next(iter(found.values()), {})
    sizes = sorted({batch for peaks in found.values() for batch in peaks})
    columns = [["batch", *map(str, sizes)]]
    for name, peaks in found.items():
        known = [peaks.get(batch) for batch in sizes]
        columns.append([f"{name} (MiB)", *("-" if p is None else f"{p.mib:.0f}" for p in known)])
        columns.append(["own", *("-" if p is None else f"{p.own_mib:.0f}" for p in known)])
        both = {batch: peaks[batch].mib / base[batch].mib for batch in peaks if batch in base}
        columns.append(["relative", *(_ratio(both[n]) if n in both else "-" for n in sizes)])
    limit = cases[0].settings["memory_limit_mib"]
    if limit is not None:
        columns[0].append(f"largest within {limit:.0f} MiB")
        for peaks, column in zip(found.values(), columns[1::3]):
            largest = largest_batch(peaks, limit)
            column.append("-" if largest is None else str(largest))
    headings, *rows = zip_longest(*columns, fillvalue="")
    return Table(headings, rows)


def growth_table(case: CaseResult) -> Table:
    """Return a row for each point of a sweep."""
    found = growth(case)
    memory = found.memory_mib or [math.nan] * len(found.seconds)
    rows = [
        [
            result.name,
            rounded(amount / 1e9),
            *_with_quartiles(result.time, rounded),
            rounded(amount / 1e9 / result.time.median),
            "-" if math.isnan(own) else f"{own:.0f}",
        ]
        for result, amount, own in zip(case.results, found.multiply_adds, memory)
    ]
    headings = ["", "10^9 multiply-adds", "seconds", "quartiles", "10^9 multiply-adds/s"]
    return Table([*headings, "own peak MiB"], rows)


def rounded(value: float) -> str:
    """Return a positive number with three significant digits, or all before the point."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def duration(seconds: float) -> str:
    """Return a time in seconds, or in milliseconds if it is short."""
    return f"{rounded(seconds)} s" if seconds >= 0.1 else f"{rounded(1000 * seconds)} ms"
