"""The effects of 16 bits on a network: what, where, and what to do about them.

Each name is imported when it is first used: the doctor must work where MXNet does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Batch": "observe",
    "ExponentRecorder": "exponents",
    "FlightRecorder": "flight_recorder",
    "OverflowLocator": "overflow",
    "alignment_report": "alignment",
    "batch_exponents": "exponents",
    "check_machine": "doctor",
    "check_network": "doctor",
    "check_training": "doctor",
    "compare_with_fp32": "compare",
    "diagnose": "report",
    "exponent_histogram": "exponents",
    "locate_overflow": "overflow",
    "range_report": "ranges",
    "replay": "rerun",
    "report_on_optimizer": "optimizers",
    "suggest_keep_fp32": "compare",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
