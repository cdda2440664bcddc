"""The verdict: planted faults are named, its lines run, and where nothing is known it says so."""

from __future__ import annotations

from dataclasses import replace

from mpgluon import BFLOAT16, FLOAT16, amp
from mpgluon_tools.diagnostics.compare import Suggestion, suggest_keep_fp32
from mpgluon_tools.diagnostics.ranges import range_report
from mpgluon_tools.diagnostics.reference import input_errors
from mpgluon_tools.diagnostics.scales import loss_scales
from mpgluon_tools.report.verdict import HEADROOM, judge, path_of

import mxnet as mx
import numpy as np
import pytest
from diagnostics_helpers import Batch, Times, make_batch, make_net
from helpers import in_sequence
from mxnet import gluon
from mxnet.gluon import nn


def verdict_on(net, batch, dtype="float16"):
    report = range_report(net, batch)
    scale = 1.0
    if dtype == "float16" and not report.broken_gradients():
        scale = report.recommended_loss_scale(HEADROOM)
    fmt = {"float16": FLOAT16, "bfloat16": BFLOAT16}[dtype]
    suggestion = suggest_keep_fp32(net, batch, dtype=dtype, loss_scale=scale)
    return judge(net, batch, report, loss_scales(net, report, scale, fmt), suggestion, dtype=dtype)


def train_as_told(verdict, net, batch):
    """Paste the lines of a verdict, run them, and return the names that they defined."""
    names = {
        "net": net, "loss_fn": batch.loss_fn, "inputs": batch.inputs, "labels": batch.labels,
        "batch_size": 4,
    }  # fmt: skip
    exec(verdict.lines, names)
    mx.nd.waitall()
    return names


class Fades(nn.HybridBlock):
    """Returns its input, with a gradient that is smaller by a factor."""

    def __init__(self, factor, prefix):
        super().__init__(prefix=prefix)
        self._factor = factor

    def hybrid_forward(self, F, x):
        constant = F.BlockGrad(x)
        return constant + (x - constant) * self._factor


class Rounds(nn.HybridBlock):
    """A matrix product that changes nothing but the format, without parameters to keep in FP32."""

    def hybrid_forward(self, F, x):
        return F.dot(x, F.eye(64))


def fading_net(*blocks):
    """Return a network whose first layer gets small inputs, and small gradients from blocks."""
    mx.random.seed(0)
    np.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(Times(2.0**-8, "down_"), nn.Dense(64, use_bias=False, prefix="weak_"))
        net.add(*blocks, nn.Dense(5))
    net.initialize(mx.init.Xavier())
    net(make_batch().inputs)
    return net


def weak_net():
    """Return a net with gradients that are below 2^-24 only once inputs are multiplied in."""
    return fading_net(Fades(2.0**-13, "first_"), Fades(2.0**-13, "next_"))


def zeros_in(net):
    return float(np.mean(net[1].weight.grad().asnumpy() == 0))


def test_a_harmless_network_is_safe_and_its_lines_train_it():
    net, batch = make_net(), make_batch()
    verdict = verdict_on(net, batch)
    scale = range_report(net, batch).recommended_loss_scale(HEADROOM)
    assert verdict.answer == "safe"
    power = round(np.log2(scale))
    assert verdict.sentence == f"float16 is safe for this network; loss scale 2^{power}"
    before = net[0].weight.data().asnumpy()
    trainer = train_as_told(verdict, net, batch)["trainer"]
    assert amp.loss_scale(trainer) == scale
    assert not amp.step_was_skipped(trainer)
    assert net[0].weight.data().dtype == np.float16
    assert not np.array_equal(net[0].weight.data().asnumpy(), before.astype(np.float16))


def test_a_layer_whose_gradients_underflow_is_named_and_the_lines_save_them():
    batch = make_batch()
    verdict = verdict_on(weak_net(), batch)
    assert verdict.answer == "safe"
    assert "keep `net_weak` in FP32" in verdict.sentence
    assert "of its gradients underflow" in verdict.sentence
    assert "net[1],  # net_weak" in verdict.lines
    net = weak_net()
    train_as_told(verdict, net, batch)
    saved = zeros_in(net)
    net = weak_net()
    without = [line for line in verdict.lines.splitlines() if "net[" not in line]
    train_as_told(replace(verdict, lines="\n".join(without)), net, batch)
    assert zeros_in(net) > saved + 0.01


def test_gradients_that_are_zero_in_fp32_do_not_count_as_lost():
    batch = make_batch()
    batch.inputs[:, :, :3] = 0  # half of the pixels: half of the first layer's gradients are zero
    verdict = verdict_on(weak_net(), batch)
    assert verdict.answer == "safe"
    assert "keep `net_weak` in FP32" in verdict.sentence


def test_a_few_gradients_are_too_few_for_a_verdict():
    net = in_sequence(nn.Dense(3, in_units=2))
    net.initialize(mx.init.One())
    batch = Batch(mx.nd.ones((4, 2)), mx.nd.zeros((4, 3)), gluon.loss.L2Loss())
    verdict = verdict_on(net, batch)
    assert verdict.answer == "unknown"
    assert "nonzero gradients, and a share of 1 % needs 100" in verdict.sentence


