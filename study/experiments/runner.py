"""Running experiments: each in a process of its own, several at a time, resumable.

:func:`run_here` is the work of such a process; :func:`run_apart` starts them and sends the output
of each to a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable, Optional

from mpgluon.base.files import exclusive

from recipes.training.history import installed_versions
from study.benchmarks.machine import describe_machine, describe_source, usable_cores
from study.experiments.experiment import Experiment, Group, Place, Record, is_below

__all__ = ["Ended", "now", "run_apart", "run_here", "select"]

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ARITHMETIC = ("MXNET_SAFE_ACCUMULATION",)  # changes results; records are of MXNet's default
_GLANCE_S = 0.1
_PATIENCE_S = 60.0  # for a training step and a checkpoint after Ctrl-C
_TAIL_LINES = 12


@dataclass(frozen=True)
class Ended:
    """An experiment's process that has ended.

    Attributes
    ----------
    experiment : Experiment
    seconds : float
    reason : str or None
        Why there is no record; ``None`` if there is one.
    output : str
        The last lines that it printed.
    """

    experiment: Experiment
    seconds: float
    reason: Optional[str]
    output: str


def select(groups: Sequence[Group], names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of the given names, and those below them; all without names.

    Raises
    ------
    ValueError
        If a name fits none.
    """
    everything = [one for group in groups for one in group.experiments]
    prefixes = [name.rstrip("/") for name in names]
    for prefix in prefixes:
        if not any(is_below(one.name, prefix) for one in everything):
            raise ValueError(
                f"there is no experiment {prefix!r}; the groups are "
                f"{', '.join(group.name for group in groups)}, and `list` names all experiments"
            )
    return [
        one
        for one in everything
        if not prefixes or any(is_below(one.name, prefix) for prefix in prefixes)
    ]


def now() -> str:
    """Return the time in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def run_here(experiment: Experiment, place: Place, *, threads: int) -> Record:
    """Run an experiment in this process and return its record.

    Parameters
    ----------
    experiment : Experiment
    place : Place
        Its work folder is created.
    threads : int
        With how many threads OpenMP was started in this process.
    """
    place.work_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(place.work_dir.with_suffix(".lock")):  # of `run_beside` too
        began = time.perf_counter()
        outcome = experiment.run(place)
        seconds = time.perf_counter() - began
    source = describe_source("study/experiments")
    if seconds < outcome.times.get("training_seconds", 0.0):  # it was found, or continued
        source["of_an_earlier_run"] = True
    return Record(
        name=experiment.name,
        config=experiment.config,
        outcome=outcome,
        command=f"python study/scripts/evidence.py run {experiment.name}",
        threads=threads,
        seconds=seconds,
        date=now(),
        source=source,
        machine=describe_machine(),
        versions=installed_versions(),
    )


def run_apart(
    experiments: Sequence[Experiment],
    command: Callable[[Experiment], Sequence[str]],
    *,
    jobs: int,
    threads: int,
    logs: Path,
) -> Generator[Ended, None, None]:
    """Run each experiment in a process of its own, and yield them as they end.

    Those that need a quiet machine come last, one at a time, with a thread for each core. When
    the iterator is closed, by Ctrl-C too, the running processes are interrupted as by Ctrl-C, and
    have a minute to write a checkpoint to be resumed from.

    Parameters
    ----------
    experiments : sequence of Experiment
    command : callable
        Returns the command line that runs one.
    jobs : int
        How many run at a time.
    threads : int
        Threads of OpenMP for each.
    logs : Path
        A folder; the output of an experiment goes to ``NAME.log`` in it.
    """
    waiting = sorted(experiments, key=lambda one: one.needs_quiet)
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < (1 if waiting[0].needs_quiet else jobs):
                one = waiting.pop(0)
                own = usable_cores() if one.needs_quiet else threads
                running.append(_Running(one, command(one), own, logs / f"{one.name}.log"))
            time.sleep(_GLANCE_S)
            for process in [one for one in running if one.has_ended]:
                running.remove(process)
                yield process.ended()
    finally:
        for process in running:
            process.interrupt()
        for process in running:
            process.wait()


class _Running:
    """The process of an experiment."""

    def __init__(
        self, experiment: Experiment, command: Sequence[str], threads: int, log: Path
    ) -> None:
        self.experiment, self._log = experiment, log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in _ARITHMETIC}
        environment["PYTHONUNBUFFERED"] = "1"  # keeps the order of the two streams in the log
        environment.update(dict.fromkeys(_THREADS, str(threads)))
        self._began = time.perf_counter()
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches it once: from here
            )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ended(self) -> Ended:
        lines = self._log.read_text(errors="replace").splitlines()
        return Ended(
            self.experiment,
            time.perf_counter() - self._began,
            _reason(self._process.returncode),
            "\n".join([line for line in lines if line.strip()][-_TAIL_LINES:]),
        )

    def interrupt(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)

    def wait(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        with suppress(ProcessLookupError):  # the whole session has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _reason(status: int) -> Optional[str]:
    if status == 0:
        return None
    if status > 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}{', perhaps for lack of memory' * (name == 'SIGKILL')}"
