"""Batches of noise that cost no time: with them, a run shows how fast it is without its images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpgluon.base.devices import from_numpy

import numpy as np

__all__ = ["SyntheticLoader"]


class SyntheticLoader:
    """Yield one batch of noise again and again, as an `ImageLoader` yields its batches.

    Parameters
    ----------
    batches : int
        The length of an epoch, at least 1.
    batch_size : int
        Images per batch.
    image_size : int
        The side of the square images in pixels.
    classes : int
        Labels are drawn from 0 to ``classes - 1``.
    dtype : str
        "float32" or "float16".
    seed : int
        The seed of the noise, which has mean 0 and standard deviation 1, as normalized images.

    Attributes
    ----------
    batches_done : int
        Batches of the current epoch so far.
    unreadable : tuple
        Empty.
    seconds_waited : float
        Zero.
    """

    unreadable: tuple[Path, ...] = ()
    seconds_waited = 0.0

    def __init__(
        self,
        batches: int,
        *,
        batch_size: int,
        image_size: int,
        classes: int,
        dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        images = random.standard_normal((batch_size, 3, image_size, image_size), dtype=np.float32)
        self._images = from_numpy(images.astype(dtype))
        self._labels = from_numpy(random.integers(0, classes, batch_size).astype(np.int32))
        self._batches = max(1, batches)
        self.batches_done = 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._batches

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:  # noqa: ARG002
        """Set the first batch of the next pass; all epochs are the same."""
        self.batches_done = first_batch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Return the batches of one pass."""
        for number in range(self.batches_done, self._batches):
            self.batches_done = number + 1
            yield self._images, self._labels
        self.batches_done = 0

    def close(self) -> None:
        """Do nothing: there are no workers."""
