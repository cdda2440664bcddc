"""Every network of the zoos and of ours trains in 16 bits, to the same bits hybridized or not.

The default run trains small networks of four families in four ways to 16 bits, and those built
from other blocks in one way, imperative and hybridized; ``slow`` is the rest of the matrix: other
ways, and deeper, wider and larger ones of the same blocks.
"""

from __future__ import annotations

import gc

from mpgluon import BFLOAT16, FLOAT16, round_to
from mpgluon_tools.zoo.bn_inception import BNInception
from mpgluon_tools.zoo.efficientnet_lite import EfficientNetLite0

import mxnet as mx
import numpy as np
import pytest
from gluoncv import model_zoo as gluoncv_zoo
from helpers import (
    SAME_BITS_HYBRIDIZED,
    STATIC,
    WAYS,
    assert_same_bits,
    gradients_of,
    initialized,
    outputs_of,
    parameters_of,
    train,
)
from mxnet import autograd, gluon
from mxnet.gluon.model_zoo import vision

CLASSES = 10
BATCH = 2

_GLUON = """
    resnet18_v1 resnet34_v1 resnet50_v1 resnet101_v1 resnet152_v1
    resnet18_v2 resnet34_v2 resnet50_v2 resnet101_v2 resnet152_v2
    vgg11 vgg13 vgg16 vgg19 vgg11_bn vgg13_bn vgg16_bn vgg19_bn
    alexnet densenet121 densenet161 densenet169 densenet201 squeezenet1.0 squeezenet1.1
    inceptionv3 mobilenet1.0 mobilenet0.75 mobilenet0.5 mobilenet0.25
    mobilenetv2_1.0 mobilenetv2_0.75 mobilenetv2_0.5 mobilenetv2_0.25
"""
_GLUONCV = """
    resnet18_v1b resnet50_v1b resnet50_v1d se_resnext50_32x4d mobilenetv3_small
    mobilenetv3_large cifar_resnet20_v1 cifar_resnet20_v2 googlenet
"""
NETWORKS = {
    **dict.fromkeys(_GLUON.split(), vision.get_model),
    **dict.fromkeys(_GLUONCV.split(), gluoncv_zoo.get_model),
    "bn_inception": lambda _, classes: BNInception(classes=classes),
    "efficientnet_lite0": lambda _, classes: EfficientNetLite0(classes=classes),
}
_IN_EVERY_WAY = ["resnet18_v1", "mobilenet0.25", "mobilenetv3_small", "cifar_resnet20_v1"]
_IN_ONE_WAY = [
    "resnet18_v2", "resnet50_v1", "alexnet", "cifar_resnet20_v2", "efficientnet_lite0",
    "squeezenet1.1", "googlenet", "mobilenetv2_0.25",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _free_the_network():
    """Cast blocks refer to each other: only the garbage collector frees their gigabytes."""
    yield
    gc.collect()


def image_size(name: str) -> int:
    """Return the smallest side at which the network works: fixed pooling windows need more."""
    if name.startswith("inception"):
        return 299
    if name.startswith(("densenet", "squeezenet", "googlenet")):
        return 224
    if name.startswith(("mobile", "efficientnet")):
        return 128  # with fewer pixels the statistics of a batch make a chaotic network
    return 32 if name.startswith(("vgg", "cifar")) else 64


def inputs_of(name: str) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    size = image_size(name)
    images = np.random.RandomState(0).standard_normal((BATCH, 3, size, size))
    return mx.nd.array(images, dtype="float32"), mx.nd.array([1, 7], dtype="int32")


def take_statistics_of(net: gluon.Block, images: mx.nd.NDArray) -> None:
    """Set every running statistic to the value for ``images``, as training would in time."""
    norms = _blocks_of_type(net, gluon.nn.BatchNorm)
    momenta = [norm._kwargs["momentum"] for norm in norms]
    for norm in norms:
        norm._kwargs["momentum"] = 0.0
    with autograd.record():
        total = sum(output.sum() for output in outputs_of(net(images)))
    total.backward()  # BatchNorm writes its statistics here
    for norm, momentum in zip(norms, momenta):
        norm._kwargs["momentum"] = momentum


def build(name: str, images: mx.nd.NDArray) -> gluon.Block:
    mx.random.seed(0)
    net = initialized(NETWORKS[name](name, classes=CLASSES), mx.init.Xavier())
    net(images)
    if name.startswith(("mobile", "google", "inception", "efficientnet")):
        # Without this their values shrink to subnormal numbers.
        take_statistics_of(net, images)
    return net


def test_the_list_of_networks_is_the_whole_zoo_of_gluon():
    with pytest.raises(ValueError, match="Available options are") as refused:
        vision.get_model("no such network")
    offered = str(refused.value).split("Available options are")[1].split()
    assert sorted(_GLUON.split()) == sorted(offered)


def with_rounded_weights(net: gluon.Block, way: str, images: mx.nd.NDArray) -> np.ndarray:
    """Return the logits in FP32 arithmetic of the 16-bit values of the weights and images."""
    fmt = BFLOAT16 if "bfloat16" in way else FLOAT16
    originals = {p: p.data().copy() for p in net.collect_params().values() if p.data().ndim > 1}
    for parameter, original in originals.items():
        parameter.set_data(mx.nd.array(round_to(original.asnumpy(), fmt)))
    logits = outputs_of(net(mx.nd.array(round_to(images.asnumpy(), fmt))))[0].asnumpy()
    for parameter, original in originals.items():
        parameter.set_data(original)
    return logits


def parameters_without_gradient(net: gluon.Block, images, labels) -> set[str]:
    """Return the parameters whose gradient is zero in FP32 too, behind a dead ReLU for example."""
    statistics = {p: p.data().copy() for p in net.collect_params().values() if p.grad_req == "null"}
    with autograd.record():
        loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
        loss = sum(loss_fn(output, labels) for output in outputs_of(net(images)))
    loss.backward()
    zero = {name for name, gradient in gradients_of(net).items() if not gradient.any()}
    for parameter, value in statistics.items():
        parameter.set_data(value)
    return zero


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other))


