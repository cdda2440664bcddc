"""The threads with which MXNet computes on a CPU, as GCC's OpenMP runtime keeps them."""

from __future__ import annotations

from functools import cache
from typing import Any, Callable

from mxnet.base import _LIB

__all__ = ["release_threads"]

_SOFT = 1  # OpenMP's number for a pause after which loops are parallel again


def release_threads() -> None:
    """End the threads that are kept for parallel loops of the calling thread.

    MXNet computes in a thread of its own, but copies large arrays, such as a batch of images, in
    the thread that asks for it; each has threads for its loops. If all of these are more than the
    processor's cores, GCC's runtime lets them sleep after every loop, where they else wait for the
    next one a moment: a network of small operators takes up to twice as long.
    """
    _pause()(_SOFT)


@cache
def _pause() -> Callable[[int], Any]:
    """Return the function of GCC's runtime; one that does nothing where MXNet has another."""
    is_llvms = hasattr(_LIB, "__kmpc_fork_call")  # whose function stops MXNet's own threads
    return getattr(_LIB, "omp_pause_resource_all", int) if not is_llvms else int
