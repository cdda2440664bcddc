"""The record of a benchmark: one JSON file for a machine, written and read back.

Single times are what is kept; medians, quartiles and ratios are written beside them for readers
of the file, and are computed again when it is read. What a contestant that failed has printed is
not written: it names folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional, TypeVar, Union

from benchmarks.machine import describe_machine, describe_source, load_average
from benchmarks.race import CaseResult, Conditions, Failure, Result
from benchmarks.timing import Quartiles
from mpgluon.errors import DataError
from mpgluon.files import disk_error
from mpgluon.training.history import installed_versions

__all__ = ["Record", "begin_record", "read_record", "write_record"]

_FORMAT = 1  # of the file: raise it when its names change


@dataclass(frozen=True)
class Record:
    """Everything that was measured in one run, and on what.

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
        Of Python and packages; PyTorch's if it took part.
    conditions : Conditions
    load_average : float
        How many processes wanted to run before it began; on a quiet machine next to none.
    cases : list of CaseResult
    """

    date: str
    source: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    conditions: Conditions
    load_average: float
    cases: list[CaseResult] = field(default_factory=list)

    def case(self, name: str, **settings: Any) -> CaseResult:
        """Return the case of a name whose settings include those given.

        Raises
        ------
        ValueError
            If there is none, or more than one.
        """
        found = [
            case
            for case in self.cases
            if case.name == name and settings.items() <= dict(case.settings).items()
        ]
        if len(found) != 1:
            known = ", ".join(f"{case.name} {dict(case.settings)}" for case in self.cases)
            raise ValueError(
                f"{len(found)} cases are called {name!r} with {settings}; the record has {known}"
            )
        return found[0]

    def with_case(self, case: CaseResult) -> Record:
        """Return a record with one more case, and the versions that its contestants told."""
        told = [result.facts.get("versions", {}) for result in case.results]
        versions = {
            name: version for each in (self.versions, *told) for name, version in each.items()
        }
        return replace(self, cases=[*self.cases, case], versions=versions)

    @property
    def failures(self) -> list[tuple[CaseResult, Failure]]:
        """The contestants without a result."""
        return [(case, failure) for case in self.cases for failure in case.failures]


def begin_record(conditions: Conditions) -> Record:
    """Return a record of this machine with no cases yet."""
    load = load_average()  # before anything is started to ask
    return Record(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        source=describe_source(),
        machine=describe_machine(),
        versions=installed_versions(),
        conditions=conditions,
        load_average=load,
    )


def write_record(record: Record, path: Path) -> None:
    """Write a record as JSON; the folder is made.

    Raises
    ------
    DataError
        If the file cannot be written.
    """
    content = {"format": _FORMAT, **asdict(record)}
    for case, written in zip(record.cases, content["cases"]):
        for result, line in zip(case.results, written["results"]):
            line["time"] = asdict(result.time)
            line["relative"] = _as_dict(case.relative(result))
            line["images_per_second"] = result.images_per_second
        for failure in written["failures"]:
            del failure["output"]  # which names folders of the machine
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise disk_error(error, path, "write the record again") from error


def _as_dict(relative: Optional[Quartiles]) -> Optional[dict[str, float]]:
    return None if relative is None else asdict(relative)


def read_record(path: Union[str, Path]) -> Record:
    """Return the record that :func:`write_record` wrote.

    Raises
    ------
    DataError
        If the file cannot be read, or is no such record.
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
        return _build(Record, content, conditions=conditions, cases=cases)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; write it with --output") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no record of a benchmark ({type(error).__name__}: {error}); write one with "
            "scripts/benchmark.py --output"
        ) from error


Kind = TypeVar("Kind")


def _build(kind: type[Kind], content: Mapping[str, Any], **parts: Any) -> Kind:
    """Return a data class from JSON; what it computes itself is left out."""
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    return kind(**{**{name: content[name] for name in names}, **parts})
