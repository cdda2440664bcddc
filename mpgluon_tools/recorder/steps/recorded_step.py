"""One recorded training step as a file: everything that a step needs, without pickles or code.

`mpgluon.diagnostics.FlightRecorder` writes it, and `mpgluon.diagnostics.replay` runs it again.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from mpgluon.base.archive import RECORDED_STEP, Arrays, read_archive, write_archive
from mpgluon.base.machine import describe_machine, installed_versions
from mpgluon.base.processor import recorded_threads
from mpgluon.cast.arrays import arrays_in
from mpgluon.checkpoint.random_states import RandomStates, validated_random_states
from mpgluon.checkpoint.scale_histories import validated_scale_histories
from mpgluon.errors import CheckpointError
from mpgluon.formats.loss_scale import StaticLossScale
from mpgluon.trainer.step import TrainerState
from mpgluon_tools.recorder.steps.recorded_network import NetworkSettings

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = [
    "GradientMark",
    "Part",
    "RecordedStep",
    "check_values",
    "fresh_gradients",
    "pack",
    "read_step",
    "write_step",
]

_MOST_DEVICES = 2**10
_REASONS = ("skipped", "loss")
_ENVIRONMENT = ("OMP_NUM_THREADS", "DNNL_MAX_CPU_ISA", "MPGLUON_NATIVE")  # and MXNet's


class GradientMark(NamedTuple):
    """Checksums of a gradient: of its bits, and of where it is not finite.

    All NaN count as one: their signs differ from run to run, with the places of arrays in memory.
    """

    bits: str
    pattern: str
    not_finite: int

    @classmethod
    def of(cls, gradient: npt.NDArray[Any], *, nan_bits: bool = False) -> GradientMark:
        """Return the mark of a gradient; with ``nan_bits`` as mpgluon 0.2.0 made it."""
        finite = np.isfinite(gradient)
        if not nan_bits:
            gradient = np.where(np.isnan(gradient), gradient.dtype.type(np.nan), gradient)
        bits, pattern = (
            hashlib.sha256(array.tobytes()).hexdigest() for array in (gradient, np.packbits(finite))
        )
        return cls(bits, pattern, int(finite.size - finite.sum()))


class Part(NamedTuple):
    """The share of one device in a forward pass."""

    inputs: tuple[Any, ...]
    labels: Any


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """A step that was skipped, or whose loss was not finite, as it was before it began.

    Parameters are named by their places in the network's structure. The file is one process's.
    """

    path: Path
    reason: str  # "skipped" or "loss"
    step: int  # of the Trainer, from 1; skipped ones count
    loss_scale: float
    network: Optional[str]  # the names of the code, see mpgluon_tools.recorder.steps.named
    loss: Optional[str]
    devices: int  # how many took part in the step
    processes: int
    reduced: bool  # whether gradients are sums over devices
    passes: tuple[tuple[Part, ...], ...]  # a part per device; several if gradients accumulated
    random_states: RandomStates  # before the first pass
    settings: NetworkSettings
    parameters: Arrays
    masters: Arrays  # FP32 values of the float16 parameters
    statistics: dict[str, list[npt.NDArray[Any]]]  # running ones before the step, by device
    scale_histories: Arrays  # largest values of earlier steps, for scales of eight-bit operands
    gradients: dict[str, list[GradientMark]]  # of the parameters that the step used, by device
    in_numpy: bool = False  # whether the network computes with MXNet's NumPy interface
    threads: Optional[int] = None  # that it was computed with; None: the file does not say so
    flags: tuple[str, ...] = ()  # a line for each layer; none in files of version 0.2.0
    versions: dict[str, Any] = field(default_factory=dict)  # of the recording process
    machine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def is_sum_over_processes(self) -> bool:
        """Whether ``gradients`` are sums over processes, which one file cannot reproduce."""
        return self.reduced and self.processes > 1

    def not_finite(self) -> list[str]:
        """Return the names of inputs and parameters that were not finite before the step began."""
        inputs = [
            f"input {number} of pass {count}"
            for count, parts in enumerate(self.passes, 1)
            for part in parts
            for number, value in enumerate(part.inputs)
            if not all(_is_finite(array.asnumpy()) for array in arrays_in(value))
        ]
        # Running statistics are not used in training, and may be infinite where no step is skipped.
        values = {**self.parameters, **self.masters}
        return inputs + [
            name
            for name, value in values.items()
            if name not in self.statistics and not _is_finite(value)
        ]


def write_step(path: Path, header: dict[str, Any], arrays: Arrays) -> None:
    """Write the header and the arrays that :func:`read_step` takes, and say where this was.

    Raises
    ------
    CheckpointError
        If the disk is full or the folder cannot be written.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or name.startswith("MXNET_")
    }
    place = {"versions": installed_versions(), "machine": describe_machine()}
    write_archive(path, {**header, **place, "environment": environment}, arrays, RECORDED_STEP)


def read_step(path: Union[str, Path]) -> RecordedStep:
    """Return a recorded step, of which every field was checked.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged, of another kind or version, or contradicts itself.
    """
    path = Path(path)
    header, arrays = read_archive(path, kind=RECORDED_STEP)
    try:
        return _step_of(path, header, arrays)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path} is damaged or was edited: {reason}") from error


