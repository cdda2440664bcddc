"""What mpgluon keeps beside a Gluon Trainer, and the one place where it meets one.

``gluon.Trainer`` looks for an object in its ``_amp_loss_scaler`` before each update and asks it
``has_overflow``; if so, it updates nothing. A :class:`TrainerState` is such an object, so any
Trainer skips exactly the bad step, subclasses such as Horovod's included. No other module
touches the Trainer's private fields.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable, Optional

import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.ndarray import NDArray

from mpgluon.errors import TrainerStateError
from mpgluon.loss_scale import LossScale
from mpgluon.reductions import all_finite

__all__ = ["TrainerState", "attach", "export_trainer", "import_trainer", "state_of"]

Arrays = dict[str, npt.NDArray[Any]]
Parameters = Mapping[str, gluon.Parameter]


class TrainerState:
    """The loss scale of one Trainer and what became of its steps.

    Attributes
    ----------
    loss_scale : LossScale
        The state machine; its ``scale`` multiplies the next loss.
    step_was_skipped : bool
        Whether the latest ``step`` left the weights as they were.
    skipped_steps : int
        How many did, since the beginning.
    """

    def __init__(self, trainer: gluon.Trainer, loss_scale: LossScale) -> None:
        self._trainer = trainer
        self.loss_scale = loss_scale
        self.step_was_skipped = False
        self.skipped_steps = 0
        self._scale_of_gradients: Optional[float] = None  # None: no loss was scaled yet
        # The scale of the latest step, and how many updates the optimizer had made before it.
        self._latest: tuple[Optional[float], int] = (None, -1)

    def note_scaled_loss(self) -> float:
        """Return S for a loss, and remember that the gradients to come are S times too large."""
        scale = self.loss_scale.scale
        if self._scale_of_gradients not in (None, scale):
            raise TrainerStateError(
                f"the loss scale changed from {self._scale_of_gradients:g} to {scale:g} while "
                "gradients were being accumulated; call trainer.step before changing it"
            )
        self._scale_of_gradients = scale
        return scale

    def has_overflow(self, parameters: Iterable[gluon.Parameter]) -> bool:
        """Tell the Trainer, just before it updates, whether this step is to be skipped.

        Divides the optimizer's ``rescale_grad``, which the Trainer has just set, by the scale
        of the gradients: the division then happens in FP32 inside the update, and a float16
        gradient is never divided itself. Waits for the devices once.
        """
        parameters = list(parameters)
        gradients = [gradient for _, gradient in _fresh(parameters)]
        if not gradients and not any(p.grad_req != "null" for p in parameters):
            raise TrainerStateError(
                "this Trainer has no parameter with a gradient: all are frozen "
                "(grad_req='null'), so a step changes nothing"
            )
        finite = all_finite(gradients) if self.loss_scale.skips_overflow and gradients else True
        scale, self._scale_of_gradients = self._scale_of_gradients, None
        optimizer = self._trainer._optimizer
        updates = sum(
            sum(counts.values()) for counts in optimizer._all_index_update_counts.values()
        )
        if scale is not None:
            self.loss_scale.update(finite)
        elif self._latest[1] == updates:
            # The Trainer refused the latest step for its stale gradients, and is asked again.
            scale = self._latest[0]
        self._latest = (scale, updates if finite else -1)
        optimizer.rescale_grad /= scale or 1.0
        self.step_was_skipped = not finite
        if not finite:
            self.skipped_steps += 1
            _discard_gradients(parameters)
        return not finite


def _fresh(parameters: Iterable[gluon.Parameter]) -> Iterator[tuple[NDArray, NDArray]]:
    """Yield weight and gradient on every device, where backward has written the gradient."""
    for parameter in parameters:
        if parameter.grad_req != "null" and parameter._grad is not None:
            for weight, gradient in zip(parameter.list_data(), parameter.list_grad()):
                if weight._fresh_grad:
                    yield weight, gradient


def _discard_gradients(parameters: list[gluon.Parameter]) -> None:
    """Forget the gradients of a skipped step, and empty those that accumulate."""
    for weight, _ in _fresh(parameters):
        weight._fresh_grad = False
    for parameter in parameters:
        if parameter.grad_req == "add":
            parameter.zero_grad()


def attach(trainer: gluon.Trainer, loss_scale: LossScale) -> TrainerState:
    """Put a new state where ``trainer`` asks for it, and return it.

    Raises
    ------
    TypeError
        If ``trainer`` is no Gluon Trainer.
    TrainerStateError
        If it has a state already, or updates weights inside the kvstore, where a step cannot
        be skipped. Nothing is changed then.
    """
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(
            f"init_trainer takes a gluon.Trainer, received {type(trainer).__name__}; an optimizer "
            "alone has no step that could be skipped"
        )
    existing = getattr(trainer, "_amp_loss_scaler", None)
    if existing is not None:
        raise TrainerStateError(
            f"this Trainer has a loss scale already ({type(existing).__name__}); one Trainer, "
            "one loss scale: call init_trainer once, and contrib.amp's not at all"
        )
    if loss_scale.skips_overflow:
        _keep_updates_out_of_the_kvstore(trainer)
    state = TrainerState(trainer, loss_scale)
    trainer._amp_loss_scaler = state
    return state


def _keep_updates_out_of_the_kvstore(trainer: gluon.Trainer) -> None:
    asked_for: Optional[bool] = trainer._kvstore_params["update_on_kvstore"]
    if asked_for or (trainer._kv_initialized and trainer._update_on_kvstore):
        raise TrainerStateError(
            "this Trainer updates weights inside its kvstore (update_on_kvstore=True), where a "
            "step with infinite gradients cannot be skipped; create it with "
            "update_on_kvstore=False, and call init_trainer before the first step"
        )
    if not trainer._kv_initialized:
        trainer._kvstore_params["update_on_kvstore"] = False  # None means True on several devices


def state_of(trainer: Any) -> TrainerState:
    """Return the state of a Trainer.

    Raises
    ------
    TrainerStateError
        If ``init_trainer`` was never called on it.
    """
    state = getattr(trainer, "_amp_loss_scaler", None)
    if not isinstance(state, TrainerState):
        raise TrainerStateError(
            "this Trainer has no loss scale yet; call amp.init_trainer(trainer) right after "
            "creating it"
        )
    return state


def _leaves(state: Any, place: str) -> Iterator[tuple[str, NDArray]]:
    """Yield the arrays in an optimizer's state for one parameter, each with its place."""
    if isinstance(state, NDArray):
        yield place, state
    elif isinstance(state, (list, tuple)):
        for position, item in enumerate(state):
            yield from _leaves(item, f"{place}/{position}")


