"""A policy's ``accumulation``: which products follow it, how a network runs, and refusals."""

from __future__ import annotations

import json

import mpgluon
from mpgluon import Policy, PrecisionError, amp, kernels
from mpgluon.cast import arithmetic
from mpgluon.cast.forward import forward_of
from mpgluon.formats.float_format import FLOAT16, round_to
from mpgluon.formats.tensor_core import TensorCoreSums

import mxnet as mx
import numpy as np
import pytest
from helpers import autocast_net, initialized
from mxnet import autograd
from mxnet.gluon import nn

pytestmark = pytest.mark.usefixtures("native_operators")

POLICIES = {
    **{f"float16 {name}": ("mixed_float16", name) for name in ("volta", "ampere", "hopper")},
    "cast volta": ("float16", "volta"),
    **{f"bfloat16 {name}": ("mixed_bfloat16", name) for name in ("ampere", "hopper")},
}
EACH_POLICY = pytest.mark.parametrize("policy", POLICIES)


def policy_of(name, accumulation=None):
    named, chosen = POLICIES[name]
    fmt = Policy.parse(named)
    return Policy(
        fmt.param_dtype,
        fmt.compute_dtype,
        fmt.output_dtype,
        None if accumulation == "float32" else TensorCoreSums(accumulation or chosen),
        emulate=fmt.compute_dtype == "bfloat16",
    )


class Attention(nn.HybridBlock):
    """Uses each kind of product, called in several ways."""

    def __init__(self):
        super().__init__(prefix="attention_")
        with self.name_scope():
            self.matrix = self.params.get("matrix", shape=(64, 64))

    def hybrid_forward(self, F, x, matrix):
        x = F.reshape(x, (0, 0, -1))
        mixed = F.batch_dot(lhs=F.batch_dot(x, x, transpose_b=True), rhs=x)
        projected = F.dot(F.transpose(mixed, (0, 2, 1)), matrix, transpose_b=True)
        return F.FullyConnected(
            weight=matrix, data=projected, no_bias=True, num_hidden=64, flatten=False
        )


def make_net(policy=None, *, hybridize=False, kept=()):
    """Return a network of all four kinds of products, cast."""
    mx.random.seed(0)
    np.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(
            nn.Conv2D(64, 3, 2, 1, groups=2, in_channels=4, activation="relu"),
            nn.BatchNorm(in_channels=64),
            nn.Conv2D(64, 3, padding=2, dilation=2, use_bias=False, in_channels=64),
            Attention(),
            nn.Dense(5, in_units=16 * 64),
        )
    net.initialize(mx.init.Xavier())
    if policy is not None:
        mpgluon.cast_block(net, policy, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, *kept))
    net.hybridize(hybridize, static_alloc=True, static_shape=True)
    return net


def trained_on(net):
    """Return the result of one batch and all gradients, then the result of an inference."""
    images = mx.nd.array(np.random.RandomState(1).randn(6, 4, 8, 8))
    images.attach_grad()
    with autograd.record():
        result = net(images)
        loss = (result.astype("float32") ** 2).sum()
    loss.backward()
    gradients = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
    return [array.asnumpy() for array in (result, images.grad, *gradients, net(images))]


def differing(one, other):
    return [i for i, pair in enumerate(zip(one, other)) if not np.array_equal(*pair)]


@EACH_POLICY
def test_imperative_and_hybridized_runs_have_equal_bits_that_fp32_sums_do_not_have(policy):
    imperative = trained_on(make_net(policy_of(policy)))
    hybridized = trained_on(make_net(policy_of(policy), hybridize=True))
    in_fp32 = trained_on(make_net(policy_of(policy, "float32")))
    assert differing(imperative, hybridized) == []
    assert len(differing(imperative, in_fp32)) > 3
    for one, other in zip(imperative, in_fp32):
        size = np.linalg.norm(other.astype(np.float64))
        assert np.linalg.norm(one.astype(np.float64) - other) < 0.02 * size


