"""Whose gradients are those of a scaled loss: what autograd and Gluon's flags tell of it.

Gluon puts a flag up on a weight when a backward pass writes its gradient, and a step takes it down.
The same flag on an array that the loss was multiplied by, a token, tells whether that loss has gone
backward. Both are read here; what follows from them is decided in :mod:`mpgluon.trainer.step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar
from weakref import WeakSet

import mxnet as mx
from mxnet import gluon
from mxnet.ndarray import NDArray

from mpgluon.errors import TrainerStateError
from mpgluon.graph.output_operators import names_of
from mpgluon.numerics.dtypes import dtype_name
from mpgluon.trainer import inside

__all__ = [
    "BackwardWatch",
    "GradientHolder",
    "Tokens",
    "Weights",
    "flags_down",
    "flags_up",
    "names_of_tokens",
    "with_flag",
]

Weights = dict[int, NDArray]  # by ``id``: arrays compare their elements

_IDLE = 100  # looks
_LARGE = 2**12  # elements, from which on a sum over them costs more than a copy


def with_flag(weights: Iterable[NDArray]) -> Weights:
    """Return those whose gradient a backward pass has written since the latest step."""
    return {id(weight): weight for weight in weights if weight._fresh_grad}


def flags_down(weights: Weights) -> None:
    """Let Gluon take the weights' gradients for used ones."""
    for weight in weights.values():
        weight._fresh_grad = False


def flags_up(weights: Weights) -> None:
    """Let Gluon take the weights' gradients for new ones."""
    for weight in weights.values():
        weight._fresh_grad = True


class Tokens:
    """Multiplies losses by S with arrays that tell whether each loss has gone backward."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[object, ...], tuple[float, NDArray]] = {}

    def multiply(self, losses: Sequence[NDArray], scale: float) -> tuple[list[NDArray], Weights]:
        """Return S times each loss, and its tokens, whose flags are down.

        The bits are those of ``loss * scale``, and so is the gradient.
        """
        tokens = [self._token(number, loss, scale) for number, loss in enumerate(losses)]
        flags_down({id(token): token for token in tokens})
        scaled = [_times(loss, token, scale) for loss, token in zip(losses, tokens)]
        return scaled, {id(token): token for token in tokens}

    def names(self) -> set[str]:
        """Return the tokens' names in recorded graphs."""
        return names_of(token for _, token in self._tokens.values())

    def _token(self, number: int, loss: NDArray, scale: float) -> NDArray:
        numpy_like = isinstance(loss, mx.np.ndarray)
        key = (number, loss.context, loss.dtype, numpy_like, numpy_like and loss.ndim == 0)
        known = self._tokens.get(key)
        if known is not None and known[0] == scale:
            return known[1]
        module = mx.np if numpy_like else mx.nd
        shape = () if key[-1] else (1,)
        token = module.ones(shape, dtype=loss.dtype, ctx=loss.context) * scale
        token.attach_grad()
        self._tokens[key] = (scale, token)
        return token


def _times(loss: NDArray, token: NDArray, scale: float) -> NDArray:
    if loss.size < _LARGE or dtype_name(loss) != "float32" or isinstance(loss, mx.np.ndarray):
        return loss * token
    # The gradient of a product sums over the loss, 18 ms for a million elements; this copies it.
    return mx.nd.amp_multicast(loss * scale, token, num_outputs=2)[0]


class GradientHolder:
    """A Trainer that mpgluon knows, and which of its gradients another one's scaled loss wrote.

    Parameters
    ----------
    trainer : gluon.Trainer
        It may still be in the making.
    """

    # Nothing leads from a loss to the Trainers whose gradients it fills but all Trainers.
    _known: ClassVar[WeakSet[GradientHolder]] = WeakSet()

    def __init__(self, trainer: gluon.Trainer) -> None:
        self._trainer = trainer
        self.foreign: Weights = {}
        # Tokens of losses of others that had not gone backward when their blocks ended.
        self.suspected: Weights = {}
        self._looks_in_vain = 0  # since a gradient was found that others could have written
        self._known.add(self)

    @property
    def watches_itself(self) -> bool:
        """Whether a loss of its own is being scaled at this moment."""
        return False

    def fresh_weights(self) -> Weights:
        """Return the weights, on all devices, whose gradient was written since the latest step."""
        return with_flag(inside.trained_weights(self._trainer))

    def fresh_weights_of_another(self) -> Weights:
        """Return what :meth:`fresh_weights` does, for a Trainer that is not being scaled for.

        One that has been idle for long, or is garbage that was not collected yet, shows a few
        weights only, so that it costs others nothing.
        """
        if self._looks_in_vain >= _IDLE and not with_flag(inside.some_weights(self._trainer)):
            return {}
        found = self.fresh_weights()
        self._looks_in_vain = 0 if found else self._looks_in_vain + 1
        return found

    def lose(self, written: Weights) -> None:
        """Note that another Trainer's scaled loss wrote the gradients of some weights."""
        self.foreign.update(written)

    def forget_others(self) -> None:
        """Note that all gradients are of one's own loss from now on."""
        self.foreign, self.suspected = {}, {}

    def refuse_gradients_of_others(self, *, suspicious: bool) -> None:
        """Raise if the step to come would use what another Trainer's scaled loss wrote.

        Parameters
        ----------
        suspicious : bool
            Whether to raise where a loss went backward outside its block, too: its gradients
            cannot be told from others then.
        """
        still = {key: weight for key, weight in self.foreign.items() if not weight._fresh_grad}
        if not still and not (suspicious and with_flag(self.suspected.values())):
            return
        held = f"{len(still)} gradients" if still else "gradients"
        first = f" ({inside.name_of_weight(self._trainer, still)} first)" if still else ""
        raise TrainerStateError(
            f"this Trainer holds {held}{first} of a loss that was scaled for another Trainer "
            "only, so nothing would divide them; name every Trainer that steps: "
            "amp.scale_loss(loss, [trainer_a, trainer_b])"
        )


def names_of_tokens() -> set[str]:
    """Return the names in recorded graphs of all tokens of all Trainers."""
    states = [one for one in GradientHolder._known if hasattr(one, "tokens")]
    return {name for state in states for name in state.tokens.names()}


class BackwardWatch:
    """Sees which gradients are written while a loss is scaled.

    Parameters
    ----------
    named : sequence of GradientHolder
        Those for which the loss is scaled.
    tokens : Weights
        Those of the loss.
    """

    def __init__(self, named: Sequence[GradientHolder], tokens: Weights) -> None:
        self._tokens = tokens
        known = list(GradientHolder._known)
        self._others = [one for one in known if one not in named and not one.watches_itself]
        self._before = [one.fresh_weights_of_another() for one in self._others]
        self._now: list[Weights] = []
        self._ran = False
        for before in self._before:
            flags_down(before)

    @property
    def all_ran(self) -> bool:
        """Whether each loss has gone backward."""
        return all(token._fresh_grad for token in self._tokens.values())

    @property
    def any_ran(self) -> bool:
        """Whether one of them has."""
        return any(token._fresh_grad for token in self._tokens.values())

    def look(self) -> None:
        """Note which gradients are new, before the named Trainers take their flags down."""
        self._ran = self.all_ran
        self._now = [other.fresh_weights_of_another() for other in self._others]

    def finish(self) -> None:
        """Take gradients that were written from the Trainers that were not named."""
        for other, before, now in zip(self._others, self._before, self._now):
            if self._ran:
                flags_down(now)
                other.lose(now)
                flags_up({key: weight for key, weight in before.items() if key not in now})
            else:
                flags_up(before)
                other.suspected.update(self._tokens)
