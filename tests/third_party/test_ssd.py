"""gluoncv's SSD on ResNet-50, whose base is a SymbolBlock, with its own targets and loss."""

from __future__ import annotations

import gluoncv
import mxnet as mx
import numpy as np
import pytest
from gluoncv.loss import SSDMultiBoxLoss
from gluoncv.model_zoo.ssd.target import SSDTargetGenerator
from mxnet import autograd
from third_party_helpers import Case, check, every_way

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.filterwarnings("ignore:Cannot decide type:UserWarning"),  # of a FeatureExpander
]

SIZE, CLASSES, BATCH_SIZE = 96, 20, 2
# One object per image: its corners in pixels, and its class.
BOXES = mx.nd.array([[[8, 8, 60, 50]], [[20, 30, 90, 80]]])
OBJECTS = mx.nd.array([[[3]], [[7]]])


def make_ssd():
    net = gluoncv.model_zoo.ssd_512_resnet50_v1_voc(pretrained_base=False)
    net.initialize()
    with autograd.train_mode():  # predictions and anchors, without suppression
        net(mx.nd.zeros((1, 3, SIZE, SIZE)))
    # A FeatureExpander knows no initializers, so that scales of normalizations are random too.
    net.collect_params(".*weight").initialize(mx.init.Xavier(), force_reinit=True)
    net.collect_params(".*gamma").initialize(mx.init.One(), force_reinit=True)
    return net


def losses(net, step):
    images = np.random.default_rng(step).standard_normal((BATCH_SIZE, 3, SIZE, SIZE))
    classes, boxes, anchors = net(mx.nd.array(images))
    with autograd.pause():
        targets = SSDTargetGenerator(negative_mining_ratio=-1)(anchors, classes, BOXES, OBJECTS)
    summed, _, _ = SSDMultiBoxLoss()(classes, boxes, *targets[:2])
    return summed


@every_way
def test_ssd_trains_in_float16_like_fp32(way, hybridize):
    check(Case(make_ssd, losses, BATCH_SIZE, loss_scale=2.0**5), way, hybridize)
