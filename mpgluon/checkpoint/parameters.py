"""The parameters' parts of a checkpoint: their values, and what 16-bit ones stand for in FP32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from mpgluon.base.archive import Arrays
from mpgluon.base.blocks import arrays_of, set_value, shape_of
from mpgluon.base.devices import from_numpy, to_numpy
from mpgluon.cast import fp32
from mpgluon.cast.given import warn_of_lost_values
from mpgluon.checkpoint.fields import Kind, Maybe, is_text
from mpgluon.checkpoint.saved import Apply, Content, Run
from mpgluon.errors import CheckpointError
from mpgluon.formats.float_format import FLOAT32, format_named, round_to
from mpgluon.updates import gluon_trainer

import mxnet as mx
import numpy as np
from mxnet import gluon

__all__ = [
    "FP32_FIELDS",
    "check_parameters",
    "completed",
    "converted",
    "export_fp32_values",
    "export_values",
    "is_possible_shape",
    "prepare_fp32_values",
    "prepare_values",
]


def _is_format(value: Any) -> bool:
    try:
        return is_text(value) and bool(format_named(value))
    except ValueError:
        return False


FP32_FIELDS: dict[str, Kind] = {"grids": Maybe({str: _is_format})}


def export_values(run: Run) -> Content:
    """Return the value of each parameter and, where devices differ, the values on all of them.

    They differ in BatchNorm's running statistics: each device has seen other images. Only then
    is the value their mean, which is not exact on three devices even if they agree.
    """
    values, replicas = {}, {}
    for name, parameter in run.parameters.items():
        copies = [to_numpy(data) for data in arrays_of(parameter)]
        values[name] = copies[0]
        if any(copy.tobytes() != copies[0].tobytes() for copy in copies):
            values[name] = to_numpy(parameter._reduce().as_nd_ndarray())
            replicas.update({f"{device}/{name}": copy for device, copy in enumerate(copies)})
    return Content({}, {"value": values, "replica": replicas})


def prepare_values(run: Run, saved: Content) -> Apply:
    """Check the replicas in a file, and return what puts the values of ``run`` in place.

    Raises
    ------
    ValueError
        If a replica has another shape or format than its parameter in the file.
    """
    planned = []
    for name, value in run.values.items():
        parameter, dtype = run.parameters[name], saved.arrays["value"][name].dtype
        replicas: list[Any] = []
        while (place := f"{len(replicas)}/{name}") in saved.arrays["replica"]:
            replicas.append(saved.arrays["replica"][place])
        if len(replicas) != len(parameter.list_data()):
            replicas = []  # the file is from another number of devices
        for replica in replicas:
            _check("replica", name, replica, value.shape, dtype)
        planned.append((parameter, from_numpy(value), replicas))

    def apply() -> None:
        for parameter, value, replicas in planned:
            set_value(parameter, value)
            for data, replica in zip(arrays_of(parameter), replicas):
                data[:] = replica

    return apply


def export_fp32_values(run: Run) -> Content:
    """Return the known FP32 values of 16-bit parameters, where no master in the file has them."""
    updater = gluon_trainer.updaters_of(run.trainer)[0]
    with_master = {run.names[index] for index in updater.states if index in run.masters}
    values, grids = {}, {}
    for name, parameter in run.parameters.items():
        value, fmt = fp32.known(parameter), fp32.format_of(parameter)
        if value is not None and name not in with_master:
            values[name] = to_numpy(fp32.fp32_value(parameter.list_data()[0], value, fmt))
        if fmt.name != np.dtype(parameter.dtype).name:
            grids[name] = fmt.name
    return Content({"grids": grids}, {"fp32": values})


def prepare_fp32_values(run: Run, saved: Content) -> Apply:
    """Check FP32 values, and return what lets parameters stand for them.

    To be applied before the optimizer's state, whose masters parameters stand for instead.

    Raises
    ------
    ValueError
        If one has another shape than its parameter, or is not FP32.
    """
    in_file, planned = {**saved.arrays["fp32"], **run.fp32_values}, []
    for name, value in run.values.items():
        parameter = run.parameters[name]
        wide = in_file.get(name, np.asarray(value, np.float32))
        _check("FP32", name, wide, value.shape, np.float32)
        is_known = name in in_file or fp32.known(parameter) is not None
        if is_known and fp32.format_of(parameter) != FLOAT32:
            planned.append((parameter, from_numpy(wide)))

    def apply() -> None:
        for parameter, value in planned:
            fp32.remember(parameter, value)

    return apply


def converted(
    path: Path,
    parameters: Mapping[str, gluon.Parameter],
    in_file: Arrays,
    widest: Arrays,
    grids: Mapping[str, str],
) -> tuple[Arrays, Arrays]:
    """Return a file's parameters in the formats of a network.

    Parameters
    ----------
    path : Path
        For messages.
    parameters : mapping from name to Parameter
    in_file, widest : dict from name to array
        The parameters in the file, and their FP32 values.
    grids : mapping from name to format
        Formats of the file's FP32 arrays that hold another format's numbers.

    Returns
    -------
    values, fp32_values : dict
        Values of all parameters, and FP32 values of parameters of another format in the file.

    Raises
    ------
    CheckpointError
        If the file is damaged, or has values that a format of the network does not hold.
    """
    values, fp32_values = dict(in_file), {}
    formats = {"float16", "float32", *grids.values()}
    for name in parameters.keys() & values.keys():
        fmt = fp32.format_of(parameters[name])
        dtype = grids.get(name, values[name].dtype.name)
        if dtype == fmt.name or not {dtype, np.dtype(parameters[name].dtype).name} <= formats:
            continue
        if widest[name].dtype.kind != "f":
            raise CheckpointError(
                f"{path} is damaged: the FP32 value of {name} is {widest[name].dtype}; use an "
                "earlier one"
            )
        wide = fp32_values[name] = widest[name].astype(np.float32)
        with np.errstate(over="ignore"):
            values[name] = round_to(wide, fmt).astype(parameters[name].dtype)
        if np.isinf(values[name]).sum() > np.isinf(wide).sum():
            raise CheckpointError(
                f"{path} does not fit this network: {name} has values beyond {fmt.max:g}, which "
                f"{fmt} does not hold; keep its block in FP32 with keep_fp32"
            )
        warn_of_lost_values({name: wide}, fmt, "keep its block in FP32 with keep_fp32")
    return values, fp32_values


@contextmanager
def completed(
    parameters: Mapping[str, gluon.Parameter], in_file: Mapping[str, Any]
) -> Iterator[None]:
    """Give parameters that wait for the first call the shapes of a file's arrays, and zeros.

    If the block raises an error, they wait as before.
    """
    waiting: dict[gluon.Parameter, tuple[Any, Any, Any]] = {}
    for name, parameter in parameters.items():
        if parameter._deferred_init and name in in_file:
            shape, new_shape = parameter._shape, in_file[name].shape
            if is_possible_shape(shape, new_shape):
                waiting[parameter] = (parameter._deferred_init, shape, new_shape)
    try:
        for parameter, ((_, devices, default, _), _, new_shape) in waiting.items():
            parameter._shape = new_shape
            parameter._deferred_init = (mx.init.Zero(), devices, default, None)
            parameter._finish_deferred_init()
        yield
    except BaseException:
        for parameter, (initialization, shape, _) in waiting.items():
            parameter._data = parameter._grad = None
            parameter._deferred_init, parameter._shape = initialization, shape
        raise


def is_possible_shape(shape: Optional[tuple[int, ...]], other: tuple[int, ...]) -> bool:
    """Whether a parameter's shape, of which all or a part may be unknown, may turn out as other."""
    return shape is None or (
        len(shape) == len(other) and all(n in (m, 0, -1) for n, m in zip(shape, other))
    )


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
        of_file = (np.dtype(values[name].dtype).name, tuple(values[name].shape))
        of_network = (np.dtype(parameters[name].dtype).name, shape_of(parameters[name]))
        if of_file != of_network:
            problems.append(f"{name} is {of_file} in the file and {of_network} in the network")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{path} does not fit this network: {'; '.join(problems[:5])}{more}")


def _check(kind: str, name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if (array.shape, array.dtype) != (shape, dtype):
        raise ValueError(f"the {kind} value of {name} is {array.dtype} of shape {array.shape}")
