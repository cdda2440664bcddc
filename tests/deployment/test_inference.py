"""Networks for inference: as close to FP32 as their format allows, and apart from their source."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter

import mpgluon
from mpgluon import BFLOAT16, FLOAT16, PrecisionError, amp, kernels, round_to
from mpgluon.deployment import (
    InferenceNetwork,
    agreement,
    export_mxnet,
    export_onnx,
    import_mxnet,
    inference_network,
)
from mpgluon.formats.float_format import format_named
from mpgluon.kernels.bfloat16 import has_native_bfloat16
from mpgluon.kernels.dtypes import dtype_name

import mxnet as mx
import numpy as np
import pytest
from deployment_helpers import (
    Lambda,
    distance,
    every_network,
    fp32_bound,
    logits_of,
    served,
    sixteen_bit_bound,
    small_network,
    some_images,
    with_random_values,
)
from helpers import STATIC, assert_same_bits, in_sequence, initialized, parameters_of
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn
from test_networks import build, inputs_of

DTYPES = ("float32", "float16", "bfloat16")


def check(name, dtype):
    images, _ = inputs_of(name)
    net = build(name, images)
    reference, parameters = logits_of(net, images), parameters_of(net)
    bound = fp32_bound(net, images)
    if dtype != "float32":
        bound = sixteen_bit_bound(net, images, FLOAT16 if dtype == "float16" else BFLOAT16)
    result = inference_network(net, dtype)
    logits = logits_of(result, images)
    assert logits.dtype == np.float32
    assert distance(logits, reference) <= bound
    if dtype != "float32":  # another format was used, not FP32 by mistake
        assert distance(logits, reference) > fp32_bound(net, images)
    weights = [p for p in result.collect_params().values() if p.data().ndim > 1]
    # In their format products are computed; emulated, their numbers are in FP32 arrays.
    emulated = not has_native_bfloat16() if dtype == "bfloat16" else kernels.available()
    assert {dtype_name(p) for p in weights} == {"float32" if emulated else dtype}
    if dtype == "float16" or (emulated and kernels.available()):
        for weight in weights:
            values = weight.data().asnumpy().astype(np.float32)
            assert (round_to(values, format_named(dtype)) == values).all()
    assert_same_bits(parameters_of(net), parameters)
    assert (logits_of(net, images) == reference).all()


class Residual(gluon.HybridBlock):
    """Four convolutions, normalized and activated; with ReLU, sums around the last two."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.body = nn.HybridSequential()
        for channels in (3, 16, 16, 16):
            part = in_sequence(
                nn.Conv2D(16, 3, padding=1, in_channels=channels), nn.BatchNorm(in_channels=16)
            )
            self.body.add(part)

    def hybrid_forward(self, F, x):
        for number, part in enumerate(self.body):
            y = part(x)
            if self.activation == "relu6":
                x = F.clip(y, 0, 6)
            else:
                x = F.Activation(x + y if number > 1 else y, act_type="relu")
        return x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "relu6"])
def test_activations_and_sums_of_a_fused_network_are_parts_of_its_convolutions(
    activation, dtype, request, monkeypatch
):
    if dtype == "bfloat16":
        request.getfixturevalue("native_bfloat16")
        request.getfixturevalue("native_operators")
    graphs, fuse_graph = [], mx.sym.Symbol.optimize_for

    def noted(symbol, *args, **kwargs):
        graphs.append(fuse_graph(symbol, *args, **kwargs))
        return graphs[-1]

    monkeypatch.setattr(mx.sym.Symbol, "optimize_for", noted)

    net = initialized(Residual(activation), mx.init.Xavier())
    assert inference_network(net, dtype, fuse_for=mx.nd.random.normal(shape=(2, 3, 16, 16))).fused
    operators = Counter(node["op"] for node in json.loads(graphs[-1].tojson())["nodes"])
    assert operators["_sg_mkldnn_conv"] == 4
    assert "elemwise_add" not in operators
    apart = [name for name in operators if any(word in name for word in ("Activation", "clip"))]
    assert apart == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@every_network
