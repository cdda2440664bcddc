"""The run and the content that owners of parts of a checkpoint exchange with its table."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, NamedTuple

from mpgluon.base.archive import Arrays
from mpgluon.updates import gluon_trainer
from mpgluon.updates.masters import current_masters

from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["Apply", "Content", "Run"]

Apply = Callable[[], None]
"""Brings a run to a state that was read and checked; refuses nothing."""


class Content(NamedTuple):
    """A part of a checkpoint: fields of the header, and arrays by their kind and name."""

    fields: dict[str, Any]
    arrays: dict[str, Arrays]


@dataclass(frozen=True)
class Run:
    """A network and its Trainer, whose state is written to a checkpoint or replaced by one.

    Attributes
    ----------
    net : gluon.Block
    trainer : gluon.Trainer
    extra : dict
        The user's own values, as JSON can hold them.
    values, fp32_values : dict from a parameter's name to an array
        The parameters of a file that is being loaded, in the network's formats; and the FP32 values
        of those that had another format in the file.
    """

    net: gluon.Block
    trainer: gluon.Trainer
    extra: dict[str, Any] = field(default_factory=dict)
    values: Arrays = field(default_factory=dict)
    fp32_values: Arrays = field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[str, gluon.Parameter]:
        """The network's parameters by their places in it, which do not depend on the instance."""
        parameters: dict[str, gluon.Parameter] = self.net._collect_params_with_prefix()
        return parameters

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the Trainer's parameters by their indices in it.

        The Trainer numbers them by the order of their global names, in which ``dense10`` comes
        before ``dense8``.
        """
        places = {id(parameter): name for name, parameter in self.parameters.items()}
        parameters = enumerate(gluon_trainer.parameters_of(self.trainer))
        return {i: places.get(id(p), p.name) for i, p in parameters}

    @cached_property
    def masters(self) -> dict[int, NDArray]:
        """The Trainer's masters by their parameters' indices, as the weights are now."""
        return current_masters(self.trainer)

    @property
    def trained_elsewhere(self) -> list[str]:
        """The names of parameters that the Trainer trains and the network does not have."""
        own = {id(parameter) for parameter in self.parameters.values()}
        parameters = gluon_trainer.parameters_of(self.trainer)
        return [p.name for p in parameters if p.grad_req != "null" and id(p) not in own]

    @cached_property
    def indices(self) -> dict[str, int]:
        """The indices of the Trainer's parameters by their names; shared ones have several."""
        numbers = {id(p): i for i, p in enumerate(gluon_trainer.parameters_of(self.trainer))}
        places = {
            name: numbers[id(parameter)]
            for name, parameter in self.parameters.items()
            if id(parameter) in numbers
        }
        return {name: index for index, name in self.names.items()} | places
