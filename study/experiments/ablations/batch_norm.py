"""BatchNorm with its sums in float16, as a naive kernel would compute it, and training with it.

For comparison only: MXNet's own BatchNorm sums in FP32, whatever format it receives.
"""

from __future__ import annotations

from typing import Any

import mpgluon
from mpgluon import amp, cast_block

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from study.experiments.ablations.training import batches, cross_entropy, sgd, shapes, train
from study.experiments.experiment import Outcome
from study.experiments.series import means, rounded

__all__ = ["Float16BatchNorm", "batch_norm", "float16_mean", "float16_statistics"]

_EPSILON = 1e-5  # as in Gluon

Half = npt.NDArray[np.float16]


def batch_norm(variant: str, settings: Any) -> Outcome:
    """Train a network that begins as ResNet v2 does: BatchNorm on the images, then convolutions.

    The variant, "float32", "float16" or "float16-bytes", is the format of BatchNorm; all else is
    float16 with masters and a dynamic loss scale. With "bytes" the pixels are from 0 to 255,
    otherwise from 0 to 1.
    """
    images, labels = shapes(settings.images_per_class, settings.image_size)
    if variant != "float16-bytes":
        images /= 255
    net = _network(nn.BatchNorm if variant == "float32" else Float16BatchNorm)
    # In the cast network, the layer after BatchNorm rounds its input to float16 again.
    cast_block(net, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, Float16BatchNorm))
    trainer = sgd(net, learning_rate=settings.learning_rate, momentum=0.9)
    accuracies: list[float] = []
    skips: list[bool] = []

    def loss_fn(logits: NDArray, chosen: NDArray) -> NDArray:
        right = logits.argmax(axis=1).asnumpy() == chosen.asnumpy()
        accuracies.append(float(right.mean()))
        return cross_entropy(logits, chosen)

    def observe(_: int) -> None:
        skips.append(amp.step_was_skipped(trainer))

    data = batches(images, labels, settings.batch_size)
    losses = train(net, loss_fn, data, trainer, settings.steps, after_step=observe)
    loss_curve, accuracy_curve = means(losses, settings.every), means(accuracies, settings.every)
    return Outcome(
        figures={
            "final_loss": loss_curve[-1],
            "final_accuracy": accuracy_curve[-1],
            "skipped_steps": sum(skips),
            "first_skipped_step": skips.index(True) + 1 if any(skips) else None,
            **_first_statistics(images[: settings.batch_size]),
        },
        curves={"loss": loss_curve, "accuracy": accuracy_curve},
    )


def _network(normalization: Any) -> gluon.Block:
    mx.random.seed(0)
    net = nn.Sequential()
    net.add(normalization(in_channels=3))
    for channels, inputs in ((16, 3), (32, 16)):
        net.add(nn.Conv2D(channels, 3, padding=1, in_channels=inputs))
        net.add(normalization(in_channels=channels), nn.Activation("relu"), nn.MaxPool2D())
    net.add(nn.GlobalAvgPool2D(), nn.Dense(10, in_units=32))
    net.initialize(mx.init.Xavier())
    return net


def _first_statistics(images: npt.NDArray[Any]) -> dict[str, Any]:
    """Return mean and variance of the images' first channel, true and by sums in float16."""
    pixels = images[:, 0].reshape(-1, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, variance = float16_statistics(pixels.astype(np.float16))
    return {
        "values_per_channel": len(pixels),
        "true_mean": rounded(float(pixels.astype(np.float64).mean())),
        "true_variance": rounded(float(pixels.astype(np.float64).var())),
        "float16_mean": rounded(float(mean[0])),
        "float16_variance": rounded(float(variance[0])),
    }


def _half(values: Any) -> Half:
    return np.asarray(values, dtype=np.float16)


def float16_mean(values: Half) -> Half:
    """Return the mean of each column, shape (C,), of an array (N, C), by a running float16 sum.

    Elements are added one after another, and each sum is rounded to float16 to nearest even. The
    last one is divided by their number in FP32 and rounded again.
    """
    # NumPy's own sum of float16 is in FP32; its running sum rounds each step.
    total = np.add.accumulate(values, axis=0, dtype=np.float16)[-1]
    return _half(total.astype(np.float32) / np.float32(len(values)))


def float16_statistics(values: Half) -> tuple[Half, Half]:
    """Return mean and variance of each column: the mean, then the mean squared distance from it."""
    mean = float16_mean(values)
    distances = values - mean
    return mean, float16_mean(distances * distances)


class _Normalize(autograd.Function):
    """The operator, on rows of channels; every elementwise result is rounded to float16."""

    def forward(self, x: NDArray, gamma: NDArray, beta: NDArray) -> NDArray:
        values, self._scale = _rows(x), _half(gamma.asnumpy())
        with np.errstate(over="ignore", invalid="ignore"):  # the overflow is the subject here
            mean, variance = float16_statistics(values)
            self._inverse = _half(1 / np.sqrt(variance.astype(np.float32) + _EPSILON))
            self._normalized = (values - mean) * self._inverse
            result = self._normalized * self._scale + _half(beta.asnumpy())
        return _images(result, x)

    def backward(self, dy: NDArray) -> tuple[NDArray, NDArray, NDArray]:
        gradients = _rows(dy)
        with np.errstate(over="ignore", invalid="ignore"):
            of_beta = float16_mean(gradients)
            of_gamma = float16_mean(gradients * self._normalized)
            rest = gradients - of_beta - self._normalized * of_gamma
            result = self._scale * self._inverse * rest
        count = np.float32(len(gradients))
        sums = (mx.nd.array(mean.astype(np.float32) * count) for mean in (of_gamma, of_beta))
        return (_images(result, dy), *sums)


def _rows(x: NDArray) -> Half:
    """Return an array (N, C, H, W) as (N * H * W, C) in float16."""
    return _half(x.asnumpy().transpose(0, 2, 3, 1).reshape(-1, x.shape[1]))


def _images(rows: Half, like: NDArray) -> NDArray:
    count, channels, height, width = like.shape
    images = rows.reshape(count, height, width, channels).transpose(0, 3, 1, 2)
    return mx.nd.array(images, dtype=like.dtype)


class Float16BatchNorm(gluon.Block):
    """A BatchNorm for training only, without running statistics.

    Parameters
    ----------
    in_channels : int
    """

    def __init__(self, *, in_channels: int) -> None:
        super().__init__()
        with self.name_scope():
            self.gamma = self.params.get("gamma", shape=(in_channels,), init="ones")
            self.beta = self.params.get("beta", shape=(in_channels,), init="zeros")

    def forward(self, x: NDArray) -> NDArray:
        """Normalize images (N, C, H, W) of FP32 or float16 by the statistics of this batch."""
        result: NDArray = _Normalize()(x, self.gamma.data(), self.beta.data())
        return result
