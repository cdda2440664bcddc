"""Gradients in true units: clipping by their common norm, and unscaling by hand."""

from __future__ import annotations

import math

from mpgluon import FLOAT32, DynamicLossScale, amp, kernels
from mpgluon.errors import PrecisionError, TrainerStateError

import mxnet as mx
import numpy as np
import pytest
from amp_helpers import (
    BAD_BATCH,
    BATCH_SIZE,
    TWO,
    DoublingTrainer,
    backward,
    backward_on,
    batches,
    each_device_list,
    each_dtype,
    each_optimizer,
    give_gradient,
    make_net,
    make_trainer,
    one_weight,
    scaled_net,
    scaled_weight,
    spoil,
    trained,
    weight_trainer,
    weights,
)
from helpers import assert_same_bits, autocast_net, backward_from, initialized, with_loss_scale
from mxnet import autograd, gluon
from mxnet.gluon import nn

MAX_NORM = 0.25  # less than the norm of every batch


def test_the_norm_of_float16_gradients_whose_true_values_underflow_is_exact():
    # 3 and 4 times 2**-26 are not float16 numbers, and their squares are far below any.
    weight = initialized(gluon.Parameter("weight", shape=(2,), dtype="float16"), mx.init.Zero())
    trainer = weight_trainer(weight, 2.0**16)
    give_gradient(weight, trainer, mx.nd.array([3 * 2.0**-26, 4 * 2.0**-26]))
    assert amp.clip_global_norm(trainer, max_norm=2.0**-26, batch_size=1) == 5 * 2.0**-26
    trainer.step(1)
    masters = trainer._updaters[0].masters[0].asnumpy()
    # Two float32 roundings: of the factor, and of the product.
    np.testing.assert_allclose(masters * 2.0**26, [-0.6, -0.8], rtol=2 * 2.0**-24)


@pytest.mark.parametrize("kvstore", ["device", "local", None])
@each_dtype
def test_on_several_devices_the_norm_is_that_of_the_sum_of_their_gradients(kvstore, dtype):
    weight, trainer = scaled_weight(dtype=dtype, ctx=TWO, kvstore=kvstore)
    give_gradient(weight, trainer, 3.0)
    norm = amp.clip_global_norm(trainer, 1.5, batch_size=2)
    summed = 3 if kvstore is None else 6  # without a kvstore each device is left alone
    assert norm == summed / 2
    trainer.step(2)
    assert [one.asscalar() for one in weight.list_data()] == [-1.5, -1.5]


@pytest.mark.parametrize("order", ["clip", "reduce, clip", "clip, reduce"])
def test_gradients_are_summed_over_devices_once_however_the_step_is_made(order):
    weight, trainer = scaled_weight(ctx=TWO)
    for _ in range(2):
        give_gradient(weight, trainer, 0.5)
        for call in order.split(", "):
            if call == "clip":
                assert amp.clip_global_norm(trainer, 100.0, 1) == 1
            else:
                trainer.allreduce_grads()
        (trainer.step if order == "clip" else trainer.update)(1)
    assert [one.asscalar() for one in weight.list_data()] == [-2, -2]


def clipped_run(dtype, loss_scale, optimizer, *, inject=None, leave_out=None):
    net, trainer = scaled_net(dtype, optimizer=optimizer, loss_scale=loss_scale)
    for number, batch in enumerate(batches()):
        if number == leave_out:
            continue
        backward(net, *batch, trainer)
        if inject is not None and number == BAD_BATCH:
            inject(net)
        assert amp.clip_global_norm(trainer, MAX_NORM, BATCH_SIZE) > MAX_NORM
        trainer.step(BATCH_SIZE)
    return weights(net), trainer


@each_optimizer
@each_dtype
def test_an_overflow_in_a_clipped_run_leaves_the_weights_of_a_run_without_that_batch(
    dtype, optimizer
):
    scale = DynamicLossScale(128, growth_interval=1)
    clipped, trainer = clipped_run(dtype, scale, optimizer, inject=spoil(0, "weight", math.inf))
    control, _ = clipped_run(dtype, 1, optimizer, leave_out=BAD_BATCH)
    assert_same_bits(clipped, control)
    assert (amp.loss_scale(trainer), amp.skipped_steps(trainer)) == (512, 1)


