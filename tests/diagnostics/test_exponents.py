"""Histograms of exponents, against NumPy and against what rounding really does."""

from __future__ import annotations

import math

from mpgluon import BFLOAT16, FLOAT16
from mpgluon_tools.diagnostics.exponents import (
    ExponentRecorder,
    batch_exponents,
    exponent_histogram,
)
from mpgluon_tools.diagnostics.observe import Batch

import mxnet as mx
import numpy as np
import pytest
from diagnostics_helpers import backward, make_batch, make_net, scaled_trainer
from helpers import gradients_of, in_sequence, initialized
from mxnet import gluon


def histogram(*values, dtype=np.float32):
    return exponent_histogram([np.array(values, dtype=dtype)])


def count_of(one, exponent):
    return int(one.counts[one.exponents == exponent][0])


@pytest.mark.parametrize("exponent", [-149, -127, -126, -24, -1, 0, 1, 15, 127])
def test_a_power_of_two_is_counted_at_its_exponent_and_so_is_all_up_to_the_next(exponent):
    low = np.float32(2.0**exponent)
    below_next = np.nextafter(np.float32(2 * low), np.float32(0)) if exponent < 127 else low
    one = histogram(low, -low, below_next)
    assert count_of(one, exponent) == one.counts.sum() == 3


def test_all_float16_numbers_have_the_shares_of_the_format():
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    shares = exponent_histogram([every]).shares(FLOAT16)
    not_zero = 2**16 - 2
    assert shares["subnormal"] == 2 * 1023 / not_zero
    assert shares["normal"] == 2 * 30 * 1024 / not_zero
    assert shares["overflow"] == 2 * 1024 / not_zero  # infinities and NaNs
    assert shares["lost"] == 0


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_arrays_of_every_format_are_counted(dtype):
    values = mx.nd.array([1.0, 2.0, 0.0])
    array = mx.nd.amp_cast(values, dtype=np.dtype([("bfloat16", np.uint16)]))
    one = exponent_histogram([array if dtype == "bfloat16" else values.astype(dtype)])
    assert (count_of(one, 0), count_of(one, 1), one.zeros) == (1, 1, 1)


def test_the_stored_rows_of_a_sparse_array_are_counted():
    rows = mx.nd.sparse.row_sparse_array((np.ones((2, 3)), [0, 5]), shape=(100, 3))
    assert exponent_histogram([rows]).total == 6


@pytest.mark.parametrize("power", [-140, -20, 0, 7, 24, 200])
def test_a_loss_scale_moves_the_histogram_and_does_nothing_else(power):
    values = np.float32(2.0) ** np.arange(-100, 100, 7, dtype=np.float32)
    moved = exponent_histogram([values]).times(2.0**power)
    with np.errstate(over="ignore"):
        scaled = (values.astype(np.float64) * 2.0**power).astype(np.float32)
    expected = exponent_histogram([scaled])
    np.testing.assert_array_equal(moved.counts, expected.counts)
    assert (moved.zeros, moved.not_finite) == (expected.zeros, expected.not_finite)


def test_shares_add_up_and_are_zero_where_all_is_zero():
    values = np.exp(np.random.default_rng(0).normal(-8, 10, 1000)).astype(np.float32)
    for fmt in (FLOAT16, BFLOAT16):
        assert sum(exponent_histogram([values]).shares(fmt).values()) == pytest.approx(1)
    assert set(histogram(0.0).shares().values()) == {0.0}
    one = histogram(0.0, -0.0, math.inf, -math.inf, math.nan, 1.0)
    assert (one.zeros, one.not_finite, one.total) == (2, 3, 6)
    assert one.counts.sum() == 1


def test_a_batch_has_weights_activations_and_gradients_by_name_in_true_units():
    net, batch = make_net(), make_batch()
    plain, scaled = batch_exponents(net, batch), batch_exponents(net, batch, loss_scale=2.0**20)
    names = [p.name for p in net.collect_params().values() if p.grad_req != "null"]
    assert list(plain.weights) == list(plain.gradients) == names
    layers = ["net_conv0", "net_residual_conv0", "net_residual_batchnorm0", "net_dense0"]
    assert list(plain.activations) == layers
    assert sorted(plain.activation_gradients) == sorted(layers)
    for name in names:
        np.testing.assert_array_equal(plain.gradients[name].counts, scaled.gradients[name].counts)
    for layer in layers:
        of_layer = plain.activation_gradients[layer]
        np.testing.assert_array_equal(of_layer.counts, scaled.activation_gradients[layer].counts)
    assert plain.overall()["gradients"].total == sum(h.total for h in plain.gradients.values())
    heading, *rows = str(plain).splitlines()
    assert heading.split() == ["numbers", "lost", "subnormal", "normal", "overflow", "zero"]
    assert [row.split("  ")[0] for row in rows] == [
        *("weights", "activations", "activation gradients", "gradients")
    ]


def test_both_calls_of_a_layer_are_counted():
    layer = initialized(gluon.nn.Dense(3, in_units=3))
    net = in_sequence(layer, layer)
    net(mx.nd.ones((2, 3)))
    batch = Batch(mx.nd.ones((2, 3)), mx.nd.ones((2, 3)), gluon.loss.L2Loss())
    counted = batch_exponents(net, batch)
    for histograms in (counted.activations, counted.activation_gradients):
        assert histograms[layer.name].total == 2 * 2 * 3


def test_a_loss_scale_saves_gradients_that_float16_would_lose():
    batch = make_batch()
    net = make_net(way="float16")
    small = type(batch)(batch.inputs, batch.labels, lambda y, t: batch.loss_fn(y, t) * 2.0**-20)
    zeros = [
        batch_exponents(net, small, loss_scale=s).overall()["gradients"].zeros for s in (1, 2.0**20)
    ]
    assert zeros[0] > 2 * zeros[1]


@pytest.mark.parametrize("way", ["float32", "float16"])
def test_a_run_is_sampled_every_so_many_steps_in_true_units(way):
    net, batch = make_net(way=way), make_batch()
    trainer = scaled_trainer(net, 2.0**8, learning_rate=0.01)
    recorder = ExponentRecorder(trainer, every=3)
    gradients = []
    for _ in range(7):
        backward(net, trainer, batch)
        gradients.append([g.astype("float32") / 2.0**8 for g in gradients_of(net).values()])
        trainer.step(4)
        recorder.after_step()
    assert [sample.step for sample in recorder.samples] == [3, 6]
    for sample in recorder.samples:
        expected = exponent_histogram(gradients[sample.step - 1])
        np.testing.assert_array_equal(sample.gradients.counts, expected.counts)
        assert sample.weights.total == sum(gradient.size for gradient in gradients[0])


def test_a_scale_that_is_not_a_power_of_two_and_less_than_a_step_are_refused():
    with pytest.raises(ValueError, match="scale must be a power of two, received 1000"):
        histogram(1.0).times(1000)
    trainer = gluon.Trainer(make_net().collect_params(), "sgd")
    with pytest.raises(ValueError, match="every must be at least 1 step"):
        ExponentRecorder(trainer, every=0)
