"""Recording a network, and folding its BatchNorms, against sums written out in NumPy."""

from __future__ import annotations

import mpgluon
from mpgluon import FLOAT16, FLOAT32, PrecisionError, amp
from mpgluon.deployment import export_mxnet, inference_network
from mpgluon.diagnostics import alignment_report
from mpgluon.tools.onnx import export_onnx
from mpgluon_tools.deployment.folding import fold
from mpgluon_tools.deployment.recording import record

import mxnet as mx
import numpy as np
import pytest
from deployment_helpers import Lambda, small_network, some_images, with_random_values
from helpers import (
    WAYS,
    assert_same_bits,
    backward_from,
    cast_net,
    in_sequence,
    initialized,
    parameters_of,
    trainer_of,
)
from mxnet import gluon
from mxnet.gluon import nn, rnn


def operators(recording) -> list[str]:
    return [node.operator for node in recording.graph.nodes if not node.is_variable]


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("way", [None, "cast float16", "autocast float16", "autocast bfloat16"])
def test_casts_and_dropout_are_left_out_and_values_are_those_before_the_cast(way, hybridized):
    net = small_network()
    expected = {p: p.data().asnumpy() for p in net.collect_params().values()}
    if way is not None:
        WAYS[way](net)
    if hybridized:
        net.hybridize()
    before = net(some_images(2, 3, 6, 6)).asnumpy()
    recording = record(net)
    assert operators(recording) == [
        *("Convolution", "BatchNorm", "Activation", "BatchNorm", "FullyConnected")
    ]
    for parameter, values in expected.items():
        assert recording.values[parameter.name].tobytes() == values.tobytes()
    assert (net(some_images(2, 3, 6, 6)).asnumpy() == before).all()


def test_a_trained_cast_networks_values_are_the_optimizers_masters():
    net = cast_net(small_network())
    trainer = trainer_of(net, 2.0**-9)
    amp.init_trainer(trainer, "none")
    for _ in range(2):
        backward_from(lambda: net(some_images(2, 3, 6, 6)).square().mean())
        trainer.step(1)
    values = record(net).values
    places = net._collect_params_with_prefix()
    mpgluon.restore(net)  # puts the masters in place
    masters = parameters_of(net)
    assert_same_bits({place: values[p.name] for place, p in places.items()}, masters)
    assert (masters["0.weight"] != masters["0.weight"].astype(np.float16)).any()


def test_statistics_that_differ_between_devices_are_averaged():
    net = small_network()
    net.collect_params().reset_ctx([mx.cpu(0), mx.cpu(1)])
    for device, data in enumerate(net[1].running_mean.list_data()):
        data[:] = 1 + 2 * device
    assert (record(net).values[net[1].running_mean.name] == 2).all()


def test_a_block_that_is_called_twice_gives_operators_of_different_names():
    shared = nn.Dense(4, in_units=4)
    net = with_random_values(in_sequence(shared, nn.Activation("relu"), shared))
    names = [node.name for node in record(net).graph.nodes]
    assert len(set(names)) == len(names)
    assert operators(record(net)) == ["FullyConnected", "Activation", "FullyConnected"]


def test_a_network_without_values_and_graphs_in_a_graph_are_refused():
    net = initialized(nn.Dense(3))
    with pytest.raises(ValueError, match=r"no values yet: dense\d+_weight; initialize"):
        record(net)
    loop = Lambda(lambda F, x: F.contrib.foreach(lambda row, state: (row, state), x, [])[0])
    with pytest.raises(ValueError, match=r"is control flow \(_foreach\)"):
        record(loop)
    data = mx.sym.var("data", dtype="float32")
    doubled = mx.sym.FullyConnected(data, mx.sym.ones((4, 4)), no_bias=True, num_hidden=4)
    fused = gluon.SymbolBlock(doubled.get_backend_symbol("MKLDNN"), data)
    with pytest.raises(ValueError, match=r"a backend fused \(_sg_mkldnn_fully_connected\)"):
        record(fused)


class Two(nn.HybridBlock):
    """Takes two inputs, and has a parameter."""

    def __init__(self):
        super().__init__()
        self.slope = self.params.get("slope", shape=(1,), init="ones")

    def hybrid_forward(self, F, first, second, slope):
        return F.broadcast_mul(first, slope) + second


def two_of_a_graph():
    first, second = (mx.sym.var(name, dtype="float32") for name in ("first", "second"))
    return gluon.SymbolBlock(first + second, [first, second])


