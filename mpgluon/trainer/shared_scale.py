"""One loss scale for several Trainers: it advances once per round instead of once per step.

A round ends when each of them has made a step, or when one that has made its step scales its
next loss. Plain Python, without arrays.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Optional
from weakref import WeakSet

from mpgluon.formats.loss_scale import LossScale

__all__ = ["abandon_round", "begin_loss", "join", "leave", "next_scale", "report"]


class _Round:
    """The states that share a loss scale, those that have made their step, and its result."""

    def __init__(self) -> None:
        self.members: WeakSet[Any] = WeakSet()
        self.stepped: WeakSet[Any] = WeakSet()
        self.finite = True
        self.largest: Optional[float] = None

    def note(self, finite: bool, largest: Optional[float]) -> None:
        self.finite = self.finite and finite
        if largest is not None:
            self.largest = max(largest, self.largest or 0.0)


def join(loss_scale: LossScale, member: Any) -> None:
    """Record that a Trainer's state uses a loss scale."""
    if not hasattr(loss_scale, "sharing"):
        loss_scale.sharing = _Round()
    loss_scale.sharing.members.add(member)


def leave(loss_scale: LossScale, member: Any) -> None:
    """Record that a Trainer's state no longer uses a loss scale."""
    loss_scale.sharing.members.discard(member)
    loss_scale.sharing.stepped.discard(member)


def report(
    loss_scale: LossScale, members: Sequence[Any], *, finite: bool, largest: Optional[float]
) -> None:
    """Record the result of a step of some members, and advance if the round is over."""
    this = loss_scale.sharing
    if any(member in this.stepped for member in members):
        _advance(loss_scale)
    this.stepped.update(members)
    this.note(finite, largest)
    if len(this.stepped) == len(this.members):
        _advance(loss_scale)


def begin_loss(loss_scale: LossScale, member: Any) -> None:
    """Advance if a member that has made its step is about to scale a loss."""
    if member in loss_scale.sharing.stepped:
        _advance(loss_scale)


def next_scale(loss_scale: LossScale, member: Any) -> LossScale:
    """Return the loss scale that the member's next loss will find; a copy if that changes it."""
    this = loss_scale.sharing
    if member not in this.stepped:
        return loss_scale
    advanced = copy.copy(loss_scale)
    advanced.advance(this.finite, this.largest)
    return advanced


def abandon_round(loss_scale: LossScale) -> None:
    """Discard the results of steps since the loss scale advanced."""
    loss_scale.sharing.stepped.clear()
    loss_scale.sharing.finite, loss_scale.sharing.largest = True, None


def _advance(loss_scale: LossScale) -> None:
    this = loss_scale.sharing
    finite, largest = this.finite, this.largest
    abandon_round(loss_scale)
    loss_scale.advance(finite, largest)
