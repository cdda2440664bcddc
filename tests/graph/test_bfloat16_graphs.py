"""bfloat16 graphs on a CPU: native casts, and first convolutions in FP32 on rounded operands."""

from __future__ import annotations

from mpgluon import amp
from mpgluon.cast.arrays import mark
from mpgluon.graph.bfloat16 import compute_natively
from mpgluon.graph.nodes import Graph
from mpgluon.kernels import dtypes

import mxnet as mx
import numpy as np
import pytest
from helpers import EMULATED, STATIC, assert_same_bits, gradients_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mxnet import autograd
from mxnet.gluon import nn

pytestmark = pytest.mark.usefixtures("native_operators")


def operators_in(symbol):
    return [node.operator for node in Graph.read(symbol).nodes if not node.is_variable]


def test_casts_to_bfloat16_and_back_lose_the_identities_that_were_made_with_them():
    x = mark(mx.sym.var("x"), "float32")
    there_and_back = dtypes.cast(dtypes.cast(x, "bfloat16"), "float32") + mx.sym.identity(x)
    assert operators_in(there_and_back).count("_copy") == 3
    assert operators_in(compute_natively(there_and_back, {"x": "float32"}, shapes={})) == [
        "_mpgluon_to_bfloat16",
        "_mpgluon_from_bfloat16_in_blocks",
        "_copy",  # a user's own
        "elemwise_add",
    ]


def test_equal_casts_stay_apart_and_unknown_or_other_formats_as_they_were():
    x = mark(mx.sym.var("x"), "float32")
    twice = dtypes.cast(x, "bfloat16") + dtypes.cast(x, "bfloat16")
    nodes = Graph.read(compute_natively(twice, {"x": "float32"}, shapes={})).nodes
    numbers = [node.attributes for node in nodes if node.operator == "_mpgluon_to_bfloat16"]
    assert len(numbers) == 2
    assert numbers[0] != numbers[1]
    integers = dtypes.cast(mx.sym.var("n"), "bfloat16")  # nobody knows, and int32 is let through
    found = compute_natively(integers, {"n": "int32"}, shapes={})
    assert operators_in(found) == operators_in(integers)


def test_casts_of_parameters_and_of_values_with_eight_readers_leave_plain_arrays():
    # MXNet adds eight gradients and more in place, and takes the sum for a plain array.
    def casts(readers):
        x = mark(mx.sym.sigmoid(mx.sym.var("x")), "float32")
        symbol = mx.sym.Group([dtypes.cast(x, "bfloat16") for _ in range(readers)])
        return set(operators_in(compute_natively(symbol, {"x": "float32"}, shapes={})))

    assert casts(7) == {"sigmoid", "_mpgluon_to_bfloat16_in_blocks"}
    assert casts(8) == {"sigmoid", "_mpgluon_to_bfloat16"}


@pytest.mark.parametrize(("channels", "groups"), [(3, 1), (4, 1), (3, 2)])
def test_only_convolutions_of_images_are_computed_in_fp32_and_rounded_after_max_pooling(
    channels, groups
):
    x, weight = (mark(mx.sym.var(name), "float32") for name in ("x", "weight"))
    operands = dtypes.cast(x, "bfloat16"), dtypes.cast(weight, "bfloat16")
    options = {"kernel": (3, 3), "num_filter": 8, "num_group": groups, "no_bias": True}
    made = mx.sym.Convolution(*operands, **options)
    made = mx.sym.Activation(made, act_type="relu")
    pooled = mx.sym.Pooling(dtypes.cast(mark(made, "bfloat16"), "float32"), kernel=(2, 2))
    symbol = dtypes.cast(mark(pooled, "float32"), "bfloat16")
    shapes = {"weight": (8, channels, 3, 3)}
    found = operators_in(
        compute_natively(symbol, dict.fromkeys(("x", "weight"), "float32"), shapes=shapes)
    )
    between = ["Convolution", "Activation"]
    if (channels, groups) == (3, 1):
        rounded = ["_mpgluon_plain_both_8_8"] * 2
        assert found == [*rounded, *between, "Pooling", "_mpgluon_to_bfloat16_in_blocks"]
    else:
        between[0] = "Convolution" if groups == 1 else "_mpgluon_grouped_Convolution"
        at_the_head = ["_mpgluon_from_bfloat16_in_blocks", "_mpgluon_to_bfloat16_in_blocks"]
        pooling = ["_mpgluon_bfloat16_Pooling", *at_the_head]
        assert found == ["_mpgluon_to_bfloat16"] * 2 + between + pooling


