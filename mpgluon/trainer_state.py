"""What mpgluon keeps beside a Gluon Trainer: a loss scale, master weights, the fate of steps.

``gluon.Trainer`` looks for an object in its ``_amp_loss_scaler`` before each update and asks it
``has_overflow``; if so, it updates nothing. A :class:`TrainerState` is such an object, so any
Trainer skips exactly the bad step, subclasses such as Horovod's included.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import mxnet as mx
from mxnet import gluon
from mxnet.ndarray import NDArray

from mpgluon import gluon_trainer
from mpgluon.dtypes import cast, dtype_name
from mpgluon.errors import LossScaleCollapseError, PrecisionError, TrainerStateError
from mpgluon.gluon_trainer import fresh_gradients
from mpgluon.loss_scale import LossScale
from mpgluon.master_weights import MasterKeeper, compare_masters, keep_masters
from mpgluon.precision.cast import cast_of
from mpgluon.reductions import all_finite, global_norm, sums_of_squares

__all__ = ["TrainerState", "attach", "state_of"]

_logger = logging.getLogger(__name__)


@dataclass
class _Clip:
    """What ``clip_global_norm`` found, for the step that follows."""

    norm: float
    coefficient: float
    rescale: float  # what it took for the Trainer's factor divided by the batch size


@dataclass
class _Step:
    """The factors of the latest step, in case the Trainer refuses it and is asked again."""

    divisor: float = 1.0
    coefficient: float = 1.0
    updates_before: int = -1


class TrainerState:
    """The loss scale of one Trainer and what became of its steps.

    Parameters
    ----------
    trainer : gluon.Trainer
    loss_scale : LossScale
    max_consecutive_skips : int or None
        How many steps in a row may overflow while the scale cannot shrink; ``None``: any number.

    Attributes
    ----------
    loss_scale : LossScale
        The state machine; its ``scale`` multiplies the next loss.
    step_was_skipped : bool
        Whether the latest ``step`` left the weights as they were.
    skipped_steps : int
        How many did, since the beginning.
    gradient_norm : float or None
        Of the latest step's gradients in true units, before clipping; ``None``: not looked at.
    on_skip : list of callable
        Are called when a step is skipped, while its gradients are still there, with their scale.
    """

    def __init__(
        self, trainer: gluon.Trainer, loss_scale: LossScale, max_consecutive_skips: Optional[int]
    ) -> None:
        self._trainer = trainer
        self.loss_scale = loss_scale
        self.max_consecutive_skips = max_consecutive_skips
        self.step_was_skipped = False
        self.skipped_steps = 0
        self.gradient_norm: Optional[float] = None
        self.on_skip: list[Callable[[float], None]] = []
        self._told_of_unscaled_loss = False
        self.skips_at_the_floor = 0  # in a row, with a scale that could not shrink
        self._scale_of_gradients: Optional[float] = None  # None: no loss was scaled yet
        self._unscaled = False  # the gradients were divided already
        self._reduced = False  # the gradients are sums over devices already
        self._clip: Optional[_Clip] = None
        self._latest = _Step()

    # --- before the step ---------------------------------------------------------------------

    def note_scaled_loss(self) -> float:
        """Return S for a loss, and remember that the gradients to come are S times too large."""
        scale = self.loss_scale.scale
        if self._clip is not None or self._unscaled:
            done = "clip_global_norm" if self._clip is not None else "unscale"
            raise TrainerStateError(
                f"a loss was scaled after {done} and before the step; accumulate all gradients "
                f"of a step first, then call {done}, then trainer.step"
            )
        if self._scale_of_gradients not in (None, scale):
            raise TrainerStateError(
                f"the loss scale changed from {self._scale_of_gradients:g} to {scale:g} while "
                "gradients were being accumulated; call trainer.step before changing it"
            )
        self._scale_of_gradients = scale
        self._reduced = False
        return scale

    def reduce_gradients(self, reduce: Callable[[], None]) -> None:
        """Sum gradients over devices, unless ``clip_global_norm`` has for this step."""
        if self._clip is None:
            reduce()
            self._reduced = True

    def clip(self, max_norm: float, batch_size: float) -> float:
        """Return the true norm, and let the step that follows shrink gradients to ``max_norm``."""
        if self._clip is not None:
            raise TrainerStateError(
                "clip_global_norm was called twice before a step; the first call is already "
                "folded into the step that follows: call trainer.step before clipping again"
            )
        parameters = _trained(gluon_trainer.parameters_of(self._trainer))
        if not _any_fresh(parameters):
            raise TrainerStateError(
                "there is no gradient to clip: none was written since the last step; call "
                "clip_global_norm between backward and trainer.step"
            )
        gluon_trainer.begin(self._trainer)
        if gluon_trainer.updates_in_kvstore(self._trainer):
            raise TrainerStateError(
                "this Trainer updates weights inside its kvstore, where gradients cannot be "
                "clipped by their common norm; create it with update_on_kvstore=False"
            )
        if not self._reduced:
            self._trainer.allreduce_grads()
        rescale = gluon_trainer.scale_of(self._trainer) / batch_size
        norm = self._look(parameters, rescale / self._divisor(), at_gradients=True)
        assert norm is not None
        coefficient = max_norm / norm if norm > max_norm else 1.0
        self._clip = _Clip(norm, coefficient, rescale)
        return norm

    def unscale(self) -> None:
        """Divide FP32 gradients by their scale in place."""
        if self._unscaled:
            raise TrainerStateError(
                "the gradients were unscaled already since the last step; call unscale once"
            )
        if self._scale_of_gradients is None:
            raise TrainerStateError(
                "no loss was scaled since the last step, so there is nothing to unscale; call it "
                "between backward and trainer.step"
            )
        parameters = _trained(gluon_trainer.parameters_of(self._trainer))
        gradients = [gradient for _, gradient in fresh_gradients(parameters)]
        narrow = [gradient for gradient in gradients if dtype_name(gradient) == "float16"]
        if narrow:
            raise PrecisionError(
                f"{len(narrow)} of {len(gradients)} gradients are float16, which divided by "
                f"{self._divisor():g} would lose what the loss scale has saved; use "
                "amp.clip_global_norm to clip, amp.unscaled_gradients for FP32 copies, or "
                "amp.autocast, which keeps parameters and gradients in FP32"
            )
        for gradient in gradients:
            gradient *= 1 / self._divisor()
        self._unscaled = True

    def unscaled_gradients(self) -> dict[str, NDArray]:
        """Return FP32 copies of the gradients in true units, by the names of the parameters."""
        gluon_trainer.begin(self._trainer)
        parameters = _trained(gluon_trainer.parameters_of(self._trainer))
        stepped = not _any_fresh(parameters)  # they are those of the latest step
        divisor = self._latest.divisor if stepped else self._divisor()
        reduced = stepped or self._reduced or not gluon_trainer.reduces_gradients(self._trainer)
        copies = {}
        for parameter in parameters:
            gradients = parameter.list_grad()[:1] if reduced else parameter.list_grad()
            wide = [cast(gradient.tostype("default"), "float32") for gradient in gradients]
            copies[parameter.name] = sum(
                (one.as_in_context(wide[0].context) for one in wide[1:]), start=wide[0]
            ) * (1 / divisor)
        return copies

    # --- the step ----------------------------------------------------------------------------

    def has_overflow(self, parameters: Iterable[gluon.Parameter]) -> bool:
        """Tell the Trainer, just before it updates, whether this step is to be skipped.

        Divides the optimizer's ``rescale_grad``, which the Trainer has just set, by the scale
        of the gradients: the division then happens in FP32 inside the update, and a float16
        gradient is never divided itself. Waits for the devices once, or, after
        ``clip_global_norm``, which has waited, not at all.
        """
        optimizer = gluon_trainer.optimizer_of(self._trainer)
        trained = _trained(parameters)
        if self._clip is not None and self._clip.rescale != optimizer.rescale_grad:
            raise TrainerStateError(
                f"clip_global_norm was told another batch size than this step: gradients times "
                f"{self._clip.rescale:g} there, {optimizer.rescale_grad:g} here; call the step "
                "again with that batch size"
            )
        skips = self.loss_scale.skips_overflow
        updates = gluon_trainer.update_counts(self._trainer)
        if self._scale_of_gradients is None and self._latest.updates_before == updates:
            # The Trainer refused the latest step for its stale gradients, and is asked again.
            step = self._latest
        else:
            step = _Step(self._divisor(), self._clip.coefficient if self._clip else 1.0)
            if self._scale_of_gradients is None and self.loss_scale.scale != 1:
                self._warn_of_unscaled_loss()
        if self._clip is None:
            factor = optimizer.rescale_grad / step.divisor
            norm = self._look(trained, factor, at_gradients=skips)
        else:
            norm = self._clip.norm
        finite = not skips or norm is None or math.isfinite(norm)
        step.updates_before = updates if finite else -1
        could_shrink = self.loss_scale.can_shrink
        if self._scale_of_gradients is not None:
            self.loss_scale.update(finite)
        optimizer.rescale_grad *= step.coefficient / step.divisor
        self._scale_of_gradients, self._clip, self._latest = None, None, step
        self._unscaled = self._reduced = False
        self.gradient_norm = norm
        self.step_was_skipped = not finite
        if finite:
            self.skips_at_the_floor = 0
        else:
            self.skipped_steps += 1
            self.skips_at_the_floor = 0 if could_shrink else self.skips_at_the_floor + 1
            try:
                for listener in self.on_skip:
                    listener(step.divisor)
                self._warn_of_collapse(trained)
            finally:
                _discard_gradients(trained)
        return not finite

    def _divisor(self) -> float:
        """Return by what the gradients as they are must be divided to be true."""
        return 1.0 if self._unscaled else self._scale_of_gradients or 1.0

    def _look(
        self, parameters: Sequence[gluon.Parameter], factor: float, *, at_gradients: bool
    ) -> Optional[float]:
        """Return the norm of all gradients times ``factor``; not finite if one of them is not.

        After a reduction it is the same on all devices; without one the largest counts. ``None``
        if there is no gradient to look at. Waits for the devices once. With the same wait,
        masters are compared with their weights, and follow those that somebody else has written.
        """
        per_device: dict[mx.Context, list[NDArray]] = {}
        for _, gradient in fresh_gradients(parameters) if at_gradients else ():
            per_device.setdefault(gradient.context, []).append(gradient)
        compared = compare_masters(self._trainer, parameters)
        results = [sums_of_squares(gradients) for gradients in per_device.values()]
        results += [one.difference.as_in_context(mx.cpu()) for one in compared]
        numbers = mx.nd.concat(*results, dim=0).asnumpy().tolist() if results else []
        norms = []
        for gradients in per_device.values():
            norms.append(_norm(gradients, math.fsum(numbers[: len(gradients)])) * factor)
            del numbers[: len(gradients)]
        for comparison, difference in zip(compared, numbers):
            comparison.follow_if(difference)
        return max(norms, key=_nan_first, default=None)

    def _warn_of_unscaled_loss(self) -> None:
        if not self._told_of_unscaled_loss:
            self._told_of_unscaled_loss = True
            _logger.warning(
                "a step follows on no loss that was scaled for this Trainer, so its gradients are "
                "divided by nothing; scale each loss with amp.scale_loss and the Trainer that steps"
            )

    def _warn_of_collapse(self, parameters: Sequence[gluon.Parameter]) -> None:
        """Say once that nothing is being trained any more, and in the end raise."""
        limit = self.max_consecutive_skips
        ends = limit is not None and self.skips_at_the_floor >= limit
        if self.skips_at_the_floor != 2 and not ends:
            return
        message = (
            f"{self.skips_at_the_floor} steps in a row had gradients that are not finite although "
            f"the loss scale, {self.loss_scale.scale:g}, can shrink no further: nothing is being "
            f"trained. The first by forward order is that of {_first_bad(parameters)}. A forward "
            "pass that overflows does this whatever the scale, and so does a division by zero or a "
            "learning rate that is too large: mpgluon.diagnostics.OverflowLocator names the "
            "place"
        )
        if ends:
            raise LossScaleCollapseError(message)
        _logger.warning(message)


def _trained(parameters: Iterable[gluon.Parameter]) -> list[gluon.Parameter]:
    trained = [parameter for parameter in parameters if parameter.grad_req != "null"]
    if not trained:
        raise TrainerStateError(
            "this Trainer has no parameter with a gradient: all are frozen (grad_req='null'), so "
            "a step changes nothing"
        )
    return trained


def _any_fresh(parameters: Sequence[gluon.Parameter]) -> bool:
    return any(True for _ in fresh_gradients(parameters))


def _norm(gradients: Sequence[NDArray], sum_of_squares: float) -> float:
    """Return the norm; looks at the gradients again only if squares have left float32's range."""
    if 2.0**-70 < sum_of_squares < math.inf:
        return math.sqrt(sum_of_squares)
    if math.isnan(sum_of_squares) or (math.isinf(sum_of_squares) and not all_finite(gradients)):
        return sum_of_squares
    return global_norm(gradients)


