"""What the tests of loss scaling share: a small network, four batches, and control runs."""

from __future__ import annotations

from mpgluon import amp, cast_block
from mpgluon.formats.float_format import FLOAT16

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

BATCHES, BATCH_SIZE = 4, 8
BAD_BATCH = 2
OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": 0.1, "wd": 2.0**-7}),
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    "nag": ("nag", {"learning_rate": 0.1, "momentum": 0.9}),
    "adam": ("adam", {"learning_rate": 0.01}),
    "lamb": ("lamb", {"learning_rate": 0.01}),
}
LOSS = gluon.loss.L2Loss()
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def make_net(dtype="float32", ctx=None):
    """Return dense, normalization, dense: in float16 it has gradients of both formats."""
    np.random.seed(0)
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(
        nn.Dense(4, in_units=3, use_bias=False),  # a bias before a mean has no gradient
        nn.BatchNorm(in_channels=4),
        nn.Dense(2, in_units=4),
    )
    net.initialize(mx.init.Normal(0.5), ctx=ctx)
    if dtype == "float16":
        cast_block(net, "float16")
    return net


def make_trainer(net, optimizer="sgd", loss_scale=None, **options):
    name, arguments = OPTIMIZERS[optimizer]
    arguments = {**arguments, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), name, arguments, **options)
    if loss_scale is not None:
        amp.init_trainer(trainer, loss_scale)
    return trainer


def batches():
    rng = np.random.default_rng(0)
    for _ in range(BATCHES):
        images = rng.standard_normal((BATCH_SIZE, 3)).astype(np.float32)
        targets = rng.standard_normal((BATCH_SIZE, 2)).astype(np.float32)
        yield mx.nd.array(images), mx.nd.array(targets)


def backward(net, images, targets, trainer=None):
    """Run forward and backward, scaled if there is a Trainer to ask for a scale."""
    with autograd.record():
        loss = LOSS(net(images), targets)
        if trainer is not None:
            with amp.scale_loss(loss, trainer) as loss:
                loss.backward()
    if trainer is None:
        loss.backward()


def trained(net):
    """Return the trained parameters by name, without the prefix that differs between nets."""
    return [p for p in net.collect_params().values() if p.grad_req != "null"]


def weights(net):
    return [one.asnumpy() for p in trained(net) for one in p.list_data()]


def assert_no_subnormal_gradient(net):
    """Below 2**-14 float16 gradients lose bits that scaled ones keep: no control is possible."""
    for parameter in trained(net):
        size = np.abs(parameter.grad().asnumpy().astype(np.float64))
        assert ((size == 0) | (size >= FLOAT16.smallest_normal)).all()


def plain_run(net, optimizer="sgd", leave_out=None):
    """Train without any loss scale, leaving out one batch: the control."""
    trainer = make_trainer(net, optimizer)
    for number, batch in enumerate(batches()):
        if number != leave_out:
            backward(net, *batch)
            if net[0].weight.dtype == np.float16:
                assert_no_subnormal_gradient(net)
            trainer.step(BATCH_SIZE)
    return weights(net)


def scaled_run(net, loss_scale, optimizer="sgd", inject=None):
    """Train with a loss scale; ``inject(net)`` spoils gradients of batch 2.

    Returns the weights, the scale after each step, and whether each step was skipped.
    """
    trainer = make_trainer(net, optimizer, loss_scale)
    scales, skipped = [], []
    for number, batch in enumerate(batches()):
        backward(net, *batch, trainer)
        if inject is not None and number == BAD_BATCH:
            inject(net)
        trainer.step(BATCH_SIZE)
        scales.append(amp.loss_scale(trainer))
        skipped.append(amp.step_was_skipped(trainer))
    assert amp.skipped_steps(trainer) == sum(skipped)
    return weights(net), scales, skipped


def spoil(layer, name, value):
    def inject(net):
        gradient = getattr(net[layer], name).grad()
        gradient[(0,) * gradient.ndim] = value

    return inject


GRADIENTS = {  # name: (format of the network, which gradient, its dtype)
    "fp32": ("float32", (2, "weight"), np.float32),
    "fp32-first": ("float32", (0, "weight"), np.float32),
    "cast-float16": ("float16", (0, "weight"), np.float16),
    "cast-float16-bias": ("float16", (2, "bias"), np.float16),
    "cast-float32": ("float16", (1, "gamma"), np.float32),
}
