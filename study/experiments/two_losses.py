"""Two losses: a small GAN with a loss scale for each network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from study.experiments import figures
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.gan import CROP, GanSettings, train
from study.experiments.photographs import mini_tree
from study.experiments.players import NAMES, WINDOW, cut_crops, unpack

__all__ = ["GROUP", "RUNS"]

_FP32, _UNDISTURBED, _DISTURBED = (
    "two_losses/float32",
    "two_losses/float16",
    "two_losses/float16-overflow",
)
RUNS = {
    _FP32: GanSettings(),
    _UNDISTURBED: GanSettings(dtype="float16"),
    _DISTURBED: GanSettings(dtype="float16", overflow=2.0**20),
}
# The values that a run keeps of each network around the watched step, and their names.
_WATCHED = {
    "scale_before": "loss scale in it",
    "scale_after": "loss scale after it",
    "skips_until_then": "skipped steps so far",
    "bits_before": "bits before it",
    "bits_after": "bits after it",
}


def _run(settings: GanSettings, place: Place) -> Outcome:
    return train(settings, cut_crops(mini_tree(place), settings, CROP))


@dataclass(frozen=True)
class _TwoLosses:
    """The runs that exist, and results computed from them; all but the table needs all of them."""

    records: Records
    settings = RUNS[_DISTURBED]

    def table(self) -> list[list[str]]:
        """Return the cells of the table of all runs that exist."""
        return [
            [
                name.split("/")[1],
                "none" if settings.dtype == "float32" else _two(figures, "usual_scale", "g"),
                f"{_two(figures, 'skipped_steps', 'd')} of {figures['steps']}",
                _two(figures, "final_loss", ".2f"),
                f"`{name}`",
            ]
            for name, settings in RUNS.items()
            if name in self.records and (figures := self.records[name].outcome.figures)
        ]

    def short_table(self) -> list[list[str]]:
        """Return `table` without commands."""
        return [row[:-1] for row in self.table()]

    @property
    def without(self) -> Mapping[str, Any]:
        """The figures of the float16 run without an overflow."""
        return self.records[_UNDISTURBED].outcome.figures

    @property
    def disturbed(self) -> Mapping[str, Any]:
        """The figures of the run with an overflow."""
        return self.records[_DISTURBED].outcome.figures

    @property
    def scale_ratio(self) -> float:
        """How many times the discriminator's usual loss scale the generator's is, in float16."""
        found = self.without
        return float(found["generator_usual_scale"] / found["discriminator_usual_scale"])

    def skipped(self) -> tuple[int, int]:
        """Return how many float16 steps at least one network skipped, and how many both."""
        curves = self.records[_UNDISTURBED].outcome.curves
        one, other = (set(curves[f"{name}_skipped"]) for name in NAMES)
        return len(one | other), len(one & other)

    @property
    def costs_the_generator_alone(self) -> bool:
        """Whether the overflow cost the generator one step and half its scale, and nothing else."""
        without, disturbed = self.without, self.disturbed
        return (
            without["generator_bits_before"] == disturbed["generator_bits_before"]
            and without["generator_bits_before"] != without["generator_bits_after"]
            and disturbed["generator_bits_before"] == disturbed["generator_bits_after"]
            and disturbed["generator_scale_after"] == disturbed["generator_scale_before"] / 2
            and all(
                without[f"discriminator_{what}"] == disturbed[f"discriminator_{what}"]
                for what in _WATCHED
            )
        )

    def watched(self) -> list[list[str]]:
        """Return the cells of the table of the watched step."""
        both = (self.without, self.disturbed)
        return [
            [f"{name}'s {words}", *(_cell(one[f"{name}_{what}"]) for one in both)]
            for name in NAMES
            for what, words in _WATCHED.items()
        ]


def _two(figures: Mapping[str, Any], what: str, form: str) -> str:
    values = [figures[f"{name}_{what}"] for name in NAMES]
    return ", ".join("not finite" if value is None else f"{value:{form}}" for value in values)


def _cell(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


def _draw(figure: Any, records: Records) -> None:
    fp32, undisturbed, disturbed = (records[name].outcome for name in RUNS)
    strips = {
        "photographs": undisturbed.figures["crops"],
        "made, float32": fp32.figures["made"],
        "made, float16": undisturbed.figures["made"],
    }
    figures.draw_two_losses(
        figure,
        fp32,
        undisturbed,
        disturbed,
        overflow_at=RUNS[_DISTURBED].watched_step,
        window=WINDOW,
        strips={label: unpack(strip) for label, strip in strips.items()},
    )


GROUP = Group(
    "two_losses",
    [
        Experiment(name, asdict(settings), partial(_run, settings), needs_photographs=True)
        for name, settings in RUNS.items()
    ],
    _TwoLosses,
    {"two-losses": _draw},
)
