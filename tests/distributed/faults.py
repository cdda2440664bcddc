"""Things that go wrong in one process, and the moment at which they did."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable

FOR_EVER_S = 3600


def raise_error() -> None:
    raise RuntimeError("the roof is on fire")


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def ask_mpirun_to_stop() -> None:
    """Send mpirun, the parent of its processes on its own machine, a signal that it passes on."""
    os.kill(os.getppid(), signal.SIGUSR1)


KINDS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None, "kill": send(signal.SIGKILL), "terminate": send(signal.SIGTERM),
    "ask": ask_mpirun_to_stop, "stop": send(signal.SIGSTOP), "raise": raise_error,
    "exit": lambda: sys.exit(3), "exit with words": lambda: sys.exit("there are no images"),
    "hang": lambda: time.sleep(FOR_EVER_S),
}  # fmt: skip


def happen(kind: str, moment: Path) -> None:
    """Write down the moment, and let it happen."""
    moment.write_text(str(time.monotonic()))
    KINDS[kind]()


def seconds_after(moment: Path, ended: float) -> float:
    """Return how long a job went on after a fault."""
    return ended - float(moment.read_text())
