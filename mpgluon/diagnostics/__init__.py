"""The effects of 16 bits on a network: what, where, and what to do about them.

Each name is imported when it is first used: the doctor must work where MXNet does not, and the
recorder, replay and report are tools.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Batch": "mpgluon.diagnostics.observe",
    "ExponentRecorder": "mpgluon.diagnostics.exponents",
    "FlightRecorder": "mpgluon.tools.recorder.flight_recorder",
    "NumericsRecorder": "mpgluon.tools.numerics.recorder",
    "OverflowLocator": "mpgluon.diagnostics.overflow",
    "alignment_report": "mpgluon.diagnostics.alignment",
    "batch_exponents": "mpgluon.diagnostics.exponents",
    "check_machine": "mpgluon.diagnostics.doctor",
    "check_network": "mpgluon.diagnostics.doctor",
    "check_training": "mpgluon.diagnostics.doctor",
    "compare_numerics": "mpgluon.tools.numerics.comparison",
    "compare_with_fp32": "mpgluon.diagnostics.compare",
    "diagnose": "mpgluon.tools.report",
    "exponent_histogram": "mpgluon.diagnostics.exponents",
    "locate_overflow": "mpgluon.diagnostics.overflow",
    "operator_formats": "mpgluon.diagnostics.called_operators",
    "range_report": "mpgluon.diagnostics.ranges",
    "read_numerics": "mpgluon.tools.numerics.files",
    "replay": "mpgluon.tools.recorder.rerun",
    "report_on_optimizer": "mpgluon.diagnostics.optimizers",
    "suggest_keep_fp32": "mpgluon.diagnostics.compare",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
