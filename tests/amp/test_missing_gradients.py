"""A first step without any gradient: a warning of mpgluon comes before Gluon's refusal."""

from __future__ import annotations

import logging

from mpgluon import amp

import pytest
from amp_helpers import BATCH_SIZE, LOSS, backward, batches, make_net, make_trainer, scaled_net
from mxnet import autograd

STALE = "has not been updated by backward"
NONE = "no gradient of this Trainer's weights was computed inside autograd.record"
UNSCALED = "no loss was scaled"
each_scale = pytest.mark.parametrize("loss_scale", ["none", 1, 128, "dynamic"])


@pytest.fixture
def messages(caplog):
    """Return a function that returns the warnings since its last call."""
    caplog.set_level(logging.WARNING, "mpgluon")

    def latest():
        texts = list(caplog.messages)
        caplog.clear()
        return texts

    return latest


def without_backward(net, trainer, images, targets):
    with autograd.record():
        loss = LOSS(net(images), targets)
        with amp.scale_loss(loss, trainer):
            pass


def outside_of_record(net, trainer, images, targets):
    with amp.scale_loss(LOSS(net(images), targets), trainer):
        pass


def nothing(net, trainer, images, targets):
    pass


@each_scale
@pytest.mark.parametrize("mistake", [without_backward, outside_of_record, nothing])
def test_a_first_step_without_gradients_warns_once_before_gluon_refuses(
    mistake, loss_scale, messages
):
    net, trainer = scaled_net(loss_scale=loss_scale)
    batch = next(batches())
    mistake(net, trainer, *batch)
    with pytest.raises(UserWarning, match=STALE):
        trainer.step(BATCH_SIZE)
    (message,) = messages()
    assert message.startswith(NONE)
    assert "did backward run" in message
    with pytest.raises(UserWarning, match=STALE):
        trainer.step(BATCH_SIZE)
    backward(net, *batch, trainer)
    trainer.step(BATCH_SIZE)
    assert messages() == []


@each_scale
def test_a_later_step_without_gradients_does_not_warn(loss_scale, messages):
    net, trainer = scaled_net(loss_scale=loss_scale)
    backward(net, *next(batches()), trainer)
    trainer.step(BATCH_SIZE)
    with pytest.raises(UserWarning, match=STALE):
        trainer.step(BATCH_SIZE)
    assert not any(message.startswith(NONE) for message in messages())


def test_a_step_that_ignores_stale_gradients_goes_on(messages):
    make_trainer(make_net(), loss_scale=128).step(BATCH_SIZE, ignore_stale_grad=True)
    assert [message.startswith(NONE) for message in messages()] == [True]


def test_a_gradient_of_a_loss_that_was_not_scaled_is_another_mistake(messages):
    net, trainer = scaled_net(loss_scale=128)
    backward(net, *next(batches()))
    trainer.step(BATCH_SIZE)
    assert [message.startswith(UNSCALED) for message in messages()] == [True]
