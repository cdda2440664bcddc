"""Loss scaling on real Trainers: control runs, skipped steps, and calls at the wrong moment."""

from __future__ import annotations

import math

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.contrib.amp.loss_scaler import LossScaler
from mxnet.gluon import nn

from mpgluon import DynamicLossScale, NoLossScale, StaticLossScale, amp, cast_block
from mpgluon.errors import PrecisionError, TrainerStateError
from mpgluon.formats import FLOAT16

BATCHES, BATCH_SIZE = 4, 8
BAD_BATCH = 2
OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": 0.1, "wd": 2.0**-7}),
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    "adam": ("adam", {"learning_rate": 0.01}),
}
LOSS = gluon.loss.L2Loss()
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def make_net(dtype="float32", ctx=None):
    """Return dense, normalization, dense: in float16 it has gradients of both formats."""
    np.random.seed(0)
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(
        nn.Dense(4, in_units=3, use_bias=False),  # a bias before a mean has no gradient
        nn.BatchNorm(in_channels=4),
        nn.Dense(2, in_units=4),
    )
    net.initialize(mx.init.Normal(0.5), ctx=ctx)
    if dtype == "float16":
        cast_block(net, "float16")
    return net


def make_trainer(net, optimizer="sgd", loss_scale=None, **options):
    name, arguments = OPTIMIZERS[optimizer]
    arguments = {**arguments, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), name, arguments, **options)
    if loss_scale is not None:
        amp.init_trainer(trainer, loss_scale)
    return trainer


def batches():
    rng = np.random.default_rng(0)
    for _ in range(BATCHES):
        images = rng.standard_normal((BATCH_SIZE, 3)).astype(np.float32)
        targets = rng.standard_normal((BATCH_SIZE, 2)).astype(np.float32)
        yield mx.nd.array(images), mx.nd.array(targets)


def backward(net, images, targets, trainer=None):
    """Run forward and backward, scaled if there is a Trainer to ask for a scale."""
    with autograd.record():
        loss = LOSS(net(images), targets)
        if trainer is not None:
            with amp.scale_loss(loss, trainer) as loss:
                loss.backward()
    if trainer is None:
        loss.backward()


def trained(net):
    """Return the trained parameters by name, without the prefix that differs between nets."""
    return [p for p in net.collect_params().values() if p.grad_req != "null"]


def weights(net):
    return [one.asnumpy() for p in trained(net) for one in p.list_data()]


def assert_same_bits(left, right):
    assert len(left) == len(right) > 0
    for one, other in zip(left, right):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def assert_no_subnormal_gradient(net):
    """Below 2**-14 float16 gradients lose bits that scaled ones keep: no control is possible."""
    for parameter in trained(net):
        size = np.abs(parameter.grad().asnumpy().astype(np.float64))
        assert ((size == 0) | (size >= FLOAT16.smallest_normal)).all()


def plain_run(net, optimizer="sgd", leave_out=None):
    """Train without any loss scale, leaving out one batch: the control."""
    trainer = make_trainer(net, optimizer)
    for number, batch in enumerate(batches()):
        if number != leave_out:
            backward(net, *batch)
            if net[0].weight.dtype == np.float16:
                assert_no_subnormal_gradient(net)
            trainer.step(BATCH_SIZE)
    return weights(net)


def scaled_run(net, loss_scale, optimizer="sgd", inject=None):
    """Train with a loss scale; ``inject(net)`` spoils gradients of batch 2.

    Returns the weights, the scale after each step, and whether each step was skipped.
    """
    trainer = make_trainer(net, optimizer, loss_scale)
    scales, skipped = [], []
    for number, batch in enumerate(batches()):
        backward(net, *batch, trainer)
        if inject is not None and number == BAD_BATCH:
            inject(net)
        trainer.step(BATCH_SIZE)
        scales.append(amp.loss_scale(trainer))
        skipped.append(amp.step_was_skipped(trainer))
    assert amp.skipped_steps(trainer) == sum(skipped)
    return weights(net), scales, skipped


def spoil(layer, name, value):
    def inject(net):
        gradient = getattr(net[layer], name).grad()
        gradient[(0,) * gradient.ndim] = value

    return inject


GRADIENTS = {  # name: (format of the network, which gradient, its dtype)
    "fp32": ("float32", (2, "weight"), np.float32),
    "fp32-first": ("float32", (0, "weight"), np.float32),
    "cast-float16": ("float16", (0, "weight"), np.float16),
    "cast-float16-bias": ("float16", (2, "bias"), np.float16),
    "cast-float32": ("float16", (1, "gamma"), np.float32),
}


# --- control runs ----------------------------------------------------------------------------


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
@pytest.mark.parametrize("dtype", ["float32", "float16"])
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
    net = make_net()
    trainer = make_trainer(net)  # never told of the scale
    for images, targets in batches():
        with autograd.record():
            loss = LOSS(net(images), targets) * 2
        loss.backward()
        trainer.step(BATCH_SIZE)
    assert not any(np.array_equal(one, other) for one, other in zip(everything, weights(net)))


