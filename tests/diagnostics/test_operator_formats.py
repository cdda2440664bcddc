"""Operators counted by the format in which they compute."""

from __future__ import annotations

import mpgluon
from mpgluon import amp, diagnostics
from mpgluon.diagnostics import Batch

import mxnet as mx
import pytest
from mxnet import gluon
from mxnet.gluon import nn


class Attention(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.batch_dot(F.softmax(F.batch_dot(x, x, transpose_b=True)), x) + x


def network():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(
            nn.Conv2D(4, 3, padding=1, in_channels=3),
            nn.BatchNorm(in_channels=4),
            nn.Activation("relu"),
            nn.HybridLambda(lambda F, x: F.reshape(x, (0, 0, -1))),
            Attention(prefix="attention_"),
            nn.Dense(5, in_units=4 * 36),
            nn.Dense(5, in_units=5),
        )
    net.initialize(mx.init.Xavier())
    return net, Batch(mx.nd.ones((2, 3, 6, 6)), mx.nd.array([0, 1]), softmax)


def softmax(result, labels):
    return gluon.loss.SoftmaxCrossEntropyLoss()(result.astype("float32"), labels)


def found(cast):
    net, batch = network()
    cast(net)
    return diagnostics.operator_formats(net, batch)


def test_without_a_cast_all_is_fp32():
    counted = found(lambda _: None)
    assert {fmt for _, fmt in counted.counts} == {"float32"}
    assert counted.calls("FullyConnected") == {"float32": 2}
    assert counted.calls("batch_dot") == {"float32": 2}


def test_an_operator_with_several_results_is_counted_once():
    class Halves(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            return sum([*F.split(x, 2), *mx.nd.split(x, 2)])

    net = Halves()
    mpgluon.cast_block(net)
    batch = Batch(mx.nd.ones((2, 4)), None, lambda result, _: result.astype("float32"))
    counts = diagnostics.operator_formats(net, batch).counts
    assert {name: count for (name, _), count in counts.items() if "add" not in name} == {
        "split": 1, "SliceChannel": 1,
    }  # fmt: skip


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize(
    ("cast", "product"),
    [
        (mpgluon.cast_block, "float16"),
        (amp.autocast, "float16"),
        (lambda net: amp.autocast(net, "bfloat16"), "bfloat16"),
        (lambda net: amp.autocast(net, mpgluon.Policy.parse("emulated_bfloat16")), "bfloat16"),
    ],
)
def test_products_in_16_bits_normalization_and_softmax_in_fp32(cast, product, hybridize):
    def cast_and_hybridize(net):
        cast(net)
        net.hybridize(hybridize)

    counted = found(cast_and_hybridize)
    for operator, calls in (("Convolution", 1), ("FullyConnected", 2), ("batch_dot", 2)):
        assert counted.calls(operator) == {product: calls}
    assert counted.calls("BatchNorm") == {"float32": 1}
    assert counted.calls("softmax") == {"float32": 1}


@pytest.mark.usefixtures("native_operators")
def test_products_of_eight_bits():
    counted = found(lambda net: amp.autocast(net, mpgluon.Policy.parse("mixed_float8")))
    assert counted.calls("Convolution") == {"float8_e4m3": 1}
    assert counted.calls("batch_dot") == {"bfloat16": 2}


def test_what_keep_fp32_names_is_in_the_table():
    def cast(net):
        mpgluon.cast_block(net, keep_fp32=[*mpgluon.NORMALIZATION_LAYERS, net[6]])

    counted = found(cast)
    assert counted.calls("FullyConnected") == {"float16": 1, "float32": 1}
    row = next(row for row in counted.table().rows if row[0] == "FullyConnected")
    assert row[-1] == "float32: net_dense1"
    assert str(counted) == str(counted.table())
