"""Loss scaling on real Trainers: skipped steps, questions, and calls at the wrong moment."""

from __future__ import annotations

import math

from mpgluon import DynamicLossScale, amp
from mpgluon.errors import PrecisionError, TrainerStateError
from mpgluon.trainer.step import state_of

import mxnet as mx
import numpy as np
import pytest
from amp_helpers import (
    BATCH_SIZE,
    TWO,
    backward,
    batches,
    make_net,
    make_trainer,
    plain_run,
    scaled_net,
    scaled_weight,
    spoil,
    trained,
    weights,
)
from helpers import assert_same_bits, backward_from, with_loss_scale
from mxnet import autograd, gluon
from mxnet.contrib.amp.loss_scaler import LossScaler
from mxnet.gluon import nn

# --- what a skipped step leaves behind -------------------------------------------------------


@pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])
@pytest.mark.parametrize("way", ["float32", "float16", "autocast float16", "autocast bfloat16"])
def test_accumulating_one_batch_twice_doubles_its_gradients_exactly(way, hybridize):
    net = make_net(way, grad_req="add")
    net.hybridize(hybridize)
    trainer = make_trainer(net, loss_scale=16)
    batch = next(batches())
    backward(net, *batch, trainer)
    once = [parameter.grad().asnumpy() for parameter in trained(net)]
    assert all(gradient.any() for gradient in once)
    backward(net, *batch, trainer)
    assert_same_bits(
        [parameter.grad().asnumpy() for parameter in trained(net)], [2 * g for g in once]
    )


def two_layers(loss_scale):
    """Return two layers of one weight 1 and one bias 0, and a Trainer of both."""
    layers = [nn.Dense(1, in_units=1, weight_initializer="ones") for _ in range(2)]
    for layer in layers:
        layer.initialize()
    # In the order of the list; Gluon complains of the first stale gradient.
    parameters = [p for layer in layers for p in layer.collect_params().values()]
    trainer = with_loss_scale(gluon.Trainer(parameters, "sgd", {"learning_rate": 1.0}), loss_scale)
    return layers, trainer


def backward_through(trainer, *layers):
    one = mx.nd.ones((1, 1))
    with autograd.record(), amp.scale_loss(sum(f(one) for f in layers), trainer) as scaled:
        scaled.backward()


def test_an_overflow_in_a_parameter_that_is_then_unused_does_not_stop_the_others():
    (used_once, used_always), trainer = two_layers(8)
    backward_through(trainer, used_once, used_always)
    used_once.weight.grad()[:] = math.inf
    trainer.step(1, ignore_stale_grad=True)
    assert amp.step_was_skipped(trainer)
    assert used_always.weight.data().asscalar() == 1
    backward_through(trainer, used_always)  # the infinite gradient is stale
    trainer.step(1, ignore_stale_grad=True)
    assert not amp.step_was_skipped(trainer)
    assert used_always.weight.data().asscalar() == 0  # 1 - rate * gradient
    assert used_once.weight.data().asscalar() == 1


def test_a_step_right_after_a_skipped_one_needs_a_new_backward():
    net, trainer = scaled_net(loss_scale=8)
    backward(net, *next(batches()), trainer)
    spoil(0, "weight", math.inf)(net)
    trainer.step(BATCH_SIZE)
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(BATCH_SIZE)


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("loss_scale", ["none", 1024])
def test_a_step_repeated_with_stale_gradients_ignored_is_still_divided_and_clipped(
    loss_scale, max_norm
):
    # Trainer.step refuses stale gradients with an exception that advises to call it again.
    (_, used), trainer = two_layers(loss_scale)
    used.bias.grad_req = "null"
    backward_through(trainer, used)
    if max_norm is not None:
        assert amp.clip_global_norm(trainer, max_norm, 1) == 1
    with pytest.raises(UserWarning, match="call step with ignore_stale_grad=True"):
        trainer.step(1)
    trainer.step(1, ignore_stale_grad=True)
    assert used.weight.data().asscalar() == 1 - (max_norm or 1)  # 1 - rate * gradient


