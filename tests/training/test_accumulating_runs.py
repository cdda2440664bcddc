"""Several batches for one step: the loop by hand, one large batch, and what counts as a step."""

from __future__ import annotations

from mpgluon import DynamicLossScale, amp
from mpgluon.distributed import OneProcess

import mxnet as mx
import numpy as np
import pytest
from helpers import STATIC, WAYS, assert_same_bits, in_sequence
from mxnet import autograd, gluon
from mxnet.gluon import nn
from test_resume import assert_same_course
from training_helpers import STEPS, run, run_interrupted

from recipes.training.steps import Stepper

N, BATCH_SIZE, SIDE = 4, 3, 4
ONE, TWO = [mx.cpu()], [mx.cpu(0), mx.cpu(1)]
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def prepared(way: str, devices: list[mx.Context], *, layers=None):
    """Return a network and its Trainer with a loss scale, always the same."""
    mx.random.seed(0)
    np.random.seed(0)
    normalized = (nn.Conv2D(4, 3, in_channels=2), nn.BatchNorm(in_channels=4), nn.Dense(3))
    net = in_sequence(*(layers or normalized))
    net.initialize(mx.init.Normal(0.5), ctx=devices)
    net(mx.nd.zeros((1, 2, SIDE, SIDE)))
    if way in WAYS:
        WAYS[way](net)
    net.hybridize(**STATIC)
    options = {"learning_rate": 0.125, "momentum": 0.5, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, DynamicLossScale(64, growth_interval=2))
    return net, trainer


