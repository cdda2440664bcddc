"""One batch from image files, in this process or in a worker, which needs no MXNet."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from mpgluon.errors import DataError

import numpy as np
from numpy.typing import NDArray

from recipes.data.augment import Augmentation, normalized_levels, read_crop
from recipes.data.images import ImageFolder
from recipes.data.sampler import Key

__all__ = ["Batch", "BatchReader", "Failure", "begin_worker", "normalized", "read_in_worker"]


class Failure(NamedTuple):
    """An image that could not be decoded, and the reason; the rest of its batch is used."""

    path: Path
    reason: str


Batch = tuple[NDArray[Any], NDArray[np.int32], list[Failure]]
"""Images, labels and failures."""


class BatchReader:
    """Decode, crop and normalize the images of one batch; the same in every process."""

    def __init__(
        self,
        folder: ImageFolder,
        indices: Sequence[int],
        image_size: int,
        augmentation: Optional[Augmentation],
        dtype: str,
        *,
        whole: bool = False,
    ) -> None:
        self._folder = folder
        self._indices = np.asarray(indices, dtype=np.int64)
        if self._indices.size and not (
            self._indices.min() >= 0 and self._indices.max() < len(folder)
        ):
            raise ValueError(f"indices must be from 0 to {len(folder) - 1}, the images' positions")
        self._image_size = image_size
        self._augmentation = augmentation
        self._whole = whole
        self._levels = normalized_levels().astype(dtype)

    def __call__(self, keys: list[Key]) -> Batch:
        """Return images, labels and failures; without a readable image both are empty."""
        pixels, labels, failures = [], [], []
        for epoch, position in keys:
            index = int(self._indices[position])
            path = self._folder.paths[index]
            try:
                crop = read_crop(
                    path,
                    self._image_size,
                    self._augmentation,
                    epoch=epoch,
                    index=index,
                    whole=self._whole,
                )
            except DataError as error:
                failures.append(Failure(path, str(error)))
            else:
                pixels.append(crop)
                labels.append(self._folder.labels[index])
        images = normalized(pixels, self._levels) if pixels else np.empty(0, self._levels.dtype)
        return images, np.array(labels, dtype=np.int32), failures


def normalized(pixels: list[NDArray[np.uint8]], levels: NDArray[Any]) -> NDArray[Any]:
    """Return images (H, W, 3) as one array (N, 3, H, W) of the values that ``levels`` gives."""
    height, width, channels = pixels[0].shape
    images = np.empty((len(pixels), channels, height, width), levels.dtype)
    for image, source in zip(images, pixels):
        for channel, values in enumerate(levels):
            image[channel] = values[source[..., channel]]
    return images


_reader_of_worker: Optional[BatchReader] = None


def begin_worker(reader: BatchReader, parent: int) -> None:
    """Make this process a worker, which ends only with its loader or the loader's process."""
    global _reader_of_worker
    _reader_of_worker = reader
    # These reach the whole process group; the main process decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        _PR_SET_PDEATHSIG = 1  # noqa: N806 - the kernel's name
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)


def read_in_worker(keys: list[Key]) -> Batch:
    """Return a batch from the reader of this worker."""
    assert _reader_of_worker is not None
    return _reader_of_worker(keys)
