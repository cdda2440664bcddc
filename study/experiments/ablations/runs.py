"""Training runs with one measure of mixed precision left out; BatchNorm's is in another module.

Each function takes a variant's name and the settings of its ablation, which
:mod:`study.experiments.ablations` lists, and returns the outcome.
"""

from __future__ import annotations

import math
from typing import Any

import mpgluon
from mpgluon import DynamicLossScale, amp
from mpgluon.updates import gluon_trainer
from mpgluon_tools.diagnostics.exponents import batch_exponents
from mpgluon_tools.diagnostics.observe import Batch

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.contrib import amp as contrib_amp
from mxnet.contrib.amp.loss_scaler import LossScaler
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from study.experiments.ablations.training import (
    batches,
    cross_entropy,
    first_weights,
    sgd,
    shapes,
    train,
)
from study.experiments.experiment import Outcome
from study.experiments.series import means, rounded

__all__ = ["EXACT", "back_off", "following_words", "labels", "loss_reduction", "masters",
           "underflow"]  # fmt: skip

EXACT = 2**11 + 1
"""How many labels, from 0, float16 holds before the first gap."""

_FOLLOWERS = 8
_squares = gluon.loss.L2Loss()


def masters(variant: str, settings: Any) -> Outcome:
    """Train a small convolutional network with plain SGD and without a loss scale.

    Variants: "float32"; the cast network "with" FP32 masters; and "without", where MXNet's
    optimizer adds to the float16 weights (``multi_precision=False``, its default).
    """
    images, labels = shapes(settings.images_per_class, settings.image_size)
    net = nn.HybridSequential()
    for channels in (16, 32):
        net.add(nn.Conv2D(channels, 3, padding=1, activation="relu"), nn.MaxPool2D())
    net.add(nn.Dense(64, activation="relu"), nn.Dense(10))
    first_weights(net, mx.nd.zeros((1, *images.shape[1:])), cast=variant != "float32")
    trainer = sgd(
        net, "none", learning_rate=settings.learning_rate, multi_precision=variant == "with"
    )
    before: list[npt.NDArray[Any]] = []
    unchanged: list[float] = []

    def observe(step: int) -> None:
        if step % settings.every == settings.every - 1:
            before[:] = [one.data().asnumpy() for one in gluon_trainer.parameters_of(trainer)]
        elif step % settings.every == 0:
            unchanged.append(_share_unchanged(before, gluon_trainer.parameters_of(trainer)))

    data = batches(images / 127.5 - 1, labels, settings.batch_size)
    losses = train(net, cross_entropy, data, trainer, settings.steps, after_step=observe)
    curve = means(losses, settings.every)
    return Outcome(
        figures={"final_loss": curve[-1], "unchanged": rounded(float(np.mean(unchanged)))},
        curves={"loss": curve, "unchanged": [rounded(share) for share in unchanged]},
    )


def _share_unchanged(before: list[npt.NDArray[Any]], parameters: list[gluon.Parameter]) -> float:
    """Return which share of the weights with a gradient kept its value."""
    stayed = trained = 0
    for old, parameter in zip(before, parameters):
        has_gradient = parameter.grad().asnumpy() != 0
        trained += int(has_gradient.sum())
        stayed += int((parameter.data().asnumpy() == old)[has_gradient].sum())
    return stayed / trained


