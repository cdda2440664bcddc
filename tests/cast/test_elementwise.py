"""Arithmetic between products: every way to write ``x + y`` is the correctly rounded one.

The oracle computes in float64 and rounds once. That is the correctly rounded result: 53 bits
are more than twice 11 and 2 (Figueroa, 1995).
"""

# ruff: noqa: ARG005 - not every function of F and its arrays uses all

from __future__ import annotations

import operator

import mpgluon
from mpgluon import FLOAT32, Policy
from mpgluon.kernels.dtypes import dtype_name

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, initialized
from mxnet import autograd, gluon

# Not every function uses all inputs of its block.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .* input to HybridBlock is not used"),
    pytest.mark.filterwarnings("ignore:Parameter .* is not used by any computation"),
]
OPERATORS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
EACH_OPERATOR = pytest.mark.parametrize("name", OPERATORS)


def random_float16(seed, n=20000):
    """Return float16 numbers of every size, subnormals among them: random bits."""
    bits = np.random.RandomState(seed).randint(0, 2**16, 2 * n).astype(np.uint16)
    values = bits.view(np.float16)
    return values[np.isfinite(values)][:n]


def rounded(exact):
    with np.errstate(over="ignore"):
        return np.asarray(exact, np.float64).astype(np.float16)


class Two(gluon.HybridBlock):
    """Applies a function to two parameters, and notes the format of the result."""

    def __init__(self, function, x, y):
        super().__init__()
        self.function, self.formats = function, set()
        with self.name_scope():
            for name, values in (("x", x), ("y", y)):
                setattr(self, name, self.params.get(name, shape=values.shape))

    def hybrid_forward(self, F, dummy, x, y):
        result = self.function(F, dummy, x, y)
        self.formats.add(dtype_name(result))
        return result


def made(function, x, y, hybridize, output_dtype="float32"):
    net = initialized(Two(function, x, y))
    for parameter, values in ((net.x, x), (net.y, y)):
        parameter.set_data(mx.nd.array(values.astype(np.float32)))
    mpgluon.cast_block(net, Policy("float16", "float16", output_dtype))
    net.hybridize(hybridize)
    return net


def compute(function, x, y, hybridize, dummy=(0.0,)):
    net = made(function, x, y, hybridize, "float16")
    result = net(mx.nd.array(dummy)).asnumpy()
    (known,) = net.formats
    return result, known


def same(one, other):
    return np.array_equal(one, other, equal_nan=True)


WAYS_TO_WRITE = {
    "F": lambda name: lambda F, dummy, x, y: getattr(F, f"broadcast_{name}")(x, y),
    "elemwise": lambda name: lambda F, dummy, x, y: getattr(F, f"elemwise_{name}")(x, y),
    "Python": lambda name: lambda F, dummy, x, y: OPERATORS[name](x, y),
    "Python on results": lambda name: (
        lambda F, dummy, x, y: OPERATORS[name](F.identity(x), F.identity(y))
    ),
    "after a change of sign": lambda name: lambda F, dummy, x, y: OPERATORS[name](-(x * -1), y),
}


@BOTH
@EACH_OPERATOR
@pytest.mark.parametrize("written", WAYS_TO_WRITE)
def test_two_float16_operands_give_the_correctly_rounded_result(written, name, hybridize):
    x, y = random_float16(1), random_float16(2)
    result, known = compute(WAYS_TO_WRITE[written](name), x, y, hybridize)
    with np.errstate(all="ignore"):
        expected = rounded(OPERATORS[name](x.astype(np.float64), y.astype(np.float64)))
    assert known == "float16"
    assert same(result, expected)


@BOTH
@EACH_OPERATOR
@pytest.mark.parametrize("wide", ["left", "right"])
def test_a_float16_and_an_fp32_operand_give_the_fp32_result(wide, name, hybridize):
    x = random_float16(1, 1000)
    w = np.random.RandomState(3).standard_normal(1000).astype(np.float32)
    pair = (w, x.astype(np.float32)) if wide == "left" else (x.astype(np.float32), w)

    def function(F, dummy, x, y):  # noqa: ARG001
        return OPERATORS[name](dummy, x) if wide == "left" else OPERATORS[name](x, dummy)

    net = made(function, x, x, hybridize)
    with np.errstate(all="ignore"):
        expected = OPERATORS[name](*pair)
    assert same(net(mx.nd.array(w)).asnumpy(), expected)
    assert net.formats == {"float32"}


@BOTH
@EACH_OPERATOR
@pytest.mark.parametrize("reflected", [False, True])
@pytest.mark.parametrize("number", [3, 0.1, -(2.0**-20)])
def test_a_number_with_a_float16_array_counts_as_float16(number, reflected, name, hybridize):
    x = random_float16(1)

    def function(F, dummy, x, y):  # noqa: ARG001
        return OPERATORS[name](number, x) if reflected else OPERATORS[name](x, number)

    result, known = compute(function, x, x, hybridize)
    wide, narrow = x.astype(np.float64), np.float64(np.float16(number))
    with np.errstate(all="ignore"):
        exact = OPERATORS[name](narrow, wide) if reflected else OPERATORS[name](wide, narrow)
    assert known == "float16"
    assert same(result, rounded(exact))


REDUCTIONS = {
    "x.mean()": lambda F, x: x.mean(),
    "x.sum() of a result": lambda F, x: F.identity(x).sum() / 65536.0,
    "of a negation": lambda F, x: (-x).mean(),
    "of a magnitude": lambda F, x: abs(x).mean(),
    "of a cast": lambda F, x: F.cast(x, "float16").mean(),
    "of a cast by name": lambda F, x: F.cast(x, dtype="float16").mean(),
    "F.mean(x)": lambda F, x: F.mean(x),
}