def test_clipped_gradients_are_gluons_up_to_rounding():
    def run(clip):
        net, trainer = scaled_net(loss_scale=64)
        for batch in batches():
            backward(net, *batch, trainer)
            clip(net, trainer)
            trainer.step(BATCH_SIZE)
        return weights(net)

    def ours(_, trainer):
        amp.clip_global_norm(trainer, MAX_NORM, BATCH_SIZE)

    def gluons(net, trainer):  # whose gradients are S times the whole batch's
        limit = MAX_NORM * BATCH_SIZE * amp.loss_scale(trainer)
        gluon.utils.clip_global_norm([p.grad() for p in trained(net)], limit)

    plain = run(lambda *_: None)
    for one, other, without in zip(run(ours), run(gluons), plain):
        # Gluon adds 1e-8 to the norm and rounds each gradient once more: 4 steps of some 2**-23.
        np.testing.assert_allclose(one, other, rtol=0, atol=4 * 2.0**-20)
        assert not np.allclose(one, without, rtol=0, atol=1e-3)


def test_gluons_clipping_of_float16_gradients_fails_on_a_cpu_with_the_message_of_the_pages():
    gradients = [mx.nd.ones((3,), dtype="float16")]
    with pytest.raises(mx.MXNetError, match="dot only supports float32/float64 for CPU"):
        gluon.utils.clip_global_norm(gradients, MAX_NORM)


@each_dtype
@pytest.mark.parametrize("loss_scale", [1, 2.0**7])
def test_clipping_returns_the_norm_of_the_unscaled_gradients_and_writes_none(dtype, loss_scale):
    net, trainer = scaled_net(dtype, loss_scale=loss_scale)
    backward(net, *next(batches()), trainer)
    before = [p.grad().asnumpy() for p in trained(net)]
    norm = amp.clip_global_norm(trainer, MAX_NORM, BATCH_SIZE)
    # FP32 sums of at most 12 squares each: 13 roundings of 2**-24, halved by the root.
    squares = (float(x) ** 2 for one in before for x in one.ravel())
    expected = math.sqrt(math.fsum(squares)) / loss_scale / BATCH_SIZE
    assert norm == pytest.approx(expected, rel=13 * 2.0**-24)
    assert norm > MAX_NORM
    trainer.step(BATCH_SIZE)
    assert_same_bits([p.grad().asnumpy() for p in trained(net)], before)


@each_device_list
def test_accumulated_gradients_are_clipped_together(devices):
    weight = one_weight("float16", devices, grad_req="add")
    trainer = weight_trainer(weight, 16, update_on_kvstore=False)
    for gradient in (1.0, 0.5, 0.25):
        give_gradient(weight, trainer, gradient / len(devices))
    assert amp.clip_global_norm(trainer, 0.25, batch_size=7) == 0.25
    trainer.step(7)
    assert {one.asscalar() for one in weight.list_data()} == {-0.25}


@pytest.mark.parametrize("clips", [False, True])
@each_dtype
@each_device_list
def test_a_step_waits_for_the_devices_once_with_clipping_too(clips, dtype, devices, monkeypatch):
    waits = []

    def counted(name):
        original = getattr(mx.nd.NDArray, name)
        return lambda array: waits.append(name) or original(array)

    net, trainer = scaled_net(dtype, ctx=devices, loss_scale=64)
    for number, batch in enumerate(batches()):
        backward_on(net, devices, batch, trainer)
        waits.clear()
        with monkeypatch.context() as patch:
            for name in ("asnumpy", "wait_to_read"):
                patch.setattr(mx.nd.NDArray, name, counted(name))
            if clips:
                amp.clip_global_norm(trainer, MAX_NORM, BATCH_SIZE)
            trainer.step(BATCH_SIZE)
            assert amp.gradient_norm(trainer) > MAX_NORM
        assert waits == ["asnumpy"] or number == 0  # MXNet's kvstore itself waits in the first


def test_a_trainer_with_a_reduction_of_its_own_is_clipped_by_the_reduced_norm():
    weight = one_weight()
    trainer = DoublingTrainer([weight], learning_rate=1.0)
    amp.init_trainer(trainer, 8)
    give_gradient(weight, trainer, 3.0)
    assert amp.clip_global_norm(trainer, 1.5, batch_size=1) == 3
    trainer.step(1)
    assert weight.data().asscalar() == -1.5


