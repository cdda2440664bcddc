"""FP32 master weights: the optimizer never sees a 16-bit number.

MXNet's ``multi_precision`` starts its masters from rounded weights, keeps them when weights are
set again, and leaves it to each optimizer to be right about float16: LARS squares float16 numbers
in float16. Here masters are kept apart from the optimizer's states. The optimizer receives them
with FP32 copies of the gradients, so every update is the FP32 update, bit for bit, whatever the
optimizer; the 16-bit weight is then the rounded master.

Every Trainer that is made for a cast network has them, with or without a loss scale, if its
optimizer was created with ``multi_precision=True`` and it does not update inside its kvstore.
Without masters, :mod:`mpgluon.updates.rounded_updates` rounds the new values of bfloat16 weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

from mpgluon import kernels
from mpgluon.base.blocks import arrays_of, shape_of
from mpgluon.cast.fp32 import format_of, fp32_value, known, remember
from mpgluon.errors import TrainerStateError
from mpgluon.formats.float_format import FLOAT16
from mpgluon.kernels.dtypes import cast, dtype_name, round_array
from mpgluon.kernels.reductions import sums_of_squares, widened
from mpgluon.updates import gluon_trainer
from mpgluon.updates.rounded_updates import RoundedUpdates
from mpgluon.updates.updater import Updates, has_master

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = [
    "ComparedMaster",
    "MasterWeights",
    "compare_masters",
    "current_masters",
    "keep_masters",
    "make_masters",
    "new_state",
]

# Dtypes of gradients and weights that are updated natively, and the storage of the gradients.
_NATIVE_DTYPES = {("float16", "float16", "default"), ("float32", "float32", "default")}


class MasterWeights(Updates):
    """Applies an optimizer on one device, to FP32 masters where weights are 16-bit.

    Parameters
    ----------
    former : Updater
        The updater to replace; its states, and the masters in them, are taken over.
    parameters : sequence of gluon.Parameter
        The Trainer's parameters, by index.

    Raises
    ------
    TrainerStateError
        If the states do not belong to 16-bit weights: the Trainer stepped before the cast.

    Attributes
    ----------
    masters : dict from a parameter's index to NDArray
    states : dict from a parameter's index to the optimizer's state for FP32 weights
    """

    extra_name = "master"

    def __init__(self, former: mx.optimizer.Updater, parameters: Sequence[gluon.Parameter]) -> None:
        super().__init__(former, parameters)
        index = self._separate({"float16"})
        if index is not None:
            raise TrainerStateError(
                f"the optimizer's state for {parameters[index].name} is not that of a float16 "
                "weight: this Trainer, or that of the file, has stepped before the cast; make a "
                "new Trainer after it (mpgluon.load_checkpoint takes files of either format)"
            )

    @property
    def masters(self) -> dict[int, NDArray]:
        """The FP32 masters by their parameters' indices."""
        return self.extra

    def _update(
        self, index: Sequence[int], grad: Sequence[NDArray], weight: Sequence[NDArray]
    ) -> None:
        updated = [self.make_master(i, w) for i, w in zip(index, weight)]
        narrow = [place for place, w in enumerate(weight) if updated[place] is not w]
        is_float16 = all(dtype_name(weight[place]) == "float16" for place in narrow)
        if narrow and is_float16 and self._update_natively(index, grad, weight, updated):
            return
        grads = list(grad)
        dense = [place for place in narrow if grads[place].stype == "default"]
        if dense:
            for place, wide in zip(dense, widened([grads[place] for place in dense])):
                grads[place] = wide
        for place in narrow:
            if grads[place].stype != "default":
                grads[place] = grads[place].astype("float32")
        super()._update(index, grads, updated)
        for place in narrow:
            fmt = format_of(self._parameters[index[place]])
            round_array(updated[place], fmt, out=weight[place])

    def _update_natively(
        self,
        index: Sequence[int],
        grad: Sequence[NDArray],
        weight: Sequence[NDArray],
        updated: Sequence[NDArray],
    ) -> bool:
        """Update masters and weights in one pass each, and return whether that was possible."""
        dtypes = {(dtype_name(g), dtype_name(w), g.stype) for g, w in zip(grad, weight)}
        if not kernels.available() or not dtypes <= _NATIVE_DTYPES:
            return False
        options = self._begin_momentum(index, updated)
        for i, g, w, master, own in zip(index, grad, weight, updated, options or ()):
            arrays = (master, g, self.states[i])
            if master is w:
                mx.nd.sgd_mom_update(*arrays, out=w, **own)
            else:
                kernels.invoke("_mpgluon_sgd_mom_master_update", *arrays, w, out=master, **own)
        return options is not None

    def make_master(self, index: int, weight: NDArray) -> NDArray:
        """Return the array to update: a master, made if there is none, or an FP32 weight.

        A new master has the FP32 value that the weight had before it was cast, if that is known.
        On several devices, see :func:`make_masters`.
        """
        parameter = self._parameters[index]
        if not has_master(self.optimizer, parameter):
            return weight
        if index not in self.masters:
            value = fp32_value(weight, known(parameter), format_of(parameter))
            self._set_master(index, value.copy() if value is weight else value)
        elif self.masters[index].context != weight.context:  # loaded from a file
            self._set_master(index, self.masters[index].as_in_context(weight.context))
        elif known(parameter) is not self.masters[index]:  # after a restore and another cast
            self._set_master(index, self.masters[index])
        return self.masters[index]

    def difference(self, index: int, weight: NDArray) -> Optional[NDArray]:
        """Return a number of shape (1,) that is 0 if a weight is its rounded master.

        It is not if the weight was written outside of the updater. Does not wait. ``None`` if the
        weight has no master.
        """
        if index not in self.masters or not has_master(self.optimizer, self._parameters[index]):
            return None
        master = self.masters[index].as_in_context(weight.context)
        fmt = format_of(self._parameters[index])
        if fmt == FLOAT16 and weight.context.device_type == "cpu" and kernels.available():
            return kernels.invoke("_mpgluon_count_differences", weight, master)
        rounded = round_array(master, fmt)
        differs = mx.nd.broadcast_not_equal(cast(weight, "float32"), rounded, out=rounded)
        return sums_of_squares([differs], in_any_order=True)

    def follow(self, index: int, weight: NDArray) -> None:
        """Give a master the elements of a weight that was written outside of the updater."""
        value = fp32_value(weight, self.masters[index], format_of(self._parameters[index]))
        self._set_master(index, value)

    def current(self, index: int, weight: NDArray) -> Optional[NDArray]:
        """Return a weight's master, with later writes to the weight; ``None`` without a master."""
        if index not in self.masters or not has_master(self.optimizer, self._parameters[index]):
            return None
        self.follow(index, weight)
        return self.masters[index]

    def set_all(self, states: dict[int, Any], extra: dict[int, NDArray]) -> None:
        """Put states and masters in place of all others."""
        super().set_all(states, {})
        for index, master in extra.items():
            self._set_master(index, master)

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """Return the states for ``trainer.save_states``: MXNet's own arrangement, with masters."""
        separate = self.states
        first = bool(self.masters) and _master_comes_first(self.optimizer)
        self.states = dict(separate)
        for index, master in self.masters.items():
            state = separate.get(index)
            if index not in separate:  # all steps were skipped so far
                state = self.optimizer.create_state_multi_precision(index, master)
            self.states[index] = (master, state) if first else (state, master)
        try:
            content: bytes = super().get_states(dump_optimizer)
        finally:
            self.states = separate
        return content

    def set_states(self, states: bytes) -> None:
        """Take over what ``trainer.load_states`` reads, of 16-bit or of FP32 weights.

        Masters that the file lacks are made for the next update, as for a new Trainer.
        """
        super().set_states(states)
        self.extra = {}
        index = self._separate({"float16", "float32"})
        if index is not None:
            parameter = self._parameters[index]
            raise TrainerStateError(
                f"the optimizer's state for {parameter.name} in the file is not that of a weight "
                f"of shape {shape_of(parameter)}: it is another network's"
            )

    def _separate(self, allowed: set[str]) -> Optional[int]:
        """Take masters out of states in MXNet's arrangement, where there are any.

        Returns the first index whose state belongs to no weight of an allowed dtype; then nothing
        was taken.
        """
        kept: list[int] = [index for index in self.states if self._keeps_master(index)]
        narrow = []
        for index in kept:
            made_for = self._made_for(index)
            if not made_for & allowed:
                return index
            if "float16" in made_for:
                narrow.append(index)
        master_first = bool(narrow) and _master_comes_first(self.optimizer)
        for index in narrow:
            pair = self.states[index]
            master, self.states[index] = pair if master_first else pair[::-1]
            self._set_master(index, master)
        return None

    def _set_master(self, index: int, master: NDArray) -> None:
        """Keep a master, and remember it as the parameter's FP32 value."""
        self.masters[index] = master
        parameter = self._parameters[index]
        if master.context == parameter.list_ctx()[0]:  # on several devices they are the same
            remember(parameter, master)


