"""A Trainer's steps with a loss scale: judge whether a step is good, then settle what follows.

``gluon.Trainer`` looks for an object in its ``_amp_loss_scaler`` before each update and calls its
``has_overflow``; if that is true, it updates nothing. A :class:`TrainerState` is such an object, so
any Trainer skips exactly the bad step, subclasses such as Horovod's included. Losses are scaled in
:mod:`mpgluon.trainer.scaled_loss`; :mod:`mpgluon.trainer.gradients` has the state of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Callable, Optional

from mpgluon.base.blocks import empty_gradient
from mpgluon.cast.status_flags import NO_FLAGS
from mpgluon.errors import TrainerStateError
from mpgluon.formats.loss_scale import LossScale
from mpgluon.graph.output_operators import GraphsSeen
from mpgluon.trainer import shared_scale
from mpgluon.trainer.advice import Advice
from mpgluon.trainer.factors import Factors
from mpgluon.trainer.gradient_flags import GradientFlags, flags_down, flags_up, with_flag
from mpgluon.trainer.gradients import NOTHING, Gradients
from mpgluon.trainer.judgement import Look, are_finite, look_at_step
from mpgluon.trainer.master_keeper import ChecksWeights, MasterKeeper
from mpgluon.trainer.measurement import Measurement
from mpgluon.trainer.networks import flags_of_step
from mpgluon.trainer.statistics import KeptStatistics
from mpgluon.trainer.step_number import Counts, StepNumber
from mpgluon.trainer.tokens import Tokens
from mpgluon.updates import gluon_trainer
from mpgluon.updates.masters import keep_masters, make_masters
from mpgluon.updates.rounded_updates import (
    NEAREST,
    RoundedUpdates,
    UpdateRounding,
    check_rounding,
    grid_weights,
    rounding_of,
)
from mpgluon.updates.updater import calls_of
from mpgluon.updates.weight_findings import check_weights

import mxnet as mx
from mxnet import autograd, gluon

__all__ = ["TrainerState", "attach", "state_of"]


def _of_loss_scale(name: str) -> Any:
    """Return a property of a TrainerState: an attribute of its loss scale."""
    return property(
        lambda state: getattr(state.loss_scale, name),
        lambda state, value: setattr(state.loss_scale, name, value),
    )


class TrainerState(ChecksWeights):
    """The loss scale of one Trainer, its gradients, and the results of its steps.

    Parameters
    ----------
    trainer : gluon.Trainer
    loss_scale : LossScale
    max_consecutive_skips : int or None
        How many steps in a row may overflow while the scale cannot shrink; ``None``: any number.

    Attributes
    ----------
    loss_scale : LossScale
        The state machine; its ``scale`` multiplies the next loss. Trainers may share one.
    gradients : Gradients
    tokens : Tokens
        Factors of the losses for this Trainer.
    statistics : KeptStatistics
        Running statistics from before the latest losses, if a step may be skipped.
    measurement : Measurement
    step_was_skipped : bool
        Whether the latest ``step`` left the weights as they were.
    skipped_steps, skips_at_the_floor : int
        How many did, since the beginning; in a row, with a scale that could not shrink.
    flags : StepFlags
        The layers that raised status flags during the latest step.
    gradient_norm : float or None
        Norm of the latest step's true gradients before clipping; ``None`` if not computed.
    on_step : list of callable
        Callbacks, called before the update with whether the step is good, while its gradients are
        still there, and their scale.
    on_skip : list of callable
        The same, called when a step is skipped, with the scale alone.
    """

    def __init__(
        self, trainer: gluon.Trainer, loss_scale: LossScale, max_consecutive_skips: Optional[int]
    ) -> None:
        self.trainer = trainer
        self.loss_scale = loss_scale
        shared_scale.join(loss_scale, self)
        self.statistics = KeptStatistics(trainer)
        self.measurement = Measurement(trainer)
        self.gradients = Gradients(trainer, GradientFlags(trainer, self.statistics))
        self.tokens = Tokens()
        self.seen_graphs = GraphsSeen()
        self.step_was_skipped = False
        self.skipped_steps = 0
        self.skips_at_the_floor = 0
        self.gradient_norm: Optional[float] = None
        self.flags = NO_FLAGS
        self.on_step: list[Callable[[bool, float], None]] = []
        self.on_skip: list[Callable[[float], None]] = []
        self.latest = Factors()
        self.advice = Advice(max_consecutive_skips)
        self._number = StepNumber()

    # The names of contrib.amp's loss scaler, which scripts read, write and pickle (Sockeye does).
    _loss_scale = _next_loss_scale = _of_loss_scale("scale")
    _scale_seq_len = _of_loss_scale("growth_interval")
    _unskipped = _of_loss_scale("growth_tracker")

    @property
    def scale(self) -> float:
        """The factor S of the next loss."""
        return shared_scale.next_scale(self.loss_scale, self).scale

    def counts(self) -> Counts:
        """Return the counts that tell the Trainer's steps apart."""
        updates = gluon_trainer.optimizer_of(self.trainer).num_update
        return Counts(updates, self.skipped_steps, gluon_trainer.update_counts(self.trainer))

    def step_number(self) -> int:
        """Return the number, from 1, of the step that is next or being made."""
        return self._number.at(self.counts())

    def end_step(self) -> None:
        """Record that a step has ended, good or skipped."""
        self._number.end_step(self.counts())

    def share(self, loss_scale: LossScale) -> None:
        """Use another Trainer's loss scale from now on."""
        if loss_scale is not self.loss_scale:
            shared_scale.leave(self.loss_scale, self)
            self.loss_scale = loss_scale
            shared_scale.join(loss_scale, self)

    def begin_step(self) -> None:
        """Record that the first loss of a step is about to go backward."""
        self.measurement.begin(measures=self.loss_scale.measures)
        if self.loss_scale.skips_overflow:
            self.statistics.keep()

    def discard(self) -> None:
        """Discard the latest step, and one that was begun."""
        self.gradients.discard()
        self.statistics.discard()
        self.measurement.close()
        shared_scale.abandon_round(self.loss_scale)
        self.latest = Factors()

    def has_overflow(self, parameters: Iterable[gluon.Parameter]) -> bool:
        """Return whether the Trainer, which is about to update, has to skip this step.

        Divides the optimizer's ``rescale_grad``, which the Trainer has just set, by the scale
        of the gradients: the division then happens in FP32 inside the update, and a float16
        gradient is never divided itself. Waits for the devices once, or, after
        ``clip_global_norm``, which has waited, not at all; once for each Trainer that was named
        with this one.

        Raises
        ------
        TrainerStateError
            If MXNet is recording, or gradients are not from a loss that was scaled for it.
        PrecisionError
            If the network was cast since ``init_trainer``, and the optimizer cannot update it.
        """
        if autograd.is_recording():
            raise TrainerStateError(
                "trainer.step was called inside autograd.record, where MXNet allows no update; "
                "call it after that block"
            )
        if not self.is_checked:  # the network was cast after init_trainer
            check_weights(self.trainer, (rounding_of(self.trainer) or NEAREST).way)
            self.is_checked = True
        self.gradients.flags.use()
        trained = gluon_trainer.trained(parameters)
        factors = self._factors()
        rescale = gluon_trainer.optimizer_of(self.trainer).rescale_grad
        fits = factors.fit(rescale, can_shrink=self.loss_scale.can_shrink)
        others = _others_to_judge(self)
        for other in others:
            other.gradients.sum_ahead()
        skips = self.loss_scale.skips_overflow
        outcome = look_at_step(self.trainer, trained, self.gradients, factors, look_for_inf=skips)
        good = (
            fits
            and (outcome.is_finite or not skips)
            and self.gradients.now.verdict is not False
            and all(are_finite(other.trainer, other.gradients) for other in others)
        )
        self._settle(trained, factors, outcome, good=good)
        return not good

    def _factors(self) -> Factors:
        """Return this step's factors.

        Raises
        ------
        TrainerStateError
            If it would divide gradients by another factor than their loss scale and batch size.
        """
        now, rescale = self.gradients.now, gluon_trainer.optimizer_of(self.trainer).rescale_grad
        now.refuse_another_factor(rescale)
        # trainer.load_states sets the first number back, and not the second.
        updates = gluon_trainer.update_counts(self.trainer), calls_of(self.trainer)
        if now.scale is None and self.latest.updates_before == updates:
            return self.latest  # that step was refused for stale gradients, and is repeated
        self.gradients.refuse_unscaled(self.scale)
        self.advice.warn_of_what_is_missing(self.gradients, self.scale)
        return Factors(now.divisor, now.clip.coefficient if now.clip else 1.0, updates)

    def _settle(
        self, trained: Sequence[gluon.Parameter], factors: Factors, outcome: Look, *, good: bool
    ) -> None:
        """Apply a verdict to masters, loss scale and optimizer, or skip the step."""
        now, could_shrink = self.gradients.now, self.loss_scale.can_shrink
        flags_up({**self.gradients.written, **now.idle})
        for one in outcome.stale_masters:
            one.follow()
        make_masters(self.trainer)
        _report(self, good)
        could_shrink |= self.scale < (now.scale or 0.0)  # to fit the measured number
        gluon_trainer.optimizer_of(self.trainer).rescale_grad *= (
            factors.coefficient / factors.divisor
        )
        self.gradients.now = NOTHING
        self.gradients.flags.discard_others()
        self.gradient_norm = outcome.norm
        self.step_was_skipped = not good
        # A step that a callback's error ended, and is repeated, needs the same factors.
        self.latest = factors if good else replace(factors, updates_before=None)
        for callback in self.on_step:
            callback(good, factors.divisor)
        if good:
            self.skips_at_the_floor = 0
            return
        self.skips_at_the_floor = 0 if could_shrink else self.skips_at_the_floor + 1
        self.skipped_steps += 1
        self.advice.stuck += not could_shrink
        _repair_statistics()
        try:
            for on_skip in self.on_skip:
                on_skip(factors.divisor)
            trainers = [state.trainer for state in now.together or (self,)]
            self.advice.warn_of_skips(
                self.loss_scale, self.skips_at_the_floor, trainers, self.flags
            )
        finally:
            _discard_gradients(trained)