def test_a_stale_gradient_does_not_count_where_stale_gradients_are_ignored():
    fresh, stale = one_weight(), one_weight(name="stale")
    stale.grad()[:] = 1000.0
    trainer = with_loss_scale(gluon.Trainer([fresh, stale], "sgd", {"learning_rate": 1.0}), 8)
    give_gradient(fresh, trainer, 3.0)
    assert amp.clip_global_norm(trainer, 1.5, 1) == 3
    trainer.step(1, ignore_stale_grad=True)
    assert fresh.data().asscalar() == -1.5


@each_dtype
@pytest.mark.parametrize("kvstore", ["device", None])
@each_device_list
def test_gradient_norm_returns_what_clipping_would_have_returned(devices, kvstore, dtype):
    def run(clips):
        net = make_net(dtype, devices)
        trainer = make_trainer(net, "sgd", DynamicLossScale(64, growth_interval=2), kvstore=kvstore)
        norms = []
        for batch in batches():
            backward_on(net, devices, batch, trainer)
            if clips:
                returned = amp.clip_global_norm(trainer, 1000.0, BATCH_SIZE)
            trainer.step(BATCH_SIZE)
            norms.append(amp.gradient_norm(trainer))
            assert not clips or norms[-1] == returned
        return norms, sum(p.grad(devices[0]).size for p in trained(net))

    norms, elements = run(clips=False)
    # Each of two sums of so many squares is off by as many float32 roundings, and a root by half.
    np.testing.assert_allclose(norms, run(clips=True)[0], rtol=elements * FLOAT32.unit_roundoff)
    assert len(set(norms)) == len(norms)


@pytest.mark.usefixtures("native_operators", "native_bfloat16")
def test_in_native_bfloat16_a_native_operator_sums_squares_once_for_clipping_and_step(monkeypatch):
    added, invoke = [], kernels.invoke

    def counting(name, *operands, **options):
        added.append(name)
        return invoke(name, *operands, **options)

    monkeypatch.setattr(kernels, "invoke", counting)
    net = autocast_net(initialized(nn.Dense(3, in_units=4)), "bfloat16")
    trainer = with_loss_scale(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0}), 4)
    norms = []
    for clips in (False, True):
        with autograd.record(), amp.scale_loss(net(mx.nd.ones((2, 4))), trainer) as scaled:
            scaled.backward()
        if clips:
            norms.append(amp.clip_global_norm(trainer, 1000.0, 2))
        trainer.step(2)
        norms.append(amp.gradient_norm(trainer))
    # Each of the 12 weights and 3 biases has the gradient 2, of a batch of 2.
    assert norms == [math.sqrt(15)] * 3
    assert added == ["_mpgluon_sums_of_squares"] * 2


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("kvstore", ["device", None])
def test_the_norm_of_a_skipped_step_is_infinite_or_nan(value, device, kvstore, clips):
    weight = one_weight(ctx=TWO)
    trainer = weight_trainer(weight, DynamicLossScale(8, growth_interval=1), kvstore=kvstore)
    for bad in (True, False):
        give_gradient(weight, trainer, 1.0)
        if bad:
            weight.list_grad()[device][:] = value
        norm = abs(value) if bad else 1 if kvstore is None else 2
        if clips:
            np.testing.assert_equal(amp.clip_global_norm(trainer, 0.5, 1), norm)
        trainer.step(1)
        assert amp.step_was_skipped(trainer) is bad
        np.testing.assert_equal(amp.gradient_norm(trainer), norm)
        assert amp.loss_scale(trainer) == (4 if bad else 8)
    assert weight.data(TWO[1]).asscalar() == (-0.5 if clips else -norm)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("loss_scale", "gradient"), [(2.0**-40, 1.25 * 2.0**-34), (2.0**40, 2.0**80), (8, 0.0)]
)
def test_the_norm_is_right_where_squares_leave_float32_and_where_all_gradients_are_zero(
    loss_scale, gradient, clips
):
    weight, trainer = scaled_weight(loss_scale, 0.0)
    give_gradient(weight, trainer, gradient)
    if clips:
        assert amp.clip_global_norm(trainer, 1.0, 1) == gradient
    trainer.step(1)
    assert amp.gradient_norm(trainer) == gradient
    assert not amp.step_was_skipped(trainer)


