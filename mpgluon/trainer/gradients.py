"""The gradients of a Trainer between its scaled losses and its step.

Their state is one immutable value, replaced as a whole: by a loss, by clipping, and by the step,
which empties it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, Callable, Optional

from mpgluon.cast.fp32 import fp32_value
from mpgluon.errors import TrainerStateError
from mpgluon.kernels.dtypes import cast, dtype_name
from mpgluon.kernels.reductions import global_norm
from mpgluon.trainer.device_sums import reduce_in_fp32
from mpgluon.trainer.gradient_flags import (
    GradientFlags,
    Weights,
    empty_stale,
    flags_down,
    stale_weights,
    with_flag,
    without,
)
from mpgluon.updates import gluon_trainer

from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

__all__ = ["NOTHING", "Clip", "GradientState", "Gradients"]


@dataclass(frozen=True)
class Clip:
    """The result of ``clip_global_norm``, for the step that follows."""

    norm: float  # in true units, before clipping
    coefficient: float
    rescale: float  # the Trainer's factor divided by the batch size that the caller announced


@dataclass(frozen=True, eq=False)
class GradientState:
    """The state of a Trainer's gradients since its latest step.

    Attributes
    ----------
    scale : float or None
        The factor S of the scaled losses; ``None`` until there is one.
    tokens : Weights
        The tokens of those losses, whose flags tell whether they have gone backward.
    went_backward : bool
        Whether one of them did, before its token was used again.
    late : bool
        Whether one had not when its ``with`` block ended.
    broken : bool
        Whether a block ended with an exception after its backward pass.
    written : Weights
        Weights whose gradients scaled losses wrote inside their blocks. Their flags are down until
        the step: a flag that is up there means that something else wrote the gradient.
    reduced, unscaled : bool
        Whether the gradients are sums over devices already, and whether they were divided by S.
    idle : Weights
        Weights whose gradient is such a sum although their own device has added nothing to it.
    clip : Clip or None
    together : tuple of TrainerState
        The Trainers that step on gradients of the same losses; empty for one alone.
    verdict : bool or None
        Whether the steps of all those are good; ``None`` until the first of them was judged.
    """

    scale: Optional[float] = None
    tokens: Weights = field(default_factory=dict)
    went_backward: bool = False
    late: bool = False
    broken: bool = False
    written: Weights = field(default_factory=dict)
    reduced: bool = False
    unscaled: bool = False
    idle: Weights = field(default_factory=dict)
    clip: Optional[Clip] = None
    together: tuple[Any, ...] = ()
    verdict: Optional[bool] = None

    @property
    def exist(self) -> bool:
        """Whether a scaled loss has gone backward, inside its block or later."""
        return self.went_backward or bool(with_flag(self.tokens.values()))

    @property
    def divisor(self) -> float:
        """The number by which the gradients must be divided to have their true values."""
        return 1.0 if self.unscaled else self.scale or 1.0

    @property
    def reduced_ahead(self) -> bool:
        """Whether this step's gradients were summed over devices before the step itself."""
        return self.reduced and (self.clip is not None or self.verdict is not None)

    def refuse_another_factor(self, rescale: float) -> None:
        """Raise TrainerStateError if ``clip_global_norm`` received another batch size."""
        if self.clip is not None and self.clip.rescale != rescale:
            raise TrainerStateError(
                f"clip_global_norm received another batch size than this step: gradients times "
                f"{self.clip.rescale:g} there, {rescale:g} here; call the step "
                "again with that batch size"
            )

    def conflict_with(self, scale: float) -> Optional[str]:
        """Return why a loss times ``scale`` cannot add to these gradients, ``None`` if it can."""
        if self.clip is not None or self.unscaled:
            done = "clip_global_norm" if self.clip is not None else "unscale"
            return (
                f"a loss was scaled after {done} and before the step; accumulate all gradients "
                f"of a step first, then call {done}, then trainer.step"
            )
        if self.verdict is not None:
            return (
                "a loss was scaled while one of the Trainers of the loss before it had made its "
                "step and this one had not; call step on each of them first"
            )
        if self.scale not in (None, scale):
            return (
                f"the loss scale changed from {self.scale:g} to {scale:g} while "
                "gradients were being accumulated; call trainer.step before it changes, and give a "
                "Trainer that accumulates while another one steps a loss scale of its own"
            )
        if self.broken:
            return (
                "the block of amp.scale_loss before this one ended with an exception after its "
                "backward pass; call trainer.step first if its gradients are to count"
            )
        return None


NOTHING = GradientState()


