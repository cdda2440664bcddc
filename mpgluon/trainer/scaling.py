"""The way of a loss from ``amp.scale_loss`` to the gradients of the Trainers that it names."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any, Callable, NamedTuple, Optional, Union

from mpgluon.errors import TrainerStateError
from mpgluon.formats.loss_scale import LossScale
from mpgluon.graph.output_operators import GraphsSeen, prepare_graph
from mpgluon.kernels.reductions import global_norm
from mpgluon.trainer import inside, shared_scale
from mpgluon.trainer.accumulation import GradientSums
from mpgluon.trainer.pending import NOTHING
from mpgluon.trainer.scaled_gradients import (
    BackwardWatch,
    GradientHolder,
    Tokens,
    Weights,
    flags_down,
    names_of_tokens,
    nan_of,
    with_flag,
    without,
)
from mpgluon.trainer.statistics import KeptStatistics

import mxnet as mx
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["ScaledTrainer", "repair_statistics", "scaled"]


class ScaledTrainer(GradientHolder):
    """A Trainer with a loss scale, and what is known of its gradients since the latest step.

    Parameters
    ----------
    trainer : gluon.Trainer
    loss_scale : LossScale

    Attributes
    ----------
    loss_scale : LossScale
        The state machine; its ``scale`` multiplies the next loss. Trainers may share one.
    pending : Pending
        State of the gradients; replaced as a whole.
    tokens : Tokens
        Factors of the losses for this Trainer.
    statistics : KeptStatistics
        Running statistics from before the latest losses, if a step may be skipped.
    """

    def __init__(self, trainer: gluon.Trainer, loss_scale: LossScale) -> None:
        super().__init__(trainer)
        self.loss_scale = loss_scale
        shared_scale.join(loss_scale, self)
        self.pending = NOTHING
        self.tokens = Tokens()
        self.statistics = KeptStatistics(trainer)
        self.seen_graphs = GraphsSeen()
        self._sums = GradientSums(trainer)
        self._open = 0  # blocks in which a loss is being scaled; several threads may have one each
        self._lock = Lock()

    @property
    def watches_itself(self) -> bool:
        """Whether a loss is being scaled for this Trainer at the moment."""
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
        gradients = list(inside.accumulated_gradients(self.trainer)) if reason else []
        if gradients and global_norm(gradients) != 0:
            raise TrainerStateError(
                f"{reason}; or, to give up what has accumulated (grad_req='add'), empty it: "
                "net.collect_params().zero_grad()"
            )

    def remember_backward(self) -> None:
        """Note whether scaled losses have gone backward, before their tokens are used again."""
        with self._lock:
            self.pending = replace(self.pending, went_backward=self.pending.exist)

    def begin_loss(self, scale: float, tokens: Weights) -> None:
        """Note that the gradients to come are S times too large; :meth:`refuse_loss` comes first.

        Gradients that cannot be added to are discarded: Gluon treats them as used ones.
        """
        with self._lock:
            now = self.pending
            if now.scale is None or self._why_anew(scale) is not None:
                now = NOTHING
                self.forget_others()
                if scale != 1:  # the next backward pass overwrites them
                    flags_down(with_flag(inside.trained_weights(self.trainer, ("write",))))
                if self.loss_scale.skips_overflow:
                    self.statistics.keep()
            if not self._open:
                self._sums.set_aside()
            self._open += 1
            self.pending = replace(now, scale=scale, tokens={**now.tokens, **tokens}, reduced=False)

    def end_loss(self, all_ran: bool, *, broken: bool) -> None:
        """Note which gradients a scaled loss has written, at the end of its block."""
        with self._lock:
            self._open -= 1
            if not self._open:
                self._sums.add()
            now = self.pending
            if now.scale not in (None, 1) and all_ran:
                written = self.fresh_weights()
                flags_down(written)
                now = replace(now, written={**now.written, **written})
                self.foreign = without(self.foreign, written)
            self.pending = replace(
                now,
                went_backward=now.exist,
                late=now.late or not all_ran,
                broken=now.broken or broken,
            )

    def lose(self, written: Weights) -> None:
        """Note that another Trainer's scaled loss wrote the gradients of some weights."""
        super().lose(written)
        self.pending = replace(self.pending, written=without(self.pending.written, written))

    def forget(self) -> None:
        """Discard a step that was begun: its gradients, their scale, their clipping.

        Gradients that accumulate are emptied.
        """
        begun, self.pending = self.pending, NOTHING
        self.statistics.forget()
        self.forget_others()
        shared_scale.abandon_round(self.loss_scale)
        if begun is not NOTHING:
            flags_down(self.fresh_weights())
            for gradient in inside.accumulated_gradients(self.trainer):
                gradient[:] = 0

    def _why_anew(self, scale: float) -> Optional[str]:
        """Return why a loss times ``scale`` cannot add to the gradients that there are."""
        reason = self.pending.conflict_with(scale)
        if reason is None and self.written_outside():
            reason = (
                "gradients were written by a loss that was not scaled, after one that was; scale "
                "each loss with amp.scale_loss"
            )
        return reason

    def written_outside(self) -> Weights:
        """Return weights with gradients that no scaled loss wrote, as far as that can be known."""
        now = self.pending
        if now.scale in (None, 1) or self._open:
            return {}
        if now.exist and (now.late or not now.written):
            return {}  # by that loss after its block; or copied, as fp16_utils does
        return self.fresh_weights()

    def reduce_gradients(self, reduce: Callable[[], None]) -> None:
        """Sum gradients over devices, unless that was done ahead of this step."""
        if not self.pending.reduced_ahead:
            reduce()
            self.pending = replace(self.pending, reduced=True)

    def reduce(self) -> None:
        """Sum gradients over devices ahead of the step, unless that was done."""
        inside.begin(self.trainer)
        if not self.pending.reduced:
            self.trainer.allreduce_grads()

    def fresh_gradients(self, parameters: Iterable[gluon.Parameter]) -> list[NDArray]:
        """Return the gradients, on all devices, that were written since the latest step."""
        self.use()
        written = self.pending.written
        return [
            gradient
            for parameter in parameters
            for weight, gradient in zip(parameter.list_data(), parameter.list_grad())
            if id(weight) in written or weight._fresh_grad
        ]


