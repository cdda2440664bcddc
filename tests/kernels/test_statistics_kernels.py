"""The statistics of arrays: the native operator against NumPy, in value and gradient."""

from mpgluon import kernels
from mpgluon.kernels.dtypes import cast
from mpgluon.kernels.statistics import (
    LENGTH,
    SAMPLES,
    Statistics,
    probed,
    statistics,
    statistics_in_numpy,
)

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

_SQUARES = 258  # which are added in another order

SIZES = (1, 15, 16, 17, 4095, 4096, 4097, 30001)


def numbers(size, seed=0):
    """Return numbers of all sizes, zeros of both signs, infinities and NaN among them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-45, 38, size)
    values = values.astype(np.float32)
    for place, special in ((3, 0.0), (5, -0.0), (7, np.inf), (11, np.nan), (13, 1e-45)):
        if size > 20:
            values[place] = special
    return values


def assert_same(numbers, expected):
    rest = np.arange(LENGTH) != _SQUARES
    np.testing.assert_array_equal(numbers[rest], expected[rest])
    np.testing.assert_allclose(numbers[_SQUARES], expected[_SQUARES], rtol=1e-12)


@pytest.fixture(autouse=True)
def native():
    if not kernels.load():
        pytest.skip("there are no native operators")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_operator_writes_what_numpy_does(size, dtype):
    values = numbers(size)
    if dtype == "bfloat16":  # of which MXNet's cast loses the subnormal ones, or the NaN's sign
        values[~(np.abs(values) > 1e-37)] = 0
    array = cast(mx.nd.array(values), dtype)
    expected = statistics_in_numpy(cast(array, "float32").asnumpy())
    assert_same(statistics(array).asnumpy()[0], expected)


def test_several_arrays_at_once():
    arrays = [mx.nd.array(numbers(size, size), dtype=dtype)
              for size, dtype in ((3, "float32"), (5000, "float16"), (1, "float32"))]  # fmt: skip
    rows = statistics(*arrays).asnumpy()
    assert rows.shape == (3, LENGTH)
    for row, array in zip(rows, arrays):
        assert_same(row, statistics_in_numpy(cast(array, "float32").asnumpy()))


def test_what_the_numbers_mean():
    values = np.array([0, -0.0, 1, -1.5, 2.0**-20, 1e-45, np.inf, np.nan, -8], np.float32)
    found = Statistics(statistics(mx.nd.array(values)).asnumpy()[0])
    assert (found.size, found.zeros, found.not_finite, found.largest) == (9, 2, 2, 8)
    assert found.norm == pytest.approx(np.sqrt(1 + 2.25 + 64))
    exponents = {int(e) - 127: int(n) for e, n in enumerate(found.counts) if n}
    assert exponents == {-127: 1, -20: 1, 0: 2, 3: 1}
    np.testing.assert_array_equal(found.sample, values[np.arange(SAMPLES) * 9 // SAMPLES])


def test_a_checksum_changes_with_each_bit_and_with_the_order():
    values = numbers(10_000)
    before = Statistics(statistics(mx.nd.array(values)).asnumpy()[0]).checksum
    seen = {before}
    for place, bit in [(0, 0), (1, 31), (4096, 5), (9_999, 22)]:
        codes = values.copy().view(np.uint32)
        codes[place] ^= np.uint32(1 << bit)
        changed = mx.nd.array(codes.view(np.float32))
        seen.add(Statistics(statistics(changed).asnumpy()[0]).checksum)
    for order in (values[::-1], np.roll(values, 1), np.roll(values, 4096), -values):
        seen.add(Statistics(statistics(mx.nd.array(order)).asnumpy()[0]).checksum)
    assert len(seen) == 9


def test_the_statistics_do_not_depend_on_the_layout():
    images = mx.nd.random.normal(shape=(2, 32, 9, 9))
    weight = mx.nd.random.normal(shape=(32, 32, 3, 3))
    blocked = mx.nd.Convolution(images, weight, kernel=(3, 3), num_filter=32, no_bias=True)
    found = statistics(blocked).asnumpy()[0]
    assert_same(found, statistics_in_numpy(blocked.asnumpy()))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_probe_passes_values_on_and_receives_the_statistics_of_the_gradient(dtype):
    array = mx.nd.array(numbers(5000)[20:], dtype=dtype)
    array.attach_grad()
    probe = mx.nd.zeros(LENGTH, dtype="float64")
    probe.attach_grad()
    with autograd.record():
        passed = probed(array, probe)
        result = passed * 3
    result.backward()
    assert passed.asnumpy().tobytes() == array.asnumpy().tobytes()
    assert array.grad.asnumpy().tobytes() == np.full_like(array.grad.asnumpy(), 3).tobytes()
    expected = statistics_in_numpy(np.full(4980, 3, np.float32))
    assert_same(probe.grad.asnumpy(), expected)


def test_a_probe_between_convolutions_changes_no_bit():
    images = mx.nd.random.normal(shape=(2, 16, 9, 9))
    weight = mx.nd.random.normal(shape=(16, 16, 3, 3))
    gradients = []
    for with_probe in (False, True):
        weight.attach_grad()
        probe = mx.nd.zeros(LENGTH, dtype="float64")
        probe.attach_grad()
        with autograd.record():
            made = images
            for _ in range(3):
                made = mx.nd.Convolution(
                    made, weight, kernel=(3, 3), pad=(1, 1), num_filter=16, no_bias=True
                )
                made = probed(made, probe) if with_probe else made
                made = mx.nd.relu(made)
        made.backward()
        gradients.append(weight.grad.asnumpy().tobytes())
    assert gradients[0] == gradients[1]


def test_without_native_operators_numpy_computes(monkeypatch):
    array = mx.nd.array(numbers(5000), dtype="float16")
    native = statistics(array).asnumpy()[0]
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert_same(native, statistics(array).asnumpy()[0])
