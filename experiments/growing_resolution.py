"""A GAN whose images grow: what its loss scales and its gradients do with the resolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Optional

from experiments import figures
from experiments.cells import number, percent
from experiments.experiment import Experiment, Group, Outcome, Place, Records
from experiments.photographs import mini_tree
from experiments.players import NAMES, cut_crops, unpack
from experiments.progressive_gan import ProgressiveSettings, train

__all__ = ["GROUP", "RUNS"]

_GROUP = "growing_resolution"
_FP32, _DYNAMIC = f"{_GROUP}/float32", f"{_GROUP}/float16"
# Static scales, each of both networks: the smaller median of the dynamic scales at the first
# resolution, and the least of all dynamic scales after the first resolution had begun.
_STATIC = {f"{_GROUP}/static-{scale:g}": scale for scale in (2.0**9, 2.0**4)}
RUNS = {
    _FP32: ProgressiveSettings(),
    _DYNAMIC: ProgressiveSettings(dtype="float16"),
    **{
        name: ProgressiveSettings(dtype="float16", static_scale=scale)
        for name, scale in _STATIC.items()
    },
}


def _run(settings: ProgressiveSettings, place: Place) -> Outcome:
    crops = cut_crops(mini_tree(place), settings, settings.pixels[-1])
    return train(settings, crops)


@dataclass(frozen=True)
class _GrowingResolution:
    """The runs that exist, and what follows from them; all but the table needs all of them."""

    records: Records
    settings = RUNS[_DYNAMIC]
    pixels = RUNS[_DYNAMIC].pixels
    static = tuple(_STATIC.values())

    def figures(self, name: str) -> Mapping[str, Any]:
        """Return the figures of a run."""
        return self.records[name].outcome.figures

    def table(self) -> list[list[str]]:
        """Return the cells of the table of all runs that exist."""
        last = self.pixels[-1]
        return [
            [
                name.split("/")[1],
                *(f"{self._skipped(name, pixels)}" for pixels in self.pixels),
                self._both(name, f"{last}_lost_at_scale", percent),
                self._both(name, f"{last}_loss", number),
                f"`{self.records[name].command}`",
            ]
            for name in RUNS
            if name in self.records
        ]

    def _both(self, name: str, what: str, show: Any) -> str:
        return ", ".join(show(self.figures(name)[f"{player}_{what}"]) for player in NAMES)

    def _skipped(self, name: str, pixels: int) -> str:
        return self._both(name, f"{pixels}_skipped_steps", str)


GROUP = Group(
    _GROUP,
    [
        Experiment(name, asdict(settings), partial(_run, settings), needs_photographs=True)
        for name, settings in RUNS.items()
    ],
    _GrowingResolution,
)
