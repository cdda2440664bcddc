"""Pictures of the parity runs. They can be read without colour: marks and line styles differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.parity import BASE, FORMATS, NETWORKS, ROWS
from experiments.parity_results import Parity
from experiments.statistics import mean_and_spread

__all__ = ["draw_accuracies", "draw_curves", "draw_loss_scales"]

_LOOKS: dict[str, dict[str, Any]] = {
    "float32": {"color": "0.45", "marker": "s", "linestyle": "-"},
    "float16": {"color": "black", "marker": "o", "linestyle": "--"},
    "mixed_float16": {"color": "tab:blue", "marker": "D", "linestyle": "-."},
    "bfloat16": {"color": "tab:orange", "marker": "^", "linestyle": ":"},
    "static_float16": {"color": "tab:green", "marker": "v", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
}
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}
_SEED_STYLES = ("-", "--", ":", "-.", (0, (6, 1)))
_SMOOTHED_STEPS = 20  # an epoch


def draw_accuracies(figure: Any, found: Parity) -> Any:
    """Draw each run's accuracy as a mark, and FP32's mean ± one standard deviation as a band."""
    figure.set_size_inches(10, 4.5)
    axes = figure.add_subplot()
    width = 0.85 / len(ROWS)
    for place, network in enumerate(NETWORKS):
        base = list(found.points(network.name, BASE).values())
        if len(base) > 1:
            mean, spread = mean_and_spread(base)
            across = [place - 0.45, place + 0.45]
            axes.fill_between(across, mean - spread, mean + spread, color="0.88", linewidth=0,
                              label=f"{BASE} ± one s.d." if place == 0 else None)  # fmt: skip
        for number, name in enumerate(ROWS):
            values = list(found.points(network.name, name).values())
            at = place + (number - (len(ROWS) - 1) / 2) * width
            look = {**_LOOKS[name], "linestyle": "none", "markerfacecolor": "none"}
            beside = at + width / 5 * (np.arange(len(values)) - (len(values) - 1) / 2)
            axes.plot(beside, values, label=name if place == 0 else None, **look)
            if values:
                axes.plot([at - width / 3, at + width / 3], [np.mean(values)] * 2,
                          color=_LOOKS[name]["color"], linewidth=2)  # fmt: skip
    axes.set_xticks(range(len(NETWORKS)), [one.name for one in NETWORKS])
    axes.set_xlim(-0.5, len(NETWORKS) - 0.5)
    axes.set_ylabel("test accuracy (points)")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
        title="mark: a seed\nbar: their mean",
    )
    return axes


def draw_curves(figure: Any, found: Parity, network: str) -> list[Any]:
    """Draw loss and test accuracy of one network's first seed in each format."""
    figure.set_size_inches(10, 5.5)
    above, below = figure.subplots(2, 1, sharex=True)
    for name in FORMATS:
        runs = found.runs(network, name)
        if not runs:
            continue
        seed, record = next(iter(runs.items()))
        figures, curves = record.outcome.figures, record.outcome.curves
        loss = np.array([np.nan if one is None else one for one in curves["loss"]])
        steps = 1 + figures["steps_per_point"] * np.arange(len(loss))
        kernel = np.ones(min(_SMOOTHED_STEPS, len(loss)))
        line = {k: v for k, v in _LOOKS[name].items() if k != "marker"}
        mean = np.convolve(loss, kernel / len(kernel), "valid")
        above.plot(steps[len(kernel) - 1 :], mean, label=f"{name}, seed {seed}", **line)
        accuracies = 100 * np.array(curves["test_accuracy"])
        ends = figures["steps"] / len(accuracies) * np.arange(1, len(accuracies) + 1)
        below.plot(
            ends, accuracies, markersize=5, markerfacecolor="none", label=name, **_LOOKS[name]
        )
    above.set_ylabel(f"training loss\n(mean of the last {_SMOOTHED_STEPS} points)")
    above.set_ylim(bottom=0)
    below.set_ylabel("test accuracy (points)")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(color="0.92")
        axes.legend(**_BESIDE)
    figure.suptitle(f"{network}: the same run in each format")
    return [above, below]


def draw_loss_scales(figure: Any, found: Parity, network: str) -> list[Any]:
    """Draw the loss scale of float16's runs, a panel for each way and a line for each seed."""
    figure.set_size_inches(10, 4.5)
    panels = list(figure.subplots(2, 1, sharex=True, sharey=True))
    for axes, name in zip(panels, ("float16", "mixed_float16")):
        for (seed, record), style in zip(found.runs(network, name).items(), _SEED_STYLES):
            steps, scales = zip(*record.outcome.curves["loss_scale"])
            end = record.outcome.figures["steps"] + 1
            axes.step([*steps, end], [*scales, scales[-1]], where="post", linestyle=style,
                      color=_LOOKS[name]["color"], label=f"{name}, seed {seed}")  # fmt: skip
        axes.set_yscale("log", base=2)
        axes.set_ylabel("loss scale S")
        axes.grid(color="0.92")
        if axes.lines:
            axes.legend(**_BESIDE)
    panels[-1].set_xlabel("step")
    figure.suptitle(f"{network}: halved at each overflow, whose step is skipped")
    return panels
