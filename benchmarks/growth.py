"""How a training step grows: its time and memory against its arithmetic, in three sweeps.

Each point runs alone, in a process of its own, so that the largest has the memory to itself.
Points are therefore not compared round by round: a machine that is busy for some of them bends
the curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np

from benchmarks.cases import Settings
from benchmarks.contestant import Contestant
from benchmarks.race import Case, CaseResult, Conditions, Result, race
from benchmarks.report import failure_lines, figures
from mpgluon.tables import Table

__all__ = [
    "BATCH_SIZES",
    "IMAGE_SIZES",
    "MODELS",
    "Growth",
    "growth",
    "growth_report",
    "growth_table",
    "measure",
    "sweeps",
]

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
IMAGE_SIZES = (32, 64, 96, 128, 160, 192, 224)
MODELS = tuple(f"resnet{layers}_v1" for layers in (18, 34, 50, 101, 152))


def sweeps(
    settings: Settings,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    image_sizes: Sequence[int] = IMAGE_SIZES,
    models: Sequence[str] = MODELS,
) -> list[Case]:
    """Return a case for each format and each of batch size, image size and depth.

    Parameters
    ----------
    settings : Settings
        What stays the same in the sweeps over something else: the model, the first batch size (8
        if there is none) and the image size.
    batch_sizes, image_sizes, models : sequence
        The points of the sweeps.
    """
    batch, *_ = settings.batch_sizes or (8,)
    middle = {"model": settings.model, "batch_size": batch, "image_size": settings.image_size}
    points: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "batch size": (
            f"{settings.model}, {settings.image_size} px",
            [{**middle, "batch_size": size} for size in batch_sizes],
        ),
        "image size": (
            f"{settings.model}, batch {batch}",
            [{**middle, "image_size": size} for size in image_sizes],
        ),
        "depth": (
            f"batch {batch}, {settings.image_size} px",
            [{**middle, "model": model} for model in models],
        ),
    }
    return [
        Case(
            "scale",
            f"training step against {sweep}: {fixed}, {dtype}",
            [_point(sweep, one, dtype, settings.device) for one in varied],
            {"sweep": sweep, "fixed": fixed, "dtype": dtype, "device": settings.device},
        )
        for dtype in settings.dtypes
        for sweep, (fixed, varied) in points.items()
    ]


def _point(sweep: str, options: dict[str, Any], dtype: str, device: str) -> Contestant:
    name = {
        "batch size": f"batch {options['batch_size']}",
        "image size": f"{options['image_size']} px",
        "depth": options["model"],
    }[sweep]
    loss_scale = "dynamic" if dtype == "float16" else "none"
    return Contestant(
        name,
        "benchmarks.workloads:training",
        {
            "library": "mpgluon",
            "dtype": dtype,
            "loss_scale": loss_scale,
            "device": device,
            "counted": True,
            **options,
        },
    )


def measure(case: Case, conditions: Conditions, *, progress: bool = False) -> CaseResult:
    """Run the contestants of a case one after the other, each alone.

    Parameters
    ----------
    case : Case
    conditions : Conditions
    progress : bool
        Show a progress bar for each on the standard error stream.

    Returns
    -------
    CaseResult
        Without a baseline.
    """
    parts = [
        race(replace(case, contestants=[one]), conditions, progress=progress)
        for one in case.contestants
    ]
    return CaseResult(
        case.name,
        case.title,
        dict(case.settings),
        baseline="",
        results=[result for part in parts for result in part.results],
        failures=[failure for part in parts for failure in part.failures],
    )


@dataclass(frozen=True)
class Growth:
    """How the points of a sweep lie.

    Attributes
    ----------
    multiply_adds : list of int
        Of a forward pass; a training step has three times as many.
    seconds : list of float
        Medians.
    memory_mib : list of float, or None
        Peaks, without what interpreter and libraries took; ``None`` where they are not known.
    time_exponent, memory_exponent : float or None
        Of the power of the multiply-adds that fits best, by least squares in the logarithms:
        1 is growth as that of the arithmetic, less is slower. ``None`` from fewer than two points.
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
    memory = [_own_memory(result) for result in case.results]
    known = None if None in memory else [value for value in memory if value is not None]
    return Growth(
        multiply_adds,
        seconds,
        known,
        _exponent(multiply_adds, seconds),
        None if known is None else _exponent(multiply_adds, known),
    )


def _own_memory(result: Result) -> Optional[float]:
    if result.peak_memory_mib is None or result.imported_mib is None:
        return None
    return result.peak_memory_mib - result.imported_mib


def _exponent(amounts: Sequence[float], costs: Sequence[float]) -> Optional[float]:
    if len(set(amounts)) < 2:
        return None
    slope, _ = np.polyfit(np.log(np.array(amounts, float)), np.log(np.array(costs, float)), 1)
    return float(slope)


def growth_table(case: CaseResult) -> Table:
    """Return a row for each point of a sweep."""
    found = growth(case)
    memory = ["-"] * len(found.seconds)
    if found.memory_mib is not None:
        memory = [f"{own:.0f}" for own in found.memory_mib]
    return Table(
        ("", "10^9 multiply-adds", "seconds", "quartiles", "10^9 multiply-adds/s", "own peak MiB"),
        [
            (
                result.name,
                figures(amount / 1e9),
                figures(result.time.median),
                f"{figures(result.time.lower)} to {figures(result.time.upper)}",
                figures(amount / 1e9 / result.time.median),
                own,
            )
            for result, amount, own in zip(case.results, found.multiply_adds, memory)
        ],
    )


def growth_report(case: CaseResult) -> str:
    """Return a title, the table, and the exponents; and the points without a result."""
    lines = [case.title]
    if case.results:
        lines.append(str(growth_table(case)))
        found = growth(case)
        for what, exponent in (
            ("time", found.time_exponent),
            ("memory", found.memory_exponent),
        ):
            if exponent is not None:
                lines.append(f"{what} grows as the multiply-adds to the power of {exponent:.2f}")
    return "\n".join([*lines, *failure_lines(case)])
