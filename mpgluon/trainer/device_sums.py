"""Sums of FP16 gradients over the devices of a process, in FP32.

MXNet's kvstore rounds to FP16 after each addition. For two devices that gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

from mpgluon.kernels.dtypes import dtype_name
from mpgluon.updates import gluon_trainer

from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

__all__ = ["reduce_in_fp32"]


def reduce_in_fp32(trainer: gluon.Trainer, reduce: Callable[[], None]) -> None:
    """Sum a Trainer's gradients by ``reduce``; FP16 gradients in FP32, rounded once.

    A kvstore for several processes, NCCL's, and one that compresses gradients sum as they do.
    """
    if gluon_trainer.sums_locally(trainer):
        with gluon_trainer.kvstore_replaced(trainer, _SumsInFP32):
            reduce()
    else:
        reduce()


class _SumsInFP32:
    """A kvstore that sums FP16 gradients of three and more devices itself."""

    def __init__(self, kvstore: Any) -> None:
        self._kvstore = kvstore

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kvstore, name)

    def pushpull(
        self, key: int, value: Sequence[NDArray], out: Optional[Any] = None, priority: int = 0
    ) -> None:
        """Replace dense arrays, one for each device, by their sum."""
        if out is not None or not _is_rounded_often(value):
            self._kvstore.pushpull(key, value, out=out, priority=priority)
            return
        total = _sum(key, value)
        for one in value:
            total.copyto(one.as_nd_ndarray())

    def push(self, key: int, value: Sequence[NDArray], priority: int = 0) -> None:
        """Push the sum of arrays that are stored as rows, of which the kvstore gives copies."""
        value = [_sum(key, value)] if _is_rounded_often(value) else value
        self._kvstore.push(key, value, priority=priority)


def _is_rounded_often(value: Sequence[NDArray]) -> bool:
    return len(value) > 2 and dtype_name(value[0]) == "float16"


def _sum(key: int, value: Sequence[NDArray]) -> NDArray:
    home = value[key % len(value)].ctx  # devices take turns
    with autograd.pause():
        total = value[0].as_in_context(home).astype("float32")
        for other in value[1:]:
            total += other.as_in_context(home).astype("float32")
        return total.astype("float16")
