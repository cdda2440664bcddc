"""Figures of generators and discriminators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from study.experiments.experiment import Outcome
from study.experiments.figures.looks import WIDTH, finite, step_curve

__all__ = ["draw_growing_resolution", "draw_two_losses"]

_PLAYER_LOOKS: dict[str, dict[str, Any]] = {
    "generator": {"color": "#CC79A7"},
    "discriminator": {"color": "0.35", "linestyle": "--"},
}
_RESOLUTION_LOOKS: tuple[dict[str, Any], ...] = (  # from small to large
    {"color": "#CC79A7", "linestyle": ":"},
    {"color": "#E69F00", "linestyle": "-."},
    {"color": "#0072B2", "linestyle": "--"},
    {"color": "black", "linestyle": "-"},
)
_SMALLEST = -24  # the exponent of float16's smallest number


def draw_two_losses(
    figure: Any,
    fp32: Outcome,
    undisturbed: Outcome,
    disturbed: Outcome,
    *,
    overflow_at: int,
    window: int,
    strips: Mapping[str, Any],
) -> None:
    """Draw scales without and with the overflow; below them losses and images.

    Parameters
    ----------
    figure : Figure
        An empty one, with a constrained layout.
    fp32, undisturbed, disturbed : Outcome
        The last two in float16.
    overflow_at : int
        The step in which the generator's loss overflows in ``disturbed``.
    window : int
        Steps of one point of the losses.
    strips : mapping
        Images side by side as arrays (height, width, 3), by their label.
    """
    figure.set_size_inches(WIDTH, 11.5)
    above, below, losses, images = figure.subplots(4, 1)
    _draw_scales(above, undisturbed, "float16: each network has its own loss scale")
    title = f"float16, with an overflow of the generator's loss in step {overflow_at}"
    _draw_scales(below, disturbed, title)
    below.sharex(above)
    below.sharey(above)
    below.axvline(overflow_at, color="tab:red", linewidth=1, zorder=0)
    below.annotate(
        "overflow",
        (overflow_at, 0.7),  # below the legend
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        color="tab:red",
    )
    for name, look in _PLAYER_LOOKS.items():
        for outcome, words, wide in (
            (fp32, "float32", {"linewidth": 3, "alpha": 0.3}),
            (undisturbed, "float16", {}),
        ):
            values = finite(outcome.curves[f"{name}_loss"])
            steps = window * np.arange(1, len(values) + 1)
            losses.plot(steps, values, label=f"{name}, {words}", **look, **wide)
    losses.set_ylim(bottom=0)
    losses.set_ylabel(f"loss (means of {window} steps)")
    losses.set_xlabel("step")
    losses.grid(color="0.93")
    losses.legend(frameon=False)
    pixels = list(strips.values())
    images.imshow(np.concatenate(pixels))
    images.set_yticks(len(pixels[0]) * (np.arange(len(strips)) + 0.5), list(strips))
    images.set_xticks([])
    images.tick_params(length=0)
    images.spines[:].set_visible(False)


def _draw_scales(axes: Any, outcome: Outcome, title: str) -> None:
    for name, look in _PLAYER_LOOKS.items():
        changes = outcome.curves[f"{name}_scale"]
        step_curve(axes, changes, outcome.figures["steps"], label=f"{name}'s", **look)
        steps, scales = zip(*changes)
        skipped = outcome.curves[f"{name}_skipped"]
        at = [scales[np.searchsorted(steps, step, "right") - 1] for step in skipped]
        marks = {"color": look["color"], "marker": "x", "linestyle": "none", "markersize": 5}
        axes.plot(skipped, at, label=f"skipped: {len(skipped)}", **marks)
    axes.set_xlabel("step")
    axes.set_title(title, fontsize="medium")
    axes.grid(color="0.93")
    axes.legend(ncols=2, frameon=False, loc="upper right")


def draw_growing_resolution(
    figure: Any, fp32: Outcome, fp16: Outcome, pixels: Sequence[int]
) -> None:
    """Draw loss scales with the resolutions, and the exponents of gradients at each of them.

    Parameters
    ----------
    figure : Figure
        An empty one, with a constrained layout.
    fp32, fp16 : Outcome
        The exponents are from the first, the scales from the second.
    pixels : sequence of int
        The resolutions, each of which has as many steps.
    """
    figure.set_size_inches(WIDTH, 9.2)
    scales, *histograms = figure.subplots(3, 1)
    _draw_scales(scales, fp16, "float16: dynamic loss scales as the resolution grows\n")
    steps = fp16.figures["steps"] // len(pixels)
    for stage, size in enumerate(pixels):
        at = stage * steps + 1
        if stage:
            scales.axvline(at, color="0.6", linewidth=1, zorder=0)
        scales.annotate(f"{size} px", (at, 1), xycoords=("data", "axes fraction"),
                        xytext=(3, 3), textcoords="offset points")  # fmt: skip
    for axes, name in zip(histograms, _PLAYER_LOOKS):
        for size, look in zip(pixels, _RESOLUTION_LOOKS):
            exponents, counts = np.array(fp32.curves[f"{name}_{size}_exponents"]).T
            axes.plot(exponents, 100 * counts / counts.sum(), label=f"{size} px", **look)
        axes.axvline(_SMALLEST, color="tab:red", linewidth=1)
        axes.annotate("FP16's smallest", (_SMALLEST, 0.97), xycoords=("data", "axes fraction"),
                      xytext=(-4, 0), textcoords="offset points", ha="right", va="top",
                      color="tab:red")  # fmt: skip
        axes.set_title(f"float32: activation gradients of the {name}", fontsize="medium")
        axes.set_ylabel("share of values\nthat are not 0 (%)")
        axes.set_xlim(_SMALLEST - 12, 8)
        axes.set_ylim(bottom=0)
        axes.grid(color="0.93")
        axes.set_axisbelow(True)
        axes.legend(frameon=False)
    histograms[-1].set_xlabel("exponent e of a value from $2^e$ to $2^{e+1}$")
