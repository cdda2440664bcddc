"""Range reports: fractions by rounding every value, and the scale on which a real run agrees."""

from __future__ import annotations

import math

import mpgluon
from mpgluon import BFLOAT16, FLOAT4_E2M1, FLOAT8_E4M3, FLOAT16, DynamicLossScale, amp
from mpgluon_tools.diagnostics.ranges import range_report

import mxnet as mx
import numpy as np
import pytest
from diagnostics_helpers import Batch, Times, make_batch, make_net, scaled_trainer, train_step
from mxnet.gluon import nn


class Doubled(nn.HybridBlock):
    """Adds the result of a block in it to its input."""

    def __init__(self, prefix):
        super().__init__(prefix=prefix)
        with self.name_scope():
            self.same = Times(1.0, prefix="same_")

    def hybrid_forward(self, F, x):
        return x + self.same(x)


def constants(values):
    """Return a layer without parameters to speak of, and a batch whose gradients are ``values``."""
    layer = Times(1.0, "constants_")
    weights = mx.nd.array(values).reshape((1, -1))
    return layer, Batch(mx.nd.ones(weights.shape), weights, lambda y, w: y * w)


def gradient_of(report):
    (gradient,) = [array for array in report.arrays if array.kind == "output gradient"]
    return gradient


# float16 at S = 1: overflow from 65520 on, zero up to 2**-25, subnormal between that and 2**-14.
EDGES = [65519, 65520, 1e9, 1.0, 2.0**-14, 2.0**-15, 2.0**-24, 1.01 * 2.0**-25, 2.0**-25, 0.0]


# float4_e2m1: 6 and at most half a spacing more round to 6; zero up to 0.25, subnormal at 0.5.
EDGES_OF_FOUR_BITS = [6.0, 7.0, 7.1, 1e9, 1.0, 0.6, 0.25, 0.0]


@pytest.mark.parametrize(
    ("fmt", "values", "overflow", "underflow", "subnormal"),
    [
        (FLOAT16, EDGES, 2 / 10, 1 / 10, 3 / 10),
        (BFLOAT16, EDGES, 0, 0, 0),
        (FLOAT4_E2M1, EDGES_OF_FOUR_BITS, 3 / 8, 1 / 8, 1 / 8),
    ],
)
def test_fractions_are_what_rounding_does_at_every_edge(
    fmt, values, overflow, underflow, subnormal
):
    report = range_report(*constants(values), fmt=fmt)
    gradient = gradient_of(report)
    assert gradient.overflow_fraction == overflow
    assert gradient.underflow_fraction == underflow
    assert gradient.subnormal_fraction == subnormal
    assert gradient.largest == 1e9
    assert ("arrays saturate" in str(report)) == ("saturated" in str(report)) == fmt.saturates


def test_outputs_are_judged_without_the_loss_scale():
    net = make_net(Times(2.0**20, "large_"), Times(2.0**-20, "small_"))
    report = range_report(net, make_batch(), loss_scale=2.0**10)
    by_name = {(array.name, array.kind): array for array in report.arrays}
    assert by_name["large", "output"].overflow_fraction > 0.5
    assert by_name["small", "output"].overflow_fraction == 0
    assert by_name["net_conv0_weight", "gradient"].largest > 0
    assert "float16 at a loss scale of 1024" in str(report)
    assert str(report).splitlines()[2].split()[:2] == ["large", "output"]  # the worst first


@pytest.mark.parametrize(
    ("largest", "headroom", "scale"),
    [
        (1.0, 1, 2.0**15), (1.0, 2, 2.0**14), (65504, 1, 1), (65504 * 2.0**-30, 1, 2.0**30),
        (0.75, 1, 2.0**16), (0.0, 2, 1),
    ],
)  # fmt: skip
def test_the_recommended_scale_is_the_largest_power_of_two_that_fits(largest, headroom, scale):
    report = range_report(*constants([largest, largest / 2]))
    assert report.recommended_loss_scale(headroom) == scale


