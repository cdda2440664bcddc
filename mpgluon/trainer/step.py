"""What mpgluon keeps beside a Gluon Trainer: a loss scale, master weights, the fate of steps.

``gluon.Trainer`` looks for an object in its ``_amp_loss_scaler`` before each update and asks it
``has_overflow``; if so, it updates nothing. A :class:`TrainerState` is such an object, so any
Trainer skips exactly the bad step, subclasses such as Horovod's included.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Callable, Optional

import mxnet as mx
from mxnet import gluon
from mxnet.ndarray import NDArray

from mpgluon.cast.network_cast import cast_of
from mpgluon.errors import LossScaleCollapseError, PrecisionError, TrainerStateError
from mpgluon.graph.output_operators import GraphsSeen
from mpgluon.numerics.dtypes import cast, dtype_name
from mpgluon.numerics.loss_scale import LossScale
from mpgluon.numerics.reductions import all_finite, global_norm, sums_of_squares
from mpgluon.trainer import inside, shared_scale
from mpgluon.trainer.accumulation import GradientSums
from mpgluon.trainer.inside import fresh_gradients
from mpgluon.trainer.masters import MasterKeeper, compare_masters, keep_masters
from mpgluon.trainer.scaled_gradients import (
    GradientHolder,
    Tokens,
    Weights,
    flags_down,
    flags_up,
    with_flag,
)

__all__ = ["TrainerState", "attach", "state_of", "step_together"]

_logger = logging.getLogger(__name__)

_SMALLEST_FACTOR, _LARGEST_FACTOR = 2.0**-126, 2.0**128  # normal FP32 numbers


@dataclass(frozen=True)
class _Clip:
    """What ``clip_global_norm`` found, for the step that follows."""

    norm: float
    coefficient: float
    rescale: float  # what it took for the Trainer's factor divided by the batch size


@dataclass(eq=False)
class _Joint:
    """Trainers that step on gradients of the same losses, and whether all of those are finite."""

    states: tuple[TrainerState, ...]
    finite: Optional[bool] = None  # None: nobody has made a step yet


@dataclass(frozen=True, eq=False)
class _Gradients:
    """What a Trainer's gradients are since its latest step; replaced as a whole.

    ``scale`` is ``None`` until a loss is scaled. ``went_backward``: one of the scaled losses did;
    ``late``: one had not when its ``with`` block ended; ``broken``: a block ended with an
    exception after it. ``written`` are the weights whose gradients scaled losses wrote inside
    their blocks: their flags are down until the step, so that one that is up was written by
    something else.
    """

    scale: Optional[float] = None
    tokens: Weights = field(default_factory=dict)
    went_backward: bool = False
    late: bool = False
    broken: bool = False
    written: Weights = field(default_factory=dict)
    reduced: bool = False  # they are sums over devices already
    unscaled: bool = False  # they were divided already
    clip: Optional[_Clip] = None
    joint: Optional[_Joint] = None

    @property
    def exist(self) -> bool:
        """Whether a scaled loss has gone backward, inside its block or later."""
        return self.went_backward or bool(with_flag(self.tokens.values()))


_NO_GRADIENTS = _Gradients()


@dataclass
class _Step:
    """The factors of the latest step, in case the Trainer refuses it and is asked again."""

    divisor: float = 1.0
    coefficient: float = 1.0
    updates_before: int = -1


class TrainerState(GradientHolder):
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
        The state machine; its ``scale`` multiplies the next loss. Trainers may share one.
    step_was_skipped : bool
        Whether the latest ``step`` left the weights as they were.
    skipped_steps : int
        How many did, since the beginning.
    gradient_norm : float or None
        Of the latest step's gradients in true units, before clipping; ``None``: not looked at.
    on_skip : list of callable
        Callbacks, called when a step is skipped, while its gradients are still there, with their
        scale.
    tokens : Tokens
        What losses for this Trainer are multiplied by.
    """

    def __init__(
        self, trainer: gluon.Trainer, loss_scale: LossScale, max_consecutive_skips: Optional[int]
    ) -> None:
        super().__init__(trainer)
        self.loss_scale = loss_scale
        shared_scale.join(loss_scale, self)
        self.max_consecutive_skips = max_consecutive_skips
        self.step_was_skipped = False
        self.skipped_steps = 0
        self.gradient_norm: Optional[float] = None
        self.on_skip: list[Callable[[float], None]] = []
        self.tokens = Tokens()
        self.seen_graphs = GraphsSeen()
        self.skips_at_the_floor = 0  # in a row, with a scale that could not shrink
        self._told_of_unscaled_loss = False
        self._gradients = _NO_GRADIENTS
        self._sums = GradientSums(trainer)
        self._open = 0  # blocks in which a loss is being scaled; several threads may have one each
        self._lock = Lock()
        self._latest = _Step()

    # --- a loss ------------------------------------------------------------------------------

    @property
    def watches_itself(self) -> bool:
        """Whether a loss of its own is being scaled at this moment."""
        return self._open > 0

    @property
    def scale(self) -> float:
        """The factor S of the next loss."""
        return shared_scale.next_scale(self.loss_scale, self).scale

    def share(self, loss_scale: LossScale) -> None:
        """Use another Trainer's loss scale from now on."""
        if loss_scale is not self.loss_scale:
            shared_scale.leave(self.loss_scale, self)
            self.loss_scale = loss_scale
            shared_scale.join(loss_scale, self)

    def refuse_loss(self, scale: float) -> None:
        """Raise if gradients of a loss times ``scale`` would mix with others; changes nothing."""
        reason = self._why_anew(scale)
        if reason is not None and self._accumulated():
            raise TrainerStateError(
                f"{reason}; or, to give up what has accumulated (grad_req='add'), empty it: "
                "net.collect_params().zero_grad()"
            )

    def remember_backward(self) -> None:
        """Note whether scaled losses have gone backward, before their tokens are used again."""
        with self._lock:
            self._gradients = replace(self._gradients, went_backward=self._gradients.exist)

    def begin_loss(self, scale: float, tokens: Weights) -> None:
        """Note that the gradients to come are S times too large; :meth:`refuse_loss` comes first.

        Gradients that do not go with them are forgotten: Gluon takes them for used ones.
        """
        with self._lock:
            now = self._gradients
            if now.scale is None or self._why_anew(scale) is not None:
                now = _NO_GRADIENTS
                self.forget_others()
                if scale != 1:
                    flags_down(self._replaceable())
            if not self._open:
                self._sums.set_aside()
            self._open += 1
            self._gradients = replace(
                now, scale=scale, tokens={**now.tokens, **tokens}, reduced=False
            )

    def end_loss(self, all_ran: bool, *, broken: bool) -> None:
        """Note which gradients a scaled loss has written, at the end of its block."""
        with self._lock:
            self._open -= 1
            if not self._open:
                self._sums.add()
            now = self._gradients
            if now.scale not in (None, 1) and all_ran:
                written = self.fresh_weights()
                flags_down(written)
                now = replace(now, written={**now.written, **written})
                self.foreign = {key: w for key, w in self.foreign.items() if key not in written}
            self._gradients = replace(
                now,
                went_backward=now.exist,
                late=now.late or not all_ran,
                broken=now.broken or broken,
            )

    def lose(self, written: Weights) -> None:
        """Note that another Trainer's scaled loss wrote the gradients of some weights."""
        super().lose(written)
        kept = {key: w for key, w in self._gradients.written.items() if key not in written}
        self._gradients = replace(self._gradients, written=kept)

    def forget(self) -> None:
        """Forget a step that was begun: its gradients, what they were divided by, their clipping.

        Gradients that accumulate are emptied.
        """
        begun, self._gradients = self._gradients, _NO_GRADIENTS
        self.forget_others()
        self._latest = _Step()
        shared_scale.abandon_round(self.loss_scale)
        if begun is not _NO_GRADIENTS:
            flags_down(self.fresh_weights())
            for gradient in inside.accumulated_gradients(self._trainer):
                gradient[:] = 0

    def _why_anew(self, scale: float) -> Optional[str]:
        """Say why gradients of a loss to come cannot go with those that are there already."""
        now = self._gradients
        if now.clip is not None or now.unscaled:
            done = "clip_global_norm" if now.clip is not None else "unscale"
            return (
                f"a loss was scaled after {done} and before the step; accumulate all gradients "
                f"of a step first, then call {done}, then trainer.step"
            )
        if now.joint is not None and now.joint.finite is not None:
            return (
                "a loss was scaled while one of the Trainers of the loss before it had made its "
                "step and this one had not; call step on each of them first"
            )
        if now.scale not in (None, scale):
            return (
                f"the loss scale changed from {now.scale:g} to {scale:g} while "
                "gradients were being accumulated; call trainer.step before changing it"
            )
        if now.broken:
            return (
                "the block of amp.scale_loss before this one ended with an exception after its "
                "backward pass; call trainer.step first if its gradients are to count"
            )
        if self._written_outside():
            return (
                "gradients were written by a loss that was not scaled, after one that was; scale "
                "each loss with amp.scale_loss"
            )
        return None

    def _written_outside(self) -> Weights:
        """Return weights with gradients that no scaled loss wrote, as far as that can be known."""
        now = self._gradients
        if now.scale in (None, 1) or self._open:
            return {}
        if now.exist and (now.late or not now.written):
            return {}  # by that loss after its block; or copied, as fp16_utils does
        return self.fresh_weights()

    def _accumulated(self) -> bool:
        """Whether a gradient that accumulates is not empty; waits for the devices."""
        gradients = list(inside.accumulated_gradients(self._trainer))
        return bool(gradients) and global_norm(gradients) != 0

    def _replaceable(self) -> Weights:
        """Return the weights whose gradients the next backward pass overwrites."""
        return with_flag(inside.trained_weights(self._trainer, ("write",)))

    # --- before the step ---------------------------------------------------------------------

    def reduce_gradients(self, reduce: Callable[[], None]) -> None:
        """Sum gradients over devices, unless that was done ahead of this step."""
        now = self._gradients
        ahead = now.clip is not None or (now.joint is not None and now.joint.finite is not None)
        if not (ahead and now.reduced):
            reduce()
            self._gradients = replace(now, reduced=True)

    def clip(self, max_norm: float, batch_size: float) -> float:
        """Return the true norm, and let the step that follows shrink gradients to ``max_norm``."""
        if self._gradients.clip is not None:
            raise TrainerStateError(
                "clip_global_norm was called twice before a step; the first call is already "
                "folded into the step that follows: call trainer.step before clipping again"
            )
        parameters = _trained(inside.parameters_of(self._trainer))
        if not any(True for _ in self._fresh_gradients(parameters)):
            raise TrainerStateError(
                "there is no gradient to clip: none was written since the last step; call "
                "clip_global_norm between backward and trainer.step"
            )
        inside.begin(self._trainer)
        if inside.updates_in_kvstore(self._trainer):
            raise TrainerStateError(
                "this Trainer updates weights inside its kvstore, where gradients cannot be "
                "clipped by their common norm; create it with update_on_kvstore=False"
            )
        if not self._gradients.reduced:
            self._trainer.allreduce_grads()
        rescale = inside.scale_of(self._trainer) / batch_size
        norm = self._look(parameters, rescale / self._divisor(), at_gradients=True)
        assert norm is not None
        coefficient = max_norm / norm if norm > max_norm else 1.0
        clip = _Clip(norm, coefficient, rescale)
        self._gradients = replace(self._gradients, clip=clip)
        return norm

    def unscale(self) -> None:
        """Divide FP32 gradients by their scale in place."""
        if self._gradients.unscaled:
            raise TrainerStateError(
                "the gradients were unscaled already since the last step; call unscale once"
            )
        if self._gradients.scale is None:
            raise TrainerStateError(
                "no loss was scaled since the last step, so there is nothing to unscale; call it "
                "between backward and trainer.step"
            )
        parameters = _trained(inside.parameters_of(self._trainer))
        gradients = [gradient for _, gradient in self._fresh_gradients(parameters)]
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
        self._gradients = replace(self._gradients, unscaled=True)

    def unscaled_gradients(self) -> dict[str, NDArray]:
        """Return FP32 copies of the gradients in true units, by the names of the parameters."""
        inside.begin(self._trainer)
        parameters = _trained(inside.parameters_of(self._trainer))
        # Without a new one they are those of the latest step.
        stepped = not any(True for _ in self._fresh_gradients(parameters))
        divisor = self._latest.divisor if stepped else self._divisor()
        reduced = self._gradients.reduced or not inside.reduces_gradients(self._trainer)
        copies = {}
        for parameter in parameters:
            alone = stepped or reduced
            gradients = parameter.list_grad()[:1] if alone else parameter.list_grad()
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
        ``clip_global_norm``, which has waited, not at all; once for each Trainer that was named
        with this one.
        """
        now = self._gradients
        optimizer = inside.optimizer_of(self._trainer)
        trained = _trained(parameters)
        if now.clip is not None and now.clip.rescale != optimizer.rescale_grad:
            raise TrainerStateError(
                f"clip_global_norm was told another batch size than this step: gradients times "
                f"{now.clip.rescale:g} there, {optimizer.rescale_grad:g} here; call the step "
                "again with that batch size"
            )
        updates = inside.update_counts(self._trainer)
        if now.scale is None and self._latest.updates_before == updates:
            # The Trainer refused the latest step for its stale gradients, and is asked again.
            step = self._latest
        else:
            self._refuse_what_was_not_scaled()
            step = _Step(self._divisor(), now.clip.coefficient if now.clip else 1.0)
        factor = optimizer.rescale_grad / step.divisor
        fits = step.divisor == 1 or self._fits(factor * (step.coefficient or 1.0), step.divisor)
        flags_up(now.written)
        finite = self._judge(trained, factor, fits=fits)
        step.updates_before = updates if finite else -1
        optimizer.rescale_grad *= step.coefficient / step.divisor
        self._gradients, self._latest = _NO_GRADIENTS, step
        self.forget_others()
        self.step_was_skipped = not finite
        if not finite:
            self.skipped_steps += 1
            together = now.joint.states if now.joint is not None else (self,)
            try:
                for listener in self.on_skip:
                    listener(step.divisor)
                self._warn_of_collapse(together)
            finally:
                _discard_gradients(trained)
        return not finite

    def _fits(self, factor: float, divisor: float) -> bool:
        """Whether MXNet can be told ``factor``: it writes it as text, and reads no subnormal.

        If not, the step is skipped, as one that overflows, and the loss scale shrinks.

        Raises
        ------
        TrainerStateError
            If it cannot shrink.
        """
        if _SMALLEST_FACTOR <= abs(factor) < _LARGEST_FACTOR:
            return True
        if abs(factor) < 1 and self.loss_scale.can_shrink:
            return False
        raise TrainerStateError(
            f"the loss scale {divisor:g} is out of reach: the step would multiply gradients by "
            f"{factor:g}, which is no normal FP32 number; choose one between 2**-100 and 2**100"
        )

    def _judge(self, trained: Sequence[gluon.Parameter], factor: float, *, fits: bool) -> bool:
        """Return whether the step is good, and let the loss scale advance if it is the first.

        A step is good if the gradients of all Trainers are finite that were named together.
        """
        now = self._gradients
        at_gradients = self.loss_scale.skips_overflow
        norm = now.clip.norm if now.clip is not None else None
        if now.clip is None:
            norm = self._look(trained, factor, at_gradients=at_gradients)
        self.gradient_norm = norm
        finite = fits and (not at_gradients or norm is None or math.isfinite(norm))
        could_shrink = self.loss_scale.can_shrink
        if now.joint is None:
            if now.scale is not None:
                shared_scale.report(self.loss_scale, [self], finite=finite)
        else:
            if now.joint.finite is None:
                others = [state for state in now.joint.states if state is not self]
                if at_gradients:
                    found = [state.gradients_are_finite(now.joint) for state in others]
                    finite = finite and all(found)
                now.joint.finite = finite
                shared_scale.report(self.loss_scale, now.joint.states, finite=finite)
            finite = finite and now.joint.finite
        if finite:
            self.skips_at_the_floor = 0
        else:
            self.skips_at_the_floor = 0 if could_shrink else self.skips_at_the_floor + 1
        return finite

    def gradients_are_finite(self, joint: _Joint) -> bool:
        """Whether this Trainer's gradients allow the step of another that was named with it."""
        now = self._gradients
        if now.joint is not joint:
            return True  # it has begun anew, and none of them will be used
        inside.begin(self._trainer)
        if not now.reduced:
            self._trainer.allreduce_grads()
        if now.clip is not None:
            return math.isfinite(now.clip.norm)
        fresh = self._fresh_gradients(inside.parameters_of(self._trainer))
        gradients = [gradient for _, gradient in fresh]
        return not gradients or all_finite(gradients)

    def _refuse_what_was_not_scaled(self) -> None:
        """Raise if the step would divide gradients by what their loss was not multiplied by."""
        now = self._gradients
        self.refuse_gradients_of_others(suspicious=now.scale is None and self.scale != 1)
        outside = self._written_outside()
        if outside and now.exist:
            raise TrainerStateError(
                f"{len(outside)} gradients ({inside.name_of_weight(self._trainer, outside)} "
                "first) were written by a loss that was not scaled, after one that was, and the "
                f"step would divide them by {now.scale:g}; scale each loss with amp.scale_loss. A "
                "scaled loss whose step was given up is forgotten when the next loss is scaled"
            )
        if outside:
            raise TrainerStateError(
                "the loss that was scaled has not gone backward, but another one has, whose "
                f"gradients the step would divide by {now.scale:g}; call backward on what "
                "amp.scale_loss yields: with amp.scale_loss(loss, trainer) as scaled: "
                "autograd.backward(scaled)"
            )
        if now.scale is None and self.scale != 1:
            self._warn_of_unscaled_loss()

    def _divisor(self) -> float:
        """Return by what the gradients as they are must be divided to be true."""
        return 1.0 if self._gradients.unscaled else self._gradients.scale or 1.0

    def _fresh_gradients(
        self, parameters: Iterable[gluon.Parameter]
    ) -> Iterator[tuple[NDArray, NDArray]]:
        """Yield weights and the gradients that were written since the latest step."""
        written = self._gradients.written
        for parameter in parameters:
            if parameter.grad_req != "null":
                for weight, gradient in zip(parameter.list_data(), parameter.list_grad()):
                    if id(weight) in written or weight._fresh_grad:
                        yield weight, gradient

    def _look(
        self, parameters: Sequence[gluon.Parameter], factor: float, *, at_gradients: bool
    ) -> Optional[float]:
        """Return the norm of all gradients times ``factor``; not finite if one of them is not.

        After a reduction it is the same on all devices; without one the largest counts. ``None``
        if there is no gradient to look at. Waits for the devices once. With the same wait,
        masters are compared with their weights, and follow those that somebody else has written.
        """
        per_device: dict[mx.Context, list[NDArray]] = {}
        for _, gradient in self._fresh_gradients(parameters) if at_gradients else ():
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
                "divided by nothing; scale each loss with amp.scale_loss and the Trainer that "
                "steps (an Estimator of gluon.contrib does if it is given "
                "batch_processor=mpgluon.estimator.BatchProcessor())"
            )

    def _warn_of_collapse(self, together: Iterable[TrainerState]) -> None:
        """Say once that nothing is being trained any more, and in the end raise."""
        limit = self.max_consecutive_skips
        ends = limit is not None and self.skips_at_the_floor >= limit
        if self.skips_at_the_floor != 2 and not ends:
            return
        parameters = [p for state in together for p in inside.parameters_of(state._trainer)]
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


