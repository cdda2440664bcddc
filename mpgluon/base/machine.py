"""The machine: its description in records, with the installed packages, and its memory."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from importlib import metadata
from typing import Any

from mpgluon.base.processor import computing_threads, processor

import mxnet as mx

__all__ = ["describe_machine", "give_memory_back", "installed_versions"]


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages on which results depend."""
    versions = {"python": platform.python_version(), "mxnet": mx.__version__}
    for name in ("mpgluon", "numpy", "pillow", "gluoncv"):
        with suppress(metadata.PackageNotFoundError):  # of an extra, or not installed by pip
            versions[name] = metadata.version(name)
    return versions


def describe_machine() -> dict[str, Any]:
    """Return the system, the processor and the numbers of its cores, of threads and of GPUs."""
    name, _ = processor()
    return {
        "system": platform.platform(),
        "processor": name or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": computing_threads(),
        "gpus": mx.context.num_gpus(),
    }


def give_memory_back() -> None:
    """Return the memory of former arrays to the system; glibc would keep it for new ones."""
    mx.nd.waitall()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
