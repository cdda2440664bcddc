"""Frozen parameters: the others get the same gradients as when all parameters are trained."""

from __future__ import annotations

from mpgluon import amp, kernels
from mpgluon.cast import frozen

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    BOTH,
    EACH_WAY,
    STATIC,
    WAYS,
    assert_same_bits,
    backward_from,
    gradients_of,
    in_sequence,
    in_way,
    initialized,
)
from mxnet import gluon
from mxnet.gluon import nn, rnn

IMAGES = mx.nd.array(np.random.RandomState(0).standard_normal((2, 3, 8, 8)), dtype="float32")


@pytest.fixture
def with_native(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(kernels, "available", lambda: False)
    else:
        request.getfixturevalue("native_operators")
    return request.param


class FixedProjection(gluon.HybridBlock):
    """A dense layer whose weight is a constant."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            matrix = mx.nd.array(np.random.RandomState(1).standard_normal((4, 192)))
            self.matrix = self.params.get_constant("matrix", matrix)
            self.offset = self.params.get("offset", shape=(4,), init="zeros")

    def hybrid_forward(self, F, x, matrix, offset):
        return F.FullyConnected(x, matrix, offset, num_hidden=4)


def unrolled_cell():
    class Unrolled(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.cell = rnn.LSTMCell(5)

        def hybrid_forward(self, F, x):
            x = F.reshape(x, (0, 3, -1))
            return self.cell.unroll(3, x, layout="NTC", merge_outputs=True)[0]

    return Unrolled()


NETWORKS = {
    "convolution": lambda: in_sequence(nn.Conv2D(4, 3)),
    "convolutions": lambda: in_sequence(
        nn.Conv2D(16, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Conv2D(16, 3, padding=1)
    ),
    "groups": lambda: in_sequence(nn.Conv2D(6, 3, groups=3)),
    "dense": lambda: in_sequence(nn.Dense(5)),
    "dense layers": lambda: in_sequence(nn.Dense(7, activation="relu"), nn.Dense(5)),
    "every position": lambda: in_sequence(nn.Dense(5, flatten=False)),
    "recurrent cell": unrolled_cell,
}


def gradients(make, way, hybridize, frozen_names=(), *, data=False, before=None):
    """Return every gradient, of the second of two steps, into memory that held something else."""
    mx.random.seed(0)
    net = initialized(make(), mx.init.Uniform(0.5))
    net(IMAGES)
    WAYS[way](net)
    net.hybridize(hybridize, **STATIC)
    if before is not None:
        before(net)
    for place, parameter in net._collect_params_with_prefix().items():
        if place.endswith(tuple(frozen_names)):
            parameter.grad_req = "null"
    images = IMAGES.copy()
    if data:
        images.attach_grad()
    for _ in range(2):
        for parameter in net.collect_params().values():
            if parameter.grad_req != "null":
                parameter.grad()[:] = 7.5
        backward_from(lambda: (net(images) ** 2).sum())
    found = gradients_of(net)
    return {**found, "data": images.grad.asnumpy()} if data else found


def assert_the_rest_is_unchanged(frozen_gradients, all_gradients):
    assert frozen_gradients
    assert_same_bits(frozen_gradients, {name: all_gradients[name] for name in frozen_gradients})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("with_native", [False, True], ids=["mxnet", "native"], indirect=True)
@BOTH
@EACH_WAY
@pytest.mark.parametrize("network", list(NETWORKS))
def test_gradients_of_trained_parameters_do_not_depend_on_frozen_ones(
    network,
    way,
    hybridize,
    with_native,  # noqa: ARG001
):
    make = NETWORKS[network]
    everything = gradients(make, way, hybridize, data=True)
    for names in (("weight",), ("bias",), ("weight", "bias"), ("0.weight",)):
        assert_the_rest_is_unchanged(gradients(make, way, hybridize, names, data=True), everything)
    assert_the_rest_is_unchanged(gradients(make, way, hybridize, ("weight",)), everything)


@BOTH
@EACH_WAY
def test_a_bias_with_a_constant_matrix_gets_its_gradient(way, hybridize):
    (offset,) = gradients(FixedProjection, way, hybridize).values()
    mx.random.seed(0)
    net = in_way(way, initialized(FixedProjection()))
    expected = 2 * net(IMAGES).asnumpy()
    np.testing.assert_allclose(offset, expected.sum(axis=0), rtol=2**-6, atol=2**-4)


def step(net):
    backward_from(lambda: (net(IMAGES) ** 2).sum())


@BOTH
@pytest.mark.parametrize("way", ["cast float16", "autocast float16"])
def test_freezing_and_thawing_between_steps_is_noticed(way, hybridize):
    make = NETWORKS["dense"]
    everything = gradients(make, way, hybridize)

    def thaw(net):
        step(net)
        net[0].weight.grad_req = "null"
        step(net)
        net[0].weight.grad_req = "write"
        step(net)

    assert_same_bits(gradients(make, way, hybridize, before=thaw), everything)
    some = gradients(make, way, hybridize, ("weight",), before=thaw)
    assert_the_rest_is_unchanged(some, everything)


@BOTH
@EACH_WAY
def test_freezing_may_come_before_the_shapes_are_known(way, hybridize):
    found = []
    for frozen_weight in (False, True):
        mx.random.seed(0)
        net = in_way(way, initialized(in_sequence(nn.Dense(5)), mx.init.Uniform(0.5)))
        if frozen_weight:
            net.collect_params(".*weight").setattr("grad_req", "null")
        net.hybridize(hybridize, **STATIC)
        step(net)
        found.append(gradients_of(net))
    assert_the_rest_is_unchanged(found[1], found[0])


@BOTH
def test_a_kept_dense_layer_learns_its_bias_too(hybridize):
    def frozen_and_kept(names):
        mx.random.seed(0)
        net = initialized(in_sequence(nn.Dense(6), nn.Dense(5)), mx.init.Uniform(0.5))
        net(IMAGES)
        amp.autocast(net, "float16", keep_fp32=(net[1],))
        net.collect_params(names).setattr("grad_req", "null")
        net.hybridize(hybridize, **STATIC)
        step(net)
        return gradients_of(net)

    assert_the_rest_is_unchanged(frozen_and_kept(".*weight"), frozen_and_kept("none"))


def test_a_frozen_weight_stays_what_it_is_and_restore_takes_its_gradient_off():
    net = initialized(in_sequence(nn.Dense(5), nn.Dense(4)), mx.init.Uniform(0.5))
    net(IMAGES)
    before = net[0].weight.data().asnumpy()
    amp.autocast(net, "float16")
    net[0].weight.grad_req = "null"
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "wd": 0.1})
    step(net)
    trainer.step(2)
    assert net[0].weight.data().asnumpy().tobytes() == before.tobytes()
    assert net[0].weight.data().grad is not None
    with pytest.raises(RuntimeError, match="grad_req='null'"):
        net[0].weight.grad()
    amp.restore(net)
    assert net[0].weight.data().grad is None
    assert net[1].weight.data().grad is not None
    assert net[0].weight.data().asnumpy().tobytes() == before.tobytes()


def test_a_gradient_is_attached_only_where_a_bias_needs_it():
    net = in_sequence(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Dense(5), nn.Dense(4, use_bias=False))
    net.initialize()
    net(IMAGES)
    net.collect_params(".*weight").setattr("grad_req", "null")
    net[3].weight.grad_req = "null"
    frozen.attach_gradients(net)
    attached = {p.name for p in net.collect_params().values() if p.data().grad is not None}
    trained = {p.name for p in net.collect_params().values() if p.grad_req != "null"}
    assert attached - trained == {net[2].weight.name}
    net.collect_params().setattr("grad_req", "null")
    frozen.remove_gradients(net[2])
    frozen.attach_gradients(net)
    assert net[2].weight.data().grad is None
