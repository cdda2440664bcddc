"""Which gradients a scaled loss has written, as autograd's and Gluon's flags tell it.

A backward pass sets the flag ``_fresh_grad`` of each weight whose gradient it writes, and a step
clears it. A loss is scaled by an array with a gradient of its own, its token, whose flag tells
whether that loss has gone backward. What follows from the flags is decided in
:mod:`mpgluon.trainer.step`.

A Trainer belongs to the thread that used it last. A loss is only searched for gradients of Trainers
of its own thread, so trainings in several threads do not see each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock, get_ident
from typing import ClassVar, Union
from weakref import WeakSet

from mpgluon.errors import TrainerStateError
from mpgluon.graph.output_operators import names_of
from mpgluon.kernels.dtypes import dtype_name
from mpgluon.trainer import inside

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

__all__ = [
    "BackwardWatch",
    "GradientHolder",
    "Tokens",
    "Weights",
    "flags_down",
    "flags_up",
    "names_of_tokens",
    "nan_of",
    "with_flag",
    "without",
]

Weights = dict[int, NDArray]  # by ``id``: arrays compare their elements

_IDLE = 100  # looks that found nothing
_LARGE = 2**12  # elements, from which on a sum over them costs more than a copy
_threads_change = Lock()  # held while the threads of Trainers are read or changed


def with_flag(weights: Iterable[NDArray]) -> Weights:
    """Return the weights whose gradient was written since the latest step."""
    return {id(weight): weight for weight in weights if weight._fresh_grad}


def without(weights: Weights, others: Weights) -> Weights:
    """Return the weights that are not among others."""
    return {key: weight for key, weight in weights.items() if key not in others}


def flags_down(weights: Weights) -> None:
    """Mark the weights' gradients as used."""
    for weight in weights.values():
        weight._fresh_grad = False


def flags_up(weights: Weights) -> None:
    """Mark the weights' gradients as new."""
    for weight in weights.values():
        weight._fresh_grad = True


class Tokens:
    """Multiplies losses by S with arrays that tell whether each loss has gone backward."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[object, ...], tuple[float, NDArray]] = {}

    def multiply(
        self, losses: Sequence[NDArray], scale: float, nan: Sequence[Union[NDArray, float]]
    ) -> tuple[list[NDArray], Weights]:
        """Return S times each loss, with the bits of ``loss * scale``, and their tokens.

        ``nan`` is added to the factor S: -0, or what :func:`nan_of` returns.
        """
        tokens = [self._token(number, loss, scale) for number, loss in enumerate(losses)]
        by_id = {id(token): token for token in tokens}
        flags_down(by_id)
        return [_times(*one, scale) for one in zip(losses, tokens, nan)], by_id

    def names(self) -> set[str]:
        """Return the tokens' names in recorded graphs."""
        return names_of(token for _, token in list(self._tokens.values()))

    def _token(self, number: int, loss: NDArray, scale: float) -> NDArray:
        numpy_like = isinstance(loss, mx.np.ndarray)
        key = (number, loss.context, loss.dtype, numpy_like, numpy_like and loss.ndim == 0)
        known_scale, token = self._tokens.get(key, (None, None))
        if token is None or known_scale != scale:
            shape = () if key[-1] else (1,)
            ones = (mx.np if numpy_like else mx.nd).ones(shape, dtype=loss.dtype, ctx=loss.context)
            token = ones * scale
            token.attach_grad()
            self._tokens[key] = (scale, token)
        return token


def _times(loss: NDArray, token: NDArray, nan: Union[NDArray, float], scale: float) -> NDArray:
    if loss.size < _LARGE or dtype_name(loss) != "float32" or isinstance(loss, mx.np.ndarray):
        return loss * (token + nan)
    # The token's gradient in a product is a sum over the whole loss; here it is a copy.
    return mx.nd.amp_multicast(loss * (nan + scale), token, num_outputs=2)[0]


def nan_of(loss: NDArray) -> NDArray:
    """Return NaN where a loss is NaN, elsewhere -0, which changes nothing that it is added to.

    The gradient of a NaN can be a number, such as 0 for its absolute value: a factor of NaN makes
    it NaN, so that the step is skipped, by all processes. Does not wait.
    """
    with autograd.pause():
        if isinstance(loss, mx.np.ndarray):
            return mx.np.sqrt(-mx.np.isnan(loss).astype(loss.dtype))
        return mx.nd.sqrt(-mx.nd.contrib.isnan(loss))


