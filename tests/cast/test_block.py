"""Casting and restoring: what changes, what does not, and what is refused."""

from __future__ import annotations

import inspect
from threading import Barrier, Thread

import mpgluon
from mpgluon import NORMALIZATION_LAYERS, Policy, PrecisionError, amp
from mpgluon.cast.arrays import Float16Array
from mpgluon.deployment import inference_network

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    BOTH,
    EACH_WAY,
    SAME_BITS_HYBRIDIZED,
    STATIC,
    WAYS,
    assert_same_bits,
    backward_from,
    cast_net,
    in_sequence,
    parameters_of,
    train,
)
from interfaces import IN_NUMPY, interface
from mxnet import autograd, gluon
from mxnet.gluon import nn

# What MXNet says of plain Sequentials, of imported graphs and of two calls of initialize.
pytestmark = [
    pytest.mark.filterwarnings("ignore:All children of this Sequential layer"),
    pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments"),
    pytest.mark.filterwarnings("ignore:Parameter .* is already initialized"),
]
IMAGES = mx.nd.array(np.random.RandomState(0).standard_normal((4, 3, 8, 8)), dtype="float32")
LABELS = mx.nd.array([0, 1, 2, 0], dtype="int32")
EITHER = pytest.mark.parametrize("way", [mpgluon.cast_block, amp.autocast])