def test_what_a_block_with_blocks_in_it_makes_is_listed_once_and_containers_are_not():
    net = nn.HybridSequential(prefix="all_")
    net.add(
        nn.Dense(2, in_units=2, activation="relu", use_bias=False, prefix="dense_"),
        Doubled(prefix="sum_"),
    )
    net.initialize()
    net[0].weight.set_data(mx.nd.array([[3e5, 0], [0, -7e4]]))
    batch = Batch(mx.nd.ones((1, 2)), mx.nd.array([[2.0, 16.0]]), lambda y, w: y * w)
    report = range_report(net, batch)
    assert [(a.name, a.kind, a.largest) for a in report.arrays] == [
        ("dense", "handed on", 3e5),
        ("dense_relu", "output", 3e5),
        ("sum_same", "output", 3e5),
        ("sum", "output", 6e5),
        # The sum has the factor of the loss; then comes one term, then both terms together.
        ("sum", "output gradient", 16),
        ("sum_same", "output gradient", 16),
        ("dense_weight", "gradient", 4),
        ("dense_relu", "output gradient", 32),
    ]
    assert report.arrays[0].overflow_fraction == 1  # the second one is negative, and cut off next
    assert report.arrays[1].overflow_fraction == 1 / 2
    assert report.recommended_loss_scale(1) == 2.0**10  # 2^10 * 32 is less than 65504


@pytest.mark.parametrize(
    ("values", "headroom", "message"),
    [
        ([math.inf], 2, "not finite without any scale: constants"),
        ([1.0, math.inf], 2, "not finite without any scale: constants"),
        ([1.0], 0.5, "headroom must be at least 1"),
        ([1.0], math.inf, "headroom must be at least 1 and finite"),
    ],
)
def test_no_scale_is_recommended_for_infinite_gradients_or_less_headroom_than_one(
    values, headroom, message
):
    with pytest.raises(ValueError, match=message):
        range_report(*constants(values)).recommended_loss_scale(headroom)


def test_the_recommended_scale_is_one_that_a_trainer_takes():
    recommended = range_report(*constants([2.0**-140])).recommended_loss_scale()
    assert recommended == 2.0**126
    assert DynamicLossScale(recommended).scale == recommended


def test_a_dynamic_scale_settles_within_two_doublings_of_the_recommended_one():
    batch = make_batch()
    net = make_net()
    recommended = range_report(net, batch).recommended_loss_scale(headroom=1)
    mpgluon.cast_block(net)
    loss_scale = DynamicLossScale(1.0, growth_interval=2, max_scale=2.0**30)
    trainer = scaled_trainer(net, loss_scale, learning_rate=1e-4)
    scales = []
    for _ in range(80):
        train_step(net, trainer, batch)
        scales.append(amp.loss_scale(trainer))
    assert amp.skipped_steps(trainer) > 2  # it has found its ceiling
    assert abs(math.log2(np.median(scales[-20:])) - math.log2(recommended)) <= 2


def test_an_empty_output_is_reported():
    net = nn.HybridLambda(lambda F, x: F.slice_axis(x, axis=0, begin=0, end=1), prefix="first_")
    assert range_report(net, Batch(mx.nd.ones((2, 2)), None, lambda y, _: y)).arrays[0].largest == 1


def test_with_a_scale_of_its_own_an_array_loses_only_numbers_far_below_its_largest():
    # float8_e4m3 spans 2**-9 to 448 = 1.75 * 2**8: 1 becomes 2**8, which leaves 17 powers of two.
    values = [1.0, -0.5, 2.0**-14, 2.0**-15, 2.0**-17, 1.01 * 2.0**-18, 2.0**-18, 0.0]
    for unit in (1.0, 2.0**-60, 2.0**60):
        batch = constants([value * unit for value in values])
        found = gradient_of(range_report(*batch, fmt=FLOAT8_E4M3, scaled=True))
        assert (found.overflow_fraction, found.underflow_fraction) == (0, 1 / 8)
        assert found.subnormal_fraction == 3 / 8
    assert gradient_of(range_report(*batch, fmt=FLOAT8_E4M3)).overflow_fraction == 7 / 8
