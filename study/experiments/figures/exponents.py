"""Figures of the numbers of a step: exponents by layer, and formats by arrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpgluon_tools.diagnostics.exponents import ExponentHistogram
from mpgluon_tools.plots import draw_exponent_heatmap

from study.experiments.figures.looks import WIDTH

__all__ = ["draw_data_flow", "draw_layers"]

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
    """Draw a step of training in FP16: the computations, and the format on each arrow.

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
