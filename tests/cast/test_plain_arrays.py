"""Arrays inside a cast network meet plain arrays, and the plain MXNet of the code around it."""

from __future__ import annotations

import copy
import pickle

from mpgluon import amp
from mpgluon.cast.arrays import FormatArray, GridArray

import mxnet as mx
import numpy as np
import pytest
from helpers import EACH_WAY, EMULATED, WAYS, backward_from, in_sequence, in_way, initialized
from mxnet import autograd, gluon
from mxnet.gluon import nn

KINDS = ("fresh float16", "a parameter's float16", "on bfloat16's grid")
VALUES = np.arange(12, dtype=np.float32).reshape(3, 4) / 8  # numbers of both formats


class Shows(gluon.HybridBlock):
    """A block that shows the arrays that it computes with, and returns the first."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(3, 4), init=mx.init.Constant(VALUES))

    def hybrid_forward(self, F, x, weight):
        self.seen = F.dot(x, F.eye(4)), weight  # a product comes out in the network's format
        return self.seen[0]


def array_of(kind: str):
    """Return ``VALUES`` as an array inside a network, and the same as a plain array."""
    net = initialized(Shows())
    if kind == "on bfloat16's grid":
        amp.autocast(net, EMULATED)
    else:
        WAYS["cast float16"](net)
    net(mx.nd.array(VALUES))
    if kind == "on bfloat16's grid":
        assert isinstance(net.seen[0], GridArray)
        return net.seen[0], mx.nd.array(VALUES)
    x = net.seen[kind == "a parameter's float16"]
    assert isinstance(x, FormatArray)
    assert x.format == "float16"
    return x, mx.nd.array(VALUES, dtype="float16")


def assigned(key, target_dtype=None, part=slice(None)):
    def assign(x):
        buffer = mx.nd.zeros((3, 4), dtype=target_dtype or x.dtype)
        buffer[key] = x[part]
        return buffer

    return assign


def assigned_to(key, value):
    def assign(x):
        x = x.copy()
        x[key] = value(x)
        return x

    return assign


class SquareByHand(autograd.Function):
    def forward(self, x):
        self.save_for_backward(x)
        return x * x

    def backward(self, dy):
        (x,) = self.saved_tensors
        return 2 * x * dy


def gradient_by_hand(x):
    x = x * 1
    x.attach_grad()
    backward_from(lambda: SquareByHand()(x).sum())
    return x.grad


def saved(x, tmp_path):
    mx.nd.save(str(tmp_path / "arrays"), {"x": x})
    return mx.nd.load(str(tmp_path / "arrays"))["x"]


def set_as_parameter(x):
    parameter = initialized(gluon.Parameter("weight", shape=(3, 4)))
    parameter.set_data(x)
    return parameter.data()


def pulled(x):
    store, out = mx.kv.create("local"), mx.nd.zeros((3, 4), dtype=x.dtype)
    store.init("x", x)
    store.pull("x", out=out)
    return out


USES = {
    "nd.array": mx.nd.array,
    "nd.array, another dtype": lambda x: mx.nd.array(x, dtype="float64"),
    "whole": assigned(slice(None)),
    "whole, FP32": assigned(slice(None), "float32"),
    "whole, integers": assigned(slice(None), "int32"),
    "row by row": lambda x: mx.nd.stack(*[assigned(i, part=i)(x) for i in range(3)]),
    "broadcast": assigned(slice(None), part=0),
    "strided": assigned((slice(None), slice(None, None, 2)), part=(slice(None), slice(0, 4, 2))),
    "element": assigned((1, 2), part=(1, 2)),
    "advanced": assigned(mx.nd.array([0, 2], dtype="int32"), part=slice(2)),
    "a plain array into it": assigned_to(1, lambda x: mx.nd.ones((4,))),  # noqa: ARG005
    "a plain array into all of it": assigned_to(slice(None), lambda x: mx.nd.ones((3, 4))),  # noqa: ARG005
    "itself into it": assigned_to(0, lambda x: x[1]),
    "NumPy into it": assigned_to(slice(None), lambda x: np.ones((3, 4))),  # noqa: ARG005
    "autograd.Function": gradient_by_hand,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "copyto": lambda x: x.copyto(mx.nd.zeros((3, 4))),
    "as_in_context": lambda x: x.as_in_context(mx.cpu(1)),
    "concat": lambda x: mx.nd.concat(x, x, dim=0),
    "iteration": lambda x: mx.nd.stack(*list(x)),
    "split_and_load": lambda x: gluon.utils.split_and_load(
        x, [mx.cpu(0), mx.cpu(1)], even_split=False
    )[1],
    "sparse": lambda x: x.astype("float32").tostype("row_sparse"),
    "set_data": set_as_parameter,
    "key-value store": pulled,
    "asnumpy": lambda x: mx.nd.array(x.asnumpy()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", list(USES))
def test_an_array_inside_a_network_can_be_used_wherever_a_plain_one_can(use, kind):
    x, plain = array_of(kind)
    one, other = USES[use](x), USES[use](plain)
    assert (one.dtype, one.asnumpy().tobytes()) == (other.dtype, other.asnumpy().tobytes())


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_saved(kind, tmp_path):
    x, plain = array_of(kind)
    assert np.array_equal(saved(x, tmp_path).asnumpy(), plain.asnumpy())


@pytest.mark.parametrize("kind", KINDS)
def test_its_class_equals_that_of_a_plain_array_in_every_way_of_asking(kind):
    x, plain = array_of(kind)
    assert type(x) == type(plain)  # noqa: E721 - as MXNet asks
    assert type(plain) == type(x)  # noqa: E721
    assert not type(x) != type(plain)  # noqa: E721, SIM202
    assert {mx.nd.NDArray: "plain"}[type(x)] == "plain"
    assert type(x) != mx.sym.Symbol  # noqa: E721
    assert type(x) != mx.nd.sparse.CSRNDArray  # noqa: E721
    assert type(x) is not type(plain)


@EACH_WAY
def test_a_hook_may_keep_what_layers_return(way):
    mx.random.seed(0)
    net = in_sequence(nn.Dense(4, flatten=False), nn.LayerNorm(), nn.Activation("relu"))
    net.initialize(mx.init.Xavier())
    WAYS[way](net)
    kept, buffer = [], mx.nd.zeros((2, 3, 4))

    def keep(block, inputs, output):  # noqa: ARG001 - Gluon's signature
        buffer[len(kept)] = output
        kept.append(mx.nd.array(output))

    for layer in (net[0], net[2]):
        layer.register_forward_hook(keep)
    logits = net(mx.nd.array(VALUES))
    assert all(type(array) is mx.nd.NDArray for array in kept)
    assert np.array_equal(kept[1].asnumpy().astype(np.float32), logits.asnumpy())
    assert np.array_equal(buffer[1].asnumpy(), logits.asnumpy())
    assert np.array_equal(buffer[0].asnumpy(), kept[0].asnumpy().astype(np.float32))


class ByHand(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return SquareByHand()(x)


@EACH_WAY
def test_a_function_with_a_gradient_of_its_own_trains_inside_a_cast_network(way):
    gradients = []
    for inner in (ByHand(), nn.HybridLambda("square")):
        mx.random.seed(0)
        net = in_way(way, initialized(in_sequence(nn.Dense(4), inner), mx.init.Xavier()))
        with autograd.record():
            loss = net(mx.nd.array(VALUES)).sum()
        autograd.backward(loss)
        gradients.append(net[0].weight.grad().asnumpy().astype(np.float32))
    assert np.abs(gradients[1]).max() > 0
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=2**-6, atol=2**-6)
