"""Networks with planted faults, and batches to run them on."""

from __future__ import annotations

import mpgluon
from mpgluon import amp
from mpgluon.kernels.statistics import Statistics, statistics_in_numpy
from mpgluon_tools.diagnostics.observe import Batch
from mpgluon_tools.recorder.numerics.files import Tensor, TensorName

import mxnet as mx
import numpy as np
from helpers import backward_from, with_loss_scale
from mxnet import gluon
from mxnet.gluon import nn

WAYS = {
    "float32": lambda _: None,
    "float16": mpgluon.cast_block,
    "auto float16": lambda net: amp.autocast(net, "float16"),
    "auto bfloat16": lambda net: amp.autocast(net, "bfloat16"),
}


class Times(nn.HybridBlock):
    """Multiplies by a constant, forward and backward; by its root twice if float16 lacks it."""

    def __init__(self, factor, prefix):
        super().__init__(prefix=prefix)
        self._factors = [factor] if factor < 2.0**16 else [factor**0.5] * 2

    def hybrid_forward(self, F, x):
        for factor in self._factors:
            x = x * factor
        return x


class InTwoSteps(nn.HybridBlock):
    """Squares and takes the root again: the result is harmless, the square is not."""

    def hybrid_forward(self, F, x):
        return F.sqrt(F.broadcast_mul(x, x) + 1)


class Residual(nn.HybridBlock):
    def __init__(self, prefix):
        super().__init__(prefix=prefix)
        with self.name_scope():
            self.convolution = nn.Conv2D(4, 3, padding=1, in_channels=4)
            self.norm = nn.BatchNorm(in_channels=4)

    def hybrid_forward(self, F, x):
        return F.relu(self.norm(self.convolution(x)) + x)


def make_net(*extra, way="float32", hybridize=False):
    """Return convolution, residual block, the extra blocks, and a dense layer."""
    mx.random.seed(0)
    np.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, padding=1, in_channels=3), Residual("residual_"))
        net.add(*extra)
        net.add(nn.Dense(5, in_units=4 * 6 * 6))
    net.initialize(mx.init.Xavier())
    WAYS[way](net)
    net.hybridize(hybridize)
    return net


def scaled_trainer(net, loss_scale, learning_rate=2.0**-30):
    """Return a Trainer with masters and a loss scale."""
    options = {"learning_rate": learning_rate, "multi_precision": True}
    return with_loss_scale(gluon.Trainer(net.collect_params(), "sgd", options), loss_scale)


def backward(net, trainer, batch):
    backward_from(lambda: batch.loss_fn(net(batch.inputs), batch.labels), trainer)


def train_step(net, trainer, batch):
    backward(net, trainer, batch)
    trainer.step(4)


def make_batch():
    images = mx.nd.array(np.random.RandomState(1).standard_normal((4, 3, 6, 6)))
    labels = mx.nd.array([0, 1, 2, 3], dtype="int32")
    return Batch(images, labels, gluon.loss.SoftmaxCrossEntropyLoss())


def recorded(values, fmt="float32", kind="activation"):
    """Return the record of all numbers of a tensor."""
    numbers = np.array(values, np.float32)
    found = Statistics(statistics_in_numpy(numbers))
    return Tensor(TensorName(kind, "layer"), fmt, numbers.shape, found, array=numbers)
