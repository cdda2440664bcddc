"""What mpgluon keeps beside a Gluon Trainer, and the one place where it meets one.

``gluon.Trainer`` looks for an object in its ``_amp_loss_scaler`` before each update and asks it
``has_overflow``; if so, it updates nothing. A :class:`TrainerState` is such an object, so any
Trainer skips exactly the bad step, subclasses such as Horovod's included. No other module
touches the Trainer's private fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Optional

from mxnet import gluon
from mxnet.ndarray import NDArray

from mpgluon.errors import TrainerStateError
from mpgluon.loss_scale import LossScale
from mpgluon.reductions import all_finite

__all__ = ["TrainerState", "attach", "state_of"]


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
        scale, self._scale_of_gradients = self._scale_of_gradients, None
        # Without fresh gradients the Trainer itself is about to complain.
        check = self.loss_scale.skips_overflow and bool(gradients)
        finite = all_finite(gradients) if check else True
        if scale is not None:
            self._trainer._optimizer.rescale_grad /= scale
            self.loss_scale.update(finite)
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
