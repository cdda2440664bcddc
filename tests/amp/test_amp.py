"""Loss scaling on real Trainers: skipped steps, questions, and calls at the wrong moment."""

from __future__ import annotations

import math

from mpgluon import DynamicLossScale, amp
from mpgluon.errors import PrecisionError, TrainerStateError

import mxnet as mx
import numpy as np
import pytest
from amp_helpers import (
    BATCH_SIZE,
    backward,
    batches,
    make_net,
    make_trainer,
    plain_run,
    scaled_run,
    spoil,
    trained,
    weights,
)
from helpers import assert_same_bits
from mxnet import autograd, gluon
from mxnet.contrib.amp.loss_scaler import LossScaler
from mxnet.gluon import nn

# --- what a skipped step leaves behind -------------------------------------------------------


@pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])
@pytest.mark.parametrize("cast", ["plain", "cast float16", "auto float16", "auto bfloat16"])
def test_accumulating_one_batch_twice_doubles_its_gradients_exactly(cast, hybridize):
    how, _, dtype = cast.partition(" ")
    net = make_net(dtype if how == "cast" else "float32")
    if how == "auto":
        amp.autocast(net, dtype)
    net.hybridize(hybridize)
    for parameter in trained(net):
        parameter.grad_req = "add"
    trainer = make_trainer(net, loss_scale=16)
    batch = next(batches())
    backward(net, *batch, trainer)
    once = [parameter.grad().asnumpy() for parameter in trained(net)]
    assert all(gradient.any() for gradient in once)
    backward(net, *batch, trainer)
    assert_same_bits(
        [parameter.grad().asnumpy() for parameter in trained(net)], [2 * g for g in once]
    )


def test_an_overflow_in_a_parameter_that_is_then_unused_does_not_stop_the_others():
    used_once, used_always = nn.Dense(1, in_units=1), nn.Dense(1, in_units=1)
    net = nn.Sequential()
    net.add(used_once, used_always)
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    amp.init_trainer(trainer, 8)
    one = mx.nd.ones((1, 1))

    def step(*layers):
        with autograd.record(), amp.scale_loss(sum(f(one) for f in layers), trainer) as scaled:
            scaled.backward()
        if used_once in layers:
            used_once.weight.grad()[:] = math.inf
        trainer.step(1, ignore_stale_grad=True)

    step(used_once, used_always)
    assert amp.step_was_skipped(trainer)
    assert used_always.weight.data().asscalar() == 1
    step(used_always)
    assert not amp.step_was_skipped(trainer)
    assert used_always.weight.data().asscalar() == 0  # 1 - rate * gradient
    assert used_once.weight.data().asscalar() == 1


def test_a_stale_gradient_that_is_infinite_stops_nobody_if_stale_gradients_are_ignored():
    stale, fresh = nn.Dense(1, in_units=1), nn.Dense(1, in_units=1)
    net = nn.Sequential()
    net.add(stale, fresh)
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    amp.init_trainer(trainer, 8)
    stale.weight.grad()[:] = math.inf
    with autograd.record(), amp.scale_loss(fresh(mx.nd.ones((1, 1))), trainer) as scaled:
        scaled.backward()
    trainer.step(1, ignore_stale_grad=True)
    assert not amp.step_was_skipped(trainer)
    assert fresh.weight.data().asscalar() == 0
    assert stale.weight.data().asscalar() == 1


def test_a_step_right_after_a_skipped_one_needs_a_new_backward():
    net = make_net()
    trainer = make_trainer(net, loss_scale=8)
    backward(net, *next(batches()), trainer)
    spoil(0, "weight", math.inf)(net)
    trainer.step(BATCH_SIZE)
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(BATCH_SIZE)


def test_a_step_repeated_with_stale_gradients_ignored_still_divides_by_the_scale():
    # Trainer.step refuses stale gradients with an exception that advises to call it again.
    def run(loss_scale):
        unused, used = nn.Dense(1, in_units=1), nn.Dense(1, in_units=1)
        net = nn.Sequential()
        net.add(unused, used)
        net.initialize(mx.init.One())
        # In the order of the list; the one that complains comes first.
        parameters = [*unused.collect_params().values(), *used.collect_params().values()]
        trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 1.0})
        amp.init_trainer(trainer, loss_scale)
        with autograd.record(), amp.scale_loss(used(mx.nd.ones((1, 1))), trainer) as scaled:
            scaled.backward()
        with pytest.raises(UserWarning, match="call step with ignore_stale_grad=True"):
            trainer.step(1)
        trainer.step(1, ignore_stale_grad=True)
        return used.weight.data().asscalar()

    assert run("none") == 0  # plain Gluon: 1 - rate * gradient
    assert run(1024) == 0


