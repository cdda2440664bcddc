"""One cast of a network: the value that its blocks and parameters share while it is cast."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Optional

from mpgluon.cast.copies import make_copyable, make_uncopyable
from mpgluon.cast.status_flags import Layers
from mpgluon.formats.policy import Policy

import mxnet as mx
from mxnet import gluon

__all__ = ["NetworkCast", "call_with_new_trainers", "cast_of", "release"]

_trainer_callbacks: list[Callable[[gluon.Trainer], None]] = []


@dataclass(eq=False)
class NetworkCast:
    """One application of a policy to a network.

    Attributes
    ----------
    policy : Policy
    root : Block
        The network that was cast.
    undo : callable
        Takes the cast off.
    forward_order : dict with parameters as its keys
        As the forward pass met them, for messages.
    former_attributes : dict
        By block, the attributes that were replaced to set the block's own format.
    has_computed : bool
        Whether a forward pass of the network has completed.
    in_numpy : bool
        Whether MXNet's NumPy interface was switched on when the network was cast.
    layers : Layers
        Those whose roundings raise flags.
    """

    policy: Policy
    root: gluon.Block
    undo: Callable[[], None]
    forward_order: dict[gluon.Parameter, None] = field(default_factory=dict)
    former_attributes: dict[gluon.Block, dict[str, Any]] = field(default_factory=dict)
    has_computed: bool = False
    in_numpy: bool = field(default_factory=lambda: bool(mx.util.is_np_array()))
    layers: Layers = field(default_factory=Layers)

    def adopt(self, parameter: gluon.Parameter) -> None:
        """Attach the cast for :func:`cast_of`, and call callbacks with the parameter's Trainers.

        A Trainer that was made before the cast is among them.
        """
        parameter.mpgluon_cast = self
        parameter._set_trainer = partial(_set_trainer, parameter)
        make_copyable(parameter)
        if parameter._trainer is not None:
            _call_callbacks(parameter._trainer)


def release(parameter: gluon.Parameter) -> None:
    """Take off what :meth:`NetworkCast.adopt` put on, if anything."""
    for name in ("mpgluon_cast", "_set_trainer"):
        vars(parameter).pop(name, None)
    make_uncopyable(parameter)


def cast_of(parameter: gluon.Parameter) -> Optional[NetworkCast]:
    """Return the cast of the network that a parameter belongs to."""
    network_cast: Optional[NetworkCast] = vars(parameter).get("mpgluon_cast")
    return network_cast


def call_with_new_trainers(callback: Callable[[gluon.Trainer], None]) -> None:
    """Call ``callback`` with each Trainer of parameters of a cast network.

    It is called once per parameter, while the Trainer is still being made, or at the cast.
    """
    _trainer_callbacks.append(callback)


def _set_trainer(parameter: gluon.Parameter, trainer: Optional[gluon.Trainer]) -> None:
    """Set a parameter's Trainer as MXNet does, and call the callbacks."""
    type(parameter)._set_trainer(parameter, trainer)
    if trainer is not None:
        _call_callbacks(trainer)


def _call_callbacks(trainer: gluon.Trainer) -> None:
    for callback in _trainer_callbacks:
        callback(trainer)
