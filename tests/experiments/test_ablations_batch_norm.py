from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import autograd

from experiments.ablations.batch_norm import (
    Float16BatchNorm,
    float16_mean,
    float16_statistics,
)


def columns(*values):
    return np.array(values, dtype=np.float16).reshape(len(values), -1)


def by_hand(values):
    """Add float16 numbers one after another; each of NumPy's scalar sums is rounded to float16."""
    total = np.float16(0)
    for value in values:
        total = total + np.float16(value)
    return np.float16(np.float32(total) / np.float32(len(values)))


def test_a_mean_is_that_of_float16_numbers_added_one_after_another():
    values = np.random.default_rng(0).normal(0.5, 1.0, (3000, 3)).astype(np.float16)
    assert float16_mean(values).tolist() == [by_hand(column) for column in values.T]
    wide = values.astype(np.float64).mean(axis=0)
    assert (float16_mean(values) != wide.astype(np.float16)).any()


def test_a_sum_of_ones_stops_at_2048():
    assert float16_mean(columns(*[1] * 2048)) == 1
    assert float16_mean(columns(*[1] * 8192)) == 2048 / 8192


def test_squares_of_bytes_overflow_and_a_mean_of_large_numbers_does():
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isinf(float16_statistics(columns(-255, 255, -255, 255))[1])
        assert np.isinf(float16_mean(columns(*[60000.0] * 2)))


def test_the_variance_is_the_mean_square_of_distances_from_the_float16_mean():
    values = np.random.default_rng(1).normal(3, 1.0, 500).astype(np.float16)
    mean, variance = float16_statistics(values[:, None])
    assert mean[0] == by_hand(values)
    distances = [value - mean[0] for value in values]
    assert variance[0] == by_hand([distance * distance for distance in distances])


def test_where_float16_is_exact_result_and_gradients_are_those_of_batch_norm():
    # Mean 0 and variance 1: sqrt(1 + 1e-5) rounds to 1, so all that follows is exact.
    x = np.array([1, -1, -1, 1], np.float32).reshape(2, 1, 1, 2)
    dy = np.array([4, 2, 1, 1], np.float32).reshape(2, 1, 1, 2)
    layer = Float16BatchNorm(in_channels=1)
    layer.initialize()
    layer.gamma.set_data(mx.nd.array([2]))
    layer.beta.set_data(mx.nd.array([0.5]))
    images = mx.nd.array(x)
    images.attach_grad()
    with autograd.record():
        result = layer(images)
    result.backward(mx.nd.array(dy))
    assert result.asnumpy().tolist() == (2 * x + 0.5).tolist()
    assert layer.beta.grad().asscalar() == dy.sum()
    assert layer.gamma.grad().asscalar() == (dy * x).sum()
    assert images.grad.asnumpy().tolist() == (2 * (dy - dy.mean() - x * (dy * x).mean())).tolist()


def test_channels_do_not_mix():
    x = np.random.default_rng(2).normal(size=(2, 3, 4, 4)).astype(np.float32)
    layer = Float16BatchNorm(in_channels=3)
    layer.initialize()
    together = layer(mx.nd.array(x)).asnumpy()
    for channel in range(3):
        alone = Float16BatchNorm(in_channels=1)
        alone.initialize()
        one = alone(mx.nd.array(x[:, channel : channel + 1])).asnumpy()
        assert (one[:, 0] == together[:, channel]).all()
