"""Figures: each function takes data, draws on Axes and returns them.

The only module that imports Matplotlib, and only when a figure is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot_training", "save_training_curves"]

Event = dict[str, Any]


def plot_training(axes: Sequence[Any], steps: Sequence[Event], epochs: Sequence[Event]) -> None:
    """Draw loss, accuracy and loss scale of a run, one above the other.

    Parameters
    ----------
    axes : sequence of three Axes
        They share the step axis.
    steps : sequence of dict
        With ``step``, ``loss``, ``loss_scale`` and ``skipped``, as the history has them.
    epochs : sequence of dict
        With ``step``, ``train_loss`` and ``test_accuracy``.
    """
    loss_axes, accuracy_axes, scale_axes = axes
    x = [event["step"] for event in steps]
    ends = [event["step"] for event in epochs]
    loss_axes.plot(x, [event["loss"] for event in steps], color="0.75", label="each step")
    loss_axes.plot(ends, [event["train_loss"] for event in epochs], "k-o", ms=3, label="epoch mean")
    loss_axes.set_ylabel("training loss")
    loss_axes.set_ylim(bottom=0)
    loss_axes.legend(frameon=False)
    accuracy_axes.plot(ends, [event["test_accuracy"] for event in epochs], "k-o", ms=3)
    accuracy_axes.set_ylabel("test accuracy")
    accuracy_axes.set_ylim(0, 1)
    scale_axes.step(x, [event["loss_scale"] for event in steps], "k-", where="mid", label="scale")
    skipped = [event for event in steps if event["skipped"]]
    scale_axes.plot(
        [event["step"] for event in skipped],
        [event["loss_scale"] for event in skipped],
        "rx",
        label=f"skipped steps ({len(skipped)})",
    )
    scale_axes.set_yscale("log", base=2)
    scale_axes.set_ylabel("loss scale")
    scale_axes.set_xlabel("step")
    scale_axes.legend(frameon=False)


def save_training_curves(
    path: Path, steps: Sequence[Event], epochs: Sequence[Event], *, title: str
) -> None:
    """Write the figure of :func:`plot_training` to a PNG file."""
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display needed

    figure = Figure(figsize=(7, 7), layout="constrained")
    plot_training(figure.subplots(3, 1, sharex=True), steps, epochs)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
