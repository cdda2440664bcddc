"""Products against float64, within the error that the theory of FP32 sums allows.

The oracle shares nothing with MXNet: direct loops in float64, where products of 16-bit numbers
are exact and sums of them err by less than the bounds' last digits. The bound for a sum of n
exact products in FP32, in any order, then one rounding to the format:
``gamma_n * sum |a||b| + u * |result| + half a subnormal``, where ``gamma_n = n u32/(1 - n u32)``.

References
----------
Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, 3.1 and 4.2.
"""

# ruff: noqa: ARG005 - each gradient is a function of the head and of all operands

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mpgluon import BFLOAT16, FLOAT16, FLOAT32, round_to
from mpgluon.cast.arithmetic import arithmetic_of
from mpgluon.cast.stand_in import namespace_of

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

FORMATS = pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16], ids=str)


def operators_of(fmt):
    return namespace_of(mx.nd, arithmetic_of(fmt.name, "cpu"))


def array_of(values, fmt):
    """Return values of the format as networks hold them: bfloat16 ones in FP32 arrays."""
    return mx.nd.array(values, dtype="float16" if fmt == FLOAT16 else "float32")


def random_values(shape, fmt, seed):
    return round_to(np.random.RandomState(seed).standard_normal(shape), fmt)


# The oracle. Images are (N, C, H, W), weights (O, C / groups, kernel, kernel).


def windows(data, kernel, stride, pad, dilate):
    """Yield each place of the kernel with the slices of the padded data that it meets."""
    padded = data.shape[2] + 2 * pad
    steps = (padded - dilate * (kernel - 1) - 1) // stride + 1
    for i in range(kernel):
        for j in range(kernel):
            rows = slice(i * dilate, i * dilate + stride * (steps - 1) + 1, stride)
            columns = slice(j * dilate, j * dilate + stride * (steps - 1) + 1, stride)
            yield i, j, (slice(None), slice(None), rows, columns)


def per_group(array, axis, groups):
    return np.split(array, groups, axis=axis)


