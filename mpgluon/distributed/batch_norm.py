"""BatchNorm over several devices and processes.

By default each device normalizes by the statistics of its part of a batch, and has its own running
statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from mpgluon.base.blocks import arrays_of
from mpgluon.distributed.processes import Processes
from mpgluon.errors import PrecisionError
from mpgluon.updates.average import WeightAverage

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import SyncBatchNorm

__all__ = ["average_batch_norm", "synchronize_batch_norm"]


def average_batch_norm(
    processes: Processes, net: gluon.Block, average: Optional[WeightAverage] = None
) -> None:
    """Replace BatchNorm's running statistics by their mean over all processes, in FP32; collective.

    Call it before a test or a checkpoint, which then do not depend on the process. Moving averages
    are linear: except for rounding, the number of calls makes no difference.

    Parameters
    ----------
    processes : Processes
    net : gluon.Block
    average : WeightAverage, optional
        Average of the network's weights, whose running statistics are replaced too.
    """
    if processes.world_size == 1:
        return
    running = [p for _, _, one in _batch_norms(net) for p in (one.running_mean, one.running_var)]
    statistics = [array for parameter in running for array in arrays_of(parameter)]
    if average is not None:
        averages = map(average.value_of, running)
        statistics += [array for array in averages if array is not None]
    if not statistics:
        return
    mx.nd.waitall()
    values = np.concatenate([array.asnumpy().ravel().astype(np.float32) for array in statistics])
    purpose = f"{values.size} statistics of BatchNorm"
    processes.gather(None, purpose)
    processes.sum_in_place(values, purpose)
    values /= processes.world_size
    begin = 0
    for array in statistics:
        mx.nd.array(values[begin : begin + array.size]).copyto(array)
        begin += array.size


def synchronize_batch_norm(net: gluon.Block, num_devices: int) -> list[str]:
    """Replace every BatchNorm by MXNet's SyncBatchNorm over the devices of this process.

    The new layers have the same parameters and compute in FP32, also in a cast or autocast network.
    Call it before ``hybridize``.

    Parameters
    ----------
    net : gluon.Block
        With initialized parameters, and not itself a BatchNorm.
    num_devices : int
        Each of them needs a part of every batch.

    Returns
    -------
    list of str
        The names of the replaced layers.

    Raises
    ------
    ValueError
        If a BatchNorm normalizes another axis than the second.
    PrecisionError
        If the devices are several CPUs, on which MXNet's layer deadlocks.
    """
    layers = list(_batch_norms(net))
    for _, _, layer in layers:
        contexts = layer.gamma.list_ctx()
        if num_devices > 1 and any(context.device_type == "cpu" for context in contexts):
            raise PrecisionError(
                f"MXNet's SyncBatchNorm hangs on several CPU devices; {layer.name} is on "
                f"{', '.join(map(str, contexts))}: use GPUs, or leave BatchNorm as it is"
            )
        if layer._kwargs["axis"] != 1:
            raise ValueError(
                f"{layer.name} normalizes axis {layer._kwargs['axis']}, and SyncBatchNorm only 1; "
                "leave BatchNorm as it is"
            )
    for parent, place, layer in layers:
        options = layer._kwargs
        replacement = SyncBatchNorm(
            in_channels=layer.gamma.shape[0],
            num_devices=num_devices,
            momentum=options["momentum"],
            epsilon=options["eps"],
            scale=not options["fix_gamma"],
            center=layer.beta.grad_req != "null",
            use_global_stats=options["use_global_stats"],
            prefix=layer.prefix,
            params=layer.params,
        )
        if getattr(parent, place, None) is layer:
            setattr(parent, place, replacement)
        else:
            parent._children[place] = replacement
    return [layer.name for _, _, layer in layers]


def _batch_norms(block: gluon.Block) -> Iterator[tuple[gluon.Block, str, nn.BatchNorm]]:
    """Yield each BatchNorm with its parent and its name there; SyncBatchNorm is a subclass."""
    for place, child in block._children.items():
        if isinstance(child, nn.BatchNorm):
            yield block, place, child
        else:
            yield from _batch_norms(child)
