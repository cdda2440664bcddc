"""Batches from image files, decoded in worker processes.

The workers are those of ``concurrent.futures``, and not of Gluon's ``DataLoader``, whose pool hangs
when one of its processes is killed. Every random number comes from (seed, epoch, image): a batch
depends neither on the number of workers nor on where in the epoch a run was resumed. This module
chooses no images (see `mpgluon.data.splits`), crops none itself (see `mpgluon.data.augment`) and
moves no batch to a GPU.
"""

from __future__ import annotations

import ctypes
import logging
import math
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Optional

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from mpgluon.data.augment import Augmentation, normalized_levels, read_crop
from mpgluon.data.images import ImageFolder
from mpgluon.errors import DataError

__all__ = ["EpochBatchSampler", "ImageLoader", "eval_loader", "train_loader"]

_logger = logging.getLogger(__name__)

# Keeps these draws apart from the crops', the split's and the renderer's under the same seed.
_PURPOSE = 3
_DTYPES = ("float32", "float16")

Key = tuple[int, int]


def train_loader(
    folder: ImageFolder,
    indices: Sequence[int],
    *,
    batch_size: int,
    image_size: int = 224,
    dtype: str = "float32",
    seed: int = 0,
    scale: tuple[float, float] = (0.25, 1.0),
    num_workers: int = 0,
    on_unreadable: str = "error",
    rank: int = 0,
    world_size: int = 1,
) -> ImageLoader:
    """Return shuffled batches of random-resized crops, half of them mirrored.

    An incomplete last batch is left out. Give `ImageLoader.set_epoch` the epoch before each pass,
    or make the passes in order. See `ImageLoader` for the arguments.

    Parameters
    ----------
    scale : (float, float), optional
        The least and the greatest share of the image's area that a crop may cover; its sides
        have a ratio from 3/4 to 4/3.
    """
    return ImageLoader(
        folder,
        indices,
        batch_size=batch_size,
        image_size=image_size,
        dtype=dtype,
        augmentation=Augmentation(seed=seed, scale=scale),
        num_workers=num_workers,
        on_unreadable=on_unreadable,
        rank=rank,
        world_size=world_size,
    )


def eval_loader(
    folder: ImageFolder,
    indices: Sequence[int],
    *,
    batch_size: int,
    image_size: int = 224,
    dtype: str = "float32",
    num_workers: int = 0,
    on_unreadable: str = "error",
    rank: int = 0,
    world_size: int = 1,
) -> ImageLoader:
    """Return batches of centre crops in the order of ``indices``, the last one perhaps smaller.

    The crop is the central ``image_size`` square of the image with its shorter side resized to
    ``image_size * 256 / 224``, taken in one step. See `ImageLoader` for the arguments.
    """
    return ImageLoader(
        folder,
        indices,
        batch_size=batch_size,
        image_size=image_size,
        dtype=dtype,
        augmentation=None,
        num_workers=num_workers,
        on_unreadable=on_unreadable,
        rank=rank,
        world_size=world_size,
    )


