"""bfloat16 parameters: FP32 arrays of bfloat16's numbers, in a network that computes in it."""

from __future__ import annotations

import mpgluon
from mpgluon import Policy, PrecisionError, amp
from mpgluon.cast import fp32
from mpgluon.cast.arithmetic import policy_arithmetic
from mpgluon.diagnostics import check_training
from mpgluon.formats.float_format import BFLOAT16, round_to

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    BOTH,
    EMULATED,
    STATIC,
    assert_same_bits,
    cast_net,
    gradients_of,
    in_sequence,
    initialized,
    parameters_of,
)
from mxnet import autograd, gluon
from mxnet.gluon import nn

POLICY = Policy.parse("params=bfloat16,compute=bfloat16,emulate=true")


class Scaled(gluon.HybridBlock):
    """Multiplies by a parameter of its own, outside of any product."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.scale = self.params.get("scale", shape=(4, 1, 1), init=mx.init.Constant(1 / 3))

    def hybrid_forward(self, F, x, scale):
        return F.broadcast_mul(x, scale)


def network(*, seed=0, initialize=True):
    mx.random.seed(seed)
    net = in_sequence(
        nn.Conv2D(4, 3, in_channels=2),
        nn.BatchNorm(in_channels=4),
        Scaled(),
        nn.Activation("relu"),
        nn.Dense(3, in_units=64),
    )
    if initialize:
        net.initialize(mx.init.Normal(0.5))
    return net


def images():
    return mx.nd.array(np.random.RandomState(0).randn(4, 2, 6, 6))


def outputs_and_gradients(net):
    with autograd.record():
        outputs = net(images())
        loss = (outputs**2).sum()
    loss.backward()
    return outputs.asnumpy(), gradients_of(net)


@BOTH
def test_a_network_computes_as_one_whose_weights_were_rounded_before(hybridize):
    plain, cast = network(), network()
    before = parameters_of(plain)
    for block in (plain[0], plain[2], plain[4]):
        for parameter in block.collect_params().values():
            parameter.set_data(mx.nd.array(round_to(parameter.data().asnumpy(), BFLOAT16)))
    # Autocast gives operators other than products FP32 parameters; this result is then FP32.
    plain[2].hybrid_forward = lambda F, x, scale: F.broadcast_mul(x, F.identity(scale))
    report = mpgluon.cast_block(cast, POLICY)
    assert_same_bits(parameters_of(cast), parameters_of(plain))
    assert report.parameters_cast == 5
    assert "5 parameters cast to bfloat16 (FP32 arrays of its numbers), 4 left" in str(report)
    cast.hybridize(hybridize, **STATIC)
    found = [outputs_and_gradients(cast) for _ in range(2)][1]
    imperative = cast_net(network(), POLICY)
    expected = [outputs_and_gradients(imperative) for _ in range(2)][1]
    assert found[0].tobytes() == expected[0].tobytes()
    assert_same_bits(found[1], expected[1])
    for name in ("0.weight", "2.scale", "4.weight"):
        assert not (found[1][name].view(np.uint32) & 0xFFFF).any()  # gradients too
    mpgluon.restore(cast)
    restored = parameters_of(cast)
    assert_same_bits({n: restored[n] for n in restored if "running" not in n},
                     {n: before[n] for n in restored if "running" not in n})  # fmt: skip


@BOTH
def test_products_have_the_bits_of_autocast(hybridize):
    def run(way):
        mx.random.seed(0)
        net = in_sequence(nn.Conv2D(4, 3, in_channels=2), nn.Dense(3, in_units=64))
        net.initialize(mx.init.Normal(0.5))
        way(net)
        net.hybridize(hybridize, **STATIC)
        return outputs_and_gradients(net)

    found = run(lambda net: mpgluon.cast_block(net, POLICY))
    expected = run(lambda net: amp.autocast(net, EMULATED))
    assert found[0].tobytes() == expected[0].tobytes()
    assert_same_bits(found[1], expected[1])


@BOTH
def test_by_name_the_processor_computes_as_it_does_for_autocast(hybridize):
    def run(way):
        mx.random.seed(0)
        net = in_sequence(nn.Conv2D(16, 3, in_channels=16), nn.Dense(3, in_units=256))
        net.initialize(mx.init.Normal(0.5))
        report = way(net)
        net.hybridize(hybridize, **STATIC)
        return report, net(mx.nd.ones((2, 16, 6, 6))).asnumpy()

    report, found = run(lambda net: mpgluon.cast_block(net, "bfloat16"))
    autocast, expected = run(lambda net: amp.autocast(net, "bfloat16"))
    assert report.policy == Policy.parse("params=bfloat16,compute=bfloat16")
    assert report.arithmetic == autocast.arithmetic
    assert found.tobytes() == expected.tobytes()


def test_weights_that_are_initialized_or_set_after_the_cast_are_rounded_where_they_are_used():
    def run(late):
        net = cast_net(network(initialize=not late), POLICY)
        if late:
            mx.random.seed(0)
            net.initialize(mx.init.Normal(0.5))
        return net(images()).asnumpy()

    assert run(True).tobytes() == run(False).tobytes()


def test_restore_gives_back_the_values_from_before_the_cast():
    layer = initialized(nn.Dense(1, in_units=1, use_bias=False), mx.init.Constant(0.1))
    mpgluon.cast_block(layer, "bfloat16")
    assert fp32.format_of(layer.weight) == BFLOAT16
    assert layer.weight.data().asscalar() == np.float32(0.10009765625)
    layer.weight.data()[:] += 0  # still the same number
    mpgluon.restore(layer)
    assert layer.weight.data().asscalar() == np.float32(0.1)


def test_weights_that_become_infinite_are_warned_of(caplog):
    layer = initialized(nn.Dense(1, in_units=2, use_bias=False))
    layer.weight.set_data(mx.nd.array([[3.4e38, 3.39e38]]))
    mpgluon.cast_block(layer, "bfloat16")
    assert layer.weight.data().asnumpy().tolist() == [[np.inf, np.float32(BFLOAT16.max)]]
    (message,) = caplog.messages
    assert message.startswith("1 weights are beyond bfloat16's range (3.38953e+38)")


def test_kept_blocks_and_normalization_stay_fp32():
    net = network()
    mpgluon.cast_block(net, POLICY, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, net[4]))
    formats = {
        name: str(fp32.format_of(p)) for name, p in net._collect_params_with_prefix().items()
    }
    narrow = {name for name, fmt in formats.items() if fmt == "bfloat16"}
    assert narrow == {"0.weight", "0.bias", "2.scale"}


def test_a_gpu_is_refused_with_the_reason():
    with pytest.raises(PrecisionError, match="no bfloat16 kernels for a GPU; use float16"):
        policy_arithmetic(POLICY, "gpu")


def test_check_training_reports_the_policy():
    net = cast_net(network(), POLICY)
    for masters, way, expected in (
        (True, "nearest", "5 bfloat16 weights with FP32 masters"),
        (False, "nearest", "SGD updates 5 bfloat16 weights without FP32 masters"),
        (False, "kahan", "5 bfloat16 weights without any, updates rounded: kahan"),
    ):
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": masters})
        amp.init_trainer(trainer, "none", update_rounding=way)
        report = str(check_training(net, trainer))
        assert "parameters bfloat16, computation bfloat16" in report
        assert expected in report
        assert ("below 1/512 of their weight are lost" in report) == ("SGD" in expected)
