"""Which images are in which batch of which epoch.

The order depends on the seed and the epoch only, so it is the same on every machine, from any
number of workers, and for a run that was resumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Optional

import numpy as np
from numpy.typing import NDArray

__all__ = ["EpochBatchSampler", "Key"]

# Keeps these draws apart from the crops', the split's and the renderer's under the same seed.
_PURPOSE = 3

Key = tuple[int, int]
"""An epoch, and the position of an image among those that are used."""


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
