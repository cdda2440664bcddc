"""Starts a ps-lite job on this machine: a scheduler, a server and some workers.

    ps_lite_job.py WORKERS PROGRAM ARGUMENTS ...

The launcher in MXNet's wheel does not run on Python 3.9 and later.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Optional


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main(workers: int, *program: str) -> int:
    """Return the largest exit status of the workers; end the others with the first that fails."""
    common = {
        **os.environ, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": "1",
    }  # fmt: skip
    serve = [sys.executable, "-W", "ignore", "-c", "import mxnet"]  # does not return until the end
    servers = [
        subprocess.Popen(serve, env={**common, "DMLC_ROLE": role})
        for role in ("scheduler", "server")
    ]
    command = [sys.executable, "-W", "ignore", *program]
    ranks = [
        subprocess.Popen(command, env={**common, "DMLC_ROLE": "worker"}) for _ in range(workers)
    ]
    try:
        statuses: list[Optional[int]] = [None] * workers
        while None in statuses and not any(statuses):
            time.sleep(0.05)
            statuses = [rank.poll() for rank in ranks]
        return max(abs(status or 0) for status in statuses)
    finally:
        for process in (*ranks, *servers):
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
