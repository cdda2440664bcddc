"""The flags of gradients, which show the gradients that a loss has written.

A backward pass sets the flag ``_fresh_grad`` of each weight whose gradient it writes, and a step
clears it. A loss also writes the gradients of other Trainers whose networks it passes through, as a
generator's loss does the discriminator's. From a loss nothing leads to these Trainers, and they
may have nothing in common, so all Trainers of the process are in one weak set here, which keeps
none of them in memory. A Trainer belongs to the thread that used it last, and trainings in several
threads do not see each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from threading import Lock, get_ident
from typing import Callable, ClassVar, Optional
from weakref import WeakSet

from mpgluon.base.blocks import empty
from mpgluon.errors import TrainerStateError
from mpgluon.trainer.statistics import KeptStatistics
from mpgluon.updates import gluon_trainer

from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = [
    "BackwardWatch",
    "GradientFlags",
    "Weights",
    "empty_stale",
    "flags_down",
    "flags_up",
    "stale_weights",
    "with_flag",
    "without",
]

Weights = dict[int, NDArray]  # by ``id``: arrays compare their elements

_IDLE = 100  # looks that found nothing
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


def without_flag(weights: Iterable[NDArray]) -> Weights:
    """Return the weights whose gradient was not written since the latest step."""
    return {id(weight): weight for weight in weights if not weight._fresh_grad}


def stale_weights(
    trainer: gluon.Trainer, stale: Callable[[Iterable[NDArray]], Weights] = without_flag
) -> dict[int, Weights]:
    """Return each trained parameter's weights, by device, whose gradient no loss has written.

    By the parameter's index; without rows, which Gluon does not hand out.
    """
    return {
        index: stale(parameter.list_data())
        for index, parameter in enumerate(gluon_trainer.parameters_of(trainer))
        if parameter.grad_req != "null"
        and parameter._grad is not None
        and parameter._stype == "default"
    }


def empty_stale(trainer: gluon.Trainer, stale: Mapping[int, Weights]) -> None:
    """Empty the gradients of these weights: they would be added again."""
    parameters = gluon_trainer.parameters_of(trainer)
    for index, weights in stale.items():
        for weight, gradient in zip(parameters[index].list_data(), parameters[index].list_grad()):
            if id(weight) in weights:
                empty(gradient)


class GradientFlags:
    """The flags of a Trainer's gradients, and the gradients that another Trainer's loss wrote.

    Parameters
    ----------
    trainer : gluon.Trainer
        Its constructor may still be running.
    statistics : KeptStatistics, optional
        Running statistics of its network, repaired after an overflow of any loss of the thread.

    Attributes
    ----------
    foreign : Weights
        Weights whose gradient a loss wrote that was scaled for other Trainers only.
    suspected : Weights
        Tokens of such losses that had not gone backward when their blocks ended.
    open_blocks : int
        Blocks in which a loss is being scaled for this Trainer; threads may have one each.
    """

    _all: ClassVar[WeakSet[GradientFlags]] = WeakSet()

    def __init__(self, trainer: gluon.Trainer, statistics: Optional[KeptStatistics] = None) -> None:
        self.trainer = trainer
        self.statistics = statistics
        self.foreign: Weights = {}
        self.suspected: Weights = {}
        self.open_blocks = 0
        self._looks_in_vain = 0  # since a gradient was found that another loss could have written
        self._lowered: Weights = {}  # those whose flags a watch has lowered until it finishes
        self._thread = get_ident()
        with _threads_change:
            self._all.add(self)

    @classmethod
    def of_this_thread(cls) -> list[GradientFlags]:
        """Return the flags of the Trainers that this thread has made or used last."""
        with _threads_change:
            return [one for one in cls._all if one._thread == get_ident()]

    def use(self) -> None:
        """Record that this thread uses the Trainer; undo the watch of another thread."""
        with _threads_change:
            if self._thread != get_ident():
                self._thread = get_ident()
                flags_up({**self._lowered, **self.foreign})
                self._lowered = {}
                self.discard_others()

    def fresh_weights(self) -> Weights:
        """Return the weights, on all devices, whose gradient was written since the latest step."""
        return with_flag(gluon_trainer.trained_weights(self.trainer))

    def stale(self, weights: Iterable[NDArray], written: Weights) -> Weights:
        """Return the weights whose gradient no loss has written since the latest step.

        ``written`` are those whose flags are down although one has.
        """
        return without(without_flag(weights), {**written, **self.foreign, **self._lowered})

    def fresh_weights_of_another(self) -> Weights:
        """Return :meth:`fresh_weights` for a Trainer whose loss is not the one being scaled.

        After many looks without a result, it tests a few weights first: a Trainer that is idle, or
        garbage that was not collected yet, then costs the others nothing.
        """
        if self._looks_in_vain >= _IDLE and not with_flag(gluon_trainer.some_weights(self.trainer)):
            return {}
        fresh = self.fresh_weights()
        self._looks_in_vain = 0 if fresh else self._looks_in_vain + 1
        return fresh

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
            self.foreign.update(written)
            flags_up(without(before, written))
            self.suspected.update(suspected)

    def discard_others(self) -> None:
        """Record that all gradients belong to this Trainer's own losses from now on."""
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
        first = gluon_trainer.first_of(self.trainer, still)
        raise TrainerStateError(
            f"this Trainer holds {held}{first} of a loss that was "
            "scaled for another Trainer only, so the step would not divide them; name every "
            "Trainer that steps: amp.scale_loss(loss, [trainer_a, trainer_b])"
        )


class BackwardWatch:
    """Finds out which gradients of other Trainers are written while a loss is scaled.

    A Trainer that another thread begins to use is not watched any longer.

    Parameters
    ----------
    named : sequence of GradientFlags
        The flags of the Trainers for which the loss is scaled.
    tokens : Weights
        The tokens of the loss.
    """

    def __init__(self, named: Sequence[GradientFlags], tokens: Weights) -> None:
        self._tokens = tokens
        here = GradientFlags.of_this_thread()
        self._others = [one for one in here if one not in named and not one.open_blocks]
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
