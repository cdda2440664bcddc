"""The processes that ``mpirun`` has started, with messages through mpi4py.

Every call that waits for other processes has a time limit, and its error names the late ones. They
are found by a roll call of two short messages per process: each process reports to rank 0 with the
purpose of its call, and rank 0 answers when all have reported, or one with another purpose: leaving
the ``with`` block is one. Bulk sums follow a roll call, and use MPI's algorithms.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import sys
import time
from typing import Any, Optional, TypeVar, Union

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
_LEAVING = "the end of the block of MpiProcesses"


class MpiProcesses(Processes):
    """The processes of an MPI job.

    An exception that leaves the ``with`` block is logged with the rank and ends all processes,
    since the others would wait for this one. A process that leaves it normally waits for the
    others, however long: if one still exchanges something, all raise DistributedError.

    Parameters
    ----------
    timeout : float
        Seconds without progress after which a call gives up and names the late processes. It must
        exceed the longest time between two exchanges on any process, such as the
        time to write a checkpoint.

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
                f"MPI cannot be used ({error}); install it with pip install 'mpgluon[mpi]', and "
                "start the processes with mpirun"
            ) from error
        self._mpi = MPI
        self._joined = MPI.COMM_WORLD.Dup()  # keeps other libraries' messages apart
        self.rank, self.world_size = self._comm.rank, self._comm.size
        machine = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = machine.rank, machine.size
        machine.Free()
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], traceback: Any) -> None:
        """Wait until all processes leave, or end all if this one has failed."""
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            try:
                self._gather(None, _LEAVING, math.inf)
                return
            except DistributedError as of_others:
                error = of_others
        if isinstance(error, SystemExit):
            status = error.code
            if not isinstance(status, int):
                # Words, which Python would print later.
                sys.stderr.write(f"rank {self.rank}: {status}\n")
                status = 1
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
        take_part = self._report if self.rank else self._call_roll
        answer = take_part(value, purpose, timeout)
        if isinstance(answer, str):
            raise DistributedError(answer)
        return answer

    def _call_roll(self, value: Value, purpose: str, timeout: float) -> Union[list[Value], str]:
        """Send all processes the values of all, or words if one is elsewhere; return the same."""
        comm, others = self._comm, range(1, self.world_size)
        requests = [comm.isend(None, rank, _NOTICE) for rank in others]
        came = {0: (purpose, value)}
        answer: Union[list[Value], str] = ""
        deadline = _Deadline(timeout)
        status = self._mpi.Status()
        while len(came) < self.world_size and not answer:
            message = comm.improbe(tag=_ARRIVAL, status=status)
            if message is not None:
                elsewhere, _ = came[status.source] = message.recv()
                if elsewhere != purpose:
                    answer = (
                        f"the processes are not at the same place. Rank 0: {purpose}; rank "
                        f"{status.source}: {elsewhere}. All must run the same program with the "
                        "same network, and take the same number of steps"
                    )
            elif deadline.passed():
                late = [rank for rank in range(self.world_size) if rank not in came]
                raise DistributedError(
                    f"{_ranks(late)} did not arrive within {timeout:g} s at: {purpose}. "
                    f"{_ranks(list(came))} waited there"
                )
        answer = answer or [came[rank][1] for rank in range(self.world_size)]
        requests += [comm.isend(answer, rank, _ANSWER) for rank in others]
        self._finish(requests)
        return answer

    def _report(self, value: Value, purpose: str, timeout: float) -> Union[list[Value], str]:
        """Report to rank 0, and return its answer."""
        arrival = self._comm.isend((purpose, value), 0, _ARRIVAL)
        self._receive(_NOTICE, timeout, purpose)
        # From here on rank 0 finds the late processes; it has twice as long.
        answer: Union[list[Value], str] = self._receive(_ANSWER, 2 * timeout, purpose)
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
