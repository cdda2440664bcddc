"""Figures of the costs of a step: time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from study.experiments.figures.looks import BELOW, LOOKS, WIDTH

__all__ = ["draw_batch_doubling", "draw_engines", "draw_step_times"]


def draw_engines(
    figure: Any, points: Mapping[str, Sequence[float]], batches: Sequence[int]
) -> None:
    """Draw each engine's relative times, a mark for each batch, under the engine's name."""
    figure.set_size_inches(WIDTH, 1 + 0.42 * len(points))
    axes = figure.subplots()
    axes.axvline(1, color="0.7", linewidth=1)
    for number, batch in enumerate(batches):
        look = {"color": ("#0072B2", "#E69F00")[number], "marker": "os"[number]}
        found = [one[number] for one in points.values()]
        label = f"{batch} image{'s' * (batch > 1)}"
        at = [place + 0.16 * number for place in range(len(found))]  # one does not hide the other
        axes.plot(found, at, label=label, linestyle="none", **look)
    for place, name in enumerate(points):
        axes.text(0.01, place - 0.3, name, transform=axes.get_yaxis_transform(), va="center")
    axes.set_ylim(len(points) - 0.5, -0.7)
    axes.set_yticks([])
    axes.set_xlim(left=0)
    axes.set_xlabel("time of a batch, MXNet's in FP32 = 1")
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    figure.legend(**BELOW, ncols=len(batches))


def draw_step_times(
    figure: Any, times: Mapping[str, Mapping[str, float]], formats: Sequence[str]
) -> None:
    """Draw times per step relative to FP32's, with quartiles; a column for each network.

    Parameters
    ----------
    figure : Figure
        An empty one, with a constrained layout.
    times : mapping
        By network: ``<format>/relative``, ``<format>/relative_lower`` and ``_upper``.
    formats : sequence of str
    """
    figure.set_size_inches(WIDTH, 4)
    axes = figure.add_subplot()
    axes.axhline(1, color="0.7", linewidth=1)
    for number, name in enumerate(formats):
        at = np.arange(len(times)) + (number - (len(formats) - 1) / 2) * 0.15
        middle, low, high = (
            np.array([one[f"{name}/relative{end}"] for one in times.values()])
            for end in ("", "_lower", "_upper")
        )
        look = {**LOOKS[name], "linestyle": "none", "capsize": 3}
        axes.errorbar(at, middle, [middle - low, high - middle], label=name, **look)
    axes.set_xticks(range(len(times)), list(times), rotation=20)
    axes.set_ylabel("time per step, float32 = 1\n(median and quartiles)")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    figure.legend(**BELOW, ncols=len(formats))


def draw_batch_doubling(
    figure: Any,
    peaks: Mapping[str, Mapping[int, float]],
    points: Mapping[tuple[str, int], Sequence[float]],
    batch: int,
) -> None:
    """Draw peak memory against the batch, and the accuracy of each run.

    Parameters
    ----------
    figure : Figure
        An empty one, with a constrained layout.
    peaks : mapping
        MiB by format and batch.
    points : mapping
        Accuracies of a row's seeds by format and batch.
    batch : int
        The batch whose memory in FP32 is the limit.
    """
    figure.set_size_inches(WIDTH, 4)
    left, right = figure.subplots(1, 2)
    for dtype, by_batch in peaks.items():
        sizes = sorted(by_batch)
        look = {**LOOKS[dtype], "markersize": 4}
        left.plot(sizes, [by_batch[one] for one in sizes], label=dtype, **look)
    limit = peaks["float32"][batch]
    left.axhline(limit, color="0.6", linewidth=1, zorder=0)
    left.annotate(f"float32 at {batch}", (1, limit), xycoords=("axes fraction", "data"),
                  xytext=(-3, -12), textcoords="offset points", ha="right", va="top")  # fmt: skip
    left.set_ylabel("peak memory (MiB)")
    left.set_ylim(0, 1.1 * max(max(by_batch.values()) for by_batch in peaks.values()))
    for (dtype, size), values in points.items():
        look = {**LOOKS[dtype], "linestyle": "none", "markerfacecolor": "none"}
        at = size - 1.5 if dtype == "float32" else size + 1.5
        right.plot([at] * len(values), values, **look)
        right.plot([at - 1.2, at + 1.2], [np.mean(values)] * 2, color=look["color"], linewidth=2)
    right.set_ylabel("test accuracy (points)")
    for axes in (left, right):
        axes.set_xlabel("batch size (images)")
        axes.set_xticks(sorted({size for _, size in points}))
        axes.grid(color="0.93")
        axes.set_axisbelow(True)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, **BELOW, ncols=2, title="mark: a seed, bar: their mean")