def _nan_first(norm: float) -> tuple[bool, float]:
    """Return a key for ``max`` that prefers NaN."""
    return math.isnan(norm), norm


def _first_bad(parameters: Sequence[gluon.Parameter]) -> str:
    """Describe the first gradient that is not finite, by forward order."""
    for parameter in sorted(parameters, key=_place_in_forward_order):
        for gradient in parameter.list_grad():
            if not all_finite([gradient]):
                kind = "NaN" if math.isnan(global_norm([gradient])) else "infinite"
                return f"{parameter.name} ({dtype_name(gradient)}, {kind}, on {gradient.context})"
    raise AssertionError("a step was skipped though all gradients are finite")


def _place_in_forward_order(parameter: gluon.Parameter) -> tuple[int, list[Any]]:
    """Return a key for sorting: as a cast network met it, else by name, dense2 before dense10."""
    owner = cast_of(parameter)
    met = list(owner.forward_order) if owner is not None else []
    natural = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", parameter.name)]
    return (met.index(parameter) if parameter in met else len(met)), natural


def _discard_gradients(parameters: Sequence[gluon.Parameter]) -> None:
    """Forget the gradients of a skipped step, and empty those that accumulate."""
    for weight, _ in fresh_gradients(parameters):
        weight._fresh_grad = False
    for parameter in parameters:
        if parameter.grad_req == "add":
            parameter.zero_grad()


