"""Records and repetitions as JSON files: written whole, read back, compared."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Optional

from mpgluon.base.files import atomic_write, disk_error
from mpgluon.errors import DataError

from study.experiments.experiment import Experiment, Outcome, Record

__all__ = [
    "Repetition",
    "add_repetition",
    "current_records",
    "first_difference",
    "processor_of",
    "read_records",
    "read_repetitions",
    "refuse_mixtures",
    "write_record",
]

_OUTCOME = [one.name for one in fields(Outcome)]


@dataclass(frozen=True)
class Repetition:
    """An experiment that was run again from scratch, and whether its record was reproduced.

    Attributes
    ----------
    name : str
    date : str
        ISO 8601, UTC.
    seed : int or None
        The seed of the random choice; ``None`` if the experiment was named.
    difference : str or None
        The first one, in words; ``None`` if every figure and every curve was the same.
    """

    name: str
    date: str
    seed: Optional[int]
    difference: Optional[str]


def write_record(record: Record, folder: Path) -> Path:
    """Write a record into the folder of records, and return its path.

    Raises
    ------
    ValueError
        If the outcome holds something that JSON cannot.
    DataError
        If the file cannot be written.
    """
    content = asdict(record)
    content.update(content.pop("outcome"))
    try:
        text = _to_json(content)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the outcome of {record.name} does not fit into JSON ({error}); it may hold strings, "
            "booleans, None, Python's own numbers, and None for values that are not finite"
        ) from error
    path = folder / f"{record.name}.json"
    _write(path, text)
    return path


def _to_json(content: Mapping[str, Any]) -> str:
    """Return an object with a line for each value, also in the objects that it holds."""
    lines = []
    for name, value in content.items():
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, dict) and value:
            inner = (
                f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in value.items()
            )
            text = "{\n" + ",\n".join(inner) + "\n }"
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise disk_error(error, path, "run it again") from error


def read_records(folder: Path) -> dict[str, Record]:
    """Return all records in a folder by name, in the order of their names; none if there is none.

    Raises
    ------
    DataError
        If a file is not a record.
    """
    paths = sorted(folder.glob("*/**/*.json"))  # a name has a slash; repeated.json has none
    return {record.name: record for record in map(_read_record, paths)}


def _read_record(path: Path) -> Record:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        outcome = Outcome(**{name: content.pop(name) for name in _OUTCOME})
        return Record(outcome=outcome, **content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a record of an experiment ({type(error).__name__}: {error}); delete it "
            "and run the experiment again"
        ) from error


def current_records(folder: Path, experiments: Sequence[Experiment]) -> dict[str, Record]:
    """Return the records in a folder whose config is the present one of their experiment."""
    found = read_records(folder)
    return {
        one.name: found[one.name]
        for one in experiments
        if one.name in found and found[one.name].config == json.loads(json.dumps(one.config))
    }


def processor_of(machine: Mapping[str, Any]) -> str:
    """Return a kind of processor in words; runs on two kinds add FP32 sums in different orders."""
    return f"{machine['processor']} ({' '.join(machine['cpu_flags'])})"


def refuse_mixtures(
    experiments: Iterable[Experiment],
    records: Mapping[str, Record],
    folder: Path,
    *,
    waiting: Collection[Experiment] = (),
    here: str = "",
) -> None:
    """Raise DataError if a block has, or would have, records from several kinds of processor.

    Parameters
    ----------
    experiments : iterable of Experiment
        All.
    records : mapping of str to Record
    folder : Path
        Folder of the records.
    waiting : collection of Experiment
        Those that will run. If there are any, no other block is looked at.
    here : str
        The kind of processor on which they will run.
    """
    kinds = {one.block: {here} for one in waiting}
    for one in experiments:
        if one.name in records and (not waiting or one.block in kinds):
            kinds.setdefault(one.block, set()).add(processor_of(records[one.name].machine))
    for block, found in kinds.items():
        if len(found) > 1:
            raise DataError(
                f"the records of {block} would be from {' and '.join(sorted(found))}, whose FP32 "
                f"sums differ; name others, delete {folder / block} to run all of it again on one "
                "of them, or give a folder of your own as --output"
            )


def first_difference(was: Outcome, now: Outcome) -> Optional[str]:
    """Return in words where two outcomes differ first, times apart; ``None`` if nowhere."""
    for kind in ("figures", "curves"):
        old, new = (json.loads(json.dumps(dict(getattr(one, kind)))) for one in (was, now))
        for name in dict.fromkeys([*old, *new]):
            if name not in old or name not in new:
                return f"{name} is in one of the two only"
            if old[name] == new[name]:
                continue
            if kind == "figures" or len(old[name]) != len(new[name]):
                return f"{name} was {_short(old[name])}, is {_short(new[name])}"
            at = next(i for i, (a, b) in enumerate(zip(old[name], new[name])) if a != b)
            return f"{name}[{at}] was {old[name][at]}, is {new[name][at]}"
    return None


def _short(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, list) else str(value)


def read_repetitions(folder: Path) -> list[Repetition]:
    """Return the repetitions that were made, oldest first."""
    path = folder / "repeated.json"
    if not path.exists():
        return []
    try:
        return [Repetition(**one) for one in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a list of repetitions ({error}); delete it") from error


def add_repetition(repetition: Repetition, folder: Path) -> None:
    """Add one to the list in the folder of records."""
    made = [*read_repetitions(folder), repetition]
    _write(folder / "repeated.json", json.dumps([asdict(one) for one in made], indent=1) + "\n")