def test_without_a_loss_scale_an_infinite_gradient_reaches_the_weights_as_in_plain_gluon():
    inject = spoil(2, "weight", math.inf)
    unscaled, scales, skipped = scaled_run(make_net(), NoLossScale(), inject=inject)
    net = make_net()
    trainer = make_trainer(net)
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


@pytest.mark.parametrize("kvstore", ["device", "local", None])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("bad_device", [0, 1])
def test_an_overflow_on_any_device_skips_the_step_on_all(kvstore, dtype, bad_device):
    devices = [mx.cpu(0), mx.cpu(1)]

    def run(loss_scale, leave_out=None, inject=False):
        net = make_net(dtype, devices)
        trainer = make_trainer(net, loss_scale=loss_scale, kvstore=kvstore)
        for number, batch in enumerate(batches()):
            if number == leave_out:
                continue
            shares = zip(*(gluon.utils.split_and_load(one, devices) for one in batch))
            with autograd.record():
                losses = [LOSS(net(images), targets) for images, targets in shares]
                with amp.scale_loss(losses, trainer) as scaled:
                    autograd.backward(scaled)
            if inject and number == BAD_BATCH:
                net[0].weight.list_grad()[bad_device][0, 0] = math.inf
            trainer.step(BATCH_SIZE)
            assert amp.step_was_skipped(trainer) is (inject and number == BAD_BATCH)
        return weights(net)

    with_overflow = run(DynamicLossScale(128, growth_interval=1), inject=True)
    assert_same_bits(with_overflow, run(1, leave_out=BAD_BATCH))


def test_a_skipped_step_advances_neither_the_schedule_nor_the_count_of_updates():
    net = make_net()
    schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"lr_scheduler": schedule})
    amp.init_trainer(trainer, 8)
    rates = []
    for number, batch in enumerate(batches()):
        backward(net, *batch, trainer)
        if number == BAD_BATCH:
            spoil(0, "weight", math.nan)(net)
        trainer.step(BATCH_SIZE)
        rates.append((trainer.optimizer.num_update, trainer.learning_rate))
    assert rates[BAD_BATCH] == rates[BAD_BATCH - 1]
    assert [updates for updates, _ in rates] == [1, 2, 2, 3]


def test_a_scale_that_is_too_large_halves_until_the_gradient_fits_and_no_further():
    # The float16 gradient of w * 1.5 is 1.5 S: infinite at 2**16, finite from 2**15 down.
    weight = gluon.Parameter("weight", shape=(1,), dtype="float16", init="zeros")
    weight.initialize()
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0, "multi_precision": True})
    amp.init_trainer(trainer, DynamicLossScale(2.0**18))
    scales = []
    for _ in range(5):
        with autograd.record():
            loss = weight.data().astype("float32") * 1.5
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
        trainer.step(1)
        scales.append(amp.loss_scale(trainer))
    assert scales == [2**17, 2**16, 2**15, 2**15, 2**15]
    assert amp.skipped_steps(trainer) == 3
    assert weight.data().asscalar() == -2 * 1.5


# --- the division by S -----------------------------------------------------------------------


def test_a_float16_gradient_is_divided_in_fp32_where_float16_could_not_hold_the_result():
    weight = gluon.Parameter("weight", shape=(1,), dtype="float16", init="zeros")
    weight.initialize()
    # 2**-26 is no float16 number; times the rate 2**10 it is 2**-16, which is one.
    rate, gradient = 2.0**10, 2.0**-26
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": rate, "multi_precision": True})
    amp.init_trainer(trainer, 2.0**16)
    with autograd.record():
        loss = weight.data().astype("float32") * gradient
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    assert weight.grad().asscalar() == 2.0**-10
    trainer.step(1)
    assert weight.data().asscalar() == -(2.0**-16)
    assert weight.grad().asscalar() == 2.0**-10  # the gradient itself was left alone


@each_optimizer
def test_a_rescale_factor_of_the_users_own_is_kept(optimizer):
    def run(loss_scale):
        net = make_net()
        trainer = make_trainer(net, optimizer, loss_scale)
        trainer._scale = 0.5  # as Horovod does to average
        for batch in batches():
            backward(net, *batch, trainer if loss_scale else None)
            trainer.step(BATCH_SIZE)
            assert trainer._scale == 0.5
        return weights(net)

    assert_same_bits(run(DynamicLossScale(128, growth_interval=1)), run(None))
    if optimizer != "adam":  # which does not care for the size of gradients
        assert not np.array_equal(run(None)[0], plain_run(make_net(), optimizer)[0])


def test_a_trainer_that_reduces_gradients_in_its_own_way_is_scaled_and_skipped_alike():
    class Doubling(gluon.Trainer):  # as Horovod's: a sum over workers, averaged by _scale
        def __init__(self, params):
            super().__init__(params, "sgd", {"learning_rate": 0.1, "wd": 2.0**-7}, kvstore=None)
            self._scale /= 2

        def _allreduce_grads(self):
            for parameter in self._params:
                if parameter.grad_req != "null":
                    parameter.grad()[:] *= 2

    net = make_net()
    trainer = Doubling(net.collect_params())
    amp.init_trainer(trainer, 128)
    for number, batch in enumerate(batches()):
        backward(net, *batch, trainer)
        if number == BAD_BATCH:
            spoil(0, "weight", math.inf)(net)
        trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), plain_run(make_net(), leave_out=BAD_BATCH))


