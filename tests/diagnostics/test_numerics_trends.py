"""Warnings before a failure: runs that do fail, and runs that do not."""

from __future__ import annotations

import mpgluon
from mpgluon import amp, diagnostics
from mpgluon_tools.recorder.numerics.files import NumericsStep
from mpgluon_tools.recorder.numerics.trends import Trend, Trends, lines_of, trends_of

import mxnet as mx
import numpy as np
import pytest
from diagnostics_helpers import recorded
from helpers import backward_from, cast_net
from mxnet import autograd, gluon
from mxnet.gluon import nn
from numerics_runs import Run


def train(folder, net, steps, *, scale="none", rate=0.0, every=10, change=None, **options):
    """Train on random numbers; ``change`` is called before each step with its number."""
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate, **options})
    amp.init_trainer(trainer, scale)
    recorder = diagnostics.NumericsRecorder(
        net, trainer, folder, every=every, activations_every=every
    )
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        if change is not None:
            change(step, trainer)
        inputs = mx.nd.array(rng.standard_normal((16, 8)).astype(np.float32))
        with recorder.step(inputs) as told:
            with autograd.record():
                told.loss = (net(inputs).astype("float32") ** 2).mean()
                with amp.scale_loss(told.loss, trainer) as scaled:
                    autograd.backward(scaled)
            trainer.step(1)
    return diagnostics.read_numerics(folder)


def dense(*widths):
    mx.random.seed(0)
    net = nn.HybridSequential()
    for before, width in zip(widths, widths[1:]):
        net.add(nn.Dense(width, in_units=before))
    net.initialize(mx.init.Xavier())
    return net


@pytest.mark.slow
def test_an_activation_that_doubles_is_seen_long_before_it_overflows(tmp_path):
    net = cast_net(dense(8, 8, 8))
    start = [layer.weight.data().asnumpy() for layer in net]

    def grow(step, _):
        for layer, weight, factor in zip(net, start, (2.0 ** (step / 40), 1)):
            layer.weight.set_data(mx.nd.array(weight * factor, dtype="float16"))

    recording = train(tmp_path, net, 640, change=grow, multi_precision=True)
    found = [trend for trend in trends_of(recording) if trend.kind == "growing activation"]
    assert {trend.name for trend in found} == {"0", "1"}
    first = found[0]
    assert first.step <= 350
    assert "the largest activation of" in first.sentence
    predicted = int(first.sentence.split("step ")[-1])
    overflowed = next(
        step.number
        for step in recording
        if any(t.overflow for t in step.of("activation") if t.id.name == first.name)
    )
    assert overflowed / 1.5 < predicted < overflowed * 1.5
    assert first.step < overflowed - 200


def of_one_tensor(tensors, **line):
    """Return the kinds of the trends of steps 10, 20, … of one tensor."""
    trends = Trends()
    steps = (
        NumericsStep(10 * place, line, {one.id: one}) for place, one in enumerate(tensors, start=1)
    )
    return [trend.kind for step in steps for trend in trends.add_step(step)]


@pytest.mark.parametrize(("steps", "expected"), [(9, ["growing activation"]), (20, [])])
def test_a_growth_that_overflows_in_more_than_a_thousand_steps_is_not_a_trend(steps, expected):
    largest = [2.0 ** (65 + 10 * place / steps) for place in range(15)]  # of bfloat16's 2**128
    assert of_one_tensor([recorded([one], "bfloat16") for one in largest]) == expected


@pytest.mark.parametrize("skipped", [False, True])
def test_the_gradients_of_a_skipped_step_do_not_vanish(skipped):
    small = recorded([2.0**-24] * 40, "float16", "gradient")
    assert of_one_tensor([small], skipped=skipped) == ["vanishing gradient"] * (not skipped)


def test_gradients_that_near_the_smallest_number(tmp_path):
    net = cast_net(dense(8, 16, 16))

    scale = mpgluon.DynamicLossScale(init_scale=2.0**8, min_scale=2.0**-30)

    def shrink(step, _):
        scale.load_state_dict({**scale.state_dict(), "scale": 2.0 ** (8 - step)})

    recording = train(tmp_path, net, 30, scale=scale, every=1, change=shrink, multi_precision=True)
    found = [trend for trend in trends_of(recording) if trend.kind == "vanishing gradient"]
    zeros = {
        step.number: max(
            tensor.statistics.zeros / tensor.statistics.size
            for tensor in step.of("gradient")
            if tensor.id.name == "0.weight"
        )
        for step in recording
    }
    assert zeros[next(trend.step for trend in found if trend.name == "0.weight")] < 0.5 < zeros[30]
    assert all("the loss scale is too small" in trend.fix for trend in found)


