"""A contestant, and the process in which it runs: starting it, running it once, ending it.

Each has a process of its own because ``mxnet.contrib.amp`` changes MXNet for good, because peers
need other interpreters, and because memory is counted by process. The process runs
:mod:`study.benchmarks.child`; :mod:`study.benchmarks.race` decides who runs when.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from mpgluon.errors import MpgluonError

from study.benchmarks import child

__all__ = ["Contestant", "ContestantError", "Process"]

_ROOT = str(Path(__file__).resolve().parents[2])  # what `import benchmarks` needs
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# By default OpenMP's idle threads poll for work for some milliseconds and then sleep. If they sleep
# at once, a training step is a fifth slower; if they never sleep, they take a core from the others.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_END_S = 10.0  # until a process that should end is killed
_POLL_S = 0.5  # between looks at a process that has died while others hold its pipe open
_TAIL_LINES = 12


class ContestantError(MpgluonError):
    """A contestant could not start, died, or did not answer in time.

    Attributes
    ----------
    output : str
        The last lines that it printed.
    """

    def __init__(self, reason: str, output: str) -> None:
        super().__init__(reason)
        self.output = output


@dataclass(frozen=True)
class Contestant:
    """A library and a format, and how to prepare their work.

    Attributes
    ----------
    name : str
    factory : str
        ``module:function`` or ``file.py:function``; see :mod:`study.benchmarks.child`.
    options : mapping
        Its keyword arguments, as JSON can hold them.
    python : str
        The interpreter.
    threads : int or None
        Threads of its process; ``None`` takes the number of all others.
    environment : mapping
        Variables of its process, in addition to the variables of this process.
    """

    name: str
    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    threads: Optional[int] = None
    environment: Mapping[str, str] = field(default_factory=dict)


class Process:
    """A contestant's process, a context manager.

    Parameters
    ----------
    contestant : Contestant
    threads : int
        With which it computes, unless the contestant says otherwise.
    limit_s : float
        Seconds for its start, and then for each run.

    Attributes
    ----------
    facts : dict
        The facts that its factory returned; empty until it is ready.
    imported_mib : float or None
        Its peak memory when its libraries were imported and nothing was prepared.

    Raises
    ------
    ContestantError
        If its interpreter cannot be started.
    """

    def __init__(self, contestant: Contestant, *, threads: int, limit_s: float) -> None:
        self.facts: dict[str, Any] = {}
        self.imported_mib: Optional[float] = None
        self._limit_s = limit_s
        self._unread = b""
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        environment = {name: text for name, text in os.environ.items() if name not in _WAITING}
        environment.update(dict.fromkeys(_THREADS, str(contestant.threads or threads)))
        if contestant.python == sys.executable:
            paths = [_ROOT, os.environ.get("PYTHONPATH")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment.update(contestant.environment)
        options = json.dumps(dict(contestant.options))
        try:
            self._process = subprocess.Popen(
                [contestant.python, child.__file__, contestant.factory, options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                env=environment,
                start_new_session=True,  # processes that it starts end with it
            )
        except OSError as error:
            self._printed.close()
            raise ContestantError(f"could not be started: {error}", "") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Wait until it is prepared.

        Raises
        ------
        ContestantError
            If it dies or takes too long.
        """
        answer = self._answer("to start")
        self.facts, self.imported_mib = answer["facts"], answer["imported_mib"]

    def run(self) -> dict[str, Any]:
        """Run the contestant's work once.

        Returns
        -------
        dict
            ``seconds``; ``peak_memory_mib`` so far, or ``None``; and ``idle_cpu_s``, the processor
            time that it used while it waited.

        Raises
        ------
        ContestantError
            If it dies or takes too long.
        """
        with suppress(BrokenPipeError):  # reading the answer says how it died
            self._requests.write(b"run\n")
            self._requests.flush()
        return self._answer("for a run")

    def close(self) -> None:
        """End the process, and kill what still runs of it. May be called again."""
        if self._printed.closed:
            return
        with suppress(BrokenPipeError):
            self._requests.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._kill()
        self._answers.close()
        self._printed.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self, purpose: str) -> dict[str, Any]:
        pipe = self._answers.fileno()
        deadline = time.monotonic() + self._limit_s
        while b"\n" not in self._unread:
            if select.select([pipe], [], [], _POLL_S)[0]:
                received = os.read(pipe, 2**16)
                if not received:
                    raise self._death()
                self._unread += received
            elif self._process.poll() is not None:
                raise self._death()
            elif time.monotonic() > deadline:
                self._kill()
                reason = f"took longer than {self._limit_s:g} s {purpose}"
                raise ContestantError(reason, self._tail())
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _death(self) -> ContestantError:
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            return ContestantError("closed its output without ending", self._tail())
        if status >= 0:
            return ContestantError(f"ended with status {status}", self._tail())
        name = signal.Signals(-status).name
        advice = ", perhaps for lack of memory" if name == "SIGKILL" else ""
        return ContestantError(f"was ended by {name}{advice}", self._tail())

    def _tail(self) -> str:
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-_TAIL_LINES:])