class Calls(gluon.HybridBlock):
    """Applies a function to its inputs and one parameter."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(3, 4), init=mx.init.Uniform(1))

    def hybrid_forward(self, F, *inputs, weight):
        return self.function(F, *inputs, weight)


def small_network() -> gluon.HybridBlock:
    return in_sequence(
        nn.Conv2D(6, 3), nn.BatchNorm(), nn.Activation("relu"), nn.LayerNorm(), nn.Dense(3)
    )


def initialized(net=None) -> gluon.HybridBlock:
    mx.random.seed(0)
    net = net or small_network()
    net.initialize(mx.init.Xavier())
    return net


def initialized_with_shapes(net=None) -> gluon.HybridBlock:
    net = initialized(net)
    net(IMAGES)
    return net


def dtypes_of(net) -> dict[str, str]:
    parameters = net._collect_params_with_prefix()
    return {place: np.dtype(parameter.dtype).name for place, parameter in parameters.items()}


FLOAT16_PARAMETERS = {"0.weight", "0.bias", "4.weight", "4.bias"}  # of the small network


def instance_attributes(net) -> dict[str, set[str]]:
    attributes = {}
    net.apply(lambda block: attributes.update({block.name: set(vars(block))}))
    return attributes


@BOTH
@pytest.mark.parametrize("input_dtype", ["float32", "float16"])
def test_a_cast_network_takes_both_formats_and_returns_fp32(input_dtype, hybridize):
    net = initialized_with_shapes()
    report = mpgluon.cast_block(net)
    net.hybridize(hybridize, **STATIC)
    images = IMAGES.astype(input_dtype)
    logits = backward_from(lambda: net(images))
    assert logits.dtype == np.float32
    assert type(logits) is mx.nd.NDArray
    in_float16 = {place for place, dtype in dtypes_of(net).items() if dtype == "float16"}
    assert in_float16 == FLOAT16_PARAMETERS
    assert report.parameters_cast == len(in_float16) == 4
    assert report.parameters_kept == 6
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            assert parameter.grad().dtype == parameter.data().dtype == np.dtype(parameter.dtype)


@BOTH
def test_float16_input_gives_what_the_same_values_give_in_fp32(hybridize):
    net = cast_net(initialized_with_shapes())
    net.hybridize(hybridize)
    rounded = IMAGES.astype("float16")
    wide, narrow = net(rounded.astype("float32")), net(rounded)
    again = net(rounded.astype("float32"))  # a graph for one format does not serve the other
    assert np.array_equal(wide.asnumpy(), narrow.asnumpy())
    assert np.array_equal(wide.asnumpy(), again.asnumpy())


def test_the_report_counts_and_names_what_was_done():
    net = initialized_with_shapes()
    report = mpgluon.cast_block(net)
    conv, norm, activation, layer_norm, dense = net
    assert report.policy == Policy.parse("float16")
    assert report.cast == (net.name, conv.name, activation.name, dense.name)
    assert report.kept_fp32 == (norm.name, layer_norm.name)
    assert report.beyond_reach == ()
    lines = str(report).splitlines()
    assert lines[0] == "parameters float16, computation float16, result float32"
    assert f"2 blocks kept in FP32 ({norm.name}, {layer_norm.name})" in lines[2]
    assert "4 parameters cast to float16, 6 left as they were" in lines[3]


def test_a_long_list_of_kept_blocks_is_shortened_in_print():
    assert ", …)" in str(mpgluon.cast_block(in_sequence(*(nn.LayerNorm() for _ in range(4)))))
    assert "(" not in str(amp.autocast(initialized(nn.Dense(3)))).splitlines()[2]


def test_weights_are_rounded_to_nearest_and_normalization_keeps_its_bits():
    net = initialized_with_shapes()
    before = parameters_of(net)
    mpgluon.cast_block(net)
    after = parameters_of(net)
    for name, value in before.items():
        expected = np.float16 if name in FLOAT16_PARAMETERS else np.float32
        assert after[name].dtype == expected
        assert np.array_equal(after[name], value.astype(after[name].dtype))


def test_with_nothing_kept_only_batch_norm_keeps_fp32_parameters():
    net = initialized_with_shapes()
    assert mpgluon.cast_block(net, keep_fp32=()).kept_fp32 == (net[1].name,)
    assert (net[3].gamma.dtype, net[1].gamma.data().dtype) == ("float16", np.float32)
    assert np.isfinite(train(net, [IMAGES], LABELS, 2)).all()


def test_integers_and_constants_of_other_types_stay_what_they_are():
    net = Calls(lambda F, x, weight: F.dot(x, weight))
    net.scale = net.params.get_constant("scale", mx.nd.array([2.0]))
    net.table = net.params.get("table", shape=(2,), dtype="int32", init="zeros", grad_req="null")
    net.initialize()
    report = mpgluon.cast_block(net)
    assert np.dtype(net.table.dtype) == np.int32
    assert (net.table.data().dtype, net.scale.data().dtype) == (np.int32, np.float16)
    assert report.parameters_cast == 2
    mpgluon.restore(net)
    assert (net.scale.data().dtype, net.table.data().dtype) == (np.float32, np.int32)


def test_a_class_from_text_may_have_no_module():
    made = {"HybridBlock": gluon.HybridBlock}
    exec(
        "class Twice(HybridBlock):\n    def hybrid_forward(self, F, x):\n        return x * 2", made
    )
    net = cast_net(made["Twice"]())
    assert net(mx.nd.ones(2)).asnumpy().tolist() == [2, 2]


class Positions(gluon.HybridBlock):
    """Embeds as many positions as there are, which a constant or a parameter holds."""

    def __init__(self, *, constant):
        super().__init__()
        with self.name_scope():
            self.embedding = nn.Embedding(2100, 4)
            if constant:
                self.positions = self.params.get_constant("positions", mx.nd.arange(2100))
            else:
                self.positions = self.params.get("positions", shape=2100, grad_req="null")

    def hybrid_forward(self, F, x, positions):
        return self.embedding(positions) + x


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_positions_that_the_format_lacks_stay_fp32(dtype, constant):
    net = Positions(constant=constant)
    if constant:
        mpgluon.cast_block(net, dtype)  # before it has values
        net.initialize(mx.init.Normal(1))
    else:
        net.initialize(mx.init.Normal(1))
        net.positions.set_data(mx.nd.arange(2100))
        mpgluon.cast_block(net, dtype)
    expected = net.embedding.weight.data().astype("float32").asnumpy()
    zeros = mx.nd.zeros(expected.shape)
    deployed = (inference_network(net, one) for one in ("float16", "bfloat16", "float32"))
    for one in (net, *deployed):
        np.testing.assert_allclose(one(zeros).asnumpy(), expected, rtol=2.0**-8)  # one rounding
    mpgluon.restore(net)
    assert (net.positions.data() == mx.nd.arange(2100)).asnumpy().all()


@BOTH
@pytest.mark.parametrize("when", ["before initialize", "before shapes are known"])
def test_a_cast_may_come_before_the_parameters_have_values_or_shapes(when, hybridize):
    net = small_network()
    if when != "before initialize":
        net.initialize()
    report = mpgluon.cast_block(net)
    if when == "before initialize":
        net.initialize()
    net.hybridize(hybridize, **STATIC)
    assert report.parameters_cast == 4
    assert (net(IMAGES).dtype, net[0].weight.data().dtype) == (np.float32, np.float16)
    assert net[3].gamma.data().dtype == np.float32
    assert np.isfinite(train(net, [IMAGES], LABELS, 2)).all()
    mpgluon.restore(net)
    assert set(dtypes_of(net).values()) == {"float32"}
    assert net(IMAGES).dtype == np.float32


def test_hybridizing_and_dehybridizing_a_cast_network_changes_nothing():
    net = cast_net(initialized_with_shapes())
    imperative = net(IMAGES).asnumpy()
    for active in (True, False, True):
        net.hybridize(active)
        assert np.array_equal(net(IMAGES).asnumpy(), imperative)


def keeps_exactly(net, keep, inside):
    """Cast with ``keep`` and return whether exactly the parameters of ``inside`` stay FP32."""
    mpgluon.cast_block(net, keep_fp32=keep)
    fp32 = {p for p in net.collect_params().values() if np.dtype(p.dtype) == np.float32}
    return fp32 == {p for block in inside for p in block.collect_params().values()}


def two_branches():
    branch = in_sequence(nn.Dense(5, flatten=False), nn.LayerNorm(), nn.Dense(5, flatten=False))
    return initialized_with_shapes(in_sequence(nn.Dense(4, flatten=False), branch, nn.Dense(3)))


@pytest.mark.parametrize(
    ("keep", "inside"),
    [
        (lambda _: (nn.Dense, nn.LayerNorm), lambda net: (net,)),
        (lambda net: (net[2],), lambda net: (net[2], net[1][1])),
        (lambda net: (net[1],), lambda net: (net[1],)),
        (lambda _: iter(NORMALIZATION_LAYERS), lambda net: (net[1][1],)),
        (lambda _: ("1.*",), lambda net: tuple(net[1])),
        (lambda _: ("[02]",), lambda net: (net[0], net[2], net[1][1])),
    ],
    ids=["types", "instance", "whole", "iterator", "pattern", "pattern of two"],
)
def test_blocks_are_kept_by_type_by_instance_whole_and_by_a_pattern_of_places(keep, inside):
    net = two_branches()
    assert keeps_exactly(net, keep(net), inside(net))


@pytest.mark.parametrize("name", ["2", "name", "1.2"])
def test_blocks_are_kept_by_the_names_and_places_that_reports_print(name):
    net = two_branches()
    block = {"2": net[2], "name": net[2], "1.2": net[1][2]}[name]
    report = mpgluon.cast_block(net, keep_fp32=[block.name if name == "name" else name, "softmax"])
    assert set(report.kept_fp32) == {block.name, net[1][1].name}
    assert report.operators_fp32 == ("softmax",)
    assert block.weight.data().dtype == np.float32
    mpgluon.restore(net)
    assert block.name in amp.autocast(net, keep_fp32=[block.name]).kept_fp32


def test_an_operator_is_kept_in_the_blocks_that_fit_a_pattern():
    net = cast_net(two_branches(), keep_fp32=["1.*:FullyConnected"])
    results = []
    for child in net[1]:
        child.register_forward_hook(lambda *call: results.append(call[-1]))
    net(IMAGES)
    assert [one.asnumpy().dtype for one in results] == [np.float32, np.float16, np.float32]


@pytest.mark.parametrize("entry", ["*.head.*", "*.head.*:Convolution"])
def test_a_pattern_that_fits_nothing_is_refused(entry):
    net = two_branches()
    with pytest.raises(ValueError, match=r"\*\.head\.\*.*(no operator|names no block)"):
        mpgluon.cast_block(net, keep_fp32=[entry])
    assert np.dtype(net[0].weight.dtype) == np.float32


def test_normalization_layers_are_kept_in_addition_unless_their_types_are_named():
    def gamma(keep_fp32):
        net = initialized_with_shapes(in_sequence(nn.Dense(4), nn.LayerNorm(), nn.Dense(3)))
        mpgluon.cast_block(net, keep_fp32=keep_fp32(net))
        return np.dtype(net[1].gamma.dtype).name

    for kept in (lambda net: [net[0]], lambda _: [nn.Conv2D], lambda _: ["softmax"]):
        assert gamma(kept) == "float32"
    assert gamma(lambda _: [nn.LayerNorm]) == "float32"
    for kept in (lambda _: [], lambda net: [nn.BatchNorm, net[0]]):
        assert gamma(kept) == "float16"


def results_inside(net):
    """Return each child's results while the network computes."""
    results = []
    hooks = [child.register_forward_hook(lambda *call: results.append(call[-1])) for child in net]
    net(IMAGES)
    for hook in hooks:
        hook.detach()
    return results