def _others_to_judge(state: TrainerState) -> list[TrainerState]:
    """Return the others that step with a Trainer, if it is the first of them.

    A Trainer that has started a new step has left the group.
    """
    now = state.gradients.now
    if now.verdict is not None or not state.loss_scale.skips_overflow:
        return []
    group = [other for other in now.together if other.gradients.now.together is now.together]
    return [other for other in group if other is not state]


def _report(state: TrainerState, good: bool) -> None:
    """Tell the loss scale, and the Trainers that step with this one if it is the first."""
    now = state.gradients.now
    if now.verdict is not None:
        return
    together = now.together or (state,)
    flags = flags_of_step(state.trainer, [one.trainer for one in together], good=good)
    here = [one for one in together if one.gradients.now.together is now.together]
    if state.loss_scale.measures:
        largest = state.measurement.largest([one.measurement for one in here])
        flags = replace(flags, largest=largest)
    for one in together:
        one.flags = flags
    for one in here:
        one.measurement.close()
        if now.together:
            one.gradients.change(verdict=good)
    if now.together or now.scale is not None:
        shared_scale.report(state.loss_scale, together, finite=good, largest=flags.largest)


def _repair_statistics() -> None:
    """Undo the effect of an overflow in a forward pass on running statistics. Waits for devices.

    It covers all Trainers of this thread: a generator's loss goes through the discriminator, too.
    """
    mx.nd.waitall()  # the backward pass may still be running where no gradient was wanted
    for flags in GradientFlags.of_this_thread():
        if flags.statistics is not None:
            flags.statistics.repair()


