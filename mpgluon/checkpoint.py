"""Checkpoints: everything that a training run depends on, in one file.

The layout of the file is decided in :mod:`mpgluon.archive`, and a Trainer's content of it in
:mod:`mpgluon.trainer.snapshot`. Data sets and loops put what they need into ``extra``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from mpgluon.archive import Arrays, read_archive, write_archive
from mpgluon.cast import fp32
from mpgluon.devices import from_numpy, to_numpy
from mpgluon.errors import CheckpointError
from mpgluon.fields import check_fields, is_text
from mpgluon.formats.float_format import FLOAT32, format_named, round_to
from mpgluon.random_states import random_states, set_random_states, validated_random_states
from mpgluon.scale_histories import (
    scale_histories,
    set_scale_histories,
    validated_scale_histories,
)
from mpgluon.trainer.masters import keep_masters
from mpgluon.trainer.snapshot import apply_trainer, export_trainer, validate_trainer

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = [
    "check_parameters",
    "load_checkpoint",
    "read_extra",
    "read_parameters",
    "save_checkpoint",
]

_logger = logging.getLogger(__name__)


def save_checkpoint(
    path: Union[str, Path], net: gluon.Block, trainer: gluon.Trainer, **extra: Any
) -> None:
    """Write parameters, optimizer state, scales, weight average and random states to one file.

    The file is written under another name in the same folder, flushed to the disk and renamed, so
    that a crash at any moment leaves either the old file or the new one. Waits for the device.
    MXNet does not expose the state of its random generators, so they receive a new seed, a number
    drawn from them that the file contains: this run and one that continues from the file draw the
    same numbers.
    Weights that are infinite or NaN are written too, and a warning is logged.

    Parameters
    ----------
    path : str or Path
        Usually ends in ``.npz``.
    net : gluon.Block
        With initialized parameters; plain, cast or autocast.
    trainer : gluon.Trainer
        With or without a loss scale.
    **extra
        Whatever else the run needs, as JSON can hold it: the epoch, the config.

    Raises
    ------
    CheckpointError
        If the disk is full or the folder cannot be written; an existing file stays as it was.
    TypeError
        If JSON cannot hold ``extra``.
    TrainerStateError
        If the Trainer's kvstore holds the optimizer's state (``update_on_kvstore``), if it has
        stepped before its network was cast, or if a `mpgluon.WeightAverage` is in the network.
    """
    path = Path(path)
    parameters = net._collect_params_with_prefix()
    mx.nd.waitall()  # a running inference may change the layout of a weight that is being read
    keep_masters(trainer)  # as the run does that goes on from the file
    state, state_arrays = export_trainer(trainer, parameters)
    arrays = _export_parameters(parameters)
    arrays.update({f"trainer/{name}": array for name, array in state_arrays.items()})
    arrays.update({f"scale_history/{k}": value for k, value in scale_histories(net).items()})
    grids = {}
    for name, parameter in parameters.items():
        value, fmt = fp32.known(parameter), fp32.format_of(parameter)
        if value is not None and f"{name}/master" not in state_arrays:
            value = fp32.fp32_value(parameter.list_data()[0], value, fmt)
            arrays[f"fp32/{name}"] = to_numpy(value)
        if fmt.name != np.dtype(parameter.dtype).name:
            grids[name] = fmt.name
    header = {"trainer": state, "random": random_states(), "grids": grids, "extra": extra}
    try:
        write_archive(path, header, arrays)
    except TypeError as error:
        raise TypeError(
            f"apart from its arrays a checkpoint keeps numbers, text, lists and dicts, and one of "
            f"{', '.join(extra)} is something else: {error}"
        ) from error
    computed = _without_constants(parameters, arrays)
    _warn_of_bad_weights(path, computed, "was written; keep an earlier one")


def load_checkpoint(
    path: Union[str, Path], net: gluon.Block, trainer: gluon.Trainer
) -> dict[str, Any]:
    """Bring a network, its Trainer and the random states back to where a file left them.

    A step in progress, with a scaled loss and no ``trainer.step`` yet, is discarded. Weights
    that are infinite or NaN are loaded as they are, and a warning is logged.

    Parameters
    ----------
    path : str or Path
        What :func:`save_checkpoint` wrote.
    net : gluon.Block
        Initialized, with the structure that it had then. Its cast may be another one: an FP32
        parameter takes the master of a float16 one, and the reverse, bit for bit.
    trainer : gluon.Trainer
        Made for ``net`` in the same way as then, its loss scale and `mpgluon.WeightAverage`
        included. If parameters are of another format than in the file, one of the two may have no
        loss scale or ``"none"``: the Trainer's own then stays as it is.

    Returns
    -------
    dict
        The ``extra`` of :func:`save_checkpoint`.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged, of another kind, or of another network or Trainer. All
        of it is read and compared before anything is changed.
    TrainerStateError
        If a `mpgluon.WeightAverage` is in the network.
    """
    path = Path(path)
    header, arrays = read_archive(path)
    header = {"grids": {}, **header}  # absent in files from before those
    try:
        check_fields(header, {"trainer": {}, "random": {}, "grids": {str: is_text}, "extra": {}})
        for grid in header["grids"].values():
            format_named(grid)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; use an earlier one") from error
    parameters = net._collect_params_with_prefix()
    values, fp32_values = _convert(path, parameters, arrays, header["grids"])
    check_parameters(path, parameters, values)
    try:
        plan = validate_trainer(
            trainer, parameters, header["trainer"], _part_of(arrays, "trainer"), fp32_values
        )
    except ValueError as error:
        raise CheckpointError(f"{path} belongs to another Trainer: {error}") from error
    known = {**_part_of(arrays, "fp32"), **fp32_values}
    planned = [
        _plan(path, parameters[name], name, value, known, arrays) for name, value in values.items()
    ]
    states = validated_random_states(path, header["random"])
    histories = validated_scale_histories(path, _part_of(arrays, "scale_history"))
    # From here on, nothing is refused.
    for parameter in planned:
        parameter.remember()
    apply_trainer(plan)  # which remembers masters instead
    for parameter in planned:
        parameter.set()
    set_scale_histories(net, histories)
    set_random_states(states)
    computed = _without_constants(parameters, arrays)
    _warn_of_bad_weights(path, computed, "was loaded; use an earlier one")
    extra: dict[str, Any] = header["extra"]
    return extra


def read_extra(path: Union[str, Path]) -> dict[str, Any]:
    """Return the ``extra`` of a checkpoint without loading it.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged or of another kind.
    """
    header, _ = read_archive(Path(path), only_header=True)
    try:
        check_fields(header, {"extra": {}})
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; use an earlier one") from error
    extra: dict[str, Any] = header["extra"]
    return extra


def read_parameters(path: Union[str, Path]) -> Arrays:
    """Return the parameters of a checkpoint by name, for evaluation and inference.

    Those are their averages if the file has them (`mpgluon.WeightAverage`), otherwise FP32 masters
    where it has those.

    If some are infinite or NaN, a warning is logged.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged or of another kind.
    """
    _, arrays = read_archive(Path(path))
    values = {
        name: arrays.get(f"trainer/{name}/average", _widest(name, arrays))
        for name in _part_of(arrays, "parameter")
    }
    _warn_of_bad_weights(Path(path), values, "was read; use an earlier one")
    return values


def check_parameters(
    path: Path, parameters: Mapping[str, gluon.Parameter], values: Mapping[str, Any]
) -> None:
    """Raise CheckpointError unless a file's arrays are exactly a network's parameters.

    Parameters
    ----------
    path : Path
        For the message, which names each difference in name, shape or dtype.
    parameters, values : mapping from name to Parameter, and to an array of any kind
    """
    problems = [f"{name} is missing in the file" for name in parameters if name not in values]
    problems += [f"{name} is in the file only" for name in values if name not in parameters]
    for name in [name for name in parameters if name in values]:
        found = (np.dtype(values[name].dtype).name, tuple(values[name].shape))
        wanted = (np.dtype(parameters[name].dtype).name, tuple(parameters[name].shape))
        if found != wanted:
            problems.append(f"{name} is {found} in the file and {wanted} in the network")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{path} does not fit this network: {'; '.join(problems[:5])}{more}")


def _warn_of_bad_weights(path: Path, values: Arrays, fate: str) -> None:
    """Log which parameters and running statistics of a file are infinite or NaN."""
    bad = [
        f"{name} ({'NaN' if np.isnan(value).any() else 'infinite'})"
        for name, value in values.items()
        if not np.isfinite(value).all()
    ]
    if bad:
        _logger.warning(
            "%s holds weights that are not finite, %s%s: a run that continues from it trains "
            "nothing; it %s",
            path,
            ", ".join(bad[:3]),
            f" and {len(bad) - 3} more" if len(bad) > 3 else "",
            fate,
        )


def _without_constants(parameters: Mapping[str, gluon.Parameter], arrays: Arrays) -> Arrays:
    """Return the parameters in a file that training changes; a constant mask may be infinite."""
    values = _part_of(arrays, "parameter")
    return {
        name: values[name]
        for name, parameter in parameters.items()
        if not isinstance(parameter, gluon.Constant)
    }


def _part_of(arrays: Arrays, kind: str) -> Arrays:
    """Return the arrays of a file of one kind, by the rest of their names."""
    return {
        name.removeprefix(f"{kind}/"): array
        for name, array in arrays.items()
        if name.startswith(f"{kind}/")
    }


def _widest(name: str, arrays: Arrays) -> Any:
    """Return a parameter's master, its FP32 value without one, or its value."""
    places = (f"trainer/{name}/master", f"fp32/{name}", f"parameter/{name}")
    return next(arrays[place] for place in places if place in arrays)


