"""The kvstore that sums a Trainer's gradients over processes.

::

    with MpiProcesses() as processes:
        store = MpiKVStore(processes)
        trainer = gluon.Trainer(params, "sgd", options, kvstore=store)
        store.attach(trainer)  # rank 0's weights everywhere; a few large messages per step
        ...
        trainer.step(processes.total(batch_size))  # images of all processes

It has no name for ``kvstore="..."``: with one device, a Trainer ignores a name that it does not
know and exchanges nothing. Loss scales are not handled here: an infinite or NaN gradient of one
process is in the sum of all.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Optional, Union

from mpgluon.cast.status_flags import LayerFlags, Raised, of_processes
from mpgluon.distributed.buckets import Bucket, Gradient, make_buckets
from mpgluon.distributed.processes import Processes
from mpgluon.distributed.state import begin, numbers_of_step, refuse_different_numbers
from mpgluon.errors import DistributedError
from mpgluon.trainer.gradient_flags import Weights, empty_stale, flags_up, stale_weights
from mpgluon.trainer.step import TrainerState
from mpgluon.updates import gluon_trainer

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray

__all__ = ["MpiKVStore"]

Arrays = Union[NDArray, Sequence[NDArray]]

_ROUNDED_SUM = LayerFlags(
    "sum over processes", "MpiKVStore", "cpu(0)", Raised(), Raised(overflow=True)
)


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
        self._sums: list[Bucket] = []  # the latest ones

    def attach(self, trainer: gluon.Trainer) -> None:
        """Share rank 0's weights now, and send the gradients of a step in a few messages.

        Each step then raises DistributedError, on all processes, if it would use other numbers on
        one of them: another batch size, learning rate, loss scale or clip factor, for example.
        After a skipped step, ``amp.step_flags`` has the layers of all processes.

        Call it once, on all processes, before the first forward pass. Without it, weights are
        shared in the first step, after its gradients were computed, every parameter is sent in
        its own message, and no numbers are compared.

        Raises
        ------
        TrainerStateError
            If a parameter has no value yet because its shape is not known.
        """
        begin(trainer)
        step = _Step(self, self._processes, trainer)
        gluon_trainer.call_before_steps(trainer, step.begin)
        gluon_trainer.put_before_reduction(trainer, lambda reduce: partial(step.reduce, reduce))
        gluon_trainer.put_around_updates(trainer, lambda update: partial(step.update, update))

    def _sum_together(self, reduce: Callable[[], None], call_roll: Callable[[str], bool]) -> None:
        """Sum the gradients of a Trainer in a few messages.

        ``call_roll`` calls the processes together for it, if there are any gradients, and returns
        whether it has changed some.
        """
        self._collected = {}
        try:
            reduce()
            if self._collected:
                self._exchange(self._collected, call_roll)
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
            self._exchange({key: gradients}, self._call_roll)

    def _call_roll(self, purpose: str) -> bool:
        self._processes.gather(None, purpose)
        return False

    def _exchange(
        self, gradients: dict[int, Sequence[NDArray]], call_roll: Callable[[str], bool]
    ) -> None:
        plan = tuple(Gradient.of(key, arrays[0]) for key, arrays in gradients.items())
        if plan not in self._plans:
            self._plans[plan] = make_buckets(plan)
        self._sums = buckets = self._plans[plan]
        for bucket in buckets:
            bucket.pack(gradients)
        purpose = _in_words(plan)
        if call_roll(purpose):
            for bucket in buckets:
                bucket.pack(gradients)
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

    def _are_sums_finite(self) -> bool:
        """Whether the latest sums were finite before they were rounded to the gradients' dtype."""
        return all(bool(np.isfinite(bucket.values).all()) for bucket in self._sums)

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


class _Step:
    """The collective calls in each step of an attached Trainer.

    The step's numbers are compared where gradients are exchanged, or, where that was done before
    the step, for clipping, before the update. A gradient that is new on some processes only counts
    as new on all, which then judge and update the same weights.
    """

    def __init__(self, store: MpiKVStore, processes: Processes, trainer: gluon.Trainer) -> None:
        self._store, self._processes, self._trainer = store, processes, trainer
        self._is_open = False  # whether numbers were set that are not compared yet
        self._idle: Weights = {}  # whose gradient is new, but on other processes or devices only

    def begin(self) -> None:
        """Record that the Trainer sets the numbers of a step."""
        self._is_open = True

    def reduce(self, reduce: Callable[[], None]) -> None:
        """Sum gradients."""
        self._store._sum_together(reduce, self._call_roll)
        if self._state is not None:
            self._state.gradients.change(idle={**self._state.gradients.now.idle, **self._idle})

    @property
    def _state(self) -> Optional[TrainerState]:
        state = gluon_trainer.loss_scaler_of(self._trainer)
        return state if isinstance(state, TrainerState) else None

    def _call_roll(self, purpose: str) -> bool:
        """Compare numbers, and empty gradients that are new on other processes or devices only.

        Returns whether there are such gradients.
        """
        state = self._state
        stale = stale_weights(self._trainer) if state is None else state.gradients.stale()
        devices = len(gluon_trainer.devices_of(self._trainer))
        are_new = bytes(len(weights) < devices for weights in stale.values())
        if self._is_open:
            numbers, purpose = numbers_of_step(self._trainer), f"{purpose}, in a step"
            of_all = refuse_different_numbers(self._processes, numbers, purpose, are_new)
            self._is_open = False
        else:
            of_all = self._processes.gather(are_new, purpose)
        somewhere = map(any, zip(*of_all))
        idle = {index: stale[index] for index, is_new in zip(stale, somewhere) if is_new}
        empty_stale(self._trainer, idle)
        self._idle = {key: weight for weights in idle.values() for key, weight in weights.items()}
        return bool(self._idle)

    def update(self, update: Callable[[bool], None], ignore_stale_grad: bool = False) -> None:
        """Update weights; after a skip, collect the flags of all processes."""
        if self._is_open:
            numbers = numbers_of_step(self._trainer)
            refuse_different_numbers(self._processes, numbers, "the numbers of a step")
            self._is_open = False
        state, idle, self._idle = self._state, self._idle, {}
        if ignore_stale_grad and state is None:
            flags_up(idle)
        update(ignore_stale_grad)
        if state is None or not state.step_was_skipped:
            return
        flags = of_processes(self._processes.gather(state.flags, "the flags of a skipped step"))
        # Gradients with a finite sum were finite themselves.
        if not math.isfinite(state.gradient_norm or 0.0) and self._store._are_sums_finite():
            flags = replace(flags, layers=(*flags.layers, _ROUNDED_SUM), unnoted="")
        state.flags = flags


def _in_words(plan: tuple[Gradient, ...]) -> str:
    """Describe gradients; equal descriptions mean that the gradients can be added."""
    mark = zlib.crc32(repr(plan).encode())
    elements = sum(gradient.size for gradient in plan)
    return f"sum of {len(plan)} gradients, {elements} numbers in all, checksum {mark:08x}"
