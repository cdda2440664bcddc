"""How far the predictions of two networks agree, such as one network in FP32 and in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Union

import mxnet as mx
import numpy as np
import numpy.typing as npt

__all__ = ["Agreement", "agreement"]

Batch = Union[mx.nd.NDArray, Sequence[mx.nd.NDArray]]
Predict = Callable[[mx.nd.NDArray], Any]


@dataclass(frozen=True)
class Agreement:
    """How far the predictions of two networks agree.

    Attributes
    ----------
    images : int
        The number of images.
    same_category : int
        Images for which both give the same category the largest logit.
    largest_relative_error : float
        The largest difference of two logits, divided by the reference's largest magnitude for
        that image. ``inf`` if a logit is not finite.
    """

    images: int
    same_category: int
    largest_relative_error: float

    @property
    def top1_agreement(self) -> float:
        """The share of images with the same likeliest category, in [0, 1]."""
        return self.same_category / self.images

    def __str__(self) -> str:
        return (
            f"the same category for {self.same_category} of {self.images} images "
            f"({self.top1_agreement:.2%}), largest relative error of a logit "
            f"{self.largest_relative_error:.2g}"
        )


def agreement(reference: Predict, other: Predict, batches: Iterable[Batch]) -> Agreement:
    """Compare the logits of two networks.

    Parameters
    ----------
    reference, other : network, or function of a batch of images
        Return logits, shape (N, K), as an NDArray or a NumPy array.
    batches : iterable of NDArray, or of sequences that begin with one
        Images, shape (N, C, H, W), or such as a loader's (images, labels).

    Raises
    ------
    ValueError
        If there are no images, or the results are not logits of one shape.
    """
    images = same = 0
    largest = 0.0
    for batch in batches:
        pixels = batch if isinstance(batch, mx.nd.NDArray) else batch[0]
        expected, logits = _logits(reference, pixels), _logits(other, pixels)
        if expected.ndim != 2 or expected.shape != logits.shape:
            raise ValueError(
                "both networks have to return logits of the same shape (N, K), received "
                f"{expected.shape} and {logits.shape}"
            )
        images += len(expected)
        same += int((expected.argmax(axis=1) == logits.argmax(axis=1)).sum())
        with np.errstate(invalid="ignore", divide="ignore"):
            errors = np.abs(logits - expected).max(axis=1) / np.abs(expected).max(axis=1)
        errors = np.where((logits == expected).all(axis=1), 0.0, errors)  # of zeros, too
        errors = np.where(np.isfinite(logits).all(axis=1), errors, math.inf)
        largest = max(largest, float(np.where(np.isnan(errors), math.inf, errors).max()))
    if not images:
        raise ValueError("there are no images to compare on; the loader gave no batches")
    return Agreement(images, same, largest)


def _logits(predict: Predict, images: mx.nd.NDArray) -> npt.NDArray[np.float64]:
    logits = predict(images)
    if isinstance(logits, (list, tuple)):
        raise ValueError(
            f"both networks have to return logits of the same shape (N, K), received {len(logits)} "
            "results of one; compare those that are logits: agreement(lambda x: net(x)[0], …)"
        )
    values = logits.asnumpy() if isinstance(logits, mx.nd.NDArray) else np.asarray(logits)
    return values.astype(np.float64)