@pytest.mark.parametrize(
    ("options", "is_own"),
    [
        ({"kernel": (2, 2)}, True),
        ({"kernel": (3, 3), "pool_type": "max", "pooling_convention": "full"}, True),
        ({"kernel": (2, 2), "pool_type": "avg"}, False),
        ({"kernel": (2, 2), "global_pool": True}, False),
        ({"kernel": (2, 2, 2)}, False),
        ({"kernel": (2, 2), "layout": "NHWC"}, False),
    ],
)
def test_max_pooling_of_images_between_casts_takes_bfloat16(options, is_own):
    x = dtypes.cast(mark(mx.sym.var("x"), "float32"), "bfloat16")
    pooled = mx.sym.Pooling(dtypes.cast(mark(x, "bfloat16"), "float32"), **options)
    symbol = dtypes.cast(mark(pooled, "float32"), "bfloat16")
    found = operators_in(compute_natively(symbol, {"x": "float32"}, shapes={}))
    assert ("_mpgluon_bfloat16_Pooling" in found) == is_own


def test_a_concatenation_that_an_average_reads_takes_bfloat16():
    x = dtypes.cast(mark(mx.sym.var("x"), "float32"), "bfloat16")
    wide = dtypes.cast(mark(x, "bfloat16"), "float32")
    joined = mx.sym.Concat(wide, wide)
    averages = mx.sym.Pooling(joined, kernel=(3, 3), pool_type="avg")
    heads = [dtypes.cast(mark(one, "float32"), "bfloat16") for one in (joined, averages)]
    found = operators_in(compute_natively(mx.sym.Group(heads), {"x": "float32"}, shapes={}))
    assert "_mpgluon_bfloat16_Concat" in found
    assert "Pooling" in found


class FirstLayers(nn.HybridSequential):
    """A convolution of images, and what may come behind it."""

    def __init__(self, channels, filters, groups, behind):
        super().__init__()
        options = {"groups": groups, "in_channels": channels, "strides": 2, "padding": 1}
        with self.name_scope():
            self.add(nn.Conv2D(filters, 3, **options))
            for kind in behind:
                self.add(
                    {
                        "norm": nn.BatchNorm,
                        "relu": lambda: nn.Activation("relu"),
                        "max": lambda: nn.MaxPool2D(3, 2),
                        "conv": lambda: nn.Conv2D(4, 1),
                    }[kind]()
                )


def results(policy, layers, *, hybridize=True, grad_req="write"):
    mx.random.seed(3)
    net = FirstLayers(*layers)
    net.initialize(mx.init.Xavier())
    images = mx.nd.random.normal(shape=(2, layers[0], 15, 14))
    net(images)
    amp.autocast(net, policy)
    net.hybridize(hybridize, **STATIC)
    net.collect_params().setattr("grad_req", grad_req)
    images.attach_grad(grad_req)
    for _ in range(2):
        with autograd.record():
            result = net(images)
            loss = (result * result).sum()
        loss.backward()
    return {"result": result.asnumpy(), "images": images.grad.asnumpy(), **gradients_of(net)}


first_layers = st.tuples(
    st.sampled_from((1, 2, 3)),
    st.sampled_from((6, 8, 16, 18, 32)),
    st.just(1),
    st.sampled_from(((), ("relu",), ("max",), ("relu", "max"))),
)


@pytest.mark.usefixtures("native_bfloat16")
@settings(max_examples=25, deadline=None)
@given(first_layers, st.sampled_from(("write", "add")))
def test_a_convolution_of_images_has_the_bits_of_fp32_on_rounded_operands(layers, grad_req):
    expected = results(EMULATED, layers, hybridize=False, grad_req=grad_req)
    assert_same_bits(results("bfloat16", layers, grad_req=grad_req), expected)


@pytest.mark.usefixtures("native_bfloat16")
@pytest.mark.parametrize("behind", [("relu", "max", "conv"), ("max", "conv"), ("norm", "relu")])
def test_what_follows_a_convolution_of_images_is_as_exact_as_in_emulated_bfloat16(behind):
    layers = (3, 32, 1, behind)
    expected, found = results(EMULATED, layers, hybridize=False), results("bfloat16", layers)
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        assert np.linalg.norm(found[name] - array) <= 2.0**-7 * np.linalg.norm(array)


