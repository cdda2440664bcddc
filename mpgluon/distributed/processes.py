"""The processes of one job: their ranks, their exchanges and their devices.

`OneProcess` is the usual case, a process without others; `mpgluon.distributed.mpi` has several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional, TypeVar

from mpgluon.base.devices import parse_devices

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

__all__ = ["OneProcess", "Processes", "devices_of_process"]

Value = TypeVar("Value")


class Processes:
    """The processes of a job; a context manager that is entered before any other call.

    Calls marked *collective* are made by all processes in the same order, and return when all have
    made them. The methods of this class are for a process without others.

    Attributes
    ----------
    rank, world_size : int
        The rank of this process, and the number of processes. Rank 0 writes files.
    local_rank, local_size : int
        The same among the processes of this machine.
    """

    rank = 0
    world_size = 1
    local_rank = 0
    local_size = 1

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], traceback: Any) -> None:
        """Leave together; end the other processes if this one has failed: they would wait."""

    def gather(self, value: Value, purpose: str) -> list[Value]:  # noqa: ARG002 - for subclasses
        """Return the value of each process, by rank; collective, for small values.

        ``purpose`` describes the exchange, and must be the same on all processes.

        Raises
        ------
        DistributedError
            If a process is late or has left, or, on all of them, if one calls with another purpose.
        """
        return [value]

    def broadcast(self, value: Value, purpose: str) -> Value:  # noqa: ARG002 - for subclasses
        """Return rank 0's value on all processes; collective. Other values are ignored."""
        return value

    def sum_in_place(self, values: NDArray[Any], purpose: str) -> None:
        """Replace an array by its sum over all processes, in its own dtype; collective.

        All processes receive the same bits. Call `gather` first, which detects late processes.
        """

    def end_all(self, status: int) -> None:
        """End all processes of a job of several, this one included."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that writes files."""
        return self.rank == 0

    def sum(self, numbers: Sequence[float], purpose: str) -> list[float]:
        """Return the sums of numbers over all processes, in float64; collective."""
        rows = self.gather(list(numbers), purpose)
        return [float(total) for total in np.sum(np.array(rows, dtype=np.float64), axis=0)]

    def total(self, batch_size: int) -> int:
        """Return the batch size of all processes together, for ``trainer.step``; collective.

        Processes may have batches of different sizes: their gradients are then as for one batch.
        """
        return sum(self.gather(batch_size, "the batch sizes of a step"))

    @contextmanager
    def one_per_machine_first(self, purpose: str) -> Iterator[None]:
        """Run the block in one process of each machine before the others; collective."""
        if self.local_rank:
            self.gather(None, purpose)
        yield
        if not self.local_rank:
            self.gather(None, purpose)


class OneProcess(Processes):
    """A job of one process."""


def devices_of_process(text: str, processes: Processes) -> list[mx.Context]:
    """Return the devices of a process.

    Parameters
    ----------
    text : str
        As for `mpgluon.base.devices.parse_devices`; ``"gpu"`` is the GPU with the process's
        local rank.
    processes : Processes

    Raises
    ------
    ValueError
        If the text is wrong, or names the same GPUs for several processes of a machine.
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
