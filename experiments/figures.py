"""Pictures of the groups of experiments; marks and line styles tell formats apart.

All are ``WIDTH`` inches wide, so that words in Matplotlib's usual sizes can be read on a page of
420 pixels: what does not fit into that width goes below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from mpgluon.diagnostics.exponents import ExponentHistogram
from mpgluon.tools.plots import FORMAT_LOOKS, draw_exponent_heatmap

import numpy as np

from experiments.experiment import Outcome, Record

__all__ = ["WIDTH", "draw_accuracies", "draw_batch_doubling", "draw_curves", "draw_data_flow",
           "draw_engines", "draw_growing_resolution", "draw_layers", "draw_learning",
           "draw_loss_scales", "draw_recurrent", "draw_rows", "draw_sequences", "draw_step_times",
           "draw_two_losses"]  # fmt: skip

_LOOKS: dict[str, Mapping[str, Any]] = {
    **FORMAT_LOOKS,
    "static_float16": {"color": "#009E73", "marker": "v", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    # how updates of bfloat16 weights are rounded
    "nearest": {"color": "0.45", "marker": "x"},
    "stochastic": {"color": "#CC79A7", "marker": "D"},
    "kahan": {"color": "#E69F00", "marker": "P"},
    # what shares a scale in eight bits
    "tensor": FORMAT_LOOKS["mixed_float8"],
    "mx": {"color": "#CC79A7", "marker": "D"},
    "none": {"color": "0.45", "marker": "x"},
    # whose Tensor Core
    "volta": {"color": "#CC79A7", "marker": "D"},
    "ampere": {"color": "#E69F00", "marker": "P"},
    "hopper": {"color": "#009E73", "marker": "v"},
}
_RECURRENT_FORMATS = ("float32", "float16", "mixed_float16", "bfloat16")
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
_BELOW: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "columnspacing": 1}
_SEED_STYLES = ("-", "--", ":", "-.", (0, (6, 1)))
_SMOOTHED_STEPS = 20  # an epoch
_NETWORKS_IN_A_ROW = 3
WIDTH = 6.2  # inches of every picture
_PLACES: dict[str, tuple[tuple[int, int], str]] = {  # in a step's data flow, from left and from top
    "images": ((0, 0), "images"),
    "convolution": ((0, 1), "convolution,\nsums in FP32"),
    "norm": ((0, 2), "BatchNorm, ReLU,\nsums in FP32"),
    "loss": ((0, 3), "other layers,\nloss in FP32"),
    "scale": ((2, 3), "loss $\\times$ S"),
    "norm gradient": ((2, 2), "gradients of\nReLU, BatchNorm"),
    "convolution gradient": ((2, 1), "gradients of the\nconvolution"),
    "optimizer": ((2, 0), "optimizer in FP32:\n$\\div$ S, finite or skipped"),
    "masters": ((1, 0), "FP32 masters"),
    "weights": ((1, 1), "FP16 weights"),
}
_FLOWS = (  # from, to, format, and the numbers whose range is known
    ("images", "convolution", "FP16", None),
    ("weights", "convolution", "FP16", "weights"),
    ("convolution", "norm", "FP16", "activations"),
    ("norm", "norm gradient", "FP16, kept for the backward pass", None),
    ("norm", "loss", "FP16", None),
    ("loss", "scale", "FP32", None),
    ("scale", "norm gradient", "FP16", None),
    ("norm gradient", "convolution gradient", "FP16", "activation_gradients"),
    ("weights", "convolution gradient", "FP16", None),
    ("convolution gradient", "optimizer", "FP16", "gradients"),
    ("optimizer", "masters", "FP32", None),
    ("masters", "weights", "rounded", None),
)


def _line(row: str) -> dict[str, Any]:
    return {key: value for key, value in _LOOKS[row].items() if key != "marker"}


def _finite(values: Sequence[Optional[float]]) -> Any:
    """Return an array with NaN, a gap in a line, for what is not finite."""
    return np.array([math.nan if value is None else value for value in values])


def _step_curve(axes: Any, changes: Sequence[Any], steps: int, **look: Any) -> None:
    """Draw a loss scale that is given by its changes, up to the end of the last step."""
    places, scales = zip(*changes)
    axes.step([*places, steps + 1], [*scales, scales[-1]], where="post", **look)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale S")


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
            look = {**_LOOKS[row], "linestyle": "none", "markerfacecolor": "none"}
            beside = at + width / 5 * (np.arange(len(values)) - (len(values) - 1) / 2)
            axes.plot(beside, values, label=row if place == 0 else None, **look)
            axes.plot([at - width / 3, at + width / 3], [values.mean()] * 2,
                      color=_LOOKS[row]["color"], linewidth=2)  # fmt: skip
    for first, axes in zip(range(0, len(networks), _NETWORKS_IN_A_ROW), panels):
        shown = networks[first : first + _NETWORKS_IN_A_ROW]
        axes.set_xticks(range(first, first + len(shown)), shown)
        axes.set_xlim(first - 0.5, first + len(shown) - 0.5)
        axes.set_ylabel("test accuracy (points)")
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, **_BELOW, ncols=3, title="mark: a seed, bar: their mean")


def draw_rows(figure: Any, points: Mapping[str, Sequence[float]], label: str) -> None:
    """Draw each run's figure as a mark in the line of its row, under the row's name.

    Parameters
    ----------
    figure : Figure
    points : mapping of str to sequence of float
        By row; the range of the first is a band behind all.
    label : str
        The name of the axis.
    """
    figure.set_size_inches(WIDTH, 0.8 + 0.42 * len(points))
    axes = figure.subplots()
    first = next(iter(points.values()))
    axes.axvspan(min(first), max(first), color="0.88", linewidth=0)
    for place, (name, values) in enumerate(points.items()):
        axes.plot(values, [place] * len(values), "o", color="#0072B2", markerfacecolor="none")
        axes.text(0.01, place - 0.3, name, transform=axes.get_yaxis_transform(), va="center")
    axes.set_ylim(len(points) - 0.5, -0.7)
    axes.set_yticks([])
    axes.set_xlabel(label)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)


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
        axes.plot(found, range(len(found)), label=label, linestyle="none", **look)
    for place, name in enumerate(points):
        axes.text(0.01, place - 0.3, name, transform=axes.get_yaxis_transform(), va="center")
    axes.set_ylim(len(points) - 0.5, -0.7)
    axes.set_yticks([])
    axes.set_xlim(left=0)
    axes.set_xlabel("time of a batch, MXNet's in FP32 = 1")
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    figure.legend(**_BELOW, ncols=len(batches))


def draw_curves(figure: Any, runs: Mapping[str, Record], title: str, seed: int) -> None:
    """Draw loss and test accuracy of one run in each format."""
    figure.set_size_inches(WIDTH, 6)
    above, below = figure.subplots(2, 1, sharex=True)
    for name, record in runs.items():
        outcome = record.outcome
        above.plot(*_smoothed(outcome), **_line(name))
        accuracies = 100 * np.array(outcome.curves["test_accuracy"])
        ends = outcome.figures["steps"] / len(accuracies) * np.arange(1, len(accuracies) + 1)
        look = {**_LOOKS[name], "markersize": 5, "markerfacecolor": "none"}
        below.plot(ends, accuracies, label=name, **look)
    above.set_ylabel(f"training loss\n(mean of the last {_SMOOTHED_STEPS} points)")
    above.set_ylim(bottom=0)
    below.set_ylabel("test accuracy (points)")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(color="0.92")
    handles, labels = below.get_legend_handles_labels()
    figure.legend(handles, labels, **_BELOW, ncols=4)
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
    figure.legend(handles, labels, **_BELOW, ncols=min(len(labels), 3), title=title)


def draw_layers(
    figure: Any, kinds: Mapping[str, Mapping[str, ExponentHistogram]], title: str, low: int
) -> None:
    """Draw a row of exponents for each layer, from ``low``; a panel for each kind of numbers."""
    layers = max(map(len, kinds.values()))
    figure.set_size_inches(WIDTH, 0.7 + len(kinds) * (0.7 + 0.11 * layers))
    for axes, (kind, by_layer) in zip(figure.subplots(len(kinds), 1), kinds.items()):
        draw_exponent_heatmap(axes, list(by_layer), list(by_layer.values()), low=low)
        axes.set_title(kind, fontsize="medium", pad=16)
    figure.suptitle(title, fontsize="medium")


def draw_data_flow(figure: Any, ranges: Mapping[str, str]) -> None:
    """Draw a step of training in FP16: what is computed, and the format on each arrow.

    Parameters
    ----------
    figure : Figure
    ranges : mapping of str to str
        Words for the range of weights, activations, activation_gradients and gradients.
    """
    figure.set_size_inches(WIDTH, 5.6)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-0.5, 2.5)
    axes.set_ylim(3.25, -0.25)
    outline = {"boxstyle": "round", "facecolor": "white", "edgecolor": "0.3"}
    boxes = {
        name: axes.text(*place, words, ha="center", va="center", bbox=outline).get_bbox_patch()
        for name, (place, words) in _PLACES.items()
    }
    for begin, end, words, kind in _FLOWS:
        (x, y), (to_x, to_y) = _PLACES[begin][0], _PLACES[end][0]
        color, width = ("black", 1) if words == "FP32" else ("#0072B2", 2)
        arrow = {"arrowstyle": "->", "color": color, "linewidth": width,
                 "patchA": boxes[begin], "patchB": boxes[end]}  # fmt: skip
        axes.annotate("", (to_x, to_y), xytext=(x, y), arrowprops=arrow)
        by_line = {"x": x + 0.03, "y": (y + to_y) / 2, "va": "center"}
        over_line = {"x": (x + to_x) / 2, "y": y - 0.08, "va": "bottom", "ha": "center"}
        text = words if kind is None else f"{words}\n{ranges[kind]}"
        axes.text(**(by_line if x == to_x else over_line), s=text, color=color, fontsize="small")


def _smoothed(outcome: Outcome) -> tuple[Any, Any]:
    """Return steps, and means of the losses up to each of them."""
    loss = _finite(outcome.curves["loss"])
    steps = 1 + outcome.figures["steps_per_point"] * np.arange(len(loss))
    kernel = np.ones(min(_SMOOTHED_STEPS, len(loss)))
    return steps[len(kernel) - 1 :], np.convolve(loss, kernel / len(kernel), "valid")


def draw_loss_scales(figure: Any, runs: Mapping[str, Mapping[int, Record]], title: str) -> None:
    """Draw loss scales of runs by row and seed: a panel for each row, a line for each seed."""
    figure.set_size_inches(WIDTH, 2 + 2 * len(runs))
    panels = list(figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0])
    for axes, (name, of_row) in zip(panels, runs.items()):
        for (seed, record), style in zip(of_row.items(), _SEED_STYLES):
            outcome = record.outcome
            _step_curve(axes, outcome.curves["loss_scale"], outcome.figures["steps"],
                        linestyle=style, color=_LOOKS[name]["color"],
                        label=f"seed {seed}")  # fmt: skip
        axes.grid(color="0.92")
        axes.set_title(name, fontsize="medium")
    handles, labels = panels[0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, **_BELOW, ncols=len(labels), handlelength=1.6)
    for handle in legend.legend_handles:
        handle.set_color("black")  # styles tell seeds apart in every panel
    panels[-1].set_xlabel("step")
    figure.suptitle(title, fontsize="medium")


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
    figure.legend(handles, labels, **_BELOW, ncols=len(labels))


def _draw_reader(row: Any, record: Record, name: str, window: int) -> None:
    above, middle, below = row
    # A wide line shows under the others where they coincide.
    look = {**_line(name), "linewidth": 3.5 if name == "float32" else 1.5}
    curves, steps = record.outcome.curves, record.outcome.figures["steps"]
    losses = _finite(curves["loss"])
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
            look = {**_line(name), "linewidth": 3.5 if name == "float32" else 1.5}
            steps = outcomes[0].figures["steps"]
            found = np.array([_finite(one.curves["loss"]) for one in outcomes])
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
    figure.legend(handles, labels, **_BELOW, ncols=len(labels), title=title)


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
        look = {**_LOOKS[name], "linestyle": "none", "capsize": 3}
        axes.errorbar(at, middle, [middle - low, high - middle], label=name, **look)
    axes.set_xticks(range(len(times)), list(times), rotation=20)
    axes.set_ylabel("time per step, float32 = 1\n(median and quartiles)")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    figure.legend(**_BELOW, ncols=len(formats))


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
            values = _finite(outcome.curves[f"{name}_loss"])
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
        _step_curve(axes, changes, outcome.figures["steps"], label=f"{name}'s", **look)
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
        The exponents are those of the first, the scales those of the second.
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
        look = {**_LOOKS[dtype], "markersize": 4}
        left.plot(sizes, [by_batch[one] for one in sizes], label=dtype, **look)
    limit = peaks["float32"][batch]
    left.axhline(limit, color="0.6", linewidth=1, zorder=0)
    left.annotate(f"float32 at {batch}", (1, limit), xycoords=("axes fraction", "data"),
                  xytext=(-3, -12), textcoords="offset points", ha="right", va="top")  # fmt: skip
    left.set_ylabel("peak memory (MiB)")
    left.set_ylim(0, 1.1 * max(max(by_batch.values()) for by_batch in peaks.values()))
    for (dtype, size), values in points.items():
        look = {**_LOOKS[dtype], "linestyle": "none", "markerfacecolor": "none"}
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
    figure.legend(handles, labels, **_BELOW, ncols=2, title="mark: a seed, bar: their mean")
