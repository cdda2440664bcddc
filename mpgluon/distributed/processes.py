"""The processes of one job, as training sees them: who am I, how many are we, and our sums.

`OneProcess` is the ordinary case: alone, with nothing to wait for. The others are in
`mpgluon.distributed.mpi`. Code that takes a `Processes` need not know which it was given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Optional, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["OneProcess", "Processes"]

Value = TypeVar("Value")


class Processes(ABC):
    """The processes of a job; enter it with ``with`` before anything else is asked.

    What every process has to call, in the same order, is marked *together*. Such a call returns
    when all have made it.

    Attributes
    ----------
    rank, world_size : int
        Which process this is, of how many. Rank 0 writes files.
    local_rank, local_size : int
        Which one on this machine, of how many there.
    """

    rank = 0
    world_size = 1
    local_rank = 0
    local_size = 1

    def __enter__(self) -> Processes:
        return self

    @abstractmethod
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        """End the other processes too if this one has failed: they would wait for ever."""

    @abstractmethod
    def gather(self, value: Value, purpose: str) -> list[Value]:
        """Return the value of each process, by rank; together, and for small values.

        ``purpose`` says in words what for, and must be the same everywhere.

        Raises
        ------
        DistributedError
            If a process does not come in time, or comes for another purpose.
        """

    @abstractmethod
    def broadcast(self, value: Value, purpose: str) -> Value:
        """Return rank 0's value everywhere; together. Other values are not looked at."""

    @abstractmethod
    def sum_in_place(self, values: NDArray[Any], purpose: str) -> None:
        """Replace an array by its sum over all processes, in its own dtype; together.

        Every process gets the same bits. No roll is called before it: call `gather` first.
        """

    @abstractmethod
    def end_all(self, status: int) -> None:
        """End the other processes, which may be waiting for this one, and this one too.

        Alone, it does nothing.
        """

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone writes files."""
        return self.rank == 0

    def sum(self, numbers: Sequence[float], purpose: str) -> list[float]:
        """Return the sums of some numbers over all processes, in float64; together."""
        rows = self.gather(list(numbers), purpose)
        return [float(total) for total in np.sum(np.array(rows, dtype=np.float64), axis=0)]

    @contextmanager
    def one_per_machine_first(self, purpose: str) -> Iterator[None]:
        """Let one process of each machine do the block before the others do; together."""
        if self.local_rank:
            self.gather(None, purpose)
        yield
        if not self.local_rank:
            self.gather(None, purpose)


class OneProcess(Processes):
    """A job of one process; every answer is its own."""

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        """Do nothing: nobody waits."""

    def gather(self, value: Value, purpose: str) -> list[Value]:  # noqa: ARG002 - as in the class
        """Return the value in a list."""
        return [value]

    def broadcast(self, value: Value, purpose: str) -> Value:  # noqa: ARG002 - as in the class
        """Return the value."""
        return value

    def sum_in_place(self, values: NDArray[Any], purpose: str) -> None:
        """Leave the values as they are."""

    def end_all(self, status: int) -> None:
        """Do nothing: nobody waits."""
