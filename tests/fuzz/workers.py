"""Long-lived processes that run programs, each with its own settings of the processor."""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Any

__all__ = ["SETTINGS", "WorkerDiedError", "Workers"]

AVX2 = {"DNNL_MAX_CPU_ISA": "AVX2", "MPGLUON_NATIVE": "x86-64-v3"}
SETTINGS = {
    "native": {},
    "fall-back": {"MPGLUON_NATIVE": "0"},
    "AVX2": AVX2,
    "AVX2 fall-back": {**AVX2, "MPGLUON_NATIVE": "0"},
}
SETTINGS |= {
    f"{name}, unmerged": {**variables, "MXNET_ELIMINATE_COMMON_EXPR": "0"}
    for name, variables in SETTINGS.items()
}
"""The environment of each process; unmerged are equal operators on the same value."""

_SECONDS = 180  # a trial that takes longer hangs


class WorkerDiedError(Exception):
    """A process has ended, or has not answered, in the middle of a trial."""


def _serve(connection) -> None:
    """Run trials until the other end is closed."""
    from fuzz.properties import trial

    logging.getLogger("mpgluon").setLevel(logging.ERROR)  # many networks overflow in every step
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        connection.send(trial(*arguments))


class Workers:
    """One process for each of the settings, started when it is first needed."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Any, Any]] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_) -> None:
        for name in list(self._running):
            self._stop(name)

    def _start(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        before = dict(os.environ)
        os.environ.update({"OMP_NUM_THREADS": "1", **SETTINGS[name]})
        try:
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()
        self._running[name] = process, ours

    def _stop(self, name: str) -> None:
        process, connection = self._running.pop(name)
        connection.close()
        process.join(2)
        if process.is_alive():
            process.kill()
            process.join()

    def run(self, wanted: dict[str, tuple]) -> dict[str, Any]:
        """Run trials at the same time, each with the settings that its key names.

        A trial whose process dies or hangs gives a WorkerDiedError in place of a result. After
        that, and after an error, which may surface again in MXNet's next operator, a new process
        is started.
        """
        for name in wanted:
            if name not in self._running:
                self._start(name)
            self._running[name][1].send(wanted[name])
        found: dict[str, Any] = {}
        for name in wanted:
            process, connection = self._running[name]
            try:
                if not connection.poll(_SECONDS):
                    raise WorkerDiedError(f"no answer in {_SECONDS} s")
                found[name] = connection.recv()
                if found[name]["errors"]:
                    self._stop(name)
            except (EOFError, ConnectionError):
                process.join(5)
                found[name] = WorkerDiedError(f"the process has ended with {process.exitcode}")
                self._stop(name)
            except WorkerDiedError as error:
                found[name] = error
                self._stop(name)
        return found
