"""Devices by name, as on a command line, and copies between NumPy and MXNet.

MXNet copies 200,000 elements and more by OpenMP threads of the calling thread. Those stay with
the threads that compute, and where there are more of them than cores, GCC's runtime lets all of
them sleep between parallel loops: from the first large copy on, a step of a small network takes up
to 1.7 times as long. The functions here copy in parts.
"""

from __future__ import annotations

from typing import Any

from mpgluon.errors import PrecisionError

import mxnet as mx
import numpy as np
import numpy.typing as npt

__all__ = ["from_numpy", "parse_devices", "to_numpy"]

_PART = 100_000  # elements


def from_numpy(values: npt.NDArray[Any]) -> mx.nd.NDArray:
    """Return a copy on the CPU, of the same dtype, as ``mx.nd.array`` does."""
    array = mx.nd.empty(values.shape, ctx=mx.cpu(), dtype=values.dtype)
    whole, parts = values.reshape(-1), array.reshape((-1,))
    for start in range(0, whole.size, _PART):
        parts[start : start + _PART] = whole[start : start + _PART]
    return array


def to_numpy(array: mx.nd.NDArray) -> npt.NDArray[Any]:
    """Return a copy of an array's values, as ``array.asnumpy()`` does; waits for it."""
    on_cpu = array.ctx.device_type == "cpu" and array.stype == "default"
    if array.size <= _PART or not on_cpu:
        return np.asarray(array.asnumpy())
    whole, parts = np.empty(array.size, array.dtype), array.reshape((-1,))
    for start in range(0, array.size, _PART):
        whole[start : start + _PART] = parts[start : start + _PART].asnumpy()
    return whole.reshape(array.shape)


def parse_devices(text: str, option: str = "--devices") -> list[mx.Context]:
    """Return the contexts that a text names.

    Parameters
    ----------
    text : str
        ``"cpu"``, ``"gpu"`` (the first one), or a list of numbers as in ``"gpu:0,1"``. Several
        CPU contexts, ``"cpu:0,1"``, share the processor; they are for tests.
    option : str
        The option of the command line that has it, for messages.

    Raises
    ------
    ValueError
        If the text has another form or names a device twice.
    PrecisionError
        If it names a GPU that MXNet does not see.
    """
    kind, colon, numbers = text.partition(":")
    try:
        indices = [int(number) for number in (numbers if colon else "0").split(",")]
    except ValueError:
        indices = []
    if kind not in ("cpu", "gpu") or not indices or min(indices) < 0:
        raise ValueError(f'devices are "cpu", "gpu" or like "gpu:0,1"; received {text!r}')
    if len(set(indices)) < len(indices):
        raise ValueError(f"each device can be used once; received {text!r}")
    if kind == "gpu" and max(indices) >= (available := mx.context.num_gpus()):
        raise PrecisionError(
            f"{text!r} names gpu({max(indices)}), but this build of MXNet sees {available} "
            f"GPUs; use {option} cpu, or install the extra mpgluon[cu117] on a machine with an "
            "NVIDIA GPU up to sm_89 (MXNet's wheels have no kernels for newer ones)"
        )
    return [mx.Context(kind, index) for index in indices]
