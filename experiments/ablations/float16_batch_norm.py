"""BatchNorm all in float16, its sums included: what a kernel written without thought would do.

To be compared with only; MXNet's own sums in FP32, whatever it is given.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

__all__ = ["Float16BatchNorm", "float16_mean", "float16_statistics"]

_EPSILON = 1e-5  # as in Gluon

Half = npt.NDArray[np.float16]


def _half(values: Any) -> Half:
    return np.asarray(values, dtype=np.float16)


def float16_mean(values: Half) -> Half:
    """Return the mean of each column, by a running sum in float16.

    Elements are added one after another from the first on, and each sum is rounded to float16 to
    nearest even. The last one is divided by their number in FP32 and rounded again.

    Parameters
    ----------
    values : array of float16, shape (N, C)

    Returns
    -------
    array of float16, shape (C,)
    """
    # NumPy's own sum of float16 is in FP32; its running sum rounds each step.
    total = np.add.accumulate(values, axis=0, dtype=np.float16)[-1]
    return _half(total.astype(np.float32) / np.float32(len(values)))


def float16_statistics(values: Half) -> tuple[Half, Half]:
    """Return mean and variance of each column: first the mean, then that of squared distances."""
    mean = float16_mean(values)
    distances = values - mean
    return mean, float16_mean(distances * distances)


class _Normalize(autograd.Function):
    """The operator, on rows of channels; every elementwise result is rounded to float16."""

    def forward(self, x: NDArray, gamma: NDArray, beta: NDArray) -> NDArray:
        values, self._scale = _rows(x), _half(gamma.asnumpy())
        with np.errstate(over="ignore", invalid="ignore"):  # that is what it is here to show
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
    """A BatchNorm for training alone: it has no running statistics.

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