def _discard_gradients(parameters: Sequence[gluon.Parameter]) -> None:
    """Discard the gradients of a skipped step, and empty those that accumulate."""
    for parameter in parameters:
        flags_down(with_flag(parameter.list_data()))
        if parameter.grad_req == "add":
            empty_gradient(parameter)


def attach(
    trainer: gluon.Trainer,
    loss_scale: LossScale,
    max_consecutive_skips: Optional[int],
    rounding: UpdateRounding = NEAREST,
) -> TrainerState:
    """Give a Trainer a new state, and return it.

    Raises
    ------
    ValueError
        If it has no updates to round in another way than to nearest.
    TypeError
        If ``trainer`` is not a Gluon Trainer.
    TrainerStateError
        If it has a state already, or would race with other processes when it begins, or updates
        weights inside the kvstore, where a step cannot be skipped: because its user
        has asked for it, or because they are row-sparse. Nothing is changed then.
    PrecisionError
        If it has float16 weights and an optimizer that needs ``multi_precision=True`` for them.
    """
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(
            f"init_trainer takes a gluon.Trainer, received {type(trainer).__name__}; an optimizer "
            "alone has no step that could be skipped"
        )
    existing = gluon_trainer.loss_scaler_of(trainer)
    if not (existing is None or isinstance(existing, MasterKeeper)):
        raise TrainerStateError(
            f"this Trainer has a loss scale already ({type(existing).__name__}); one Trainer, "
            "one loss scale: call init_trainer once, and contrib.amp's not at all"
        )
    check_rounding(trainer, rounding)
    check_weights(trainer, rounding.way)
    gluon_trainer.refuse_a_late_beginning(trainer)
    skips = loss_scale.skips_overflow
    if skips:
        gluon_trainer.refuse_sparse_weights(
            trainer._params,
            "which MXNet updates inside its kvstore only, where a step with infinite gradients "
            "cannot be skipped",
            ', or train them without a loss scale: amp.init_trainer(trainer, "none")',
        )
    if skips or grid_weights(gluon_trainer.parameters_of(trainer)):
        gluon_trainer.keep_updates_out_of_the_kvstore(trainer)
    keep_masters(trainer)
    for updater in gluon_trainer.updaters_of(trainer):
        if isinstance(updater, RoundedUpdates):
            updater.rounding = rounding
    state = TrainerState(trainer, loss_scale, max_consecutive_skips)
    state.is_checked = True
    gluon_trainer.call_before_steps(trainer, state.step_number)  # a load may have changed it
    state.gradients.attach(state.end_step)
    gluon_trainer.set_loss_scaler(trainer, state)
    return state


def state_of(trainer: Any) -> TrainerState:
    """Return the state of a Trainer.

    Raises
    ------
    TrainerStateError
        If ``init_trainer`` was never called on it.
    TypeError
        If it is not a Trainer.
    """
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(f"this takes a gluon.Trainer, received {type(trainer).__name__}")
    state = gluon_trainer.loss_scaler_of(trainer)
    if not isinstance(state, TrainerState):
        raise TrainerStateError(
            "this Trainer has no loss scale yet; call amp.init_trainer(trainer) right after "
            "creating it"
        )
    return state
