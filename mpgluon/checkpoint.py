"""Checkpoints: everything that a training run depends on, in one file.

The file is a NumPy ``.npz`` archive: arrays, and a header in JSON. Nothing in it is code, each
array carries a checksum, and it appears under its name only when it is complete on disk.
It knows nothing of data sets or of the loop: those put what they need into ``extra``.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Optional, Union

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon

from mpgluon.cast import fp32
from mpgluon.errors import CheckpointError
from mpgluon.files import sync_folder
from mpgluon.trainer.snapshot import export_trainer, has_master, import_trainer

__all__ = [
    "check_parameters",
    "load_checkpoint",
    "read_extra",
    "read_parameters",
    "save_checkpoint",
]

_FORMAT = "mpgluon checkpoint"
_VERSION = 2
_npy: Any = np.lib.format  # untyped in NumPy

Arrays = dict[str, npt.NDArray[Any]]


def save_checkpoint(
    path: Union[str, Path], net: gluon.Block, trainer: gluon.Trainer, **extra: Any
) -> None:
    """Write parameters, optimizer state, loss scale and random states to one file.

    The file is written under another name beside ``path``, flushed to the disk and renamed, so
    that a crash at any moment leaves either the old file or the new one. Waits for the device.
    MXNet does not tell the state of its random generators, so they are given a new seed, drawn from
    themselves, which the file keeps: this run and one that goes on from the file draw the same.

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
        If the Trainer's kvstore holds the optimizer's state (``update_on_kvstore``).
    """
    path = Path(path)
    parameters = net._collect_params_with_prefix()
    mx.nd.waitall()  # a running inference may change the layout of a weight that is being read
    arrays = _export_parameters(parameters)
    state, state_arrays = export_trainer(trainer, parameters)
    arrays.update({f"trainer/{name}": array for name, array in state_arrays.items()})
    for name, parameter in parameters.items():  # float16 without a master: frozen, for example
        value = fp32.known(parameter)
        if value is not None and f"{name}/master" not in state_arrays:
            arrays[f"fp32/{name}"] = value.asnumpy()
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "trainer": state,
        "random": {
            "python": random.getstate(),
            "numpy": _numpy_random_state(),
            "mxnet": _renew_mxnet_seed(),
        },
        "extra": extra,
    }
    try:
        text = json.dumps(header)
    except TypeError as error:
        raise TypeError(
            f"a checkpoint keeps numbers, text, lists and dicts beside its arrays, and one of "
            f"{', '.join(extra)} is something else: {error}"
        ) from error
    arrays["header"] = np.frombuffer(text.encode(), dtype=np.uint8)
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            _write(file, arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # it may be the folder that is missing
            part.unlink()
        raise CheckpointError(
            f"the checkpoint {path} could not be written: {error.strerror}; free space or choose "
            "another folder (an earlier checkpoint is still as it was)"
        ) from error


def load_checkpoint(
    path: Union[str, Path], net: gluon.Block, trainer: gluon.Trainer
) -> dict[str, Any]:
    """Bring a network, its Trainer and the random states back to where a file left them.

    A step that was begun, with a scaled loss and no ``trainer.step`` yet, is forgotten.

    Parameters
    ----------
    path : str or Path
        What :func:`save_checkpoint` wrote.
    net : gluon.Block
        As it was then: same structure, initialized. It may be cast otherwise: an FP32 parameter
        takes the master of a float16 one, and the other way round, bit for bit.
    trainer : gluon.Trainer
        Made for ``net`` in the same way as then, its loss scale included. If parameters are of
        another format than in the file, one of the two may have none or ``"none"``: the Trainer's
        own then stays as it is.

    Returns
    -------
    dict
        The ``extra`` of :func:`save_checkpoint`.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged, of another kind, or of another network or Trainer. All
        of it is read and compared before anything is changed.
    """
    path = Path(path)
    arrays = _read(path)
    header = _header(path, arrays)
    parameters = net._collect_params_with_prefix()
    values = {
        name.removeprefix("parameter/"): array
        for name, array in arrays.items()
        if name.startswith("parameter/")
    }
    fp32_values = _convert(path, parameters, values, arrays)
    check_parameters(path, parameters, values)
    trainer_arrays = {
        name.removeprefix("trainer/"): array
        for name, array in arrays.items()
        if name.startswith("trainer/")
    }
    try:
        apply_trainer = import_trainer(
            trainer, parameters, header["trainer"], trainer_arrays, fp32_values
        )
    except ValueError as error:
        raise CheckpointError(f"{path} belongs to another Trainer: {error}") from error
    apply_trainer()
    for name, parameter in parameters.items():
        parameter.set_data(mx.nd.array(values[name], dtype=values[name].dtype))
        _set_replicas(parameter, arrays, name)
        known = arrays.get(f"fp32/{name}", fp32_values.get(name))
        if known is None or np.dtype(parameter.dtype) != np.float16:
            continue
        if not has_master(trainer, parameter):  # which is its FP32 value otherwise
            fp32.remember(parameter, mx.nd.array(known))
    _set_random_states(header["random"])
    extra: dict[str, Any] = header["extra"]
    return extra


def read_extra(path: Union[str, Path]) -> dict[str, Any]:
    """Return the ``extra`` of a checkpoint without loading it.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged or of another kind.
    """
    path = Path(path)
    extra: dict[str, Any] = _header(path, _read(path, only="header"))["extra"]
    return extra


def read_parameters(path: Union[str, Path]) -> Arrays:
    """Return the parameters of a checkpoint by name; FP32 masters where it has them.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged or of another kind.
    """
    path = Path(path)
    arrays = _read(path)
    _header(path, arrays)
    parameters = {}
    for name, array in arrays.items():
        kind, _, parameter = name.partition("/")
        if kind == "parameter":
            master = arrays.get(f"trainer/{parameter}/master", arrays.get(f"fp32/{parameter}"))
            parameters[parameter] = array if master is None else master
    return parameters


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


def _export_parameters(parameters: Mapping[str, gluon.Parameter]) -> Arrays:
    """Return the value of each parameter and, where devices differ, those of all of them too.

    They differ in BatchNorm's running statistics: each device has seen other images. Only then
    is the value their mean, which is not exact on three devices even if they agree.
    """
    arrays: Arrays = {}
    for name, parameter in parameters.items():
        copies = [data.asnumpy() for data in parameter.list_data()]
        arrays[f"parameter/{name}"] = copies[0]
        if any(copy.tobytes() != copies[0].tobytes() for copy in copies):
            arrays[f"parameter/{name}"] = parameter._reduce().asnumpy()
            arrays.update({f"replica/{device}/{name}": copy for device, copy in enumerate(copies)})
    return arrays


def _convert(
    path: Path, parameters: Mapping[str, gluon.Parameter], values: Arrays, arrays: Arrays
) -> Arrays:
    """Turn values of a file into the formats of a network where those are float16 and FP32.

    Returns
    -------
    dict
        The FP32 values of the parameters that were of another format in the file.
    """
    fp32_values: Arrays = {}
    for name in parameters.keys() & values.keys():
        formats = (values[name].dtype.name, np.dtype(parameters[name].dtype).name)
        if formats == ("float16", "float32"):
            known = arrays.get(f"trainer/{name}/master", arrays.get(f"fp32/{name}"))
            fp32_values[name] = values[name].astype(np.float32) if known is None else known
            values[name] = fp32_values[name]
        elif formats == ("float32", "float16"):
            fp32_values[name] = values[name]
            with np.errstate(over="ignore"):
                values[name] = values[name].astype(np.float16)
            if np.isinf(values[name]).sum() > np.isinf(fp32_values[name]).sum():
                raise CheckpointError(
                    f"{path} does not fit this network: {name} has values beyond 65504, which "
                    "float16 does not hold; keep its block in FP32 with keep_fp32"
                )
    return fp32_values


def _set_replicas(parameter: gluon.Parameter, arrays: Arrays, name: str) -> None:
    """Give each device its own value again, if the file is from as many devices."""
    copies = [arrays[key] for key in arrays if re.fullmatch(rf"replica/\d+/{re.escape(name)}", key)]
    if len(copies) == len(parameter.list_data()):
        for data, copy in zip(parameter.list_data(), copies):
            data[:] = copy


def _write(file: IO[bytes], arrays: Arrays) -> None:
    """Write what ``np.savez`` does, which leaves its archive open when the disk is full."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                _npy.write_array(member, array, allow_pickle=False)


