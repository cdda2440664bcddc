"""gluonfr's networks for faces with one of its losses of angles."""

from __future__ import annotations

from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from third_party_helpers import Case, check, every_way, every_way_and_format

pytest.importorskip("gluonfr", reason="gluonfr is not installed (make test WITH=third-party)")
from gluonfr.loss import ArcLoss
from gluonfr.model_zoo import get_mobile_facenet, se_resnet18_v2

pytestmark = pytest.mark.third_party

PEOPLE, BATCH_SIZE, SIZE = 10, 8, 112
NETWORKS = {"MobileFaceNet": get_mobile_facenet, "SE-ResNet-18": se_resnet18_v2}


def make(name):
    net = NETWORKS[name](classes=PEOPLE, weight_norm=True, feature_norm=True)
    net.initialize(mx.init.Xavier())
    with autograd.train_mode():  # inference changes the layout of convolutions' weights
        net(mx.nd.zeros((BATCH_SIZE, 3, SIZE, SIZE)))
    return net


def losses(net, step):
    random = np.random.default_rng(step)
    faces = mx.nd.array(random.standard_normal((BATCH_SIZE, 3, SIZE, SIZE)))
    _, angles = net(faces)
    return ArcLoss(PEOPLE, s=8)(angles, mx.nd.array(random.integers(0, PEOPLE, BATCH_SIZE)))


CASES = {
    name: Case(partial(make, name), losses, BATCH_SIZE, learning_rate=0.001, loss_scale=2.0**6)
    for name in NETWORKS
}


@every_way_and_format
def test_se_resnet_trains_in_16_bits_like_fp32(way, hybridize):
    check(CASES["SE-ResNet-18"], way, hybridize)


@every_way
def test_mobile_facenet_trains_in_float16_like_fp32(way, hybridize):
    check(CASES["MobileFaceNet"], way, hybridize)