def _export_parameters(parameters: Mapping[str, gluon.Parameter]) -> Arrays:
    """Return the value of each parameter and, where devices differ, those of all of them too.

    They differ in BatchNorm's running statistics: each device has seen other images. Only then
    is the value their mean, which is not exact on three devices even if they agree.
    """
    arrays: Arrays = {}
    for name, parameter in parameters.items():
        copies = [to_numpy(data) for data in parameter.list_data()]
        arrays[f"parameter/{name}"] = copies[0]
        if any(copy.tobytes() != copies[0].tobytes() for copy in copies):
            arrays[f"parameter/{name}"] = to_numpy(parameter._reduce())
            arrays.update({f"replica/{device}/{name}": copy for device, copy in enumerate(copies)})
    return arrays


def _convert(
    path: Path,
    parameters: Mapping[str, gluon.Parameter],
    arrays: Arrays,
    grids: Mapping[str, str],
) -> tuple[Arrays, Arrays]:
    """Return a file's parameters in the formats of a network.

    Parameters
    ----------
    path, parameters, arrays
    grids : mapping from name to format
        Formats of the file's FP32 arrays that hold another format's numbers.

    Returns
    -------
    values, fp32_values : dict
        Values of all parameters, and FP32 values of parameters of another format in the file.
    """
    values, fp32_values = _part_of(arrays, "parameter"), {}
    formats = {"float16", "float32", *grids.values()}
    for name in parameters.keys() & values.keys():
        fmt = fp32.format_of(parameters[name])
        found = grids.get(name, values[name].dtype.name)
        if found == fmt.name or not {found, np.dtype(parameters[name].dtype).name} <= formats:
            continue
        widest = _widest(name, arrays)
        if widest.dtype.kind != "f":
            raise CheckpointError(
                f"{path} is damaged: the FP32 value of {name} is {widest.dtype}; use an earlier one"
            )
        wide = fp32_values[name] = widest.astype(np.float32)
        with np.errstate(over="ignore"):
            values[name] = round_to(wide, fmt).astype(parameters[name].dtype)
        if np.isinf(values[name]).sum() > np.isinf(wide).sum():
            raise CheckpointError(
                f"{path} does not fit this network: {name} has values beyond {fmt.max:g}, which "
                f"{fmt} does not hold; keep its block in FP32 with keep_fp32"
            )
    return values, fp32_values


