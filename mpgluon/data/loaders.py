"""Batches from image files, decoded in worker processes.

The workers are those of ``concurrent.futures``, and not of Gluon's ``DataLoader``, whose pool hangs
when one of its processes is killed. Every random number comes from (seed, epoch, image): a batch
depends neither on the number of workers nor on where in the epoch a run was resumed. This module
chooses no images (see `mpgluon.data.splits`), crops none itself (see `mpgluon.data.augment`) and
moves no batch to a GPU.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any, Optional

import mxnet as mx

from mpgluon.data.augment import Augmentation
from mpgluon.data.images import ImageFolder
from mpgluon.data.reader import Batch, BatchReader, Failure, begin_worker, read_in_worker
from mpgluon.data.sampler import EpochBatchSampler
from mpgluon.errors import DataError

__all__ = ["ImageLoader", "eval_loader", "train_loader"]

_logger = logging.getLogger(__name__)

_DTYPES = ("float32", "float16")


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
        batch, which is then smaller, logs its name and lists it in ``unreadable``. Of several
        processes that train, none may lose a whole batch: that raises `DataError` too.
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
        self._reader = BatchReader(folder, indices, image_size, augmentation, dtype)
        seed = None if augmentation is None else augmentation.seed
        self._sampler = EpochBatchSampler(
            len(indices), batch_size, seed=seed, rank=rank, world_size=world_size
        )
        # A test needs no image on every process: one with fewer batches waits for nobody.
        if len(self._sampler) == 0 and (augmentation is not None or not len(indices)):
            raise ValueError(
                f"{len(indices)} images give no batch of {batch_size} for each of {world_size} "
                "processes: choose a smaller batch_size or more images"
            )
        self._must_keep_pace = world_size > 1 and augmentation is not None
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
                if not len(labels) and self._must_keep_pace:
                    raise DataError(
                        f"none of this process's {len(failures)} images of a batch can be decoded "
                        f"(the first: {failures[0].reason}), and the other processes take a step "
                        "now; repair or remove them"
                    )
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

    def _batches(self) -> Iterator[Batch]:
        for keys in self._sampler:
            yield self._reader(keys)

    def _batches_of_workers(self) -> Iterator[Batch]:
        executor = self._start()
        # Two batches each: one being made, one waiting to be taken.
        keys = iter(self._sampler)
        futures = deque(
            executor.submit(read_in_worker, batch) for batch in islice(keys, 2 * self._num_workers)
        )
        try:
            while futures:
                batch = futures.popleft().result()
                futures.extend(executor.submit(read_in_worker, next_) for next_ in islice(keys, 1))
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
                initializer=begin_worker,
                initargs=(self._reader, os.getpid()),
            )
            # The first task starts them: now, and not when a GPU may be in use.
            self._executor.submit(int)
        return self._executor

    def _report(self, failures: list[Failure]) -> None:
        for failure in failures:
            if self._on_unreadable == "error":
                self._unreadable[failure.path] = failure.reason
                raise DataError(f"{failure.reason}; repair or remove it, or skip unreadable images")
            if failure.path not in self._unreadable:
                self._unreadable[failure.path] = failure.reason
                _logger.warning(
                    "%s; left out, %d image(s) so far", failure.reason, len(self._unreadable)
                )