@pytest.mark.parametrize(
    ("rounding", "rate", "lost"),
    [
        ("nearest", 1e-4, {"0.weight", "1.weight"}),
        ("nearest", 1.0, set()),
        ("stochastic", 1e-4, set()),
    ],
)
def test_updates_below_half_a_unit_of_the_weight(tmp_path, rounding, rate, lost):
    net = dense(8, 16, 16)
    amp.autocast(net, mpgluon.Policy.parse("params=bfloat16,compute=bfloat16"))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})
    amp.init_trainer(trainer, "none", update_rounding=rounding)
    recorder = diagnostics.NumericsRecorder(net, trainer, tmp_path)
    inputs = mx.nd.random.normal(shape=(16, 8))
    with recorder.step(inputs) as told:
        told.loss = backward_from(lambda: (net(inputs).astype("float32") ** 2).mean(), trainer)
        trainer.step(1)
    found = [t for t in trends_of(diagnostics.read_numerics(tmp_path)) if t.kind == "lost updates"]
    assert {trend.name for trend in found} == lost
    assert all("of its bfloat16 weights" in trend.sentence for trend in found)
    assert not diagnostics.read_numerics(tmp_path).step(1).of("master")


def test_a_loss_scale_that_sinks(tmp_path):
    net = cast_net(dense(8, 8, 8))
    start = net[1].weight.data().asnumpy()

    def grow(step, _):
        if step > 60:
            net[1].weight.set_data(mx.nd.array(start * 1.2 ** (step - 60), dtype="float16"))

    scale = mpgluon.DynamicLossScale(growth_interval=1000)
    recording = train(tmp_path, net, 100, scale=scale, change=grow, multi_precision=True)
    found = [trend for trend in trends_of(recording) if trend.kind == "sinking loss scale"]
    assert len(found) == 1
    skipped = [line["step"] for line in recording.lines if line["skipped"] and line["step"] > 60]
    assert skipped[2] <= found[0].step < skipped[-1]


def test_the_search_for_the_first_loss_scale_is_not_a_trend():
    trends = Trends()
    scales = [65536.0 / 2**step for step in range(9)]
    lines = [{"step": n + 1, "loss_scale": s, "skipped": n < 8} for n, s in enumerate(scales)]
    assert [trend for line in lines for trend in trends.add_line(line)] == []


def test_a_run_whose_steps_are_all_skipped_has_failed_once_the_loss_scale_is_1():
    trends = Trends()
    scales = [max(1.0, 65536.0 / 2**step) for step in range(25)]
    lines = [{"step": n + 1, "loss_scale": s, "skipped": True} for n, s in enumerate(scales)]
    found = [trend for line in lines for trend in trends.add_line(line)]
    assert [(trend.step, trend.kind) for trend in found] == [(19, "no step made")]  # 1 since 17
    assert "all 19 steps were skipped" in found[0].sentence


def test_a_healthy_run_has_no_trend(tmp_path):
    for cast in (None, "float16", "bfloat16"):
        run = Run(cast=cast)
        run.scale = 2.0**12
        run.train(tmp_path / str(cast), steps=20, every=1)
        assert trends_of(diagnostics.read_numerics(tmp_path / str(cast))) == []


def test_a_trend_is_returned_once_and_in_words():
    trends = Trends()
    lines = [{"step": 1, "loss_scale": 64.0, "skipped": False}]
    lines += [{"step": n, "loss_scale": 64.0 / 2 ** (n - 2), "skipped": True} for n in range(2, 9)]
    (line,) = lines_of([trend for line in lines for trend in trends.add_line(line)])
    assert line.startswith("step 5: the loss scale has sunk from 64 to 8 within 5 steps, 4 of")


def test_layers_with_the_same_trend_are_one_line():
    found = [Trend(3, "lost updates", f"{n}.weight", f"of {n}", "masters") for n in range(6)]
    found.append(Trend(4, "lost updates", "6.weight", "of 6", "masters"))
    assert lines_of(found) == [
        "step 3: of 0 (so too 1.weight, 2.weight, 3.weight and 2 more); masters",
        "step 4: of 6; masters",
    ]
