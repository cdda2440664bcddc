"""A recorded step on a network: run under any casts and loss scale, as often as wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Optional

from mpgluon import amp
from mpgluon.base.archive import Arrays
from mpgluon.base.blocks import set_value
from mpgluon.cast.arrays import convert_arrays
from mpgluon.cast.block import restore
from mpgluon.cast.numpy_arrays import in_current_interface
from mpgluon.checkpoint import check_parameters
from mpgluon.checkpoint.random_states import set_random_states
from mpgluon.checkpoint.scale_histories import set_scale_histories
from mpgluon.trainer.step import state_of
from mpgluon.updates import gluon_trainer
from mpgluon_tools.diagnostics.observe import Batch
from mpgluon_tools.diagnostics.overflow import FoundOverflow, find_overflow
from mpgluon_tools.recorder.steps.recorded_network import BlockCast
from mpgluon_tools.recorder.steps.recorded_step import Part, RecordedStep, fresh_gradients

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon

__all__ = ["Casts", "Gradients", "LossFunction", "StepBench"]

LossFunction = Callable[[Any, Any], Any]
Casts = tuple[BlockCast, ...]
Gradients = dict[str, list[npt.NDArray[Any]]]


class StepBench:
    """A recorded step on a network, to be run under any casts and loss scale."""

    def __init__(
        self, step: RecordedStep, net: gluon.Block, loss_fn: LossFunction, devices: list[mx.Context]
    ) -> None:
        self.step, self.net = step, net
        self._loss_fn, self._devices = loss_fn, devices
        restore(net)
        step.settings.synchronize(net, len(devices))
        self._parameters = net._collect_params_with_prefix()
        self._values = self._plain_values()
        for name, parameter in self._parameters.items():
            _fill_in_shape(parameter, self._values.get(name))
        check_parameters(step.path, self._parameters, self._values)

    def run(
        self, casts: Casts, loss_scale: float, *, exact: bool = False
    ) -> tuple[list[npt.NDArray[Any]], Gradients]:
        """Run the passes forward and backward as training does; return losses and gradients."""
        self._prepare(casts, exact=exact)
        options = {"learning_rate": 0.0, "multi_precision": True}
        trainer = gluon.Trainer(self.net.collect_params(), "sgd", options, update_on_kvstore=False)
        # Where no step is skipped, scale_loss passes no NaN of a loss on.
        skips = self.step.reason == "skipped" or loss_scale != 1
        amp.init_trainer(trainer, loss_scale if skips else "none")
        gluon_trainer.begin(trainer)  # which copies one device's statistics to the others
        self._set_statistics()
        losses = []
        set_random_states(self.step.random_states)
        for parts in self._passes(casts):
            with autograd.record():
                of_pass = [self._loss_fn(self.net(*part.inputs), part.labels) for part in parts]
                with amp.scale_loss(of_pass, trainer) as scaled:
                    autograd.backward(scaled)
            losses += [loss.asnumpy() for loss in of_pass]
        if self.step.reduced:
            trainer.allreduce_grads()
        return losses, fresh_gradients(self.net, state_of(trainer))

    def is_saved(self, casts: Casts, loss_scale: float) -> bool:
        """Whether losses and gradients are finite."""
        losses, gradients = self.run(casts, loss_scale)
        arrays = [*losses, *(array for values in gradients.values() for array in values)]
        return all(np.isfinite(array).all() for array in arrays)

    def find(
        self, casts: Casts, loss_scale: float, *, exact: bool = False
    ) -> Optional[FoundOverflow]:
        """Return where the first pass overflows that does."""
        self._prepare(casts, exact=exact)
        self._set_statistics()
        set_random_states(self.step.random_states)
        for parts in self._passes(casts):
            for part in parts:
                batch = Batch(part.inputs, part.labels, self._loss_fn)
                overflow = find_overflow(self.net, batch, loss_scale=loss_scale)
                if overflow is not None:
                    return overflow
        return None

    def _passes(self, casts: Casts) -> Iterator[list[Part]]:
        """Yield the batches on the devices; under another policy, float16 ones in FP32."""
        now, recorded = ({c.policy for c in of} for of in (casts, self.step.settings.casts))
        for parts in self.step.passes:
            yield [
                Part(*convert_arrays(tuple(part), partial(_copy, device, now != recorded)))
                for part, device in zip(parts, self._devices)
            ]

    def _plain_values(self) -> Arrays:
        """Return the values of the network in FP32: masters, as far as weights are as they say."""
        plain = {}
        for name, value in self.step.parameters.items():
            parameter = self._parameters.get(name)
            if parameter is not None and value.dtype == np.float16 != np.dtype(parameter.dtype):
                wide = value.astype(np.float32)
                master = self.step.masters.get(name, wide).astype(np.float32)
                with np.errstate(over="ignore"):
                    value = np.where(master.astype(np.float16) == value, master, wide)
            plain[name] = value
        return plain

    def _prepare(self, casts: Casts, *, exact: bool) -> None:
        """Set up the network with the recorded values."""
        restore(self.net)
        for name, parameter in self._parameters.items():
            parameter.grad_req = self.step.settings.grad_req[name]
            parameter.initialize(init=mx.init.Zero(), ctx=self._devices, force_reinit=True)
            _set(parameter, self._values[name])
        replace(self.step.settings, casts=casts).apply(self.net, self.step.path)
        if exact:
            check_parameters(self.step.path, self._parameters, self.step.parameters)
            for name, parameter in self._parameters.items():
                _set(parameter, self.step.parameters[name])

    def _set_statistics(self) -> None:
        for name, copies in self.step.statistics.items():
            for array, value in zip(self._parameters[name].list_data(), copies):
                array[:] = value
        set_scale_histories(self.net, self.step.scale_histories)


def _copy(device: mx.Context, widens: bool, array: mx.nd.NDArray) -> mx.nd.NDArray:
    dtype = np.float32 if widens and array.dtype == np.float16 else array.dtype
    copy = in_current_interface(array.astype(dtype).copyto(device))
    if array.grad is not None:
        copy.attach_grad()
    return copy


def _fill_in_shape(parameter: gluon.Parameter, value: Optional[npt.NDArray[Any]]) -> None:
    """Give a parameter the part of its shape that is known at the first forward pass only."""
    shape = parameter.shape
    if value is None or (shape is not None and len(shape) != value.ndim):
        return
    if shape is None or all(s in (0, -1, size) for s, size in zip(shape, value.shape)):
        parameter.shape = value.shape


def _set(parameter: gluon.Parameter, value: npt.NDArray[Any]) -> None:
    set_value(parameter, mx.nd.array(value, dtype=value.dtype))
