"""Which devices a process uses."""

from __future__ import annotations

import mxnet as mx

from mpgluon.devices import parse_devices
from mpgluon.distributed.processes import Processes

__all__ = ["devices_of_process"]


def devices_of_process(text: str, processes: Processes) -> list[mx.Context]:
    """Return the devices that a text names, for one process of those on its machine.

    Parameters
    ----------
    text : str
        As for `mpgluon.devices.parse_devices`; ``"gpu"`` is the GPU with this process's local
        rank.
    processes : Processes

    Raises
    ------
    ValueError
        If the text is wrong, or gives the same GPUs to several processes.
    PrecisionError
        If it names a GPU that MXNet does not see.
    """
    shared = text.startswith("gpu:") and processes.local_size > 1
    devices = parse_devices(f"gpu:{processes.local_rank}" if text == "gpu" else text)
    if shared:
        raise ValueError(
            f"{text!r} would give the same GPUs to {processes.local_size} processes on one "
            'machine; use "gpu", which gives each process one, or one process per machine'
        )
    return devices
