"""The picture of the LSTM's runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.experiment import Record
from experiments.reader import WINDOW

__all__ = ["LOOKS", "draw_runs"]

LOOKS: dict[str, dict[str, Any]] = {
    "float32": {"color": "0.7", "linewidth": 4},
    "float16": {"color": "black", "linestyle": "--"},
    "mixed_float16": {"color": "tab:blue", "linestyle": "-."},
    "bfloat16": {"color": "tab:orange", "linestyle": ":", "linewidth": 2},
}


def draw_runs(figure: Any, runs: Mapping[str, Mapping[int, Record]]) -> list[Any]:
    """Draw loss, accuracy and loss scale; a column for each seed, a line for each format.

    Parameters
    ----------
    figure : Figure
        An empty one, with a constrained layout.
    runs : mapping
        Records by format, of those in ``LOOKS``, and by seed; at least one.
    """
    seeds = sorted({seed for of_row in runs.values() for seed in of_row})
    figure.set_size_inches(11, 6.2)
    grid = figure.subplots(3, len(seeds), sharex=True, sharey="row", squeeze=False)
    for name, of_row in runs.items():
        for seed, record in of_row.items():
            _draw_run(grid[:, seeds.index(seed)], name, record)
    for seed, (above, middle, below) in zip(seeds, grid.T):
        above.set_title(f"seed {seed}", fontsize="medium")
        middle.axhline(50, color="0.8", linewidth=1, zorder=0)  # guessing
        below.set_yscale("log", base=2)
        below.set_xlabel("step")
        for axes in (above, middle, below):
            axes.grid(color="0.93")
    words = (f"training loss\n(means of {WINDOW} steps)", "test accuracy\n(points)", "loss scale S")
    for axes, label in zip(grid[:, 0], words):
        axes.set_ylabel(label)
    grid[0, 0].set_ylim(bottom=0)
    figure.align_ylabels(grid[:, 0])
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return list(grid.flat)


def _draw_run(column: Any, name: str, record: Record) -> None:
    above, middle, below = column
    look = LOOKS[name]
    curves, steps = record.outcome.curves, record.outcome.figures["steps"]
    losses = np.array([math.nan if one is None else one for one in curves["loss"]])
    above.plot(WINDOW * np.arange(1, len(losses) + 1), losses, label=name, **look)
    accuracies = 100 * np.array(curves["test_accuracy"])  # the first one before any step
    middle.plot(np.linspace(0, steps, len(accuracies)), accuracies, **look)
    if "loss_scale" in curves:
        scales = curves["loss_scale"]
        below.step(WINDOW * np.arange(len(scales)), scales, where="post", **look)
