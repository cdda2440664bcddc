"""FP32 master weights: the optimizer never sees a 16-bit number.

MXNet's ``multi_precision`` starts its masters from weights that are rounded already, keeps the
old ones when weights are set anew, and leaves it to each optimizer to be right about float16:
LARS squares float16 numbers in float16. Here masters are kept beside the optimizer's state. The
optimizer is given them and FP32 copies of the gradients, so every update is the FP32 update, bit
for bit, whatever the optimizer; the float16 weight is then the rounded master.

Every Trainer that is made for a cast network has them, with or without a loss scale, if its
optimizer was created with ``multi_precision=True`` and it does not update inside its kvstore.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.ndarray import NDArray

from mpgluon import native
from mpgluon.cast import fp32
from mpgluon.cast.network_cast import call_with_new_trainers
from mpgluon.errors import TrainerStateError
from mpgluon.numerics.dtypes import cast, convert_into, dtype_name
from mpgluon.numerics.reductions import Widened
from mpgluon.trainer import inside
from mpgluon.trainer.scaled_gradients import GradientHolder

__all__ = ["Comparison", "MasterKeeper", "MasterWeights", "compare_masters", "keep_masters"]


class MasterWeights(mx.optimizer.Updater):
    """Applies an optimizer on one device, to FP32 masters where weights are float16.

    Parameters
    ----------
    former : Updater
        What applied the optimizer until now; its states, and so its masters, are taken over.
    parameters : sequence of gluon.Parameter
        Of the Trainer, by index.

    Raises
    ------
    TrainerStateError
        If the states are not those of float16 weights: the Trainer stepped before the cast.

    Attributes
    ----------
    masters : dict from a parameter's index to NDArray
    states : dict from a parameter's index to the optimizer's state for FP32 weights
    """

    def __init__(self, former: mx.optimizer.Updater, parameters: Sequence[gluon.Parameter]) -> None:
        super().__init__(former.optimizer)
        self.masters: dict[int, NDArray] = {}
        self._parameters = parameters
        self._widened = Widened()
        self.states, self.states_synced = dict(former.states), dict(former.states_synced)
        self._separate()

    def __call__(
        self, index: Sequence[int], grad: Sequence[NDArray], weight: Sequence[NDArray]
    ) -> None:
        """Update weights as the Trainer asks; neither waits nor changes a gradient."""
        together = max(1, self.optimizer.aggregate_num)
        for start in range(0, len(index), together):
            part = slice(start, start + together)
            self._update(index[part], grad[part], weight[part])

    def _update(
        self, index: Sequence[int], grad: Sequence[NDArray], weight: Sequence[NDArray]
    ) -> None:
        updated = [self.master_of(i, w) for i, w in zip(index, weight)]
        has_master = [master is not w for master, w in zip(updated, weight)]
        grads = list(grad)
        places = [i for i, yes in enumerate(has_master) if yes and grads[i].stype == "default"]
        if places:
            for place, wide in zip(places, self._widened([grads[i] for i in places])):
                grads[place] = wide
        for place, one in enumerate(grads):
            if has_master[place] and one.stype != "default":
                grads[place] = one.astype("float32")
        super().__call__(list(index), grads, updated)
        for master, w, yes in zip(updated, weight, has_master):
            if yes:
                convert_into(w, master)

    def master_of(self, index: int, weight: NDArray) -> NDArray:
        """Return what the optimizer updates: the master, made if need be, or an FP32 weight.

        A new master has the FP32 value that the weight had before it was cast, if that is known.
        """
        if not self.optimizer.multi_precision or dtype_name(weight) != "float16":
            return weight
        if index not in self.masters:
            known = fp32.known(self._parameters[index])
            self._set_master(index, fp32.fp32_value(weight, known))
        elif self.masters[index].context != weight.context:  # loaded from a file
            self._set_master(index, self.masters[index].as_in_context(weight.context))
        return self.masters[index]

    def differences(self, index: int, weight: NDArray) -> Optional[NDArray]:
        """Return a number of shape (1,) that is 0 if a weight is its rounded master.

        It is not if somebody else has written the weight. Does not wait. ``None`` if there is
        no master.
        """
        master = self.master_of(index, weight)
        if master is weight:
            return None
        if weight.context.device_type == "cpu" and native.available():
            return native.invoke("_mpgluon_count_differences", weight, master)
        is_now, rounded = self._widened([weight, cast(master, "float16")])
        is_now -= rounded
        return mx.nd.multi_sum_sq(is_now, num_arrays=1)

    def follow(self, index: int, weight: NDArray) -> None:
        """Give a master the elements of a weight that somebody else has written."""
        self.masters[index] = fp32.fp32_value(weight, self.masters[index])  # the same array

    def complete(self, index: int, weight: NDArray) -> None:
        """Make a weight's master and its state before the first update, if it has none yet."""
        if self.master_of(index, weight) is not weight:
            self._ensure_state(index)

    def _ensure_state(self, index: int) -> None:
        if index not in self.states:
            master = self.masters[index]
            self.states[index] = self.optimizer.create_state_multi_precision(index, master)
            self.states_synced[index] = True

    def new_state(self, index: int, weight: NDArray) -> Any:
        """Return what the optimizer would begin with: FP32, for a float16 weight with a master."""
        if self.optimizer.multi_precision and dtype_name(weight) == "float16":
            weight = cast(weight, "float32")
        return self.optimizer.create_state_multi_precision(index, weight)

    def set_all(self, states: dict[int, Any], masters: dict[int, NDArray]) -> None:
        """Put states and masters in place, in place of all others."""
        self.states, self.masters = dict(states), {}
        self.states_synced = dict.fromkeys(states, True)
        for index, master in masters.items():
            self._set_master(index, master)

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """Return what ``trainer.save_states`` writes: MXNet's own arrangement, masters included."""
        for index in self.masters:
            self._ensure_state(index)  # there is none yet if its steps so far were skipped
        separate = self.states
        first = bool(self.masters) and _master_comes_first(self.optimizer)
        self.states = {
            i: (
                ((self.masters[i], s) if first else (s, self.masters[i]))
                if i in self.masters
                else s
            )
            for i, s in separate.items()
        }
        try:
            content: bytes = super().get_states(dump_optimizer)
        finally:
            self.states = separate
        return content

    def set_states(self, states: bytes) -> None:
        """Take over what ``trainer.load_states`` reads, with or without masters of ours."""
        super().set_states(states)
        self.masters = {}
        self._separate()

    def _separate(self) -> None:
        """Move masters out of states that are arranged as MXNet does."""
        narrow = [
            index
            for index in self.states
            if np.dtype(self._parameters[index].dtype) == np.float16
            and self.optimizer.multi_precision
        ]
        for index in narrow:
            parameter = self._parameters[index]
            probe = mx.nd.ones(parameter.shape, dtype="float16")
            expected = self.optimizer.create_state_multi_precision(index, probe)
            if _structure(self.states[index]) != _structure(expected):
                raise TrainerStateError(
                    f"the optimizer's state for {parameter.name} is not that of a float16 weight: "
                    "this Trainer has stepped before the cast; make a new Trainer after it"
                )
        master_first = bool(narrow) and _master_comes_first(self.optimizer)
        for index in narrow:
            first, second = self.states[index]
            master, self.states[index] = (first, second) if master_first else (second, first)
            self._set_master(index, master)

    def _set_master(self, index: int, master: NDArray) -> None:
        """Keep a master, and let the cast network know its FP32 values."""
        self.masters[index] = master
        parameter = self._parameters[index]
        if master.context == parameter.list_ctx()[0]:  # on several devices they are the same
            fp32.remember(parameter, master)