@BOTH
@pytest.mark.parametrize("written", REDUCTIONS)
def test_reductions_sum_in_fp32_however_they_are_written(written, hybridize):
    x = np.full(65536, np.float16(1.25))
    net = made(lambda F, dummy, x, y: REDUCTIONS[written](F, x), x, x, hybridize)
    assert abs(net(mx.nd.zeros(1)).asscalar()) == 1.25  # all partial sums are exact in FP32
    assert net.formats == {"float32"}


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_operators_of_the_inputs_follow_the_table_too(dtype, hybridize):
    def function(F, dummy, x, y):  # noqa: ARG001
        return F.concat(dummy.mean(), (dummy * dummy).sum(), dummy.max(), dim=0)

    net = made(function, np.ones(1), np.ones(1), hybridize)
    assert net(mx.nd.ones(65536 + 4096, dtype=dtype)).asnumpy().tolist() == [1, 69632, 1]


@BOTH
@pytest.mark.parametrize("power", [2, 3])
def test_powers_do_not_overflow_where_float16_would(power, hybridize):
    x = np.float16([300.0, -41.0])
    net = made(lambda F, dummy, x, y: x**power, x, x, hybridize)
    error = np.abs(net(mx.nd.zeros(1)).asnumpy() - x.astype(np.float64) ** power)
    # The power function of the C library errs by at most one unit in the last place.
    assert (error <= 2 * FLOAT32.unit_roundoff * np.abs(x.astype(np.float64) ** power)).all()


@BOTH
def test_comparisons_of_mixed_formats_do_not_round(hybridize):
    x = np.float16([1.0, 1.0])

    def function(F, dummy, x, y):  # noqa: ARG001
        return F.concat(x < dummy, x == dummy, x >= dummy, dim=0)

    result, _ = compute(function, x, x, hybridize, dummy=[1 + 2.0**-20, 1.0])
    assert result.tolist() == [1, 0, 0, 1, 0, 1]


@BOTH
@EACH_OPERATOR
def test_gradients_of_float16_operands_are_float16_and_rounded_once(name, hybridize):
    x, y = (np.abs(random_float16(seed, 500)) for seed in (1, 2))
    x, y = (np.float16(2.0) ** (values.view(np.uint16) % 5) * np.float16(1.25) for values in (x, y))
    head = np.random.RandomState(3).standard_normal(500).astype(np.float16)
    net = made(WAYS_TO_WRITE["Python"](name), x, y, hybridize, "float16")
    with autograd.record():
        result = net(mx.nd.zeros(1))
    result.backward(mx.nd.array(head, dtype="float16"))
    h, a, b = (values.astype(np.float64) for values in (head, x, y))
    exact = {"add": (h, h), "sub": (h, -h), "mul": (h * b, h * a), "div": (h / b, -h * a / b**2)}[
        name
    ]
    for parameter, gradient in zip((net.x, net.y), exact):
        got = parameter.grad().asnumpy()
        assert got.dtype == np.float16
        # One rounding to float16, after at most three FP32 operations.
        bound = (2.0**-11 + 4 * 2.0**-24) * np.abs(gradient) + 2.0**-25
        assert (np.abs(got.astype(np.float64) - gradient) <= bound).all()


@pytest.mark.parametrize("operands", ["FP32 and float16", "float16 and FP32"])
@EACH_OPERATOR
def test_three_gradients_of_a_value_are_added_in_the_same_order_hybridized(operands, name):
    # Python calls a method of the second operand where its class derives from the first one's.
    def function(F, dummy, x, y):  # noqa: ARG001
        value = x * y
        wide, narrow = F.exp(value), F.relu(value)
        pair = (wide, narrow) if operands == "FP32 and float16" else (narrow, wide)
        return OPERATORS[name](*pair) + F.sigmoid(value)

    x, y = (np.float16(np.random.RandomState(seed).uniform(0.5, 2, 2000)) for seed in (1, 2))
    gradients = []
    for hybridize in (False, True):
        net = made(function, x, y, hybridize)
        with autograd.record():
            result = net(mx.nd.zeros(1))
        result.backward(mx.nd.array(np.random.RandomState(3).standard_normal(2000)))
        gradients.append(net.x.grad().asnumpy())
    np.testing.assert_array_equal(*gradients)


class Chosen(gluon.HybridBlock):
    """Chooses between an FP32 and a float16 value of one array, by a comparison of both."""

    def __init__(self, compare, operands):
        super().__init__()
        self.compare, self.operands = compare, operands

    def hybrid_forward(self, F, x):
        pair = F.softmax(x), F.batch_dot(x, x)
        pair = pair if self.operands == "FP32 and float16" else pair[::-1]
        return F.where(self.compare(*pair), *pair)


@pytest.mark.parametrize("operands", ["FP32 and float16", "float16 and FP32"])
@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
def test_operands_of_a_comparison_are_in_the_same_order_hybridized(compare, operands):
    gradients = []
    for hybridize in (False, True):
        net = Chosen(compare, operands)
        mpgluon.amp.autocast(net)
        net.hybridize(hybridize)
        x, head = (
            mx.nd.array(np.random.RandomState(seed).standard_normal((4, 16, 16))) for seed in (1, 2)
        )
        x.attach_grad()
        with autograd.record():
            result = net(x)
        result.backward(head)
        gradients.append(x.grad.asnumpy())
    np.testing.assert_array_equal(*gradients)