DOORS = {
    "inference_network": lambda net, _: inference_network(net, "float32"),
    "export_mxnet": export_mxnet,
    "export_onnx": lambda net, path: export_onnx(net, path, input_shapes=[(2, 4)]),
    "alignment_report": lambda net, _: alignment_report(net, (2, 4)),
    "too many": lambda net, _: record(net, ("data", "b", "c")),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("make", [Two, two_of_a_graph])
def test_another_number_of_inputs_is_refused_with_the_inputs(make, door, tmp_path):
    net = initialized(make())
    with pytest.raises(TypeError, match=r"takes the inputs first, second, received \d \(data"):
        DOORS[door](net, tmp_path / "net")
    assert list(tmp_path.iterdir()) == []
    ones = mx.nd.ones((2, 4))
    inference = inference_network(net, "float32", inputs=("a", "b"))
    assert (inference(ones, 2 * ones) == 3).asnumpy().all()


def test_a_missing_input_of_any_number_is_reported_with_the_names_of_the_others():
    net = Lambda(lambda F, *inputs: F.relu(inputs[0] + inputs[1]))
    with pytest.raises(TypeError, match=r"cannot be called with data, .* index out of range"):
        record(net)


def test_an_input_needs_a_name_of_its_own():
    net = initialized(Two())
    for other, why in (("a", "a is there twice"), (net.slope.name, "slope is a parameter")):
        with pytest.raises(ValueError, match=rf"received a, \S+: \S*{why}"):
            record(net, ("a", other))


def folded_by_hand(weight, bias, norm):
    """Return the weight and bias that have the effect of a layer and a BatchNorm behind it."""
    gamma, beta, mean, variance = (
        p.data().asnumpy().astype(np.float64)
        for p in (norm.gamma, norm.beta, norm.running_mean, norm.running_var)
    )
    gain = (gamma if norm._kwargs["fix_gamma"] is False else 1) / np.sqrt(
        variance + norm._kwargs["eps"]
    )
    new_bias = (bias.data().asnumpy() if bias is not None else 0) * gain + beta - mean * gain
    return np.einsum("o...,o->o...", weight.asnumpy().astype(np.float64), gain), new_bias


LAYERS = {
    "convolution": lambda: nn.Conv2D(4, 3, in_channels=3, use_bias=False),
    "convolution with a bias": lambda: nn.Conv2D(4, 3, in_channels=3),
    "grouped convolution": lambda: nn.Conv2D(4, 3, in_channels=2, groups=2, use_bias=False),
    "convolution in one dimension": lambda: nn.Conv1D(4, 3, in_channels=3),
    "dense layer": lambda: nn.Dense(4, in_units=6),
}


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_takes_over_what_the_batch_norm_behind_it_does(kind, scale):
    layer, norm = LAYERS[kind](), nn.BatchNorm(in_channels=4, scale=scale, epsilon=1e-3)
    net = with_random_values(in_sequence(layer, norm))  # gamma is not 1, whether it counts or not
    recording = fold(record(net), FLOAT32)
    weight, bias = folded_by_hand(layer.weight.data(), layer.bias, norm)
    (product,) = (node for node in recording.graph.nodes if not node.is_variable)
    assert product.operator == ("FullyConnected" if "dense" in kind else "Convolution")
    assert product.options["no_bias"] is False
    folded_weight, folded_bias = recording.values_after_data(product)
    # One rounding from float64; a sum of numbers up to 4 in float64 adds 2**-50 to it.
    assert (folded_weight == weight.astype(np.float32)).all()
    np.testing.assert_allclose(folded_bias, bias, rtol=2.0**-24, atol=2.0**-48)
    assert set(recording.values) == {layer.weight.name, f"{product.name}_folded_bias"}


class UsedTwice(gluon.HybridBlock):
    """A convolution whose result goes to a BatchNorm and elsewhere."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4)

    def hybrid_forward(self, F, x):
        y = self.conv(x)
        return self.norm(y) + y


class WithSharedWeight(gluon.HybridBlock):
    """A convolution that is called twice, once before a BatchNorm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2D(3, 1, in_channels=3), nn.BatchNorm(in_channels=3)

    def hybrid_forward(self, F, x):
        return self.conv(self.norm(self.conv(x)))


def norm_before_convolution():
    return in_sequence(nn.BatchNorm(in_channels=3), nn.Conv2D(4, 3, in_channels=3))


@pytest.mark.parametrize(
    "make",
    [
        UsedTwice,
        WithSharedWeight,
        norm_before_convolution,
        lambda: in_sequence(  # of another axis
            nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(axis=2, in_channels=6)
        ),
        lambda: in_sequence(  # behind an activation
            nn.Conv2D(4, 3, in_channels=3, activation="relu"), nn.BatchNorm(in_channels=4)
        ),
    ],
)
def test_a_batch_norm_that_cannot_be_folded_stays(make):
    recording = record(with_random_values(make()))
    folded = fold(recording, FLOAT32)
    assert operators(folded) == operators(recording)
    assert folded.values.keys() == recording.values.keys()


class WithComputedWeight(gluon.HybridBlock):
    """A dense layer of a weight that is computed, and a BatchNorm."""

    def __init__(self, weight):
        super().__init__()
        self.compute = weight
        self.weight = self.params.get("weight", shape=(4, 6))
        self.norm = nn.BatchNorm(in_channels=4)

    def hybrid_forward(self, F, x, weight):
        layer = F.FullyConnected(x, self.compute(F, weight, x), num_hidden=4, no_bias=True)
        return self.norm(layer)


def standardized(F, weight, _):
    centred = F.broadcast_sub(weight, weight.mean(axis=1, keepdims=True))
    return F.broadcast_div(centred, centred.norm(axis=1, keepdims=True))


def test_a_weight_that_is_computed_from_parameters_is_computed_once_and_folded():
    net = with_random_values(WithComputedWeight(standardized))
    recording = fold(record(net), FLOAT32)
    assert operators(recording) == ["FullyConnected"]
    expected, bias = folded_by_hand(standardized(mx.nd, net.weight.data(), None), None, net.norm)
    assert expected.any()
    (product,) = (node for node in recording.graph.nodes if not node.is_variable)
    folded_weight, folded_bias = recording.values_after_data(product)
    assert (folded_weight == expected.astype(np.float32)).all()
    np.testing.assert_allclose(folded_bias, bias, rtol=2.0**-24, atol=2.0**-48)


def test_the_weight_of_an_operator_with_another_name_in_graphs_is_computed_once():
    class Deformable(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.weight = self.params.get("weight", shape=(4, 2, 1, 1))

        def hybrid_forward(self, F, x, weight):
            options = {"kernel": (1, 1), "num_filter": 4, "no_bias": True}
            return F.contrib.DeformableConvolution(x, x, weight * 2, **options)

    net = with_random_values(Deformable())
    recording = fold(record(net), FLOAT32)
    assert operators(recording) == ["_contrib_DeformableConvolution"]
    (value,) = recording.values.values()
    assert (value == 2 * net.weight.data().asnumpy()).all()


def test_a_recurrent_layer_keeps_its_parameters():
    net = with_random_values(rnn.LSTM(4, num_layers=2, input_size=3))
    assert fold(record(net), FLOAT32).values.keys() == net.collect_params().keys()


@pytest.mark.parametrize(
    "weight",
    [
        lambda F, weight, _: weight + F.random.normal(shape=(4, 6)),
        lambda F, weight, _: weight + F.random.normal_like(weight),
        lambda F, weight, _: F.Dropout(weight, mode="always"),
        lambda F, weight, _: F.shuffle(weight),
        lambda F, weight, _: F.sample_normal(weight, F.abs(weight)),
        lambda F, weight, x: F.broadcast_mul(weight, x.mean(axis=0, keepdims=True)),
    ],
    ids=["noise", "noise like it", "dropout", "shuffled", "drawn", "of the input"],
)
def test_a_weight_that_differs_from_call_to_call_is_computed_in_each(weight):
    recording = record(with_random_values(WithComputedWeight(weight)))
    folded = fold(recording, FLOAT32)
    assert operators(folded) == operators(recording)
    assert folded.values.keys() == recording.values.keys()


def test_a_batch_norm_stays_where_float16_could_not_hold_the_folded_weight():
    net = in_sequence(nn.Conv2D(2, 1, in_channels=3), nn.BatchNorm(in_channels=2))
    with_random_values(net)
    # A variance of almost 0: 1 / sqrt(1e-5) is 316, and 316 * 300 is beyond 65,504.
    net[1].running_var.set_data(mx.nd.zeros(2))
    net[0].weight.set_data(mx.nd.full((2, 3, 1, 1), 300))
    recording = record(net)
    assert operators(fold(recording, FLOAT16)) == ["Convolution", "BatchNorm"]
    assert operators(fold(recording, FLOAT32)) == ["Convolution"]


def test_a_weight_beyond_float16_is_refused_and_a_statistic_is_not():
    net = norm_before_convolution()
    with_random_values(net)
    net[0].running_var.set_data(mx.nd.full(3, 1e6))
    record(net).check_range(FLOAT16)
    net[1].bias.set_data(mx.nd.full(4, 65520))
    with pytest.raises(PrecisionError, match=r"conv\d+_bias hold values beyond 65504"):
        record(net).check_range(FLOAT16)
    record(net).check_range(FLOAT32)
