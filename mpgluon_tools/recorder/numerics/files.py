"""The files of a recording: a folder with a file for each recorded step, and a line for each step.

``step-<number>.npz`` is a NumPy archive without pickles, whole or absent. Its arrays have a row for
each recorded tensor, in the order of the step:

- ``header``: UTF-8 text in JSON; ``tensors`` in it has a kind, name, call, format and shape each,
- ``counts``: numbers of the exponents from ``header["first_exponent"]`` on, without zeros,
- ``numbers``: zeros, infinities and NaN, largest finite size, sum of finite squares, elements,
- ``checksums``: of all bits, 64 bits each,
- ``samples``: 16 values, elements 0, n / 16, 2 n / 16, ...,
- ``array/<row>``, where whole arrays were asked for.

``steps.jsonl`` has a line in JSON for each step, also for those whose numbers were not recorded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from mpgluon.base.archive import Arrays, Kind, read_archive, write_archive
from mpgluon.base.files import atomic_write
from mpgluon.errors import CheckpointError
from mpgluon.formats.float_format import FloatFormat, format_named
from mpgluon.kernels.statistics import LENGTH, SAMPLES, Statistics

import numpy as np
import numpy.typing as npt

__all__ = [
    "KINDS",
    "NumericsStep",
    "Recording",
    "StepLines",
    "Tensor",
    "TensorName",
    "folder_of",
    "read_numerics",
    "recorded_steps",
    "step_path",
    "write_numerics",
]

NUMERICS = Kind("recording of numerics", 1)

KINDS = (
    *("input", "label", "weight", "master", "state"),
    *("activation", "loss", "activation gradient", "gradient", "running statistic", "update"),
)
"""The kinds of tensors, in the order of a step.

