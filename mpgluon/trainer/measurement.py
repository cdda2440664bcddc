"""The largest number of a Trainer's backward passes, for a loss scale that follows it.

Layers note the largest number of all their backward passes, of any Trainer's loss. A loss may run
through networks of other Trainers, as a generator's does through the discriminator, or of none,
and all of them count. Passes before a step's first loss do not, and where losses of two Trainers
have gone backward before the first of both steps, the networks and layers of the other one do not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Optional
from weakref import WeakSet

from mpgluon.cast.status_flags import Layers
from mpgluon.formats.float_format import FLOAT16, format_named
from mpgluon.trainer.networks import casts_of, layers_of
from mpgluon.updates import gluon_trainer

from mxnet import gluon

__all__ = ["Measurement"]

_here = threading.local()  # its ``begun``: the measurements that began in this thread


class Measurement:
    """The largest number of a step of one Trainer.

    Parameters
    ----------
    trainer : gluon.Trainer
    """

    def __init__(self, trainer: gluon.Trainer) -> None:
        self.trainer = trainer
        self._is_open = False  # whether there is a scaled loss without its step
        self._met: WeakSet[Measurement] = WeakSet()  # others that were open during this step

    def begin(self, *, measures: bool) -> None:
        """Begin a step, with its first loss; ``measures`` is whether its number is wanted."""
        begun: WeakSet[Measurement] = vars(_here).setdefault("begun", WeakSet())
        self._is_open = False
        self._met = WeakSet(one for one in list(begun) if one._is_open)
        for other in self._met:
            other._met.add(self)
        self._is_open = True
        begun.add(self)
        if measures:
            for layers in Layers.of_this_thread():
                layers.note(measures=True)
            self._take([self])

    def close(self) -> None:
        """Record that the step has ended, or was given up."""
        self._is_open = False

    def largest(self, together: Sequence[Measurement]) -> Optional[float]:
        """Return the largest number of the losses of Trainers that step together.

        ``None`` where it is not measured. The devices must be idle.
        """
        if not _are_measured([one.trainer for one in together]):
            return None
        return max((one for one in self._take(together) if one is not None), default=None)

    def _take(self, together: Sequence[Measurement]) -> list[Optional[float]]:
        """Return the largest number of each network that Trainers' losses ran through; clear it.

        A network of another Trainer that is open too does not count, and of one that both have the
        layers with parameters of these Trainers.
        """
        trainers = [one.trainer for one in together]
        others = {other for one in together for other in one._met}.difference(together)
        theirs = set(layers_of(other.trainer for other in others))
        networks = [one for one in Layers.of_this_thread() if one not in theirs]
        devices = gluon_trainer.devices_of(self.trainer)
        found = [one.take_largest(devices) for one in networks]
        if theirs:
            parameters = {p for one in trainers for p in gluon_trainer.parameters_of(one)}
            shared = theirs.intersection(layers_of(trainers))
            found += [one.take_largest(devices, parameters) for one in shared]
        return found


def _are_measured(trainers: Sequence[gluon.Trainer]) -> bool:
    """Whether the numbers of Trainers' cast networks are all noted.

    Numbers of formats as wide as FP32 need no note, and other narrow formats have none.
    In several processes none counts, so that all have the same scale.
    """
    formats = [format_named(cast.policy.compute_dtype) for cast in casts_of(trainers)]
    noted = [form == FLOAT16 or form.exponent_bits >= 8 for form in formats]
    return all(map(gluon_trainer.is_alone, trainers)) and bool(noted) and all(noted)