def _state_arrays(states: dict[int, Any], names: dict[int, str]) -> dict[str, NDArray]:
    leaves = (_leaves(state, names[index]) for index, state in states.items())
    return dict(leaf for one in leaves for leaf in one)


def _names_by_index(trainer: gluon.Trainer, parameters: Parameters) -> dict[int, str]:
    """Return each parameter's name in the network's structure, which outlives the instance.

    The Trainer numbers them by the order of their global names, in which ``dense10`` comes
    before ``dense8``.
    """
    structural = {id(parameter): name for name, parameter in parameters.items()}
    return {i: structural.get(id(p), p.name) for i, p in enumerate(trainer._params)}


def export_trainer(trainer: gluon.Trainer, parameters: Parameters) -> tuple[dict[str, Any], Arrays]:
    """Return what a Trainer's next steps depend on: plain values, and named arrays.

    Masters and momenta are the same on all devices; the first one's are returned.

    Parameters
    ----------
    trainer : gluon.Trainer
    parameters : mapping from name to Parameter
        The network's, under names that do not depend on the instance.

    Raises
    ------
    TrainerStateError
        If the kvstore holds the optimizer's state, out of reach.
    """
    if trainer._update_on_kvstore:
        raise TrainerStateError(
            "this Trainer keeps momenta and masters inside its kvstore, from where they cannot be "
            "saved; create it with update_on_kvstore=False"
        )
    optimizer, states = trainer._optimizer, trainer._updaters[0].states
    names = _names_by_index(trainer, parameters)
    plain: dict[str, Any] = {
        "optimizer": type(optimizer).__name__,
        "num_update": optimizer.num_update,
        "update_counts": {
            str(device): {names[index]: count for index, count in counts.items()}
            for device, counts in optimizer._all_index_update_counts.items()
        },
        "m_schedule": getattr(optimizer, "m_schedule", None),  # Nadam's running product
        "learning_rate": optimizer.lr,
        "states": [names[index] for index in states],
        "loss_scale": None,
    }
    amp = getattr(trainer, "_amp_loss_scaler", None)
    if isinstance(amp, TrainerState):
        plain["loss_scale"] = amp.loss_scale.state_dict()
        plain["skipped_steps"] = amp.skipped_steps
    arrays = {name: array.asnumpy() for name, array in _state_arrays(states, names).items()}
    return plain, arrays