@pytest.mark.usefixtures("native_bfloat16")
@pytest.mark.parametrize(("low", "high"), [(0, 6), (-0.3, 6.3), (2, -2), (-1, np.inf)])
def test_clip_between_casts_takes_bfloat16_and_has_their_bits(low, high, monkeypatch):
    class Clipped(nn.HybridSequential):
        def hybrid_forward(self, F, x):
            return self[1](F.clip(self[0](x), low, high))

    def run():
        mx.random.seed(3)
        net = Clipped()
        net.add(nn.Conv2D(32, 3, in_channels=16), nn.Conv2D(8, 1, in_channels=32))
        net.initialize(mx.init.Normal(1))
        amp.autocast(net, "bfloat16")
        net.hybridize(**STATIC)
        x = mx.nd.random.normal(shape=(2, 16, 9, 7))
        x[0, 0, 0, 0], x[1, 3, 4, 4] = np.nan, np.inf
        x.attach_grad()
        with autograd.record():
            result = net(x)
            loss = (result * mx.nd.random.normal(shape=result.shape)).sum()
        loss.backward()
        return {"result": result.asnumpy(), "x": x.grad.asnumpy(), **gradients_of(net)}

    found = run()
    monkeypatch.setattr("mpgluon.graph.bfloat16._clip_in_bfloat16", lambda *_: None)
    expected = run()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


class Joined(nn.HybridSequential):
    """Layers each of which takes all results before, as in a DenseNet."""

    def __init__(self, channels=32, growth=16):
        super().__init__()
        with self.name_scope():
            self.add(nn.Conv2D(channels, 3, in_channels=16, padding=1))
            for number in range(2):
                layer = nn.HybridSequential()
                inputs = channels + number * growth
                layer.add(nn.BatchNorm(in_channels=inputs), nn.Activation("relu"))
                layer.add(nn.Conv2D(growth, 3, padding=1, in_channels=inputs))
                self.add(layer)
            self.add(nn.BatchNorm(in_channels=channels + 2 * growth))

    def hybrid_forward(self, F, x):
        first, *layers, last = self._children.values()
        x = F.Pooling(first(x), kernel=(2, 2), stride=(2, 2), pool_type="avg")
        for layer in layers:
            x = F.concat(x, layer(x), dim=1)
        return F.relu(last(x)).mean(axis=(2, 3))


def run_joined(policy, sizes=(32, 16), **flags):
    mx.random.seed(3)
    net = Joined(*sizes)
    net.initialize(mx.init.Xavier())
    if policy is not None:
        amp.autocast(net, policy)
    net.hybridize(**flags)
    images = mx.nd.random.normal(shape=(4, 16, 14, 12))
    images.attach_grad()
    targets = mx.nd.random.normal(shape=(4, sizes[0] + 2 * sizes[1]))
    with autograd.record():
        result = net(images)
        loss = (result * targets).sum()
    loss.backward()
    return {"result": result.asnumpy(), "images": images.grad.asnumpy(), **gradients_of(net)}


@pytest.mark.usefixtures("native_bfloat16")
@pytest.mark.parametrize("sizes", [(32, 16), (20, 12)])
def test_what_is_joined_and_normalized_in_bfloat16_is_as_exact_as_emulated(sizes):
    exact, emulated = run_joined(None, sizes), run_joined(EMULATED, sizes)
    found = run_joined("bfloat16", sizes, **STATIC)
    for name, array in exact.items():
        norm = np.linalg.norm(array)
        if norm > 1e-3:  # gradients of biases before a BatchNorm are zero
            error = np.linalg.norm(found[name] - array)
            assert 0 < error <= 1.5 * np.linalg.norm(emulated[name] - array), name


@pytest.mark.usefixtures("native_bfloat16")
def test_only_values_that_are_rounded_in_any_case_are_held_in_bfloat16(monkeypatch):
    seen = []

    def remember(graph, *, written=Graph.symbol):
        seen.append(sorted(node.operator for node in graph.nodes))
        return written(graph)

    monkeypatch.setattr("mpgluon.graph.bfloat16.Graph.symbol", remember)
    run_joined("bfloat16", **STATIC)
    operators = next(one for one in seen if "_mpgluon_bfloat16_Concat" in one)
    assert operators.count("_mpgluon_bfloat16_Concat") == 2
    assert "Concat" not in operators
    # The last BatchNorm, whose ReLU is averaged, takes FP32; so does nothing else behind a Concat.
    assert operators.count("_mpgluon_from_bfloat16_in_blocks") == 2