def test_a_network_for_inference_is_as_close_to_fp32_as_its_format_allows(name, dtype):
    check(name, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_that_are_rounded_once_give_the_same_bits(dtype, monkeypatch):
    if not kernels.available() or (dtype == "bfloat16" and has_native_bfloat16()):
        pytest.skip("weights are in 16-bit arrays, or rounded in each call")
    images, _ = inputs_of("mobilenetv2_0.25")
    net = build("mobilenetv2_0.25", images)
    once = logits_of(inference_network(net, dtype), images)
    monkeypatch.setattr(InferenceNetwork, "keep_weights_in", lambda *_, **__: None)
    assert (logits_of(inference_network(net, dtype), images) == once).all()


@pytest.mark.parametrize(
    ("name", "left"),
    [("resnet18_v1", 0), ("mobilenetv3_small", 0), ("cifar_resnet20_v1", 0), ("resnet18_v2", 10)],
)
def test_as_many_batch_norms_are_left_as_stand_before_a_convolution(name, left):
    images, _ = inputs_of(name)
    result = inference_network(build(name, images), "float32")
    norms = [block for block in result._children.values() if isinstance(block, nn.BatchNorm)]
    assert len(norms) == left


class Unusual(gluon.HybridBlock):
    """A dense layer and a BatchNorm, with an operand that is computed, or with constant data."""

    def __init__(self, operand):
        super().__init__()
        self.operand = operand
        shapes = {"weight": (4, 3), "bias": (4,), "gamma": (4,), "beta": (4,)}
        shapes.update(running_mean=(4,), running_var=(4,), constant=(2, 3))
        with self.name_scope():
            for name, shape in shapes.items():
                is_trained = not name.startswith("running")
                setattr(self, name, self.params.get(name, shape=shape, differentiable=is_trained))

    def hybrid_forward(self, F, x, constant, **values):
        if self.operand in values:
            values[self.operand] = values[self.operand] * 2
        data = constant if self.operand == "data" else x
        weight, bias, *of_norm = (
            values[name]
            for name in ("weight", "bias", "gamma", "beta", "running_mean", "running_var")
        )
        layer = F.FullyConnected(data, weight, bias, num_hidden=4)
        return F.concat(F.BatchNorm(layer, *of_norm, fix_gamma=False), x, dim=1)


@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")
@pytest.mark.parametrize("operand", ["weight", "bias", "gamma", "beta", "data"])
def test_a_computed_operand_and_constant_data_count_in_every_result(operand, tmp_path):
    net, x = with_random_values(Unusual(operand)), some_images(2, 3)
    reference, bound = logits_of(net, x), fp32_bound(net, x)
    assert distance(logits_of(inference_network(net, "float32"), x), reference) <= bound
    export_mxnet(net, tmp_path / "net", dtype="float32")
    assert distance(logits_of(import_mxnet(tmp_path / "net"), x), reference) <= bound
    path = export_onnx(net, tmp_path / "net.onnx", input_shapes=[(2, 3)])
    assert distance(served(str(path), x), reference) <= bound
    for fmt in (FLOAT16, BFLOAT16):
        bound = sixteen_bit_bound(net, x, fmt)
        assert distance(logits_of(inference_network(net, str(fmt)), x), reference) <= bound


class SharedWeight(gluon.HybridBlock):
    """A dense layer that is called twice, with a BatchNorm behind each call."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=4)
            self.first, self.second = nn.BatchNorm(in_channels=4), nn.BatchNorm(in_channels=4)

    def hybrid_forward(self, F, x):
        return self.second(self.dense(self.first(self.dense(x))))


NORMS = {
    "fixed gamma": lambda: in_sequence(
        nn.Dense(4, in_units=4), nn.BatchNorm(in_channels=4, scale=False)
    ),
    "weight of two layers": SharedWeight,
    # As many rows as units, so that the sizes do not tell axes apart.
    "axis of the rows": lambda: in_sequence(
        nn.Dense(4, in_units=4, flatten=False), nn.BatchNorm(in_channels=4)
    ),
    "last axis": lambda: in_sequence(
        nn.Dense(4, in_units=4, flatten=False), nn.BatchNorm(in_channels=4, axis=2)
    ),
}


@pytest.mark.parametrize("case", NORMS)
def test_a_batch_norm_is_computed_as_in_its_network(case):
    net = with_random_values(NORMS[case]())
    x = some_images(*((2, 4, 4) if "ax" in case else (2, 4)))
    result, bound = inference_network(net, "float32"), fp32_bound(net, x)
    assert distance(logits_of(result, x), logits_of(net, x)) <= bound
    with autograd.record():  # running statistics, also where a loss is computed
        recorded = result(x)
    assert distance(recorded.asnumpy(), logits_of(net, x)) <= bound


def test_a_weight_that_folding_would_make_infinite_stays():
    net = with_random_values(
        in_sequence(nn.Dense(4, in_units=4, use_bias=False), nn.BatchNorm(in_channels=4))
    )
    for parameter, value in ((net[1].gamma, 1000), (net[1].running_var, 0)):  # eps is 1e-5
        parameter.set_data(mx.nd.full(4, value))
    net[1].running_mean.set_data(mx.nd.zeros(4))
    x = some_images(2, 4) / 2**6
    reference, bound = logits_of(net, x), sixteen_bit_bound(net, x, FLOAT16)
    assert 65504 > np.abs(reference).max() > 1000
    assert distance(logits_of(inference_network(net, "float16"), x), reference) <= bound


def test_a_weight_that_is_drawn_in_each_call_is_computed_in_each():
    class Drawn(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.weight = self.params.get("weight", shape=(64, 8))

        def hybrid_forward(self, F, x, weight):
            kept = F.Dropout(weight, p=0.5, mode="always")
            return F.FullyConnected(x, kept, num_hidden=64, no_bias=True)

    result = inference_network(with_random_values(Drawn()), "float32")
    assert (logits_of(result, mx.nd.ones((1, 8))) != logits_of(result, mx.nd.ones((1, 8)))).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_and_an_autocast_source_give_what_a_plain_one_does(dtype):
    images, results = some_images(2, 3, 6, 6), []
    for prepare in (lambda net: net, mpgluon.cast_block, amp.autocast):
        net = small_network()
        prepare(net)
        net.hybridize()
        net(images)
        results.append(logits_of(inference_network(net, dtype), images))
    assert all((result == results[0]).all() for result in results)


def test_the_copy_is_independent_of_its_source_and_of_hybridization():
    net, images = small_network(), some_images(2, 3, 6, 6)
    result = inference_network(net, "float16")
    compiled = logits_of(result, images)
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.data() * 2)
    assert (logits_of(result, images) == compiled).all()
    result.hybridize(False)
    assert (logits_of(result, images) == compiled).all()


def test_several_inputs_and_outputs():
    net = Lambda(lambda F, x, y: (F.broadcast_add(x, y), y * 2))
    result = inference_network(net, "float16", inputs=["x", "y"])
    total, double = result(mx.nd.array([1.0, 2**-12]), mx.nd.array([2**-12, 0]))
    # Inputs are FP32, and sums follow their operands.
    assert total.asnumpy().tolist() == [1 + 2**-12, 2**-12]
    assert double.asnumpy().tolist() == [2**-11, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operator_with_another_name_in_graphs_is_computed(dtype):
    net = Lambda(lambda F, x: F.cumsum(x, axis=1))
    assert inference_network(net, dtype)(mx.nd.array([[1, 2, 4]])).asnumpy().tolist() == [[1, 3, 7]]


def test_a_weight_beyond_float16_and_a_plain_block_are_refused():
    net = small_network()
    net[5].weight.set_data(net[5].weight.data() * 1e6)
    with pytest.raises(PrecisionError, match=r"dense\d+_weight hold values beyond 65504"):
        inference_network(net, "float16")
    with pytest.raises(TypeError, match="HybridBlock"):
        inference_network(gluon.nn.Sequential())


def fuse(name, dtype):
    images, _ = inputs_of(name)
    net = build(name, images)
    plain, fused = (inference_network(net, dtype, fuse_for=given) for given in (None, images))
    assert not plain.fused
    return net, images, plain, fused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("resnet18_v1", "float32"),
        ("resnet18_v1", "bfloat16"),
        ("cifar_resnet20_v1", "float32"),
        ("cifar_resnet20_v1", "bfloat16"),
        ("cifar_resnet20_v2", "bfloat16"),  # wrong in FP32, see below
    ],
)
def test_a_fused_network_is_right_for_other_images_and_batches_too(name, dtype, request):
    if dtype == "bfloat16":  # emulated, nothing is fused
        request.getfixturevalue("native_bfloat16")
    net, images, _, fused = fuse(name, dtype)
    assert fused.fused
    for given in (mx.nd.concat(images[::-1] * 0.75, images[:1], dim=0), images[:1]):
        bound = fp32_bound(net, given)
        if dtype == "bfloat16":
            bound = sixteen_bit_bound(net, given, BFLOAT16)
        assert distance(logits_of(fused, given), logits_of(net, given)) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", [rnn.LSTM, rnn.GRU, rnn.RNN])
def test_fusion_of_a_recurrent_network_keeps_its_results_for_any_batch(layer, dtype):
    net = in_sequence(
        nn.Dense(6, flatten=False, in_units=4),
        layer(6, layout="NTC", input_size=6),
        nn.Dense(3, in_units=5 * 6),
    )
    with_random_values(net)
    rows = some_images(4, 5, 4)
    plain, fused = (inference_network(net, dtype, fuse_for=given) for given in (None, rows))
    for given in (rows, rows[:1]):
        # Fusion may round other intermediate results, which moves a logit by a few roundings.
        bound = 0 if dtype == "float16" else 8 * (2.0**-24 if dtype == "float32" else 2.0**-8)
        reference = logits_of(plain, given)
        assert distance(logits_of(fused, given), reference) <= bound * np.linalg.norm(reference)


def test_a_network_that_mxnet_fuses_wrongly_is_left_as_it_was():
    # First that it does, or this would test nothing.
    net, images, plain, fused = fuse("cifar_resnet20_v2", "float32")
    assert not fused.fused
    assert (logits_of(fused, images) == logits_of(plain, images)).all()
    plain.hybridize(backend="MKLDNN", **STATIC)
    reference = logits_of(net, images)
    assert distance(logits_of(plain, images), reference) > 0.1 * np.linalg.norm(reference)


@pytest.mark.slow
def test_a_network_that_mxnet_cannot_fuse_is_left_as_it_was_and_the_log_says_so(caplog):
    caplog.set_level(logging.INFO, "mpgluon.deployment")
    _, images, plain, fused = fuse("se_resnext50_32x4d", "float32")
    assert not fused.fused
    assert "oneDNN's fusion is left out: " in caplog.text
    assert (logits_of(fused, images) == logits_of(plain, images)).all()
    plain.hybridize(backend="MKLDNN", **STATIC)
    with pytest.raises(mx.MXNetError, match="sg_mkldnn_conv"):
        plain(images)


def test_agreement_counts_categories_and_measures_by_the_largest_logit_of_each_image():
    expected = [np.array([[1.0, -4.0], [8.0, 2.0]]), np.array([[3.0, 5.0]])]
    logits = [np.array([[1.5, -4.0], [8.0, 9.0]]), np.array([[3.0, 5.0]])]
    result = agreement(
        lambda images: expected[int(images.asscalar())],
        lambda images: mx.nd.array(logits[int(images.asscalar())]),
        [mx.nd.array([0]), (mx.nd.array([1]), mx.nd.array([7]))],
    )
    assert (result.images, result.same_category) == (3, 2)
    assert (result.top1_agreement, result.largest_relative_error) == (2 / 3, 7 / 8)
    assert "2 of 3 images (66.67%)" in str(result)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_is_an_infinite_error(bad):
    for expected in (np.ones((1, 2)), np.array([[1, bad]])):
        found = agreement(
            lambda _, one=expected: one, lambda _: np.array([[1, bad]]), [mx.nd.ones(1)]
        )
        assert found.largest_relative_error == math.inf


def test_results_that_are_not_logits_of_one_shape_are_refused():
    for first, second in (((4, 3, 2), (4, 3, 2)), ((4, 3), (4, 1)), ((4,), (4,))):
        with pytest.raises(ValueError, match=r"logits of the same shape \(N, K\), received \(4"):
            agreement(
                lambda _, a=first: np.ones(a), lambda _, b=second: np.ones(b), [mx.nd.ones(4)]
            )
    with pytest.raises(ValueError, match=r"\(N, K\), received 2 results of one"):
        agreement(lambda _: [mx.nd.ones((4, 3)), mx.nd.ones(4)], np.ones, [mx.nd.ones(4)])


def test_equal_logits_of_zero_have_no_error():
    result = agreement(lambda _: np.zeros((2, 3)), lambda _: np.zeros((2, 3)), [mx.nd.zeros(2)])
    assert (result.same_category, result.largest_relative_error) == (2, 0)
