"""The state of processes that must agree: before the first step, and after any step."""

from __future__ import annotations

import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mpgluon.checkpoint import load_checkpoint, save_checkpoint
from mpgluon.distributed.processes import Processes
from mpgluon.errors import DistributedError, TrainerStateError
from mpgluon.updates import gluon_trainer

import mxnet as mx
from mxnet import gluon

__all__ = ["begin", "check_agreement", "share_state"]


def begin(trainer: gluon.Trainer) -> None:
    """Initialize a Trainer's kvstore now, on all processes, with rank 0's weights.

    Call it right after the Trainer is created, before ``amp.init_trainer``. A stock Trainer does it
    inside its first step, whose gradients then belong to other weights, and those of ps-lite's
    workers (``kvstore="dist_sync"``) race with the initialization. Waits for the devices.

    Raises
    ------
    TrainerStateError
        If a parameter has no value yet because its shape is not known; nothing is changed.
    """
    without_values = []
    for parameter in gluon_trainer.parameters_of(trainer):
        try:
            parameter.list_data()
        except gluon.parameter.DeferredInitializationError:
            without_values.append(parameter.name)
    if without_values:
        raise TrainerStateError(
            f"{len(without_values)} parameters have no value yet that processes could share "
            f"({without_values[0]}, ...): their shapes are inferred in the first forward pass; "
            "call the network once on a batch of zeros, or create it with in_units and in_channels"
        )
    mx.nd.waitall()  # a running inference may change the layout of a weight
    gluon_trainer.begin(trainer)
    mx.nd.waitall()


def share_state(
    processes: Processes, net: gluon.Block, trainer: gluon.Trainer, **extra: Any
) -> dict[str, Any]:
    """Give all processes rank 0's weights, masters, optimizer state, loss scale and random state.

    A kvstore broadcasts only the weights: equal float16 weights may have different FP32 masters.
    Call it before the first step, and after rank 0 has loaded a checkpoint, whose file no other
    process needs. Collective.

    Parameters
    ----------
    processes : Processes
    net : gluon.Block
        Initialized, and the same on all processes except for its values.
    trainer : gluon.Trainer
    **extra
        Further values to share, which JSON can represent.

    Returns
    -------
    dict
        Rank 0's ``extra``.

    Raises
    ------
    CheckpointError
        If a process has another network or Trainer than rank 0.
    """
    if processes.world_size == 1:
        return extra
    gluon_trainer.begin(trainer)  # loading would do it on some processes only
    purpose = "the state to begin with"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.npz"
        if processes.is_first:
            save_checkpoint(path, net, trainer, **extra)
        content = processes.broadcast(path.read_bytes() if processes.is_first else b"", purpose)
        if processes.is_first:
            return extra
        path.write_bytes(content)
        return load_checkpoint(path, net, trainer)


def check_agreement(processes: Processes, net: gluon.Block) -> None:
    """Raise DistributedError unless all processes have the same parameters bit by bit; collective.

    A difference after any number of steps means that one process changed gradients after their sum,
    or that the processes began with different values.
    """
    if processes.world_size == 1:
        return
    mx.nd.waitall()
    checksum_of = {
        name: zlib.crc32(parameter.list_data()[0].asnumpy().tobytes())
        for name, parameter in net._collect_params_with_prefix().items()
    }
    checksums = processes.gather(checksum_of, "comparison of parameters")
    for rank, of_rank in enumerate(checksums):
        different = [name for name, value in checksums[0].items() if of_rank.get(name) != value]
        if different:
            raise DistributedError(
                f"rank {rank} has other weights than rank 0: {len(different)} of {len(of_rank)} "
                f"parameters differ, the first is {different[0]}. All processes must begin with "
                "share_state, and change gradients, weights and learning rates in the same way"
            )