def repair_statistics() -> None:
    """Undo what an overflow in a forward pass did to running statistics; waits for the devices.

    It covers all Trainers of this thread: a generator's loss goes through the discriminator, too.
    """
    mx.nd.waitall()  # the backward pass may still be running where no gradient was wanted
    for state in GradientHolder.of_this_thread():
        if isinstance(state, ScaledTrainer):
            state.statistics.repair()


class _Block(NamedTuple):
    """A ``with`` block that has not ended yet."""

    states: tuple[ScaledTrainer, ...]
    arrays: list[NDArray]  # the losses, and S times them


_here = threading.local()  # its ``blocks``: those of this thread, the outermost first


@contextmanager
def scaled(
    losses: list[NDArray], states: tuple[ScaledTrainer, ...], *, as_list: bool
) -> Iterator[Any]:
    """Yield S times the losses, and note which gradients they write until the block ends.

    See :func:`mpgluon.amp.scale_loss`; nothing is changed if it raises.
    """
    blocks: list[_Block] = vars(_here).setdefault("blocks", [])
    _refuse_nesting(blocks, losses, states)
    for state in states:
        state.use()
        shared_scale.begin_loss(state.loss_scale, state)
    _refuse_different_scales(states)
    scale = states[0].loss_scale.scale
    for state in states:
        state.refuse_loss(scale)
    nan = _nan_of(losses, states)
    if scale == 1:
        products = [loss * (one + scale) for loss, one in zip(losses, nan)]
        tokens, watch = Weights(), None
    else:
        for state in states:
            state.remember_backward()
        prepare_graph(losses, scale, states[0].seen_graphs, names_of_tokens)
        products, tokens = states[0].tokens.multiply(losses, scale, nan)
        watch = BackwardWatch(states, tokens)
    for state in states:
        state.share(states[0].loss_scale)
        state.begin_loss(scale, tokens)
    if len(states) > 1:
        _step_together(states)
    blocks.append(_Block(states, [*losses, *products]))
    failed = True
    try:
        yield products if as_list else products[0]
        failed = False
    finally:
        blocks.pop()
        all_ran, any_ran = watch.ran() if watch is not None else (True, False)
        others = watch.look() if watch is not None else []
        for state in states:
            state.end_loss(all_ran, broken=failed and any_ran)
        if watch is not None:
            watch.finish(all_ran, others)


