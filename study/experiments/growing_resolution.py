"""A GAN whose images grow: what its loss scales and its gradients do with the resolution."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Callable

from study.experiments import figures
from study.experiments.cells import number
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.photographs import mini_tree
from study.experiments.players import NAMES, cut_crops
from study.experiments.progressive_gan import ProgressiveSettings, train

__all__ = ["GROUP", "RUNS"]

_GROUP = "growing_resolution"
_FP32, _DYNAMIC = f"{_GROUP}/float32", f"{_GROUP}/float16"
# Static scales, each of both networks: the smaller of the medians of the dynamic ones at the first
# resolution, and the least of all dynamic ones.
_FITS_FIRST, _LEAST = 2.0**9, 2.0**4
_STATIC = {scale: f"{_GROUP}/static-{scale:g}" for scale in (_FITS_FIRST, _LEAST)}
RUNS = {
    _FP32: ProgressiveSettings(),
    _DYNAMIC: ProgressiveSettings(dtype="float16"),
    **{
        name: ProgressiveSettings(dtype="float16", static_scale=scale)
        for scale, name in _STATIC.items()
    },
}


def _run(settings: ProgressiveSettings, place: Place) -> Outcome:
    crops = cut_crops(mini_tree(place), settings, settings.pixels[-1])
    return train(settings, crops)


@dataclass(frozen=True)
class _GrowingResolution:
    """The runs that exist, and results computed from them; all but the table needs all of them.

    Two numbers in a cell are the generator's and the discriminator's, in this order.
    """

    records: Records
    settings = RUNS[_DYNAMIC]
    pixels = settings.pixels
    first, last = pixels[0], pixels[-1]
    fits_first, least = _STATIC

    def table(self) -> list[list[str]]:
        """Return the cells of the table of all runs that exist."""
        return [
            [
                name.split("/")[1],
                *(self._both(name, f"{pixels}_skipped_steps") for pixels in self.pixels),
                self._both(name, f"{self.last}_lost_at_scale", _per_million),
                self._both(name, f"{self.last}_loss", number),
                "yes" if self._is_finite(name) else "no",
                f"`{name}`",
            ]
            for name in RUNS
            if name in self.records
        ]

    def resolution_table(self) -> list[list[str]]:
        """Return the cells of the table with a row for each resolution."""
        return [
            [
                f"{pixels} px",
                self._both(_FP32, f"{pixels}_median_exponent", lambda one: f"2^{one}"),
                self._both(_FP32, f"{pixels}_lost", _per_million),
                self._both(_DYNAMIC, f"{pixels}_usual_scale", "{:g}".format),
                *(
                    self._both(name, f"{pixels}_skipped_steps")
                    for name in (_DYNAMIC, *_STATIC.values())
                ),
            ]
            for pixels in self.pixels
        ]

    def _both(self, name: str, what: str, show: Callable[[Any], str] = str) -> str:
        figures = self.records[name].outcome.figures
        return ", ".join(show(figures[f"{player}_{what}"]) for player in NAMES)

    def _is_finite(self, name: str) -> bool:
        figures = self.records[name].outcome.figures
        return all(figures[f"{player}_is_finite"] for player in NAMES)

    def of(self, player: str, pixels: int, what: str, run: str = "float32") -> Any:
        """Return a figure of one network at a resolution in one of the runs."""
        return self.records[f"{_GROUP}/{run}"].outcome.figures[f"{player}_{pixels}_{what}"]

    def skipped(self, scale: float, pixels: int) -> int:
        """Return the steps that the discriminator skipped with a static scale at a resolution."""
        return int(self.of("discriminator", pixels, "skipped_steps", self.run_of(scale)))

    @staticmethod
    def run_of(scale: float) -> str:
        """Return the name of the run with a static scale, without the group."""
        return _STATIC[scale].split("/")[1]

    @property
    def discriminator_stops(self) -> bool:
        """Whether the larger static scale ends the discriminator's training, and no other does."""
        every = self.settings.steps_per_resolution
        later = self.pixels[1:]
        lost = [
            self.of("generator", self.last, "lost", run)
            for run in ("float16", self.run_of(self.fits_first))
        ]
        return (
            self.skipped(self.fits_first, self.first) < every
            and all(self.skipped(self.fits_first, pixels) == every for pixels in later)
            and all(self.skipped(self.least, pixels) < every / 2 for pixels in later)
            and lost[0] < lost[1]
        )

    @property
    def shifts(self) -> bool:
        """Whether gradients become smaller with the resolution, and usual loss scales too."""
        lost = [self.of("discriminator", one, "lost") for one in self.pixels]
        medians = [self.of("discriminator", one, "median_exponent") for one in self.pixels]
        ends = [
            [self.of(player, one, "usual_scale", "float16") for one in (self.first, self.last)]
            for player in NAMES
        ]
        return (
            lost == sorted(lost)
            and medians == sorted(medians, reverse=True)
            and medians[0] > medians[-1]
            and all(last < first for first, last in ends)
        )

    @property
    def static_are_as_described(self) -> bool:
        """Whether the static scales are minima of the dynamic run's scales, as described."""
        usual = [self.of(player, self.first, "usual_scale", "float16") for player in NAMES]
        curves = self.records[_DYNAMIC].outcome.curves
        dynamic = [scale for player in NAMES for _, scale in curves[f"{player}_scale"]]
        return (self.fits_first, self.least) == (min(usual), min(dynamic))


def _per_million(share: float) -> str:
    return f"{1e6 * share:,.0f}"


def _draw(figure: Any, records: Records) -> None:
    fp32, fp16 = (records[name].outcome for name in (_FP32, _DYNAMIC))
    figures.draw_growing_resolution(figure, fp32, fp16, _GrowingResolution.pixels)


GROUP = Group(
    _GROUP,
    [
        Experiment(name, asdict(settings), partial(_run, settings), needs_photographs=True)
        for name, settings in RUNS.items()
    ],
    _GrowingResolution,
    {"growing-resolution": _draw},
)
