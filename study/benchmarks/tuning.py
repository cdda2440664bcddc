"""A log of tuning: images a second of a training from JPEG files, one measure on top of the other.

Each measure is a contestant with the settings of those before it, so the first is plain Gluon and
the last has all of them, but for those that a later one takes back. Each row is compared with
the row above.

References
----------
NVIDIA, "Mixed Precision Training of Deep Neural Networks", GTC 2018: AlexNet with MXNet, from 1,265
to 2,568 images a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from mpgluon_tools.tables import Table
from mpgluon_tools.timing import Quartiles, quartiles, ratios

from study.benchmarks.cases import CaseOptions
from study.benchmarks.contestant import Contestant
from study.benchmarks.race import Case, CaseResult

__all__ = ["MEASURES", "Gain", "gains", "tuning", "tuning_table"]

_BATCHES = 4  # of a pass
_STATIC = {"static_alloc": True, "static_shape": True}


@dataclass(frozen=True)
class _Settings:
    """The settings of a training that measures change."""

    hybridize: Optional[Mapping[str, bool]] = None
    all_threads: bool = False
    bound: bool = False
    workers: int = 0
    loss_scale: Optional[str] = None
    dtype: str = "float32"
    native: bool = True


# Names of measures and their settings. A name without a format keeps the format of the row above.
MEASURES: dict[str, dict[str, Any]] = {
    "plain Gluon, float32, 1 thread": {},
    "hybridize()": {"hybridize": {}},
    "static_alloc, static_shape": {"hybridize": _STATIC},
    "a thread for each core": {"all_threads": True},
    "threads bound to cores": {"bound": True},
    "processes that decode ahead": {"workers": 2},
    "one operator per update": {"loss_scale": "none"},
    "float16, MXNet's operators": {"dtype": "float16", "loss_scale": "dynamic", "native": False},
    "float16, native operators": {"native": True},
    "bfloat16 in its place": {"dtype": "bfloat16", "loss_scale": "none"},
}


def tuning(options: CaseOptions) -> list[Case]:
    """Return the log for AlexNet in batches of 32, or for each network and batch size of a list."""
    return [
        _case(model, batch, options)
        for model in options.models or ("alexnet",)
        for batch in options.batch_sizes or (32,)
    ]


def _case(model: str, batch_size: int, options: CaseOptions) -> Case:
    common = {
        "model": model,
        "batch_size": batch_size,
        "image_size": options.pixels,
        "batches": _BATCHES,
    }
    settings: dict[str, Any] = {}
    contestants = []
    for name, changes in MEASURES.items():
        if "workers" in changes:
            changes = {"workers": options.workers}
        settings |= changes
        contestants.append(_contestant(name, _Settings(**settings), common, options.images))
    title = (
        f"tuning of a training from JPEG files, {model}, batch {batch_size}, {options.pixels} px"
    )
    images = "rendered" if options.images is None else "photographs"
    return Case("tuning", title, contestants, {**common, "images": images, "device": "cpu"})


def _contestant(
    name: str, settings: _Settings, common: Mapping[str, Any], images: Optional[str]
) -> Contestant:
    environment = {} if settings.native else {"MPGLUON_NATIVE": "0"}
    if settings.bound:
        environment |= {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    own = {one: getattr(settings, one) for one in ("hybridize", "workers", "loss_scale", "dtype")}
    return Contestant(
        name,
        "study.benchmarks.workloads:training_from_files",
        {**common, **own, "images": images},
        threads=None if settings.all_threads else 1,
        environment=environment,
    )


@dataclass(frozen=True)
class Gain:
    """The speed of a measure, and the gain over the measure before it.

    Attributes
    ----------
    name : str
    images_per_second : Quartiles
    gain : Quartiles or None
        Speed relative to the row above in the same round; ``None`` for the first.
    """

    name: str
    images_per_second: Quartiles
    gain: Optional[Quartiles]

    @property
    def words(self) -> str:
        """The gain in words: a measure whose quartiles include 1 brings nothing."""
        if self.gain is None:
            return "-"
        if self.gain.lower <= 1 <= self.gain.upper:
            return "nothing"
        return f"{self.gain.median:.2f} times" + (", slower" if self.gain.median < 1 else "")


def gains(case: CaseResult) -> list[Gain]:
    """Return the measures that have a result, in their order."""
    found: list[Gain] = []
    before: Optional[Sequence[float]] = None
    for result in case.results:
        images = result.facts["images"]
        speed = quartiles([images / seconds for seconds in result.seconds])
        gain = None if before is None else quartiles(ratios(before, result.seconds))
        found.append(Gain(result.name, speed, gain))
        before = result.seconds
    return found


def tuning_table(case: CaseResult) -> Table:
    """Return a row for each measure, on top of those above it."""
    found = gains(case)
    base = found[0].images_per_second.median
    rows = [
        [
            one.name,
            f"{one.images_per_second.median:.1f}",
            f"{one.images_per_second.lower:.1f} to {one.images_per_second.upper:.1f}",
            one.words,
            f"{one.images_per_second.median / base:.2f}",
        ]
        for one in found
    ]
    return Table(["measure", "images/s", "quartiles", "it brings", "over the first"], rows)