def attach(
    trainer: gluon.Trainer, loss_scale: LossScale, max_consecutive_skips: Optional[int]
) -> TrainerState:
    """Put a new state where ``trainer`` asks for it, and return it.

    Raises
    ------
    TypeError
        If ``trainer`` is no Gluon Trainer.
    TrainerStateError
        If it has a state already, or would race with other processes when it begins, or updates
        weights inside the kvstore, where a step cannot be skipped. Nothing is changed then.
    """
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(
            f"init_trainer takes a gluon.Trainer, received {type(trainer).__name__}; an optimizer "
            "alone has no step that could be skipped"
        )
    existing = gluon_trainer.occupant(trainer)
    if not (existing is None or isinstance(existing, MasterKeeper)):
        raise TrainerStateError(
            f"this Trainer has a loss scale already ({type(existing).__name__}); one Trainer, "
            "one loss scale: call init_trainer once, and contrib.amp's not at all"
        )
    gluon_trainer.refuse_a_late_beginning(trainer)
    if loss_scale.skips_overflow:
        gluon_trainer.keep_updates_out_of_the_kvstore(trainer)
    keep_masters(trainer)
    state = TrainerState(trainer, loss_scale, max_consecutive_skips)
    gluon_trainer.put_before_reduction(
        trainer, lambda reduce: lambda: state.reduce_gradients(reduce)
    )
    gluon_trainer.occupy(trainer, state)
    return state


def state_of(trainer: Any) -> TrainerState:
    """Return the state of a Trainer.

    Raises
    ------
    TrainerStateError
        If ``init_trainer`` was never called on it.
    """
    state = gluon_trainer.occupant(trainer)
    if not isinstance(state, TrainerState):
        raise TrainerStateError(
            "this Trainer has no loss scale yet; call amp.init_trainer(trainer) right after "
            "creating it"
        )
    return state
