"""The kvstore that sums a Trainer's gradients over processes.

::

    with MpiProcesses() as processes:
        store = MpiKVStore(processes)
        trainer = gluon.Trainer(params, "sgd", options, kvstore=store)
        store.attach(trainer)  # rank 0's weights everywhere; a few large messages per step
        ...
        trainer.step(batch_size * processes.world_size)

It has no name for ``kvstore="..."``: with one device, a Trainer ignores a name that it does not
know and exchanges nothing. Loss scales are not handled here: an infinite or NaN gradient of one
process is in the sum of all.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Callable, Optional, Union

from mpgluon.distributed.buckets import Bucket, Gradient, make_buckets
from mpgluon.distributed.processes import Processes
from mpgluon.distributed.state import begin
from mpgluon.errors import DistributedError
from mpgluon.updates import gluon_trainer

import mxnet as mx
from mxnet import gluon
from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray

__all__ = ["MpiKVStore"]

Arrays = Union[NDArray, Sequence[NDArray]]


class MpiKVStore(KVStoreBase):
    """Sums gradients over devices and processes in FP32, also those that are float16.

    The Trainer applies the optimizer itself (``update_on_kvstore=False``): each process updates
    its copy of the weights with the same sums.

    Parameters
    ----------
    processes : Processes
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._collected: Optional[dict[int, Sequence[NDArray]]] = None
        self._plans: dict[tuple[Gradient, ...], list[Bucket]] = {}

    def attach(self, trainer: gluon.Trainer) -> None:
        """Share rank 0's weights now, and send the gradients of a step in a few messages.

        Call it once, on all processes, before the first forward pass. Without it, weights are
        shared in the first step, after its gradients were computed, and every parameter is sent in
        its own message.

        Raises
        ------
        TrainerStateError
            If a parameter has no value yet because its shape is not known.
        """
        begin(trainer)
        gluon_trainer.put_before_reduction(
            trainer, lambda reduce: lambda: self._reduce_together(reduce)
        )

    def _reduce_together(self, reduce: Callable[[], None]) -> None:
        self._collected = {}
        try:
            reduce()
            if self._collected:
                self._exchange(self._collected)
        finally:
            self._collected = None

    def pushpull(
        self,
        key: Any,
        value: Arrays,
        out: Optional[Arrays] = None,
        priority: int = 0,  # noqa: ARG002 - MXNet passes it
    ) -> None:
        """Replace a gradient on all devices by its sum over all devices and processes."""
        if out is not None and out is not value:
            raise DistributedError(
                "this kvstore sums gradients in place and cannot write the sum elsewhere; create "
                "the Trainer with update_on_kvstore=False"
            )
        arrays = [value] if isinstance(value, NDArray) else value
        gradients = [array.as_nd_ndarray() for array in arrays]
        if self._collected is not None:
            self._collected[key] = gradients
        else:
            self._exchange({key: gradients})

    def _exchange(self, gradients: dict[int, Sequence[NDArray]]) -> None:
        plan = tuple(Gradient.of(key, arrays[0]) for key, arrays in gradients.items())
        if plan not in self._plans:
            self._plans[plan] = make_buckets(plan)
        buckets = self._plans[plan]
        for bucket in buckets:
            bucket.pack(gradients)
        purpose = _in_words(plan)
        self._processes.gather(None, purpose)
        for bucket in buckets:
            bucket.wait()
            self._processes.sum_in_place(bucket.values, purpose)
            bucket.unpack(gradients)

    def broadcast(
        self,
        key: Any,
        value: NDArray,
        out: Arrays,
        priority: int = 0,  # noqa: ARG002 - MXNet passes it
    ) -> None:
        """Give a parameter its value on rank 0, on all devices and processes."""
        what = f"parameter {key} of shape {tuple(value.shape)}"
        mx.nd.waitall()  # a running inference may change the layout of a weight
        sent = mx.nd.array(self._processes.broadcast(value.asnumpy(), what), dtype=value.dtype)
        for array in [out] if isinstance(out, NDArray) else out:
            sent.copyto(array.as_nd_ndarray())

    @staticmethod
    def is_capable(capability: str) -> bool:  # noqa: ARG004 - the answer to all questions
        """Return False: the optimizer runs in the Trainer."""
        return False

    @property
    def type(self) -> str:
        """``"mpi"``."""
        return "mpi"

    @property
    def rank(self) -> int:
        """Which process this is."""
        return self._processes.rank

    @property
    def num_workers(self) -> int:
        """How many processes there are."""
        return self._processes.world_size


def _in_words(plan: tuple[Gradient, ...]) -> str:
    """Describe gradients; equal descriptions mean that the gradients can be added."""
    mark = zlib.crc32(repr(plan).encode())
    elements = sum(gradient.size for gradient in plan)
    return f"sum of {len(plan)} gradients, {elements} numbers in all, checksum {mark:08x}"