def test_gradients_that_arrive_as_zeros_cannot_be_saved_by_the_layer_that_gets_them():
    fades = (Fades(2.0**-13, f"fades{place}_") for place in range(3))
    net, batch = fading_net(Rounds(), *fades), make_batch()
    report = range_report(net, batch)
    scales = loss_scales(net, report, report.recommended_loss_scale(HEADROOM))
    harmless = Suggestion([], 0.0, 0.0, 1.0, [], "")  # of the error of the result
    verdict = judge(net, batch, report, scales, harmless)
    assert verdict.answer == "not safe"
    assert "`net_weak` loses" in verdict.sentence
    assert "even in FP32, since they arrive as zeros" in verdict.sentence
    assert verdict.lines == ""


def test_a_layer_whose_values_overflow_is_kept_and_the_lines_keep_it():
    net = make_net(Times(2.0**20, "large_"), Times(2.0**-20, "small_"))
    verdict = verdict_on(net, make_batch())
    assert verdict.answer == "safe"
    assert "`large`" in verdict.sentence
    assert "in FP32: the result's error falls from inf to" in verdict.sentence
    assert not amp.step_was_skipped(train_as_told(verdict, net, make_batch())["trainer"])


def judged(error, limit, left):
    """Return the verdict on a harmless network with an error that was measured elsewhere."""
    net, batch = make_net(), make_batch()
    report = range_report(net, batch)
    suggestion = Suggestion([], error, error, limit, [net[0]], left)
    return judge(net, batch, report, loss_scales(net, report, 2.0), suggestion)


def test_an_error_that_remains_is_not_safe():
    remains = "most of what remains is introduced by net_dense0"
    verdict = judged(0.5, 0.01, remains)
    assert verdict.answer == "not safe"
    assert f"stays at 0.5, above 0.01; {remains}. Use bfloat16" in verdict.sentence
    assert verdict.lines == ""


@pytest.mark.parametrize(("times", "answer"), [(7.5, "safe"), (8.5, "not safe")])
def test_an_error_that_rounding_the_inputs_explains_does_not_count_against_the_format(
    times, answer
):
    _, alone = input_errors(make_net(), make_batch(), "float16")
    assert 0 < alone < 0.01
    verdict = judged(times * alone, alone, "it remains")
    assert verdict.answer == answer
    explained = f"rounding nothing but the inputs changes the result by {alone:.2g} already"
    assert (explained in " ".join(verdict.reasons)) == (answer == "safe")
    assert bool(verdict.lines) == (answer == "safe")


@pytest.mark.parametrize(("noise", "answer"), [(0.1, "unknown"), (0, "safe")])
def test_random_numbers_of_a_network_do_not_excuse_a_large_error(noise, answer):
    class Noisy(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            return x + noise * F.random.normal_like(x)

    verdict = verdict_on(make_net(Noisy()), make_batch())
    assert verdict.answer == answer
    assert ("draws random numbers" in verdict.sentence) == (answer == "unknown")


def test_rounding_inputs_that_are_16_bit_numbers_already_changes_nothing():
    net, batch = make_net(), make_batch()
    exact = Batch(mx.nd.round(batch.inputs * 4) / 4, batch.labels, batch.loss_fn)
    assert input_errors(net, exact, "float16") == (0, 0)
    assert input_errors(net, exact, "bfloat16") == (0, 0)


def test_bfloat16_needs_no_loss_scale_and_its_lines_have_none():
    net, batch = make_net(), make_batch()
    verdict = verdict_on(net, batch, "bfloat16")
    assert verdict.answer == "safe"
    assert "no loss scale is needed" in verdict.sentence
    before = net[0].weight.data().asnumpy()
    train_as_told(verdict, net, batch)
    assert not np.array_equal(net[0].weight.data().asnumpy(), before)


@pytest.mark.parametrize(("power", "bound"), [(-3, "min_scale"), (30, "max_scale")])
def test_lines_for_scales_beyond_the_default_range_run_too(power, bound):
    net = make_net()
    batch = make_batch()
    factor = 2.0 ** (12 - power)  # the recommended scale is about 2^12 for a factor of 1
    loss = batch.loss_fn
    scaled = Batch(batch.inputs, batch.labels, lambda y, label: loss(y, label) * factor)
    verdict = verdict_on(net, scaled)
    assert verdict.answer == "safe"
    assert bound in verdict.lines
    assert not amp.step_was_skipped(train_as_told(verdict, net, scaled)["trainer"])


class Holder(nn.HybridBlock):
    """A block with a layer as an attribute, one in a list, and a sequence."""

    def __init__(self):
        super().__init__()
        self.own = nn.Dense(2)
        self.sequence = nn.HybridSequential()
        self.sequence.add(nn.Dense(3), nn.HybridSequential())
        self.sequence[1].add(nn.Dense(4))
        self.listed = [nn.Dense(5)]
        self.register_child(self.listed[0])


def test_a_block_is_found_by_an_expression_that_python_understands():
    net = Holder()
    blocks = [net.own, net.sequence, net.sequence[0], net.sequence[1][0], net.listed[0], net]
    assert [eval(path_of(net, block)) for block in blocks] == blocks
    assert path_of(net, net.sequence[1][0]) == "net.sequence[1][0]"
