"""Dtypes that a forward pass asks for by name, in the middle of a cast network and at its end."""

from __future__ import annotations

from mpgluon import amp, kernels

import mxnet as mx
import numpy as np
import pytest
from helpers import STATIC, WAYS, outputs_of
from interfaces import IN_NUMPY, interface
from mxnet import autograd, gluon
from mxnet.gluon import nn

DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")
HYBRIDIZED = (None, {}, {"static_alloc": True}, STATIC)
# Small integers: no format rounds them, so a plain network's results are the right ones.
INPUT = np.array([[1, 2, 3], [3, 1, 2]])
WEIGHT = [[1, 1, 0], [0, 1, 0], [0, 1, 1]]


class Asking(gluon.HybridBlock):
    """A dense layer, then a function of F and the layer's result."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.dense = nn.Dense(3, in_units=3, use_bias=False)

    def hybrid_forward(self, F, x):
        return self.function(F, self.dense(x), x)


def run(function, cast=None, hybridize=None, *, array=mx.nd.array, head=1.0):
    """Return results, their dtypes, and the gradient of ``head`` times the sum of floats."""
    net, x = Asking(function), array(INPUT, dtype="float32")
    net.initialize()
    net.dense.weight.set_data(array(WEIGHT))
    x.attach_grad()
    if cast is not None:
        cast(net)
    if hybridize is not None:
        net.hybridize(**hybridize)
    with autograd.record():
        results = outputs_of(net(x))
        floats = [one for one in results if one.dtype in (np.float16, np.float32)]
        loss = sum((one.astype("float32") * head).sum() for one in floats)
    loss.backward()
    dtypes = [np.dtype(one.dtype).name for one in results]
    return [one.asnumpy() for one in results], dtypes, x.grad.asnumpy()


def asking_for(dtype):
    """Return a function that asks for a dtype in as many ways as a plain network can."""

    def in_nd(F, x):
        y, places = F.cast(x, dtype), F.argmax(x, axis=1)
        results = [x * 2, y, F.cast(F.reshape(F.cast(x > 2, dtype), shape=(2, 3)), "float32") * x]
        if dtype != "bool":
            results += [
                y * 2 + 1,
                F.transpose(y),
                y.sum(axis=1),
                F.max(y, axis=1),
                F.concat(y, y, dim=0),
            ]
            results += [F.one_hot(places, 3, dtype=dtype)]
            results += [F.cast(F.arange(6, dtype=dtype), "float32").reshape((2, 3)) + x]
        if dtype not in ("bool", "int8"):
            results += [*F.topk(x, k=2, ret_typ="both", dtype=dtype), F.argsort(x, dtype=dtype)]
        if "float" in dtype:
            results += [F.Activation(y, act_type="relu"), F.cumsum(x, axis=1, dtype=dtype)]
            results += [F.softmax(x * 0, dtype=dtype) * 0]
        if dtype == "float64":
            results += [F.dot(y, F.transpose(y))]
        return results

    def in_np(F, x):
        y, places = x.astype(dtype), F.np.argmax(x, axis=1)
        mask = (x > 2).astype(dtype).astype("float32")
        results = [x * 2, x > 2, y, places, mask.reshape((2, 3)) * x]
        if dtype != "bool":
            results += [F.npx.one_hot(places, 3, dtype=dtype), y * 2, F.np.max(y, axis=1)]
        return results

    return lambda F, x, _: (in_np if mx.util.is_np_array() else in_nd)(F, x)


def sizes(F, x, _):
    size = F.size_array(x)
    scaled = F.broadcast_mul(x, size.astype("float32"))
    return [size, F.shape_array(x) * 2, F.contrib.index_array(x).sum(axis=-1), scaled]


def assert_as_in_fp32(function, cast, array=mx.nd.array):
    expected, dtypes, gradient = run(function, hybridize={}, array=array)
    # Results in float16 leave a cast network in the dtype that its policy names.
    dtypes = [dtype.replace("float16", "float32") for dtype in dtypes]
    for hybridize in HYBRIDIZED:
        results, found, found_gradient = run(function, cast, hybridize, array=array)
        assert found == dtypes
        for one, other in zip([*results, found_gradient], [*expected, gradient]):
            np.testing.assert_array_equal(one, other)


def fp8(net):
    if not kernels.load():
        pytest.skip(f"FP8 needs the native operators: {kernels.status().sentence}")
    amp.autocast(net, "mixed_float8")


EACH_FORMAT = pytest.mark.parametrize("cast", [*WAYS.values(), fp8], ids=[*WAYS, "FP8"])


@IN_NUMPY
@pytest.mark.parametrize("dtype", DTYPES)
@EACH_FORMAT
def test_every_dtype_passes_a_cast_network_as_it_passes_a_plain_one(cast, dtype, in_numpy):
    with interface(in_numpy) as array:
        assert_as_in_fp32(asking_for(dtype), cast, array)


@EACH_FORMAT
def test_sizes_and_places_pass_a_cast_network_as_they_pass_a_plain_one(cast):
    assert_as_in_fp32(sizes, cast)


FRACTION = 1 + 2.0**-10  # a number of FP16; BF16 and FP8 round it to 1
EXACT = (INPUT * FRACTION).astype(np.float32)
ROUNDED = EXACT.astype(np.float16)
IN_FLOAT16 = {
    "cast": (lambda F, x: F.cast(x, "float16"), ROUNDED),
    "amp_cast": (lambda F, x: F.amp_cast(x, dtype="float16"), ROUNDED),
    "and back": (lambda _, x: x.astype("float16").astype("float32"), ROUNDED),
    "times a number": (lambda _, x: x.astype("float16") * 1.0, ROUNDED),
    "moved": (lambda F, x: F.cast(x, "float16").reshape((3, 2)).reshape((2, 3)), ROUNDED),
    "read twice": (lambda F, x: (lambda y: y * 0.5 + y * 0.5)(F.cast(x, "float16")), ROUNDED),
    "ones": (lambda F, x: F.ones((2, 3), dtype="float16") * x, EXACT),
    "mask": (lambda F, x: F.cast(x > 0, "float16") * x, EXACT),
}


@pytest.mark.filterwarnings("ignore:Parameter .* is not used")
@EACH_FORMAT
@pytest.mark.parametrize("is_native", [True, False], ids=["native operators", "MXNet's own"])
@pytest.mark.parametrize("asked", IN_FLOAT16.values(), ids=IN_FLOAT16)
def test_float16_that_a_network_asks_for_is_that_of_numpy(asked, is_native, cast, monkeypatch):
    function, expected = asked
    if not is_native:
        if cast is fp8:
            pytest.skip("FP8 needs the native operators")
        monkeypatch.setattr(kernels, "available", lambda: False)
    for hybridize in HYBRIDIZED:
        (result,), _, gradient = run(
            lambda F, _, x: function(F, F.cast(x, "float32") * FRACTION),
            cast,
            hybridize,
            head=FRACTION,
        )
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(gradient, np.full(INPUT.shape, FRACTION**2))  # both exact


class Scaling(gluon.HybridBlock):
    """Multiplies by a float16 parameter."""

    def __init__(self):
        super().__init__()
        init = mx.init.Constant(mx.nd.array(ROUNDED))
        self.weight = self.params.get("weight", shape=INPUT.shape, dtype="float16", init=init)

    def hybrid_forward(self, F, x, weight):
        return x * weight


@EACH_FORMAT
def test_float16_inputs_and_parameters_keep_their_values_in_each_format(cast):
    for hybridize in HYBRIDIZED:
        net, x = Scaling(), mx.nd.array(ROUNDED, dtype="float16")
        net.initialize()
        cast(net)
        if hybridize is not None:
            net.hybridize(**hybridize)
        with autograd.record():
            result = net(x)
        autograd.backward(result)
        np.testing.assert_array_equal(result.asnumpy(), ROUNDED * ROUNDED)
        np.testing.assert_array_equal(net.weight.grad().asnumpy(), ROUNDED)


@pytest.mark.parametrize("way", ["cast float16", "emulated bfloat16"])
def test_a_value_that_becomes_fp32_has_the_gradients_of_fp32_in_both_interfaces(way):
    def in_either(F, x, _):
        in_numpy = mx.util.is_np_array()
        wide = (F.np.abs(x) if in_numpy else F.abs(x)).astype("float32")
        mean = (F.np if in_numpy else F).mean(wide, axis=1, keepdims=True) / 16
        # Two gradients meet at ``wide``, whose sum is rounded once.
        return wide * F.np.tanh(mean) if in_numpy else F.broadcast_mul(wide, F.tanh(mean))

    gradients, heads = [], np.random.RandomState(0).standard_normal((8, 2, 3))
    for in_numpy in (False, True):
        with interface(in_numpy) as array:
            for hybridize in HYBRIDIZED:
                found = [
                    run(in_either, WAYS[way], hybridize, array=array, head=array(head, dtype="f4"))
                    for head in heads
                ]
                gradients.append([gradient for _, _, gradient in found])
    for one in gradients:
        np.testing.assert_array_equal(one, gradients[0])


@pytest.mark.parametrize("hybridize", HYBRIDIZED, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@IN_NUMPY
def test_the_gradient_of_a_value_that_leaves_the_format_is_rounded(in_numpy, dtype, hybridize):
    def joined(F, x, _):
        three = F.np.concatenate([x] * 3, axis=1) if in_numpy else F.concat(x, x, x, dim=1)
        return three.astype(dtype).astype("float32")

    # Each of three gradients becomes 1 + 2^-7, their sum 3 + 2^-5; a row of the weights adds three.
    head = 1 + 2**-8 + 2**-9
    with interface(in_numpy) as array:
        found = run(joined, WAYS["emulated bfloat16"], hybridize, array=array, head=head)
    assert found[2].tolist() == [[3 + 2**-5, 9 + 2**-3, 3 + 2**-5]] * 2