def _step_of(path: Path, header: dict[str, Any], arrays: Arrays) -> RecordedStep:
    parts = {kind: _part_of(arrays, kind) for kind in ("parameter", "master")}
    passes = tuple(
        tuple(
            Part(_unpack_inputs(part["inputs"], arrays), _unpack(part["labels"], arrays))
            for part in one
        )
        for one in header["passes"]
    )
    devices = int(header["devices"])
    fit = all(1 <= len(one) <= devices <= _MOST_DEVICES for one in passes)
    if not passes or not fit:
        raise ValueError("its batches do not fit its devices")
    if header["reason"] not in _REASONS:
        raise ValueError(f"the reason is {header['reason']!r}")
    settings = NetworkSettings.from_dict(header["network_settings"])
    if settings.grad_req.keys() != parts["parameter"].keys():
        raise ValueError("parameters and their grad_req do not have the same names")
    statistics = {
        str(name): [arrays[f"statistics/{device}/{name}"] for device in range(devices)]
        for name in header["statistics"]
    }
    copies = [(name, copy) for name, values in statistics.items() for copy in values]
    for name, value in [*parts["master"].items(), *copies]:
        if value.shape != parts["parameter"][name].shape:
            raise ValueError(f"{name} has two shapes")
    return RecordedStep(
        path=path,
        reason=header["reason"],
        step=int(header["step"]),
        loss_scale=StaticLossScale(header["loss_scale"]).scale,
        network=_name(header["network"]),
        loss=_name(header["loss"]),
        devices=devices,
        processes=int(header["processes"]),
        reduced=bool(header["reduced"]),
        passes=passes,
        random_states=validated_random_states(header["random"]),
        settings=settings,
        parameters=parts["parameter"],
        masters=parts["master"],
        statistics=statistics,
        scale_histories=validated_scale_histories(_part_of(arrays, "scale_history")),
        gradients={
            str(name): [GradientMark(str(b), str(p), int(n)) for b, p, n in marks]
            for name, marks in dict(header["gradients"]).items()
        },
        in_numpy=bool(header.get("in_numpy", False)),
        threads=recorded_threads(header),
        flags=tuple(map(str, header.get("flags", ()))),
        versions=dict(header["versions"]),
        machine=dict(header["machine"]),
        environment=dict(header["environment"]),
    )


def fresh_gradients(net: gluon.Block, state: TrainerState) -> dict[str, list[npt.NDArray[Any]]]:
    """Return the gradients of the current step on each device, by name; waits for the devices."""
    written = state.gradients.written
    gradients = {}
    for name, parameter in net._collect_params_with_prefix().items():
        if parameter.grad_req == "null":
            continue
        pairs = list(zip(parameter.list_data(), parameter.list_grad()))
        if any(id(weight) in written or weight._fresh_grad for weight, _ in pairs):
            gradients[name] = [gradient.asnumpy() for _, gradient in pairs]
    return gradients


# --- inputs and labels: arrays in tuples and lists, and plain values


def check_values(what: str, value: Any) -> None:
    """Raise TypeError unless a value is an array that can be recorded, or consists of such."""
    if isinstance(value, (list, tuple)):
        for item in value:
            check_values(what, item)
    elif isinstance(value, NDArray):
        if value.stype != "default":
            raise TypeError(f"{what} can be recorded if dense, received a {value.stype} array")
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise TypeError(
            f"{what} can be recorded as NDArrays, numbers, text, and tuples or lists of them; "
            f"received {type(value).__name__}"
        )


def pack(value: Any, place: str, arrays: Arrays) -> dict[str, Any]:
    """Put the arrays of a value among ``arrays``, and return a description for JSON."""
    if isinstance(value, NDArray):
        arrays[place] = value.asnumpy()
        return {"array": place, "gradient": value.grad is not None}
    if isinstance(value, (list, tuple)):
        items = [pack(item, f"{place}/{number}", arrays) for number, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    return {"plain": value}


def _unpack(described: Mapping[str, Any], arrays: Arrays) -> Any:
    (kind,) = described.keys() - {"gradient"}
    content = described[kind]
    if kind == "array":
        array = mx.nd.array(arrays[content], dtype=arrays[content].dtype)
        if described["gradient"]:
            array.attach_grad()
        return array
    if kind in ("tuple", "list"):
        items = [_unpack(item, arrays) for item in content]
        return tuple(items) if kind == "tuple" else items
    if kind != "plain":
        raise ValueError(f"values of kind {kind!r} are unknown")
    return content


def _unpack_inputs(described: Mapping[str, Any], arrays: Arrays) -> tuple[Any, ...]:
    inputs = _unpack(described, arrays)
    if not isinstance(inputs, tuple) or not inputs or not isinstance(inputs[0], NDArray):
        raise ValueError("its inputs do not begin with an array")
    return inputs


def _is_finite(values: npt.NDArray[Any]) -> bool:
    return values.dtype.kind != "f" or math.isfinite(float(np.abs(values).max(initial=0)))


def _part_of(arrays: Arrays, kind: str) -> Arrays:
    start = f"{kind}/"
    return {n.removeprefix(start): value for n, value in arrays.items() if n.startswith(start)}


def _name(value: Any) -> Optional[str]:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} names no code")
    return value
