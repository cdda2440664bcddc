"""Shares of the gradients at a loss scale: against rounding each gradient, and in words."""

from __future__ import annotations

import mpgluon
from mpgluon import FLOAT16, round_to
from mpgluon_tools.diagnostics.observe import observed_batch
from mpgluon_tools.diagnostics.ranges import range_report
from mpgluon_tools.diagnostics.scales import LossScales, loss_scale_code, loss_scales, owners_of

import numpy as np
import pytest
from diagnostics_helpers import make_batch, make_net
from helpers import in_sequence
from mxnet.gluon import nn


@pytest.fixture(scope="module")
def net():
    return make_net()


@pytest.fixture(scope="module")
def scales(net):
    return loss_scales(net, range_report(net, make_batch()), 2.0**8)


@pytest.mark.parametrize("power", [-20, -10, 0, 8, 14, 22])
def test_shares_are_those_of_the_rounded_gradients(net, scales, power):
    dense = net[-1]
    found = observed_batch(net, make_batch(), lambda _: None)
    parts = [found[parameter].asnumpy().ravel() for parameter in (dense.weight, dense.bias)]
    values = np.abs(np.concatenate(parts).astype(np.float64))
    values = values[values > 0] * 2.0**power
    rounded = round_to(values, FLOAT16)
    places = [(one.block, one.what) for one in scales.gradients]
    shares = scales.shares(2.0**power)[places.index((dense, "parameters"))]
    assert shares["overflow"] == np.mean(np.isinf(rounded))
    # Rounding saves the numbers from 2^-25 to the smallest subnormal, which count as lost.
    saved = np.mean((rounded > 0) & (values < FLOAT16.smallest_subnormal))
    assert shares["lost"] == pytest.approx(np.mean(rounded == 0) + saved)
    subnormal = (values >= FLOAT16.smallest_subnormal) & (values < FLOAT16.smallest_normal)
    assert shares["subnormal"] == np.mean(subnormal)


def test_the_gradients_of_fp32_layers_are_left_out(scales):
    places = {(one.block.name, one.what) for one in scales.gradients}
    assert ("net_conv0", "parameters") in places
    assert ("net_residual_batchnorm0", "output") in places
    assert ("net_residual_batchnorm0", "parameters") not in places
    assert ("net_residual", "output") in places  # the sum that the block computes itself


@pytest.mark.parametrize("power", [-30, 8, 60])
def test_the_summary_counts_and_the_table_begins_with_the_worst(scales, power):
    there = LossScales(scales.gradients, 2.0**power, FLOAT16)
    shares = there.shares(2.0**power)
    losing = sum(one["lost"] > 0.01 for one in shares)
    overflowing = sum(one["overflow"] > 0 for one in shares)
    summary = there.summary()
    assert f"{overflowing} of {len(shares)} gradients overflow in part" in summary
    assert f"and {losing} lose more than 1 % of their numbers" in summary
    assert (overflowing > 0, losing > 0) == (power == 60, power == -30)
    worst = max(shares, key=lambda one: (one["overflow"], one["lost"], one["subnormal"]))
    parts = [worst[part] for part in ("lost", "subnormal", "overflow")]
    cells = there.table().rows[0][2:]
    assert [float(cell.strip("<% ")) for cell in cells] == pytest.approx(
        [100 * part for part in parts], abs=0.01
    )


def test_a_shared_parameter_is_the_first_layers():
    first = nn.Dense(3, in_units=3)
    net = in_sequence(first, nn.Dense(3, in_units=3, params=first.params))
    assert owners_of(net) == {first.weight.name: first, first.bias.name: first}


@pytest.mark.parametrize("power", [-30, -1, 0, 12, 24, 40])
def test_the_code_of_a_loss_scale_makes_it(power):
    made = eval(loss_scale_code(2.0**power), {"mpgluon": mpgluon})
    assert (type(made), made.scale) == (mpgluon.DynamicLossScale, 2.0**power)
