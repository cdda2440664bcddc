"""What is timed. Each function prepares functions that do one thing once and wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import mxnet as mx
from mxnet import autograd, gluon

from mpgluon import amp
from mpgluon.devices import parse_devices
from mpgluon.gluon_trainer import occupy
from mpgluon.loss_scale import DynamicLossScale
from mpgluon.precision.casting import cast_block
from mpgluon.training.networks import build_network

__all__ = ["StepCase", "loss_scaling"]


@dataclass(frozen=True)
class StepCase:
    """The training step to be timed.

    Attributes
    ----------
    model : str
        A network of MXNet's or gluoncv's model zoo.
    dtype : {"float32", "float16", "bfloat16"}
        float16 is the cast network with ``multi_precision``, bfloat16 is autocast.
    batch_size, image_size : int
    device : str
        Such as ``"cpu"`` or ``"gpu:0"``.
    """

    model: str = "resnet50_v1"
    dtype: str = "float32"
    batch_size: int = 8
    image_size: int = 224
    device: str = "cpu"


def loss_scaling(case: StepCase) -> dict[str, Callable[[], None]]:
    """Return a step of stock MXNet, and one with a dynamic loss scale, check and skip logic.

    With float16, stock MXNet keeps the masters in the first and mpgluon in the second.
    """
    return {"stock Trainer": _step(case, with_amp=False), "amp": _step(case, with_amp=True)}


def _step(case: StepCase, *, with_amp: bool) -> Callable[[], None]:
    (device,) = parse_devices(case.device)
    mx.random.seed(0)
    net = build_network(case.model, classes=1000, image_size=case.image_size, devices=[device])
    if case.dtype == "float16":
        cast_block(net)
    elif case.dtype != "float32":
        amp.autocast(net, case.dtype)
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": 1e-4, "momentum": 0.9, "multi_precision": case.dtype == "float16"}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    if with_amp:
        amp.init_trainer(trainer, DynamicLossScale(2.0**10))  # from where nothing overflows
    else:
        occupy(trainer, None)
    shape = (case.batch_size, 3, case.image_size, case.image_size)
    images = mx.nd.random.normal(shape=shape, ctx=device)
    labels = mx.nd.arange(case.batch_size, ctx=device)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

    def step() -> None:
        with autograd.record():
            loss: Any = loss_fn(net(images), labels)
            if with_amp:
                with amp.scale_loss(loss, trainer) as loss:
                    pass
        loss.backward()
        trainer.step(case.batch_size)
        mx.nd.waitall()

    return step
