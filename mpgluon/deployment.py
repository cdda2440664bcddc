"""After training: inference in 16 bits, and files that outlive the framework."""

from typing import Any

import mpgluon_tools.deployment as _home
from mpgluon_tools.deployment import *  # noqa: F403

__all__ = _home.__all__


def __getattr__(name: str) -> Any:
    return getattr(_home, name)
