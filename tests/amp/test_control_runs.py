"""Control runs: training with a loss scale is training without one, but for skipped batches."""

from __future__ import annotations

import math

from mpgluon import DynamicLossScale, StaticLossScale, TrainerStateError, amp, cast_block

import mxnet as mx
import numpy as np
import pytest
from amp_helpers import (
    BAD_BATCH,
    BATCH_SIZE,
    BATCHES,
    GRADIENTS,
    LOSS,
    TWO,
    DoublingTrainer,
    backward,
    backward_on,
    batches,
    each_dtype,
    each_optimizer,
    give_gradient,
    make_net,
    make_trainer,
    one_weight,
    plain_run,
    scaled_net,
    scaled_run,
    scaled_weight,
    spoil,
    weight_trainer,
    weights,
)
from helpers import assert_same_bits, in_sequence
from mxnet import autograd
from mxnet.gluon import nn


@pytest.mark.sampled(4)
@each_optimizer
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", GRADIENTS)
def test_an_injected_overflow_leaves_the_weights_of_a_run_without_that_batch(
    where, value, optimizer
):
    dtype, place, gradient_dtype = GRADIENTS[where]
    net = make_net(dtype)
    assert getattr(net[place[0]], place[1]).grad().dtype == gradient_dtype
    scale = DynamicLossScale(128, growth_interval=1)
    scaled, scales, skipped = scaled_run(net, scale, optimizer, spoil(*place, value))
    assert_same_bits(scaled, plain_run(make_net(dtype), optimizer, leave_out=BAD_BATCH))
    assert scales == [256, 512, 256, 512]  # from 128: grown, grown, halved, grown
    assert skipped == [False, False, True, False]


@each_optimizer
@each_dtype
def test_a_static_scale_skips_the_overflow_and_stays(dtype, optimizer):
    inject = spoil(0, "weight", math.inf)
    scaled, scales, skipped = scaled_run(make_net(dtype), StaticLossScale(128), optimizer, inject)
    assert_same_bits(scaled, plain_run(make_net(dtype), optimizer, leave_out=BAD_BATCH))
    assert scales == [128] * BATCHES
    assert skipped == [False, False, True, False]


@each_optimizer
@pytest.mark.parametrize("exponent", [-8, 1, 16, 24])
def test_scaling_fp32_training_by_a_power_of_two_changes_no_bit(exponent, optimizer):
    scaled, scales, skipped = scaled_run(make_net(), 2.0**exponent, optimizer)
    assert_same_bits(scaled, plain_run(make_net(), optimizer))
    assert scales == [2.0**exponent] * BATCHES
    assert not any(skipped)


def test_the_control_run_would_notice_a_missing_batch_and_a_missing_division():
    everything = plain_run(make_net())
    without = plain_run(make_net(), leave_out=BAD_BATCH)
    assert not any(np.array_equal(one, other) for one, other in zip(everything, without))
    net, trainer = scaled_net()
    for images, targets in batches():
        with autograd.record():
            loss = LOSS(net(images), targets) * 2
        autograd.backward(loss)
        trainer.step(BATCH_SIZE)
    assert not any(np.array_equal(one, other) for one, other in zip(everything, weights(net)))


def test_without_a_loss_scale_an_infinite_gradient_reaches_the_weights_as_in_plain_gluon():
    inject = spoil(2, "weight", math.inf)
    unscaled, scales, skipped = scaled_run(make_net(), "none", inject=inject)
    net, trainer = scaled_net()
    for number, batch in enumerate(batches()):
        backward(net, *batch)
        if number == BAD_BATCH:
            inject(net)
        trainer.step(BATCH_SIZE)
    assert not all(np.isfinite(one).all() for one in unscaled)
    for one, other in zip(unscaled, weights(net)):
        np.testing.assert_array_equal(one, other)  # a NaN may have any bits
    assert scales == [1] * BATCHES
    assert not any(skipped)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kvstore", ["device", "local", None])
@each_dtype
@pytest.mark.parametrize("bad_device", [0, 1])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_on_any_device_skips_the_step_on_all(kvstore, dtype, bad_device, value):
    def run(loss_scale, leave_out=None, inject=False):
        net, trainer = scaled_net(dtype, ctx=TWO, loss_scale=loss_scale, kvstore=kvstore)
        for number, batch in enumerate(batches()):
            if number == leave_out:
                continue
            backward_on(net, TWO, batch, trainer)
            if inject and number == BAD_BATCH:
                net[0].weight.list_grad()[bad_device][0, 0] = value
            trainer.step(BATCH_SIZE)
            assert amp.step_was_skipped(trainer) is (inject and number == BAD_BATCH)
        return weights(net)

    with_overflow = run(DynamicLossScale(128, growth_interval=1), inject=True)
    assert_same_bits(with_overflow, run(1, leave_out=BAD_BATCH))