class _ParameterPlan(NamedTuple):
    """The new values of one parameter."""

    parameter: gluon.Parameter
    value: NDArray
    replicas: list[Any]  # one for each device, where those differ
    fp32_value: Optional[NDArray]  # of a 16-bit parameter

    def remember(self) -> None:
        if self.fp32_value is not None:
            fp32.remember(self.parameter, self.fp32_value)

    def set(self) -> None:
        self.parameter.set_data(self.value)
        for data, replica in zip(self.parameter.list_data(), self.replicas):
            data[:] = replica


def _plan(
    path: Path, parameter: gluon.Parameter, name: str, value: Any, known: Arrays, arrays: Arrays
) -> _ParameterPlan:
    replicas: list[Any] = []
    while (place := f"replica/{len(replicas)}/{name}") in arrays:
        replicas.append(arrays[place])
    if len(replicas) != len(parameter.list_data()):
        replicas = []  # the file is from another number of devices
    wide = known.get(name, np.asarray(value, np.float32))
    in_file = arrays[f"parameter/{name}"].dtype
    expected = [("FP32", wide, np.float32), *(("replica", one, in_file) for one in replicas)]
    for kind, found, dtype in expected:
        if (found.shape, found.dtype) != (value.shape, dtype):
            raise CheckpointError(
                f"{path} is damaged: the {kind} value of {name} is {found.dtype} of shape "
                f"{found.shape}; use an earlier one"
            )
    fp32_value = None
    is_known = name in known or fp32.known(parameter) is not None
    if is_known and fp32.format_of(parameter) != FLOAT32:
        fp32_value = from_numpy(wide)
    return _ParameterPlan(parameter, from_numpy(value), replicas, fp32_value)