def test_without_a_loss_scale_there_is_a_norm_only_after_clipping():
    weight, trainer = scaled_weight("none")
    for norm in (3, None, math.inf):
        give_gradient(weight, trainer, norm or 3.0)
        if norm is not None:
            amp.clip_global_norm(trainer, 0.5, 1)
        trainer.step(1)
        assert amp.gradient_norm(trainer) == norm
    assert amp.skipped_steps(trainer) == 0


@pytest.mark.parametrize("clips", [False, True])
def test_the_norm_after_unscaling_is_divided_by_the_batch_size_only(clips):
    weight, trainer = scaled_weight(2.0**10)
    give_gradient(weight, trainer, 3.0)
    amp.unscale(trainer)
    if clips:
        amp.clip_global_norm(trainer, 100.0, 2)
    trainer.step(2)
    assert amp.gradient_norm(trainer) == 1.5


def test_clipping_without_gradients_or_twice_before_a_step_is_refused_and_the_first_one_counts():
    weight, trainer = scaled_weight()
    for steps in (1, 2):
        with pytest.raises(TrainerStateError, match=r"between backward and trainer\.step"):
            amp.clip_global_norm(trainer, 1.0, 1)
        give_gradient(weight, trainer, 3.0)
        amp.clip_global_norm(trainer, 1.5, 1)
        with pytest.raises(TrainerStateError, match="called twice before a step"):
            amp.clip_global_norm(trainer, 0.1, 1)
        trainer.step(1)
        assert weight.data().asscalar() == -1.5 * steps


def test_clipping_for_another_batch_size_than_the_steps_is_refused_and_changes_nothing():
    weight, trainer = scaled_weight(ctx=TWO)
    give_gradient(weight, trainer, 3.0)
    amp.clip_global_norm(trainer, 1.5, batch_size=2)
    with pytest.raises(TrainerStateError, match=r"another batch size .* 0\.5 there, 0\.25 here"):
        trainer.step(4)
    assert weight.data(TWO[0]).asscalar() == 0
    trainer.step(2)
    assert [one.asscalar() for one in weight.list_data()] == [-1.5, -1.5]


def test_clipping_inside_the_kvstore_is_refused():
    weight, trainer = scaled_weight("none", ctx=TWO, update_on_kvstore=True)
    give_gradient(weight, trainer, 3.0)
    with pytest.raises(TrainerStateError, match="create it with update_on_kvstore=False"):
        amp.clip_global_norm(trainer, 1.5, 1)


@pytest.mark.parametrize("name", ["max_norm", "batch_size"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *((value, ValueError) for value in (0, -1, math.inf, math.nan)),
        *((value, TypeError) for value in ("1", None, True)),
    ],
)
def test_limits_and_batch_sizes_that_are_not_positive_numbers_are_refused(name, value, kind):
    weight, trainer = scaled_weight()
    give_gradient(weight, trainer, 3.0)
    with pytest.raises(kind, match=f"{name} must be"):
        amp.clip_global_norm(trainer, **{"max_norm": 1.0, "batch_size": 1, name: value})


@pytest.mark.parametrize(
    "call",
    [lambda t: amp.clip_global_norm(t, 1.0, 1), amp.unscale, amp.unscaled_gradients],
    ids=["clip_global_norm", "unscale", "unscaled_gradients"],
)
def test_gradients_need_a_parameter_that_is_trained(call):
    weight, trainer = scaled_weight()
    give_gradient(weight, trainer, 1.0)
    weight.grad_req = "null"
    with pytest.raises(TrainerStateError, match="all are frozen"):
        call(trainer)


@each_device_list
@pytest.mark.parametrize("clips", [None, "before", "after"])
def test_unscaled_gradients_are_true_and_the_step_divides_by_nothing_more(devices, clips):
    weight, trainer = scaled_weight(DynamicLossScale(2.0**10, growth_interval=1), ctx=devices)
    give_gradient(weight, trainer, 3.0 / len(devices))
    if clips == "before":
        assert amp.clip_global_norm(trainer, 1.5, 1) == 3
    amp.unscale(trainer)
    total = 3.0 if clips == "before" else 3.0 / len(devices)
    assert [one.asscalar() for one in weight.list_grad()] == [total] * len(devices)
    if clips == "after":
        assert amp.clip_global_norm(trainer, 1.5, 1) == 3
    trainer.step(1)
    assert weight.data(devices[-1]).asscalar() == (-1.5 if clips else -3)
    assert amp.loss_scale(trainer) == 2.0**11  # a step like any other
    give_gradient(weight, trainer, 3.0 / len(devices))
    trainer.step(1)  # and the next one divides again
    assert weight.data(devices[-1]).asscalar() == (-4.5 if clips else -6)


