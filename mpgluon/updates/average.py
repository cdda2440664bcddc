"""An exponential moving average of a Trainer's weights, in FP32, and its way into the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Optional

from mpgluon.base.blocks import arrays_of, set_value
from mpgluon.cast import fp32
from mpgluon.errors import TrainerStateError
from mpgluon.formats.float_format import FLOAT16, FLOAT32, FloatFormat
from mpgluon.formats.loss_scale import NUMBERS
from mpgluon.kernels.dtypes import cast, round_array
from mpgluon.updates import gluon_trainer
from mpgluon.updates.masters import MasterWeights, keep_masters
from mpgluon.updates.updater import calls_of

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

__all__ = ["WeightAverage"]


class WeightAverage:
    """An exponential moving average (EMA) of the weights that a Trainer updates.

    ::

        average = mpgluon.WeightAverage(trainer, 0.999)
        for images, labels in batches:
            ...
            trainer.step(batch_size)
            average.update()
        with average.swapped_in():
            evaluate(net)

    It averages the FP32 masters of float16 weights, or FP32 parameters, in FP32 on the first
    device. After the first step it equals the weights, and after each further one
    ``decay * average + (1 - decay) * weights``: the average of about the last
    ``1 / (1 - decay)`` steps. ``mpgluon.save_checkpoint`` and ``load_checkpoint`` include it.

    Parameters
    ----------
    trainer : gluon.Trainer
        With or without a loss scale; one Trainer has one average. On several devices it needs
        ``amp.init_trainer`` or ``update_on_kvstore=False``.
    decay : float
        In (0, 1).

    Attributes
    ----------
    updates : int
        The number of calls of :meth:`update` that followed a step that was not skipped.
    arrays : dict from a parameter's index in the Trainer to NDArray
        The averages, FP32, on the first device.

    Raises
    ------
    TypeError, ValueError
        If ``trainer`` is not a Gluon Trainer, or ``decay`` not a number in (0, 1).
    TrainerStateError
        If the Trainer has an average already, updates inside its kvstore, or has row-sparse
        weights.

    Notes
    -----
    The running statistics of BatchNorm are averaged like weights, over devices too: the network's
    own belong to its latest weights. timm and Lightning do so; Keras and, by default,
    ``torch.optim.swa_utils.AveragedModel`` take the latest ones. Frozen parameters have no
    average: the network keeps its values. One that is frozen later keeps its average, which
    approaches its value.

    Where the relative difference of a weight and its average is below about
    ``2**-24 / (1 - decay)``, which is 6e-5 for 0.999, the average stands still. In float16 that
    would be ``2**-11 / (1 - decay)``: half of the weight.

    References
    ----------
    Polyak, Juditsky, "Acceleration of stochastic approximation by averaging", 1992; Tarvainen,
    Valpola, "Mean teachers are better role models", 2017, 3.
    """

    def __init__(self, trainer: gluon.Trainer, decay: float) -> None:
        if not isinstance(trainer, gluon.Trainer):
            raise TypeError(
                f"WeightAverage takes a gluon.Trainer, received {type(trainer).__name__}"
            )
        self.decay = decay
        if gluon_trainer.average_of(trainer) is not None:
            raise TrainerStateError(
                "this Trainer has an average of its weights already; one Trainer, one average"
            )
        _refuse_weights_out_of_reach(trainer)
        keep_masters(trainer)
        self.updates = 0
        self._trainer = trainer
        self._indices = {p: index for index, p in enumerate(gluon_trainer.parameters_of(trainer))}
        self.arrays: dict[int, NDArray] = {}
        self._counted = calls_of(trainer)
        self._is_swapped_in = False
        gluon_trainer.set_average(trainer, self)
        gluon_trainer.call_before_steps(
            trainer, lambda: self.refuse_while_swapped_in("trainer.step")
        )

    @property
    def decay(self) -> float:
        """The share of the average that remains at each step, in (0, 1); it may be set."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, NUMBERS):
            raise TypeError(f"decay must be a number, received {decay!r}")
        if not 0 < decay < 1:
            raise ValueError(
                f"decay must be between 0 and 1, both excluded, received {decay!r}; 0.999 averages "
                "about the last thousand steps"
            )
        self._decay = float(decay)

    def update(self) -> None:
        """Take the weights into the average, if they were updated since the latest call.

        Call it after each ``trainer.step``: after a skipped step, or between the batches of a step,
        it changes nothing. Waits for the devices.

        Raises
        ------
        TrainerStateError
            If the average is in the network.
        """
        self.refuse_while_swapped_in("average.update")
        counted = calls_of(self._trainer)
        if counted == self._counted:
            return
        self._counted = counted
        self.updates += 1
        mx.nd.waitall()  # a backward pass may still be writing running statistics
        with autograd.pause():
            for parameter, index in self._indices.items():
                if index in self.arrays:
                    average = self.arrays[index]
                    change = self._value(index, parameter) - average
                    change *= 1 - self._decay
                    average += change
                elif _is_averaged(parameter):
                    self.arrays[index] = self._value(index, parameter).copy()

    def value_of(self, parameter: gluon.Parameter) -> Optional[NDArray]:
        """Return the average of a parameter.

        Returns
        -------
        NDArray or None
            FP32, of the parameter's shape, on its first device; the array itself, not a copy.
            ``None`` before the first update, of a parameter that was always frozen, and of one
            that is not the Trainer's.
        """
        return self.arrays.get(self._indices.get(parameter, -1))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put the average into the network until the block ends, also with an exception.

        A float16 parameter becomes the rounded average, and stands for the FP32 one:
        ``mpgluon.restore(net)`` inside the block gives the FP32 average, to be saved. All that was
        written to averaged parameters inside the block is undone at its end; parameters,
        masters and FP32 values are then as they were, bit for bit. Before the first update
        the network keeps its weights. Waits for the devices at both ends.

        Yields
        ------
        None

        Raises
        ------
        TrainerStateError
            If the average is in the network already. Inside the block, steps of the Trainer,
            :meth:`update` and checkpoints raise it.
        """
        self.refuse_while_swapped_in("average.swapped_in")
        mx.nd.waitall()  # a running inference may change the layout of a weight that is being read
        parameters = gluon_trainer.parameters_of(self._trainer)
        former = [_former(parameters[index]) for index in self.arrays]
        self._is_swapped_in = True
        try:
            with autograd.pause():
                for index, average in self.arrays.items():
                    _put(parameters[index], average)
            yield
        finally:
            try:
                mx.nd.waitall()  # raises errors of operators that have failed
            finally:
                with autograd.pause():
                    for one in former:
                        one.put_back()
                self._is_swapped_in = False

    def refuse_while_swapped_in(self, what: str) -> None:
        """Raise TrainerStateError, naming the call, if the average is in the network."""
        if self._is_swapped_in:
            raise TrainerStateError(
                f"{what} was called while the average is in the network, in place of the weights; "
                "leave the block of average.swapped_in() first"
            )

    def set_all(self, arrays: dict[int, NDArray], updates: int) -> None:
        """Put other averages in place of all; the Trainer's steps so far count as included."""
        self.arrays, self.updates = dict(arrays), updates
        self._counted = calls_of(self._trainer)

    def _value(self, index: int, parameter: gluon.Parameter) -> NDArray:
        """Return the value to average: a master, an FP32 weight, or statistics of all devices."""
        first, *others = arrays_of(parameter)
        if others and gluon_trainer.is_statistic(parameter):
            differences = [one.as_in_context(first.ctx) - first for one in others]
            return first + mx.nd.add_n(*differences) / (1 + len(others))  # exact if they agree
        updater = gluon_trainer.updaters_of(self._trainer)[0]
        master = updater.current(index, first) if isinstance(updater, MasterWeights) else None
        return cast(first, "float32") if master is None else master


