"""BN-Inception: the stages and the parameters of the paper's table, and a step in each format."""

from __future__ import annotations

from math import prod

from mpgluon import amp, cast_block
from mpgluon.tools.bn_inception import BNInception
from mpgluon.tools.zoo import build_network, refuse_unknown_network

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

# Channels and sides for an image of 224 pixels. The rows of stride 2, 3c and 4e, are printed with
# the side of their input; 4c, 4d and 4e with fewer channels than their columns add up to: 576, 576
# and 1024.
STAGES = [
    ("convolution", 64, 112), ("max pool", 64, 56), ("reduction", 64, 56),
    ("convolution", 192, 56), ("max pool", 192, 28), ("3a", 256, 28), ("3b", 320, 28),
    ("3c", 576, 14), ("4a", 576, 14), ("4b", 576, 14), ("4c", 608, 14), ("4d", 608, 14),
    ("4e", 1056, 7), ("5a", 1024, 7), ("5b", 1024, 7), ("avg pool", 1024, 1),
]  # fmt: skip


def test_stages_have_the_shapes_of_the_papers_table_and_parameters_are_as_many_as_elsewhere():
    net = BNInception()
    net.initialize()
    values = mx.nd.zeros((1, 3, 224, 224))
    for block, (name, channels, side) in zip(net.features, STAGES):
        values = block(values)
        assert values.shape == (1, channels, side, side), name
    assert net(mx.nd.zeros((2, 3, 224, 224))).shape == (2, 1000)
    by_kind = {True: 0, False: 0}
    for parameter in net.collect_params().values():
        by_kind[parameter.grad_req != "null"] += prod(parameter.shape)
    # The number of Caffe's and PyTorch's networks: weights, and biases of all 69 convolutions,
    # which their BatchNorm makes useless; running means and variances are not in it.
    assert by_kind[True] == 11_295_240
    convolutions = [p for name, p in net.collect_params(".*conv.*bias").items()]
    assert len(convolutions) == 69
    assert by_kind[False] == 2 * sum(prod(bias.shape) for bias in convolutions)


@pytest.mark.parametrize("image_size", [32, 75])
def test_it_is_built_by_name_for_images_of_other_sizes(image_size):
    refuse_unknown_network("bn_inception")
    net = build_network("bn_inception", classes=7, image_size=image_size, devices=[mx.cpu()])
    assert isinstance(net, BNInception)
    assert net(mx.nd.zeros((2, 3, image_size, image_size))).shape == (2, 7)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_network_learns_its_batch_in_each_format(dtype):
    mx.random.seed(0)
    np.random.seed(0)
    net = build_network("bn_inception", classes=4, image_size=64, devices=[mx.cpu()])
    if dtype == "float16":
        cast_block(net)
    elif dtype == "bfloat16":
        amp.autocast(net, dtype)
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": 0.05, "multi_precision": dtype == "float16"}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, loss_scale=128.0 if dtype == "float16" else "none")
    images, labels = mx.nd.random.normal(shape=(8, 3, 64, 64)), mx.nd.arange(8, dtype="int32") % 4
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    losses = []
    for _ in range(5):
        with autograd.record():
            loss = loss_fn(net(images), labels)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(len(labels))
        assert not amp.step_was_skipped(trainer)
        losses.append(float(loss.astype("float32").mean().asscalar()))
    assert losses[-1] < 0.5 * losses[0], losses
