"""Helpers of this folder: small networks, and how far right results may be apart."""

from __future__ import annotations

from mpgluon import FloatFormat, round_to
from mpgluon.base.blocks import set_value

import mxnet as mx
import numpy as np
import onnxruntime
import pytest
from helpers import in_sequence, outputs_of
from mxnet import gluon
from mxnet.gluon import nn
from test_networks import NETWORKS

EIGHTEEN_BITS = FloatFormat("18 bits", significand_bits=18, exponent_bits=8)
_REPRESENTATIVES = ("resnet18_v2", "mobilenetv3_small", "squeezenet1.1", "cifar_resnet20_v1")

every_network = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _REPRESENTATIVES else pytest.mark.slow)
        for name in NETWORKS
    ],
)


class Lambda(gluon.HybridBlock):
    """A block without parameters that computes one function of F and its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def hybrid_forward(self, F, *inputs):
        return self.function(F, *inputs)


def with_random_values(net: gluon.Block, seed: int = 0) -> gluon.Block:
    """Initialize a network whose shapes are known, statistics of BatchNorms included."""
    random = np.random.RandomState(seed)
    net.initialize()
    for name, parameter in net.collect_params().items():
        low, high = (0.5, 1.5) if name.endswith(("gamma", "running_var")) else (-0.5, 0.5)
        set_value(parameter, mx.nd.array(random.uniform(low, high, parameter.shape)))
    return net


def small_network(seed: int = 0) -> gluon.Block:
    """Return a network for images of 6 pixels, with a BatchNorm to fold and one that stays."""
    net = in_sequence(
        nn.Conv2D(8, 3, in_channels=3),
        nn.BatchNorm(in_channels=8),
        nn.Activation("relu"),
        nn.BatchNorm(in_channels=8),
        nn.Dropout(0.5),
        nn.Dense(5, in_units=8 * 4 * 4),
    )
    return with_random_values(net, seed)


def some_images(*shape: int, seed: int = 0) -> mx.nd.NDArray:
    return mx.nd.array(np.random.RandomState(seed).standard_normal(shape), dtype="float32")


def logits_of(net, images: mx.nd.NDArray) -> np.ndarray:
    """Return the first output of a network."""
    return outputs_of(net(images))[0].asnumpy()


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one.astype(np.float64) - other))


def effect_of_rounding(net: gluon.Block, images: mx.nd.NDArray, fmt: FloatFormat) -> float:
    """Return how far the logits move when weights and images are rounded to a format.

    It says how strongly a network passes roundings on.
    """
    reference = logits_of(net, images)
    weights = [p for p in net.collect_params().values() if p.data().ndim > 1]
    before = [weight.data().copy() for weight in weights]
    for weight in weights:
        weight.set_data(mx.nd.array(round_to(weight.data().asnumpy(), fmt)))
    moved = logits_of(net, mx.nd.array(round_to(images.asnumpy(), fmt)))
    for weight, value in zip(weights, before):
        weight.set_data(value)
    return distance(moved, reference)


def fp32_bound(net: gluon.Block, images: mx.nd.NDArray) -> float:
    """Return how far two right FP32 computations of a network may be apart.

    Rounding weights to 18 bits moves each product by up to 2**-18 of itself, at random. Adding K
    products in FP32, in whatever order, moves their sum by about sqrt(K / 2) * 2**-24 of a product
    for each, which is less for K up to 2 * 64**2; longer sums than the 4,608 of a convolution are
    added in parts. Times four: there are two computations, and both round elsewhere too.
    """
    return 4 * effect_of_rounding(net, images, EIGHTEEN_BITS)


def sixteen_bit_bound(net: gluon.Block, images: mx.nd.NDArray, fmt: FloatFormat) -> float:
    """Return how far a network in a 16-bit format may be from itself in FP32.

    As in the tests of precision: each layer rounds its result too, and so do the normalization
    and the sum behind it: four roundings in place of one, of the weights.
    """
    return 4 * effect_of_rounding(net, images, fmt)


def served(model, images: mx.nd.NDArray) -> np.ndarray:
    """Return the output that onnxruntime computes from an ONNX file, or from its bytes."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {"data": images.asnumpy()})[0]