# --- scale_loss and the questions ------------------------------------------------------------


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
    def run(loss_scale, *, as_sum):
        net = nn.Dense(1, in_units=1, use_bias=False)
        net.initialize(mx.init.One())
        net.weight.grad_req = "write" if as_sum or together else "add"
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 2.0**-3})
        amp.init_trainer(trainer, loss_scale)
        with autograd.record():
            losses = [net(mx.nd.array([[1.0]])), net(mx.nd.array([[4.0]]))]
            with amp.scale_loss(sum(losses) if as_sum else losses, trainer) as scaled:
                pass
        if as_sum or together:
            autograd.backward(scaled)
        else:
            for one in scaled:
                one.backward()
        trainer.step(1)
        return net.weight.data().asscalar()

    assert run(64, as_sum=False) == run(1, as_sum=True) == 1 - 5 / 8


def test_a_new_trainer_has_skipped_nothing():
    trainer = make_trainer(make_net(), loss_scale="dynamic")
    assert amp.loss_scale(trainer) == 2.0**16
    assert amp.step_was_skipped(trainer) is False
    assert amp.skipped_steps(trainer) == 0


@pytest.mark.parametrize(
    ("value", "scale"), [("dynamic", 2.0**16), ("none", 1), (64, 64), ("64", 64)]
)
def test_every_short_form_of_a_loss_scale_is_taken(value, scale):
    assert amp.loss_scale(make_trainer(make_net(), loss_scale=value)) == scale


def test_the_loss_scale_of_a_trainer_is_the_object_that_was_given():
    mine = DynamicLossScale(2, growth_interval=1)
    net = make_net()
    trainer = make_trainer(net, loss_scale=mine)
    backward(net, *next(batches()), trainer)
    trainer.step(BATCH_SIZE)
    assert mine.scale == amp.loss_scale(trainer) == 4


def test_a_skip_is_remembered_until_the_next_step_and_counted_for_good():
    net = make_net()
    trainer = make_trainer(net, loss_scale=8)
    history = []
    for number, batch in enumerate(batches()):
        backward(net, *batch, trainer)
        if number in (0, 1):
            spoil(0, "weight", math.inf)(net)
        trainer.step(BATCH_SIZE)
        history.append((amp.step_was_skipped(trainer), amp.skipped_steps(trainer)))
    assert history == [(True, 1), (True, 2), (False, 2), (False, 2)]


# --- calls at the wrong moment ---------------------------------------------------------------


def test_nothing_can_be_asked_before_init_trainer():
    trainer = make_trainer(make_net())
    advice = r"has no loss scale yet; call amp.init_trainer\(trainer\) right after"
    for question in (amp.loss_scale, amp.step_was_skipped, amp.skipped_steps):
        with pytest.raises(TrainerStateError, match=advice):
            question(trainer)
    with pytest.raises(TrainerStateError, match=advice), amp.scale_loss(mx.nd.ones(1), trainer):
        pytest.fail("the loss was scaled")


def test_a_second_init_trainer_is_refused_and_the_first_one_stays():
    trainer = make_trainer(make_net(), loss_scale=8)
    with pytest.raises(TrainerStateError, match=r"loss scale already \(TrainerState\)"):
        amp.init_trainer(trainer, 16)
    assert amp.loss_scale(trainer) == 8


def test_a_trainer_that_contrib_amp_has_taken_is_refused():
    trainer = make_trainer(make_net())
    theirs = trainer._amp_loss_scaler = LossScaler()
    with pytest.raises(TrainerStateError, match=r"\(LossScaler\).* contrib.amp's not at all"):
        amp.init_trainer(trainer)
    with pytest.raises(TrainerStateError, match="has no loss scale yet"):
        amp.loss_scale(trainer)
    assert trainer._amp_loss_scaler is theirs


@pytest.mark.parametrize("other", [mx.optimizer.SGD(), None, "sgd"])
def test_only_a_trainer_can_be_given_a_loss_scale(other):
    with pytest.raises(TypeError, match=f"takes a gluon.Trainer, received {type(other).__name__}"):
        amp.init_trainer(other)


@pytest.mark.parametrize(("value", "kind"), [(1000, ValueError), (None, TypeError)])
def test_what_is_no_loss_scale_leaves_the_trainer_without_one(value, kind):
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
    net = make_net()
    trainer = make_trainer(net, loss_scale=loss_scale)
    net.collect_params().setattr("grad_req", "null")
    with pytest.raises(TrainerStateError, match=r"all are frozen \(grad_req='null'\)"):
        trainer.step(1)


