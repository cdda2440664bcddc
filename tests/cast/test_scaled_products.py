"""Products of eight bits and fewer: scaled operands, FP32 sums, results in another format."""

from __future__ import annotations

from mpgluon import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    DynamicLossScale,
    Policy,
    PrecisionError,
    amp,
    kernels,
    round_to,
)
from mpgluon.cast.arithmetic import policy_arithmetic
from mpgluon.formats.scaling import round_scaled

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, STATIC, autocast_net, backward_from, in_sequence, initialized
from hypothesis import given, settings
from hypothesis import strategies as st
from mxnet import autograd, gluon
from mxnet.gluon import nn

native_operators = pytest.mark.usefixtures("native_operators")

FLOAT8 = "compute=float8_e4m3,gradient=float8_e5m2,between=bfloat16,scaling="
SCALINGS = pytest.mark.parametrize("scaling", ["none", "tensor", "mx"])


def operand(values, scaling, axis, fmt=FLOAT8_E4M3):
    """Round an operand whose product sums over an axis, without the code under test."""
    if scaling == "none":
        return round_to(values, fmt)
    return round_scaled(values, fmt, block=32 if scaling == "mx" else None, axis=axis)


def gradient(values, scaling, axis):
    return operand(values, scaling, axis, FLOAT8_E5M2)


def random_values(random, *shape):
    """Return bfloat16 numbers within three powers of two: products and sums of them are exact."""
    values = random.uniform(0.25, 2, shape) * random.choice([-1, 1], shape)
    return round_to(values.astype(np.float32), BFLOAT16)


class Middle(nn.HybridBlock):
    """One product between two others, which are the first and the last of the network."""

    def __init__(self, layer):
        super().__init__()
        with self.name_scope():
            self.first, self.layer, self.last = nn.Dense(1), layer, nn.Dense(1)

    def hybrid_forward(self, F, x):
        return self.layer(x)


def computed(layer, policy, data, weight, arriving, *, hybridize):
    """Return the result and both gradients of a layer in the middle of a network."""
    net = initialized(Middle(layer))
    layer.weight.set_data(mx.nd.array(weight))
    amp.autocast(net, Policy.parse(policy))
    net.hybridize(hybridize, **STATIC)
    images = mx.nd.array(data)
    images.attach_grad()
    with autograd.record():
        result = net(images)
    result.backward(mx.nd.array(arriving))
    for _ in range(2):  # the first inference may change how the weight lies in memory
        np.testing.assert_array_equal(net(images).asnumpy(), result.asnumpy())
    return [array.asnumpy() for array in (result, images.grad, layer.weight.grad())]


@pytest.mark.filterwarnings("ignore:Parameter .* is not used")
@native_operators
@SCALINGS
@BOTH
@settings(max_examples=12)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 70), st.integers(0, 100))
def test_a_dense_layer_multiplies_its_rounded_operands_exactly(
    scaling, hybridize, rows, width, units, seed
):
    random = np.random.RandomState(seed)
    data, weight = random_values(random, rows, width), random_values(random, units, width)
    arriving = random_values(random, rows, units) * np.float32(2.0**-9)
    found = computed(
        nn.Dense(units, in_units=width, use_bias=False),
        FLOAT8 + scaling,
        data,
        weight,
        arriving,
        hybridize=hybridize,
    )
    expected = (
        operand(data, scaling, 1) @ operand(weight, scaling, 1).T,
        gradient(arriving, scaling, 1) @ operand(weight, scaling, 0),
        gradient(arriving, scaling, 0).T @ operand(data, scaling, 0),
    )
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, round_to(other, BFLOAT16))


