"""Autocast: FP32 parameters and gradients, 16-bit products."""

from __future__ import annotations

from mpgluon import BFLOAT16, FLOAT16, Policy, PrecisionError, amp, round_to

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    BOTH,
    STATIC,
    assert_same_bits,
    autocast_net,
    backward_from,
    gradients_of,
    in_sequence,
    initialized,
    parameters_of,
)
from mxnet import autograd, gluon
from mxnet.gluon import nn

FORMATS = pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16], ids=str)


def dense(values):
    net = initialized(nn.Dense(1, in_units=len(values), use_bias=False))
    net.weight.set_data(mx.nd.array([values]))
    return net


@FORMATS
@BOTH
def test_weights_and_data_are_rounded_where_they_are_used_and_nowhere_else(fmt, hybridize):
    a_bit_more = 1 + 2.0**-12  # not a number of either format
    net = dense([a_bit_more, 2])
    report = amp.autocast(net, fmt.name)
    net.hybridize(hybridize, **STATIC)
    data = mx.nd.array([[a_bit_more, 1]])
    data.attach_grad()
    with autograd.record():
        result = net(data)
    result.backward(mx.nd.array([[a_bit_more]]))
    assert report.parameters_cast == 0
    assert net.weight.data().dtype == net.weight.grad().dtype == result.dtype == np.float32
    assert net.weight.data().asnumpy().tolist() == [[a_bit_more, 2]]
    assert result.asscalar() == 3
    assert net.weight.grad().asnumpy().tolist() == [[1, 1]]
    assert data.grad.asnumpy().tolist() == [[1, 2]]


@FORMATS
def test_a_gradient_is_rounded_to_the_compute_format_and_held_in_fp32(fmt):
    net = autocast_net(dense(np.linspace(-1, 1, 64).tolist()), fmt.name)
    data = mx.nd.random.normal(shape=(5, 64))
    backward_from(lambda: net(data))
    gradient = net.weight.grad().asnumpy()
    assert gradient.dtype == np.float32
    assert np.array_equal(gradient, round_to(gradient, fmt))


@FORMATS
def test_small_updates_are_not_lost_as_the_parameters_are_their_own_masters(fmt):
    net = autocast_net(dense([1.0]), fmt.name)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 2.0**-12})
    for _ in range(8):
        backward_from(lambda: net(mx.nd.ones((1, 1))))
        trainer.step(1)
    assert net.weight.data().asscalar() == 1 - 8 * 2.0**-12


@BOTH
def test_a_policy_may_ask_for_a_float16_result(hybridize):
    net = autocast_net(dense([1.0, 2.0]), Policy("float32", "float16", "float16"))
    net.hybridize(hybridize)
    assert net(mx.nd.ones((1, 2))).dtype == np.float16


def test_autocast_refuses_to_be_a_context_manager():
    net = dense([1, 2])
    with pytest.raises(TypeError, match=r"without `with`.* until amp\.restore\(net\), now too"):  # noqa: SIM117
        with amp.autocast(net):
            pass
    with pytest.raises(PrecisionError, match="already cast"):
        amp.autocast(net)


@pytest.mark.parametrize("habit", ["cuda", None, mx.cpu()])
def test_autocast_without_a_network_says_what_it_takes(habit):
    with pytest.raises(TypeError, match=r"net must be a gluon\.Block, .* amp\.autocast\(net\)"):
        amp.autocast(habit)


@FORMATS
@BOTH
def test_a_kept_block_computes_in_fp32(fmt, hybridize):
    net = initialized(in_sequence(nn.Dense(4, in_units=3), nn.Dense(2, in_units=4)))
    data = mx.nd.random.normal(shape=(2, 3))
    assert amp.autocast(net, fmt.name, keep_fp32=(net[1],)).kept_fp32 == (net[1].name,)
    net.hybridize(hybridize)
    result, hidden = net(data).asnumpy(), net[0](data).astype("float32")
    amp.restore(net)
    assert np.array_equal(result, net[1](hidden).asnumpy())


@BOTH
@pytest.mark.parametrize("groups", [1, 32])
def test_convolutions_take_bfloat16_after_inference_in_fp32(groups, hybridize):
    # oneDNN has reordered the weights by then, depthwise ones in a way from which it finds none to
    # bfloat16.
    net = initialized(in_sequence(nn.Conv2D(32, 3, groups=groups, in_channels=32), nn.Dense(2)))
    images = mx.nd.random.normal(shape=(2, 32, 8, 8))
    net.hybridize(hybridize, **STATIC)
    net(images).wait_to_read()
    before = parameters_of(net)
    amp.autocast(net, "bfloat16")
    assert np.isfinite(net(images).asnumpy()).all()
    assert_same_bits(before, parameters_of(net))


def test_a_sparse_gradient_stays_sparse():
    net = autocast_net(initialized(nn.Embedding(50, 4, sparse_grad=True)))
    backward_from(lambda: net(mx.nd.array([3, 7, 7])).sum())
    gradient = net.weight.grad()
    assert (gradient.stype, gradient.indices.asnumpy().tolist()) == ("row_sparse", [3, 7])
    assert gradient.data.asnumpy().tolist() == [[1] * 4, [2] * 4]


def test_a_sparse_parameter_may_be_there():
    net = in_sequence(nn.Dense(2, in_units=3))
    net.params.get("rows", shape=(5, 4), stype="row_sparse")
    net.initialize()
    amp.autocast(net, "bfloat16")
    assert net(mx.nd.ones((1, 3))).shape == (1, 2)


@FORMATS
@BOTH
@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_add_up_over_batches_with_grad_req_add(fmt, hybridize, when):
    # oneDNN's own gradient of a cast to bfloat16 would leave the sum at zero.
    net = autocast_net(dense([1.0, 2.0]), fmt.name)
    net.hybridize(hybridize, **STATIC)
    if when == "after":  # a graph has been traced
        with autograd.record():
            net(mx.nd.ones((1, 2)))
    net.collect_params().setattr("grad_req", "add")
    for _ in range(3):
        backward_from(lambda: net(mx.nd.ones((1, 2))))
    assert gradients_of(net)["weight"].tolist() == [[3, 3]]


@FORMATS
@BOTH
@pytest.mark.parametrize("calls", [2, 7, 8, 12])  # MXNet adds 8 and more gradients in another way
def test_a_network_that_is_called_many_times_gets_the_gradient_of_every_call(fmt, hybridize, calls):
    net = autocast_net(dense([1.0, 2.0]), fmt.name)
    net.hybridize(hybridize, **STATIC)
    backward_from(lambda: sum(net(mx.nd.ones((1, 2))) for _ in range(calls)))
    assert gradients_of(net)["weight"].tolist() == [[calls, calls]]
