"""Starts a Slurm of one node on this machine, in a folder of its own, and ends it."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Callable

import pytest
from distributed_helpers import MARK, kill, processes_of

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo")
READY_WITHIN_S = 60
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=8
PartitionName=all Nodes=ALL Default=YES
"""


def find(program: str) -> str:
    """Return the path of a program, or skip the test."""
    path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if path is None:
        pytest.skip(f"{program} is not installed (Debian: slurm-wlm munge)")
    return path


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run the daemons, and yield the environment in which sbatch finds them.

    Everyone may enter ``folder``, which has a short path, as munge's socket needs. At the end no
    process is left of the daemons and of their jobs.
    """
    paths = {program: find(program) for program in PROGRAMS}
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key, config, host = folder / "key", folder / "slurm.conf", socket.gethostname()
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    values = {"host": host.partition(".")[0], "user": getpass.getuser(), "ports": _free_ports()}
    config.write_text(CONFIG.format(folder=folder, **values))
    mark = uuid.uuid4().hex
    environment = {**os.environ, "SLURM_CONF": str(config), MARK: mark}
    munged = [paths["munged"], "--foreground", "--force", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/{name}" for name in ("key", "pid", "log", "seed")]
    log = folder / "daemons.log"

    def start(*command: str) -> subprocess.Popen[bytes]:
        with open(log, "a") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    daemons = []
    try:
        daemons.append(start(*munged))
        _wait_until((folder / "munge.socket").exists, log)
        daemons.append(start(paths["slurmctld"], "-D"))
        daemons.append(start(paths["slurmd"], "-D", "-N", values["host"]))
        state = [paths["sinfo"], "--noheader", "--format=%T"]
        sinfo = {"env": environment, "capture_output": True, "check": False}
        _wait_until(lambda: b"idle" in subprocess.run(state, **sinfo).stdout, log)
        yield environment
    finally:
        kill(processes_of(mark))
        for daemon in daemons:
            daemon.wait()


def _free_ports() -> list[int]:
    with closing(socket.socket()) as one, closing(socket.socket()) as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return [one.getsockname()[1], other.getsockname()[1]]


def _wait_until(is_so: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while not is_so():
        if time.monotonic() > deadline:
            pytest.fail(f"Slurm did not start within {READY_WITHIN_S} s: {log.read_text()}")
        time.sleep(0.2)
