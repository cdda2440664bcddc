"""The way of a loss from ``amp.scale_loss`` to the gradients of the Trainers that it names."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mxnet.ndarray import NDArray

from mpgluon.errors import TrainerStateError
from mpgluon.graph.output_operators import prepare_graph
from mpgluon.trainer import shared_scale
from mpgluon.trainer.scaled_gradients import BackwardWatch, Weights, names_of_tokens
from mpgluon.trainer.step import TrainerState, step_together

__all__ = ["scaled"]


class _Block(NamedTuple):
    """A ``with`` block that has not ended yet."""

    states: tuple[TrainerState, ...]
    arrays: list[NDArray]  # the losses, and S times them


_here = threading.local()  # its ``blocks``: those of this thread, the outermost first


@contextmanager
def scaled(
    losses: list[NDArray], states: tuple[TrainerState, ...], *, as_list: bool
) -> Iterator[Any]:
    """Yield S times the losses, and note which gradients they write until the block ends.

    See :func:`mpgluon.amp.scale_loss`; nothing is changed if it raises.
    """
    blocks: list[_Block] = vars(_here).setdefault("blocks", [])
    _refuse_nesting(blocks, losses, states)
    for state in states:
        shared_scale.begin_loss(state.loss_scale, state)
    _agree(states)
    scale = states[0].loss_scale.scale
    for state in states:
        state.refuse_loss(scale)
    if scale == 1:
        products, tokens = [loss * scale for loss in losses], Weights()
        watch = None
    else:
        for state in states:
            state.remember_backward()
        prepare_graph(losses, scale, states[0].seen_graphs, names_of_tokens)
        products, tokens = states[0].tokens.multiply(losses, scale)
        watch = BackwardWatch(states, tokens)
    for state in states:
        state.share(states[0].loss_scale)
        state.begin_loss(scale, tokens)
    if len(states) > 1:
        step_together(states)
    blocks.append(_Block(states, [*losses, *products]))
    failed = True
    try:
        yield products if as_list else products[0]
        failed = False
    finally:
        blocks.pop()
        all_ran = watch is None or watch.all_ran
        broken = failed and watch is not None and watch.any_ran
        if watch is not None:
            watch.look()
        for state in states:
            state.end_loss(all_ran, broken=broken)
        if watch is not None:
            watch.finish()


def _refuse_nesting(
    blocks: Sequence[_Block], losses: Sequence[NDArray], states: Sequence[TrainerState]
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


def _agree(states: Sequence[TrainerState]) -> None:
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