class EpochBatchSampler:
    """Batches of (epoch, position) keys, whose order depends on the seed and the epoch only.

    With several processes, the batches of all ranks together are, image for image, those of one
    process with a ``world_size`` times larger batch.

    Parameters
    ----------
    length : int
        How many positions there are.
    batch_size : int
        Keys per batch.
    seed : int or None
        For shuffling; None keeps the order, and keeps an incomplete last batch too.
    rank, world_size : int, optional
        Which process this is, of how many.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        seed: Optional[int],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1, got {rank} of {world_size}")
        if seed is not None and seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self._length = length
        self._batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self.epoch = 0
        self.first_batch = 0

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Choose the epoch of the passes that begin from now on, and the batch to begin with."""
        if epoch < 0 or not 0 <= first_batch <= len(self):
            raise ValueError(
                f"epoch must be at least 0 and first_batch from 0 to {len(self)}, got {epoch} "
                f"and {first_batch}"
            )
        self.epoch = epoch
        self.first_batch = first_batch

    def __iter__(self) -> Iterator[list[Key]]:
        """Return the keys of each batch of this rank."""
        epoch = self.epoch
        mine = self._order(epoch)[self._rank :: self._world_size]
        for batch in range(self.first_batch, len(self)):
            chosen = mine[batch * self._batch_size : (batch + 1) * self._batch_size]
            yield [(epoch, position) for position in chosen.tolist()]

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, wherever a pass begins."""
        if self._seed is None:
            mine = len(range(self._rank, self._length, self._world_size))
            return math.ceil(mine / self._batch_size)
        return self._length // self._world_size // self._batch_size

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._seed is None:
            return np.arange(self._length)
        # Sorted raw numbers, and not `Generator.permutation`, whose result may change with NumPy.
        keys = np.random.PCG64(np.random.SeedSequence([_PURPOSE, self._seed, epoch]))
        return np.argsort(keys.random_raw(self._length), kind="stable")


class ImageLoader:
    """Iterate over batches ``(images, labels)`` of an `ImageFolder`.

    ``images`` is an NDArray on the CPU of shape (N, 3, image_size, image_size) in ``dtype``,
    ``labels`` one of shape (N,) in int32. Pixels are divided by 255 and normalized with
    ImageNet's mean and standard deviation in float32, then rounded once to ``dtype``.

    One pass at a time. A pass that is left early, by an exception too, ends the workers; the next
    pass starts new ones. Workers ignore Ctrl-C and SIGTERM, which reach the main process, and die
    with it.

    Parameters
    ----------
    folder : ImageFolder
        The images.
    indices : sequence of int
        Which of them, as positions in ``folder``.
    batch_size : int
        Images per batch.
    image_size : int
        The side of the square images in pixels.
    dtype : str
        "float32" or "float16".
    augmentation : Augmentation or None
        For training: shuffle, crop and mirror at random and leave out an incomplete last batch.
        None is for testing: none of these.
    num_workers : int
        Processes that decode, started here and so before a GPU is in use; with 0 the main process
        decodes.
    on_unreadable : str
        "error" raises `DataError` at an image that cannot be decoded. "skip" leaves it out of its
        batch, which is then smaller, logs its name and lists it in ``unreadable``.
    rank, world_size : int, optional
        Which process this is, of how many that share each epoch.

    Attributes
    ----------
    batches_done : int
        Batches of the current epoch up to the one that was yielded last, those included that
        had no readable image: where to begin in order to go on.

    Raises
    ------
    ValueError
        If an argument is out of its range, or there are fewer images than one training batch.
    """

    def __init__(
        self,
        folder: ImageFolder,
        indices: Sequence[int],
        *,
        batch_size: int,
        image_size: int,
        dtype: str,
        augmentation: Optional[Augmentation],
        num_workers: int = 0,
        on_unreadable: str = "error",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if dtype not in _DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}; for bfloat16 load "
                "float32 images, which the network rounds itself"
            )
        if on_unreadable not in ("error", "skip"):
            raise ValueError(f"on_unreadable must be 'error' or 'skip', got {on_unreadable!r}")
        if image_size < 1 or num_workers < 0:
            raise ValueError(
                f"image_size must be at least 1 and num_workers at least 0, got {image_size} and "
                f"{num_workers}"
            )
        self._reader = _BatchReader(folder, indices, image_size, augmentation, dtype)
        seed = None if augmentation is None else augmentation.seed
        self._sampler = EpochBatchSampler(
            len(indices), batch_size, seed=seed, rank=rank, world_size=world_size
        )
        if len(self._sampler) == 0:
            raise ValueError(
                f"{len(indices)} images give no batch of {batch_size} for each of {world_size} "
                "processes: choose a smaller batch_size or more images"
            )
        self._num_workers = num_workers
        self._on_unreadable = on_unreadable
        self._unreadable: dict[Path, str] = {}
        self.batches_done = 0
        self._executor: Optional[ProcessPoolExecutor] = None
        if num_workers:
            self._start()

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self._sampler)

    @property
    def unreadable(self) -> tuple[Path, ...]:
        """The images that could not be decoded so far, in the order in which they were met."""
        return tuple(self._unreadable)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Choose the epoch of the next pass, and the batch that it begins with.

        The batches before it are not decoded. A pass that ran to its end moves on to the next
        epoch by itself.

        Raises
        ------
        ValueError
            If ``epoch`` is negative or ``first_batch`` beyond the end of an epoch.
        """
        self._sampler.set_epoch(epoch, first_batch)
        self.batches_done = first_batch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Return the batches of one pass."""
        epoch = self._sampler.epoch
        finished = False
        batches = self._batches_of_workers() if self._num_workers else self._batches()
        try:
            for done, (images, labels, failures) in enumerate(batches, self._sampler.first_batch):
                self._report(failures)
                self.batches_done = done + 1
                if len(labels):
                    yield (
                        mx.nd.array(images, ctx=mx.cpu(), dtype=images.dtype),
                        mx.nd.array(labels, ctx=mx.cpu(), dtype=labels.dtype),
                    )
            finished = True
        finally:
            if finished:
                self._sampler.set_epoch(epoch + 1)
            else:
                self.close()

    def close(self) -> None:
        """End the worker processes; a later pass starts new ones. May be called again."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)

    def _batches(self) -> Iterator[_Batch]:
        for keys in self._sampler:
            yield self._reader(keys)

    def _batches_of_workers(self) -> Iterator[_Batch]:
        executor = self._start()
        # Two batches each: one being made, one waiting to be taken.
        keys = iter(self._sampler)
        futures = deque(
            executor.submit(_read_in_worker, batch) for batch in islice(keys, 2 * self._num_workers)
        )
        try:
            while futures:
                batch = futures.popleft().result()
                futures.extend(executor.submit(_read_in_worker, next_) for next_ in islice(keys, 1))
                yield batch
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process that decodes images was killed, perhaps for lack of memory; use "
                "fewer workers or smaller batches"
            ) from error

    def _start(self) -> ProcessPoolExecutor:
        """Return the workers, started if they are not running."""
        if self._executor is None:
            self._executor = ProcessPoolExecutor(
                self._num_workers,
                mp_context=multiprocessing.get_context("fork"),
                initializer=_begin_worker,
                initargs=(self._reader, os.getpid()),
            )
            # The first task starts them: now, and not when a GPU may be in use.
            self._executor.submit(int)
        return self._executor

    def _report(self, failures: list[_Failure]) -> None:
        for failure in failures:
            if self._on_unreadable == "error":
                self._unreadable[failure.path] = failure.reason
                raise DataError(f"{failure.reason}; repair or remove it, or skip unreadable images")
            if failure.path not in self._unreadable:
                self._unreadable[failure.path] = failure.reason
                _logger.warning(
                    "%s; left out, %d image(s) so far", failure.reason, len(self._unreadable)
                )