def test_sparse_gradients_are_unscaled_too():
    net = initialized(nn.Embedding(6, 2, sparse_grad=True))
    trainer = with_loss_scale(gluon.Trainer(net.collect_params(), "sgd"), 64)
    backward_from(lambda: net(mx.nd.array([1, 4])) * mx.nd.array([[1, 2]]), trainer)
    amp.unscale(trainer)
    expected = np.zeros((6, 2))
    expected[[1, 4]] = [1, 2]
    np.testing.assert_array_equal(net.weight.grad().asnumpy(), expected)
    (gradient,) = amp.unscaled_gradients(trainer).values()
    np.testing.assert_array_equal(gradient.asnumpy(), expected)


def test_float16_gradients_are_not_unscaled_in_place_but_refused_with_advice():
    net, trainer = scaled_net("float16", loss_scale=64)
    backward(net, *next(batches()), trainer)
    before = [p.grad().asnumpy() for p in trained(net)]
    with pytest.raises(PrecisionError, match=r"3 of 5 gradients are float16, which divided by 64"):
        amp.unscale(trainer)
    assert_same_bits([p.grad().asnumpy() for p in trained(net)], before)
    trainer.step(BATCH_SIZE)  # goes on as if nothing had been asked


def test_unscaling_twice_or_without_a_scaled_loss_is_refused():
    weight, trainer = scaled_weight()
    with pytest.raises(TrainerStateError, match="no loss was scaled since the last step"):
        amp.unscale(trainer)
    give_gradient(weight, trainer, 3.0)
    amp.unscale(trainer)
    with pytest.raises(TrainerStateError, match="unscaled already"):
        amp.unscale(trainer)
    assert weight.grad().asscalar() == 3


@pytest.mark.parametrize("call", ["clip_global_norm", "unscale"])
def test_a_loss_after_clipping_or_unscaling_is_refused_where_gradients_accumulate(call):
    weight, trainer = scaled_weight(grad_req="add")
    give_gradient(weight, trainer, 3.0)
    amp.unscale(trainer) if call == "unscale" else amp.clip_global_norm(trainer, 1.5, 1)
    before = weight.grad().asscalar()
    with pytest.raises(TrainerStateError, match=f"scaled after {call} and before the"):
        give_gradient(weight, trainer, 3.0)
    assert weight.grad().asscalar() == before


@pytest.mark.parametrize("when", ["before the step", "after the step", "after clipping"])
@each_device_list
def test_copies_of_gradients_are_fp32_and_in_true_units_by_name(devices, when):
    gradient = 2.0**-26  # no float16 number
    weight = one_weight("float16", devices)
    trainer = weight_trainer(weight, DynamicLossScale(2.0**16, growth_interval=1))
    give_gradient(weight, trainer, gradient / len(devices))
    if when == "after clipping":
        amp.clip_global_norm(trainer, 2.0**-30, 1)
    elif when == "after the step":
        trainer.step(1)
        assert amp.loss_scale(trainer) == 2.0**17  # of the next step
    copies = amp.unscaled_gradients(trainer)
    assert list(copies) == ["weight"]
    assert (copies["weight"].dtype, copies["weight"].asscalar()) == (np.float32, gradient)
    copies["weight"][:] = 7
    summed = when != "before the step"
    assert weight.grad().asscalar() == 2.0**-10 / (1 if summed else len(devices))


def test_a_step_after_a_rollback_has_no_factor_of_the_step_that_was_undone(tmp_path):
    weight, states = one_weight(), str(tmp_path / "states")
    trainer = weight_trainer(weight, "none")

    def step(max_norm=None):
        backward_from(lambda: weight.data() * 2)
        if max_norm is not None:
            amp.clip_global_norm(trainer, max_norm, 1)
        trainer.step(1)

    step()
    trainer.save_states(states)
    step(max_norm=0.5)
    trainer.load_states(states)
    step()
    assert weight.data().asscalar() == -4.5
