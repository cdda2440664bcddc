"""Devices by name, as on a command line."""

from __future__ import annotations

import mxnet as mx

from mpgluon.errors import PrecisionError

__all__ = ["parse_devices"]


def parse_devices(text: str) -> list[mx.Context]:
    """Return the contexts that a text names.

    Parameters
    ----------
    text : str
        ``"cpu"``, ``"gpu"`` (the first one), or a list of numbers as in ``"gpu:0,1"``. Several
        CPU contexts, ``"cpu:0,1"``, share the processor; they are for tests.

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
            "GPUs; use --devices cpu, or install the extra mpgluon[cu117] on a machine with an "
            "NVIDIA GPU up to sm_89 (MXNet's wheels have no kernels for newer ones)"
        )
    return [mx.Context(kind, index) for index in indices]
