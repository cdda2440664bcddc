"""Figures of networks that read sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from study.experiments.experiment import Outcome, Record
from study.experiments.figures.looks import BELOW, WIDTH, finite, line_of

__all__ = ["draw_recurrent", "draw_sequences"]

_RECURRENT_FORMATS = ("float32", "float16", "mixed_float16", "bfloat16")


def draw_recurrent(figure: Any, runs: Mapping[str, Mapping[int, Record]], window: int) -> None:
    """Draw loss, accuracy and loss scale; a row for each seed, a line for each format.

    Parameters
    ----------
    figure : Figure
        An empty one, with a constrained layout.
    runs : mapping
        Records by row and seed; only rows of formats are drawn.
    window : int
        Steps of one point of the curves.
    """
    drawn = {name: runs[name] for name in _RECURRENT_FORMATS}
    seeds = list(drawn["float32"])
    figure.set_size_inches(WIDTH, 1 + 1.6 * len(seeds))
    grid = figure.subplots(len(seeds), 3, sharex=True, sharey="col", squeeze=False)
    for name, of_row in drawn.items():
        for seed, row in zip(seeds, grid):
            _draw_reader(row, of_row[seed], name, window)
    for seed, (losses, accuracies, scales) in zip(seeds, grid):
        losses.set_ylabel(f"seed {seed}")
        accuracies.axhline(50, color="0.8", linewidth=1, zorder=0)  # guessing
        scales.set_yscale("log", base=2)
        for axes in (losses, accuracies, scales):
            axes.grid(color="0.93")
    words = (f"training loss\n(means of {window} steps)", "test accuracy\n(points)", "loss scale S")
    for axes, label in zip(grid[0], words):
        axes.set_title(label, fontsize="medium")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    grid[0, 0].set_ylim(bottom=0)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, **BELOW, ncols=len(labels))


def _draw_reader(row: Any, record: Record, name: str, window: int) -> None:
    above, middle, below = row
    # A wide line shows under the others where they coincide.
    look = {**line_of(name), "linewidth": 3.5 if name == "float32" else 1.5}
    curves, steps = record.outcome.curves, record.outcome.figures["steps"]
    losses = finite(curves["loss"])
    above.plot(window * np.arange(1, len(losses) + 1), losses, label=name, **look)
    accuracies = 100 * np.array(curves["test_accuracy"])  # the first one before any step
    middle.plot(np.linspace(0, steps, len(accuracies)), accuracies, **look)
    if "loss_scale" in curves:
        scales = curves["loss_scale"]
        below.step(window * np.arange(len(scales)), scales, where="post", **look)


def draw_sequences(
    figure: Any, tasks: Mapping[str, tuple[str, Mapping[str, Sequence[Outcome]]]], window: int
) -> None:
    """Draw loss, score and loss scale; a column for each task, thin lines for seeds.

    Parameters
    ----------
    figure : Figure
        An empty one, with a constrained layout.
    tasks : mapping
        A curve of scores and the outcomes of all seeds by format, by the score's title.
    window : int
        Steps of one point of losses and scales.
    """
    figure.set_size_inches(WIDTH, 6.4)
    grid = figure.subplots(3, len(tasks), sharex="col", squeeze=False)
    for (losses, scores, scales), (title, (score, rows)) in zip(grid.T, tasks.items()):
        for name, outcomes in rows.items():
            look = {**line_of(name), "linewidth": 3.5 if name == "float32" else 1.5}
            steps = outcomes[0].figures["steps"]
            found = np.array([finite(one.curves["loss"]) for one in outcomes])
            losses.plot(window * np.arange(1, found.shape[1] + 1), found.mean(axis=0), **look)
            curves = 100 * np.array([one.curves[score] for one in outcomes])
            ends = np.linspace(0, steps, curves.shape[1])
            scores.plot(ends, curves.T, color=look["color"], linewidth=0.6, alpha=0.45)
            scores.plot(ends, curves.mean(axis=0), label=name, **look)
            for one in outcomes:
                if "loss_scale" in one.curves:
                    values = one.curves["loss_scale"]
                    scales.step(window * np.arange(len(values)), values, where="post",
                                **{**look, "linewidth": 1})  # fmt: skip
        losses.set_title(title, fontsize="medium")
        losses.set_yscale("log")
        scores.set_ylim(-3, 103)  # an untrained network writes several times too many digits
        scales.set_yscale("log", base=2)
        scales.set_xlabel("step")
        for axes in (losses, scores, scales):
            axes.grid(color="0.93")
    words = (
        f"training loss\n(means of {window} steps)",
        "test score\n(points)",
        "loss scale S,\na line for each seed",
    )
    for axes, label in zip(grid[:, 0], words):
        axes.set_ylabel(label)
    handles, labels = grid[1, 0].get_legend_handles_labels()
    title = "bold: mean of the seeds, thin: each seed"
    figure.legend(handles, labels, **BELOW, ncols=len(labels), title=title)
