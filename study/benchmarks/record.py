"""The record of a benchmark: one JSON file for a machine, written and read back.

Single times are kept. Medians, quartiles and ratios are written with them for readers of the
file, and are computed again when it is read. The output of contestants that failed is not
written: it contains names of folders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar, Union

from mpgluon.base.files import disk_error
from mpgluon.errors import DataError

from recipes.training.history import installed_versions
from study.benchmarks.machine import describe_machine, describe_source
from study.benchmarks.race import CaseResult, Conditions, Failure, Result

__all__ = ["BenchmarkRecord", "begin_record", "read_record", "write_record"]

_FORMAT = 1  # of the file: raise it when its names change


@dataclass(frozen=True)
class BenchmarkRecord:
    """The results of one run, and the machine and the source that they are of.

    Attributes
    ----------
    date : str
        When it began: UTC, ISO 8601.
    source : dict
        ``commit`` and ``has_changes``.
    machine : dict
        ``processor``, ``architecture``, ``cpu_flags``, ``instruction_set``, ``bfloat16`` ("native"
        or "emulated"), ``native_operators``, ``cores`` and ``gpus``.
    versions : dict
        Versions of Python and packages; PyTorch's if it took part.
    conditions : Conditions
    load_average : float
        Mean number of processes that were ready to run in the minute before it began; next to 0
        on a quiet machine.
    cases : list of CaseResult
    """

    date: str
    source: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    conditions: Conditions
    load_average: float
    cases: list[CaseResult] = field(default_factory=list)

    def with_case(self, case: CaseResult) -> BenchmarkRecord:
        """Return a record with one more case, and the versions that its contestants reported."""
        versions = dict(self.versions)
        for result in case.results:
            versions.update(result.facts.get("versions", {}))
        return replace(self, cases=[*self.cases, case], versions=versions)

    @property
    def failures(self) -> list[tuple[CaseResult, Failure]]:
        """The contestants without a result."""
        return [(case, failure) for case in self.cases for failure in case.failures]


def begin_record(conditions: Conditions) -> BenchmarkRecord:
    """Return a record of this machine with no cases yet."""
    load_average, *_ = os.getloadavg()  # before this starts processes itself
    return BenchmarkRecord(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        source=describe_source(),
        machine=describe_machine(),
        versions=installed_versions(),
        conditions=conditions,
        load_average=load_average,
    )


def write_record(record: BenchmarkRecord, path: Path) -> None:
    """Write a record as JSON; the folder is made.

    Raises
    ------
    DataError
        If the file cannot be written.
    """
    content = {"format": _FORMAT, **asdict(record)}
    for case, written in zip(record.cases, content["cases"]):
        for result, line in zip(case.results, written["results"]):
            relative = case.relative(result)
            line["time"] = result.time._asdict()
            line["relative"] = None if relative is None else relative._asdict()
            line["images_per_second"] = result.images_per_second
        for failure in written["failures"]:
            del failure["output"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise disk_error(error, path, "write the record again") from error


def read_record(path: Union[str, Path]) -> BenchmarkRecord:
    """Return the record that :func:`write_record` wrote.

    Raises
    ------
    DataError
        If the file cannot be read, or is not such a record.
    """
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != _FORMAT:
            raise DataError(
                f"{path} is a record of format {content['format']}, and this version reads "
                f"{_FORMAT}; run the benchmark again"
            )
        cases = [
            _build(
                CaseResult,
                case,
                results=[_build(Result, result) for result in case["results"]],
                failures=[Failure(**failure) for failure in case["failures"]],
            )
            for case in content["cases"]
        ]
        conditions = _build(Conditions, content["conditions"])
        return _build(BenchmarkRecord, content, conditions=conditions, cases=cases)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; write it with --output") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a record of a benchmark ({type(error).__name__}: {error}); write one "
            "with study/scripts/benchmark.py --output"
        ) from error


Kind = TypeVar("Kind")


def _build(kind: type[Kind], content: Mapping[str, Any], **parts: Any) -> Kind:
    """Return a data class from JSON and fields that are built already; other keys are ignored."""
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    return kind(**{**{name: content[name] for name in names}, **parts})