def steps_of_images(count: int, images_per_step: int):
    """Yield images and labels of each step; those of the second overflow, in one batch only."""
    random = np.random.RandomState(0)
    for step in range(count):
        images = random.randn(images_per_step, 2, SIDE, SIDE).astype(np.float32)
        if step == 1:
            images[images_per_step // 2] = np.inf
        yield mx.nd.array(images), mx.nd.array(random.randint(0, 3, images_per_step), dtype="int32")


def accumulated_by_hand(net, trainer, devices, count):
    """Train as docs/migration.md shows; return the scale and the fate of each step."""
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    for parameter in trained:
        parameter.grad_req = "add"
    size, fates = BATCH_SIZE * len(devices), []
    for all_images, all_labels in steps_of_images(count, N * size):
        for begin in range(0, N * size, size):
            images = all_images[begin : begin + size]
            labels = all_labels[begin : begin + size]
            images, labels = (gluon.utils.split_and_load(x, devices) for x in (images, labels))
            with autograd.record():
                losses = [LOSS(net(x), y) for x, y in zip(images, labels)]
                with amp.scale_loss(losses, trainer) as scaled_losses:
                    autograd.backward(scaled_losses)
        trainer.step(N * size)
        for parameter in trained:
            parameter.zero_grad()
        fates.append((amp.loss_scale(trainer), amp.step_was_skipped(trainer)))
    return fates


def values(net) -> list[np.ndarray]:
    mx.nd.waitall()
    return [one.asnumpy() for p in net.collect_params().values() for one in p.list_data()]


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one device", "two devices"])
@pytest.mark.parametrize("way", ["float32", *WAYS])
def test_a_step_of_several_batches_is_the_loop_by_hand_bit_for_bit(way, devices):
    net, trainer = prepared(way, devices)
    expected = accumulated_by_hand(net, trainer, devices, 5)
    mine, my_trainer = prepared(way, devices)
    step = Stepper(
        mine, my_trainer, devices, OneProcess(), differentiate_inputs=False, accumulate=N
    )
    events = []
    for images, labels in steps_of_images(5, N * BATCH_SIZE * len(devices)):
        events.append(step(images, labels, seed=0))
        assert events[-1]["images"] == len(labels)
    # The scale doubles after two real steps, and the overflow in one batch skips the second step.
    assert expected == [(64, False), (32, True), (32, False), (64, False), (64, False)]
    assert [(e["loss_scale"], e["skipped"]) for e in events[1:]] == [
        (scale, skipped) for (scale, _), (_, skipped) in zip(expected, expected[1:])
    ]
    weights, expected_weights = (
        [p.data().asnumpy() for p in one.collect_params().values() if p.grad_req != "null"]
        for one in (mine, net)
    )
    assert_same_bits(weights, expected_weights)
    assert my_trainer.optimizer.num_update == 4


# Sums of small integers, which float16 and FP32 hold exactly in whatever order.
@pytest.mark.parametrize("way", ["float32", "cast float16", "autocast float16"])
def test_where_sums_are_exact_batches_equal_one_large_batch_bit_for_bit(way):
    random = np.random.RandomState(0)
    images = mx.nd.array(random.randint(-4, 5, (12, 5)))
    targets = mx.nd.array(random.randint(-4, 5, (12, 2)))

    def train(batches: int) -> list[np.ndarray]:
        net = nn.Dense(2, in_units=5)
        net.initialize(mx.init.Constant(0.5))
        if way in WAYS:
            WAYS[way](net)
        for parameter in net.collect_params().values():
            parameter.grad_req = "add"
        options = {"learning_rate": 1.0, "multi_precision": True}
        trainer = gluon.Trainer(net.collect_params(), "sgd", options)
        amp.init_trainer(trainer, 16)
        size = 12 // batches
        for begin in range(0, 12, size):
            with autograd.record():
                loss = net(images[begin : begin + size]) * targets[begin : begin + size]
                with amp.scale_loss(loss, trainer) as scaled_loss:
                    autograd.backward(scaled_loss)
        trainer.step(8)
        return values(net)

    whole = train(1)
    assert all((value != 0.5).any() for value in whole)
    for batches in (2, 3, 4, 12):
        assert_same_bits(train(batches), whole)


def test_batches_equal_one_large_batch_but_for_the_order_of_sums():
    # No BatchNorm, and logits that are exact: only the sum over images is taken in another order.
    count, random = 24, np.random.RandomState(0)
    images = random.randint(-2, 3, (count, 2, SIDE, SIDE)).astype(np.float32)
    labels = random.randint(0, 3, count).astype(np.int32)

    def train(accumulate: int):
        net, trainer = prepared("float32", ONE, layers=[nn.Dense(3, use_bias=False)])
        start = np.random.RandomState(1).randint(-4, 5, (3, 2 * SIDE * SIDE)) / 8
        net[0].weight.set_data(mx.nd.array(start))
        step = Stepper(
            net, trainer, ONE, OneProcess(), differentiate_inputs=False, accumulate=accumulate
        )
        step(mx.nd.array(images), mx.nd.array(labels, dtype="int32"), seed=0)
        return start, net[0].weight.data().asnumpy().astype(np.float64)

    start, whole = train(1)
    _, parts = train(N)
    inputs = images.reshape(count, -1).astype(np.float64)
    logits = inputs @ start.T
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = shares / shares.sum(axis=1, keepdims=True) - np.eye(3)[labels]
    unit = 2.0**-24
    gamma = count * unit / (1 - count * unit)
    # Two sums of as many products, times 0.125 / count; the factor and the update round once each.
    of_sums = 2 * gamma * np.abs(shares).T @ np.abs(inputs) * 0.125 / count
    of_update = 4 * unit * np.abs(whole)
    assert (np.abs(whole - parts) <= of_sums + of_update).all()
    np.testing.assert_allclose(whole, start - shares.T @ inputs * 0.125 / count, atol=1e-6)
    assert np.abs(whole - start).max() > 0.01


def test_with_images_missing_each_batch_has_some_for_each_device():
    net, trainer = prepared("float32", TWO)
    step = Stepper(net, trainer, TWO, OneProcess(), differentiate_inputs=False, accumulate=N)
    for count in (7, 3, 24):
        images = mx.nd.array(np.random.RandomState(count).randn(count, 2, SIDE, SIDE))
        event = step(images, mx.nd.zeros(count, dtype="int32"), seed=0)
        assert (event["images"], event["skipped"]) == (count, False)


HALVES = {"batch_size": 5, "accumulate": 2, "dtype": "float16"}


def test_steps_of_a_run_are_real_steps(shapes, tmp_path, float16_run):
    done = run(shapes, tmp_path, **HALVES, growth_interval=2)
    steps, others = done.events("step"), float16_run.events("step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert {event["images"] for event in steps} == {10}
    # The schedule stands still in a skipped step, so that runs may differ by those.
    real = [[e["learning_rate"] for e in events if not e["skipped"]] for events in (steps, others)]
    assert real[0][: len(real[1])] == real[1][: len(real[0])] != []
    scale, since = 2.0**16, 0
    for event in steps:
        assert event["loss_scale"] == scale
        since = 0 if event["skipped"] else since + 1
        if event["skipped"]:
            scale /= 2
        elif since % 2 == 0:
            scale *= 2
    assert done.results["final_loss_scale"] == scale
    assert done.results["global_batch_size"] == 10
    assert done.results["steps"] == STEPS
    assert [event["step"] for event in done.events("epoch")] == [4, 8]


def test_a_last_group_of_too_few_images_is_left_out(shapes, tmp_path):
    # 40 images, 18 in a step: two steps an epoch, and four images are left.
    done = run(shapes, tmp_path, batch_size=6, accumulate=3)
    assert [event["images"] for event in done.events("step")] == [18] * 4


@pytest.mark.parametrize("after_step", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_was_interrupted_between_real_steps_goes_on_bit_for_bit(
    shapes, tmp_path, after_step
):
    whole = run(shapes, tmp_path / "whole", **HALVES)
    resumed = run_interrupted(shapes, tmp_path / "resumed", after_step=after_step, **HALVES)
    assert_same_course(resumed, whole)


def test_a_run_may_go_on_with_the_same_images_per_step_in_other_batches(shapes, tmp_path):
    run(shapes, tmp_path, epochs=2)  # 10 images per step
    (tmp_path / "checkpoints" / "step-00000008.npz").unlink()
    resumed = run(shapes, tmp_path, resume=True, epochs=2, batch_size=5, accumulate=2)
    assert resumed.results["steps"] == STEPS
    with pytest.raises(ValueError, match=r"was 10, is 20 \(2 times 10 on each of 1 devices"):
        run(shapes, tmp_path, resume=True, epochs=2, batch_size=10, accumulate=2)


def test_two_devices_accumulate_too(shapes, tmp_path):
    done = run(shapes, tmp_path, devices="cpu:0,1", batch_size=2, accumulate=2, dtype="float16")
    assert {event["images"] for event in done.events("step")} == {8}
    assert done.results["global_batch_size"] == 8
    assert done.results["skipped_steps"] < done.results["steps"] == 10