@BOTH
def test_a_kept_block_computes_in_fp32_with_the_normalization_inside_it(hybridize):
    net = two_branches()
    mpgluon.cast_block(net, keep_fp32=(*NORMALIZATION_LAYERS, net[1]))
    net[1].hybridize(hybridize)
    narrow, kept, _ = results_inside(net)
    assert narrow.dtype == np.float16
    assert kept.dtype == np.float32
    mpgluon.restore(net)
    assert np.array_equal(net[1](narrow.astype("float32")).asnumpy(), kept.asnumpy())


@EITHER
def test_a_kept_block_with_a_batch_norm_inside_trains_hybridized_as_it_does_imperatively(way):
    def trained(hybridize):
        inner = in_sequence(nn.Conv2D(4, 3, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
        net = initialized_with_shapes(in_sequence(nn.Conv2D(4, 3), inner, nn.Dense(3)))
        way(net, keep_fp32=(*NORMALIZATION_LAYERS, net[1]))
        net.hybridize(hybridize, **STATIC)
        return train(net, [IMAGES], LABELS, 3), parameters_of(net)

    (losses, parameters), (losses_hybridized, parameters_hybridized) = trained(False), trained(True)
    assert_same_bits(losses, losses_hybridized)
    assert_same_bits(parameters, parameters_hybridized)


@BOTH
def test_a_weight_shared_with_a_kept_block_stays_fp32_in_both(hybridize):
    first = nn.Dense(192, in_units=192)
    second = nn.Dense(192, in_units=192, params=first.collect_params())
    net = in_sequence(first, second, nn.Dense(3))
    initialized_with_shapes(net)
    report = mpgluon.cast_block(net, keep_fp32=(second,))
    net.hybridize(hybridize)
    assert first.weight is second.weight
    assert first.weight.data().dtype == np.float32
    assert report.parameters_cast == 2
    assert np.isfinite(train(net, [IMAGES], LABELS, 2)).all()
    net.hybridize(False)
    for child in net:
        child.hybridize(hybridize)
    assert [one.dtype for one in results_inside(net)] == [np.float16, np.float32, np.float16]


@BOTH
@pytest.mark.parametrize("kind", [nn.HybridSequential, nn.Sequential])
@pytest.mark.parametrize("dtype", ["float16", "emulated_bfloat16"])
def test_parts_that_are_called_one_by_one_compute_what_the_network_does(kind, dtype, hybridize):
    net = kind()
    net.add(
        nn.Dense(192), nn.Dense(5), nn.HybridLambda(lambda F, x: F.broadcast_mul(x, x)), nn.Dense(3)
    )
    initialized_with_shapes(net)
    mpgluon.cast_block(net, dtype)
    expected = [one.astype("float32").asnumpy() for one in results_inside(net)]
    net.hybridize(hybridize)
    x, found = IMAGES, []
    for child in net:
        x = child(x)
        assert x.dtype == np.float32
        found.append(x.astype("float32").asnumpy())
    assert_same_bits(expected, found)


class Joins(gluon.HybridBlock):
    """A network that is not cast, with two parts of one that is, and operators of MXNet between."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last

    def hybrid_forward(self, F, x):
        part = self.first(x)
        if mx.util.is_np_array():
            return (
                F.np.concatenate([part, x], axis=1),
                F.np.tanh(part) + 1.1 * part,
                self.last(part),
            )
        return F.concat(part, x, dim=1), F.tanh(part) + 1.1 * part, self.last(part)


@BOTH
@IN_NUMPY
@EACH_WAY
@pytest.mark.parametrize("outer_hybridized", [False, True], ids=["plain", "plain hybridized"])
def test_operators_outside_read_the_result_of_a_part_as_fp32(
    outer_hybridized, way, in_numpy, hybridize
):
    values = np.random.RandomState(0).standard_normal((4, 6)).astype(np.float32)
    with interface(in_numpy) as array:
        x, net = array(values), initialized(in_sequence(nn.Dense(5, in_units=6), nn.Dense(3)))
        net(x)
        WAYS[way](net)
        part, whole = net[0](x).asnumpy(), net(x).asnumpy()
        net.hybridize(hybridize)
        joins = Joins(*net)
        joins.hybridize(outer_hybridized)
        found = joins(x)
        assert [one.dtype for one in found] == 3 * [np.float32]
    joined, sums, last = (one.asnumpy() for one in found)
    if way in SAME_BITS_HYBRIDIZED:
        assert_same_bits([np.concatenate([part, values], axis=1), whole], [joined, last])
    else:  # a product is rounded from another sum now and then
        np.testing.assert_allclose(last, whole, atol=2**-7 * np.abs(whole).max())
    expected = np.tanh(joined[:, :5]) + np.float32(1.1) * joined[:, :5]  # of the same sign
    np.testing.assert_allclose(sums, expected, rtol=2**-20)


def test_a_weight_shared_by_two_cast_blocks_is_cast_and_restored_once():
    first = nn.Dense(192, in_units=192)
    second = nn.Dense(192, in_units=192, params=first.collect_params())
    net = in_sequence(first, second)
    initialized_with_shapes(net)
    before = parameters_of(net)
    assert mpgluon.cast_block(net).parameters_cast == 2
    mpgluon.restore(net)
    assert_same_bits(before, parameters_of(net))


@EITHER
@BOTH
def test_cast_and_restore_leave_weights_outputs_and_instances_as_they_were(way, hybridize):
    net = initialized_with_shapes()
    net.hybridize(hybridize, **STATIC)
    weights, output, attributes = parameters_of(net), net(IMAGES), instance_attributes(net)
    way(net)
    assert not np.array_equal(
        output.asnumpy(), net(IMAGES).asnumpy()
    )  # not the graph from before the cast
    assert instance_attributes(net) != attributes
    mpgluon.restore(net)
    assert_same_bits(weights, parameters_of(net))
    assert np.array_equal(output.asnumpy(), net(IMAGES).asnumpy())
    assert instance_attributes(net) == attributes
    mpgluon.restore(net)  # nothing to do
    assert_same_bits(weights, parameters_of(net))


def test_restore_after_training_returns_the_master_weights():
    net = cast_net(initialized_with_shapes())
    train(net, [IMAGES], LABELS, 2)
    trained = parameters_of(net)
    mpgluon.restore(net)
    for name, value in parameters_of(net).items():
        assert value.dtype == np.float32
        assert np.array_equal(value.astype(trained[name].dtype), trained[name])
        if name == "0.weight":  # more than float16 could hold
            assert not np.array_equal(value, trained[name])


def test_restore_widens_what_was_set_after_training():
    net = cast_net(initialized_with_shapes())
    train(net, [IMAGES], LABELS, 2)
    net[0].weight.set_data(net[0].weight.data() * 2)
    doubled = net[0].weight.data().asnumpy()
    mpgluon.restore(net)
    assert np.array_equal(net[0].weight.data().asnumpy(), doubled)


def test_only_what_training_changed_is_widened_the_rest_gets_its_bits_back():
    net = initialized_with_shapes()
    before = parameters_of(net)
    mpgluon.cast_block(net)
    net[0].weight.set_data(net[0].weight.data() + 1)
    mpgluon.restore(net)
    after = parameters_of(net)
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert changed == ["0.weight"]


@pytest.mark.parametrize("devices", [2, 3, 7])
def test_restore_gives_back_the_bits_on_several_devices(devices):
    # Averaging seven equal copies rounds, and two copies of 40000 add to infinity in float16.
    net = nn.Dense(3, in_units=500)
    net.initialize(mx.init.Uniform(40000), ctx=[mx.cpu(i) for i in range(devices)])
    before = [array.asnumpy() for array in net.weight.list_data()]
    mpgluon.cast_block(net)
    mpgluon.restore(net)
    assert np.array_equal(before, [array.asnumpy() for array in net.weight.list_data()])


@BOTH
def test_a_restored_part_computes_in_fp32_inside_the_cast_network(hybridize):
    net = two_branches()
    before = parameters_of(net)
    mpgluon.cast_block(net)
    net.hybridize(hybridize)
    net(IMAGES)
    mpgluon.restore(net[1])
    assert {np.dtype(p.dtype) for p in net[1].collect_params().values()} == {np.dtype("f4")}
    assert (net[0].weight.data().dtype, net(IMAGES).dtype) == (np.float16, np.float32)
    assert np.isfinite(train(net, [IMAGES], LABELS, 1)).all()
    with pytest.raises(PrecisionError, match=rf"as a part of {net.name}; call mpgluon.restore"):
        mpgluon.cast_block(net[1])
    mpgluon.restore(net)
    net(IMAGES)
    assert set(dtypes_of(net).values()) == {"float32"}
    assert before.keys() == parameters_of(net).keys()
    mpgluon.cast_block(net)  # and may be cast again


def test_mxnet_is_not_patched():
    def everything():
        places = (mx.nd, mx.sym, mx.nd.NDArray, mx.sym.Symbol, nn.Dense, nn.Conv2D, nn.BatchNorm)
        places += (gluon.HybridBlock, gluon.Block, gluon.Parameter, mx.nd.contrib, mx.sym.contrib)
        return [dict(vars(place)) for place in places]

    before = everything()
    net = cast_net(initialized_with_shapes())
    net.hybridize()
    train(net, [IMAGES], LABELS, 1)
    assert everything() == before
    mpgluon.restore(net)
    assert everything() == before


def test_the_input_array_keeps_its_class_and_its_gradient():
    net = Calls(lambda F, x, weight: (x * 2).sum() + weight.sum())  # noqa: ARG005
    net.initialize()
    mpgluon.cast_block(net)
    x = mx.nd.ones((2, 3), dtype="float16")
    x.attach_grad()
    backward_from(lambda: net(x))
    assert type(x) is mx.nd.NDArray
    assert type(net.weight.data()) is mx.nd.NDArray
    assert x.grad.asnumpy().tolist() == [[2] * 3] * 2
    assert net.weight.grad().asnumpy().tolist() == [[1] * 4] * 3


class ByHand(gluon.Block):
    """A plain Block with a parameter of its own and plain calls."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        with self.name_scope():
            self.inner = nn.Dense(4)
            self.scale = self.params.get("scale", shape=(1,), init="ones")

    def forward(self, x):
        return self.function(self.inner(x), self.scale.data())


@BOTH
@pytest.mark.parametrize("root", [nn.HybridSequential, nn.Sequential])
def test_containers_of_both_kinds_give_the_same_bits(root, hybridize):
    results = []
    for container in (nn.HybridSequential, root):
        net = container()
        net.add(*small_network())
        initialized_with_shapes(net)
        assert mpgluon.cast_block(net).beyond_reach == ()
        if container is root and hybridize:
            net.hybridize()
        losses = train(net, [IMAGES], LABELS, 2)
        results.append(np.array([*losses, *net(IMAGES).asnumpy().T]))
    assert np.array_equal(*results)


class AndItsInput(gluon.nn.Dense):
    def hybrid_forward(self, F, x, weight, bias):
        return super().hybrid_forward(F, x, weight, bias), x


@pytest.mark.parametrize("has_gradient", [False, True], ids=["no gradient", "gradient"])
@pytest.mark.parametrize("options", [{}, STATIC], ids=["dynamic", "static"])
@EACH_WAY
def test_a_hybridized_network_may_return_its_input(way, options, has_gradient):
    net = AndItsInput(3, in_units=4)
    net.initialize(mx.init.One())
    WAYS[way](net)
    net.hybridize(**options)
    x = mx.nd.ones((2, 4))
    if has_gradient:
        x.attach_grad()
    with autograd.record():
        result, same = net(x)
        loss = result.sum() + (same * 2).sum()
    loss.backward()
    np.testing.assert_array_equal(net.weight.grad().asnumpy(), np.full((3, 4), 2))
    if has_gradient:
        np.testing.assert_array_equal(x.grad.asnumpy(), np.full((2, 4), 3 + 2))


def test_a_plain_block_is_cast_with_its_own_parameters():
    net = initialized_with_shapes(ByHand(lambda y, scale: y * scale))
    report = mpgluon.cast_block(net)
    assert net.name in report.cast
    assert report.beyond_reach == ()
    assert net.scale.data().dtype == np.float16
    assert net.inner.weight.data().dtype == np.float16
    assert net(IMAGES).dtype == np.float32


class AsksNumPy(ByHand):
    def forward(self, x):
        y = self.inner(x)
        return y / float(y.asnumpy().max())


def test_a_line_that_leaves_the_cast_is_named_by_file_and_line():
    net = nn.Sequential()
    net.add(nn.Dense(4), AsksNumPy(None), nn.Lambda("relu"))
    report = mpgluon.cast_block(initialized_with_shapes(net))
    (entry,) = report.beyond_reach
    assert (entry.name, entry.kind) == (net[1].name, "AsksNumPy")
    number = inspect.getsourcelines(AsksNumPy.forward)[1] + 2
    assert entry.advice.startswith(f"test_block.py:{number} calls asnumpy")
    assert f"beyond reach: {net[1].name} (AsksNumPy): test_block.py" in str(report)
    mpgluon.restore(net)
    assert mpgluon.cast_block(net, keep_fp32=[net[1]]).beyond_reach == ()
    assert net[1](net[0](IMAGES)).dtype == np.float32


def symbol_block():
    inner = initialized_with_shapes(nn.Dense(4))
    inner.hybridize()
    inner(IMAGES)
    data = mx.sym.var("data")
    block = gluon.SymbolBlock(inner(data), data, params=inner.collect_params())
    net = in_sequence(nn.Dense(192), block, nn.Dense(3))
    net[0].initialize()
    net[2].initialize()
    net(IMAGES)
    return net


@BOTH
def test_a_kept_symbol_block_computes_in_fp32(hybridize):
    net = symbol_block()
    mpgluon.cast_block(net, keep_fp32=(net[1],))
    net.hybridize(hybridize)
    assert (net(IMAGES).dtype, net[1](net[0](IMAGES)).dtype) == (np.float32, np.float32)
    mpgluon.restore(net)
    assert net(IMAGES).dtype == np.float32


def test_outputs_of_hybridized_children_follow_the_table_in_an_imperative_parent():
    results = []
    for hybridize in (False, True):
        net = Calls(lambda F, x, weight: x)  # noqa: ARG005
        mx.random.seed(0)
        first, second = initialized(nn.Dense(4, in_units=192)), nn.Dense(4, in_units=192)
        second.initialize()
        net.first, net.second = first, second
        wide = mx.nd.array([[1.0, 2.0, 3.0, 2.0**-20]])
        seen = []

        def forward(F, x, weight, net=net, wide=wide, seen=seen):  # noqa: ARG001
            y = net.first(x)
            seen.append(type(y))
            return F.concat(y + net.second(x) + wide, wide - y, y.mean().reshape((1, 1)), dim=1)

        net.function = forward
        net.initialize()
        mpgluon.cast_block(net)
        if hybridize:
            first.hybridize()
            second.hybridize()
        results.append(net(IMAGES[:1]).asnumpy())
        assert seen == [Float16Array]
    assert np.array_equal(*results)


SUM = mx.sym.elemwise_add(mx.sym.var("one"), mx.sym.var("other"))


@pytest.mark.usefixtures("native_bfloat16")
def test_a_batch_norm_along_an_axis_that_onednn_has_not_returns_fp32_in_a_graph_too():
    net = in_sequence(nn.Dense(8, flatten=False), nn.BatchNorm(axis=-1))
    net.initialize()
    amp.autocast(net, "bfloat16")
    expected = net(IMAGES)
    net.hybridize()
    assert_same_bits(net(IMAGES).asnumpy(), expected.asnumpy())


@pytest.mark.usefixtures("native_bfloat16")
@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
def test_two_formats_in_a_composed_graph_are_explained_with_the_names_of_block_and_operator(fmt):
    dense = nn.Dense(4, in_units=3)
    net = Calls(lambda F, x, weight: SUM(one=dense(x), other=F.sum(weight, axis=0, keepdims=True)))
    net.register_child(dense)
    net.initialize()
    amp.autocast(net, fmt)
    net.hybridize()
    message = rf"^{net.name} \(Calls\).*{fmt} and FP32.*keep_fp32.*elemwise_add.*{fmt}.*float32"
    with pytest.raises(PrecisionError, match=message) as refused:
        net(mx.nd.ones((1, 3))).wait_to_read()
    assert isinstance(refused.value.__cause__, mx.MXNetError)


def test_two_formats_that_meet_in_a_compiled_graph_are_explained_with_the_line_of_the_call():
    compiled = mx.nd.CachedOp(SUM)
    net = Calls(lambda F, x, weight: compiled(F.dot(x, weight), mx.nd.zeros((1, 4))))
    net.initialize()
    mpgluon.cast_block(net)
    line = net.function.__code__.co_firstlineno
    with pytest.raises(PrecisionError, match=rf"float16 and FP32 arrays at .*{__file__}:{line}\."):
        net(mx.nd.ones((1, 3)))


class AddsItsInput(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        self.body = nn.Dense(4, in_units=4)

    def hybrid_forward(self, F, x):
        return F.relu(x + self.body(x))


def test_a_network_that_was_cast_before_is_traced_in_its_present_formats(tmp_path):
    net = in_sequence(nn.Dense(4, in_units=4), AddsItsInput())
    net.initialize(mx.init.Uniform(1))
    x = mx.nd.ones((2, 4))
    mpgluon.cast_block(net)
    net.hybridize()
    net(x)
    mpgluon.restore(net)
    mpgluon.cast_block(net, keep_fp32=[net[1]])
    net.hybridize(False)
    expected = net(x).asnumpy()
    net.hybridize()
    np.testing.assert_array_equal(net(x).asnumpy(), expected)
    mpgluon.restore(net)
    net.hybridize()
    net(x)
    net.export(str(tmp_path / "net"))
    assert "float16" not in (tmp_path / "net-symbol.json").read_text()


def test_a_plain_block_may_mix_formats():
    net = nn.Sequential()
    net.add(ByHand(lambda y, scale: mx.nd.broadcast_mul(y.astype("float32"), scale)), nn.Dense(3))
    net.initialize()
    mpgluon.cast_block(net)
    assert net(IMAGES).dtype == np.float32


@BOTH
def test_other_errors_of_mxnet_pass_unchanged(hybridize):
    net = Calls(lambda F, x, weight: F.dot(x, weight))
    net.initialize()
    mpgluon.cast_block(net)
    net.hybridize(hybridize)
    with pytest.raises(mx.MXNetError, match=r"(?i)shape|dot"):
        net(mx.nd.ones((2, 5))).wait_to_read()


def test_the_first_hybridized_call_may_come_from_several_threads_at_once():
    for _ in range(5):
        net = cast_net(initialized_with_shapes())
        expected = net(IMAGES).asnumpy()
        net.hybridize()
        start, results = Barrier(6), []

        def call(net=net, start=start, results=results):
            start.wait()
            results.append(net(IMAGES).asnumpy())

        threads = [Thread(target=call) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 6
        assert all(np.array_equal(result, expected) for result in results)


@EITHER
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        *(
            ({"net": net}, TypeError, r"net must be a gluon\.Block, received")
            for net in (None, 3, nn.Dense)
        ),
        *(({"dtype": dtype}, TypeError, "dtype must be text") for dtype in (None, 16, float)),
        *(({"dtype": dtype}, ValueError, f"received .*'{dtype}'") for dtype in ("float64", "half")),
        ({"dtype": Policy.parse("float32")}, ValueError, "nothing in 16 bits"),
        *(
            ({"keep_fp32": (entry,)}, TypeError, "keep_fp32 holds block types, blocks, and names")
            for entry in (3, None)
        ),
        *(
            ({"keep_fp32": keep}, TypeError, "keep_fp32 is a collection")
            for keep in ("dense", nn.Dense, nn.Dense(2))
        ),
    ],
)
def test_other_arguments_are_refused(way, arguments, error, message):
    arguments = {"net": small_network(), **arguments}
    with pytest.raises(error, match=message):
        way(**arguments)


@EITHER
def test_the_error_for_a_refused_format_names_the_allowed_ones(way):
    with pytest.raises(ValueError, match=r"'half'.*one of float32, float16, bfloat16, mixed"):
        way(small_network(), "half")
    with pytest.raises(ValueError, match=r"mpgluon\.restore\(net\) takes a cast off"):
        way(small_network(), "float32")


def test_the_name_of_a_policy_means_the_same_in_cast_block_and_autocast():
    for text in (
        "mixed_float16",
        "mixed_bfloat16",
        "emulated_bfloat16",
        "params=float16,compute=float16",
    ):
        made = [way(small_network(), text).policy for way in (mpgluon.cast_block, amp.autocast)]
        assert made == [Policy.parse(text)] * 2


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_the_name_of_a_format_casts_the_parameters_in_cast_block_and_not_in_autocast(name):
    assert mpgluon.cast_block(small_network(), name).policy == Policy.parse(name)
    assert amp.autocast(small_network(), name).policy == Policy.parse(f"mixed_{name}")


def test_keep_fp32_refuses_a_block_of_another_network():
    net, other = small_network(), nn.Dense(3)
    with pytest.raises(ValueError, match=rf"not in {net.name}: {other.name}$"):
        mpgluon.cast_block(net, keep_fp32=(other,))
    assert set(dtypes_of(net).values()) == {"float32"}


def test_a_second_cast_is_refused_anywhere_and_changes_nothing():
    net = cast_net(initialized_with_shapes())
    before = parameters_of(net)
    for block in (net, net[0], in_sequence(net)):
        for way in (mpgluon.cast_block, amp.autocast):
            with pytest.raises(PrecisionError, match=rf"already cast.*restore on {net.name}"):
                way(block)
    assert_same_bits(before, parameters_of(net))


@BOTH
@EITHER
def test_a_lambda_layer_made_from_a_name_follows_the_table(way, hybridize):
    values = mx.nd.array(np.linspace(-3, 3, 12).reshape(4, 3), dtype="float32")
    by_name, by_function = nn.HybridLambda("tanh"), nn.HybridLambda(lambda F, x: F.tanh(x))
    results = []
    for layer in (by_name, by_function):
        net = in_sequence(nn.Dense(3, in_units=3, weight_initializer=mx.init.One()), layer)
        net.initialize()
        way(net)
        net.hybridize(hybridize)
        results.append(net(values).asnumpy())
    assert (results[0] == results[1]).all()
    assert (results[0] == results[0].astype(np.float16)).all()


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16")])
def test_a_numpy_dtype_is_as_good_as_its_name(dtype):
    for way in (mpgluon.cast_block, amp.autocast):
        net = nn.Dense(3, in_units=4)
        net.initialize()
        assert way(net, dtype).policy.compute_dtype == "float16"


def layers_with(*values, initialize=True):
    net = nn.HybridSequential()
    for value in values:
        net.add(nn.Dense(3, in_units=2, bias_initializer="zeros"))
        if initialize:
            net[-1].initialize()
            net[-1].weight.set_data(mx.nd.array(value))
    return net


@pytest.mark.parametrize("cast", [mpgluon.cast_block, amp.autocast])
@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ([[[1, 2], [65504, 3], [65519, 4]]], []),  # the last is rounded to the largest number
        ([[[1, 65520], [1e5, 3], [4, -1e30]]], ["3 in dense"]),
        (
            [[[1, 65520], [2, 3], [4, 5]], np.ones((3, 2)), [[1e9, 1e9], [1, 1], [1, 1]]],
            ["1 in dense", "2 in dense"],
        ),
        ([[[np.inf, np.nan], [2, 3], [4, 5]]], []),  # were infinite before
    ],
)
def test_weights_that_become_infinite_are_logged_with_names_and_counts(
    values, counts, cast, caplog
):
    cast(layers_with(*values))
    if cast is amp.autocast or not counts:  # autocast changes no weight
        assert caplog.messages == []
        return
    (message,) = caplog.messages
    total = sum(int(count.split()[0]) for count in counts)
    assert message.startswith(f"{total} weights are beyond float16's range (65504)")
    for count in counts:
        assert count in message
    assert "keep_fp32" in message
    kept = layers_with(*values)
    caplog.clear()
    cast(kept, keep_fp32=list(kept))
    assert caplog.messages == []