def test_a_step_repeated_after_the_error_of_a_callback_is_still_divided():
    (_, used), trainer = two_layers(1024)
    used.bias.grad_req = "null"
    backward_through(trainer, used)

    def stop(*_):
        raise KeyboardInterrupt

    state_of(trainer).on_step.append(stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(1, ignore_stale_grad=True)
    state_of(trainer).on_step.remove(stop)
    trainer.step(1, ignore_stale_grad=True)
    assert used.weight.data().asscalar() == 0  # 1 - rate * gradient


def test_a_loss_is_multiplied_by_the_scale_and_a_list_of_losses_one_by_one():
    trainer = make_trainer(make_net(), loss_scale=128)
    losses = [mx.nd.array([1.0, -2.5]), mx.nd.array([3.0], ctx=mx.cpu(1))]
    with amp.scale_loss(losses[0], trainer) as scaled:
        np.testing.assert_array_equal(scaled.asnumpy(), [128, -320])
    for kind in (list, tuple):
        with amp.scale_loss(kind(losses), trainer) as scaled:
            assert [one.context for one in scaled] == [mx.cpu(0), mx.cpu(1)]
            np.testing.assert_array_equal(scaled[0].asnumpy(), [128, -320])
            np.testing.assert_array_equal(scaled[1].asnumpy(), [384])


@pytest.mark.parametrize("together", [True, False])
def test_two_losses_before_one_step_train_like_their_sum(together):
    weight, trainer = scaled_weight(64, 2.0**-3, value=1.0, grad_req="write" if together else "add")
    with autograd.record():
        losses = [weight.data() * 1.0, weight.data() * 4.0]
        with amp.scale_loss(losses, trainer) as scaled:
            pass
    for heads in [scaled] if together else scaled:
        autograd.backward(heads)
    trainer.step(1)
    assert weight.data().asscalar() == 1 - 5 / 8


@pytest.mark.parametrize(
    ("value", "scale"), [("dynamic", 2.0**16), ("none", 1), (64, 64), ("64", 64)]
)
def test_every_short_form_of_a_loss_scale_is_taken_and_a_new_trainer_has_skipped_nothing(
    value, scale
):
    trainer = make_trainer(make_net(), loss_scale=value)
    assert amp.loss_scale(trainer) == scale
    assert amp.step_was_skipped(trainer) is False
    assert amp.skipped_steps(trainer) == 0
    assert amp.gradient_norm(trainer) is None


def test_a_trainer_uses_the_loss_scale_object_that_it_received():
    mine = DynamicLossScale(2, growth_interval=1)
    net, trainer = scaled_net(loss_scale=mine)
    backward(net, *next(batches()), trainer)
    trainer.step(BATCH_SIZE)
    assert mine.scale == amp.loss_scale(trainer) == 4


def test_step_was_skipped_is_about_the_latest_step_and_skipped_steps_counts_all():
    net, trainer = scaled_net(loss_scale=8)
    history = []
    for number, batch in enumerate(batches()):
        backward(net, *batch, trainer)
        if number in (0, 1):
            spoil(0, "weight", math.inf)(net)
        trainer.step(BATCH_SIZE)
        history.append((amp.step_was_skipped(trainer), amp.skipped_steps(trainer)))
    assert history == [(True, 1), (True, 2), (False, 2), (False, 2)]


QUESTIONS = [
    *(amp.loss_scale, amp.step_was_skipped, amp.skipped_steps, amp.gradient_norm, amp.step_flags),
    *(amp.unscale, amp.unscaled_gradients, lambda trainer: amp.clip_global_norm(trainer, 1.0, 1)),
    lambda trainer: amp.scale_loss(mx.nd.ones(1), trainer).__enter__(),
    lambda trainer: amp.scale_loss(mx.nd.ones(1), [trainer, make_trainer(make_net(), "sgd", 8)]),
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_function_accepts_a_trainer_before_init_trainer(question):
    trainer = make_trainer(make_net())
    advice = r"has no loss scale yet; call amp.init_trainer\(trainer\) right after"
    with pytest.raises(TrainerStateError, match=advice):
        question(trainer)


def test_a_second_init_trainer_is_refused_and_the_first_one_stays():
    trainer = make_trainer(make_net(), loss_scale=8)
    with pytest.raises(TrainerStateError, match=r"loss scale already \(TrainerState\)"):
        amp.init_trainer(trainer, 16)
    assert amp.loss_scale(trainer) == 8


def test_a_trainer_with_the_loss_scale_of_contrib_amp_is_refused():
    trainer = make_trainer(make_net())
    scaler = trainer._amp_loss_scaler = LossScaler()
    with pytest.raises(TrainerStateError, match=r"\(LossScaler\).* contrib.amp's not at all"):
        amp.init_trainer(trainer)
    with pytest.raises(TrainerStateError, match="has no loss scale yet"):
        amp.loss_scale(trainer)
    assert trainer._amp_loss_scaler is scaler


@pytest.mark.parametrize("other", [mx.optimizer.SGD(), None, "sgd"])
def test_only_a_trainer_can_be_given_a_loss_scale(other):
    with pytest.raises(TypeError, match=f"takes a gluon.Trainer, received {type(other).__name__}"):
        amp.init_trainer(other)


@pytest.mark.parametrize(("value", "kind"), [(1000, ValueError), (None, TypeError)])
def test_a_refused_loss_scale_leaves_the_trainer_without_one(value, kind):
    trainer = make_trainer(make_net())
    with pytest.raises(kind):
        amp.init_trainer(trainer, value)
    amp.init_trainer(trainer, 8)
    assert amp.loss_scale(trainer) == 8


def test_a_float16_loss_is_refused_alone_and_in_a_list_and_leaves_no_trace():
    scale = DynamicLossScale(8, growth_interval=1)
    trainer = make_trainer(make_net(), loss_scale=scale)
    float16_loss = mx.nd.ones(1, dtype="float16")
    for loss in (float16_loss, [mx.nd.ones(1), float16_loss]):
        advice = r"loss is float16.*astype\('float32'\)"
        with pytest.raises(PrecisionError, match=advice), amp.scale_loss(loss, trainer):
            pytest.fail("the loss was scaled")
    scale.update(True)
    with amp.scale_loss(mx.nd.ones(1), trainer) as scaled:  # no accumulation has begun
        assert scaled.asscalar() == 16


@pytest.mark.parametrize("loss_scale", ["none", 8, "dynamic"])
def test_a_step_with_all_parameters_frozen_is_refused(loss_scale):
    net, trainer = scaled_net(loss_scale=loss_scale)
    net.collect_params().setattr("grad_req", "null")
    with pytest.raises(TrainerStateError, match=r"all are frozen \(grad_req='null'\)"):
        trainer.step(1)


@pytest.mark.parametrize("loss_scale", [8, "dynamic"])
def test_updates_inside_the_kvstore_are_refused_with_advice_and_nothing_is_changed(loss_scale):
    net, trainer = scaled_net(ctx=TWO, update_on_kvstore=True)
    before, options = weights(net), dict(trainer._kvstore_params)
    with pytest.raises(TrainerStateError, match=r"create it with update_on_kvstore=False"):
        amp.init_trainer(trainer, loss_scale)
    assert_same_bits(weights(net), before)
    assert trainer._kvstore_params == options
    with pytest.raises(TrainerStateError, match="has no loss scale yet"):
        amp.loss_scale(trainer)


def plain_step_on_two_devices(net, trainer, images, targets):
    for device in TWO:
        backward(net, images.as_in_context(device), targets.as_in_context(device))
    trainer.step(2 * BATCH_SIZE)


def test_a_trainer_that_has_stepped_inside_its_kvstore_is_refused_too():
    net, trainer = scaled_net(ctx=TWO)
    plain_step_on_two_devices(net, trainer, *next(batches()))
    before = weights(net)
    with pytest.raises(TrainerStateError, match="call init_trainer before the first step"):
        amp.init_trainer(trainer)
    assert_same_bits(weights(net), before)


def test_a_single_device_may_get_its_loss_scale_after_some_steps():
    net, trainer = scaled_net()
    for number, batch in enumerate(batches()):
        if number == 2:
            amp.init_trainer(trainer, 1024)
        backward(net, *batch, trainer if number >= 2 else None)
        trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), plain_run(make_net()))