def new_state(optimizer: mx.optimizer.Optimizer, index: int, weight: NDArray) -> Any:
    """Return the state with which an optimizer begins: FP32, for a weight with a master."""
    narrow = optimizer.multi_precision and dtype_name(weight) == "float16"
    return optimizer.create_state_multi_precision(
        index, cast(weight, "float32") if narrow else weight
    )


def _master_comes_first(optimizer: mx.optimizer.Optimizer) -> bool:
    """Whether MXNet's state for a float16 weight is (master, state) and not (state, master).

    Raises
    ------
    TrainerStateError
        If it is neither, as a third party's optimizer may have it.
    """
    probe = mx.nd.ones((1, 1), dtype="float16")  # no optimizer starts its state with ones
    state = optimizer.create_state_multi_precision(0, probe)
    if isinstance(state, (tuple, list)) and len(state) == 2:
        places = [isinstance(s, NDArray) and s.dtype == np.float32 and s == 1 for s in state]
        if places.count(True) == 1:
            return places[0]
    raise TrainerStateError(
        f"{type(optimizer).__name__} arranges its state for float16 weights differently from "
        "MXNet's optimizers, so its masters cannot be found; save with mpgluon.save_checkpoint, "
        "and call amp.init_trainer before the first step"
    )


class ComparedMaster(NamedTuple):
    """The comparison of a weight on one device with its master."""

    updater: MasterWeights
    number: int  # of the parameter
    weight: NDArray
    difference: NDArray  # shape (1,); 0 if the weight is the rounded master

    def follow(self) -> None:
        """Give the master the elements of the weight that differ."""
        self.updater.follow(self.number, self.weight)


