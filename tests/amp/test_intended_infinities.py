"""Networks with intended infinities, and NaN that they throw away, train in FP16 as in FP32."""

from __future__ import annotations

from contextlib import nullcontext

import mpgluon
from mpgluon import DynamicLossScale, amp

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, backward_from, initialized, with_loss_scale
from mxnet import autograd, gluon
from mxnet.gluon import nn

WAYS = {
    "float32": lambda _: None,
    "cast": mpgluon.cast_block,
    "autocast": amp.autocast,
    "bfloat16": lambda net: amp.autocast(net, "bfloat16"),
}


class Network(nn.HybridBlock):
    """Two dense layers, with something between them that takes a mask of zeros and ones."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.Dense(6, in_units=6, flatten=False)
            self.last = nn.Dense(3, in_units=6)

    def hybrid_forward(self, F, x, mask):
        return self.last(self.between(F, self.first(x), mask))


class AddedMask(Network):
    """Attention weights behind a mask of -1e9 that is added."""

    def between(self, F, x, mask):
        return F.softmax(F.broadcast_add(x, (1 - mask) * -1e9)) * x


class ChosenMask(Network):
    """The same with a choice: in float16, -1e9 is infinite."""

    def between(self, F, x, mask):
        return F.softmax(F.where(mask, x, F.ones_like(x) * -1e9)) * x


class ExponentialMask(Network):
    """A factor of 0 that is made by an exponential of -1e9."""

    def between(self, F, x, mask):
        return F.broadcast_mul(x, F.exp((1 - mask) * -1e9))


class RowsWithoutAnything(Network):
    """A softmax of rows that are masked as a whole is NaN, and a choice throws it away."""

    def between(self, F, x, mask):
        nothing = F.zeros_like(mask) - np.inf
        weights = F.BlockGrad(F.softmax(F.where(mask, F.zeros_like(mask), nothing)))
        return F.where(mask, weights, F.zeros_like(weights)) * x


class LogarithmOfNothing(Network):
    """The logarithm of 0, which a choice throws away."""

    def between(self, F, x, mask):
        return F.where(mask, F.log(mask), F.zeros_like(mask)) + x


class LargestOfSome(Network):
    """Max pooling of numbers among which the masked ones are -inf."""

    def between(self, F, x, mask):
        some = F.where(mask, x, F.zeros_like(x) - np.inf).expand_dims(1)
        return x + F.Pooling(some, kernel=(6,), pool_type="max").reshape((0, 1)).broadcast_like(x)


class Steep(Network):
    """An infinity behind which a saturated function returns 1."""

    def between(self, F, x, mask):
        return F.tanh(F.BlockGrad(x) * mask * 2.0**15 * 2.0**15) + x


NETWORKS = Network.__subclasses__()


def trainer_of(net, loss_scale):
    options = {"learning_rate": 0.1, "multi_precision": True}
    return with_loss_scale(gluon.Trainer(net.collect_params(), "sgd", options), loss_scale)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", NETWORKS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("way", WAYS)
@BOTH
def test_no_step_is_skipped(kind, way, hybridize):
    mx.random.seed(0)
    net = initialized(kind(), mx.init.Xavier())
    WAYS[way](net)
    net.hybridize(hybridize)
    trainer = trainer_of(net, DynamicLossScale(2.0**4))
    numbers = np.random.default_rng(0)
    data = mx.nd.array(numbers.standard_normal((8, 6)))
    mask = (numbers.random((8, 6)) < 0.6).astype("float32")
    mask[:, 0] = kind is not RowsWithoutAnything  # otherwise rows have something to choose
    mask[3] *= kind is not RowsWithoutAnything
    labels, loss_fn = mx.nd.arange(8) % 3, gluon.loss.SoftmaxCrossEntropyLoss()
    losses = []
    for _ in range(20):
        loss = backward_from(lambda: loss_fn(net(data, mx.nd.array(mask)), labels), trainer)
        trainer.step(8)
        losses.append(loss.mean().asscalar())
    assert amp.skipped_steps(trainer) == 0
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("scale", [1, 64])
@pytest.mark.parametrize("length", [3, 3000], ids=["small loss", "large loss"])
@pytest.mark.parametrize("way", ["cast", "autocast"])
def test_a_nan_in_a_loss_skips_the_step_although_its_gradient_is_a_number(way, length, scale):
    net = initialized(nn.Dense(length, in_units=4), mx.init.Xavier())
    WAYS[way](net)
    trainer = trainer_of(net, scale)
    targets = mx.nd.ones((2, length))
    for bad in (False, True, False):
        before = net.weight.data().asnumpy()
        targets[0, 0] = np.nan if bad else 1
        with autograd.record():
            loss = mx.nd.abs(net(mx.nd.ones((2, 4))) - targets)  # the gradient is 0 at NaN
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
        trainer.step(2)
        assert amp.step_was_skipped(trainer) is bad
        assert (net.weight.data().asnumpy() == before).all() == bad


def test_no_loss_scale_leaves_gradients_as_they_are_in_gluon():
    net = initialized(nn.Dense(3, in_units=4), mx.init.Xavier())
    trainer = trainer_of(net, "none")
    targets = mx.nd.array([[np.nan, 1, 1], [1, 1, 1]])
    gradients = []
    for scale_loss in (lambda loss, _: nullcontext(loss), amp.scale_loss):
        with autograd.record():
            loss = mx.nd.abs(net(mx.nd.ones((2, 4))) - targets)  # the gradient is 0 at NaN
            with scale_loss(loss, trainer) as scaled:
                scaled.backward()
        gradients.append(net.weight.grad().asnumpy())
    assert np.isfinite(gradients[0]).all()
    assert (gradients[0] == gradients[1]).all()
