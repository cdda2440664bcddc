"""A device without a share of the last batch: its old gradient is not added again."""

from __future__ import annotations

import math

from mpgluon import DynamicLossScale, amp
from mpgluon.kernels.dtypes import cast

import mxnet as mx
import numpy as np
import pytest
from amp_helpers import DoublingTrainer, one_weight, scaled_weight
from helpers import backward_from, with_loss_scale
from mxnet import autograd, gluon

THREE = [mx.cpu(place) for place in range(3)]
# For each step and device, the gradient; None: the device is idle.
STEPS = [[1.0, 3.0, 5.0], [2.0, None, 1.0], [None, None, 4.0], [None, 1.0, 1.0], [1.0, 1.0, 1.0]]


def backward(weights, trainers, gradients):
    with autograd.record():
        losses = [
            sum((cast(weight.data(device), "float32") + 1) * gradient for weight in weights)
            for device, gradient in zip(THREE, gradients)
            if gradient is not None
        ]
        with amp.scale_loss(losses, trainers) as scaled:
            autograd.backward(scaled)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("scale", ["none", 1024, "dynamic"])
@pytest.mark.parametrize("max_norm", [None, 2.0])
@pytest.mark.parametrize("names", ["a", "ab"])
def test_all_devices_make_the_step_of_those_that_have_a_batch(
    names, max_norm, scale, grad_req, dtype
):
    scale = DynamicLossScale(16, growth_interval=1) if scale == "dynamic" else scale
    weights = [one_weight(dtype, THREE, grad_req, name=name) for name in names]
    sgd = {"learning_rate": 0.125, "momentum": 0.5, "multi_precision": True}
    trainers = [gluon.Trainer([weight], "sgd", sgd, update_on_kvstore=False) for weight in weights]
    for trainer in trainers:
        amp.init_trainer(trainer, scale)
    expected, momentum = 0.0, 0.0
    for gradients in STEPS:
        for weight in weights:
            for device, gradient in zip(THREE, gradients):
                if gradient is None:
                    weight.grad(device)[:] = math.inf
        for _ in range(2 if grad_req == "add" else 1):
            backward(weights, trainers, gradients)
        total = sum(filter(None, gradients)) * (2 if grad_req == "add" else 1)
        for trainer in trainers:
            if max_norm is not None:
                assert amp.clip_global_norm(trainer, max_norm, 1) == total
            trainer.step(1, ignore_stale_grad=True)
            assert not amp.step_was_skipped(trainer)
        for weight in weights:
            weight.zero_grad()
        momentum = 0.5 * momentum + min(total, max_norm or math.inf)
        expected -= 0.125 * momentum
        for weight in weights:
            for device in THREE:  # all sums above are exact in FP32
                assert weight.data(device).asscalar() == np.dtype(dtype).type(expected)


def test_the_norm_counts_gradients_that_only_one_device_has():
    weights = [one_weight(ctx=THREE, name=name) for name in "ab"]
    trainer = with_loss_scale(gluon.Trainer(weights, "sgd", {"learning_rate": 1.0}), 8)
    backward_from(lambda: [weights[0].data(THREE[0]) * 3, weights[1].data(THREE[1]) * 4], trainer)
    assert amp.clip_global_norm(trainer, 1.0, 1) == 5
    trainer.step(1, ignore_stale_grad=True)
    for device in THREE:
        assert [weight.data(device).asscalar() for weight in weights] == pytest.approx([-0.6, -0.8])


def test_gluon_refuses_a_stale_gradient_that_it_was_not_told_to_ignore():
    weight, trainer = scaled_weight(ctx=THREE)
    backward([weight], trainer, STEPS[0])
    trainer.step(1)
    backward([weight], trainer, STEPS[1])
    with pytest.raises(UserWarning, match=r"on context cpu\(1\)"):
        trainer.step(1)
    assert [weight.data(device).asscalar() for device in THREE] == [-9, -9, -9]


def test_unscaled_gradients_are_those_of_the_devices_that_have_a_batch():
    weight, trainer = scaled_weight(1024, ctx=THREE)
    for gradients in STEPS[:2]:
        backward([weight], trainer, gradients)
        assert amp.unscaled_gradients(trainer)["weight"].asscalar() == sum(filter(None, gradients))
        trainer.step(1, ignore_stale_grad=True)


def test_a_gradient_that_one_process_has_not_written_adds_nothing_to_the_others():
    used, stale = one_weight(), one_weight(name="stale")
    trainer = DoublingTrainer([used, stale], learning_rate=1.0)
    amp.init_trainer(trainer, 8)
    stale.grad()[:] = 1000.0  # the sum of an earlier step
    with autograd.record(), amp.scale_loss(used.data() * 3, trainer) as scaled:
        scaled.backward()
    trainer.step(1, ignore_stale_grad=True)
    assert (used.data().asscalar(), stale.grad().asscalar()) == (-3, 0)