class _GradientSums:
    """FP32 sums of a Trainer's float16 gradients that accumulate (``grad_req="add"``).

    MXNet adds a gradient to a float16 one in float16, where it may vanish. Here each backward pass
    writes into an empty array that is then added in FP32; the float16 gradient is the rounded sum.

    Parameters
    ----------
    trainer : gluon.Trainer
    """

    def __init__(self, trainer: gluon.Trainer) -> None:
        self._trainer = trainer
        self._sums: dict[int, tuple[NDArray, NDArray]] = {}  # by the gradient's ``id``
        self._are_aside = False

    def set_aside(self) -> None:
        """Empty the gradients, before a backward pass. Does not wait.

        An element that was written since the latest sum, a zero too, replaces the sum's. Every sum
        is a multiple of 2**-24, so that none but 0 rounds to 0.
        """
        sums = {}
        with autograd.pause():
            for gradient in gluon_trainer.accumulated_gradients(self._trainer):
                if gradient.stype != "default" or dtype_name(gradient) != "float16":
                    continue
                _, total = self._sums.get(id(gradient), (None, None))
                value = fp32_value(gradient, total)
                sums[id(gradient)] = (gradient, value)
                gradient[:] = 0
        self._sums, self._are_aside = sums, True

    def add(self) -> None:
        """Add the gradients to their sums, after a backward pass. Does not wait.

        Whatever reads gradients calls it first: the block of their loss may not have ended.
        """
        if not self._are_aside:
            return
        self._are_aside = False
        with autograd.pause():
            for gradient, value in self._sums.values():
                value += cast(gradient, "float32")
                cast(value, "float16").copyto(gradient.as_nd_ndarray())


