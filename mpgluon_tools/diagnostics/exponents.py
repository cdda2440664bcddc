"""Histograms of exponents: which part of a format's range the numbers use, and what is lost.

A float is m x 2^e with 1 <= m < 2; the histogram counts e. Multiplying by a loss scale of 2^k moves
it k bins to the right and does nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mpgluon import amp
from mpgluon.formats.float_format import FLOAT16, FloatFormat
from mpgluon.updates import gluon_trainer
from mpgluon_tools.diagnostics.observe import Batch, Seen, observed_batch, values_of
from mpgluon_tools.plots.axes import axes_or_new
from mpgluon_tools.plots.exponents import draw_exponents
from mpgluon_tools.tables import Result, Table, percent

import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = [
    "BatchExponents",
    "ExponentHistogram",
    "ExponentRecorder",
    "ExponentSample",
    "batch_exponents",
    "exponent_histogram",
]

_LOWEST, _HIGHEST = -149, 127  # of float32, subnormals included


@dataclass(frozen=True)
class ExponentHistogram(Result):
    """How often each exponent occurs.

    Attributes
    ----------
    counts : array of int, shape (277,)
        Counts of the exponents from -149 to 127, all that float32 has.
    zeros, not_finite : int
        Numbers without an exponent.
    """

    counts: npt.NDArray[np.int64]
    zeros: int = 0
    not_finite: int = 0

    @property
    def exponents(self) -> npt.NDArray[np.int64]:
        """The exponents, shape (277,)."""
        return np.arange(_LOWEST, _HIGHEST + 1)

    @property
    def total(self) -> int:
        """The number of all values, also of those without an exponent."""
        return int(self.counts.sum()) + self.zeros + self.not_finite

    def __add__(self, other: ExponentHistogram) -> ExponentHistogram:
        return ExponentHistogram(
            self.counts + other.counts,
            self.zeros + other.zeros,
            self.not_finite + other.not_finite,
        )

    def times(self, scale: float) -> ExponentHistogram:
        """Return the histogram of the numbers times a power of two, in float32's range."""
        shift = round(math.log2(scale))
        if scale != 2.0**shift:
            raise ValueError(f"scale must be a power of two, received {scale!r}")
        moved = np.zeros_like(self.counts)
        places = np.arange(len(moved)) + shift
        inside = (places >= 0) & (places < len(moved))
        moved[places[inside]] = self.counts[inside]
        return ExponentHistogram(
            moved,
            self.zeros + int(self.counts[places < 0].sum()),
            self.not_finite + int(self.counts[places >= len(moved)].sum()),
        )

    def shares(self, fmt: FloatFormat = FLOAT16) -> dict[str, float]:
        """Return the shares of the nonzero numbers in each part of a format's range.

        Returns
        -------
        dict
            ``"lost"``: below the smallest subnormal; rounding to nearest saves some of the highest
            exponent of these. ``"subnormal"``, ``"normal"``. ``"overflow"``: above the largest
            exponent, or not finite. They add up to 1, or are all 0 if every number is zero.
        """
        exponents = self.exponents
        subnormal = round(math.log2(fmt.smallest_subnormal))
        edges = np.searchsorted(exponents, [subnormal, fmt.min_exponent, fmt.max_exponent + 1])
        parts = (int(part.sum()) for part in np.split(self.counts, edges))
        counted = dict(zip(("lost", "subnormal", "normal", "overflow"), parts))
        counted["overflow"] += self.not_finite
        total = sum(counted.values())
        return {name: count / total if total else 0.0 for name, count in counted.items()}

    def table(self, fmt: FloatFormat = FLOAT16) -> Table:
        """Return the shares of the numbers in each part of a format's range, in percent."""
        return _table({"all": self}, fmt)

    def plot(self, ax: Any = None) -> Any:
        """Draw the histogram over float16's ranges.

        Draws on ``ax``, Axes of Matplotlib, by default of a new figure, and returns them.
        """
        return draw_exponents(axes_or_new(ax), {"values": self})


def _table(histograms: Mapping[str, ExponentHistogram], fmt: FloatFormat) -> Table:
    rows = []
    for name, histogram in histograms.items():
        zeros = histogram.zeros / histogram.total if histogram.total else 0.0
        rows.append((name, *map(percent, [*histogram.shares(fmt).values(), zeros])))
    return Table(("numbers", "lost", "subnormal", "normal", "overflow", "zero"), rows)


EMPTY = ExponentHistogram(np.zeros(_HIGHEST - _LOWEST + 1, dtype=np.int64))


def exponent_histogram(arrays: Iterable[Any]) -> ExponentHistogram:
    """Count the exponents of all elements; waits for the devices.

    Parameters
    ----------
    arrays : iterable of NDArray or NumPy array, any shapes, any floating dtype
        A sparse array counts with its stored rows.
    """
    histogram = EMPTY
    for array in arrays:
        histogram = histogram + _histogram_of(array)
    return histogram


