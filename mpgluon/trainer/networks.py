"""The networks of a Trainer, and the cast that ``amp.init`` asks for before a Trainer is there."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Optional

from mpgluon.base.blocks import blocks_of, living_blocks
from mpgluon.cast.block import autocast, restore
from mpgluon.cast.network_cast import NetworkCast, cast_of
from mpgluon.cast.status_flags import Layers, StepFlags, joined
from mpgluon.updates import gluon_trainer

import mxnet as mx
from mxnet import gluon

__all__ = [
    "RequestedCast",
    "cast_networks_of",
    "casts_of",
    "flags_of_step",
    "layers_of",
    "request_cast",
]

_logger = logging.getLogger(__name__)


def casts_of(trainers: Iterable[gluon.Trainer]) -> list[NetworkCast]:
    """Return the cast of each network that parameters of Trainers belong to."""
    parameters = (p for trainer in trainers for p in gluon_trainer.parameters_of(trainer))
    return list(filter(None, dict.fromkeys(map(cast_of, parameters))))


def layers_of(trainers: Iterable[gluon.Trainer]) -> list[Layers]:
    """Return the layers of each cast network that parameters of Trainers belong to."""
    return list(dict.fromkeys(one.layers for one in casts_of(trainers)))


def flags_of_step(
    trainer: gluon.Trainer, together: Iterable[gluon.Trainer], *, good: bool
) -> StepFlags:
    """Take the layers' flags for a Trainer and those that step together with it."""
    if not good:
        mx.nd.waitall()  # what no gradient was wanted of may still be computed
    devices, networks = gluon_trainer.devices_of(trainer), layers_of(together)
    return joined([one.flags_of_step(devices, good=good) for one in networks])


@dataclass(frozen=True)
class RequestedCast:
    """The format and the operators that a user named, as arguments of a cast."""

    dtype: str
    keep_fp32: tuple[str, ...]
    compute_16: tuple[str, ...]

    def apply(self, net: gluon.Block) -> None:
        """Cast a network; its parameters stay FP32."""
        report = autocast(net, self.dtype, keep_fp32=self.keep_fp32, compute_16=self.compute_16)
        _logger.info("amp.init: %s", report)


# One for the process, as in contrib.amp: init is called before there is a Trainer to keep it in.
_requested: Optional[RequestedCast] = None


def request_cast(request: RequestedCast) -> None:
    """Make :func:`cast_networks_of` cast for each Trainer from now on."""
    global _requested
    _requested = request


def cast_networks_of(trainer: gluon.Trainer) -> None:
    """Cast the networks whose parameters a Trainer has as requested, unless they are cast.

    Nothing in Gluon leads from a parameter to its network, so all blocks are searched.
    """
    request = _requested
    if request is None:
        return
    trained = {p for p in gluon_trainer.parameters_of(trainer) if cast_of(p) is None}
    if not trained:
        return
    gc.collect()  # networks that are still in memory only because they refer to themselves
    # A block that only holds networks, such as a GAN's class, is not a network.
    callable_blocks = [block for block in living_blocks(gluon.Block) if _can_be_called(block)]
    parts = {child for block in callable_blocks for child in list(blocks_of(block))[1:]}
    networks = [
        block
        for block in callable_blocks
        if block not in parts and trained & set(block.collect_params().values())
    ]
    if not networks:
        raise ValueError(
            "amp.init was called, and no network with the Trainer's parameters is left to cast; "
            "keep a reference to the network, or call amp.autocast(net) and leave amp.init out"
        )
    with ExitStack() as undone:
        for net in networks:
            request.apply(net)
            undone.callback(restore, net)  # if the next one is refused
        undone.pop_all()


def _can_be_called(block: gluon.Block) -> bool:
    """Whether the class of a block defines ``forward`` or ``hybrid_forward``."""
    kind = type(block)
    if kind.forward is gluon.HybridBlock.forward:
        return kind.hybrid_forward is not gluon.HybridBlock.hybrid_forward
    return kind.forward is not gluon.Block.forward
