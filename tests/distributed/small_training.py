"""A network so small that ten steps take no time, trained by one process or by a part of several.

Every process sees its own rows of the same batches. Nothing here comes from
`mpgluon.distributed`: the kvstore, and what to do before the first step, are arguments.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import mpgluon
from mpgluon import DynamicLossScale, NoLossScale, amp
from mpgluon.base.blocks import interface, put_into_numpy

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

STEPS, GLOBAL_BATCH, FEATURES, CLASSES = 10, 8, 12, 5
LEARNING_RATE, MOMENTUM = 0.1, 0.9
FIRST_SCALE = 2.0**10  # no gradient of this network overflows with it
BAD_STEP = 4


def make_net(dtype: str, seed: int = 0, contexts: Any = None) -> gluon.HybridBlock:
    """Return the network: two dense layers around a LayerNorm, which needs no batch statistics."""
    mx.random.seed(seed)
    np.random.seed(seed)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(16, activation="relu", in_units=FEATURES))
        net.add(nn.LayerNorm(in_channels=16))
        net.add(nn.Dense(CLASSES, in_units=16))
    with interface(in_numpy=False):  # mx.np draws other numbers
        net.initialize(mx.init.Xavier(), ctx=contexts)
    if mx.util.is_np_array():
        for parameter in net.collect_params().values():
            put_into_numpy(parameter)
    if dtype == "float16":
        mpgluon.cast_block(net, "float16")
    elif dtype == "bfloat16":
        amp.autocast(net, "bfloat16")
    return net


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the whole batches of all steps."""
    random = np.random.RandomState(1)
    return [
        (
            random.randn(GLOBAL_BATCH, FEATURES).astype(np.float32),
            random.randint(CLASSES, size=GLOBAL_BATCH).astype(np.int32),
        )
        for _ in range(STEPS)
    ]


def train(
    dtype: str,
    *,
    store: Any = None,
    make_trainer: Optional[Callable[[gluon.Block, dict[str, Any]], gluon.Trainer]] = None,
    step_batch: int = GLOBAL_BATCH,
    begin: Optional[Callable[[gluon.Trainer], object]] = None,
    prepare: Optional[Callable[[gluon.Block, gluon.Trainer], object]] = None,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    poisoned_rank: Optional[int] = None,
    without_bad_step: bool = False,
) -> dict[str, np.ndarray]:
    """Train, and return weights, FP32 masters, the losses' scales and the skipped steps.

    ``poisoned_rank`` gets one infinite gradient in `BAD_STEP`. ``without_bad_step`` is the
    control: that step does not happen, and the scale is lowered by hand.
    """
    net = make_net(dtype, seed)
    scaled = dtype == "float16" or poisoned_rank is not None or without_bad_step
    scale = DynamicLossScale(init_scale=FIRST_SCALE) if scaled else NoLossScale()
    options = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM}
    options["multi_precision"] = dtype == "float16"
    if make_trainer is None:
        trainer = gluon.Trainer(
            net.collect_params(), "sgd", options, kvstore=store, update_on_kvstore=False
        )
    else:
        trainer = make_trainer(net, options)
    if begin is not None:
        begin(trainer)
    amp.init_trainer(trainer, scale)
    if prepare is not None:
        prepare(net, trainer)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    scales, skipped = [], []
    for step, (images, labels) in enumerate(batches()):
        if step == BAD_STEP and without_bad_step:
            scale.update(grads_finite=False)
            continue
        mine = slice(rank, None, world_size)
        inputs = array(images[mine], dtype="float16" if dtype == "float16" else "float32")
        with autograd.record():
            loss = loss_fn(net(inputs), array(labels[mine], dtype="int32"))
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        if step == BAD_STEP and rank == poisoned_rank:
            net[0].weight.grad()[0, 0] = math.inf
        scales.append(amp.loss_scale(trainer))
        trainer.step(step_batch)
        skipped.append(amp.step_was_skipped(trainer))
    values = {f"weight/{name}": p.data().asnumpy() for name, p in net.collect_params().items()}
    return {**values, **masters_of(trainer, net), "scales": scales, "skipped": skipped}


def masters_of(trainer: gluon.Trainer, net: gluon.Block) -> dict[str, np.ndarray]:
    """Return the FP32 masters of the float16 weights, as a checkpoint would hold them."""
    from mpgluon.checkpoint.saved import Run
    from mpgluon.checkpoint.trainer import export_optimizer

    return export_optimizer(Run(net, trainer)).arrays.get("master", {})
