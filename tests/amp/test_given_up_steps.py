"""Steps that were begun and given up: Ctrl-C, a skipped batch, a loss that was not scaled."""

from __future__ import annotations

import math

import mpgluon
from mpgluon import DynamicLossScale, TrainerStateError, amp
from mpgluon.trainer.step import state_of

import mxnet as mx
import numpy as np
import pytest
from amp_helpers import (
    BAD_BATCH,
    BATCH_SIZE,
    LOSS,
    backward,
    backward_of_two,
    batches,
    each_dtype,
    give_gradient,
    make_net,
    make_trainer,
    plain_run,
    scaled_net,
    scaled_weight,
    two_weights,
    weights,
)
from helpers import assert_same_bits, backward_from
from mxnet import autograd


def weights_after_accumulating(some):
    """Return the weights of an FP32 network after one step on all of some batches."""
    control, plain = scaled_net(grad_req="add")
    for batch in some:
        backward(control, *batch)
    plain.step(len(some) * BATCH_SIZE)
    return weights(control)


def expected_after(steps, dtype="float32"):
    """Return the weights after some steps with nothing given up."""
    net, trainer = scaled_net(dtype, loss_scale=1)
    for number, batch in enumerate(batches()):
        if number < steps:
            backward(net, *batch, trainer)
            trainer.step(BATCH_SIZE)
    return weights(net)


def interrupt(net, trainer, batch, when):
    """Begin a step as a loop does, and have it end with Ctrl-C at some place."""
    images, targets = batch
    try:
        with autograd.record():
            loss = LOSS(net(images), targets)
            with amp.scale_loss(loss, trainer) as scaled:
                if when == "before backward":
                    raise KeyboardInterrupt
                autograd.backward(scaled)
                if when == "in the block":
                    raise KeyboardInterrupt
        if when == "after unscale":
            amp.unscale(trainer)
        if when == "after clipping":
            amp.clip_global_norm(trainer, 1e-3, BATCH_SIZE)
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass


PLACES = ["before backward", "in the block", "after backward", "after clipping"]


@each_dtype
@pytest.mark.parametrize("when", [*PLACES, "after unscale"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_loop_that_was_interrupted_can_simply_run_again(when, dtype, times):
    if (when, dtype) == ("after unscale", "float16"):
        dtype = "float32"  # float16 gradients are not unscaled
    net, trainer = scaled_net(dtype, loss_scale=64)
    every = list(batches())
    for _ in range(times):
        interrupt(net, trainer, every[3], when)
    for batch in every[:2]:
        backward(net, *batch, trainer)
        trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), expected_after(2, dtype))


@each_dtype
@pytest.mark.parametrize("when", PLACES)
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_loading_a_checkpoint_drops_the_gradients_of_an_interrupted_step(
    tmp_path, when, dtype, grad_req
):
    def make():
        net = make_net(dtype, grad_req=grad_req)
        return net, make_trainer(net, loss_scale=DynamicLossScale(64, growth_interval=1))

    every = list(batches())
    net, trainer = make()
    backward(net, *every[0], trainer)
    trainer.step(BATCH_SIZE)
    mpgluon.save_checkpoint(tmp_path / "c.npz", net, trainer)
    interrupt(net, trainer, every[3], when)
    mpgluon.load_checkpoint(tmp_path / "c.npz", net, trainer)
    if grad_req == "add" and when == "before backward":
        net.collect_params().zero_grad()  # of the step before, as in every loop that accumulates
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(BATCH_SIZE)
    assert state_of(trainer).scale == 128
    backward(net, *every[1], trainer)
    trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), expected_after(2, dtype))


@pytest.mark.parametrize("when", ["in the block", "after clipping", "after unscale"])
def test_gradients_that_an_interrupted_step_has_accumulated_must_be_set_to_zero(when):
    net, trainer = scaled_net(grad_req="add", loss_scale=64)
    every = list(batches())
    interrupt(net, trainer, every[3], when)
    for _ in range(2):
        message = r"or, to give up what has accumulated .*: net\.collect_params\(\)\.zero_grad\(\)"
        with pytest.raises(TrainerStateError, match=message):
            backward(net, *every[0], trainer)
    net.collect_params().zero_grad()
    backward(net, *every[0], trainer)
    trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), expected_after(1))


def test_an_exception_before_backward_leaves_what_has_accumulated():
    net, trainer = scaled_net(grad_req="add", loss_scale=64)
    every = list(batches())
    backward(net, *every[0], trainer)
    interrupt(net, trainer, every[3], "before backward")
    backward(net, *every[1], trainer)
    trainer.step(2 * BATCH_SIZE)
    assert_same_bits(weights(net), weights_after_accumulating(every[:2]))


def test_after_an_interruption_between_the_steps_of_two_trainers_the_next_loss_trains_both():
    pair, trainers = two_weights(lambda: DynamicLossScale(8, growth_interval=1))
    for stepped in (trainers[:1], trainers):
        backward_of_two(pair, trainers, (0.25, 0.25))
        for trainer in stepped:
            trainer.step(1)
    assert [p.data().asscalar() for p in pair] == [0.5, 0.75]
    assert amp.loss_scale(trainers[1]) == 32


