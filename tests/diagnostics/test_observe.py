"""Watching a batch: everything is seen, in order, and nothing is left behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import mpgluon
from mpgluon_tools.diagnostics.observe import observed_batch, observing

import mxnet as mx
import numpy as np
import pytest
from diagnostics_helpers import WAYS, Batch, make_batch, make_net
from helpers import assert_same_bits, backward_from, initialized
from mxnet import autograd, gluon
from mxnet.gluon import nn

from recipes.training.networks import build_network

each_way = pytest.mark.parametrize("way", WAYS)
both = pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])


def gradients_of(net, batch):
    backward_from(lambda: batch.loss_fn(net(batch.inputs), batch.labels))
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    return {p.name: p.grad().asnumpy() for p in trained}


def state_of(net):
    parameters = net.collect_params().values()
    values = [p.data().asnumpy().tobytes() for p in parameters]
    trained = [p for p in parameters if p.grad_req != "null"]
    return values, [(p.grad().asnumpy().tobytes(), p.data()._fresh_grad) for p in trained]


@each_way
def test_what_is_seen_is_in_the_order_of_computation(way):
    seen = []
    observed_batch(
        make_net(way=way),
        make_batch(),
        lambda s: seen.append((s.kind, s.operator, s.block.name.removeprefix("net_") or "net")),
        operators=True,
    )
    forward = [entry for entry in seen if "gradient" not in entry[0]]
    of_python = [] if way == "float32" else [("operator", "broadcast_add", "residual")]
    assert forward == [
        ("operator", "Convolution", "conv0"),
        ("output", "", "conv0"),
        ("operator", "Convolution", "residual_conv0"),
        ("output", "", "residual_conv0"),
        ("operator", "BatchNorm", "residual_batchnorm0"),
        ("output", "", "residual_batchnorm0"),
        *of_python,
        ("operator", "relu", "residual"),
        ("output", "", "residual"),
        ("operator", "FullyConnected", "dense0"),
        ("output", "", "dense0"),
        ("output", "", "net"),
    ]
    backward = [entry for entry in seen if "gradient" in entry[0]]
    blocks = [block for kind, _, block in backward if kind == "output gradient"]
    assert blocks[1:] == ["dense0", "residual", "residual_batchnorm0", "residual_conv0", "conv0"]
    assert [name.split("_")[-1] for kind, name, _ in backward if kind == "gradient"] == [
        *("weight", "bias", "gamma", "beta", "weight", "bias", "weight", "bias")
    ]


@pytest.mark.parametrize("accumulated", [False, True])
@each_way
@both
def test_gradients_are_those_of_training_bit_for_bit_and_the_network_is_left_as_it_was(
    way, hybridize, accumulated
):
    net, batch = make_net(way=way, hybridize=hybridize), make_batch()
    expected = gradients_of(net, batch)
    if accumulated:  # to which nothing may be added
        net.collect_params().setattr("grad_req", "add")
        gradients_of(net, batch)
    before = state_of(net)
    observed = {p.name: g.asnumpy() for p, g in observed_batch(net, batch, lambda _: None).items()}
    assert len(observed) == len(expected) == 8
    if not (way == "auto bfloat16" and hybridize):  # whose graph stays longer in bfloat16
        assert_same_bits(observed, {name: expected[name] for name in observed})
    assert state_of(net) == before
    if not accumulated:
        assert_same_bits(gradients_of(net, batch), expected)


@pytest.mark.slow
def test_a_deep_residual_network_has_its_own_gradients_while_it_is_watched():
    # MXNet's autograd.Function returns garbage here: oneDNN's layouts pass through it unchanged.
    net = build_network("resnet18_v2", classes=10, image_size=32, devices=[mx.cpu()])
    images = mx.nd.array(np.random.RandomState(0).standard_normal((2, 3, 32, 32)))
    batch = Batch(images, mx.nd.array([1, 2]), gluon.loss.SoftmaxCrossEntropyLoss())
    expected = gradients_of(net, batch)
    observed = {p.name: g.asnumpy() for p, g in observed_batch(net, batch, lambda _: None).items()}
    assert_same_bits(observed, {name: expected[name] for name in observed})


def test_plain_blocks_and_several_outputs_are_watched_too():
    class Two(gluon.Block):
        def __init__(self):
            super().__init__(prefix="two_")
            with self.name_scope():
                self.one, self.other = nn.Dense(1, in_units=2), nn.Dense(1, in_units=2)

        def forward(self, x):
            return self.one(x), self.other(x)

    net = initialized(Two())
    for cast in (False, True):
        if cast:
            mpgluon.cast_block(net)
        seen = []
        batch = Batch(mx.nd.ones((1, 2)), None, lambda pair, _: pair[0] + 2 * pair[1])
        observed_batch(net, batch, seen.append)
        outputs = [s.block.name for s in seen if s.kind == "output"]
        assert outputs == ["two_dense0", "two_dense1", "two", "two"]
        gradients = {
            s.block.name: s.array.asscalar()
            for s in seen
            if s.kind == "output gradient" and s.block is not net
        }
        assert list(gradients.values()) == [2, 1]
        net(mx.nd.ones((1, 2)))  # goes on as before


def test_an_observer_that_raises_leaves_the_network_as_it_was():
    net, batch = make_net(hybridize=True), make_batch()
    expected = gradients_of(net, batch)

    def fail(seen):
        raise KeyError(seen.block.name)

    with pytest.raises(KeyError):
        observed_batch(net, batch, fail)
    assert all(block._active for block in (net, net[0], net[1].norm))
    assert_same_bits(gradients_of(net, batch), expected)


def test_parameters_that_the_batch_does_not_use_have_no_gradient():
    used, unused = nn.Dense(1, in_units=2), nn.Dense(1, in_units=2)
    net = nn.HybridSequential()
    net.forward = lambda x: used(x)
    net._children.update({"0": used, "1": unused})
    net.initialize()
    batch = Batch(mx.nd.ones((1, 2)), None, lambda y, _: y)
    gradients = observed_batch(net, batch, lambda _: None)
    assert {parameter.name for parameter in gradients} == {used.weight.name, used.bias.name}
    assert net(batch.inputs).shape == (1, 1)  # by the user's own forward, as before


@pytest.mark.slow
def test_running_statistics_of_a_step_that_is_still_running_are_not_rolled_back():
    images = mx.nd.array(np.random.RandomState(0).standard_normal((40, 3, 32, 32)))
    batch = Batch(images, mx.nd.zeros(40), gluon.loss.SoftmaxCrossEntropyLoss())

    def statistics(*, watched):
        mx.random.seed(0)
        np.random.seed(0)
        net = build_network("cifar_resnet20_v1", classes=10, image_size=32, devices=[mx.cpu()])
        net.hybridize(static_alloc=True, static_shape=True)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
        for _ in range(3):
            backward_from(lambda: batch.loss_fn(net(images), batch.labels))
            trainer.step(40)
        if watched:
            observed_batch(net, batch, lambda _: None)
        mx.nd.waitall()
        frozen = [p for p in net.collect_params().values() if p.grad_req == "null"]
        return [p.data().asnumpy().tobytes() for p in frozen]

    assert statistics(watched=True) == statistics(watched=False)


@each_way
@both
def test_what_a_block_makes_and_hands_on_is_seen_when_asked_for(way, hybridize):
    class Gated(nn.HybridBlock):
        def __init__(self):
            super().__init__(prefix="gated_")
            with self.name_scope():
                self.gate = nn.Dense(4, in_units=4, flatten=False, activation="sigmoid")
                self.again = nn.HybridSequential(prefix="again_")
                with self.again.name_scope():
                    self.again.add(nn.Activation("tanh", prefix="tanh_"))

        def hybrid_forward(self, F, x):
            doubled = x * 2  # handed on twice, and new only once
            return self.again(doubled) + self.gate(doubled) + self.again(x)

    net = nn.HybridSequential(prefix="net_")
    net.add(Gated())
    net.initialize()
    WAYS[way](net)
    net.hybridize(hybridize)
    batch = Batch(mx.nd.ones((2, 4)), None, lambda y, _: y)
    net(batch.inputs)
    seen = []

    def note(one):
        seen.append((one.kind, one.block.name, one.made))

    observed_batch(net, batch, note, handed_on=True)
    assert [(kind, name) for kind, name, _ in seen if kind == "handed on"] == [
        ("handed on", "gated"),
        ("handed on", "gated_dense0"),
    ]
    outputs = [(name, made) for kind, name, made in seen if kind == "output"]
    assert outputs == [
        *(("gated_again_tanh", True), ("gated_again", False)),
        *(("gated_dense0_sigmoid", True), ("gated_dense0", False)),
        *(("gated_again_tanh", True), ("gated_again", False)),
        *(("gated", True), ("net", False)),
    ]
    assert [(name, made) for kind, name, made in seen if kind == "output gradient"] == outputs[::-1]
    seen.clear()
    observed_batch(net, batch, note)
    assert "handed on" not in {kind for kind, *_ in seen}
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in (net, net[0]))


class WithAuxiliaryHead(gluon.HybridBlock):
    """Has a layer that only training uses, as Inception v3 and some detectors have."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.auxiliary = nn.Dense(4), nn.Dense(5), nn.Dense(5)

    def hybrid_forward(self, F, x):
        hidden = self.body(x)
        result = self.head(hidden)
        return result + self.auxiliary(hidden) if autograd.is_training() else result