def test_a_dense_layer_rounds_the_native_sum_and_its_bias_once():
    net = initialized(nn.Dense(6, in_units=50), mx.init.Normal(1))
    amp.autocast(net, policy_of("float16 volta"))
    data = mx.nd.array(np.random.RandomState(0).randn(4, 50))
    wide = [
        mx.nd.array(round_to(array.asnumpy(), FLOAT16))
        for array in (data, net.weight.data(), net.bias.data())
    ]
    name = kernels.accumulating_operator("on_values_FullyConnected", FLOAT16, "volta")
    expected = kernels.invoke(name, *wide, num_hidden=6).asnumpy()
    np.testing.assert_array_equal(net(data).asnumpy(), round_to(expected, FLOAT16))


def test_layers_that_are_kept_in_fp32_are_summed_in_fp32():
    policy, plain = policy_of("float16 volta"), policy_of("float16 volta", "float32")
    everything = (nn.Conv2D, Attention, nn.Dense)
    results = [trained_on(make_net(one, kept=everything)) for one in (policy, plain)]
    assert differing(*results) == []


def test_an_exported_graph_has_no_operator_but_mxnets(tmp_path):
    net = make_net(policy_of("float16 hopper"), hybridize=True)
    net(mx.nd.ones((1, 4, 8, 8)))
    net.export(str(tmp_path / "net"))
    nodes = json.loads((tmp_path / "net-symbol.json").read_text())["nodes"]
    operators = {node["op"] for node in nodes}
    assert {"Convolution", "FullyConnected", "dot", "batch_dot"} <= operators
    assert not any("mpgluon" in operator for operator in operators)


class Loop(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.matrix = self.params.get("matrix", shape=(8, 8))

    def hybrid_forward(self, F, x, matrix):
        def body(row, state):
            state = F.dot(state, matrix) + row
            return state, state

        return F.contrib.foreach(body, x, F.zeros_like(F.slice_axis(x, 0, 0, 1)))[0]


def test_a_product_inside_a_traced_loop_is_refused_and_runs_imperatively():
    net = autocast_net(initialized(Loop()), policy_of("float16 hopper"))
    data = mx.nd.ones((2, 3, 8))
    assert net(data).shape[0] == 2
    net.hybridize()
    with pytest.raises(PrecisionError, match="imperative runs only; do not hybridize the block"):
        net(data)


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_on_a_gpu_it_is_refused_because_that_has_its_own_tensor_cores(compute):
    policy = Policy("float32", compute, "float32", products=TensorCoreSums("hopper"))
    with pytest.raises(PrecisionError, match=r"own Tensor Cores do; use mx\.cpu\(\)"):
        arithmetic.policy_arithmetic(policy, "gpu")


def test_without_native_operators_it_is_refused_and_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(kernels, "load", lambda: False)
    net = make_net()
    with pytest.raises(PrecisionError, match="needs the native operators"):
        amp.autocast(net, policy_of("float16 ampere"))
    assert forward_of(net) is None


def test_the_report_says_how_products_are_summed():
    net = make_net()
    report = amp.autocast(net, policy_of("float16 hopper"))
    assert "rounded once, summed as Hopper's Tensor Cores do" in str(report)
    amp.restore(net)
    assert "Tensor Cores" not in str(amp.autocast(net, "float16"))


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4)])
def test_products_of_empty_arrays_are_empty(shape):
    class Product(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            return F.batch_dot(x, x, transpose_b=True)

    with mx.util.np_shape(active=True):
        net = autocast_net(Product(), policy_of("float16 hopper"))
        with autograd.record():
            assert net(mx.nd.zeros(shape)).shape == (shape[0], shape[1], shape[1])


def test_an_export_that_only_mpgluon_could_load_is_refused(tmp_path):
    net = make_net(Policy.parse("params=float32,compute=float8_e4m3"), hybridize=True)
    net(mx.nd.ones((1, 4, 8, 8)))
    with pytest.raises(PrecisionError, match=r"export_mxnet\(net, path, dtype="):
        net.export(str(tmp_path / "net"))
    assert not list(tmp_path.iterdir())