def _nan_of(
    losses: Sequence[NDArray], states: Sequence[ScaledTrainer]
) -> list[Union[NDArray, float]]:
    """Return for each loss NaN where it is NaN, or all over it if statistics of BatchNorm are.

    Elsewhere, and where no step is ever skipped, -0, which changes nothing that it is added to.
    """
    if not states[0].loss_scale.skips_overflow:  # all of them have the same loss scale
        return [-0.0] * len(losses)
    ruined = [state.statistics.nan_where_ruined() for state in states]
    nan = [nan_of(loss) for loss in losses]
    for number, loss in enumerate(losses):
        for more in (by_device[loss.context] for by_device in ruined if loss.context in by_device):
            more = more.as_np_ndarray() if isinstance(loss, mx.np.ndarray) else more
            nan[number] = nan[number] + more.astype(loss.dtype)
    return list(nan)


def _step_together(states: tuple[ScaledTrainer, ...]) -> None:
    """Let Trainers of one loss, and those of earlier losses with them, step as one."""
    before = {id(state.pending.together) for state in states if state.pending.together}
    earlier = [one for state in states for one in state.pending.together]
    together = tuple(dict.fromkeys([*earlier, *states]))
    for state in together:
        if state in states or id(state.pending.together) in before:
            state.pending = replace(state.pending, together=together)


def _refuse_nesting(
    blocks: Sequence[_Block], losses: Sequence[NDArray], states: Sequence[ScaledTrainer]
) -> None:
    """Raise if a loss would be multiplied twice."""
    for block in blocks:
        if any(state in block.states for state in states):
            raise TrainerStateError(
                "amp.scale_loss inside of amp.scale_loss for the same Trainer would multiply a "
                "loss twice and divide its gradients once; scale several losses together, "
                "amp.scale_loss([loss_a, loss_b], trainer), or one after the other"
            )
        if any(loss is array for loss in losses for array in block.arrays):
            raise TrainerStateError(
                "one loss is being scaled for two Trainers, one inside of the other: it would be "
                "multiplied twice; write amp.scale_loss(loss, [trainer_a, trainer_b])"
            )


def _refuse_different_scales(states: Sequence[ScaledTrainer]) -> None:
    """Raise unless the Trainers have one loss scale, or several that could be one."""
    first = states[0].loss_scale
    for state in states[1:]:
        other = state.loss_scale
        if other is first:
            continue
        advice = (
            "give both the same object: scale = mpgluon.DynamicLossScale(), then "
            "amp.init_trainer(trainer_a, scale) and amp.init_trainer(trainer_b, scale)"
        )
        if other.scale != first.scale:
            raise TrainerStateError(
                f"the Trainers of one loss have loss scales of {first.scale:g} and "
                f"{other.scale:g}; {advice}"
            )
        mine, theirs = first.state_dict(), other.state_dict()
        if mine != theirs:
            different = sorted(k for k in mine | theirs if mine.get(k) != theirs.get(k))
            raise TrainerStateError(
                "the Trainers of one loss have different loss scales: "
                + "; ".join(f"{k} is {mine.get(k)!r} and {theirs.get(k)!r}" for k in different)
                + f"; {advice}"
            )
