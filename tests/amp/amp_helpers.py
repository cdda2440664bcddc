"""Helpers of the tests of loss scaling: a small network, four batches, and control runs."""

from __future__ import annotations

from mpgluon import amp, cast_block
from mpgluon.formats.float_format import FLOAT16
from mpgluon.kernels.dtypes import cast

import mxnet as mx
import numpy as np
import pytest
from helpers import backward_from, with_loss_scale
from mxnet import autograd, gluon
from mxnet.gluon import nn

ONE, TWO = [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]
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
_OF_WEIGHT = {"dtype", "ctx", "grad_req", "value", "name"}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "float16"])
each_device_list = pytest.mark.parametrize("devices", [ONE, TWO], ids=["one device", "two devices"])


def make_net(dtype="float32", ctx=None, *, grad_req="write"):
    """Return dense, normalization, dense: in float16 it has gradients of both formats.

    ``dtype`` is "float32", "float16" for a cast network, or "autocast float16", for example.
    """
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
    elif dtype != "float32":
        amp.autocast(net, dtype.removeprefix("autocast "))
    for parameter in trained(net):
        parameter.grad_req = grad_req
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


def backward_on(net, devices, batch, trainers):
    """Run forward and backward with a share of the batch on each device."""
    shares = zip(*(gluon.utils.split_and_load(one, devices) for one in batch))
    backward_from(lambda: [LOSS(net(images), targets) for images, targets in shares], trainers)


def one_weight(dtype="float32", ctx=None, grad_req="write", value=0.0, name="weight"):
    """Return an initialized parameter with a single element."""
    weight = gluon.Parameter(name, shape=(1,), dtype=dtype, grad_req=grad_req)
    weight.initialize(mx.init.Constant(value), ctx=ctx)
    return weight


def weight_trainer(weight, loss_scale=8, learning_rate=1.0, **options):
    """Return a Trainer of one parameter that has a loss scale."""
    arguments = {"learning_rate": learning_rate, "multi_precision": True}
    return with_loss_scale(gluon.Trainer([weight], "sgd", arguments, **options), loss_scale)


def scaled_weight(loss_scale=8, learning_rate=1.0, **options):
    """Return a parameter with a single element, and its Trainer with a loss scale."""
    of_weight = {name: options.pop(name) for name in _OF_WEIGHT & set(options)}
    weight = one_weight(**of_weight)
    return weight, weight_trainer(weight, loss_scale, learning_rate, **options)


def scaled_net(
    dtype="float32", optimizer="sgd", loss_scale=None, *, ctx=None, grad_req="write", **options
):
    """Return the network of ``make_net``, and its Trainer, with a loss scale or without."""
    net = make_net(dtype, ctx, grad_req=grad_req)
    return net, make_trainer(net, optimizer, loss_scale, **options)


def give_gradient(weight, trainer, gradient):
    """Go backward from a scaled loss whose gradient on each device is ``gradient`` times S."""
    with autograd.record():
        losses = [(cast(one, "float32") + 1) * gradient for one in weight.list_data()]  # no 0 * inf
        with amp.scale_loss(losses, trainer) as scaled:
            autograd.backward(scaled)


def two_weights(make_scale, learning_rate=1.0, grad_req="write"):
    """Return two parameters of value 1, and a Trainer of each with ``make_scale()``."""
    pair = [one_weight(value=1.0, grad_req=grad_req, name=name) for name in "ab"]
    return pair, [weight_trainer(weight, make_scale(), learning_rate) for weight in pair]


def backward_of_two(pair, trainers, factors):
    """Scale one loss for some Trainers; a factor of 0 leaves its parameter out of the loss."""
    with autograd.record():
        loss = sum(w.data() * factor for w, factor in zip(pair, factors) if factor)
        with amp.scale_loss(loss, trainers) as scaled:
            scaled.backward()


class DoublingTrainer(gluon.Trainer):
    """Reduce gradients as Horovod's Trainer does: a sum over workers, averaged by ``_scale``."""

    def __init__(self, params, **options):
        super().__init__(params, "sgd", options, kvstore=None)
        self._scale /= 2

    def _allreduce_grads(self):
        for parameter in self._params:
            if parameter.grad_req != "null":
                parameter.grad()[:] *= 2


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
