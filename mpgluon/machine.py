"""What a record says of the machine and of the installed packages."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import mxnet as mx

from mpgluon.processor import processor

__all__ = ["describe_machine", "installed_versions"]


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages on which results depend."""
    packages = ("mpgluon", "numpy", "pillow", "gluoncv")
    found = {name: metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "mxnet": mx.__version__, **found}


def describe_machine() -> dict[str, Any]:
    """Return the system, the processor and the numbers of its cores and of GPUs."""
    name, _ = processor()
    return {
        "system": platform.platform(),
        "processor": name or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpus": mx.context.num_gpus(),
    }
