"""What MXNet's contestants do: a layer, a training step, a prediction, in each library and format.

Each factory returns a function that does it once, waits for it and returns what came of it; and
facts about it, for :mod:`benchmarks.child`. ``library`` is ``"gluon"`` (plain MXNet,
float32), ``"mpgluon"`` or ``"contrib.amp"`` (``mxnet.contrib.amp``, bfloat16). mpgluon's float16 is
the cast network unless a training step asks for autocast, its bfloat16 autocast.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any, Callable, Optional

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp as contrib_amp
from mxnet.gluon import nn

from mpgluon import amp, native
from mpgluon.cast.block import cast_block
from mpgluon.deployment import inference_network
from mpgluon.devices import parse_devices
from mpgluon.diagnostics import alignment_report
from mpgluon.numerics.loss_scale import as_loss_scale
from mpgluon.numerics.policy import Policy
from mpgluon.training.networks import build_network

__all__ = ["inference", "layer", "training"]

Prepared = tuple[Callable[[], mx.nd.NDArray], dict[str, Any]]

_CLASSES = 1000
# So small that all rounds see nearly the same network: one that has learnt its batch by heart has
# gradients so small that some processors are slow at them.
_LEARNING_RATE = 2.0**-20
_MOST_SKIPS = 24  # until a loss scale of 2**24 is down to 1
_ROOM = 2  # halvings more, because dropout makes some steps' gradients larger than others'


def layer(
    *, library: str, dtype: str, kind: str, batch_size: int, size: int, device: str = "cpu"
) -> Prepared:
    """Prepare one layer, forward and backward, with gradients of its input and its parameters.

    Parameters
    ----------
    library, dtype : str
    kind : {"dense", "convolution"}
        A matrix product, or a convolution of 3 x 3.
    batch_size : int
    size : int
        Inputs and outputs of the dense layer; or the side of the image, which has 128 channels.
    device : str
    """
    (ctx,) = _begin(library, device)
    if kind == "dense":
        net, sides = nn.Dense(size, in_units=size), [size]
    else:
        net = nn.Conv2D(128, kernel_size=3, padding=1, in_channels=128)
        sides = [128, size, size]
    net.initialize(mx.init.Xavier(), ctx=ctx)
    _prepare(net, library, dtype)
    data = mx.nd.random.normal(shape=(batch_size, *sides), ctx=ctx)
    data.attach_grad()

    def run() -> mx.nd.NDArray:
        with autograd.record():
            result = net(data)
        result.backward()
        mx.nd.waitall()
        return data.grad

    return run, _facts(library, dtype)


def training(
    *,
    library: str,
    dtype: str,
    loss_scale: Optional[str],
    model: str,
    batch_size: int,
    image_size: int,
    device: str = "cpu",
    autocast: bool = False,
    emulate: bool = False,
    counted: bool = False,
) -> Prepared:
    """Prepare a training step with SGD and momentum.

    Parameters
    ----------
    library, dtype : str
    loss_scale : {"dynamic", "none"} or None
        ``None`` is a stock Trainer. A dynamic scale is let shrink until no step is skipped, and
        then to a quarter.
    model : str
        A network of MXNet's or gluoncv's model zoo, with 1000 classes.
    batch_size, image_size : int
    device : str
    autocast : bool
        Whether float16 is autocast too: FP32 parameters.
    emulate : bool
        Whether bfloat16 is emulated even where the processor has it.
    counted : bool
        Whether to count the multiply-adds of a forward pass.
    """
    (ctx,) = _begin(library, device)
    net = build_network(model, classes=_CLASSES, image_size=image_size, devices=[ctx])
    images, labels = _batch(batch_size, image_size, ctx)
    facts = {"images": batch_size, **_facts(library, dtype, net)}
    if counted:
        facts["multiply_adds"] = alignment_report(net, images.shape).multiply_adds
    _prepare(net, library, dtype, autocast=autocast, emulate=emulate)
    options = {"learning_rate": _LEARNING_RATE, "momentum": 0.9}
    if dtype == "float16" and not autocast:
        options["multi_precision"] = True
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    scaled: Callable[[Any], Any] = nullcontext
    if loss_scale is not None and library == "contrib.amp":
        contrib_amp.init_trainer(trainer)
        scaled = partial(contrib_amp.scale_loss, optimizer_or_trainer=trainer)
    elif loss_scale is not None:
        scale = as_loss_scale(loss_scale)
        amp.init_trainer(trainer, scale)
        scaled = partial(amp.scale_loss, trainer=trainer)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

    def train() -> mx.nd.NDArray:
        with autograd.record():
            loss = loss_fn(net(images), labels)
            with scaled(loss) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(batch_size)
        mx.nd.waitall()
        return loss

    def is_skipping() -> bool:
        return library == "mpgluon" and loss_scale is not None and amp.step_was_skipped(trainer)

    def step() -> mx.nd.NDArray:
        loss = train()
        if is_skipping():
            raise RuntimeError("a step was skipped, which takes less time than one that is not")
        return loss

    for _ in range(_MOST_SKIPS):
        train()
        if not is_skipping():
            break
    if library == "mpgluon" and loss_scale == "dynamic":
        for _ in range(_ROOM):
            scale.update(grads_finite=False)
    return step, facts


def inference(
    *,
    library: str,
    dtype: str,
    folded: bool = False,
    model: str,
    batch_size: int,
    image_size: int,
    device: str = "cpu",
) -> Prepared:
    """Prepare a prediction.

    Parameters
    ----------
    library, dtype : str
    folded : bool
        Whether to make mpgluon's network for inference: without BatchNorm, and fused by oneDNN
        where that is right.
    model, batch_size, image_size, device
        As for :func:`training`.
    """
    (ctx,) = _begin(library, device)
    net = build_network(model, classes=_CLASSES, image_size=image_size, devices=[ctx])
    images, _ = _batch(batch_size, image_size, ctx)
    facts = {"images": batch_size, **_facts(library, dtype, net)}
    if folded:
        net = inference_network(net, dtype, fuse_for=images)
        if not net.fused:
            facts["note"] = "not fused"
    elif library == "contrib.amp":
        net.hybridize()
        net(images)
        net = contrib_amp.convert_hybrid_block(net, target_dtype=dtype, ctx=ctx)
        net.hybridize(static_alloc=True, static_shape=True)
    else:
        _prepare(net, library, dtype)

    def predict() -> mx.nd.NDArray:
        logits = net(images)
        logits.wait_to_read()
        return logits

    return predict, facts


def _begin(library: str, device: str) -> list[mx.Context]:
    """Return the device, and let the library change MXNet if that is its way."""
    devices = parse_devices(device)
    mx.random.seed(0)
    np.random.seed(0)
    if library == "contrib.amp":
        contrib_amp.init(target_dtype="bfloat16")
    return devices


def _prepare(
    net: gluon.HybridBlock,
    library: str,
    dtype: str,
    *,
    autocast: bool = False,
    emulate: bool = False,
) -> None:
    """Cast the network as the library does, and hybridize it."""
    if library == "mpgluon" and (dtype == "bfloat16" or autocast):
        amp.autocast(net, Policy("float32", dtype, "float32", emulate=emulate))
    elif library == "mpgluon" and dtype == "float16":
        cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)


def _batch(
    batch_size: int, image_size: int, ctx: mx.Context
) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    images = mx.nd.random.normal(shape=(batch_size, 3, image_size, image_size), ctx=ctx)
    return images, mx.nd.arange(batch_size, ctx=ctx, dtype="int32") % _CLASSES


def _facts(library: str, dtype: str, net: Optional[gluon.Block] = None) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if net is not None:
        facts["parameters"] = sum(
            prod(parameter.shape)
            for parameter in net.collect_params().values()
            if parameter.grad_req != "null"
        )
    if library == "mpgluon" and dtype == "float16" and not native.load():
        facts["note"] = "without native operators"
    return facts