class Gradients:
    """The gradients of one Trainer.

    Parameters
    ----------
    trainer : gluon.Trainer
    flags : GradientFlags

    Attributes
    ----------
    flags : GradientFlags
    now : GradientState
    """

    def __init__(self, trainer: gluon.Trainer, flags: GradientFlags) -> None:
        self.flags = flags
        self.now = NOTHING
        self._trainer = trainer
        self._sums = _GradientSums(trainer)
        self._lock = Lock()

    def attach(self, end_step: Callable[[], None]) -> None:
        """Take part in the Trainer's sums over devices, and in its updates, which end steps."""
        sum_unless_done, trainer = self.sum_unless_done, self._trainer
        gluon_trainer.put_before_reduction(trainer, lambda reduce: partial(sum_unless_done, reduce))
        around = partial(self.update, end_step)
        gluon_trainer.put_around_updates(trainer, lambda update: partial(around, update))

    def change(self, **fields: Any) -> None:
        """Replace some fields of the state."""
        self.now = replace(self.now, **fields)

    @property
    def written(self) -> Weights:
        """The weights whose gradient is from this Trainer's scaled losses."""
        foreign = self.flags.foreign
        return without(self.now.written, foreign) if foreign else self.now.written

    def fresh(self, parameters: Iterable[gluon.Parameter]) -> list[NDArray]:
        """Return the gradients, on all devices, that were written since the latest step."""
        self.flags.use()
        self.complete()
        written = {**self.written, **self.now.idle}
        return [
            gradient.as_nd_ndarray()
            for parameter in parameters
            for weight, gradient in zip(parameter.list_data(), parameter.list_grad())
            if id(weight) in written or weight._fresh_grad
        ]

    def complete(self) -> None:
        """Replace accumulating gradients by their sums, also inside the block of a scaled loss."""
        with self._lock:
            self._sums.add()

    def written_outside(self) -> Weights:
        """Return weights with gradients that no scaled loss wrote, as far as that can be known."""
        now = self.now
        if now.scale in (None, 1) or self.flags.open_blocks:
            return {}
        if now.exist and (now.late or not self.written):
            return {}  # by that loss after its block; or copied, as fp16_utils does
        return self.flags.fresh_weights()

    def refuse_unscaled(self, next_scale: float) -> None:
        """Raise TrainerStateError if a step would divide unscaled gradients by S.

        Parameters
        ----------
        next_scale : float
            The factor of the Trainer's next loss.
        """
        now = self.now
        self.flags.refuse_gradients_of_others(suspicious=now.scale is None and next_scale != 1)
        outside = self.written_outside()
        if outside and now.exist:
            raise TrainerStateError(
                f"{len(outside)} gradients{gluon_trainer.first_of(self._trainer, outside)} were "
                "written by a loss that was not scaled, after one that was, and the step would "
                f"divide them by {now.scale:g}; scale each loss with amp.scale_loss. A scaled loss "
                "whose step was given up is discarded when the next loss is scaled"
            )
        if outside:
            raise TrainerStateError(
                "the scaled loss had no backward pass, but another loss had one, whose gradients "
                f"the step would divide by {now.scale:g}; call backward on what amp.scale_loss "
                "yields: with amp.scale_loss(loss, trainer) as scaled: autograd.backward(scaled)"
            )

    def refuse_loss(self, scale: float) -> None:
        """Raise if gradients of a loss times ``scale`` would mix with others; changes nothing."""
        reason = self._why_anew(scale)
        gradients = list(gluon_trainer.accumulated_gradients(self._trainer)) if reason else []
        if reason is None and self.now.scale is None and scale != 1:
            reason = (
                "gradients were written by a loss that was not scaled, before one that is; scale "
                "each loss with amp.scale_loss"
            )
            accumulating = gluon_trainer.trained_weights(self._trainer, ("add",))
            gradients = [weight.grad for weight in with_flag(accumulating).values()]
        if gradients and global_norm(gradients) != 0:
            raise TrainerStateError(
                f"{reason}; or, to give up what has accumulated (grad_req='add'), empty it: "
                "net.collect_params().zero_grad()"
            )

    def remember_backward(self) -> None:
        """Record whether scaled losses have gone backward, before their tokens are used again."""
        with self._lock:
            self.change(went_backward=self.now.exist)

    def begin_loss(self, scale: float, tokens: Weights, first: Callable[[], None]) -> None:
        """Record that the next gradients are S times too large; :meth:`refuse_loss` comes first.

        Gradients that cannot be added to are discarded: Gluon treats them as used ones. ``first``
        is called if this is the first loss of a step.
        """
        with self._lock:
            now = self.now
            if now.scale is None or self._why_anew(scale) is not None:
                now = NOTHING
                self.flags.discard_others()
                if scale != 1:  # the next backward pass overwrites them
                    flags_down(with_flag(gluon_trainer.trained_weights(self._trainer, ("write",))))
                first()
            if not self.flags.open_blocks:
                self._sums.set_aside()
            self.flags.open_blocks += 1
            self.now = replace(
                now, scale=scale, tokens={**now.tokens, **tokens}, reduced=False, idle={}
            )

    def end_loss(self, all_ran: bool, *, broken: bool) -> None:
        """Record which gradients a scaled loss has written, at the end of its block."""
        with self._lock:
            self.flags.open_blocks -= 1
            if not self.flags.open_blocks:
                self._sums.add()
            now = self.now
            if now.scale not in (None, 1) and all_ran:
                fresh = self.flags.fresh_weights()
                flags_down(fresh)
                now = replace(now, written={**now.written, **fresh})
                self.flags.foreign = without(self.flags.foreign, fresh)
            self.now = replace(
                now,
                went_backward=now.exist,
                late=now.late or not all_ran,
                broken=now.broken or broken,
            )

    def discard(self) -> None:
        """Discard a step that was begun: its gradients, their scale, their clipping.

        Gradients that accumulate are emptied.
        """
        begun, self.now = self.now, NOTHING
        self.flags.discard_others()
        if begun is not NOTHING:
            flags_down(self.flags.fresh_weights())
            for gradient in gluon_trainer.accumulated_gradients(self._trainer):
                gradient[:] = 0

    def _why_anew(self, scale: float) -> Optional[str]:
        """Return why a loss times ``scale`` cannot add to the gradients that there are."""
        reason = self.now.conflict_with(scale)
        if reason is None and self.written_outside():
            reason = (
                "gradients were written by a loss that was not scaled, after one that was; scale "
                "each loss with amp.scale_loss"
            )
        return reason

    def sum_unless_done(self, reduce: Callable[[], None]) -> None:
        """Sum gradients over devices, unless that was done ahead of this step."""
        self.complete()
        if not self.now.reduced_ahead:
            idle = self.empty_stale() if gluon_trainer.reduces_gradients(self._trainer) else {}
            self.change(idle=idle)
            reduce_in_fp32(self._trainer, reduce)
            self.change(reduced=True)

    def stale(self) -> dict[int, Weights]:
        """Return, by a parameter's index, the weights whose gradient no loss has written."""
        stale = partial(self.flags.stale, written=self.now.written)
        return stale_weights(self._trainer, stale)

    def empty_stale(self) -> Weights:
        """Empty gradients that were not written since the latest step: they would be added again.

        Returns the weights among theirs that have a new gradient on another device.
        """
        stale = self.stale()
        empty_stale(self._trainer, stale)
        devices = len(gluon_trainer.devices_of(self._trainer))
        partly = [weights for weights in stale.values() if len(weights) < devices]
        return {key: weight for weights in partly for key, weight in weights.items()}

    def update(
        self,
        end_step: Callable[[], None],
        update: Callable[[bool], None],
        ignore_stale_grad: bool = False,
    ) -> None:
        """Update weights; Gluon refuses weights of idle devices unless it shall ignore them."""
        if not ignore_stale_grad:
            self.change(idle={})
        update(ignore_stale_grad)
        end_step()

    def sum_ahead(self) -> None:
        """Sum gradients over devices ahead of the step, unless that was done."""
        gluon_trainer.begin(self._trainer)
        if not self.now.reduced:
            self._trainer.allreduce_grads()