def check(name: str, way: str) -> None:
    images, labels = inputs_of(name)
    net = build(name, images)
    reference = outputs_of(net(images))[0].asnumpy()
    conditioning = distance(with_rounded_weights(net, way, images), reference)
    without_gradient = parameters_without_gradient(net, images, labels)
    results = []
    for hybridized in (False, True):
        net = build(name, images)
        before = parameters_of(net)
        report = WAYS[way](net)
        if hybridized:
            net.hybridize(**STATIC)
        assert not report.beyond_reach
        norms = _blocks_of_type(net, gluon.nn.BatchNorm)
        assert all(norm.gamma.dtype == norm.running_var.dtype == np.float32 for norm in norms)

        logits = outputs_of(net(images))[0]
        assert logits.dtype == np.float32
        logits = logits.asnumpy()
        # How strongly a network passes roundings on, rounding its weights alone tells. Each
        # convolution rounds its result too, and so do the normalization and the sum behind it:
        # four roundings in place of one.
        assert 0 < distance(logits, reference) <= 4 * conditioning

        steps = 3 if name in _IN_EVERY_WAY else 2
        losses = train(net, [images], labels, steps=steps)
        assert np.isfinite(losses).all()
        for parameter in net.collect_params().values():
            if parameter.grad_req != "null":
                assert parameter.grad().dtype == parameter.data().dtype
        gradients, after = gradients_of(net), parameters_of(net)
        assert [k for k, gradient in gradients.items() if not np.isfinite(gradient).all()] == []
        # A float16 bias may stand still (its FP32 master does not); weights do not.
        moved = {k for k in gradients if (after[k] != before[k]).any()}
        still = [k for k in gradients if after[k].ndim > 1 and k not in moved | without_gradient]
        assert still == []
        results.append({**after, "logits": logits, "losses": np.array(losses)})
    if way in SAME_BITS_HYBRIDIZED:
        assert_same_bits(*results)


def _blocks_of_type(net, kind):
    found = []
    net.apply(lambda block: found.append(block) if isinstance(block, kind) else None)
    return found


_DEFAULT = {(name, way) for name in _IN_EVERY_WAY for way in WAYS} | {
    (name, list(WAYS)[number % len(WAYS)]) for number, name in enumerate(_IN_ONE_WAY)
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if (name, way) in _DEFAULT else pytest.mark.slow)
        for name in NETWORKS
        for way in WAYS
    ],
)
def test_a_network_trains_close_to_fp32_and_in_float16_to_the_same_bits_hybridized(name, way):
    check(name, way)