def keep_masters(trainer: gluon.Trainer) -> None:
    """Make a Trainer update 16-bit weights through FP32 masters, if its optimizer wants any."""
    optimizer, updaters = gluon_trainer.optimizer_of(trainer), gluon_trainer.updaters_of(trainer)
    kind = MasterWeights if optimizer.multi_precision else RoundedUpdates
    if not any(isinstance(updater, kind) for updater in updaters):
        parameters = gluon_trainer.parameters_of(trainer)
        gluon_trainer.set_updaters(trainer, [kind(former, parameters) for former in updaters])


def compare_masters(
    trainer: gluon.Trainer, parameters: Iterable[gluon.Parameter]
) -> list[ComparedMaster]:
    """Compare each 16-bit weight on each device with its master; does not wait."""
    compared = []
    indices = {p: i for i, p in enumerate(gluon_trainer.parameters_of(trainer))}
    trained = [parameter for parameter in parameters if parameter.grad_req != "null"]
    for device, updater in enumerate(gluon_trainer.updaters_of(trainer)):
        masters = updater.masters if isinstance(updater, MasterWeights) else {}
        for parameter in trained:
            index = indices[parameter]
            if index in masters:
                weight = arrays_of(parameter)[device]
                difference = updater.difference(index, weight)
                if difference is not None:
                    compared.append(ComparedMaster(updater, index, weight, difference))
    return compared


def current_masters(trainer: gluon.Trainer) -> dict[int, NDArray]:
    """Return a Trainer's masters on the first device, with later writes to the weights."""
    updater = gluon_trainer.updaters_of(trainer)[0]
    if not isinstance(updater, MasterWeights):
        return {}
    parameters = gluon_trainer.parameters_of(trainer)
    found = {i: updater.current(i, arrays_of(parameters[i])[0]) for i in list(updater.masters)}
    return {index: master for index, master in found.items() if master is not None}


def make_masters(trainer: gluon.Trainer) -> None:
    """Make the masters of trained parameters that have none, before the first update on any device.

    That update changes the first device's master, which is the parameter's FP32 value, and from
    which the other devices' masters begin.
    """
    for device, updater in enumerate(gluon_trainer.updaters_of(trainer)):
        masters = updater.masters if isinstance(updater, MasterWeights) else None
        for index, parameter in enumerate(gluon_trainer.parameters_of(trainer)):
            if masters is None or index in masters or parameter.grad_req == "null":
                continue
            if has_master(updater.optimizer, parameter):
                updater.make_master(index, arrays_of(parameter)[device])