def underflow(variant: str, settings: Any) -> Outcome:
    """Train an autoencoder with half the squared error averaged over all pixels.

    Variants: "float32", and the cast network with a dynamic loss scale ("scaled") and without one
    ("unscaled").
    """
    images = shapes(settings.images_per_class, settings.image_size)[0] / 255
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 4, strides=4, activation="relu"))
    net.add(nn.Conv2D(16, 3, padding=1, activation="relu"))
    net.add(nn.Conv2D(16, 3, padding=1, activation="relu"))
    net.add(nn.Conv2DTranspose(3, 4, strides=4, activation="sigmoid"))
    first = mx.nd.array(images[: settings.batch_size])
    first_weights(net, first, cast=variant != "float32")
    loss_scale = "dynamic" if variant == "scaled" else "none"
    trainer = sgd(net, loss_scale, learning_rate=settings.learning_rate, momentum=0.9)
    data = batches(images, images, settings.batch_size)
    curve = means(train(net, _mean_square, data, trainer, settings.steps), settings.every)
    scale = amp.loss_scale(trainer)
    nonzero = _nonzero_gradients(net, first, scale)
    mpgluon.restore(net)  # the same weights in FP32
    return Outcome(
        figures={
            "final_loss": curve[-1],
            "lost_gradients": rounded(1 - nonzero / _nonzero_gradients(net, first, 1.0)),
            "loss_scale": scale,
            "elements_of_the_mean": int(first.size),
        },
        curves={"loss": curve},
    )


def _mean_square(outputs: NDArray, images: NDArray) -> NDArray:
    return _squares(outputs, images).mean()


def _nonzero_gradients(net: gluon.Block, images: NDArray, scale: float) -> int:
    """Return how many gradients of the layers' results are not zero."""
    found = batch_exponents(net, Batch(images, images, _mean_square), loss_scale=scale)
    return int(found.overall()["activation gradients"].counts.sum())


def loss_reduction(variant: str, settings: Any) -> Outcome:
    """Train an embedding and a layer, both cast to float16, to predict the next word.

    The variant, "float32" or "float16", is the format in which ``SoftmaxCrossEntropyLoss``
    receives the logits and computes. The mean over the batch and all that follows are FP32.
    """
    words, next_words = following_words(settings.vocabulary, settings.pairs)
    net = nn.HybridSequential()
    net.add(nn.Embedding(settings.vocabulary, settings.features))
    net.add(nn.Dense(settings.vocabulary, in_units=settings.features))
    first_weights(net)
    trainer = sgd(net, learning_rate=settings.learning_rate, momentum=0.9)
    one_by_one = gluon.loss.SoftmaxCrossEntropyLoss()
    true_losses: list[float] = []

    def loss_fn(logits: NDArray, targets: NDArray) -> NDArray:
        true_losses.append(float(cross_entropy(logits.detach(), targets).asscalar()))
        return one_by_one(logits.astype(variant), targets).astype("float32").mean()

    data = batches(words, next_words, settings.batch_size)
    losses = train(net, loss_fn, data, trainer, settings.steps)
    true_curve, reported = means(true_losses, settings.every), means(losses, settings.every)
    return Outcome(
        figures={
            "first_true_loss": means(true_losses[:1], 1)[0],
            "first_reported_loss": means(losses[:1], 1)[0],
            "final_true_loss": true_curve[-1],
            "final_reported_loss": reported[-1],
        },
        curves={"true_loss": true_curve, "reported_loss": reported},
    )


