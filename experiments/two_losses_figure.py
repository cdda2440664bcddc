"""The picture of the GAN's runs: both loss scales, both losses, photographs and images made."""

from __future__ import annotations

import math
from typing import Any, Optional

import numpy as np

from experiments.experiment import Outcome
from experiments.gan import CROP, NAMES
from experiments.gan_training import WINDOW
from experiments.thumbnails import unpack

__all__ = ["draw_two_losses"]

_LOOKS: dict[str, dict[str, Any]] = {
    "generator": {"color": "black"},
    "discriminator": {"color": "tab:blue", "linestyle": "--"},
}


def draw_two_losses(
    figure: Any,
    *,
    undisturbed: Outcome,
    disturbed: Optional[Outcome],
    fp32: Optional[Outcome],
    overflow_at: int,
) -> list[Any]:
    """Draw scales to the left, without and with the overflow; losses and images to the right.

    Parameters
    ----------
    figure : Figure
        An empty one, with a constrained layout.
    undisturbed, disturbed : Outcome
        In float16.
    fp32 : Outcome or None
    overflow_at : int
        The step in which the generator's loss overflows in ``disturbed``.
    """
    figure.set_size_inches(12, 6.4)
    (above, losses), (below, images) = figure.subplots(2, 2, width_ratios=(1.25, 1))
    _draw_scales(above, undisturbed, "float16: each network has its own loss scale")
    if disturbed is None:
        below.set_axis_off()
    else:
        title = f"the same, with an overflow of the generator's loss in step {overflow_at}"
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
    _draw_losses(losses, undisturbed, fp32)
    _draw_images(images, undisturbed, fp32)
    return [above, losses, below, images]


def _draw_scales(axes: Any, outcome: Outcome, title: str) -> None:
    for name in NAMES:
        steps, scales = zip(*outcome.curves[f"{name}_scale"])
        ends = [*steps, outcome.figures["steps"] + 1]
        axes.step(ends, [*scales, scales[-1]], where="post", label=f"{name}'s", **_LOOKS[name])
        skipped = outcome.curves[f"{name}_skipped"]
        at = [scales[np.searchsorted(steps, step, "right") - 1] for step in skipped]
        label = f"skipped: {len(skipped)}"
        look = {"color": _LOOKS[name]["color"], "marker": "x", "linestyle": "none"}
        axes.plot(skipped, at, label=label, markersize=5, **look)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale S")
    axes.set_xlabel("step")
    axes.set_title(title, fontsize="medium")
    axes.grid(color="0.93")
    axes.legend(ncols=2, frameon=False, loc="upper right", fontsize="small")


def _draw_losses(axes: Any, float16: Outcome, fp32: Optional[Outcome]) -> None:
    for name in NAMES:
        for outcome, words in ((fp32, "float32"), (float16, "float16")):
            if outcome is None:
                continue
            values = outcome.curves[f"{name}_loss"]
            losses = [math.nan if value is None else value for value in values]
            look = dict(_LOOKS[name])
            if outcome is fp32:
                look.update(linewidth=3, alpha=0.3)
            steps = WINDOW * np.arange(1, len(losses) + 1)
            axes.plot(steps, losses, label=f"{name}, {words}", **look)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"loss (means of {WINDOW} steps)")
    axes.set_xlabel("step")
    axes.grid(color="0.93")
    axes.legend(frameon=False, fontsize="small")


def _draw_images(axes: Any, float16: Outcome, fp32: Optional[Outcome]) -> None:
    strips = {"photographs": float16.figures["crops"]}
    if fp32 is not None:
        strips["made, float32"] = fp32.figures["made"]
    strips["made, float16"] = float16.figures["made"]
    axes.imshow(np.concatenate([unpack(strip) for strip in strips.values()]))
    axes.set_yticks(CROP * (np.arange(len(strips)) + 0.5), list(strips))
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
