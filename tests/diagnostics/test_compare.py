"""A network beside itself in FP32: the layer that spoils it is at the top, and keeping it helps."""

from __future__ import annotations

import math

import mxnet as mx
import numpy as np
import pytest
from diagnostics_helpers import Batch, InTwoSteps, Times, make_batch, make_net
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mpgluon
from mpgluon import BFLOAT16, FLOAT16, amp
from mpgluon.diagnostics.compare import compare_with_fp32, suggest_keep_fp32
from mpgluon.precision.forward import forward_of


class Cancelling(nn.HybridBlock):
    """Adds a large number and takes it away again: what was small is lost in 16 bits."""

    def hybrid_forward(self, F, x):
        return (x + 512) - 512


def casts_of(net):
    forwards = [forward_of(block) for block in (net, net[0], net[1], net[2])]
    return [(forward, forward and forward.kept) for forward in forwards]


def parameters_of(net):
    return [p.data().asnumpy().tobytes() for p in net.collect_params().values()]


@pytest.mark.parametrize(("dtype", "fmt"), [("float16", FLOAT16), ("bfloat16", BFLOAT16)])
def test_each_layer_introduces_some_rounding_errors_and_the_result_has_few(dtype, fmt):
    net = make_net()
    comparison = compare_with_fp32(net, make_batch(), dtype=dtype)
    names = [layer.block.name for layer in comparison.layers]
    assert names == ["net_conv0", "net_residual_conv0", "net_residual_batchnorm0", "net_dense0"]
    for layer in comparison.layers:
        if not isinstance(layer.block, nn.BatchNorm):  # computed in FP32, rounded once or not
            assert 0.1 * fmt.unit_roundoff < layer.introduced < 4 * fmt.unit_roundoff
        assert layer.output < 32 * fmt.unit_roundoff
    assert 0 < comparison.result < 32 * fmt.unit_roundoff


@pytest.mark.parametrize("way", ["float32", "float16", "auto float16"])
@pytest.mark.parametrize("hybridize", [False, True])
def test_the_layer_that_cancels_is_at_the_top_and_the_network_is_left_as_it_was(way, hybridize):
    net = make_net(Cancelling(prefix="cancelling_"), way=way, hybridize=hybridize)
    batch = make_batch()
    before, output = parameters_of(net), net(batch.inputs).asnumpy()
    before_casts = casts_of(net)
    comparison = compare_with_fp32(net, batch, loss_scale=64.0)
    worst, second, *_ = comparison.ranked()
    assert worst.block.name == "cancelling"
    assert worst.introduced > 20 * second.introduced
    assert str(comparison).splitlines()[2].split()[:2] == ["cancelling", "Cancelling"]
    assert parameters_of(net) == before
    assert np.array_equal(net(batch.inputs).asnumpy(), output)
    assert casts_of(net) == before_casts


def test_an_output_that_overflows_is_an_infinite_error():
    net = make_net(Times(2.0**9, "large_"), InTwoSteps(prefix="square_"), way="float16")
    comparison = compare_with_fp32(net, make_batch())
    assert comparison.ranked()[0].block.name == "square"
    assert comparison.ranked()[0].introduced == math.inf
    assert comparison.result == math.inf


@pytest.mark.parametrize("faulty", [Cancelling, InTwoSteps])
def test_the_suggested_blocks_kept_in_fp32_bring_the_measured_error(faulty):
    def make():
        fault = faulty(prefix="faulty_")
        if faulty is Cancelling:
            return make_net(fault), fault
        return make_net(Times(2.0**9, "up_"), fault, Times(2.0**-9, "down_")), fault

    net, fault = make()
    batch = make_batch()
    suggestion = suggest_keep_fp32(net, batch)
    assert list(suggestion.blocks) == [fault]
    assert suggestion.error_after < suggestion.error_before / 10
    assert "keep faulty in FP32: the error goes from" in str(suggestion)

    # Applied for real, to a network of its own.
    with autograd.train_mode():
        reference = net(batch.inputs).asnumpy()
        amp.autocast(net, "float16", keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, fault))
        result = net(batch.inputs).asnumpy()
    error = np.linalg.norm(result - reference) / np.linalg.norm(reference)
    assert error == pytest.approx(suggestion.error_after, rel=1e-3)  # both are sums of float32


def test_nothing_is_suggested_where_the_error_is_small():
    suggestion = suggest_keep_fp32(make_net(), make_batch())
    assert list(suggestion.blocks) == []
    assert suggestion.error_before == suggestion.error_after < 32 * FLOAT16.unit_roundoff
    assert str(suggestion).startswith("keep nothing more in FP32; the error is 0.00")


def test_a_limit_of_the_users_own_and_a_number_of_blocks_are_kept():
    net = make_net(
        Cancelling(prefix="one_"), nn.Dense(144, in_units=144), Cancelling(prefix="two_")
    )
    assert {b.name for b in suggest_keep_fp32(net, make_batch()).blocks} == {"one", "two"}
    assert len(suggest_keep_fp32(net, make_batch(), at_most=1).blocks) == 1
    assert list(suggest_keep_fp32(net, make_batch(), limit=10.0).blocks) == []


def test_a_block_that_is_called_twice_is_compared_twice():
    class Twice(nn.HybridBlock):
        def __init__(self):
            super().__init__(prefix="twice_")
            with self.name_scope():
                self.layer = nn.Dense(3, in_units=3)

        def hybrid_forward(self, F, x):
            return self.layer(F.relu(self.layer(x)))

    net = Twice()
    net.initialize(mx.init.Normal(0.5))
    batch = Batch(mx.nd.random.normal(shape=(4, 3)), None, lambda y, _: y)
    (layer,) = compare_with_fp32(net, batch).layers
    assert layer.block is net.layer
    assert 0 < layer.output < 32 * FLOAT16.unit_roundoff


@pytest.mark.parametrize(
    "layer",
    [
        lambda: gluon.rnn.LSTM(4, input_size=3),
        lambda: gluon.rnn.GRU(4, input_size=3, bidirectional=True),
    ],
    ids=["lstm", "bidirectional gru"],
)
def test_recurrent_layers_are_compared(layer):
    net = nn.HybridSequential()
    net.add(layer(), nn.Dense(2))
    net.initialize(mx.init.Normal(0.3))
    batch = Batch(mx.nd.random.normal(shape=(5, 2, 3)), None, lambda y, _: y)
    net(batch.inputs)
    comparison = compare_with_fp32(net, batch)
    assert 0 < comparison.layers[0].introduced < 32 * FLOAT16.unit_roundoff
    assert comparison.result < 32 * FLOAT16.unit_roundoff


def test_each_output_of_a_layer_is_compared_with_itself():
    class Two(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            y = F.dot(x, x)
            return y, F.broadcast_mul(y, y)

    class Net(nn.HybridBlock):
        def __init__(self):
            super().__init__(prefix="net_")
            with self.name_scope():
                self.two = Two(prefix="two_")

        def hybrid_forward(self, F, x):
            one, other = self.two(x)
            return F.broadcast_add(one, other)

    net = Net()
    net.initialize()
    batch = Batch(mx.nd.random.normal(shape=(4, 4)), None, lambda y, _: y)
    (layer,) = compare_with_fp32(net, batch).layers
    assert 0 < layer.introduced < 8 * FLOAT16.unit_roundoff


def test_dropout_is_no_error():
    net = make_net(nn.Dropout(0.5))
    comparison = compare_with_fp32(net, make_batch())
    assert comparison.result < 32 * FLOAT16.unit_roundoff
    assert net[2]._rate == 0.5