@pytest.mark.parametrize(
    ("average", "is_own"),
    [
        (lambda x: mx.sym.contrib.AdaptiveAvgPooling2D(x), True),
        (lambda x: mx.sym.contrib.AdaptiveAvgPooling2D(x, output_size=1), True),
        (lambda x: mx.sym.contrib.AdaptiveAvgPooling2D(x, output_size=(1, 1)), True),
        (lambda x: mx.sym.Pooling(x, kernel=(9, 9), global_pool=True, pool_type="avg"), True),
        (lambda x: mx.sym.contrib.AdaptiveAvgPooling2D(x, output_size=2), False),
        (lambda x: mx.sym.contrib.AdaptiveAvgPooling2D(x, output_size=(1, 2)), False),
        (lambda x: mx.sym.Pooling(x, kernel=(2, 2), pool_type="avg"), False),
        (lambda x: mx.sym.Pooling(x, kernel=(1, 1), global_pool=True), False),
    ],
)
def test_averages_of_all_pixels_are_native_and_no_others(average, is_own):
    symbol = average(mark(mx.sym.var("x"), "float32"))
    rewritten = compute_natively(symbol, {"x": "float32"}, shapes={})
    assert ("_mpgluon_any_layout_Pooling" in operators_in(rewritten)) == is_own
    x = mx.nd.random.normal(shape=(2, 8, 4, 6))
    found, expected = (mx.nd.CachedOp(one)(x).asnumpy() for one in (rewritten, symbol))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


class Blocked(nn.HybridSequential):
    """A convolution's sum, and operators on its result from which no gradient arrives."""

    def hybrid_forward(self, F, x):
        (layer,) = self._children.values()
        y = layer(x)
        return y.sum() + sum(F.BlockGrad(one).sum() for one in self.blocked(F, y))

    def blocked(self, F, y):
        yield F.broadcast_mul(y, F.mean(y, axis=(2, 3), keepdims=True))
        yield F.clip(y, -1, 1)
        yield F.pad(y, mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 1, 1))
        yield F.Activation(y, act_type="relu")
        yield F.concat(y, y, dim=1)


@pytest.mark.parametrize("flags", [{}, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("policy", ["bfloat16", EMULATED, "float16"])
def test_operators_from_which_no_gradient_arrives_send_none(policy, flags, monkeypatch):
    def gradient():
        mx.random.seed(0)
        net = Blocked()
        net.add(nn.Conv2D(16, 3, in_channels=16))
        net.initialize()
        amp.autocast(net, policy)
        net.hybridize(**flags)
        x = mx.nd.random.normal(shape=(2, 16, 8, 8))
        x.attach_grad()
        with autograd.record():
            result = net(x)
        result.backward()
        return x.grad.asnumpy()

    found = gradient()
    monkeypatch.setattr(Blocked, "blocked", lambda *_: ())
    np.testing.assert_array_equal(found, gradient())


class OfItsShape(mx.init.Initializer):
    """Weights that depend on their shape alone, not on when they get it."""

    def _init_weight(self, name, array):
        array[:] = np.random.RandomState(0).standard_normal(array.shape)


@pytest.mark.parametrize("policy", ["bfloat16", EMULATED])
def test_a_network_whose_shapes_are_unknown_at_first_has_the_same_bits_as_one_that_knows(policy):
    def run(channels=(0, 0)):
        net = nn.HybridSequential()
        net.add(nn.Conv2D(32, 3, in_channels=channels[0]), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.Conv2D(8, 1, in_channels=channels[1]))
        net.initialize(OfItsShape())
        amp.autocast(net, policy)
        net.hybridize(**STATIC)
        images = mx.nd.array(np.random.RandomState(1).standard_normal((8, 64, 30, 31)))
        with autograd.record():
            result = net(images)
            loss = (result * result).sum()
        loss.backward()
        return {"result": result.asnumpy(), **gradients_of(net)}

    assert_same_bits(run(), run((64, 32)))