@pytest.mark.filterwarnings("ignore:Parameter .* is not used")
@native_operators
@SCALINGS
def test_scales_are_those_of_the_reference_for_every_magnitude(scaling):
    # A product with the identity shows the rounded operand. The largest numbers of rows are on both
    # sides of each border between two scales, which is at 1.75 times a power of two in E4M3; the
    # smallest become its subnormals, or nothing.
    exponents = np.repeat(np.arange(-128, 126), 3)
    rows = random_values(np.random.RandomState(0), len(exponents), 32) * 0.75
    rows[:, 0] = np.tile([1.7421875, 1.75, 1.7578125], len(rows) // 3)
    exponents = np.maximum(exponents[:, None] - np.arange(32) // 1.5, -133).astype(int)
    data = round_to(np.ldexp(rows, exponents).astype(np.float32), BFLOAT16)
    if scaling == "none":  # an overflow makes a row NaN
        data = data[np.abs(data).max(axis=1) <= FLOAT8_E4M3.max]
    for part in (data, data[:1], np.zeros_like(data)):
        layer = nn.Dense(32, in_units=32, use_bias=False)
        arriving = np.zeros_like(part)
        found, _, _ = computed(layer, FLOAT8 + scaling, part, np.eye(32), arriving, hybridize=False)
        np.testing.assert_array_equal(found, operand(part, scaling, 1))


@native_operators
@pytest.mark.parametrize(("value", "too_large"), [("float8_e5m2", 2.0**16), ("float8_e4m3", 480)])
def test_without_a_scale_what_is_too_large_is_not_hidden(value, too_large):
    data = np.array([[1.0], [too_large], [-too_large]], np.float32)
    layer = nn.Dense(1, in_units=1, use_bias=False)
    policy = f"compute={value},between=bfloat16"
    found, _, _ = computed(layer, policy, data, np.ones((1, 1)), data * 0, hybridize=False)
    np.testing.assert_array_equal(found, round_to(data, Policy.parse(policy).scaled_operands.value))
    assert not np.isfinite(found[1:]).any()


@native_operators
def test_a_loss_scale_that_is_too_large_for_gradients_of_eight_bits_shrinks():
    net = initialized(Middle(nn.Dense(1, in_units=1, use_bias=False)), mx.init.One())
    amp.autocast(net, Policy.parse("compute=float8_e5m2,between=bfloat16"))
    trainer = gluon.Trainer(net.layer.collect_params(), "sgd", {"learning_rate": 0.0})
    amp.init_trainer(trainer, DynamicLossScale(init_scale=2.0**18))
    for skipped in (True, True, True, False):  # E5M2 ends below 2^16
        backward_from(lambda: net(mx.nd.ones((1, 1))), trainer)
        trainer.step(1)
        assert amp.step_was_skipped(trainer) == skipped
    assert amp.loss_scale(trainer) == 2.0**15


def convolution(data, weight, arriving, groups):
    """Return MXNet's FP32 convolution and its gradients."""
    x, w = mx.nd.array(data), mx.nd.array(weight)
    for array in (x, w):
        array.attach_grad()
    with autograd.record():
        y = mx.nd.Convolution(
            x, w, kernel=(3, 3), num_filter=len(weight), num_group=groups, no_bias=True
        )
    y.backward(mx.nd.array(arriving))
    return y.asnumpy(), x.grad.asnumpy(), w.grad.asnumpy()


def in_blocks(values, scaling, shape, axis, fmt=FLOAT8_E4M3):
    return operand(values.reshape(shape), scaling, axis, fmt).reshape(values.shape)


@pytest.mark.filterwarnings("ignore:Parameter .* is not used")
@native_operators
@SCALINGS
@BOTH
@pytest.mark.parametrize(("channels", "filters", "groups"), [(48, 40, 1), (32, 80, 2), (6, 6, 6)])
def test_a_convolution_multiplies_its_rounded_operands_exactly(
    scaling, hybridize, channels, filters, groups
):
    random = np.random.RandomState(0)
    data, weight = (
        random_values(random, 2, channels, 9, 9),
        random_values(random, filters, channels // groups, 3, 3),
    )
    arriving = random_values(random, 2, filters, 7, 7)
    layer = nn.Conv2D(filters, 3, in_channels=channels, groups=groups, use_bias=False)
    found = computed(layer, FLOAT8 + scaling, data, weight, arriving, hybridize=hybridize)
    by_group, pixels = (2, groups, -1, 81), (2, channels, 81)
    e5m2 = FLOAT8_E5M2
    result, _, _ = convolution(
        in_blocks(data, scaling, by_group, 2), operand(weight, scaling, 1), arriving, groups
    )
    _, of_data, _ = convolution(
        data,
        in_blocks(weight, scaling, (groups, filters // groups, -1), 1),
        in_blocks(arriving, scaling, (2, groups, -1, 49), 2, e5m2),
        groups,
    )
    _, _, of_weight = convolution(
        in_blocks(data, scaling, pixels, 2),
        weight,
        in_blocks(arriving, scaling, (2, filters, 49), 2, e5m2),
        groups,
    )
    for one, other in zip(found, (result, of_data, of_weight)):
        np.testing.assert_array_equal(one, round_to(other, BFLOAT16))


def network():
    mx.random.seed(3)
    net = in_sequence(
        nn.Conv2D(8, 3, in_channels=3),
        nn.Dense(8),
        nn.Dense(8, in_units=8),
        nn.Dense(4, in_units=8),
    )
    net.initialize(mx.init.Xavier())
    return net


@native_operators
@BOTH
def test_the_first_and_the_last_product_compute_in_the_format_between(hybridize):
    scaled, between = network(), network()
    amp.autocast(scaled, Policy.parse("mixed_float8"))
    amp.autocast(between, Policy.parse("emulated_bfloat16"))
    images, values = mx.nd.random.normal(shape=(4, 3, 5, 5)), mx.nd.random.normal(shape=(4, 8))
    for number, data in enumerate((images, values, values, values)):
        results = []
        for net in (scaled, between):
            net[number].hybridize(hybridize)
            results.append(net[number](data).asnumpy())
        assert (results[0] == results[1]).all() == (number in (0, 3))


@pytest.mark.filterwarnings("ignore:Parameter .* is not used")
@native_operators
@SCALINGS
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_operand_that_is_not_finite_is_seen_by_a_loss_scale(scaling, bad):
    data, weight = np.ones((40, 64), np.float32), np.ones((8, 64), np.float32)
    arriving = np.ones((40, 8), np.float32)
    arriving[39, 7] = bad
    layer = nn.Dense(8, in_units=64, use_bias=False)
    result, of_data, of_weight = computed(
        layer, FLOAT8 + scaling, data, weight, arriving, hybridize=True
    )
    assert np.isfinite(result).all()
    for one in (of_data[39], of_weight[7]):
        assert not np.isfinite(one).any()
        assert np.isnan(one).all() or scaling == "none"  # a scale makes NaN of all that share it


@native_operators
def test_a_network_trains_from_its_fp32_parameters():
    net = autocast_net(network(), Policy.parse("mixed_float8"))
    net.hybridize(**STATIC)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    images, labels = mx.nd.random.normal(shape=(16, 3, 5, 5)), mx.nd.arange(16) % 4
    losses = []
    for _ in range(60):
        loss = backward_from(lambda: gluon.loss.SoftmaxCrossEntropyLoss()(net(images), labels))
        trainer.step(16)
        losses.append(loss.mean().asscalar())
    assert losses[-1] < losses[0] / 2
    assert all(np.dtype(p.dtype) == np.float32 for p in net.collect_params().values())
    amp.restore(net)
    assert net(images).asnumpy().dtype == np.float32


@pytest.mark.parametrize("policy", ["mixed_float8", "compute=float8_e5m2", "compute=tfloat32"])
def test_formats_that_mxnet_lacks_are_refused_on_a_gpu_and_without_native_operators(
    policy, monkeypatch
):
    wanted = Policy.parse(policy)
    with pytest.raises(PrecisionError, match=f"no {wanted.product_dtype} kernels for a GPU"):
        policy_arithmetic(wanted, "gpu")
    monkeypatch.setattr(kernels, "load", lambda: False)
    net = network()
    with pytest.raises(PrecisionError, match=f"{wanted.product_dtype} needs the native operators"):
        amp.autocast(net, wanted)
    assert not any("hybrid_forward" in vars(block) for block in net)


@native_operators
def test_the_report_says_which_products_have_eight_bits_and_which_do_not():
    report = amp.autocast(network(), Policy.parse("mixed_float8"))
    assert len(report.first_and_last) == 2
    text = str(report)
    assert "5 blocks compute in bfloat16" in text
    assert "round their operands to float8_e4m3, gradients to float8_e5m2, with a scale" in text
    assert all(name in text for name in report.first_and_last)
    assert amp.autocast(network(), Policy.parse("compute=float8_e4m3")).first_and_last == ()
