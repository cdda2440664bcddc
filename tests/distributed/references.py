"""Expected results of several processes, computed by one process and NumPy."""

from __future__ import annotations

from mpgluon import DynamicLossScale, amp

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from small_training import FIRST_SCALE, LEARNING_RATE, MOMENTUM, batches, make_net, masters_of


def train_part_after_part(dtype: str, parts: int) -> dict[str, np.ndarray]:
    """Train on all batches in one process, which takes every part of a batch after the other."""
    return train_on_parts(
        dtype, [[(x[part::parts], y[part::parts]) for part in range(parts)] for x, y in batches()]
    )


def train_on_parts(
    dtype: str, steps: list[list[tuple[np.ndarray, np.ndarray]]], seed: int = 0
) -> dict[str, np.ndarray]:
    """Train in one process, with gradients that NumPy adds up in float64 and rounds once.

    ``steps`` has the parts of each step's batch, which one rank after the other would take.
    """
    net = make_net(dtype, seed)
    options = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM}
    options["multi_precision"] = dtype == "float16"
    trainer = gluon.Trainer(net.collect_params(), "sgd", options, kvstore=None)
    amp.init_trainer(
        trainer, DynamicLossScale(init_scale=FIRST_SCALE) if dtype == "float16" else "none"
    )
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    parameters = net.collect_params()
    for parts in steps:
        sums = dict.fromkeys(parameters, 0.0)
        for images, labels in parts:
            inputs = mx.nd.array(images, dtype="float16" if dtype == "float16" else "float32")
            with autograd.record():
                loss = loss_fn(net(inputs), mx.nd.array(labels, dtype="int32"))
                with amp.scale_loss(loss, trainer) as scaled_loss:
                    autograd.backward(scaled_loss)
            for name, parameter in parameters.items():
                sums[name] = sums[name] + parameter.grad().asnumpy().astype(np.float64)
        for name, parameter in parameters.items():
            gradient = parameter.grad()
            gradient[:] = mx.nd.array(sums[name].astype(gradient.dtype), dtype=gradient.dtype)
        trainer.step(sum(len(labels) for _, labels in parts))
    values = {f"weight/{name}": p.data().asnumpy() for name, p in parameters.items()}
    return {**values, **masters_of(trainer, net)}


def part_of(results: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Return the results whose names begin with ``name/``, without that."""
    prefix = f"{name}/"
    part = {key[len(prefix) :]: value for key, value in results.items() if key.startswith(prefix)}
    assert part
    return part


def numbers_of(results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: value for key, value in results.items() if key not in ("scales", "skipped")}