``weight`` is a value that the network computes with, running statistics too, ``master`` its FP32
value in the optimizer, ``state`` any other array of the optimizer: all before the step.
``gradient`` is a parameter's as the optimizer receives it, times the loss scale. ``running
statistic`` is one of a BatchNorm as the step leaves it. ``update`` is the difference that the step
makes: of the master, where there is one. A parameter that the step does not use has neither
gradient nor update.
"""

_EXPONENTS, _ZEROS = 256, 256  # of statistics.h
_FEWEST_UPDATES = 30  # that a share is computed of
_STEPS = "steps.jsonl"
_NO_JSON = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


class TensorName(NamedTuple):
    """The name of a tensor, which is its own within a step.

    Attributes
    ----------
    kind : str
        One of ``KINDS``.
    name : str
        The path of the layer in the network's structure, such as ``"features.0"``, of the
        parameter, ``"features.0.weight"``, or the number of the input.
    call : int
        From 0: which of the layer's results in this step.
    """

    kind: str
    name: str
    call: int = 0

    def __str__(self) -> str:
        again = f", call {self.call + 1}" if self.call else ""
        of = " " if self.kind in ("input", "label", "loss") else " of "
        return f"{self.kind}{of}{self.name}".rstrip() + again


@dataclass(frozen=True, eq=False)
class Tensor:
    """The recorded numbers of one tensor in one step.

    Attributes
    ----------
    id : TensorName
    format : str
        Name of the format of its values, such as ``"float16"``.
    shape : tuple of int
    statistics : Statistics
    block : str
        The class of the layer, of an activation or its gradient; otherwise empty.
    array : array, optional
        All values in FP32, where they were asked for.
    """

    id: TensorName
    format: str
    shape: tuple[int, ...]
    statistics: Statistics
    block: str = ""
    array: Optional[npt.NDArray[np.float32]] = None

    @property
    def float_format(self) -> FloatFormat:
        """The format; FP32 for integers."""
        try:
            return format_named(self.format)
        except ValueError:
            return format_named("float32")

    @property
    def checksum(self) -> int:
        """A number of 64 bits that changes with any bit of the values."""
        return self.statistics.checksum

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """All values, or the up to 16 that are always kept; shape (n,)."""
        return self.sample if self.array is None else self.array.ravel()

    @property
    def sample(self) -> npt.NDArray[np.float32]:
        """The up to 16 values that are always kept; shape (n,)."""
        places = np.arange(SAMPLES) * self.statistics.size // SAMPLES
        _, own = np.unique(places, return_index=True)
        values: npt.NDArray[np.float32] = self.statistics.sample[own]
        return values

    def share_below(self, limit: float) -> float:
        """Return the share of the nonzero finite numbers below a power of two."""
        counts = self.statistics.counts
        total = int(counts.sum())
        below = int(counts[: max(0, round(math.log2(limit)) + 127)].sum())
        return below / total if total else 0.0

    @property
    def underflow(self) -> float:
        """The share of the nonzero numbers that are subnormal in the format, and lose bits."""
        return self.share_below(self.float_format.smallest_normal)

    @property
    def overflow(self) -> float:
        """The share of all numbers that are infinite or NaN."""
        size = self.statistics.size
        return self.statistics.not_finite / size if size else 0.0


@dataclass(frozen=True, eq=False)
class NumericsStep:
    """The recorded numbers of one step.

    Attributes
    ----------
    number : int
        From 1; skipped steps count.
    line : mapping
        What ``steps.jsonl`` says of the step: loss, loss_scale, skipped, learning_rate,
        gradient_norm, flags.
    tensors : mapping from TensorName to Tensor
        In the order of ``KINDS``, and within a kind in the order of the step.
    about : mapping
        Versions, machine and settings of the recording process.
    """

    number: int
    line: Mapping[str, Any]
    tensors: Mapping[TensorName, Tensor]
    about: Mapping[str, Any] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[Tensor]:
        """Return the tensors of some kinds."""
        return [tensor for name, tensor in self.tensors.items() if name.kind in kinds]

    def lost_updates(self) -> dict[str, float]:
        """Return the share of each parameter's elements with a gradient that the step left alone.

        Parameters with fewer than 30 such elements, and skipped steps, are left out.
        """
        shares = {}
        for update in () if self.line.get("skipped") else self.of("update"):
            gradient = self.tensors.get(TensorName("gradient", update.id.name))
            if gradient is None:
                continue
            expected = gradient.statistics.size - gradient.statistics.zeros
            if expected >= _FEWEST_UPDATES:
                unchanged = update.statistics.zeros - gradient.statistics.zeros
                shares[update.id.name] = max(0.0, unchanged / expected)
        return shares

    def update_ratios(self) -> dict[str, float]:
        """Return the norm of each update, relative to the norm of the master or weight."""
        ratios = {}
        for update in self.of("update"):
            weights = (TensorName(kind, update.id.name) for kind in ("master", "weight"))
            weight = next((self.tensors[name] for name in weights if name in self.tensors), None)
            if weight is not None and weight.statistics.norm:
                ratios[update.id.name] = update.statistics.norm / weight.statistics.norm
        return ratios


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the file of a step."""
    return folder / f"step-{step:08d}.npz"


def write_numerics(folder: Path, step: NumericsStep) -> None:
    """Write the file of one step.

    Raises
    ------
    CheckpointError
        If the disk is full or the folder cannot be written.
    """
    tensors = list(step.tensors.values())
    numbers = np.array([t.statistics.numbers for t in tensors]).reshape(len(tensors), LENGTH)
    counts = numbers[:, :_EXPONENTS].astype(np.uint32)
    counts[:, 0] -= numbers[:, _ZEROS].astype(np.uint32)
    used = np.flatnonzero(counts[:, :-1].any(axis=0))
    first, end = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
    not_finite = counts[:, -1:].astype(np.float64)
    arrays: Arrays = {
        "counts": counts[:, first:end],
        "numbers": np.hstack([numbers[:, 256:257], not_finite, numbers[:, [257, 258, 261]]]),
        "checksums": np.array([t.checksum for t in tensors], dtype=np.uint64),
        "samples": np.array([t.statistics.sample for t in tensors], np.float32),
    }
    arrays.update({f"array/{row}": t.array for row, t in enumerate(tensors) if t.array is not None})
    header = {
        "step": step.number,
        "line": _portable(step.line),
        "first_exponent": first - 127,
        "tensors": [[*t.id, t.format, list(t.shape), t.block] for t in tensors],
        "about": step.about,
    }
    write_archive(step_path(folder, step.number), header, arrays, NUMERICS)