@pytest.mark.sampled(4)
@each_optimizer
@each_dtype
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("bad_half", [0, 1])
def test_an_overflow_in_accumulated_gradients_discards_that_window_and_no_other(
    dtype, optimizer, value, bad_half
):
    def run(loss_scale, windows, bad=None):
        net, trainer = scaled_net(dtype, grad_req="add", optimizer=optimizer, loss_scale=loss_scale)
        every = list(batches())
        for window in windows:
            for half in range(2):
                backward(net, *every[2 * (window % 2) + half], trainer)
                if (window, half) == (bad, bad_half):
                    spoil(0, "weight", value)(net)
            trainer.step(2 * BATCH_SIZE)
            if not amp.step_was_skipped(trainer):
                net.collect_params().zero_grad()  # as in plain Gluon
        return weights(net), trainer

    with_overflow, trainer = run(DynamicLossScale(128, growth_interval=1), windows=[0, 1, 2], bad=1)
    assert (amp.skipped_steps(trainer), amp.loss_scale(trainer)) == (1, 256)
    assert_same_bits(with_overflow, run(1, windows=[0, 2])[0])


@each_optimizer
@each_dtype
def test_two_trainers_have_two_scales_and_an_overflow_of_one_leaves_the_other_alone(
    dtype, optimizer
):
    # The generator's loss goes through the discriminator, whose gradients it then overwrites.
    # The control has scales too, but constant ones: without any, float16 would lose bits.
    def run(dynamic, skip=()):
        generator, discriminator = make_net(dtype), nn.HybridSequential()
        discriminator.add(nn.Dense(3, in_units=2), nn.Dense(1, in_units=3))
        discriminator.initialize(mx.init.Normal(0.5))
        if dtype == "float16":
            cast_block(discriminator, "float16")
        nets = {"generator": generator, "discriminator": discriminator}
        trainers = {
            name: make_trainer(
                net, optimizer, DynamicLossScale(scale, growth_interval=1) if dynamic else scale
            )
            for (name, net), scale in zip(nets.items(), (2.0**14, 2.0**10))
        }
        for number, (images, targets) in enumerate(batches()):
            for name, trainer in trainers.items():
                if (number, name) in skip and not dynamic:
                    continue
                with autograd.record():
                    scores = discriminator(generator(images) if name == "generator" else targets)
                    with amp.scale_loss(scores**2, trainer) as loss:
                        loss.backward()
                if (number, name) in skip:
                    nets[name][0].weight.grad()[0, 0] = math.inf
                trainer.step(BATCH_SIZE)
        scales = {name: amp.loss_scale(trainer) for name, trainer in trainers.items()}
        return weights(generator) + weights(discriminator), scales

    skip = [(1, "generator"), (2, "discriminator"), (3, "discriminator")]
    with_overflow, scales = run(True, skip)
    assert scales == {"generator": 2.0**14 * 2 / 2 * 4, "discriminator": 2.0**10 * 4 / 4}
    control, _ = run(False, skip)
    # BatchNorm's statistics are not weights, and the skipped forward passes do move them.
    assert_same_bits(with_overflow, control)


@each_optimizer
@each_dtype
def test_frozen_parameters_stay_and_the_others_train_as_without_a_scale(dtype, optimizer):
    def frozen_net():
        net = make_net(dtype)
        net[0].weight.grad_req = "null"
        return net

    start = make_net(dtype)[0].weight.data().asnumpy()
    net = frozen_net()
    scaled, scales, skipped = scaled_run(
        net, DynamicLossScale(128, growth_interval=1), optimizer, spoil(2, "weight", math.inf)
    )
    assert_same_bits(scaled, plain_run(frozen_net(), optimizer, leave_out=BAD_BATCH))
    assert_same_bits([net[0].weight.data().asnumpy()], [start])
    assert scales[-1] == 512
    assert sum(skipped) == 1