def test_the_batch_size_may_change_from_step_to_step():
    def run(loss_scale):
        net = make_net()
        trainer = make_trainer(net, loss_scale=loss_scale)
        for number, batch in enumerate(batches()):
            backward(net, *batch, trainer if loss_scale else None)
            trainer.step(BATCH_SIZE + number)
        return weights(net)

    assert_same_bits(run(1024), run(None))


def test_reducing_and_updating_in_two_calls_is_one_step():
    net = make_net()
    trainer = make_trainer(net, loss_scale=DynamicLossScale(128, growth_interval=1))
    for number, batch in enumerate(batches()):
        backward(net, *batch, trainer)
        if number == BAD_BATCH:
            spoil(0, "weight", math.inf)(net)
        trainer.allreduce_grads()
        trainer.update(BATCH_SIZE)
    assert_same_bits(weights(net), plain_run(make_net(), leave_out=BAD_BATCH))
    assert amp.loss_scale(trainer) == 512


def test_an_optimizer_that_was_loaded_from_a_file_is_the_one_that_is_rescaled(tmp_path):
    def run(loss_scale):
        net = make_net()
        trainer = make_trainer(net, "momentum", loss_scale)
        for number, batch in enumerate(batches()):
            if number == 2:
                trainer.save_states(str(tmp_path / "trainer.states"))
                trainer.load_states(str(tmp_path / "trainer.states"))
            backward(net, *batch, trainer if loss_scale else None)
            trainer.step(BATCH_SIZE)
        return weights(net)

    assert_same_bits(run(1024), run(None))


def test_a_step_without_a_scaled_loss_divides_nothing_and_does_not_advance_the_scale():
    net = make_net()
    trainer = make_trainer(net, loss_scale=DynamicLossScale(128, growth_interval=1))
    for batch in batches():
        backward(net, *batch)
        trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), plain_run(make_net()))
    assert amp.loss_scale(trainer) == 128


def test_a_step_without_a_scaled_loss_is_skipped_all_the_same_if_it_overflows():
    net = make_net()
    trainer = make_trainer(net, loss_scale=DynamicLossScale(128, growth_interval=1))
    before = weights(net)
    backward(net, *next(batches()))
    spoil(0, "weight", math.inf)(net)
    trainer.step(BATCH_SIZE)
    assert_same_bits(weights(net), before)
    assert amp.step_was_skipped(trainer)


def test_parameters_may_still_wait_for_their_shapes():
    net = nn.Dense(1)
    net.initialize()
    trainer = make_trainer(net, loss_scale=128)
    backward(net, mx.nd.ones((2, 3)), mx.nd.ones((2, 1)), trainer)
    before = net.weight.data().asnumpy()
    trainer.step(2)
    assert not np.array_equal(net.weight.data().asnumpy(), before)


@pytest.mark.parametrize("bad", [False, True])
def test_sparse_gradients_are_scaled_and_looked_at(bad):
    def run(loss_scale):
        mx.random.seed(0)
        net = nn.Embedding(6, 3, sparse_grad=True)
        net.initialize()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
        before = net.weight.data().asnumpy()
        if loss_scale:
            amp.init_trainer(trainer, loss_scale)
        with autograd.record():
            loss = net(mx.nd.array([1, 4])) * mx.nd.array([[1, 2, math.inf if bad else 3]] * 2)
            if loss_scale:
                with amp.scale_loss(loss, trainer) as loss:
                    pass
        loss.backward()
        assert net.weight.grad().stype == "row_sparse"
        trainer.step(2)
        return before, net.weight.data().asnumpy()

    before, after = run(128)
    assert_same_bits([after], [before if bad else run(None)[1]])
    assert np.array_equal(before, after) is bad


# --- what a skipped step leaves behind -------------------------------------------------------


def test_gradients_that_accumulate_are_clean_in_the_window_after_an_overflow():
    def run(loss_scale, windows, bad=None):
        net = make_net()
        for parameter in trained(net):
            parameter.grad_req = "add"
        trainer = make_trainer(net, loss_scale=loss_scale)
        every = list(batches())
        for window in windows:
            for images, targets in every[2 * window : 2 * window + 2]:
                backward(net, images, targets, trainer)
                if bad == window:
                    spoil(2, "weight", math.inf)(net)
            trainer.step(2 * BATCH_SIZE)
            if not amp.step_was_skipped(trainer):
                net.collect_params().zero_grad()  # as in plain Gluon
        return weights(net), trainer

    with_overflow, trainer = run(DynamicLossScale(128), windows=[0, 1], bad=0)
    assert amp.skipped_steps(trainer) == 1
    assert_same_bits(with_overflow, run(1, windows=[1])[0])


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
