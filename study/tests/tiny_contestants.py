"""Contestants for tests: they need no library, and do next to nothing, or go wrong."""

import os
import signal
import sys
import time


def notes(path, letter, seconds=0.0, calls=1):
    """Append a letter to a file at each call."""

    def run():
        with open(path, "a") as file:
            file.write(letter)
        time.sleep(seconds)

    return run, {"images": 4, "calls": calls, "versions": {f"library-{letter}": "1.0"}}


def tells():
    """Describe its process."""
    variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: os.environ[name] for name in variables if name in os.environ}
    return (lambda: None), {"environment": environment, "pid": os.getpid(), "path": sys.path}


def takes_memory(mebibytes):
    return (lambda: bytearray(b"x") * (mebibytes * 2**20)), {}


def raises_at_once():
    sys.stderr.write("before it went wrong\n")
    raise ValueError("this cannot be prepared")


def raises(run_number):
    """Go wrong in a run."""
    runs = []

    def run():
        runs.append(None)
        if len(runs) == run_number:
            raise RuntimeError(f"went wrong in run {run_number}")

    return run, {}


def is_killed():
    return (lambda: os.kill(os.getpid(), signal.SIGKILL)), {}


def exits(status):
    return (lambda: os._exit(status)), {}


def hangs():
    return (lambda: time.sleep(600)), {}


def hangs_at_once():
    time.sleep(600)


def counts(multiply_adds, mebibytes):
    """Take time and memory as a network would."""

    def run():
        values = bytearray(b"x") * (mebibytes * 2**20)
        time.sleep(0.001)
        return values

    return run, {"images": 1, "multiply_adds": multiply_adds}
