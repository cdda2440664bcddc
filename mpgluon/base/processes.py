"""Run a command, and end whatever it has started if it must be ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Optional

__all__ = ["run_in_session"]

_PATIENCE_S = 5


def run_in_session(
    command: Sequence[str], limit: Optional[float], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own; return its status and its output as text.

    After ``limit`` seconds, and if an exception such as Ctrl-C ends the wait, all processes of the
    session end: by SIGINT, so that they remove their files, and after five seconds by SIGKILL.

    ``options`` go to :class:`subprocess.Popen`.

    Raises
    ------
    subprocess.TimeoutExpired
        If the command takes longer.
    OSError
        If the command cannot be run.
    """
    options = {"stdout": subprocess.PIPE, "text": True, "errors": "replace", **options}
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=limit)
        except BaseException:  # Ctrl-C too
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGINT)
                process.wait(_PATIENCE_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