@dataclass(frozen=True)
class _Failure:
    """An image that could not be decoded: a value, so that the rest of its batch is used."""

    path: Path
    reason: str


class _BatchReader:
    """Decode, crop and normalize the images of one batch; the same in every process."""

    def __init__(
        self,
        folder: ImageFolder,
        indices: Sequence[int],
        image_size: int,
        augmentation: Optional[Augmentation],
        dtype: str,
    ) -> None:
        self._folder = folder
        self._indices = np.asarray(indices, dtype=np.int64)
        if self._indices.size and not (
            self._indices.min() >= 0 and self._indices.max() < len(folder)
        ):
            raise ValueError(f"indices must be from 0 to {len(folder) - 1}, the images' positions")
        self._image_size = image_size
        self._augmentation = augmentation
        self._levels = normalized_levels().astype(dtype)

    def __call__(self, keys: list[Key]) -> _Batch:
        """Return images, labels and failures; without a readable image both are empty."""
        pixels, labels, failures = [], [], []
        for epoch, position in keys:
            index = int(self._indices[position])
            path = self._folder.paths[index]
            try:
                crop = read_crop(
                    path, self._image_size, self._augmentation, epoch=epoch, index=index
                )
            except DataError as error:
                failures.append(_Failure(path, str(error)))
            else:
                pixels.append(crop)
                labels.append(self._folder.labels[index])
        images = _normalized(pixels, self._levels) if pixels else np.empty(0, self._levels.dtype)
        return images, np.array(labels, dtype=np.int32), failures


_Batch = tuple[NDArray[Any], NDArray[np.int32], list[_Failure]]


def _normalized(pixels: list[NDArray[np.uint8]], levels: NDArray[Any]) -> NDArray[Any]:
    """Return images (H, W, 3) as one array (N, 3, H, W) of the values that ``levels`` gives."""
    height, width, channels = pixels[0].shape
    images = np.empty((len(pixels), channels, height, width), levels.dtype)
    for image, source in zip(images, pixels):
        for channel, values in enumerate(levels):
            image[channel] = values[source[..., channel]]
    return images


_reader_of_worker: Optional[_BatchReader] = None


def _begin_worker(reader: _BatchReader, parent: int) -> None:
    """Make this process a worker, which only its own loader, or the loader's death, ends."""
    global _reader_of_worker
    _reader_of_worker = reader
    # Ctrl-C and a job's end reach the whole process group; the main process decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        _PR_SET_PDEATHSIG = 1  # noqa: N806 - the kernel's name
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _read_in_worker(keys: list[Key]) -> _Batch:
    assert _reader_of_worker is not None
    return _reader_of_worker(keys)