def step_together(states: tuple[TrainerState, ...]) -> None:
    """Let Trainers that a loss was scaled for, and those of earlier losses, step as one."""
    before = [state._gradients.joint for state in states]
    all_states = dict.fromkeys(
        state for joint in before if joint is not None for state in joint.states
    )
    joint = _Joint(tuple(all_states | dict.fromkeys(states)))
    for state in joint.states:
        if state in states or state._gradients.joint in before:
            state._gradients = replace(state._gradients, joint=joint)


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


def _first_bad(parameters: Iterable[gluon.Parameter]) -> str:
    """Describe the first gradient that is not finite, by forward order."""
    trained = [parameter for parameter in parameters if parameter.grad_req != "null"]
    for parameter in sorted(trained, key=_place_in_forward_order):
        for gradient in parameter.list_grad():
            if not all_finite([gradient]):
                kind = "NaN" if math.isnan(global_norm([gradient])) else "infinite"
                return f"{parameter.name} ({dtype_name(gradient)}, {kind}, on {gradient.context})"
    return "another Trainer, whose step came first and has emptied it"


def _place_in_forward_order(parameter: gluon.Parameter) -> tuple[int, list[Any]]:
    """Return a key for sorting: as a cast network met it, else by name, dense2 before dense10."""
    found = cast_of(parameter)
    met = list(found.forward_order) if found is not None else []
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
        weights inside the kvstore, where a step cannot be skipped: because it was told so, or
        because they are row-sparse. Nothing is changed then.
    """
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(
            f"init_trainer takes a gluon.Trainer, received {type(trainer).__name__}; an optimizer "
            "alone has no step that could be skipped"
        )
    existing = inside.occupant(trainer)
    if not (existing is None or isinstance(existing, MasterKeeper)):
        raise TrainerStateError(
            f"this Trainer has a loss scale already ({type(existing).__name__}); one Trainer, "
            "one loss scale: call init_trainer once, and contrib.amp's not at all"
        )
    inside.refuse_a_late_beginning(trainer)
    if loss_scale.skips_overflow:
        inside.refuse_sparse_weights(trainer)
        inside.keep_updates_out_of_the_kvstore(trainer)
    keep_masters(trainer)
    state = TrainerState(trainer, loss_scale, max_consecutive_skips)
    inside.put_before_reduction(trainer, lambda reduce: lambda: state.reduce_gradients(reduce))
    inside.occupy(trainer, state)
    return state


def state_of(trainer: Any) -> TrainerState:
    """Return the state of a Trainer.

    Raises
    ------
    TrainerStateError
        If ``init_trainer`` was never called on it.
    """
    state = inside.occupant(trainer)
    if not isinstance(state, TrainerState):
        raise TrainerStateError(
            "this Trainer has no loss scale yet; call amp.init_trainer(trainer) right after "
            "creating it"
        )
    return state