def _histogram_of(array: Any) -> ExponentHistogram:
    if isinstance(array, NDArray):
        array = values_of(array)
    values = np.asarray(array, dtype=np.float32).ravel()
    finite = np.isfinite(values)
    used = finite & (values != 0)
    _, exponents = np.frexp(values[used])  # of a mantissa in [0.5, 1)
    counts = np.bincount(exponents - 1 - _LOWEST, minlength=len(EMPTY.counts)).astype(np.int64)
    return ExponentHistogram(counts, int((values == 0).sum()), int((~finite).sum()))


@dataclass(frozen=True)
class BatchExponents(Result):
    """Histograms of all arrays of one batch, gradients without the loss scale.

    Attributes
    ----------
    weights, gradients : mapping from parameter name to ExponentHistogram
    activations, activation_gradients : mapping from block name to ExponentHistogram
        Histograms of the results of each block without inner blocks, in order of computation.
    """

    weights: Mapping[str, ExponentHistogram]
    gradients: Mapping[str, ExponentHistogram]
    activations: Mapping[str, ExponentHistogram]
    activation_gradients: Mapping[str, ExponentHistogram]

    def overall(self) -> dict[str, ExponentHistogram]:
        """Return one histogram for each of the four."""
        return {
            name.replace("_", " "): sum(getattr(self, name).values(), EMPTY)
            for name in ("weights", "activations", "activation_gradients", "gradients")
        }

    def table(self, fmt: FloatFormat = FLOAT16) -> Table:
        """Return the shares of the numbers in each part of a format's range, in percent."""
        return _table(self.overall(), fmt)

    def plot(self, ax: Any = None) -> Any:
        """Draw one histogram for each of the four over float16's ranges.

        Draws on ``ax``, Axes of Matplotlib, by default of a new figure, and returns them.
        """
        return draw_exponents(axes_or_new(ax), self.overall())

    def __str__(self) -> str:
        return str(self.table())


def batch_exponents(net: gluon.Block, batch: Batch, *, loss_scale: float = 1.0) -> BatchExponents:
    """Run one batch and return the exponents of everything, gradients divided by ``loss_scale``.

    Parameters
    ----------
    net : gluon.Block
        In FP32, to see what a cast would lose; or cast, to see what is left, with the loss scale
        of its training.
    batch : Batch
    loss_scale : float
        A power of two.
    """
    activations: dict[str, ExponentHistogram] = {}
    gradients: dict[str, ExponentHistogram] = {}

    def note(seen: Seen) -> None:
        if seen.block._children or seen.kind == "gradient":
            return
        histograms = activations if seen.kind == "output" else gradients
        before = histograms.get(seen.block.name, EMPTY)
        histograms[seen.block.name] = before + _histogram_of(seen.array)

    of_parameters = observed_batch(net, batch, note, loss_scale=loss_scale)
    return BatchExponents(
        weights={p.name: exponent_histogram(p.list_data()[:1]) for p in of_parameters},
        gradients={
            p.name: _histogram_of(gradient).times(1 / loss_scale)
            for p, gradient in of_parameters.items()
        },
        activations=activations,
        activation_gradients={n: h.times(1 / loss_scale) for n, h in gradients.items()},
    )


@dataclass(frozen=True)
class ExponentSample:
    """Exponents of one step: of its gradients without the loss scale, and of the weights after."""

    step: int
    weights: ExponentHistogram
    gradients: ExponentHistogram


class ExponentRecorder:
    """Samples the exponents of a training run.

    Parameters
    ----------
    trainer : gluon.Trainer
        After ``amp.init_trainer``.
    every : int
        Steps from one sample to the next. A sample waits for the devices and copies all gradients
        and weights to the CPU; the other steps cost nothing.

    Attributes
    ----------
    samples : list of ExponentSample

    Raises
    ------
    ValueError
        If ``every`` is less than 1.
    """

    def __init__(self, trainer: gluon.Trainer, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, received {every}")
        self._trainer, self._every = trainer, every
        self._step = 0
        self.samples: list[ExponentSample] = []

    def after_step(self) -> None:
        """Take a sample if one is due; call this after each ``trainer.step``."""
        self._step += 1
        if self._step % self._every:
            return
        gradients = amp.unscaled_gradients(self._trainer)
        weights = [
            parameter.list_data()[0]
            for parameter in gluon_trainer.parameters_of(self._trainer)
            if parameter.grad_req != "null"
        ]
        self.samples.append(
            ExponentSample(
                self._step, exponent_histogram(weights), exponent_histogram(gradients.values())
            )
        )
