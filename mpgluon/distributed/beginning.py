"""Rank 0's weights on all processes, before the first forward pass.

A stock Trainer initializes its kvstore inside its first step. The gradients of that step then
come from the weights that each process began with, and those of ps-lite's workers
(``kvstore="dist_sync"``) race with the initialization as well: half of all runs were wrong when
this was measured.
"""

from __future__ import annotations

import mxnet as mx
from mxnet import gluon

from mpgluon.errors import TrainerStateError
from mpgluon.trainer import inside

__all__ = ["begin"]


def begin(trainer: gluon.Trainer) -> None:
    """Initialize a Trainer's kvstore now, whichever it is; on all processes.

    Call it right after the Trainer is created, before ``amp.init_trainer``. Waits for the devices.

    Raises
    ------
    TrainerStateError
        If a parameter has no value yet because its shape is not known; nothing is changed then.
    """
    without_values = []
    for parameter in inside.parameters_of(trainer):
        try:
            parameter.list_data()
        except gluon.parameter.DeferredInitializationError:
            without_values.append(parameter.name)
    if without_values:
        raise TrainerStateError(
            f"{len(without_values)} parameters have no value yet that processes could share "
            f"({without_values[0]}, ...): their shapes become known in the first forward pass; "
            "call the network once on a batch of zeros, or give it in_units and in_channels"
        )
    mx.nd.waitall()  # a running inference may change the layout of a weight
    inside.begin(trainer)
    mx.nd.waitall()
