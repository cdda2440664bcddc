"""A network for the commands of every_name.py, which find it in this folder."""

import mpgluon  # noqa: F401 - before MXNet

import mxnet as mx
from mxnet.gluon import nn


def make():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3, activation="relu"), nn.BatchNorm(in_channels=4))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(3, in_units=4))
    net.initialize(mx.init.Xavier())
    return net