def _structure(state: Any) -> Any:
    """Return the shapes in a state, nested as it is."""
    if isinstance(state, (list, tuple)):
        return [_structure(part) for part in state]
    return getattr(state, "shape", None)


def _master_comes_first(optimizer: mx.optimizer.Optimizer) -> bool:
    """Whether MXNet's state for a float16 weight is (master, state) and not (state, master).

    Raises
    ------
    TrainerStateError
        If it is neither: an optimizer from elsewhere.
    """
    probe = mx.nd.ones((1, 1), dtype="float16")  # no optimizer starts its state with ones
    state = optimizer.create_state_multi_precision(0, probe)
    if isinstance(state, (tuple, list)) and len(state) == 2:
        places = [isinstance(s, NDArray) and s.dtype == np.float32 and s == 1 for s in state]
        if places.count(True) == 1:
            return places[0]
    raise TrainerStateError(
        f"{type(optimizer).__name__} arranges its state for float16 weights in a way of its own, "
        "in which no master can be told; save with mpgluon.save_checkpoint, and call "
        "amp.init_trainer before the first step"
    )


class Comparison(NamedTuple):
    """Whether a weight on one device is its rounded master: ``difference`` is then 0."""

    updater: MasterWeights
    number: int
    weight: NDArray
    difference: NDArray  # shape (1,); not waited for

    def follow_if(self, difference: float) -> None:
        """Let the master follow the weight if they differ."""
        if difference != 0:
            self.updater.follow(self.number, self.weight)


