"""Exponents of a network's numbers, layer by layer, epoch by epoch: what each format would lose.

The run is the float32 one of :mod:`study.experiments.cifar10`, which keeps its checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from mpgluon import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FloatFormat
from mpgluon.base.blocks import blocks_of
from mpgluon_tools.diagnostics.exponents import EMPTY, ExponentHistogram, batch_exponents

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from recipes.opened_runs import open_a_run_with_images
from study.experiments import cifar10, figures
from study.experiments.cells import percent
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.training_runs import run_beside

__all__ = ["EPOCHS", "GROUP", "as_list", "from_list"]

_NAME = f"exponents/{cifar10.RECIPE.model}"
EPOCHS = (1, 3, 8, 16, cifar10.RECIPE.epochs)
_IMAGES = 128
_DIRECTIONS = {
    "forward": ("weights", "activations"),
    "backward": ("activation_gradients", "gradients"),
}
_WORDS = {
    "weights": "weights",
    "activations": "activations",
    "activation_gradients": "gradients of activations",
    "gradients": "gradients of weights",
}
_FORMATS = (FLOAT16, BFLOAT16, FLOAT8_E5M2, FLOAT8_E4M3)


def _measure(place: Place) -> Outcome:
    """Train, or find the run, and count the exponents of one batch after each of the epochs."""
    folder, found = run_beside(place, cifar10.BASE)
    steps = found.figures["steps"] // cifar10.RECIPE.epochs
    curves: dict[str, Sequence[int]] = {}
    for epoch in EPOCHS:
        checkpoint = folder / "checkpoints" / f"step-{epoch * steps:08d}.npz"
        for name, histogram in _exponents_of(checkpoint).items():
            curves[f"epoch-{epoch}/{name}"] = as_list(histogram)
    return Outcome({"epochs": len(EPOCHS), "images": _IMAGES}, curves)


def _exponents_of(checkpoint: Path) -> dict[str, ExponentHistogram]:
    """Return the histograms of a checkpoint's convolutions and dense layers, by kind and layer."""
    opened = open_a_run_with_images(checkpoint, mx.cpu(), _IMAGES)
    assert opened.batch is not None
    found = batch_exponents(opened.net, opened.batch)
    layers = [one for one in blocks_of(opened.net) if isinstance(one, (nn.Conv2D, nn.Dense))]
    histograms = {}
    for number, layer in enumerate(layers, 1):
        name = f"{'conv' if isinstance(layer, nn.Conv2D) else 'dense'} {number}"
        for kind, by_name in vars(found).items():
            of_weight = kind in ("weights", "gradients")
            histograms[f"{kind}/{name}"] = by_name[layer.weight.name if of_weight else layer.name]
    return histograms


def as_list(histogram: ExponentHistogram) -> list[int]:
    """Return zeros, infinities and NaNs, the first exponent that occurs, and the counts from it."""
    used = np.flatnonzero(histogram.counts)
    first, last = (int(used[0]), int(used[-1])) if len(used) else (0, -1)
    counts = histogram.counts[first : last + 1].tolist()
    return [histogram.zeros, histogram.not_finite, int(histogram.exponents[first]), *counts]


def from_list(values: Sequence[int]) -> ExponentHistogram:
    """Return the histogram of which `as_list` made the list."""
    zeros, not_finite, lowest, *counts = values
    empty = ExponentHistogram(np.zeros_like(EMPTY.counts), zeros, not_finite)
    start = lowest - int(empty.exponents[0])
    empty.counts[start : start + len(counts)] = counts
    return empty


@dataclass(frozen=True)
class _Exponents:
    """The record, and values computed from it."""

    records: Records
    epochs = EPOCHS
    images = _IMAGES

    def histograms(self, epoch: int, kind: str) -> dict[str, ExponentHistogram]:
        """Return the histograms of one kind of numbers after an epoch, by layer."""
        curves = self.records[_NAME].outcome.curves
        begin = f"epoch-{epoch}/{kind}/"
        return {
            name[len(begin) :]: from_list(values)
            for name, values in curves.items()
            if name.startswith(begin)
        }

    def lost(self, epoch: int) -> list[list[str]]:
        """Return the cells of the table of each format's losses, over all layers."""
        rows = []
        for kind in chain(*_DIRECTIONS.values()):
            all_layers = sum(self.histograms(epoch, kind).values(), EMPTY)
            shares = [all_layers.shares(fmt) for fmt in _FORMATS]
            rows.append([_WORDS[kind], *(percent(one["lost"]) for one in shares)])
        return rows

    def share_lost(self, kind: str, fmt: FloatFormat, scale: float = 1.0) -> float:
        """Return the share of scaled numbers after the last epoch that a format would lose."""
        all_layers = sum(self.histograms(EPOCHS[-1], kind).values(), EMPTY)
        return all_layers.times(scale).shares(fmt)["lost"]

    def lowest(self, direction: str) -> int:
        """Return the smallest exponent of a direction's numbers in all epochs."""
        every = product(EPOCHS, _DIRECTIONS[direction])
        counts = sum(one.counts for pair in every for one in self.histograms(*pair).values())
        return int(EMPTY.exponents[np.flatnonzero(counts)[0]])

    def ranges(self, epoch: int) -> dict[str, str]:
        """Return between which powers of two 98 % of the numbers of each kind are, all layers."""
        found = {}
        for kind in chain(*_DIRECTIONS.values()):
            counts = sum(self.histograms(epoch, kind).values(), EMPTY).counts
            ends = np.searchsorted(np.cumsum(counts), counts.sum() * np.array([0.01, 0.99]))
            low, high = EMPTY.exponents[ends] + (0, 1)
            found[kind] = f"$2^{{{low}}}$ to $2^{{{high}}}$"
        return found

    @property
    def gradients_are_smallest(self) -> bool:
        """Whether FP16 and both of eight bits lose most of the activations' gradients."""
        *others, of_activations = ("weights", "activations", "gradients", "activation_gradients")
        return all(
            self.share_lost(of_activations, fmt) > 2 * self.share_lost(kind, fmt)
            for fmt in (FLOAT16, FLOAT8_E5M2, FLOAT8_E4M3)
            for kind in others
        )

    def of_activation_gradients(self, scale: float = 1.0) -> list[str]:
        """Return in words the shares of them that FP16, E5M2 and E4M3 would lose."""
        formats = (FLOAT16, FLOAT8_E5M2, FLOAT8_E4M3)
        return [percent(self.share_lost("activation_gradients", fmt, scale)) for fmt in formats]


def _draw(direction: str, epoch: int, figure: Any, records: Records) -> None:
    view = _Exponents(records)
    kinds = {_WORDS[kind]: view.histograms(epoch, kind) for kind in _DIRECTIONS[direction]}
    lowest = view.lowest(direction)  # the same axis in all epochs
    figures.draw_layers(figure, kinds, f"after epoch {epoch} of {EPOCHS[-1]}", lowest)


def _draw_flow(figure: Any, records: Records) -> None:
    figures.draw_data_flow(figure, _Exponents(records).ranges(EPOCHS[-1]))


GROUP = Group(
    "exponents",
    [
        Experiment(
            _NAME,
            {**cifar10.BASE.config, "epochs_shown": list(EPOCHS), "images": _IMAGES},
            _measure,
        )
    ],
    _Exponents,
    {
        "data-flow": _draw_flow,
        **{
            f"exponents-{direction}-{epoch:02}": partial(_draw, direction, epoch)
            for direction in _DIRECTIONS
            for epoch in EPOCHS
        },
    },
)