def _read(path: Path, only: Optional[str] = None) -> Arrays:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist() if only is None else [f"{only}.npy"]
            # Each member as a whole: its checksum is then compared before anything is parsed.
            return {
                name.removesuffix(".npy"): _npy.read_array(
                    io.BytesIO(archive.read(name)), allow_pickle=False
                )
                for name in members
            }
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}") from None
    # RuntimeError: a damaged entry can claim to be encrypted, or of a method unknown to zipfile.
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        RuntimeError,
        zipfile.error,
        zlib.error,
    ) as error:
        raise CheckpointError(
            f"{path} is damaged or no checkpoint ({error}); use an earlier one"
        ) from error


def _header(path: Path, arrays: Arrays) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json.loads(arrays["header"].tobytes())
        kind, version = header["format"], header["version"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} is no mpgluon checkpoint: it has no header") from None
    if kind != _FORMAT or version != _VERSION:
        raise CheckpointError(
            f"{path} is a {kind!r} of version {version}; this mpgluon reads version {_VERSION}"
        )
    return header


def _numpy_random_state() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    return {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}


def _renew_mxnet_seed() -> int:
    seed = int(mx.nd.random.randint(0, 2**31 - 1, shape=(1,)).asscalar())
    mx.random.seed(seed)
    return seed


def _set_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    mx.random.seed(states["mxnet"])
    state = states["numpy"]
    key = np.array(state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**state, "state": {**state["state"], "key": key}})
