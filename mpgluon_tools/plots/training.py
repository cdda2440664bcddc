"""Figures of a training run, of its events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpgluon_tools.extras import extra
from mpgluon_tools.plots.looks import CROSSES, legend_beside

__all__ = [
    "draw_accuracy",
    "draw_gradient_norm",
    "draw_loss",
    "draw_loss_scale",
    "draw_speed",
    "draw_training",
    "save_training_curves",
]

Event = dict[str, Any]
_EACH_STEP: dict[str, Any] = {"color": "0.65", "linewidth": 1}
_EACH_EPOCH: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 4}


def save_training_curves(
    path: Path, steps: Sequence[Event], epochs: Sequence[Event], *, title: str
) -> None:
    """Write the figure of :func:`draw_training` to a PNG file, 1200 pixels wide."""
    with extra("plots"):
        from matplotlib.figure import Figure  # no pyplot: nothing global, no display needed

    figure = Figure(figsize=(10, 1), layout="constrained")
    panels = draw_training(figure, steps, epochs)
    figure.set_figheight(0.6 + 1.9 * len(panels))
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def draw_training(figure: Any, steps: Sequence[Event], epochs: Sequence[Event]) -> list[Any]:
    """Draw the history of a run in an empty figure; return the panels from top to bottom.

    Loss and accuracy; the loss scale if there was one, gradient norm and speed where they are
    known. The panels share the step axis. There must be a step and an epoch.
    """
    norms = (event.get("gradient_norm") for event in steps)
    draw: list[Any] = [
        lambda axes: draw_loss(axes, steps, epochs),
        lambda axes: draw_accuracy(axes, epochs),
    ]
    if any(event["loss_scale"] != 1 or event["skipped"] for event in steps):
        draw.append(lambda axes: draw_loss_scale(axes, steps))
    if any(norm is not None and 0 < norm < math.inf for norm in norms):
        draw.append(lambda axes: draw_gradient_norm(axes, steps))
    if any("images_per_second" in event for event in steps):
        draw.append(lambda axes: draw_speed(axes, steps))
    panels = figure.subplots(len(draw), 1, sharex=True, squeeze=False)[:, 0]
    for axes, draw_one in zip(panels, draw):
        draw_one(axes)
    panels[-1].set_xlabel("step")
    figure.align_ylabels(panels)
    return list(panels)


def draw_loss(axes: Any, steps: Sequence[Event], epochs: Sequence[Event]) -> Any:
    """Draw the training loss of each step and its mean over each epoch, from 0 upwards.

    Losses that are not finite are gaps, with a cross near the upper edge.
    """
    axes.plot(*_points(steps, "loss"), label="each step", **_EACH_STEP)
    axes.plot(*_points(epochs, "train_loss"), label="mean of epoch", **_EACH_EPOCH)
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    _mark_not_finite(axes, steps, "loss")
    legend_beside(axes)
    return axes


def draw_accuracy(axes: Any, epochs: Sequence[Event]) -> Any:
    """Draw the accuracy in training and in the test.

    The mean of the classes' test accuracies is drawn where it is known and another number, as it is
    with classes of different sizes.
    """
    training = {**_EACH_EPOCH, "color": "0.5", "marker": "s", "linestyle": "--"}
    axes.plot(*_points(epochs, "train_accuracy"), label="training", **training)
    of_average = any(event.get("tested") == "average" for event in epochs)
    label = "test of\nthe average" if of_average else "test"
    axes.plot(*_points(epochs, "test_accuracy"), label=label, **_EACH_EPOCH)
    per_class = [event for event in epochs if "test_accuracy_per_class" in event]
    if any(not math.isclose(e["test_accuracy"], e["test_accuracy_per_class"]) for e in per_class):
        look = {**_EACH_EPOCH, "marker": "^", "linestyle": ":", "markerfacecolor": "white"}
        label += ", mean of\nthe classes"
        axes.plot(*_points(per_class, "test_accuracy_per_class"), label=label, **look)
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1.05)
    legend_beside(axes)
    return axes


def draw_loss_scale(axes: Any, steps: Sequence[Event]) -> Any:
    """Draw the loss scale, in powers of two, and the steps that were skipped."""
    skipped = [event for event in steps if event["skipped"]]
    axes.step(*_points(steps, "loss_scale"), "k", where="mid", label="loss scale")
    label = f"skipped: {len(skipped)} of {len(steps)}"
    places = Counter(event.get("overflow_began_in") for event in skipped)
    for place, number in places.most_common(3) if any(places) else ():
        label += f"\n{number} in {place or 'an unknown layer'}"
    axes.plot(*_points(skipped, "loss_scale"), label=label, **CROSSES)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale S")
    legend_beside(axes)
    return axes


def draw_gradient_norm(axes: Any, steps: Sequence[Event]) -> Any:
    """Draw the norm of each step's gradients in powers of two.

    Norms are in true units, divided by loss scale and batch size. Steps whose norm is infinite or
    NaN are crosses near the upper edge; ``None`` is a gap.
    """
    events = [event for event in steps if event.get("gradient_norm") is not None]
    axes.plot(*_points(events, "gradient_norm"), "k", linewidth=1, label="each step")
    axes.set_yscale("log", base=2)
    if _mark_not_finite(axes, events, "gradient_norm"):
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.15)  # room for them
    axes.set_ylabel("gradient norm")
    legend_beside(axes)
    return axes


def draw_speed(axes: Any, steps: Sequence[Event]) -> Any:
    """Draw the images per second of each step and each epoch, from 0 upwards.

    An epoch's speed counts its steps, without the time between them.
    """
    timed = [event for event in steps if "images_per_second" in event]
    ends, means = [], []
    for epoch in sorted({event["epoch"] for event in timed}):
        own = [event for event in timed if event["epoch"] == epoch]
        ends.append(own[-1]["step"])
        seconds = sum(event["images"] / event["images_per_second"] for event in own)
        means.append(sum(event["images"] for event in own) / seconds)
    axes.plot(*_points(timed, "images_per_second"), label="each step", **_EACH_STEP)
    axes.plot(ends, means, label="mean of epoch", **_EACH_EPOCH)
    axes.set_ylabel("images per second")
    axes.set_ylim(bottom=0)
    legend_beside(axes)
    return axes


def _points(events: Sequence[Event], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values; a value that is not finite becomes NaN, which is drawn as a gap."""
    for event in events:
        missing = {name, "step"} - event.keys()
        if missing:
            raise ValueError(
                f"each event needs {name!r} and 'step'; received one without "
                f"{' and '.join(map(repr, sorted(missing)))}: {event}"
            )
    values = [event[name] if math.isfinite(event[name]) else math.nan for event in events]
    return [event["step"] for event in events], values


def _mark_not_finite(axes: Any, events: Sequence[Event], name: str) -> bool:
    """Draw a cross near the upper edge for each value that is not finite, if there are any."""
    places = [event["step"] for event in events if not math.isfinite(event[name])]
    if places:
        transform = axes.get_xaxis_transform()
        label, heights = f"not finite: {len(places)}", [0.93] * len(places)
        axes.plot(places, heights, transform=transform, label=label, **CROSSES)
    return bool(places)
