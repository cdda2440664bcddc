"""Loss scaling: multiply a loss by S, and track which gradients carry S."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Optional, Union

from mpgluon.errors import TrainerStateError
from mpgluon.graph.output_operators import prepare_graph
from mpgluon.trainer import shared_scale
from mpgluon.trainer.gradient_flags import BackwardWatch, Weights
from mpgluon.trainer.step import TrainerState
from mpgluon.trainer.tokens import nan_of

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray import NDArray

__all__ = ["ScaledLoss", "scaled"]


class _Block(NamedTuple):
    """A ``with`` block that has not ended yet."""

    states: tuple[TrainerState, ...]
    arrays: list[NDArray]  # the losses, and S times them


_here = threading.local()  # its ``blocks`` are this thread's, the outermost first


class ScaledLoss(AbstractContextManager[Any]):
    """The context manager of :func:`scaled`, which says so where it is taken for the loss."""

    def __init__(self, scaling: AbstractContextManager[Any]) -> None:
        self._scaling = scaling

    def __enter__(self) -> Any:
        """Return the scaled loss, or the list of them."""
        return self._scaling.__enter__()

    def __exit__(self, *error: Any) -> Optional[bool]:
        """End the scaling."""
        return self._scaling.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"scale_loss returns a context manager, which has no {name!r}; write "
            "`with amp.scale_loss(loss, trainer) as scaled_loss: scaled_loss.backward()`"
        )


def scaled(losses: list[NDArray], states: tuple[TrainerState, ...], *, as_list: bool) -> ScaledLoss:
    """Return a context manager that yields S times the losses; see :func:`mpgluon.amp.scale_loss`.

    Until its block ends, it notes which gradients they write. Nothing is changed if it raises.
    """
    return ScaledLoss(_scaling(losses, states, as_list=as_list))


@contextmanager
def _scaling(
    losses: list[NDArray], states: tuple[TrainerState, ...], *, as_list: bool
) -> Iterator[Any]:
    blocks: list[_Block] = vars(_here).setdefault("blocks", [])
    _refuse_nesting(blocks, losses, states)
    for state in states:
        state.gradients.flags.use()
        shared_scale.begin_loss(state.loss_scale, state)
    _refuse_different_scales(states)
    scale = states[0].loss_scale.scale
    for state in states:
        state.gradients.refuse_loss(scale)
    nan = _nan_of(losses, states)
    if scale == 1:
        with _recording():
            products = [loss * (one + scale) for loss, one in zip(losses, nan)]
        tokens, watch = Weights(), None
    else:
        for state in states:
            state.gradients.remember_backward()
        prepare_graph(losses, scale, states[0].seen_graphs)
        with _recording():
            products, tokens = states[0].tokens.multiply(losses, scale, nan)
        watch = BackwardWatch([state.gradients.flags for state in states], tokens)
    for state in states:
        state.share(states[0].loss_scale)
        state.gradients.begin_loss(scale, tokens, first=state.begin_step)
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
            state.gradients.end_loss(all_ran, broken=failed and any_ran)
        if watch is not None:
            watch.finish(all_ran, others)


def _recording() -> AbstractContextManager[Any]:
    """Return a context that records, also behind the block in which the loss was recorded."""
    if autograd.is_recording():
        return nullcontext()
    recording: AbstractContextManager[Any] = autograd.record(autograd.is_training())
    return recording


def _nan_of(
    losses: Sequence[NDArray], states: Sequence[TrainerState]
) -> list[Union[NDArray, float]]:
    """Return for each loss NaN where it is NaN, or all over it if statistics of BatchNorm are.

    Elsewhere, and where no step is ever skipped, -0, which changes nothing that it is added to.
    """
    if not states[0].loss_scale.skips_overflow:  # all of them have the same loss scale
        return [-0.0] * len(losses)
    ruined = [state.statistics.nan_where_ruined() for state in states]
    nan = [nan_of(loss) for loss in losses]
    for number, loss in enumerate(losses):
        for more in (by_device[loss.ctx] for by_device in ruined if loss.ctx in by_device):
            more = more.as_np_ndarray() if isinstance(loss, mx.np.ndarray) else more
            nan[number] = nan[number] + more.astype(loss.dtype)
    return list(nan)


def _step_together(states: tuple[TrainerState, ...]) -> None:
    """Join Trainers of one loss, and Trainers that share earlier losses with them, in one step."""
    groups = [state.gradients.now.together for state in states]
    before = {id(group) for group in groups if group}
    together = tuple(dict.fromkeys([*(one for group in groups for one in group), *states]))
    for state in together:
        if state in states or id(state.gradients.now.together) in before:
            state.gradients.change(together=together)


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


def _refuse_different_scales(states: Sequence[TrainerState]) -> None:
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
        own, others = first.state_dict(), other.state_dict()
        if own != others:
            different = sorted(k for k in own | others if own.get(k) != others.get(k))
            raise TrainerStateError(
                "the Trainers of one loss have different loss scales: "
                + "; ".join(f"{k} is {own.get(k)!r} and {others.get(k)!r}" for k in different)
                + f"; {advice}"
            )
