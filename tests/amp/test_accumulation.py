"""Gradients that accumulate (``grad_req="add"``) in a cast network: they add up in FP32."""

from __future__ import annotations

import math

from mpgluon import DynamicLossScale, TrainerStateError, amp
from mpgluon.kernels.dtypes import cast

import mxnet as mx
import numpy as np
import pytest
from amp_helpers import (
    backward,
    each_device_list,
    give_gradient,
    make_net,
    make_trainer,
    one_weight,
    scaled_weight,
    trained,
    weight_trainer,
)
from helpers import assert_same_bits, backward_from
from mxnet import autograd


def accumulating_weight(loss_scale=8, **options):
    """Return a float16 weight whose gradients add up, and its Trainer."""
    weight = one_weight("float16", grad_req="add")
    return weight, weight_trainer(weight, loss_scale, **options)


@pytest.mark.parametrize("loss_scale", [1, 64, "none"])
@each_device_list
def test_small_gradients_that_float16_would_lose_one_by_one_add_up(loss_scale, devices):
    # 2**-12 is a quarter of the distance of 1 to the next float16 number.
    weight = one_weight("float16", devices, "add")
    trainer = weight_trainer(weight, loss_scale, update_on_kvstore=False)
    give_gradient(weight, trainer, 1.0)
    for _ in range(16):
        give_gradient(weight, trainer, 2.0**-12)
    trainer.step(len(devices))
    assert [one.asscalar() for one in weight.list_data()] == [-(1 + 16 * 2.0**-12)] * len(devices)


@pytest.mark.parametrize("hybridize", [False, True])
def test_the_gradient_of_sixty_four_batches_is_right_to_one_rounding_of_its_sum(hybridize):
    random = np.random.default_rng(0)
    images = random.standard_normal((64, 8, 3)).astype(np.float32)
    targets = random.standard_normal((64, 8, 2)).astype(np.float32)

    def accumulate(how):
        net = make_net(how, grad_req="add")
        net.hybridize(hybridize)
        trainer = make_trainer(net, loss_scale=16)
        for image, target in zip(images, targets):
            backward(net, mx.nd.array(image), mx.nd.array(target), trainer)
        return [p.grad().asnumpy().astype(np.float64) for p in trained(net)]

    for fp32, auto, ours in zip(*map(accumulate, ("float32", "autocast float16", "float16"))):
        size = np.abs(fp32).max()
        # The networks compute the same, but for weights that autocast rounds at each use; a
        # float16 gradient is then rounded once, by half a unit: 2**-11 of its size.
        assert np.abs(ours - fp32).max() <= np.abs(auto - fp32).max() + size * 2.0**-11


def test_a_gradient_shows_the_sum_between_backward_passes():
    weight, trainer = accumulating_weight()
    for number in range(1, 4):
        give_gradient(weight, trainer, 0.25)
        assert weight.grad().asscalar() == 8 * 0.25 * number
        (copy,) = amp.unscaled_gradients(trainer).values()
        assert copy.asscalar() == 0.25 * number


@pytest.mark.parametrize("written", [0.0, 4.0])
def test_external_writes_to_a_gradient_are_kept(written):
    weight, trainer = accumulating_weight()
    give_gradient(weight, trainer, 2.0**-30)  # less than any float16 number: no trace may be left
    give_gradient(weight, trainer, 1.0)
    if written:
        weight.grad()[:] = written
    else:
        weight.zero_grad()
    give_gradient(weight, trainer, 0.25)
    assert weight.grad().asscalar() == written + 2
    give_gradient(weight, trainer, 0.25)
    trainer.step(1)
    assert weight.data().asscalar() == -(written + 4) / 8


def test_each_step_starts_from_empty_gradients():
    weight, trainer = accumulating_weight()
    for _ in range(3):
        for _ in range(4):
            give_gradient(weight, trainer, 2.0**-12)
        trainer.step(1)
        weight.zero_grad()
    assert weight.data().asscalar() == -12 * 2.0**-12


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_empties_the_sum_too(value):
    weight, trainer = accumulating_weight(DynamicLossScale(8, growth_interval=100))
    give_gradient(weight, trainer, 1.0)
    give_gradient(weight, trainer, value)
    trainer.step(1)
    assert amp.step_was_skipped(trainer)
    give_gradient(weight, trainer, 1.0)
    trainer.step(1)
    assert weight.data().asscalar() == -1


def test_overwritten_gradients_and_fp32_gradients_are_those_of_plain_gluon():
    def run(dtype, grad_req):
        weight, trainer = scaled_weight(dtype=dtype, grad_req=grad_req)
        for gradient in (1.0, 2.0**-12):
            give_gradient(weight, trainer, gradient)
        trainer.step(1)
        return weight.data().asnumpy()

    assert_same_bits([run("float16", "write")], [np.array([-(2.0**-12)], np.float16)])
    assert_same_bits([run("float32", "write")], [np.array([-(2.0**-12)], np.float32)])
    assert_same_bits([run("float32", "add")], [np.array([-1 - 2.0**-12], np.float32)])


def test_an_exception_in_the_block_keeps_the_sum():
    def fail(goes_backward):
        with autograd.record():
            loss = cast(weight.data(), "float32") * 0.5
            with amp.scale_loss(loss, trainer) as scaled:
                if goes_backward:
                    scaled.backward()
                raise ZeroDivisionError

    weight, trainer = accumulating_weight()
    give_gradient(weight, trainer, 1.0)
    for goes_backward, total in ((False, 8), (True, 12)):
        with pytest.raises(ZeroDivisionError):
            fail(goes_backward)
        assert weight.grad().asscalar() == total


@pytest.mark.parametrize("loss_scale", [8, "none"])
def test_what_reads_gradients_inside_the_block_has_the_sums(loss_scale):
    def accumulate_and(read):
        with autograd.record():
            loss = (cast(weight.data(), "float32") + 1) * 2.0**-12
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
            return read()

    total = 1 + 2.0**-12
    weight, trainer = accumulating_weight(loss_scale)
    give_gradient(weight, trainer, 1.0)
    (copy,) = accumulate_and(lambda: amp.unscaled_gradients(trainer)).values()
    assert copy.asscalar() == 1.0  # rounded once, as the gradient itself
    norm = accumulate_and(lambda: amp.clip_global_norm(trainer, 10.0, 1))
    assert norm == pytest.approx(total + 2.0**-12, abs=2.0**-11)
    trainer.step(1)
    weight.zero_grad()
    before = weight.data().asscalar()
    give_gradient(weight, trainer, 1.0)
    accumulate_and(lambda: trainer.step(1))
    assert weight.data().asscalar() == before - 1
    weight.zero_grad()
    give_gradient(weight, trainer, 0.25)
    trainer.step(1)
    assert weight.data().asscalar() == before - 1.25


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_loss_that_was_not_scaled_before_one_that_is_is_refused(dtype):
    weight, trainer = scaled_weight(dtype=dtype, grad_req="add")
    backward_from(lambda: cast(weight.data(), "float32") * 3)
    with pytest.raises(TrainerStateError, match=r"not scaled, before one that is; .*zero_grad"):
        give_gradient(weight, trainer, 1.0)
    weight.zero_grad()
    for _ in range(2):
        give_gradient(weight, trainer, 1.0)
        trainer.step(1)  # leaves its gradient there, as Gluon does
    assert weight.data().asscalar() == -3
