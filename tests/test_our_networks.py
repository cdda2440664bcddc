"""Networks that no zoo has: the stages and parameters of their papers, and steps in each format."""

from math import prod

from mpgluon import amp, cast_block
from mpgluon.tools.zoo import build_network, refuse_unknown_network
from mpgluon_tools.zoo.bn_inception import BNInception
from mpgluon_tools.zoo.efficientnet_lite import EfficientNetLite0

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


def test_bn_inception_has_the_shapes_of_the_papers_table_and_as_many_parameters_as_elsewhere():
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


# Channels and sides behind each block of table 1 of EfficientNet's paper, for 224 pixels.
ROWS = {
    0: (16, 112), 2: (24, 56), 4: (40, 28), 7: (80, 14), 10: (112, 14), 14: (192, 7), 15: (320, 7)
}  # fmt: skip


def test_efficientnet_lite0_has_the_shapes_of_the_papers_table_and_its_number_of_parameters():
    net = EfficientNetLite0()
    net.initialize()
    values = net.conv_stem(mx.nd.zeros((1, 3, 225, 225)))
    assert values.shape == (1, 32, 112, 112)
    for place, block in enumerate(net.blocks):
        values = block(values)
        if place in ROWS:
            channels, side = ROWS[place]
            assert values.shape == (1, channels, side, side)
    assert net(mx.nd.zeros((2, 3, 224, 224))).shape == (2, 1000)
    parameters = net.collect_params().values()
    trained = sum(prod(one.shape) for one in parameters if one.grad_req != "null")
    assert trained == 4_652_008  # the 4.7 million of the article


@pytest.mark.parametrize("image_size", [32, 75])
@pytest.mark.parametrize(
    ("name", "block"), [("bn_inception", BNInception), ("efficientnet_lite0", EfficientNetLite0)]
)
def test_one_is_built_by_name_for_images_of_other_sizes(name, block, image_size):
    refuse_unknown_network(name)
    net = build_network(name, classes=7, image_size=image_size, devices=[mx.cpu()])
    assert isinstance(net, block)
    assert net(mx.nd.zeros((2, 3, image_size, image_size))).shape == (2, 7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "dtype",
    ["float16", *(pytest.param(one, marks=pytest.mark.slow) for one in ("float32", "bfloat16"))],
)
@pytest.mark.parametrize("name", ["bn_inception", "efficientnet_lite0"])
def test_a_network_learns_its_batch_in_each_format(name, dtype):
    mx.random.seed(0)
    np.random.seed(0)
    net = build_network(name, classes=4, image_size=64, devices=[mx.cpu()])
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
    for _ in range(8):
        with autograd.record():
            loss = loss_fn(net(images), labels)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(len(labels))
        assert not amp.step_was_skipped(trainer)
        losses.append(float(loss.astype("float32").mean().asscalar()))
    assert losses[-1] < 0.5 * losses[0], losses
