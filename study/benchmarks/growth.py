"""How a training step grows: its time and memory against its arithmetic, in three sweeps.

Each point runs alone, so that the largest has the memory to itself. Points are therefore not
compared round by round: a machine that is busy for some of them bends the curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np

from study.benchmarks.cases import DTYPES, CaseOptions
from study.benchmarks.contestant import Contestant
from study.benchmarks.race import Case, CaseResult, Conditions, race

__all__ = ["Growth", "growth", "measure", "sweeps"]

# The option that varies: its name, its values, and the name of a point.
_SWEEPS: dict[str, tuple[str, Sequence[Any], str]] = {
    "batch size": ("batch_size", (1, 2, 4, 8, 16, 32, 64), "batch {}"),
    "image size": ("image_size", (32, 64, 96, 128, 160, 192, 224), "{} px"),
    "depth": ("model", tuple(f"resnet{layers}_v1" for layers in (18, 34, 50, 101, 152)), "{}"),
}


def sweeps(options: CaseOptions) -> list[Case]:
    """Return a case for each format and each of batch size, image size and depth.

    The others stay as in ``options``: the model, the first batch size (8 if there is none) and the
    image size.
    """
    batch, *_ = options.batch_sizes or (8,)
    middle = {"model": options.model, "batch_size": batch, "image_size": options.pixels}
    words = {"model": options.model, "batch_size": f"batch {batch}"}
    words["image_size"] = f"{options.pixels} px"
    cases = []
    for dtype in options.dtypes or DTYPES:
        common = {
            "library": "mpgluon",
            "dtype": dtype,
            "loss_scale": "dynamic" if dtype == "float16" else "none",
            "device": options.device,
            "counted": True,
        }
        for sweep, (option, values, name) in _SWEEPS.items():
            fixed = ", ".join(text for one, text in words.items() if one != option)
            points = [
                Contestant(
                    name.format(value),
                    "study.benchmarks.workloads:training",
                    {**common, **middle, option: value},
                )
                for value in values
            ]
            title = f"training step against {sweep}: {fixed}, {dtype}"
            settings = {"sweep": sweep, "fixed": fixed, "dtype": dtype, "device": options.device}
            cases.append(Case("scale", title, points, settings))
    return cases


def measure(case: Case, conditions: Conditions, *, progress: bool = False) -> CaseResult:
    """Run the contestants of a case one after the other; as `race`, but without a baseline."""
    parts = [
        race(replace(case, contestants=[one]), conditions, progress=progress)
        for one in case.contestants
    ]
    results = [result for part in parts for result in part.results]
    failures = [failure for part in parts for failure in part.failures]
    return CaseResult(case.name, case.title, dict(case.settings), "", results, failures)


@dataclass(frozen=True)
class Growth:
    """The points of a sweep.

    Attributes
    ----------
    multiply_adds : list of int
        Multiply-adds of a forward pass; a training step has three times as many.
    seconds : list of float
        Medians.
    memory_mib : list of float, or None
        Peaks without interpreter and libraries; ``None`` where they are not known.
    time_exponent, memory_exponent : float or None
        Exponent of the multiply-adds that fits best, by least squares in the logarithms; 1
        grows as the arithmetic does. ``None`` from fewer than two points.
    """

    multiply_adds: list[int]
    seconds: list[float]
    memory_mib: Optional[list[float]]
    time_exponent: Optional[float]
    memory_exponent: Optional[float]


def growth(case: CaseResult) -> Growth:
    """Return how a sweep's time and memory grow with its arithmetic."""
    multiply_adds = [result.facts["multiply_adds"] for result in case.results]
    seconds = [result.time.median for result in case.results]
    known = [
        result.peak_memory_mib - result.imported_mib
        for result in case.results
        if result.peak_memory_mib is not None and result.imported_mib is not None
    ]
    memory = known if len(known) == len(seconds) else None
    return Growth(
        multiply_adds,
        seconds,
        memory,
        _exponent(multiply_adds, seconds),
        None if memory is None else _exponent(multiply_adds, memory),
    )


def _exponent(amounts: Sequence[float], costs: Sequence[float]) -> Optional[float]:
    if len(set(amounts)) < 2:
        return None
    slope, _ = np.polyfit(np.log(np.array(amounts, float)), np.log(np.array(costs, float)), 1)
    return float(slope)
