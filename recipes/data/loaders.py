"""Batches from image files, decoded in worker processes.

The workers are from ``concurrent.futures``: the pool of Gluon's ``DataLoader`` hangs when one of
its processes is killed. A batch depends only on (seed, epoch, image), not on the number of
workers or on where a run was resumed. Batches stay on the CPU.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any, Optional

from mpgluon.base.devices import from_numpy
from mpgluon.errors import DataError
from mpgluon_tools.tables import counted

from recipes.data.augment import Augmentation
from recipes.data.images import ImageFolder
from recipes.data.reader import Batch, BatchReader, Failure, begin_worker, read_in_worker
from recipes.data.sampler import EpochBatchSampler
from recipes.options import at_least

__all__ = ["ImageLoader", "eval_loader", "train_loader"]

_logger = logging.getLogger(__name__)

_DTYPES = ("float32", "float16")


def train_loader(
    folder: ImageFolder,
    indices: Sequence[int],
    *,
    seed: int = 0,
    scale: tuple[float, float] = (0.25, 1.0),
    shifts: bool = False,
    **options: Any,
) -> ImageLoader:
    """Return shuffled batches of random-resized crops or shifted images, half of them mirrored.

    An incomplete last batch is left out. Call `ImageLoader.set_epoch` before a pass that is not
    the next one.

    Parameters
    ----------
    folder, indices
        As for `ImageLoader`.
    seed : int, optional
        At least 0.
    scale : (float, float), optional
        The least and the greatest share of the image's area that a crop may cover; its sides
        have a ratio from 3/4 to 4/3.
    shifts : bool, optional
        Whether to shift whole images by up to an eighth of their sides in place of crops.
    **options
        The other arguments of `ImageLoader`; ``batch_size`` is required.
    """
    augmentation = Augmentation(seed=seed, scale=scale, shifts=shifts)
    return ImageLoader(folder, indices, augmentation=augmentation, **options)


def eval_loader(folder: ImageFolder, indices: Sequence[int], **options: Any) -> ImageLoader:
    """Return batches of centre crops in the order of ``indices``, the last one perhaps smaller.

    The crop is the central ``image_size`` square of the image with its shorter side resized to
    ``image_size * 256 / 224``, taken in one step. ``options`` are the other arguments of
    `ImageLoader`; ``batch_size`` is required.
    """
    return ImageLoader(folder, indices, augmentation=None, **options)


class ImageLoader:
    """Iterate over batches ``(images, labels)`` of an `ImageFolder`.

    ``images`` is an NDArray on the CPU of shape (N, 3, image_size, image_size) in ``dtype``,
    ``labels`` one of shape (N,) in int32. Pixels are divided by 255 and normalized with
    ImageNet's mean and standard deviation in float32, then rounded once to ``dtype``.

    Make one pass at a time. A pass that ends early ends the workers; the next pass starts new ones.
    Workers ignore Ctrl-C and SIGTERM, which the main process handles, and end with it.

    Parameters
    ----------
    folder : ImageFolder
    indices : sequence of int
        The images to use, as positions in ``folder``.
    batch_size : int
        Images per batch.
    image_size : int
        The side of the square images in pixels.
    dtype : str
        "float32" or "float16".
    augmentation : Augmentation or None
        For training: shuffle, crop and mirror at random and leave out an incomplete last batch.
        None is for testing.
    num_workers : int
        Processes that decode, started here, before a GPU is in use; with 0 the main process
        decodes.
    on_unreadable : str
        "error" raises `DataError` at an image that cannot be decoded. "skip" leaves it out of its
        batch, which is then smaller, logs its name and lists it in ``unreadable``. If one of
        several training processes loses a whole batch, that raises `DataError` too.
    rank, world_size : int, optional
        The rank of this process, and the number of processes that share each epoch.
    whole : bool, optional
        Whether to take whole images for testing, and not their centres.

    Attributes
    ----------
    batches_done : int
        Batches of the current epoch up to the one yielded last, including those without a readable
        image: the ``first_batch`` with which to continue.
    seconds_waited : float
        How long the batch yielded last was waited for, without its copy into an NDArray, which
        waits for MXNet's operations in progress.
    left_out : list of Path
        The images that the latest pass has left out.

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
        image_size: int = 224,
        dtype: str = "float32",
        augmentation: Optional[Augmentation] = None,
        num_workers: int = 0,
        on_unreadable: str = "error",
        rank: int = 0,
        world_size: int = 1,
        whole: bool = False,
    ) -> None:
        if dtype not in _DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(_DTYPES)}, received {dtype!r}; for bfloat16 load "
                "float32 images, which the network rounds itself"
            )
        if on_unreadable not in ("error", "skip"):
            raise ValueError(f"on_unreadable must be 'error' or 'skip', received {on_unreadable!r}")
        at_least(1, image_size=image_size)
        at_least(0, num_workers=num_workers)
        self._reader = BatchReader(folder, indices, image_size, augmentation, dtype, whole=whole)
        seed = None if augmentation is None else augmentation.seed
        self._sampler = EpochBatchSampler(
            len(indices), batch_size, seed=seed, rank=rank, world_size=world_size
        )
        # In a test a process may have no batch: processes do not wait for each other.
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
        self.seconds_waited = 0.0
        self.left_out: list[Path] = []
        self._executor: Optional[ProcessPoolExecutor] = None
        if num_workers:
            self._start()

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self._sampler)

    @property
    def unreadable(self) -> tuple[Path, ...]:
        """The images that could not be decoded so far, oldest first."""
        return tuple(self._unreadable)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Set the epoch of the next pass, and its first batch; earlier ones are not decoded.

        A complete pass advances to the next epoch by itself.

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
        self.left_out = []
        here = map(self._reader, self._sampler)
        batches = self._batches_of_workers() if self._num_workers else here
        try:
            timed = enumerate(self._timed(batches), self._sampler.first_batch)
            for done, (images, labels, failures) in timed:
                self._report(failures)
                self.batches_done = done + 1
                if not len(labels) and self._must_keep_pace:
                    raise DataError(
                        f"none of this process's {len(failures)} images of a batch can be decoded "
                        f"(the first: {failures[0].reason}), and the other processes take a step "
                        "now; repair or remove them"
                    )
                if len(labels):
                    yield from_numpy(images), from_numpy(labels)
            finished = True
        finally:
            if finished:
                self._sampler.set_epoch(epoch + 1)
            else:
                self.close()

    def close(self) -> None:
        """End the worker processes; a later pass starts new ones."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        began = time.perf_counter()
        for batch in batches:
            self.seconds_waited = time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    def _batches_of_workers(self) -> Iterator[Batch]:
        executor = self._start()
        # Two batches per worker: one in progress, one ready.
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
            # The first task starts them: here, before a GPU is in use.
            self._executor.submit(int)
        return self._executor

    def _report(self, failures: list[Failure]) -> None:
        for path, reason in failures:
            is_new = path not in self._unreadable
            self._unreadable[path] = reason
            self.left_out.append(path)
            if self._on_unreadable == "error":
                raise DataError(
                    f"{reason}; repair or remove it, or leave unreadable images out: "
                    "skip_unreadable, in a loader on_unreadable='skip'"
                )
            if is_new:
                count = counted(len(self._unreadable), "image")
                _logger.warning("%s; left out, %s so far", reason, count)