def keep_masters(trainer: gluon.Trainer) -> None:
    """Let a Trainer update float16 weights through FP32 masters, if its optimizer wants any."""
    updaters = inside.updaters_of(trainer)
    wanted = inside.optimizer_of(trainer).multi_precision
    if wanted and not any(isinstance(updater, MasterWeights) for updater in updaters):
        parameters = inside.parameters_of(trainer)
        inside.replace_updaters(trainer, lambda former: MasterWeights(former, parameters))


def compare_masters(
    trainer: gluon.Trainer, parameters: Iterable[gluon.Parameter]
) -> list[Comparison]:
    """Compare each float16 weight on each device with its master; does not wait."""
    compared = []
    indices = {p: i for i, p in enumerate(inside.parameters_of(trainer))}
    trained = [parameter for parameter in parameters if parameter.grad_req != "null"]
    for device, updater in enumerate(inside.updaters_of(trainer)):
        for parameter in trained if isinstance(updater, MasterWeights) else ():
            index, weight = indices[parameter], parameter.list_data()[device]
            difference = updater.differences(index, weight)
            if difference is not None:
                compared.append(Comparison(updater, index, weight, difference))
    return compared


class MasterKeeper(GradientHolder):
    """What a Trainer of a cast network asks before each update, until it has a loss scale.

    Parameters
    ----------
    trainer : gluon.Trainer
        It may still be in the making.
    """

    def has_overflow(self, parameters: Iterable[gluon.Parameter]) -> bool:
        """Skip no step; let masters follow weights that were set. Waits for the devices once.

        Raises
        ------
        TrainerStateError
            If its gradients are those of a loss that was scaled for another Trainer.
        """
        self.refuse_gradients_of_others(suspicious=False)
        self.forget_others()
        if not inside.updates_in_kvstore(self._trainer):
            keep_masters(self._trainer)
            compared = compare_masters(self._trainer, parameters)
            differences = [one.difference.as_in_context(mx.cpu()) for one in compared]
            numbers = mx.nd.concat(*differences, dim=0).asnumpy() if differences else ()
            for comparison, number in zip(compared, numbers):
                comparison.follow_if(number)
        return False


def _keep_masters_of(trainer: gluon.Trainer) -> None:
    """Give a new Trainer of a cast network its keeper of masters, unless it has a loss scale."""
    if inside.occupant(trainer) is None:
        inside.occupy(trainer, MasterKeeper(trainer))


call_with_new_trainers(_keep_masters_of)
