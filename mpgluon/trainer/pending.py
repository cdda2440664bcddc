"""The state of a Trainer's gradients between its scaled losses and its step.

One immutable value, replaced as a whole: by a loss, by a clip, and by the step, which empties it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from mpgluon.trainer.scaled_gradients import Weights, with_flag

__all__ = ["NOTHING", "Clip", "Pending"]


@dataclass(frozen=True)
class Clip:
    """What ``clip_global_norm`` found, for the step that follows."""

    norm: float  # in true units, before clipping
    coefficient: float
    rescale: float  # the Trainer's factor divided by the batch size that the caller announced


@dataclass(frozen=True, eq=False)
class Pending:
    """A Trainer's gradients since its latest step.

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


NOTHING = Pending()
