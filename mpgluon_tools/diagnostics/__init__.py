"""The effects of 16 bits on a network: what, where, and what to do about them.

Each name is imported when it is first used: the doctor must work where MXNet does not, and the
recorder, replay and report are tools.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Batch": "mpgluon_tools.diagnostics.observe",
    "ExponentRecorder": "mpgluon_tools.diagnostics.exponents",
    "FlightRecorder": "mpgluon_tools.recorder.steps.flight_recorder",
    "NumericsRecorder": "mpgluon_tools.recorder.numerics.recorder",
    "OverflowLocator": "mpgluon_tools.diagnostics.overflow",
    "alignment_report": "mpgluon_tools.diagnostics.alignment",
    "batch_exponents": "mpgluon_tools.diagnostics.exponents",
    "check_machine": "mpgluon_tools.diagnostics.doctor",
    "check_network": "mpgluon_tools.diagnostics.doctor",
    "check_training": "mpgluon_tools.diagnostics.doctor",
    "compare_numerics": "mpgluon_tools.recorder.numerics.comparison",
    "compare_with_fp32": "mpgluon_tools.diagnostics.compare",
    "diagnose": "mpgluon_tools.report",
    "exponent_histogram": "mpgluon_tools.diagnostics.exponents",
    "locate_overflow": "mpgluon_tools.diagnostics.overflow",
    "operator_formats": "mpgluon_tools.diagnostics.called_operators",
    "range_report": "mpgluon_tools.diagnostics.ranges",
    "read_numerics": "mpgluon_tools.recorder.numerics.files",
    "replay": "mpgluon_tools.recorder.steps.rerun",
    "suggest_keep_fp32": "mpgluon_tools.diagnostics.compare",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