def following_words(
    vocabulary: int, pairs: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Draw words, and for each the word that follows it: one of eight that can.

    Words are as frequent as in a language (Zipf: the n-th one n times less than the first).

    Returns
    -------
    words, next_words : array of int32, shape (pairs,)
    """
    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, vocabulary + 1)
    frequency /= frequency.sum()
    followers = rng.choice(vocabulary, size=(vocabulary, _FOLLOWERS), p=frequency)
    words = rng.choice(vocabulary, size=pairs, p=frequency)
    chosen = followers[words, rng.integers(_FOLLOWERS, size=pairs)]
    return words.astype(np.int32), chosen.astype(np.int32)


def labels(variant: str, settings: Any) -> Outcome:
    """Train one layer in float16 to classify points into many classes.

    The variant, "int32" or "float16", is the format of the labels that the loss receives. Of each
    class one point is kept for the test.
    """
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(settings.classes, settings.features))
    numbers = np.repeat(np.arange(settings.classes, dtype=np.int32), settings.samples_per_class)
    noise = rng.normal(scale=settings.spread, size=(len(numbers), settings.features))
    points = (centres[numbers] + noise).astype(np.float32)
    test = mx.nd.array(centres + rng.normal(scale=settings.spread, size=centres.shape))
    net = nn.HybridSequential()
    net.add(nn.Dense(settings.classes, in_units=settings.features))
    first_weights(net)
    trainer = sgd(net, learning_rate=settings.learning_rate, momentum=0.9)
    below: list[float] = []
    above: list[float] = []

    def loss_fn(logits: NDArray, chosen: NDArray) -> NDArray:
        return cross_entropy(logits, chosen.astype(variant))

    def observe(step: int) -> None:
        if step % settings.every == 0:
            right = net(test).argmax(axis=1).asnumpy() == np.arange(settings.classes)
            below.append(float(right[:EXACT].mean()))
            above.append(float(right[EXACT:].mean()))

    data = batches(points, numbers, settings.batch_size)
    losses = train(net, loss_fn, data, trainer, settings.steps, after_step=observe)
    curve = means(losses, settings.every)
    return Outcome(
        figures={
            "final_loss": curve[-1],
            "accuracy_below": rounded(below[-1]),
            "accuracy_above": rounded(above[-1]),
        },
        curves={
            "loss": curve,
            "accuracy_below": [rounded(share) for share in below],
            "accuracy_above": [rounded(share) for share in above],
        },
    )


def back_off(variant: str, settings: Any) -> Outcome:
    """Train a small network in float16 with the dynamic loss scale of a library, from 2**16 on.

    Both variants, "mpgluon" and "contrib", train the network that mpgluon has cast; masters begin
    with its FP32 weights, and with contrib.amp, as MXNet makes them, with rounded ones. There is
    no normalization layer: contrib.amp cannot check gradients of two formats together.
    """
    images, classes = shapes(settings.images_per_class, settings.image_size)
    net = nn.HybridSequential()
    net.add(nn.Dense(32, activation="relu", in_units=3 * settings.image_size**2))
    net.add(nn.Dense(10, in_units=32))
    first_weights(net)
    interval, is_ours = settings.growth_interval, variant == "mpgluon"
    ours = DynamicLossScale(2.0**16, growth_interval=interval) if is_ours else None
    trainer = sgd(net, ours, learning_rate=settings.learning_rate)
    theirs = _ContribScale(interval)
    if not is_ours:
        gluon_trainer.set_loss_scaler(trainer, theirs)
        trainer._amp_original_scale = gluon_trainer.scale_of(trainer)  # contrib.amp's own field
    losses_of = gluon.loss.SoftmaxCrossEntropyLoss()
    scales: list[float] = []
    skipped_at: list[int] = []

    def loss_fn(logits: NDArray, targets: NDArray) -> NDArray:
        scales.append(amp.loss_scale(trainer) if is_ours else theirs.loss_scale)
        return losses_of(logits, targets)

    def observe(step: int) -> None:
        if amp.step_was_skipped(trainer) if is_ours else theirs.skipped:
            skipped_at.append(step)

    losses = train(
        net,
        loss_fn,
        batches(images / 127.5 - 1, classes, settings.batch_size),
        trainer,
        settings.steps,
        library=amp if is_ours else contrib_amp,
        step_size=settings.batch_size,
        after_step=observe,
    )
    powers = [round(math.log2(scale)) for scale in scales]
    return Outcome(
        figures={
            "final_loss": means(losses[-interval:], interval)[0],
            "skipped_steps": len(skipped_at),
            "skipped_at_a_scale_that_just_failed": sum(
                # Steps count from 1, so powers[step] is the scale of the step after it.
                step + 1 in skipped_at and powers[step] == powers[step - 1]
                for step in skipped_at
            ),
            "mean_log2_scale": rounded(sum(powers) / settings.steps),
        },
        curves={"log2_scale": powers, "skipped_at": skipped_at},
    )


class _ContribScale(LossScaler):
    """contrib.amp's loss scale with a chosen growth interval, which remembers its last answer."""

    def __init__(self, growth_interval: int) -> None:
        super().__init__()
        self._scale_seq_len = growth_interval
        self.skipped = False

    def has_overflow(self, params: Any) -> bool:
        self.skipped = bool(super().has_overflow(params))
        return self.skipped