@each_dtype
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_in_a_sparse_gradient_leaves_the_weights_of_a_run_without_that_batch(
    value, optimizer, dtype
):
    def run(loss_scale, leave_out=None, *, bad=False):
        mx.random.seed(0)
        net = in_sequence(
            nn.Embedding(8, 3, sparse_grad=True), nn.Dense(2, in_units=3, flatten=False)
        )
        net.initialize(mx.init.Normal(0.5))
        if dtype == "float16":
            cast_block(net, "float16")
        trainer = make_trainer(net, optimizer, loss_scale)
        for number, (images, targets) in enumerate(batches()):
            if number == leave_out:
                continue
            words = mx.nd.clip(mx.nd.abs(images[:, 0]) * 4, 0, 7).astype("int32")
            backward(net, words, targets, trainer)
            gradient = net[0].weight.grad()
            assert gradient.stype == "row_sparse"
            if bad and number == BAD_BATCH:
                rows = gradient.data.asnumpy()
                rows[0, 0] = value
                spoilt = mx.nd.sparse.row_sparse_array(
                    (rows, gradient.indices), shape=gradient.shape, dtype=gradient.dtype
                )
                spoilt.copyto(gradient)
                assert not np.isfinite(gradient.asnumpy()).all()
            trainer.step(BATCH_SIZE)
        return weights(net), trainer

    with_overflow, trainer = run(DynamicLossScale(128, growth_interval=1), bad=True)
    assert (amp.loss_scale(trainer), amp.skipped_steps(trainer)) == (512, 1)
    assert_same_bits(with_overflow, run(1, leave_out=BAD_BATCH)[0])


@each_optimizer
def test_a_rescale_factor_of_the_users_own_is_kept(optimizer):
    def run(loss_scale):
        net, trainer = scaled_net(optimizer=optimizer, loss_scale=loss_scale)
        trainer._scale = 0.5  # as Horovod does to average
        for batch in batches():
            backward(net, *batch, trainer if loss_scale else None)
            trainer.step(BATCH_SIZE)
            assert trainer._scale == 0.5
        return weights(net)

    assert_same_bits(run(DynamicLossScale(128, growth_interval=1)), run(None))
    if optimizer != "adam":  # which does not care for the size of gradients
        assert not np.array_equal(run(None)[0], plain_run(make_net(), optimizer)[0])


def test_a_trainer_with_a_reduction_of_its_own_is_scaled_and_skips_steps():
    net = make_net()
    trainer = DoublingTrainer(net.collect_params(), learning_rate=0.1, wd=2.0**-7)
    amp.init_trainer(trainer, 128)
    for number, batch in enumerate(batches()):
        backward(net, *batch, trainer)
        if number == BAD_BATCH:
            spoil(0, "weight", math.inf)(net)
        trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), plain_run(make_net(), leave_out=BAD_BATCH))


def test_an_optimizer_that_was_loaded_from_a_file_is_the_one_that_is_rescaled(tmp_path):
    def run(loss_scale):
        net, trainer = scaled_net(optimizer="momentum", loss_scale=loss_scale)
        for number, batch in enumerate(batches()):
            if number == 2:
                trainer.save_states(str(tmp_path / "trainer.states"))
                trainer.load_states(str(tmp_path / "trainer.states"))
            backward(net, *batch, trainer if loss_scale else None)
            trainer.step(BATCH_SIZE)
        return weights(net)

    assert_same_bits(run(1024), run(None))


def test_a_step_without_a_scaled_loss_divides_nothing_and_keeps_the_scale_but_skips_an_overflow():
    net, trainer = scaled_net(loss_scale=DynamicLossScale(128, growth_interval=1))
    for batch in batches():
        backward(net, *batch)
        trainer.step(BATCH_SIZE)
    expected = plain_run(make_net())
    assert_same_bits(weights(net), expected)
    assert amp.loss_scale(trainer) == 128
    backward(net, *next(batches()))
    spoil(0, "weight", math.inf)(net)
    trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), expected)
    assert amp.step_was_skipped(trainer)


@pytest.mark.parametrize("exponent", [118, 123, 126])
@each_dtype
def test_a_dynamic_scale_that_no_step_can_divide_by_shrinks_until_one_can(exponent, dtype):
    # Gradients of zero never overflow, so that S grows as far as it may: 1 / S / 8 is subnormal.
    weight = one_weight(dtype, value=1.0)
    scale = DynamicLossScale(2.0**exponent, growth_interval=1, max_scale=2.0**1000)
    trainer = weight_trainer(weight, scale)
    scales = []
    for _ in range(8):
        give_gradient(weight, trainer, 0.0)
        trainer.step(8)
        scales.append(math.log2(amp.loss_scale(trainer)))
    assert max(scales[4:]) == 124  # the largest that could be divided by was 2**123, and it grew
    assert min(scales[4:]) == 123
    assert weight.data().asscalar() == 1


@pytest.mark.parametrize("exponent", [-140, 124, 126, 500])
def test_a_static_scale_that_no_step_can_divide_by_is_refused_with_the_range(exponent):
    weight, trainer = scaled_weight(2.0**exponent, value=1.0)
    give_gradient(weight, trainer, 0.0)
    message = r"not a normal FP32 number; choose one between 2\*\*"
    with pytest.raises(TrainerStateError, match=message):
        trainer.step(8)
    assert weight.data().asscalar() == 1
