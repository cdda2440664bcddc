"""The images of each batch of each epoch, which depend on the seed and the epoch only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Optional

import numpy as np

from recipes.data.draws import Purpose, permutation
from recipes.options import at_least

__all__ = ["EpochBatchSampler", "Key"]

Key = tuple[int, int]
"""An epoch, and the position of an image among those that are used."""


class EpochBatchSampler:
    """Batches of (epoch, position) keys of this rank.

    Without a seed, positions are in order, and an incomplete last batch is kept. The batches of
    all ranks together contain the same images as the batches of one process with a ``world_size``
    times larger batch.
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
        at_least(1, batch_size=batch_size)
        at_least(0, seed=seed or 0)
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank must be from 0 to world_size - 1, received {rank} of {world_size}"
            )
        self._length = length
        self._batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self.epoch = 0
        self.first_batch = 0

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Set the epoch and the first batch of the passes that begin from now on."""
        if epoch < 0 or not 0 <= first_batch <= len(self):
            raise ValueError(
                f"epoch must be at least 0 and first_batch from 0 to {len(self)}, received "
                f"{epoch} and {first_batch}"
            )
        self.epoch = epoch
        self.first_batch = first_batch

    def __iter__(self) -> Iterator[list[Key]]:
        """Return the keys of each batch of this rank."""
        epoch = self.epoch
        order = (
            np.arange(self._length)
            if self._seed is None
            else permutation(self._length, Purpose.ORDER, self._seed, epoch)
        )
        mine = order[self._rank :: self._world_size]
        for batch in range(self.first_batch, len(self)):
            chosen = mine[batch * self._batch_size : (batch + 1) * self._batch_size]
            yield [(epoch, position) for position in chosen.tolist()]

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        if self._seed is None:
            mine = len(range(self._rank, self._length, self._world_size))
            return math.ceil(mine / self._batch_size)
        return self._length // self._world_size // self._batch_size
