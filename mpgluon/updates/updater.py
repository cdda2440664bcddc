"""SGD with momentum on a CPU, in half the time of MXNet's updater and with the same bits.

MXNet updates several weights in one operator, whose loop asks for each element which of the weights
are that long. Its operator for one weight does the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Optional

from mpgluon.cast.fp32 import format_of
from mpgluon.errors import TrainerStateError
from mpgluon.formats.float_format import FLOAT32
from mpgluon.updates import gluon_trainer

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["Updates", "calls_of", "has_master"]


class Updates(mx.optimizer.Updater):
    """Applies an optimizer on one device.

    Parameters
    ----------
    former : Updater
        The updater to replace; its states are taken over.
    parameters : sequence of gluon.Parameter
        The Trainer's parameters, by index.

    Attributes
    ----------
    extra : dict from a parameter's index to NDArray
        A further FP32 array of the weight's shape, which subclasses keep for each state.
    extra_name : str
        The name of these arrays in checkpoints.
    calls : int
        How many steps it has updated weights in; ``trainer.load_states`` does not set it back.
    """

    extra_name = ""

    def __init__(self, former: mx.optimizer.Updater, parameters: Sequence[gluon.Parameter]) -> None:
        super().__init__(former.optimizer)
        self._parameters = parameters
        self.states, self.states_synced = dict(former.states), dict(former.states_synced)
        self.extra: dict[int, NDArray] = {}
        self.calls = 0

    def set_all(self, states: dict[int, Any], extra: dict[int, NDArray]) -> None:
        """Replace all states and further arrays."""
        self.states, self.extra = dict(states), dict(extra)
        self.states_synced = dict.fromkeys(states, True)

    def set_states(self, states: bytes) -> None:
        """Take over what ``trainer.load_states`` reads.

        The optimizer is the file's, but whether there are masters stays this Trainer's choice.

        Raises
        ------
        TrainerStateError
            If the states belong to other parameters, or to 16-bit weights with masters while this
            Trainer keeps none.
        """
        masters = self.optimizer.multi_precision
        super().set_states(states)
        self.optimizer.multi_precision = masters
        self.aggregate_updates = self.optimizer.aggregate_num > 0  # of the former one until here
        for index in self.states:
            if index >= len(self._parameters):
                raise TrainerStateError(
                    f"the file has a state for a parameter with index {index}, and this Trainer "
                    f"has {len(self._parameters)} parameters: it is that of another network"
                )
            name = self._parameters[index].name
            if not self._keeps_master(index) and self._made_for(index) == {"float16"}:
                raise TrainerStateError(
                    f"the optimizer's state for {name} is that of a 16-bit weight with its FP32 "
                    "master, and this Trainer keeps no master of it; cast the network and create "
                    "the Trainer with multi_precision=True, or use mpgluon.save_checkpoint and "
                    "load_checkpoint, which go from format to format"
                )

    def _keeps_master(self, index: int) -> bool:
        """Whether a parameter has an FP32 master here."""
        return has_master(self.optimizer, self._parameters[index])

    def _made_for(self, index: int) -> set[str]:
        """Return the dtypes of weights, of ``float16`` and ``float32``, that have such a state."""
        found, dtypes = _structure(self.states[index]), set()
        masters, self.optimizer.multi_precision = self.optimizer.multi_precision, True
        for dtype in ("float16", "float32"):
            probe = mx.nd.ones(self._parameters[index].shape, dtype=dtype)
            if found == _structure(self.optimizer.create_state_multi_precision(index, probe)):
                dtypes.add(dtype)
        self.optimizer.multi_precision = masters
        return dtypes

    def __call__(
        self, index: Sequence[int], grad: Sequence[NDArray], weight: Sequence[NDArray]
    ) -> None:
        """Update weights; neither waits nor changes a gradient."""
        self.calls += 1
        grad, weight = ([array.as_nd_ndarray() for array in arrays] for arrays in (grad, weight))
        together = max(1, self.optimizer.aggregate_num)
        for start in range(0, len(index), together):
            part = slice(start, start + together)
            self._update(index[part], grad[part], weight[part])

    def _update(
        self, index: Sequence[int], grad: Sequence[NDArray], weight: Sequence[NDArray]
    ) -> None:
        """Update the weights whose learning rates MXNet asks for together."""
        options = self._begin_momentum(index, weight) if all(map(_is_plain, grad)) else None
        if options is None:
            super().__call__(list(index), list(grad), list(weight))
            return
        for i, g, w, own in zip(index, grad, weight, options):
            mx.nd.sgd_mom_update(w, g, self.states[i], out=w, **own)

    def _begin_momentum(
        self, index: Sequence[int], weight: Sequence[NDArray]
    ) -> Optional[list[dict[str, float]]]:
        """Begin an update by SGD with momentum, and return the options of each weight's operator.

        ``None`` if the weights are to be updated otherwise; then nothing has begun.
        """
        optimizer = self.optimizer
        if not (
            type(optimizer) is mx.optimizer.SGD
            and optimizer.momentum > 0
            and optimizer.aggregate_num > 0
            and all(self.states_synced.get(i, True) for i in index)
            and all(map(_is_plain, weight))
            and _one_weight_has_the_same_bits()
        ):
            return None
        for i, w in zip(index, weight):
            if i not in self.states:
                self.states[i] = optimizer.create_state_multi_precision(i, w)
                self.states_synced[i] = True
        optimizer._set_current_context(weight[0].context.device_id)
        optimizer._update_count(index)
        options = {"momentum": optimizer.momentum, "rescale_grad": optimizer.rescale_grad}
        if optimizer.clip_gradient:
            options["clip_gradient"] = optimizer.clip_gradient
        rates, decays = optimizer._get_lrs(index), optimizer._get_wds(index)
        return [{**options, "lr": rate, "wd": decay} for rate, decay in zip(rates, decays)]


def has_master(optimizer: mx.optimizer.Optimizer, parameter: gluon.Parameter) -> bool:
    """Whether an optimizer wants an FP32 master of a parameter."""
    return bool(optimizer.multi_precision) and format_of(parameter) != FLOAT32


def calls_of(trainer: gluon.Trainer) -> int:
    """Return how many times a Trainer has updated weights on a device; a skipped step does not."""
    updaters = gluon_trainer.updaters_of(trainer)
    return sum(updater.calls for updater in updaters if isinstance(updater, Updates))


def _structure(state: Any) -> Any:
    """Return the shapes in a state, nested as it is."""
    if isinstance(state, (list, tuple)):
        return [_structure(part) for part in state]
    return getattr(state, "shape", None)


def _is_plain(array: NDArray) -> bool:
    """Whether it is a dense FP32 array on a CPU."""
    is_dense_fp32 = array.dtype == np.float32 and array.stype == "default"
    return bool(is_dense_fp32 and array.context.device_type == "cpu")


@cache
def _one_weight_has_the_same_bits() -> bool:
    """Whether MXNet's compiler has contracted the same operations in both operators."""
    random = np.random.RandomState(0)
    values = [mx.nd.array(random.standard_normal(4099), dtype="float32") for _ in range(3)]
    copies = [array.copy() for array in values]
    options = {"momentum": 0.9, "rescale_grad": 0.3, "clip_gradient": 0.2}
    weight, copy = values[0], copies[0]
    mx.nd.sgd_mom_update(*values, out=weight, lr=0.07, wd=0.01, **options)
    mx.nd.multi_sgd_mom_update(
        *copies, out=[copy], lrs=[0.07], wds=[0.01], num_weights=1, **options
    )
    pairs = zip(values, copies)
    return all(one.asnumpy().tobytes() == other.asnumpy().tobytes() for one, other in pairs)
