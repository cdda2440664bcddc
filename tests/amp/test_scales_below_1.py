"""Loss scales below 1, for gradients that exceed 65504 by themselves."""

from __future__ import annotations

from mpgluon import DynamicLossScale, LossScaleCollapseError, amp

import mxnet as mx
import pytest
from helpers import BOTH, WAYS, in_sequence, initialized
from mxnet import autograd, gluon
from mxnet.gluon import nn

IMAGES, SIZE = 4, 128
PIXELS = IMAGES * SIZE * SIZE  # 65,536
DIFFERENCE = 2  # of each pixel from its target
GRADIENT = DIFFERENCE * PIXELS  # of the only weight: 2**17, more than float16 holds
LEARNING_RATE = 2.0**-18
each_way = pytest.mark.parametrize("way", ["cast float16", "autocast float16"])


def train(way, hybridize, loss_scale, steps, reduce=mx.nd.sum):
    """Train a weight of 1 that multiplies pixels of 1, and return it and its Trainer."""
    net = initialized(in_sequence(nn.Conv2D(1, 1, in_channels=1, use_bias=False)), mx.init.One())
    if way is not None:
        WAYS[way](net)
    net.hybridize(hybridize)
    options = {"learning_rate": LEARNING_RATE, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, loss_scale, max_consecutive_skips=3)
    images = mx.nd.ones((IMAGES, 1, SIZE, SIZE))
    for _ in range(steps):
        with autograd.record():
            squares = (net(images) - (1 - DIFFERENCE)) ** 2 / 2
            with amp.scale_loss(reduce(squares, axis=(1, 2, 3)), trainer) as scaled:
                scaled.backward()
        trainer.step(IMAGES)
    return net[0].weight.data().astype("float32").asscalar(), trainer


@each_way
@BOTH
def test_a_loss_summed_over_many_pixels_needs_a_scale_below_1(way, hybridize):
    with pytest.raises(LossScaleCollapseError, match=r"DynamicLossScale\(min_scale=2.0\*\*-10\)"):
        train(way, hybridize, DynamicLossScale(1.0), steps=3)
    # 2**17 and 2**16 are infinite in float16; the third step is made.
    weight, trainer = train(way, hybridize, DynamicLossScale(1.0, min_scale=2.0**-10), steps=3)
    assert (amp.skipped_steps(trainer), amp.loss_scale(trainer)) == (2, 2.0**-2)
    assert weight == 1 - LEARNING_RATE * GRADIENT / IMAGES
    assert weight == train(None, hybridize, "none", steps=1)[0]


@each_way
def test_a_static_scale_may_be_below_1_and_the_mean_over_pixels_needs_none(way):
    weight, trainer = train(way, True, 2.0**-4, steps=1)
    assert amp.skipped_steps(trainer) == 0
    assert weight == 1 - LEARNING_RATE * GRADIENT / IMAGES
    _, trainer = train(way, True, DynamicLossScale(2.0**10), steps=2, reduce=mx.nd.mean)
    assert amp.skipped_steps(trainer) == 0
