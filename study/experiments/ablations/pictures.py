"""Pictures of the ablations; each function draws on an empty figure from the variants' records.

A panel has the whole width: words can be read on a page of 420 pixels.

A line has the colour of its format. Right and wrong ways within one format differ in mark and line
style.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpgluon_tools.plots import FORMAT_LOOKS

from study.experiments.experiment import Record

__all__ = ["draw_back_off", "draw_batch_norm", "draw_labels", "draw_loss_reduction",
           "draw_masters", "draw_underflow"]  # fmt: skip

Variants = Mapping[str, Record]
_FP32: dict[str, Any] = {"color": FORMAT_LOOKS["float32"]["color"], "linewidth": 1.2, "zorder": 3}
_FLOAT16: dict[str, Any] = {"color": FORMAT_LOOKS["float16"]["color"]}
# A wide dashed line, which is seen on both sides of a thin one that coincides with it.
_RIGHT: dict[str, Any] = {**_FLOAT16, "linestyle": "--", "linewidth": 4}
_WRONG: dict[str, Any] = {**_FLOAT16, "marker": "x", "markersize": 4, "linewidth": 1}
_REPORTED: dict[str, Any] = {**_FLOAT16, "linestyle": ":", "linewidth": 2}
_INTEGERS: dict[str, Any] = {"color": "0.5", "linestyle": "--", "linewidth": 2}


def _draw_curve(axes: Any, record: Record, curve: str, label: str, look: Mapping[str, Any]) -> None:
    """Draw a curve over its steps; a value that is not finite is a gap.

    The curve's means belong to equally long parts of the run, and stand at the end of each.
    """
    values = record.outcome.curves[curve]
    length = record.config["steps"] / len(values)
    places = [length * (place + 1) for place in range(len(values))]
    finite = [math.nan if value is None else value for value in values]
    axes.plot(places, finite, label=label, **look)
    if axes.get_subplotspec().is_last_row():
        axes.set_xlabel("step")
    axes.grid(color="0.92")
    axes.set_axisbelow(True)


def _two_panels(figure: Any) -> Any:
    figure.set_figheight(5.6)
    return figure.subplots(2, 1, sharex=True)


def draw_masters(figure: Any, records: Variants) -> None:
    """Draw the loss, and the share of weights that an update leaves unchanged."""
    loss, share = _two_panels(figure)
    for variant, label, look in (
        ("float32", "FP32", _FP32),
        ("with", "float16, FP32 masters", _RIGHT),
        ("without", "float16, no masters", _WRONG),
    ):
        _draw_curve(loss, records[variant], "loss", label, look)
        _draw_curve(share, records[variant], "unchanged", label, look)
    loss.set_ylabel("training loss (nats)")
    loss.legend(frameon=False)
    share.set_ylabel("share of weights that an update\nleaves unchanged")
    share.set_ylim(-0.03, 1.03)


def draw_underflow(figure: Any, records: Variants) -> None:
    """Draw the loss with and without a loss scale."""
    axes = figure.add_subplot()
    _draw_curve(axes, records["float32"], "loss", "FP32", _FP32)
    _draw_curve(axes, records["scaled"], "loss", "float16, dynamic loss scale", _RIGHT)
    _draw_curve(axes, records["unscaled"], "loss", "float16, no loss scale", _WRONG)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("loss (half the mean squared error,\npixels from 0 to 1)")
    axes.legend(frameon=False)


def draw_batch_norm(figure: Any, records: Variants) -> None:
    """Draw loss and training accuracy with each BatchNorm."""
    loss, accuracy = _two_panels(figure)
    for variant, label, look in (
        ("float32", "BatchNorm in FP32", _FP32),
        ("float16", "in float16, pixels from 0 to 1", _WRONG),
        ("float16-bytes", "in float16, pixels from 0 to 255", _REPORTED),
    ):
        _draw_curve(loss, records[variant], "loss", label, look)
        _draw_curve(accuracy, records[variant], "accuracy", label, look)
    loss.set_ylim(bottom=0)
    loss.set_ylabel("training loss (nats)")
    loss.legend(frameon=False)
    accuracy.set_ylim(0, 1.05)
    accuracy.set_ylabel("training accuracy")


def draw_loss_reduction(figure: Any, records: Variants) -> None:
    """Draw the true losses and the one that the float16 loss reports."""
    axes = figure.add_subplot()
    wrong, right = records["float16"], records["float32"]
    _draw_curve(axes, wrong, "true_loss", "loss in float16: true loss", _WRONG)
    _draw_curve(axes, wrong, "reported_loss", "loss in float16: as reported", _REPORTED)
    _draw_curve(axes, right, "true_loss", "loss in FP32: true and as reported", _FP32)
    axes.set_ylabel("cross-entropy of the\ntraining batches (nats)")
    axes.legend(frameon=False)


def draw_labels(figure: Any, records: Variants) -> None:
    """Draw the test accuracy on large labels, and the loss."""
    above, loss = _two_panels(figure)
    for axes, curve in ((above, "accuracy_above"), (loss, "loss")):
        _draw_curve(axes, records["int32"], curve, "labels in int32", _INTEGERS)
        _draw_curve(axes, records["float16"], curve, "labels in float16", _WRONG)
    above.set_ylim(0, 1.05)
    above.set_ylabel("test accuracy on\nclasses above 2048")
    above.legend(frameon=False)
    loss.set_ylabel("training loss (nats)")
    loss.set_yscale("log")
    loss.yaxis.set_major_formatter("{x:g}")


def draw_back_off(figure: Any, records: Variants) -> None:
    """Draw both loss scales with their skipped steps."""
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    ends = []
    for axes, variant, title in zip(
        panels, ("mpgluon", "contrib"), ("mpgluon: at once", "contrib.amp: one step late")
    ):
        curves = records[variant].outcome.curves
        powers, skipped_at = curves["log2_scale"], curves["skipped_at"]
        ends += [min(powers), max(powers)]
        axes.step(range(1, len(powers) + 1), powers, where="mid", color="0.4", linewidth=1)
        at = [powers[step - 1] for step in skipped_at]
        axes.plot(skipped_at, at, "kx", label="skipped step")
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_ylabel("loss scale")
        axes.grid(color="0.92")
    ticks = range(min(ends), max(ends) + 1)
    panels[0].set_yticks(ticks, [f"$2^{{{power}}}$" for power in ticks])
    panels[0].legend(frameon=False)
    panels[1].set_xlabel("step")