@pytest.mark.parametrize("cast", [mpgluon.cast_block, amp.autocast])
def test_float64_parameters_are_logged(cast, caplog):
    net = layers_with([[1, 2], [3, 4], [5, 6]])
    net.cast("float64")
    cast(net)
    (message,) = caplog.messages
    assert message.startswith("2 of 2 parameters are float64, the first is dense")
    assert net(mx.nd.ones((1, 2), dtype="float64")).dtype == np.float64


def test_many_layers_with_such_weights_are_logged_in_one_line(caplog):
    mpgluon.cast_block(layers_with(*[np.full((3, 2), 1e6)] * 7))
    (message,) = caplog.messages
    assert message.startswith("42 weights")
    assert message.count("6 in dense") == 5
    assert "…" in message


def test_layers_without_values_are_cast_without_a_warning(caplog):
    mpgluon.cast_block(layers_with(1, 2, initialize=False))
    assert caplog.messages == []


class TargetsOfBoxes(gluon.HybridBlock):
    """Returns the three results of an operator as the operator does: in a graph, one Symbol."""

    def hybrid_forward(self, F, scores, anchors, labels):
        return F.contrib.MultiBoxTarget(anchors, labels, scores)


@EITHER
@pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])
def test_a_block_may_return_all_results_of_one_operator(way, hybridize):
    random = np.random.default_rng(0)
    scores = mx.nd.array(random.standard_normal((2, 4, 6)))
    anchors = mx.nd.array(random.uniform(0, 1, (1, 6, 4)))
    labels = mx.nd.array([[[0, 0.1, 0.1, 0.7, 0.8]], [[1, 0.2, 0.1, 0.7, 0.8]]])
    net = TargetsOfBoxes()
    expected = mx.nd.contrib.MultiBoxTarget(anchors, labels, scores)
    way(net, "float16")
    net.hybridize(hybridize)
    found = net(scores, anchors, labels)
    assert_same_bits([one.asnumpy() for one in found], [one.asnumpy() for one in expected])


@EACH_WAY
def test_names_may_have_letters_beyond_ascii(way):
    net = nn.HybridSequential(prefix="größe_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(), nn.Dense(3))
    net.initialize()
    WAYS[way](net)
    images = mx.nd.ones((1, 3, 8, 8))
    imperative = net(images).asnumpy()
    net.hybridize()
    np.testing.assert_allclose(net(images).asnumpy(), imperative, rtol=0.02, atol=0.02)
