"""Figures of training runs in several formats: accuracies, losses and loss scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from study.experiments.experiment import Outcome, Record
from study.experiments.figures.looks import BELOW, LOOKS, WIDTH, finite, line_of, step_curve

__all__ = ["draw_accuracies", "draw_curves", "draw_differences", "draw_learning",
           "draw_loss_scales", "draw_pairs", "draw_rows"]  # fmt: skip

_SEED_STYLES = ("-", "--", ":", "-.", (0, (6, 1)))
_SMOOTHED_STEPS = 20  # an epoch
_NETWORKS_IN_A_ROW = 3
_MARK = "#0072B2"
_MOST_POINTS = 3.0  # of a difference; longer intervals go on beyond the picture


def draw_differences(figure: Any, rows: Sequence[tuple[str, Sequence[Any]]]) -> None:
    """Draw differences of float16 and bfloat16 from float32 with their intervals, in points.

    Parameters
    ----------
    figure : Figure
        An empty one, with a constrained layout.
    rows : sequence of str and sequence of objects with ``mean``, ``lower`` and ``upper``
        A title, and the difference of float16, or of both formats. The first title is bold.
    """
    figure.set_size_inches(WIDTH, 1 + 0.4 * len(rows))
    axes = figure.add_subplot()
    axes.axvline(0, color="black", linewidth=1)
    for number, name in enumerate(("float16", "bfloat16")):
        found = [(place, of[number]) for place, (_, of) in enumerate(rows) if len(of) > number]
        at = [place + 0.24 * number - 0.12 for place, _ in found]
        middle, low, high = (
            np.array([getattr(one, end) for _, one in found]) for end in ("mean", "lower", "upper")
        )
        look = {**LOOKS[name], "linestyle": "none", "capsize": 3}
        axes.errorbar(middle, at, xerr=[middle - low, high - middle], label=name, **look)
    axes.axhline(0.5, color="0.7", linewidth=1)
    axes.set_yticks(range(len(rows)), [title for title, _ in rows])
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(-_MOST_POINTS, _MOST_POINTS)
    axes.set_xlabel("accuracy minus float32's (points), 95 % interval")
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    figure.legend(**BELOW, ncols=2)


def draw_pairs(
    figure: Any, rows: Sequence[tuple[str, Mapping[str, Any], Any]], margin: float
) -> None:
    """Draw each pair's difference as a mark, and their means with intervals, in points.

    Parameters
    ----------
    figure : Figure
        An empty one, with a constrained layout.
    rows : sequence of str, mapping of str to array, and object with ``mean``, ``lower``, ``upper``
        A title, the differences by task, and the mean of all.
    margin : float
        Differences within it count as none; a band.
    """
    figure.set_size_inches(WIDTH, 1.2 + 0.62 * len(rows))
    axes = figure.subplots()
    axes.axvspan(-margin, margin, color="0.9", linewidth=0, label=f"within {margin} points")
    axes.axvline(0, color="0.6", linewidth=1)
    looks = [{"marker": "o", "color": _MARK}, {"marker": "s", "color": "#D55E00"}]
    for place, (title, of_task, found) in enumerate(rows):
        axes.text(0.01, place - 0.32, title, transform=axes.get_yaxis_transform(), va="center")
        for (task, differences), look in zip(of_task.items(), looks):
            axes.plot(differences, [place] * len(differences), linestyle="none", markersize=4.5,
                      markerfacecolor="none", label=f"a seed, {task}", **look)  # fmt: skip
        ends = [[found.mean - found.lower], [found.upper - found.mean]]
        axes.errorbar(found.mean, place + 0.24, xerr=ends, fmt="D", color="black", markersize=5,
                      capsize=3, label="mean, 95 % interval")  # fmt: skip
    axes.set_ylim(len(rows) - 0.55, -0.6)
    axes.set_yticks([])
    axes.set_xlabel("difference of the test accuracies (points)")
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles))
    figure.legend(once.values(), once, **BELOW, ncols=2)


def draw_accuracies(
    figure: Any, points: Mapping[str, Any], networks: Sequence[str], base: str
) -> None:
    """Draw each run's accuracy as a mark, and the base's mean ± one standard deviation as a band.

    Parameters
    ----------
    figure : Figure
    points : mapping of str to array, shape (networks, seeds)
        Accuracies by row; NaN where there is no run.
    networks : sequence of str
    base : str
        A row.
    """
    rows = math.ceil(len(networks) / _NETWORKS_IN_A_ROW)
    figure.set_size_inches(WIDTH, 1.2 + 2.8 * rows)
    panels = figure.subplots(rows, 1, squeeze=False)[:, 0]
    width = 0.85 / len(points)
    for place in range(len(networks)):
        axes = panels[place // _NETWORKS_IN_A_ROW]
        mean, spread = points[base][place].mean(), points[base][place].std(ddof=1)
        across = [place - 0.45, place + 0.45]
        axes.fill_between(across, mean - spread, mean + spread, color="0.88", linewidth=0,
                          label=f"{base} ± one s.d." if place == 0 else None)  # fmt: skip
        for number, (row, of_row) in enumerate(points.items()):
            values = of_row[place][~np.isnan(of_row[place])]
            at = place + (number - (len(points) - 1) / 2) * width
            look = {**LOOKS[row], "linestyle": "none", "markerfacecolor": "none"}
            beside = at + width / 5 * (np.arange(len(values)) - (len(values) - 1) / 2)
            axes.plot(beside, values, label=row if place == 0 else None, **look)
            axes.plot([at - width / 3, at + width / 3], [values.mean()] * 2,
                      color=LOOKS[row]["color"], linewidth=2)  # fmt: skip
    for first, axes in zip(range(0, len(networks), _NETWORKS_IN_A_ROW), panels):
        shown = networks[first : first + _NETWORKS_IN_A_ROW]
        axes.set_xticks(range(first, first + len(shown)), shown)
        axes.set_xlim(first - 0.5, first + len(shown) - 0.5)
        axes.set_ylabel("test accuracy (points)")
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, **BELOW, ncols=3, title="mark: a seed, bar: their mean")


def draw_rows(
    figure: Any, points: Mapping[str, Sequence[float]], label: str, *, lowest: float
) -> None:
    """Draw each run's figure as a mark in the line of its row, under the row's name.

    Parameters
    ----------
    figure : Figure
    points : mapping of str to sequence of float
        By row; the range of the first is a band behind all.
    label : str
        The name of the axis.
    lowest : float
        A figure below it is written as a number at the edge, so that the others are not crowded.
    """
    figure.set_size_inches(WIDTH, 0.8 + 0.42 * len(points))
    axes = figure.subplots()
    first = next(iter(points.values()))
    axes.axvspan(min(first), max(first), color="0.88", linewidth=0)
    for place, (name, values) in enumerate(points.items()):
        at_edge = {"x": 0.01, "transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(y=place - 0.3, s=name, **at_edge)
        shown = [one for one in values if one >= lowest]
        axes.plot(shown, [place] * len(shown), "o", color=_MARK, markerfacecolor="none")
        if below := ", ".join(f"{one:.1f}" for one in values if one < lowest):
            axes.text(y=place + 0.1, s=f"\N{LEFTWARDS ARROW} {below}", color=_MARK, **at_edge)
    axes.set_ylim(len(points) - 0.5, -0.7)
    axes.set_yticks([])
    axes.set_xlabel(label)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)


def draw_curves(figure: Any, runs: Mapping[str, Record], title: str, seed: int) -> None:
    """Draw loss and test accuracy of one run in each format."""
    figure.set_size_inches(WIDTH, 6)
    above, below = figure.subplots(2, 1, sharex=True)
    for name, record in runs.items():
        outcome = record.outcome
        above.plot(*_smoothed(outcome), **line_of(name))
        accuracies = 100 * np.array(outcome.curves["test_accuracy"])
        ends = outcome.figures["steps"] / len(accuracies) * np.arange(1, len(accuracies) + 1)
        look = {**LOOKS[name], "markersize": 5, "markerfacecolor": "none"}
        below.plot(ends, accuracies, label=name, **look)
    above.set_ylabel(f"training loss\n(mean of the last {_SMOOTHED_STEPS} points)")
    above.set_ylim(bottom=0)
    below.set_ylabel("test accuracy (points)")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(color="0.92")
    handles, labels = below.get_legend_handles_labels()
    figure.legend(handles, labels, **BELOW, ncols=4)
    figure.suptitle(f"{title}, seed {seed}", fontsize="medium")


def draw_learning(
    figure: Any, rows: Mapping[str, tuple[Mapping[str, Any], Sequence[Outcome]]]
) -> None:
    """Draw training loss and the mean of the categories' accuracies: thin lines are seeds.

    Parameters
    ----------
    figure : Figure
        An empty one, with a constrained layout.
    rows : mapping
        Keywords of ``Axes.plot`` and the outcomes of all seeds, by label.
    """
    figure.set_size_inches(WIDTH, 4.2)
    left, right = figure.subplots(1, 2)
    for label, (look, outcomes) in rows.items():
        line = {key: value for key, value in look.items() if not key.startswith("marker")}
        losses = np.array([_smoothed(one)[1] for one in outcomes])
        left.plot(_smoothed(outcomes[0])[0], losses.mean(axis=0), label=label, **line)
        curves = 100 * np.array([one.curves["test_accuracy_per_class"] for one in outcomes])
        steps = outcomes[0].figures["steps"]
        ends = steps / curves.shape[1] * np.arange(1, curves.shape[1] + 1)
        right.plot(ends, curves.T, color=look["color"], linewidth=0.6, alpha=0.45)
        right.plot(ends, curves.mean(axis=0), label=label, **{"markersize": 5, **look})
    left.set_ylabel("training loss,\nmean over the seeds")
    right.set_ylabel("mean test accuracy\nof the categories (points)")
    right.set_ylim(bottom=0)
    left.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
    handles, labels = right.get_legend_handles_labels()
    title = "bold: mean of the seeds, thin: each seed"
    figure.legend(handles, labels, **BELOW, ncols=min(len(labels), 3), title=title)


def draw_loss_scales(figure: Any, runs: Mapping[str, Mapping[int, Record]], title: str) -> None:
    """Draw loss scales of runs by row and seed: a panel for each row, a line for each seed."""
    figure.set_size_inches(WIDTH, 2 + 2 * len(runs))
    panels = list(figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0])
    for axes, (name, of_row) in zip(panels, runs.items()):
        for (seed, record), style in zip(of_row.items(), _SEED_STYLES):
            outcome = record.outcome
            step_curve(axes, outcome.curves["loss_scale"], outcome.figures["steps"],
                        linestyle=style, color=LOOKS[name]["color"],
                        label=f"seed {seed}")  # fmt: skip
        axes.grid(color="0.92")
        axes.set_title(name, fontsize="medium")
    handles, labels = panels[0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, **BELOW, ncols=len(labels), handlelength=1.6)
    for handle in legend.legend_handles:
        handle.set_color("black")  # styles tell seeds apart in every panel
    panels[-1].set_xlabel("step")
    figure.suptitle(title, fontsize="medium")


def _smoothed(outcome: Outcome) -> tuple[Any, Any]:
    """Return steps, and means of the losses up to each of them."""
    loss = finite(outcome.curves["loss"])
    steps = 1 + outcome.figures["steps_per_point"] * np.arange(len(loss))
    kernel = np.ones(min(_SMOOTHED_STEPS, len(loss)))
    return steps[len(kernel) - 1 :], np.convolve(loss, kernel / len(kernel), "valid")