@each_dtype
def test_gradients_of_a_plain_loss_after_a_scaled_one_that_was_given_up_are_not_divided(dtype):
    net, trainer = scaled_net(dtype, loss_scale=64)
    every = list(batches())
    backward(net, *every[0], trainer)
    before = weights(net)
    backward(net, *every[1])
    for _ in range(2):
        message = r"5 gradients \(\w+ first\) were written by a loss that was not scaled"
        with pytest.raises(TrainerStateError, match=message):
            trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), before)
    for batch in every[:2]:  # the next scaled loss starts a new step
        backward(net, *batch, trainer)
        trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), expected_after(2, dtype))


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_a_plain_loss_between_two_scaled_ones_is_refused_where_gradients_accumulate(grad_req):
    net, trainer = scaled_net(grad_req=grad_req, loss_scale=64)
    every = list(batches())
    backward(net, *every[0], trainer)
    backward(net, *every[1])
    if grad_req == "write":  # it is overwritten
        backward(net, *every[0], trainer)
        trainer.step(BATCH_SIZE)
        assert_same_bits(weights(net), expected_after(1))
    else:
        with pytest.raises(TrainerStateError, match="by a loss that was not scaled, after one"):
            backward(net, *every[0], trainer)


@pytest.mark.parametrize("kind", ["plain", "scaled after clipping"])
def test_a_second_loss_that_fills_only_some_gradients_makes_the_step_fail(kind):
    net, trainer = scaled_net(loss_scale=64)
    images, targets = next(batches())
    backward(net, images, targets, trainer)
    features = mx.nd.ones((BATCH_SIZE, 4))
    if kind == "plain":
        backward(net[2], features, targets)
        refused = pytest.raises(TrainerStateError, match="2 gradients")
    else:  # the second loss starts a new step: gradients that only the first one filled are stale
        amp.clip_global_norm(trainer, 1.0, BATCH_SIZE)
        backward(net[2], features, targets, trainer)
        refused = pytest.raises(UserWarning, match="has not been updated by backward")
    with refused:
        trainer.step(BATCH_SIZE)


@pytest.mark.parametrize("where", ["in the block", "after it"])
def test_a_step_after_backward_of_the_loss_instead_of_the_scaled_one_is_refused(where):
    net, trainer = scaled_net(loss_scale=64)
    images, targets = next(batches())
    with autograd.record():
        loss = LOSS(net(images), targets)
        with amp.scale_loss(loss, trainer):
            if where == "in the block":
                loss.backward()
    if where == "after it":
        backward(net, images, targets)
    with pytest.raises(TrainerStateError, match="had no backward pass, but another loss had one"):
        trainer.step(BATCH_SIZE)
    backward(net, images, targets, trainer)
    trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), expected_after(1))


def test_a_batch_that_the_block_skips_with_continue_leaves_no_trace():
    net, trainer = scaled_net(loss_scale=DynamicLossScale(64, growth_interval=1))
    for number, (images, targets) in enumerate(batches()):
        with autograd.record(), amp.scale_loss(LOSS(net(images), targets), trainer) as scaled:
            if number == BAD_BATCH:
                continue
            scaled.backward()
        trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), plain_run(make_net(), leave_out=BAD_BATCH))
    assert amp.loss_scale(trainer) == 512


def test_a_scale_may_change_between_backward_passes_that_overwrite_gradients():
    scale = DynamicLossScale(128)
    net, trainer = scaled_net(loss_scale=scale)
    every = list(batches())
    backward(net, *every[1], trainer)
    scale.update(False)
    backward(net, *every[0], trainer)
    trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), expected_after(1))


@pytest.mark.parametrize("scale", ["none", 1])
def test_without_a_scale_losses_may_mix_as_in_plain_gluon(scale):
    net, trainer = scaled_net(grad_req="add", loss_scale=scale)
    every = list(batches())
    backward(net, *every[0], trainer)
    backward(net, *every[1])
    trainer.step(2 * BATCH_SIZE)
    assert_same_bits(weights(net), weights_after_accumulating(every[:2]))


def test_a_loss_that_is_not_scaled_is_not_divided_after_a_skipped_step():
    weight, trainer = scaled_weight(DynamicLossScale(1024), value=1.0)
    give_gradient(weight, trainer, math.inf)
    trainer.step(1)
    assert amp.step_was_skipped(trainer)
    backward_from(lambda: weight.data() * 0.5)
    trainer.step(1)
    assert weight.data().asscalar() == 0.5


def test_every_gradient_counts_as_before_where_backward_comes_after_the_block():
    def train(scale, *, late):
        net, trainer = scaled_net("float16", grad_req="add", loss_scale=scale)
        for images, targets in batches():
            net.collect_params().zero_grad()
            for half in (slice(None, 4), slice(4, None)):
                with autograd.record():
                    loss = LOSS(net(images[half]), targets[half])
                    with amp.scale_loss(loss, trainer) as scaled:
                        if not late:
                            scaled.backward()
                if late:
                    scaled.backward()
            assert 0 < amp.clip_global_norm(trainer, 1000.0, BATCH_SIZE) < math.inf
            trainer.step(BATCH_SIZE)
        return weights(net)

    for one, other in zip(train(64, late=True), train(64, late=False)):
        # Each accumulates two float16 gradients; added in float16 they are rounded once more.
        np.testing.assert_allclose(one.astype("f4"), other.astype("f4"), rtol=0, atol=2.0**-9)
