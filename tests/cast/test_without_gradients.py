"""Layers whose results reach only operators that send zeros back, which can end the process."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    EACH_WAY,
    SAME_BITS_HYBRIDIZED,
    STATIC,
    WAYS,
    assert_same_bits,
    backward_from,
    gradients_of,
    in_way,
    initialized,
)
from mxnet import gluon
from mxnet.gluon import nn

USES = {
    "comparison": lambda F, z, y: F.elemwise_mul(z > 0, y),
    "broadcast_greater": lambda F, z, y: F.broadcast_greater(z, F.zeros_like(y)) * y,
    "activation": lambda F, z, y: F.elemwise_mul(F.Activation(z, act_type="sigmoid") > 0.5, y),
    "clip": lambda F, z, y: (lambda c: F.broadcast_greater(c, F.mean(c)) * y)(F.clip(z, -1, 1)),
    "round": lambda F, z, y: F.round(z) * y,
    "floor": lambda F, z, y: F.floor(z) * y,
    "zeros_like": lambda F, z, y: F.zeros_like(z) + y,
    "BlockGrad": lambda F, z, y: F.BlockGrad(z) * y,
    "argmax": lambda F, z, y: F.broadcast_mul(F.expand_dims(F.argmax(z, axis=1), 1), y),
    "one_hot": lambda F, z, y: F.one_hot(F.argmax(z, axis=1), depth=8) * y,
    "one_hot of values": lambda F, z, y: F.sum(F.one_hot(z, depth=8), axis=1) * y,
    "argsort": lambda F, z, y: F.argsort(z) * y,
    "topk": lambda F, z, y: F.broadcast_mul(F.topk(z), y),
    "where": lambda F, z, y: F.where(z, y, y * 2),
    "normal_like": lambda F, z, y: F.random.normal_like(z) + y,
    "gamma_like": lambda F, z, y: F.random.gamma_like(z) + y,
    "broadcast_like": lambda F, z, y: F.broadcast_like(F.slice_axis(y, axis=0, begin=0, end=1), z),
    "broadcast_like, by name": lambda F, z, y: F.broadcast_like(y, rhs=z),
    "reshape_like": lambda F, z, y: F.reshape_like(y, z),
    "slice_like": lambda F, z, y: F.slice_like(y, z),
}


class Gated(gluon.HybridBlock):
    def __init__(self, use):
        super().__init__()
        self._use = use
        self.gate, self.layer = nn.Dense(8, in_units=8), nn.Dense(8, in_units=8)

    def hybrid_forward(self, F, x):
        return self._use(F, self.gate(x), self.layer(x))


def train_once(way, use, *, hybridize=False):
    """Return a gated network after its backward pass, and its gradients."""
    np.random.seed(0)
    mx.random.seed(0)
    net = in_way(way, initialized(Gated(USES[use]), mx.init.Normal(1.0)))
    net.hybridize(hybridize)
    images = mx.nd.array(np.random.RandomState(0).standard_normal((4, 8)))
    backward_from(lambda: (net(images) ** 2).sum())
    mx.nd.waitall()
    return net, gradients_of(net)


@EACH_WAY
@pytest.mark.parametrize("use", USES)
def test_weights_before_such_an_operator_receive_zeros_as_in_a_graph(way, use):
    net, gradients = train_once(way, use)
    assert all(p.data()._fresh_grad for p in net.collect_params().values())
    assert {name: bool(gradient.any()) for name, gradient in gradients.items()} == {
        **{"gate.weight": False, "gate.bias": False},
        **{"layer.weight": True, "layer.bias": True},
    }
    if way in SAME_BITS_HYBRIDIZED:
        assert_same_bits(gradients, train_once(way, use, hybridize=True)[1])


class Quantized(gluon.HybridBlock):
    """Uses a weight through an operator without a gradient alone."""

    def __init__(self):
        super().__init__()
        self.weight = self.params.get("weight", shape=(4, 8), init=mx.init.Normal(1.0))

    def hybrid_forward(self, F, x, weight):
        return x * F.round(weight)


@EACH_WAY
def test_a_weight_itself_still_receives_zeros(way):
    net, images = Quantized(), mx.nd.ones((4, 8))
    net.initialize()
    WAYS[way](net)
    net.weight.data()._fresh_grad = False
    images.attach_grad()
    backward_from(lambda: net(images).sum())
    assert net.weight.data()._fresh_grad
    assert not net.weight.grad().asnumpy().any()


class WithAddend(gluon.HybridBlock):
    """Adds an input, or a frozen parameter with these values, to what has a gradient."""

    def __init__(self, values=None):
        super().__init__()
        self.weight = self.params.get("weight", shape=(1, 3), init=mx.init.One())
        if values is not None:
            self.frozen = self.params.get_constant("frozen", mx.nd.array(values))
        self.initialize()

    def hybrid_forward(self, F, x, mask=None, frozen=None, weight=None):
        addend = mask if frozen is None else frozen
        return F.abs(F.broadcast_mul(x, weight) + addend)


@pytest.mark.parametrize("addend", ["mask", "float16 mask", "frozen"])
@EACH_WAY
def test_what_is_added_to_a_variable_without_gradient_has_its_own_in_a_static_graph(way, addend):
    x, mask = np.float32([[1, 2, 3], [-2, 4, 5]]), np.float32([[2, -3, 1], [1, 2, -6]])
    net = in_way(way, WithAddend(mask if addend == "frozen" else None))
    net.hybridize(**STATIC)
    inputs = [mx.nd.array(x)]
    if addend != "frozen":
        inputs.append(mx.nd.array(mask, dtype="float16" if "16" in addend else "float32"))
    for _ in range(3):
        backward_from(lambda: net(*inputs))
    gradient = (np.sign(x + mask) * x).sum(0, keepdims=True)
    np.testing.assert_array_equal(net.weight.grad().asnumpy(), gradient)