def test_without_a_loss_scale_updates_may_stay_inside_the_kvstore():
    def run(loss_scale):
        net, trainer = scaled_net(ctx=TWO, loss_scale=loss_scale, update_on_kvstore=True)
        for batch in batches():
            plain_step_on_two_devices(net, trainer, *batch)
        assert trainer._update_on_kvstore
        return weights(net)

    assert_same_bits(run("none"), run(None))


def test_a_scale_that_changes_while_gradients_accumulate_is_refused_until_the_step():
    net = make_net(grad_req="add")
    scale = DynamicLossScale(128)
    trainer = make_trainer(net, loss_scale=scale)
    images, targets = next(batches())
    backward(net, images, targets, trainer)
    scale.update(False)
    with pytest.raises(TrainerStateError, match=r"changed from 128 to 64 .* call trainer.step"):
        backward(net, images, targets, trainer)
    before = weights(net)
    trainer.step(BATCH_SIZE)
    control = make_net()
    backward(control, images, targets)
    make_trainer(control).step(BATCH_SIZE)
    assert not np.array_equal(weights(net)[0], before[0])
    assert_same_bits(weights(net), weights(control))  # by 128, with which they were scaled
    backward(net, images, targets, trainer)


@pytest.mark.parametrize("loss", [None, 1.0, [1.0]])
def test_a_loss_that_is_not_an_array_is_refused(loss):
    trainer = make_trainer(make_net(), loss_scale=8)
    with (
        pytest.raises(TypeError, match="scale_loss takes a loss, an NDArray"),
        amp.scale_loss(loss, trainer),
    ):
        pass


def test_a_trainer_that_steps_without_a_scaled_loss_warns_once(caplog):
    weight, trainer = scaled_weight(value=1.0, learning_rate=0.25)
    for _ in range(2):
        backward_from(lambda: weight.data() * 1.0)
        trainer.step(1)
    assert weight.data().asscalar() == 0.5  # divided by nothing
    (message,) = caplog.messages
    assert "scale each loss with amp.scale_loss and the Trainer that steps" in message


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int64, int, float])
def test_numbers_may_be_of_numpy(number):
    net, trainer = scaled_net(loss_scale=number(128))
    backward(net, *next(batches()), trainer)
    assert amp.clip_global_norm(trainer, number(1), number(BATCH_SIZE)) > 0
    trainer.step(BATCH_SIZE)
    assert amp.loss_scale(trainer) == 128