def _read_step(path: Path) -> NumericsStep:
    header, arrays = read_archive(path, kind=NUMERICS)
    try:
        counts, numbers, samples = arrays["counts"], arrays["numbers"], arrays["samples"]
        first = header["first_exponent"] + 127
        rows = np.zeros((len(counts), LENGTH))
        rows[:, first : first + counts.shape[1]] = counts
        rows[:, 0] += numbers[:, 0]
        rows[:, 255] = numbers[:, 1]
        rows[:, [256, 257, 258, 261]] = numbers[:, [0, 2, 3, 4]]
        checksums = arrays["checksums"].astype(np.uint64)
        rows[:, 259] = checksums & np.uint64(0xFFFFFFFF)
        rows[:, 260] = checksums >> np.uint64(32)
        rows[:, 262:] = samples
        tensors = {}
        for row, (kind, name, call, fmt, shape, block) in enumerate(header["tensors"]):
            key = TensorName(str(kind), str(name), int(call))
            statistics, array = Statistics(rows[row]), arrays.get(f"array/{row}")
            tensors[key] = Tensor(key, str(fmt), tuple(shape), statistics, str(block), array)
        line = _from_portable(header["line"])
        return NumericsStep(int(header["step"]), line, tensors, dict(header["about"]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__} {error}") from error


class StepLines:
    """The lines of ``steps.jsonl`` while a recording is written.

    Parameters
    ----------
    folder : Path
        Exists.
    first : int
        The number of the first step that is going to be added; lines from it on are dropped, as
        they happen again in a run that is continued.
    """

    def __init__(self, folder: Path, first: int) -> None:
        self._path = folder / _STEPS
        lines = [line for line in _lines_of(self._path) if line["step"] < first]
        with atomic_write(self._path) as file:
            file.writelines(f"{json.dumps(_portable(line))}\n".encode() for line in lines)

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line; raises OSError if it cannot be written."""
        with open(self._path, "a") as file:
            file.write(json.dumps(_portable(line)) + "\n")


def _lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that are complete; a killed process or a damaged disk leaves others."""
    if not path.exists():
        return
    for text in path.read_text("utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield _from_portable(line)


def _portable(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as strict JSON can hold them."""
    return {
        name: json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in line.items()
    }


def _from_portable(line: Mapping[str, Any]) -> dict[str, Any]:
    return {n: _NO_JSON.get(v, v) if isinstance(v, str) else v for n, v in line.items()}


@dataclass(frozen=True)
class Recording:
    """A folder that a recorder has written.

    Attributes
    ----------
    folder : Path
    numbers : sequence of int
        The steps whose numbers were recorded, oldest first.
    """

    folder: Path
    numbers: Sequence[int]

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The line of each step, oldest first: see `NumericsStep`."""
        return list(_lines_of(self.folder / _STEPS))

    def step(self, number: int) -> NumericsStep:
        """Read the numbers of a step.

        Raises
        ------
        CheckpointError
            If they were not recorded, or the file is damaged or of a newer version.
        """
        if number not in self.numbers:
            raise CheckpointError(
                f"step {number} was not recorded in {self.folder}; recorded were "
                f"{', '.join(map(str, self.numbers[:5]))}{', …' * (len(self.numbers) > 5)}"
            )
        return _read_step(step_path(self.folder, number))

    def __iter__(self) -> Iterator[NumericsStep]:
        return map(self.step, self.numbers)


def recorded_steps(folder: Path) -> list[int]:
    """Return the numbers of the steps that have a file, in order; none if there is no folder."""
    names = (file.stem.removeprefix("step-") for file in folder.glob("step-*.npz"))
    return sorted(int(name) for name in names if name.isdigit())


def folder_of(name: str) -> Path:
    """Return the folder of a recording; ``name`` may be the folder of its run."""
    folder = Path(name)
    return folder / "numerics" if (folder / "numerics").is_dir() else folder


def read_numerics(folder: Union[str, Path]) -> Recording:
    """Open the recording of a `NumericsRecorder`, also if its run goes on or was killed.

    Raises
    ------
    CheckpointError
        If no step is recorded there.
    """
    folder = Path(folder)
    numbers = recorded_steps(folder)
    if not numbers:
        raise CheckpointError(
            f"{folder} has no recorded step (step-*.npz); name the folder that was given to "
            "NumericsRecorder, or of train_caltech.py --record-numerics the folder numerics in "
            "--output-dir"
        )
    return Recording(folder, numbers)