def test_shapes_of_parts_that_only_training_uses_come_from_the_batch():
    net = initialized(WithAuxiliaryHead())
    gradients = observed_batch(net, make_batch(), lambda _: None)
    assert set(gradients) == set(net.collect_params().values())
    assert net.auxiliary.weight.shape == (5, 4)


def test_a_parameter_that_no_pass_uses_is_left_out():
    net = WithAuxiliaryHead()
    net.unused = nn.Dense(3)
    net.initialize()
    gradients = observed_batch(net, make_batch(), lambda _: None)
    unused = set(net.unused.collect_params().values())
    assert set(gradients) == set(net.collect_params().values()) - unused


def test_calls_in_several_threads_are_kept_apart():
    barrier = Barrier(2)

    class Meeting(gluon.Block):
        def __init__(self, inner=None):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            barrier.wait(30)
            return x + 1 if self.inner is None else self.inner(x)

    net = Meeting(inner=Meeting())
    made = []
    note = observing(net, lambda seen: made.append((seen.block, seen.made)))
    with note, ThreadPoolExecutor(2) as pool:
        list(pool.map(net, [mx.nd.zeros(1), mx.nd.ones(1)]))
    assert sorted(is_made for block, is_made in made if block is net) == [False, False]
    assert [is_made for block, is_made in made if block is not net] == [True, True]