def import_trainer(
    trainer: gluon.Trainer, parameters: Parameters, plain: dict[str, Any], arrays: Arrays
) -> Callable[[], None]:
    """Check what :func:`export_trainer` returned, and return a function that puts it in place.

    Nothing is changed before that function is called. Call it before the parameters are set: a
    Trainer on several devices copies the first one's to the others when it begins.

    Raises
    ------
    ValueError
        If it belongs to another optimizer, loss scale or set of parameters.
    """
    optimizer = trainer._optimizer
    if plain["optimizer"] != type(optimizer).__name__:
        raise ValueError(
            f"its optimizer was {plain['optimizer']}, this one is {type(optimizer).__name__}"
        )
    amp = getattr(trainer, "_amp_loss_scaler", None)
    if (plain["loss_scale"] is None) != (amp is None):
        raise ValueError(
            "only one of the two has a loss scale; call amp.init_trainer before loading exactly "
            "if it was called before saving"
        )
    if amp is not None:
        copy.copy(amp.loss_scale).load_state_dict(plain["loss_scale"])
    names = _names_by_index(trainer, parameters)
    indices = {name: index for index, name in names.items()}
    strangers = sorted(set(plain["states"]) - indices.keys())
    if strangers:
        raise ValueError(f"it trained parameters that this one does not have: {strangers[:5]}")
    states_by_device = [
        {
            indices[name]: optimizer.create_state_multi_precision(
                indices[name], trainer._params[indices[name]].list_data()[device]
            )
            for name in plain["states"]
        }
        for device in range(len(trainer._contexts))
    ]
    expected = _state_arrays(states_by_device[0], names)
    problems = sorted(
        name
        for name in expected.keys() | arrays.keys()
        if name not in expected
        or name not in arrays
        or (expected[name].shape, np.dtype(expected[name].dtype))
        != (arrays[name].shape, arrays[name].dtype)
    )
    if problems:
        raise ValueError(f"optimizer states differ at {', '.join(problems[:5])}")

    def put_in_place() -> None:
        if not trainer._kv_initialized:
            trainer._init_kvstore()
        if trainer._params_to_init:
            trainer._init_params()
        for updater, states in zip(trainer._updaters, states_by_device):
            for name, array in _state_arrays(states, names).items():
                array[:] = arrays[name]
            updater.states = states
            updater.states_synced = dict.fromkeys(states, True)
        optimizer.num_update = plain["num_update"]
        counts = {
            int(device): {indices[name]: count for name, count in per_name.items()}
            for device, per_name in plain["update_counts"].items()
        }
        # A device that was not there then has made as many updates as the others.
        longest = max(counts.values(), key=len)
        for context in trainer._contexts:
            counts.setdefault(context.device_id, {})
            counts[context.device_id] = counts[context.device_id] or dict(longest)
        optimizer._all_index_update_counts = counts
        optimizer._index_update_count = counts[trainer._contexts[0].device_id]
        if optimizer.lr_scheduler is None:
            optimizer.lr = plain["learning_rate"]
        if plain["m_schedule"] is not None:
            optimizer.m_schedule = plain["m_schedule"]
        if amp is not None:
            amp.loss_scale.load_state_dict(plain["loss_scale"])
            amp.skipped_steps = plain["skipped_steps"]

    return put_in_place
