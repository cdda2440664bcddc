"""One loss scale for several Trainers: it advances once per round, and not once per step.

A round is over when each of them has made a step, or when one that has made its step scales its
next loss. Plain Python; what a step found is asked elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from mpgluon.numerics.loss_scale import LossScale

__all__ = ["abandon_round", "begin_loss", "join", "leave", "next_scale", "report"]


@dataclass
class _Round:
    """Who shares a loss scale, who has made a step since it advanced, and what they found."""

    members: WeakSet[Any] = field(default_factory=WeakSet)
    stepped: WeakSet[Any] = field(default_factory=WeakSet)
    finite: bool = True


# A LossScale is plain numbers, all of which are saved; who uses it is not part of it.
_rounds: WeakKeyDictionary[LossScale, _Round] = WeakKeyDictionary()


def join(loss_scale: LossScale, member: Any) -> None:
    """Note that a Trainer's state uses a loss scale."""
    _rounds.setdefault(loss_scale, _Round()).members.add(member)


def leave(loss_scale: LossScale, member: Any) -> None:
    """Note that it uses another one from now on."""
    for group in (_rounds[loss_scale].members, _rounds[loss_scale].stepped):
        group.discard(member)


def report(loss_scale: LossScale, members: Iterable[Any], *, finite: bool) -> None:
    """Note the result of a step of some members, and advance if the round is over."""
    this = _rounds[loss_scale]
    members = list(members)
    if any(member in this.stepped for member in members):
        _advance(loss_scale, this)
    this.stepped.update(members)
    this.finite = this.finite and finite
    if len(this.stepped) == len(this.members):
        _advance(loss_scale, this)


def begin_loss(loss_scale: LossScale, member: Any) -> None:
    """Advance if a member that has made its step is about to scale a loss."""
    if member in _rounds[loss_scale].stepped:
        _advance(loss_scale, _rounds[loss_scale])


def next_scale(loss_scale: LossScale, member: Any) -> LossScale:
    """Return the loss scale as the member's next loss will find it; a copy if that changes it."""
    this = _rounds[loss_scale]
    if member not in this.stepped:
        return loss_scale
    advanced = copy.copy(loss_scale)
    advanced.update(this.finite)
    return advanced


def abandon_round(loss_scale: LossScale) -> None:
    """Forget the steps since the loss scale advanced."""
    _rounds[loss_scale].stepped.clear()
    _rounds[loss_scale].finite = True


def _advance(loss_scale: LossScale, this: _Round) -> None:
    finite = this.finite
    this.stepped.clear()
    this.finite = True
    loss_scale.update(finite)
