"""Unusual arrays and statements in a cast network of MXNet's NumPy interface.

Each result is the right one, rounded, or an error. A hybridized network takes fewer of them, as in
FP32: MXNet's symbols cannot be written.
"""

from __future__ import annotations

import mpgluon
from mpgluon import BFLOAT16, FLOAT16, PrecisionError, round_to
from mpgluon.kernels.bfloat16 import has_native_bfloat16

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    BOTH,
    EACH_WAY,
    SAME_BITS_HYBRIDIZED,
    WAYS,
    assert_same_bits,
    backward_from,
    cast_net,
    in_sequence,
    initialized,
)
from interfaces import IN_NUMPY, interface
from mxnet import autograd, gluon
from mxnet.base import NotImplementedForSymbol
from mxnet.gluon import nn

VALUES = np.random.RandomState(0).standard_normal((3, 4)).astype(np.float32)
MATRIX = np.random.RandomState(1).standard_normal((4, 4)).astype(np.float32)


def format_of(way):
    return FLOAT16 if "float16" in way.split() else BFLOAT16


class Computes(gluon.HybridBlock):
    """Multiplies its input by a matrix, and computes a function of the product."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.matrix = self.params.get("matrix", shape=(4, 4))

    def hybrid_forward(self, F, x, matrix):
        return self.function(F, F.np.dot(x, matrix), x)


def computed(function, way, values=VALUES, *, hybridize=False, dtype=None):
    with interface(in_numpy=True) as array:
        net = initialized(Computes(function))
        net.matrix.set_data(array(MATRIX))
        if way is not None:
            WAYS[way](net)
        net.hybridize(hybridize)
        return net(array(values, dtype=dtype or values.dtype)).asnumpy()


def adds(_, y, __):
    half = y * 0.5
    y += half
    y += 1.0001
    return y


def subtracts(_, y, __):
    half = y * 0.5
    y -= half
    y -= 1.0001
    return y


def multiplies(_, y, __):
    half = y * 0.5
    y *= half
    y *= 1.0001
    return y


def divides(_, y, __):
    half = y * 0.5
    y /= half + 1
    y /= 1.0001
    return y


def rows_set(_, y, x):
    y[0] = 1.0001
    y[1:] = x[1:]
    return y


def chosen_set(_, y, x):
    y[y > 0] = 0.1
    y[x > 0] = y[x > 0]
    return y


WRITING = {
    adds: lambda _, y, __: (y + y * 0.5) + 1.0001,
    subtracts: lambda _, y, __: (y - y * 0.5) - 1.0001,
    multiplies: lambda _, y, __: (y * (y * 0.5)) * 1.0001,
    divides: lambda _, y, __: (y / (y * 0.5 + 1)) / 1.0001,
    chosen_set: lambda F, y, _: F.np.where(y > 0, y * 0 + 0.1, y),
}


@EACH_WAY
@pytest.mark.parametrize("writing", WRITING)
def test_a_statement_that_writes_an_array_gives_the_bits_of_an_expression(way, writing):
    assert_same_bits([computed(writing, way)], [computed(WRITING[writing], way)])


@EACH_WAY
def test_values_that_are_written_into_a_part_are_rounded(way):
    result = computed(rows_set, way)
    expected = np.concatenate([np.full((1, 4), 1.0001, np.float32), VALUES[1:]])
    if way != "autocast bfloat16" or not has_native_bfloat16():  # there arrays are always FP32
        expected = round_to(expected, format_of(way))
    assert_same_bits([result], [expected])


@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize(
    ("writing", "error"),
    [
        (rows_set, NotImplementedError),
        (chosen_set, NotImplementedError),
        (adds, NotImplementedForSymbol),
    ],
)
def test_a_hybridized_network_refuses_to_write_as_in_fp32(is_cast, writing, error):
    with pytest.raises(error):
        computed(writing, "cast float16" if is_cast else None, hybridize=True)


@EACH_WAY
def test_a_boolean_mask_chooses_elements(way):
    whole = computed(lambda _, y, __: y, way)
    assert_same_bits([computed(lambda _, y, x: y[x > 0], way)], [whole[VALUES > 0]])


@pytest.mark.usefixtures("native_operators")
@EACH_WAY
@BOTH
@pytest.mark.parametrize("name", ["dot", "tensordot", "einsum", "matmul"])
def test_a_product_without_dimensions_is_rounded_once_and_has_a_gradient(way, hybridize, name):
    class Product(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            if name == "tensordot":
                return F.np.tensordot(x, x, axes=1)
            return F.np.einsum("i,i->", x, x) if name == "einsum" else getattr(F.np, name)(x, x)

    values = np.array([1, 32, 33], np.float32)  # their squares have the sum 2114
    with interface(in_numpy=True) as array:
        net, x = Product(), array(values)
        WAYS[way](net)
        net.hybridize(hybridize)
        x.attach_grad()
        result = backward_from(lambda: net(x))
    assert (result.shape, result.item()) == ((), round_to(np.float32(2114), format_of(way)))
    assert x.grad.asnumpy().tolist() == (2 * values).tolist()


@pytest.mark.usefixtures("native_operators")
@EACH_WAY
def test_a_number_without_dimensions_is_an_operand(way):
    result = computed(lambda F, y, x: F.np.dot(y, x.sum()), way, np.eye(3, 4, dtype=np.float32))
    expected = round_to(3 * round_to(MATRIX[:3], format_of(way)), format_of(way))
    assert_same_bits([result], [expected.astype(np.float32)])


@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize(
    ("way", "hybridize"),  # a graph in native bfloat16 casts by oneDNN, which takes no such array
    [*((way, False) for way in WAYS), *((way, True) for way in SAME_BITS_HYBRIDIZED)],
)
def test_an_array_without_elements_passes(way, hybridize):
    empty = np.zeros((0, 4), np.float32)

    def function(F, y, x):
        return F.np.concatenate([F.npx.relu(y) * 2, F.np.tanh(x), F.np.ones((2, 4))], axis=0)

    assert computed(function, way, empty, hybridize=hybridize).tolist() == [[1.0] * 4] * 2


class Squares(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.np.dot(F.np.transpose(x), x) * 0.1


@EACH_WAY
def test_float64_stays_float64_and_meets_no_fp32_parameters(way):
    values = VALUES.astype(np.float64)
    with interface(in_numpy=True) as array:
        net = Squares()
        expected = net(array(values, dtype="float64")).asnumpy()
        WAYS[way](net)
        result = net(array(values, dtype="float64")).asnumpy()
    assert_same_bits([result], [expected])
    for hybridize in (False, True):
        with pytest.raises(PrecisionError, match="is float64"):
            computed(lambda _, y, __: y, way, values, hybridize=hybridize)


@IN_NUMPY
@EACH_WAY
@BOTH
def test_arrays_of_the_other_interface_give_the_same_bits(way, hybridize, in_numpy):
    results = []
    with interface(in_numpy=in_numpy):
        net = in_sequence(nn.Dense(5, in_units=4), nn.Activation("relu"))
        net.initialize(mx.init.One())
        WAYS[way](net)
        net.hybridize(hybridize)
        for make in (mx.nd.array, mx.np.array):
            result = net(make(VALUES))
            assert isinstance(result, mx.np.ndarray) == in_numpy
            results.append(result.asnumpy())
    assert_same_bits(results[:1], results[1:])


@IN_NUMPY
@EACH_WAY
def test_a_float16_input_gives_the_same_bits_hybridized(way, in_numpy):
    results = []
    for hybridize in (False, True):
        with interface(in_numpy=in_numpy) as array:
            net = initialized(in_sequence(nn.Dense(4, in_units=4), nn.LayerNorm(in_channels=4)))
            net[0].weight.set_data(array(MATRIX))
            WAYS[way](net)
            net.hybridize(hybridize)
            x = array(VALUES, dtype="float16")
            x.attach_grad()
            with autograd.record():
                result = net(x) * array(MATRIX[:3, :1])
            autograd.backward(result)
            results.append([result.asnumpy(), x.grad.asnumpy(), net[0].weight.grad().asnumpy()])
    assert_same_bits(*results)
    assert np.abs(results[0][0]).max() > 0.1


@BOTH
@pytest.mark.parametrize("name", ["np.dot", "_np_dot", "np.tanh", "tanh", "npx.relu", "_npx_relu"])
def test_an_operator_that_keep_fp32_names_computes_in_fp32(name, hybridize):
    class Function(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            product = F.np.dot(x, x)
            if name.endswith("dot"):
                return product
            product = product * 1  # which is rounded
            return F.np.tanh(product) if name.endswith("tanh") else F.npx.relu(product) / 3

    square = VALUES[:, :3]
    with interface(in_numpy=True) as array:
        results = []
        for keep_fp32 in ((), (name,)):
            net = cast_net(Function(), keep_fp32=keep_fp32)
            net.hybridize(hybridize)
            results.append(net(array(square)).asnumpy())
    rounded, wide = results
    assert_same_bits([rounded], [round_to(rounded, FLOAT16)])
    assert not np.array_equal(wide, round_to(wide, FLOAT16))


@pytest.mark.parametrize("name", ["np.median", "npx.no_such_operator", "_npi_no_such_operator"])
def test_an_unknown_operator_of_the_interface_is_refused(name):
    net = Squares()
    with interface(in_numpy=True), pytest.raises(ValueError, match="MXNet has no operator"):
        mpgluon.cast_block(net, keep_fp32=[name])
