"""Networks that the tests of the flight recorder name, for fresh processes too."""

from __future__ import annotations

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn

LARGE = 3  # the layer whose weights become too large


def make_net(prefix="net_"):
    """Return a network whose normalization takes the size of its fourth layer away again."""
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(
            nn.Dense(8, in_units=6),
            nn.BatchNorm(in_channels=8),
            nn.Dropout(0.5),
            nn.Dense(8, in_units=8),
            nn.BatchNorm(in_channels=8),
            nn.Dense(3, in_units=8),
        )
    net.initialize(mx.init.Normal(0.5))
    return net


def make_deferred_net():
    """Return the first network without shapes and values."""
    net = nn.HybridSequential()
    net.add(nn.Dense(8), nn.BatchNorm(), nn.Dropout(0.5), nn.Dense(8), nn.BatchNorm(), nn.Dense(3))
    return net


def make_line():
    """Return one weight of 1."""
    net = nn.HybridSequential()
    net.add(nn.Dense(1, in_units=1, use_bias=False, weight_initializer="ones"))
    net.initialize()
    return net


def number():
    return 3


def mean_loss(outputs, labels):
    """Return the loss as one number."""
    return gluon.loss.SoftmaxCrossEntropyLoss()(outputs, labels).mean()


def outputs_alone(outputs, _):
    """Return a loss whose gradient for the weight of `make_line` is the sum of the inputs."""
    return outputs
