"""The effects of 16 bits on a network: what, where, and what to do about them."""

from typing import Any

import mpgluon_tools.diagnostics as _home

__all__ = _home.__all__


def __getattr__(name: str) -> Any:
    return getattr(_home, name)
