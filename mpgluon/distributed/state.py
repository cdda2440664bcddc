"""What processes have to agree on beside gradients: the state that they begin with, and hold."""

from __future__ import annotations

import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mxnet as mx
from mxnet import gluon

from mpgluon.checkpoint import load_checkpoint, save_checkpoint
from mpgluon.distributed.processes import Processes
from mpgluon.errors import DistributedError
from mpgluon.trainer import inside

__all__ = ["check_agreement", "share_state"]


def share_state(
    processes: Processes, net: gluon.Block, trainer: gluon.Trainer, **extra: Any
) -> dict[str, Any]:
    """Bring every process to rank 0's weights, masters, optimizer state, loss scale and randomness.

    A kvstore's broadcast covers the weights alone: float16 weights that agree may have FP32
    masters that do not. Call it before the first step, and after rank 0 alone has loaded a
    checkpoint; no other process needs the file. Together.

    Parameters
    ----------
    processes : Processes
    net : gluon.Block
        Initialized, and the same on all processes but for its values.
    trainer : gluon.Trainer
    **extra
        More to share, as JSON can hold it.

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
    inside.begin(trainer)  # loading would, and then on some processes only
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
    """Raise DistributedError unless all processes have bit for bit the same parameters; together.

    They should, after any number of steps: a difference means that gradients were changed after
    their sum on one process alone, or that the processes did not begin with the same values.
    """
    if processes.world_size == 1:
        return
    mx.nd.waitall()
    mine = {
        name: zlib.crc32(parameter.list_data()[0].asnumpy().tobytes())
        for name, parameter in net._collect_params_with_prefix().items()
    }
    checksums = processes.gather(mine, "comparison of parameters")
    for rank, theirs in enumerate(checksums):
        different = [name for name, value in checksums[0].items() if theirs.get(name) != value]
        if different:
            raise DistributedError(
                f"rank {rank} has other weights than rank 0: {len(different)} of {len(theirs)} "
                f"parameters differ, the first is {different[0]}. All processes must begin with "
                "share_state, and change gradients, weights and learning rates in the same way"
            )