def test_frozen_parameters_beside_trained_ones_stay_as_they_are():
    net = make_net()
    net[0].weight.grad_req = "null"
    before = net[0].weight.data().asnumpy()
    _, scales, skipped = scaled_run(net, DynamicLossScale(128, growth_interval=1))
    assert_same_bits([net[0].weight.data().asnumpy()], [before])
    assert scales == [256, 512, 1024, 2048]
    assert not any(skipped)


@pytest.mark.parametrize("loss_scale", [8, "dynamic"])
def test_updates_inside_the_kvstore_are_refused_with_advice_and_nothing_is_changed(loss_scale):
    net = make_net(ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = make_trainer(net, update_on_kvstore=True)
    before, options = weights(net), dict(trainer._kvstore_params)
    with pytest.raises(TrainerStateError, match=r"create it with update_on_kvstore=False"):
        amp.init_trainer(trainer, loss_scale)
    assert_same_bits(weights(net), before)
    assert trainer._kvstore_params == options
    with pytest.raises(TrainerStateError, match="has no loss scale yet"):
        amp.loss_scale(trainer)


def test_a_trainer_that_has_stepped_inside_its_kvstore_is_refused_too():
    devices = [mx.cpu(0), mx.cpu(1)]
    net = make_net(ctx=devices)
    trainer = make_trainer(net)
    images, targets = next(batches())
    for device in devices:
        backward(net, images.as_in_context(device), targets.as_in_context(device))
    trainer.step(2 * BATCH_SIZE)
    before = weights(net)
    with pytest.raises(TrainerStateError, match="call init_trainer before the first step"):
        amp.init_trainer(trainer)
    assert_same_bits(weights(net), before)


def test_a_single_device_may_get_its_loss_scale_after_some_steps():
    net = make_net()
    trainer = make_trainer(net)
    for number, batch in enumerate(batches()):
        if number == 2:
            amp.init_trainer(trainer, 1024)
        backward(net, *batch, trainer if number >= 2 else None)
        trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), plain_run(make_net()))


def test_without_a_loss_scale_updates_may_stay_inside_the_kvstore():
    devices = [mx.cpu(0), mx.cpu(1)]

    def run(*, with_amp):
        net = make_net(ctx=devices)
        trainer = make_trainer(net, update_on_kvstore=True)
        if with_amp:
            amp.init_trainer(trainer, "none")
        for images, targets in batches():
            for device in devices:
                backward(net, images.as_in_context(device), targets.as_in_context(device))
            trainer.step(2 * BATCH_SIZE)
        assert trainer._update_on_kvstore
        return weights(net)

    assert_same_bits(run(with_amp=True), run(with_amp=False))


def test_a_scale_that_changes_while_gradients_accumulate_is_refused_until_the_step():
    net = make_net()
    net.collect_params().setattr("grad_req", "add")
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
    trainer_of_control = make_trainer(control)
    backward(control, images, targets)
    trainer_of_control.step(BATCH_SIZE)
    assert not np.array_equal(weights(net)[0], before[0])
    assert_same_bits(weights(net), weights(control))  # by 128, with which they were scaled
    backward(net, images, targets, trainer)


@pytest.mark.parametrize("loss", [None, 1.0, [1.0]])
def test_a_loss_that_is_no_array_is_refused(loss):
    net = nn.Dense(1, in_units=1)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    amp.init_trainer(trainer)
    with pytest.raises(TypeError, match="a loss is an NDArray"), amp.scale_loss(loss, trainer):
        pass


def test_a_trainer_that_steps_without_a_scaled_loss_says_so_once(caplog):
    weight = gluon.Parameter("weight", shape=(1,))
    weight.initialize(mx.init.One())
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 0.25})
    amp.init_trainer(trainer, 8)
    for _ in range(2):
        with autograd.record():
            loss = weight.data() * 1.0
        loss.backward()
        trainer.step(1)
    assert weight.data().asscalar() == 0.5  # divided by nothing
    (message,) = caplog.messages
    assert "scale each loss with amp.scale_loss and the Trainer that steps" in message


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int64, int, float])
def test_numbers_may_be_numpys(number):
    net = make_net()
    trainer = make_trainer(net, loss_scale=number(128))
    backward(net, *next(batches()), trainer)
    assert amp.clip_global_norm(trainer, number(1), number(BATCH_SIZE)) > 0
    trainer.step(BATCH_SIZE)
    assert amp.loss_scale(trainer) == 128
