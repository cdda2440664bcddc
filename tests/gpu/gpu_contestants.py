"""Training steps on a GPU to be timed in one race, with the GPU's memory among their facts.

Factories for `benchmarks`, which starts each in a process of its own.
"""

from typing import Any, Callable

import mpgluon
from mpgluon import amp

import mxnet as mx
from mxnet import autograd, gluon

from recipes.training.networks import build_network

CLASSES = 1000
CASTS = {
    "float32": lambda _: None,
    "float16": mpgluon.cast_block,
    "amp": lambda net: amp.autocast(net, "float16"),
}


def training(
    *, way: str, model: str, batch_size: int, image_size: int
) -> tuple[Callable[[], None], dict[str, Any]]:
    """Prepare a training step with SGD and momentum, scaled unless it is FP32's.

    ``gpu_memory_mib`` among the facts is what MXNet's pool has taken by the third step: it gives
    nothing back in between. The CUDA context is not in it.
    """
    device = mx.gpu(0)
    mx.nd.ones(1, ctx=device).wait_to_read()  # the context
    free_before, _ = mx.context.gpu_memory_info(0)
    net = build_network(model, classes=CLASSES, image_size=image_size, devices=[device])
    CASTS[way](net)
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": 1e-4, "momentum": 0.9, "multi_precision": way == "float16"}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    # Begins where nothing overflows: a skipped step takes less time.
    amp.init_trainer(trainer, "none" if way == "float32" else mpgluon.DynamicLossScale(2.0**10))
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    shape = (batch_size, 3, image_size, image_size)
    images = mx.nd.random.normal(shape=shape, ctx=device)
    labels = mx.nd.arange(batch_size, ctx=device, dtype="int32") % CLASSES

    def step() -> None:
        with autograd.record():
            loss = loss_fn(net(images), labels)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(batch_size)
        mx.nd.waitall()
        assert not amp.step_was_skipped(trainer)

    for _ in range(3):
        step()
    free_after, _ = mx.context.gpu_memory_info(0)
    memory = (free_before - free_after) / 2**20
    return step, {"images": batch_size, "gpu_memory_mib": memory}
