"""The state of processes that must agree: before the first step, and after any step."""

from __future__ import annotations

import copy
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mpgluon.checkpoint import load_checkpoint, save_checkpoint
from mpgluon.distributed.processes import Processes
from mpgluon.errors import DistributedError, TrainerStateError
from mpgluon.formats.loss_scale import NUMBERS
from mpgluon.trainer.step import TrainerState
from mpgluon.updates import gluon_trainer

import mxnet as mx
import numpy as np
from mxnet import gluon

__all__ = ["begin", "check_agreement", "numbers_of_step", "refuse_different_numbers", "share_state"]


def begin(trainer: gluon.Trainer) -> None:
    """Initialize a Trainer's kvstore now, on all processes, with rank 0's weights.

    Call it right after the Trainer is created, before ``amp.init_trainer``. A stock Trainer does it
    inside its first step, whose gradients then belong to other weights, and gradients of
    ps-lite's workers (``kvstore="dist_sync"``) race with the initialization. Waits for the devices.

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


def numbers_of_step(trainer: gluon.Trainer) -> dict[str, Any]:
    """Return the numbers by which a step turns gradients into an update.

    They are options of the optimizer and the parameters, the next learning rate, the rounding of
    updates, and the factors of the gradients.
    """
    optimizer = gluon_trainer.optimizer_of(trainer)
    numbers: dict[str, Any] = {
        name: np.asarray(value).item()
        for name, value in sorted(vars(optimizer).items())
        if isinstance(value, NUMBERS) and not name.startswith("_")
    }
    if optimizer.lr_scheduler is not None:  # of a copy: a call may change it
        rate = copy.copy(optimizer.lr_scheduler)(optimizer.num_update + 1)
        numbers["learning rate of the schedule"] = float(rate)
    for index, parameter in enumerate(gluon_trainer.parameters_of(trainer)):
        if (parameter.lr_mult, parameter.wd_mult) != (1, 1):
            multipliers = float(parameter.lr_mult), float(parameter.wd_mult)
            numbers[f"(lr_mult, wd_mult) of parameter {index}"] = multipliers
    for updater in gluon_trainer.updaters_of(trainer)[:1]:
        numbers["update_rounding"] = str(getattr(updater, "rounding", None))
    state = gluon_trainer.loss_scaler_of(trainer)
    if isinstance(state, TrainerState):
        now = state.gradients.now
        numbers["loss scale"] = now.divisor
        numbers["clip factor"] = 1.0 if now.clip is None else now.clip.coefficient
    return numbers


def refuse_different_numbers(
    processes: Processes, numbers: dict[str, Any], purpose: str, also: Any = None
) -> list[Any]:
    """Raise DistributedError unless all processes have the same numbers; a roll call if they do.

    Returns ``also`` of all processes, by rank, which travels with it.
    """
    checksum = zlib.crc32(repr(numbers).encode())
    checksums, of_all = zip(*processes.gather((checksum, also), purpose))
    if len(set(checksums)) == 1:
        return list(of_all)
    rows = processes.gather(numbers, "the numbers of a step that differ")
    differences = []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [repr(row.get(name)) for row in rows]
        if len(set(values)) > 1:
            each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            differences.append(f"{name} is {each}")
    raise DistributedError(
        f"this step would update the processes' weights differently: {'; '.join(differences)}. "
        "Set the same on all; the batch size of a step (rescale_grad is 1 over it) is that of all "
        "processes together: trainer.step(processes.total(len(labels)))"
    )