@pytest.mark.parametrize("inputs", [[mx.nd.ones(2)] * 2, {"x": mx.nd.ones(2)}, (), (None,), "x"])
def test_a_batch_has_an_array_or_a_tuple_of_arguments(inputs):
    with pytest.raises(TypeError, match=f"received {type(inputs).__name__}; several arguments"):
        Batch(inputs, mx.nd.ones(2), gluon.loss.L2Loss())
    assert len(Batch((mx.nd.ones(2), None, [mx.nd.ones(1)]), None, print).arguments) == 3


class ReturnsAMask(nn.Dense):
    def hybrid_forward(self, F, x, **parameters):
        result = super().hybrid_forward(F, x, **parameters)
        return result, (result > 0).astype("bool")


@each_way
def test_truth_values_are_seen_and_leave_the_gradients_alone(way):
    net = initialized(ReturnsAMask(4, in_units=3))
    WAYS[way](net)
    seen, x = [], mx.nd.array([[1, 2, 3], [3, 2, 1]])
    batch = mpgluon.diagnostics.Batch(x, x, lambda results, _: results[0].sum())
    gradients = observed_batch(net, batch, lambda s: seen.append((s.kind, s.array.dtype)))
    assert ("output", np.bool_) in seen
    np.testing.assert_array_equal(gradients[net.weight].asnumpy()[0], [4, 4, 4])
