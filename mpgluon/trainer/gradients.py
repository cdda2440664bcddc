"""The gradients of a Trainer between its scaled losses and its step.

Their state is one immutable value, replaced as a whole: by a loss, by clipping, and by the step,
which empties it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Callable, Optional

from mpgluon.errors import TrainerStateError
from mpgluon.kernels.reductions import global_norm
from mpgluon.trainer import inside
from mpgluon.trainer.accumulation import GradientSums
from mpgluon.trainer.gradient_flags import GradientFlags, Weights, flags_down, with_flag, without

from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["NOTHING", "Clip", "GradientState", "Gradients"]


@dataclass(frozen=True)
class Clip:
    """What ``clip_global_norm`` found, for the step that follows."""

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
                "gradients were being accumulated; call trainer.step before changing it"
            )
        if self.broken:
            return (
                "the block of amp.scale_loss before this one ended with an exception after its "
                "backward pass; call trainer.step first if its gradients are to count"
            )
        return None


NOTHING = GradientState()


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
        self._sums = GradientSums(trainer)
        self._lock = Lock()

    def change(self, **fields: Any) -> None:
        """Replace some fields of the state."""
        self.now = replace(self.now, **fields)

    @property
    def written(self) -> Weights:
        """The weights whose gradient is that of this Trainer's scaled losses."""
        return without(self.now.written, self.flags.foreign)

    def fresh(self, parameters: Iterable[gluon.Parameter]) -> list[NDArray]:
        """Return the gradients, on all devices, that were written since the latest step."""
        self.flags.use()
        written = self.written
        return [
            gradient
            for parameter in parameters
            for weight, gradient in zip(parameter.list_data(), parameter.list_grad())
            if id(weight) in written or weight._fresh_grad
        ]

    def written_outside(self) -> Weights:
        """Return weights with gradients that no scaled loss wrote, as far as that can be known."""
        now = self.now
        if now.scale in (None, 1) or self.flags.open_blocks:
            return {}
        if now.exist and (now.late or not self.written):
            return {}  # by that loss after its block; or copied, as fp16_utils does
        return self.flags.fresh_weights()

    def refuse_loss(self, scale: float) -> None:
        """Raise if gradients of a loss times ``scale`` would mix with others; changes nothing."""
        reason = self._why_anew(scale)
        gradients = list(inside.accumulated_gradients(self._trainer)) if reason else []
        if gradients and global_norm(gradients) != 0:
            raise TrainerStateError(
                f"{reason}; or, to give up what has accumulated (grad_req='add'), empty it: "
                "net.collect_params().zero_grad()"
            )

    def remember_backward(self) -> None:
        """Note whether scaled losses have gone backward, before their tokens are used again."""
        with self._lock:
            self.change(went_backward=self.now.exist)

    def begin_loss(self, scale: float, tokens: Weights, first: Callable[[], None]) -> None:
        """Note that the gradients to come are S times too large; :meth:`refuse_loss` comes first.

        Gradients that cannot be added to are discarded: Gluon treats them as used ones. ``first``
        is called if this is the first loss of a step.
        """
        with self._lock:
            now = self.now
            if now.scale is None or self._why_anew(scale) is not None:
                now = NOTHING
                self.flags.discard_others()
                if scale != 1:  # the next backward pass overwrites them
                    flags_down(with_flag(inside.trained_weights(self._trainer, ("write",))))
                first()
            if not self.flags.open_blocks:
                self._sums.set_aside()
            self.flags.open_blocks += 1
            self.now = replace(now, scale=scale, tokens={**now.tokens, **tokens}, reduced=False)

    def end_loss(self, all_ran: bool, *, broken: bool) -> None:
        """Note which gradients a scaled loss has written, at the end of its block."""
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
            for gradient in inside.accumulated_gradients(self._trainer):
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
        if not self.now.reduced_ahead:
            reduce()
            self.change(reduced=True)

    def sum_ahead(self) -> None:
        """Sum gradients over devices ahead of the step, unless that was done."""
        inside.begin(self._trainer)
        if not self.now.reduced:
            self._trainer.allreduce_grads()