def convolve(data, weight, *, stride, pad, dilate, groups):
    padded = np.pad(data, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    result = []
    for x, w in zip(per_group(padded, 1, groups), per_group(weight, 0, groups)):
        places = windows(data, weight.shape[2], stride, pad, dilate)
        result.append(
            sum(np.einsum("nchw,oc->nohw", x[window], w[:, :, i, j]) for i, j, window in places)
        )
    return np.concatenate(result, axis=1)


def data_gradient(head, weight, data_shape, *, stride, pad, dilate, groups):
    n, c, h, w_ = data_shape
    result = np.zeros((n, c, h + 2 * pad, w_ + 2 * pad))
    parts = zip(
        per_group(result, 1, groups), per_group(head, 1, groups), per_group(weight, 0, groups)
    )
    for dx, dy, w in parts:
        for i, j, window in windows(np.empty(data_shape), weight.shape[2], stride, pad, dilate):
            dx[window] += np.einsum("nohw,oc->nchw", dy, w[:, :, i, j])
    return result[:, :, pad : pad + h, pad : pad + w_]


def weight_gradient(data, head, weight_shape, *, stride, pad, dilate, groups):
    padded = np.pad(data, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    result = np.zeros(weight_shape)
    parts = zip(
        per_group(padded, 1, groups), per_group(head, 1, groups), per_group(result, 0, groups)
    )
    for x, dy, dw in parts:
        for i, j, window in windows(data, weight_shape[2], stride, pad, dilate):
            dw[:, :, i, j] = np.einsum("nohw,nchw->oc", dy, x[window])
    return result


def assert_within_theory(got: np.ndarray, oracle, operands, fmt) -> None:
    """Compare with ``oracle(*operands)``, a sum of products of the operands."""
    exact = oracle(*operands)
    magnitude = oracle(*(np.abs(operand) for operand in operands))
    terms = oracle(*(np.ones_like(operand) for operand in operands))
    assert got.shape == exact.shape
    gamma = terms * FLOAT32.unit_roundoff / (1 - terms * FLOAT32.unit_roundoff)
    before_rounding = gamma * magnitude
    bound = (
        before_rounding
        + fmt.unit_roundoff * (np.abs(exact) + before_rounding)
        + fmt.smallest_subnormal / 2
    )
    assert np.isfinite(got).all()
    assert (np.abs(got.astype(np.float64) - exact) <= bound).all()
    assert np.array_equal(got, round_to(got.astype(np.float64), fmt))  # numbers of the format


@dataclass
class Case:
    """An operator of ``F``, and float64 loops that compute its result and its gradients."""

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    oracle: Any
    gradients: tuple[Any, ...]  # of (head, *operands)
    options: dict[str, Any] = field(default_factory=dict)


def convolution(shape, filters, kernel=3, stride=1, pad=0, dilate=1, groups=1):
    how = {"stride": stride, "pad": pad, "dilate": dilate, "groups": groups}
    data, weight = shape, (filters, shape[1] // groups, kernel, kernel)
    pairs = {"kernel": kernel, "stride": stride, "pad": pad, "dilate": dilate}
    return Case(
        "Convolution",
        (data, weight, (filters,)),
        lambda x, w, b: convolve(x, w, **how) + b[:, None, None],
        (
            lambda head, x, w, b: data_gradient(head, w, x.shape, **how),
            lambda head, x, w, b: weight_gradient(x, head, w.shape, **how),
            lambda head, x, w, b: head.sum(axis=(0, 2, 3)),
        ),
        {
            **{name: (value, value) for name, value in pairs.items()},
            "num_filter": filters,
            "num_group": groups,
        },
    )


def deconvolution(shape, filters, kernel=3, stride=1, pad=0, groups=1):
    how = {"stride": stride, "pad": pad, "dilate": 1, "groups": groups}
    side = stride * (shape[2] - 1) + kernel - 2 * pad
    result = (shape[0], filters, side, side)
    return Case(
        "Deconvolution",
        (shape, (shape[1], filters // groups, kernel, kernel)),
        lambda x, w: data_gradient(x, w, result, **how),  # the transpose of a convolution
        (
            lambda head, x, w: convolve(head, w, **how),
            lambda head, x, w: weight_gradient(head, x, w.shape, **how),
        ),
        {
            "kernel": (kernel, kernel),
            "stride": (stride, stride),
            "pad": (pad, pad),
            "num_filter": filters,
            "num_group": groups,
            "no_bias": True,
        },
    )


CASES = {
    "FullyConnected": Case(
        "FullyConnected",
        ((5, 300), (7, 300), (7,)),
        lambda x, w, b: x @ w.T + b,
        (
            lambda head, x, w, b: head @ w,
            lambda head, x, w, b: head.T @ x,
            lambda head, x, w, b: head.sum(axis=0),
        ),
        {"num_hidden": 7},
    ),
    "dot": Case(
        "dot",
        ((6, 257), (257, 4)),
        lambda a, b: a @ b,
        (lambda head, a, b: head @ b.T, lambda head, a, b: a.T @ head),
    ),
    "dot of a transpose": Case(
        "dot",
        ((33, 6), (33, 4)),
        lambda a, b: a.T @ b,
        (lambda head, a, b: b @ head.T, lambda head, a, b: a @ head),
        {"transpose_a": True},
    ),
    "batch_dot": Case(
        "batch_dot",
        ((3, 6, 129), (3, 4, 129)),
        lambda a, b: a @ b.transpose(0, 2, 1),
        (lambda head, a, b: head @ b, lambda head, a, b: head.transpose(0, 2, 1) @ a),
        {"transpose_b": True},
    ),
    "linalg.gemm2": Case(
        "linalg.gemm2",
        ((2, 6, 65), (2, 65, 4)),
        lambda a, b: a @ b,
        (
            lambda head, a, b: head @ b.transpose(0, 2, 1),
            lambda head, a, b: a.transpose(0, 2, 1) @ head,
        ),
    ),
    "plain convolution": convolution((2, 5, 9, 9), 6, pad=1),
    "16 channels and more": convolution((2, 16, 8, 8), 32, pad=1),
    "pointwise convolution": convolution((2, 24, 5, 5), 8, kernel=1),
    "strided convolution": convolution((2, 3, 11, 11), 8, kernel=5, stride=2, pad=2),
    "grouped convolution": convolution((2, 8, 7, 7), 12, groups=4),
    "depthwise convolution": convolution((2, 32, 7, 7), 32, pad=1, groups=32),
    "dilated convolution": convolution((2, 4, 11, 11), 5, dilate=2, pad=2),
    "deconvolution": deconvolution((2, 6, 5, 5), 4),
    "strided deconvolution": deconvolution((2, 8, 5, 5), 4, kernel=4, stride=2, pad=1),
    "grouped deconvolution": deconvolution((2, 8, 5, 5), 4, stride=2, groups=2),
}
EACH_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def run(case, operands, head_of, fmt):
    """Return the result of the operator, the head gradient chosen for it, and the gradients."""
    function = operators_of(fmt)
    for name in case.operator.split("."):
        function = getattr(function, name)
    arrays = [array_of(operand, fmt) for operand in operands]
    for array in arrays:
        array.attach_grad()
    with autograd.record():
        result = function(*arrays, **case.options)
    assert result.dtype == arrays[0].dtype
    head = head_of(result.shape)
    result.backward(array_of(head, fmt))
    return result.asnumpy(), head, [array.grad.asnumpy() for array in arrays]


@FORMATS
@EACH_CASE
def test_products_and_their_gradients_err_no_more_than_fp32_sums_rounded_once(case, fmt):
    operands = [random_values(shape, fmt, seed) for seed, shape in enumerate(case.shapes)]
    result, head, gradients = run(case, operands, lambda s: random_values(s, fmt, 9), fmt)
    assert_within_theory(result, case.oracle, operands, fmt)
    for gradient, oracle in zip(gradients, case.gradients):
        assert_within_theory(gradient, oracle, [head, *operands], fmt)


@FORMATS
@EACH_CASE
def test_products_of_small_integers_are_the_exact_sums_rounded_once(case, fmt):
    # Every partial sum is an integer below 2**24: FP32 makes no error in any order.
    def integers(shape, seed):
        return np.random.RandomState(seed).randint(-9, 10, shape).astype(np.float64)

    operands = [integers(shape, seed) for seed, shape in enumerate(case.shapes)]
    result, head, gradients = run(case, operands, lambda shape: integers(shape, 9), fmt)
    assert np.array_equal(result, round_to(case.oracle(*operands), fmt))
    for gradient, oracle in zip(gradients, case.gradients):
        assert np.array_equal(gradient, round_to(oracle(head, *operands), fmt))


@FORMATS
def test_sums_go_on_where_a_16_bit_accumulator_would_stand_still(fmt):
    # 16-bit numbers from 4096 on lie `spacing` apart: adding ones one at a time stops long
    # before that, and even from 4096 a further one would be lost.
    n = 4096 + int(4096 * fmt.epsilon)
    in_16_bits = np.float64(0)
    for _ in range(n):
        in_16_bits = round_to(in_16_bits + 1, fmt)
    assert in_16_bits == 2**fmt.significand_bits < n

    ones = array_of(np.ones((1, n)), fmt)
    F = operators_of(fmt)
    image = ones.reshape((1, n, 1, 1))
    for result in (
        F.FullyConnected(ones, ones, no_bias=True, num_hidden=1),
        F.dot(ones, ones.T),
        F.batch_dot(ones.expand_dims(0), ones.expand_dims(0), transpose_b=True),
        F.Convolution(image, image, kernel=(1, 1), num_filter=1, no_bias=True),
    ):
        assert result.asnumpy().item() == n


def test_fp32_operands_of_a_product_are_rounded_before_and_not_only_after():
    # 1 + 2**-11 is halfway between two float16 numbers and goes to 1, the even one.
    halfway = mx.nd.array([[1 + 2.0**-11] * 3])
    product = operators_of(FLOAT16).FullyConnected(halfway, halfway, no_bias=True, num_hidden=1)
    assert (product.dtype, product.asnumpy().item()) == (np.float16, 3)


def test_float16_products_overflow_where_float16_ends_and_not_before():
    F = operators_of(FLOAT16)
    row = mx.nd.array([[256.0, 256.0]], dtype="float16")
    below = mx.nd.array([[255.0, 0.875]], dtype="float16")  # 65504 in all
    assert F.dot(row, below.T).asnumpy().item() == FLOAT16.max
    assert F.dot(row, row.T).asnumpy().item() == np.inf
    # Partial sums may pass the end and come back, as in a Tensor Core.
    there = mx.nd.array([[256.0, 256.0, -256.0]], dtype="float16")
    back = mx.nd.array([[256.0, 256.0, 512.0]], dtype="float16")
    assert F.dot(there, back.T).asnumpy().item() == 0