class _Former(NamedTuple):
    """A parameter as it was before the average took its place."""

    parameter: gluon.Parameter
    weights: list[NDArray]  # one for each device
    fmt: FloatFormat
    fp32_value: Optional[NDArray]  # as it was remembered: of a 16-bit parameter, its master

    def put_back(self) -> None:
        if fp32.format_of(self.parameter) != self.fmt:  # the network was restored or cast since
            wide = None if self.fp32_value is None else self.fp32_value.copy()
            _put(self.parameter, fp32.fp32_value(self.weights[0], wide, self.fmt))
            return
        for weight, before in zip(arrays_of(self.parameter), self.weights):
            before.copyto(weight)
        if self.fp32_value is not None:
            fp32.remember(self.parameter, self.fp32_value)


def _former(parameter: gluon.Parameter) -> _Former:
    weights = [weight.copy() for weight in arrays_of(parameter)]
    return _Former(parameter, weights, fp32.format_of(parameter), fp32.known(parameter))


def _put(parameter: gluon.Parameter, value: NDArray) -> None:
    """Give a parameter an FP32 value, rounded to its format, which it also stands for in FP32."""
    fmt = fp32.format_of(parameter)
    is_wide = fmt in (FLOAT16, FLOAT32)
    set_value(parameter, cast(value, fmt.name) if is_wide else round_array(value, fmt))
    if fmt != FLOAT32:
        fp32.remember(parameter, value.copy())  # who asks for it may change it


def _is_averaged(parameter: gluon.Parameter) -> bool:
    """Whether an average of the parameter begins now."""
    is_float = np.dtype(parameter.dtype).kind == "f"
    return is_float and (parameter.grad_req != "null" or gluon_trainer.is_statistic(parameter))


def _refuse_weights_out_of_reach(trainer: gluon.Trainer) -> None:
    gluon_trainer.refuse_sparse_weights(
        gluon_trainer.parameters_of(trainer), "which WeightAverage cannot read"
    )
    if gluon_trainer.will_update_in_kvstore(trainer):
        raise TrainerStateError(
            "this Trainer updates weights inside its kvstore, where masters cannot be read; "
            "create it with update_on_kvstore=False, or call amp.init_trainer(trainer) before "
            "WeightAverage"
        )