class GradientHolder:
    """A Trainer that mpgluon manages, and which of its gradients belong to another one's loss.

    Parameters
    ----------
    trainer : gluon.Trainer
        Its constructor may still be running.

    Attributes
    ----------
    foreign : Weights
        Weights whose gradient a loss wrote that was scaled for other Trainers only.
    suspected : Weights
        Tokens of such losses that had not gone backward when their blocks ended.
    """

    # From a loss there is no way to the Trainers whose gradients it writes but through all of them.
    _known: ClassVar[WeakSet[GradientHolder]] = WeakSet()

    def __init__(self, trainer: gluon.Trainer) -> None:
        self.trainer = trainer
        self.foreign: Weights = {}
        self.suspected: Weights = {}
        self._looks_in_vain = 0  # since a gradient was found that another loss could have written
        self._lowered: Weights = {}  # those whose flags a watch has lowered until it finishes
        self._thread = get_ident()
        with _threads_change:
            self._known.add(self)

    @classmethod
    def of_this_thread(cls) -> list[GradientHolder]:
        """Return the holders that this thread has made or used last."""
        with _threads_change:
            return [one for one in GradientHolder._known if one._thread == get_ident()]

    def use(self) -> None:
        """Note that this thread uses the Trainer; undo what a watch of another thread has noted."""
        with _threads_change:
            if self._thread != get_ident():
                self._thread = get_ident()
                flags_up({**self._lowered, **self.foreign})
                self._lowered = {}
                self.forget_others()

    @property
    def watches_itself(self) -> bool:
        """Whether a loss is being scaled for this Trainer at the moment."""
        return False

    def fresh_weights(self) -> Weights:
        """Return the weights, on all devices, whose gradient was written since the latest step."""
        return with_flag(inside.trained_weights(self.trainer))

    def fresh_weights_of_another(self) -> Weights:
        """Return :meth:`fresh_weights` for a Trainer whose loss is not the one being scaled.

        After many looks without a result, it tests a few weights first: a Trainer that is idle, or
        garbage that was not collected yet, then costs the others nothing.
        """
        if self._looks_in_vain >= _IDLE and not with_flag(inside.some_weights(self.trainer)):
            return {}
        found = self.fresh_weights()
        self._looks_in_vain = 0 if found else self._looks_in_vain + 1
        return found

    def lower_flags(self) -> Weights:
        """Lower the flags of fresh gradients, so that a watch sees which ones are written next."""
        with _threads_change:
            before = self.fresh_weights_of_another() if self._thread == get_ident() else {}
            self._lowered.update(before)
            flags_down(before)
        return before

    def raise_flags(self, before: Weights, written: Weights, suspected: Weights) -> None:
        """Undo :meth:`lower_flags`, and note what another Trainer's scaled loss wrote."""
        with _threads_change:
            if self._thread != get_ident():
                return
            self._lowered = without(self._lowered, before)
            flags_down(written)
            self.lose(written)
            flags_up(without(before, written))
            self.suspected.update(suspected)

    def lose(self, written: Weights) -> None:
        """Note that another Trainer's scaled loss wrote the gradients of some weights."""
        self.foreign.update(written)

    def forget_others(self) -> None:
        """Note that all gradients belong to this Trainer's own losses from now on."""
        self.foreign, self.suspected = {}, {}

    def refuse_gradients_of_others(self, *, suspicious: bool) -> None:
        """Raise if the next step would use gradients of another Trainer's scaled loss.

        Parameters
        ----------
        suspicious : bool
            Whether to raise also for a loss that went backward after its block, because its
            gradients cannot be distinguished from others.
        """
        still = {key: weight for key, weight in self.foreign.items() if not weight._fresh_grad}
        if not still and not (suspicious and with_flag(self.suspected.values())):
            return
        held = f"{len(still)} gradients" if still else "gradients"
        raise TrainerStateError(
            f"this Trainer holds {held}{inside.first_of(self.trainer, still)} of a loss that was "
            "scaled for another Trainer only, so the step would not divide them; name every "
            "Trainer that steps: amp.scale_loss(loss, [trainer_a, trainer_b])"
        )


def names_of_tokens() -> set[str]:
    """Return the names in recorded graphs of all tokens of this thread's Trainers."""
    states = [one for one in GradientHolder.of_this_thread() if hasattr(one, "tokens")]
    return {name for state in states for name in state.tokens.names()}


class BackwardWatch:
    """Finds out which gradients of other Trainers are written while a loss is scaled.

    A Trainer that another thread begins to use is not watched any longer.

    Parameters
    ----------
    named : sequence of GradientHolder
        The Trainers for which the loss is scaled.
    tokens : Weights
        The tokens of the loss.
    """

    def __init__(self, named: Sequence[GradientHolder], tokens: Weights) -> None:
        self._tokens = tokens
        here = GradientHolder.of_this_thread()
        self._others = [one for one in here if one not in named and not one.watches_itself]
        self._before = [one.lower_flags() for one in self._others]

    def ran(self) -> tuple[bool, bool]:
        """Return whether all, and whether any, of the losses have gone backward."""
        flags = [token._fresh_grad for token in self._tokens.values()]
        return all(flags), any(flags)

    def look(self) -> list[Weights]:
        """Return the other Trainers' new gradients, before the named ones clear flags."""
        return [other.fresh_weights_of_another() for other in self._others]

    def finish(self, all_ran: bool, now: Sequence[Weights]) -> None:
        """Take the gradients that were written from the Trainers that were not named."""
        suspected = {} if all_ran else self._tokens
        for other, before, written in zip(self._others, self._before, now):
            other.raise_flags(before, written if all_ran else {}, suspected)
