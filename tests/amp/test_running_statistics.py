"""Running statistics after an overflow of the forward pass: those from before the skipped step."""

from __future__ import annotations

import logging
import math

from mpgluon import DynamicLossScale, amp, load_checkpoint, save_checkpoint
from mpgluon.checkpoint import read_parameters
from mpgluon.trainer.statistics import KeptStatistics

import mxnet as mx
import numpy as np
import pytest
from amp_helpers import (
    BAD_BATCH,
    BATCH_SIZE,
    BATCHES,
    LOSS,
    TWO,
    backward,
    backward_on,
    batches,
    make_net,
    make_trainer,
    scaled_net,
    spoil,
    weights,
)
from helpers import BOTH, STATIC, assert_same_bits, backward_from, in_sequence, initialized
from mxnet import autograd, gluon
from mxnet.gluon import nn

OVERFLOW = 2.0**20  # times images of about 1, in float16


def statistics_of(net, device=None):
    """Return running means and variances, of one device or of all."""
    mx.nd.waitall()  # static graphs write them untracked
    parameters = [p for name, p in net.collect_params().items() if "running" in name]
    assert parameters
    devices = parameters[0].list_ctx() if device is None else [device]
    return [parameter.data(one).asnumpy() for parameter in parameters for one in devices]


def all_finite(arrays):
    return all(np.isfinite(array).all() for array in arrays)


def train(net, trainer, *, bad=None, factor=OVERFLOW, left_out=None, steps=BATCHES):
    for number, (images, targets) in enumerate(batches()):
        if number == left_out or number >= steps:
            continue
        backward(net, images * factor if number == bad else images, targets, trainer)
        trainer.step(BATCH_SIZE)
        assert amp.step_was_skipped(trainer) == (number == bad)


@pytest.mark.sampled(4)
@BOTH
@pytest.mark.parametrize("bad", [0, BAD_BATCH])
@pytest.mark.parametrize("loss_scale", [128, "dynamic"])
@pytest.mark.parametrize(
    ("way", "factor"),
    [
        ("float16", OVERFLOW),
        ("autocast float16", OVERFLOW),
        ("autocast bfloat16", math.inf),
        ("float32", math.inf),
    ],
)
def test_an_overflow_in_the_forward_pass_leaves_the_statistics_of_a_run_without_that_batch(
    way, factor, loss_scale, bad, hybridize
):
    net, control = make_net(way), make_net(way)
    for one in (net, control):
        one.hybridize(hybridize, **STATIC)
    scale = DynamicLossScale(128) if loss_scale == "dynamic" else loss_scale
    train(net, make_trainer(net, loss_scale=scale), bad=bad, factor=factor)
    train(control, make_trainer(control, loss_scale=128), left_out=bad)
    assert all_finite(statistics_of(net))
    assert_same_bits(statistics_of(net), statistics_of(control))
    assert_same_bits(weights(net), weights(control))
    images, _ = next(batches())
    assert all_finite([net(images).asnumpy()])


def test_an_overflow_of_gradients_alone_does_not_take_the_batch_out_of_the_statistics():
    net, trainer = scaled_net("float16", loss_scale=128)
    for number, batch in enumerate(batches()):
        backward(net, *batch, trainer)
        if number == BAD_BATCH:
            before = statistics_of(net)
            spoil(0, "weight", math.inf)(net)
        trainer.step(BATCH_SIZE)
        assert amp.step_was_skipped(trainer) == (number == BAD_BATCH)
        if number == BAD_BATCH:
            assert_same_bits(statistics_of(net), before)
            break
        previous = statistics_of(net)
    assert not np.array_equal(previous[0], before[0])  # set by the bad batch's forward pass


@pytest.mark.parametrize("overflows", [0, 1, 2])
def test_an_overflow_in_one_of_the_batches_of_a_step_undoes_them_all(overflows):
    net, trainer = scaled_net("float16", grad_req="add", loss_scale=128)
    (images, targets), *_ = batches()
    for bad in (None, overflows):
        before = statistics_of(net)
        for number in range(3):
            backward(net, images * (OVERFLOW if number == bad else 1), targets, trainer)
        trainer.step(3 * BATCH_SIZE)
    assert amp.step_was_skipped(trainer)
    assert_same_bits(statistics_of(net), before)


def test_only_the_statistics_of_the_device_that_overflowed_go_back():
    net, control = make_net("float16", TWO), make_net("float16", TWO)
    for one, factor in ((net, OVERFLOW), (control, 1)):
        trainer = make_trainer(one, loss_scale=128)
        for number, (images, targets) in enumerate(batches()):
            before = statistics_of(one, TWO[1])
            if number == BAD_BATCH:
                images[BATCH_SIZE // 2 :] *= factor  # the share of the second device
            backward_on(one, TWO, (images, targets), trainer)
            trainer.step(BATCH_SIZE)
            assert amp.step_was_skipped(trainer) == (number == BAD_BATCH and factor != 1)
            if number == BAD_BATCH:
                break
        if one is net:
            assert_same_bits(statistics_of(net, TWO[1]), before)
    assert_same_bits(statistics_of(net, TWO[0]), statistics_of(control, TWO[0]))


def test_a_checkpoint_after_such_a_step_is_finite_and_the_run_goes_on_from_it(tmp_path, caplog):
    net, trainer = scaled_net("float16", loss_scale=DynamicLossScale(128))
    train(net, trainer, bad=3)
    path = tmp_path / "after.npz"
    with caplog.at_level(logging.WARNING):
        save_checkpoint(path, net, trainer)
        assert all_finite(read_parameters(path).values())
    assert not caplog.records
    resumed, resumed_trainer = scaled_net("float16", loss_scale=DynamicLossScale(128))
    load_checkpoint(path, resumed, resumed_trainer)
    for one, its_trainer in ((net, trainer), (resumed, resumed_trainer)):
        train(one, its_trainer, bad=1)
    assert_same_bits(statistics_of(net), statistics_of(resumed))
    assert_same_bits(weights(net), weights(resumed))


def test_statistics_that_were_set_between_two_steps_are_those_that_come_back():
    net, trainer = scaled_net("float16", loss_scale=128)
    train(net, trainer)
    for parameter in net[1].collect_params(".*running").values():
        parameter.set_data(mx.nd.full(parameter.shape, 7))
    train(net, trainer, bad=0, steps=1)
    assert all((values == 7).all() for values in statistics_of(net))


def test_statistics_of_a_network_that_only_passes_gradients_on_go_back_too():
    # As a discriminator's, by a generator's loss.
    generator, discriminator = (
        make_net("float16"),
        in_sequence(nn.BatchNorm(in_channels=2), nn.Dense(2)),
    )
    discriminator.initialize()
    trainers = [make_trainer(one, loss_scale=128) for one in (generator, discriminator)]
    images, targets = next(batches())
    for factor in (1, math.inf):
        before = statistics_of(discriminator)
        backward(discriminator, targets, targets, trainers[1])
        trainers[1].step(BATCH_SIZE)
        with autograd.record():
            loss = LOSS(discriminator(generator(images) * factor), targets)
            with amp.scale_loss(loss, trainers[0]) as scaled:
                autograd.backward(scaled)
        trainers[0].step(BATCH_SIZE)
    assert amp.step_was_skipped(trainers[0])
    assert_same_bits(statistics_of(discriminator), before)


class WrittenInForward(nn.Block):
    """Keeps a running mean as cuDNN's BatchNorm does: in the forward pass."""

    def __init__(self, shape):
        super().__init__()
        self.mean = self.params.get(
            "running_mean", shape=shape, init="zeros", grad_req="null", differentiable=False
        )

    def forward(self, values):
        if autograd.is_training():
            with autograd.pause():
                mean = self.mean.data()
                mean[:] = 0.5 * mean + 0.5 * values.mean()
        return values


def network_that_writes_in_forward(shape):
    """Return a network that squares, with a running mean before and after that."""
    net = nn.Sequential()
    net.add(WrittenInForward((1,)), nn.Lambda("square"), WrittenInForward(shape))
    net.add(nn.Dense(2, in_units=3))
    net.initialize()
    return net


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_statistics_that_the_forward_pass_writes_go_back_to_before_it(shape):
    net = network_that_writes_in_forward(shape)
    trainer = make_trainer(net, loss_scale=128)
    train(net, trainer)
    for _ in range(2):
        before = statistics_of(net)
        images, targets = next(batches())
        backward(net, images * 1e30, targets, trainer)
        first, second = statistics_of(net)
        assert np.isfinite(first).all()  # only the squares overflow
        assert not np.isfinite(second).any()
        trainer.step(BATCH_SIZE)
        assert amp.step_was_skipped(trainer)
        assert_same_bits(statistics_of(net), before)
        train(net, trainer)
        assert not np.array_equal(statistics_of(net)[1], before[1])


def test_values_from_before_a_load_do_not_come_back(tmp_path):
    net = network_that_writes_in_forward((1,))
    trainer = make_trainer(net, loss_scale=128)
    save_checkpoint(tmp_path / "first.npz", net, trainer)
    train(net, trainer)
    old = statistics_of(net)
    load_checkpoint(tmp_path / "first.npz", net, trainer)
    train(net, trainer, bad=0, factor=math.inf, steps=1)
    assert not np.array_equal(statistics_of(net)[0], old[0])


def test_a_statistic_that_is_infinite_from_the_beginning_stays_and_the_others_go_back():
    net = make_net("float16")
    limit = net.params.get(
        "limit", shape=(1,), init=mx.init.Constant(math.inf), grad_req="null", differentiable=False
    )
    limit.initialize()
    control = make_net("float16")
    train(net, make_trainer(net, loss_scale=128), bad=BAD_BATCH)
    train(control, make_trainer(control, loss_scale=128), left_out=BAD_BATCH)
    assert_same_bits(statistics_of(net), statistics_of(control))
    assert limit.data() == math.inf


def test_statistics_of_a_network_with_deferred_shapes_go_back_too():
    net = initialized(in_sequence(nn.Dense(4), nn.BatchNorm(), nn.Dense(2)))
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    amp.init_trainer(trainer, 128)
    train(net, trainer, bad=0, factor=math.inf)
    assert all_finite(statistics_of(net))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_statistics_that_a_forward_pass_has_ruined_skip_the_step_of_a_finite_loss(
    monkeypatch, dtype
):
    """As on a GPU, where a forward pass writes them; here a CPU takes its place."""
    look = KeptStatistics.nan_where_ruined
    monkeypatch.setattr(KeptStatistics, "nan_where_ruined", lambda self: look(self, "cpu"))
    net, trainer = scaled_net("float16", optimizer="sgd", loss_scale=DynamicLossScale(2.0**8))
    images, targets = next(iter(batches()))
    mean = next(p for name, p in net.collect_params().items() if name.endswith("running_mean"))
    for bad in (False, True, False):
        before = weights(net)
        if bad:
            mean.data()[:1] = np.nan
        loss = backward_from(lambda: LOSS(net(images), targets).astype(dtype), trainer)
        trainer.step(BATCH_SIZE)
        assert np.isfinite(loss.asnumpy()).all()
        assert amp.step_was_skipped(trainer) is bad
        assert all_finite(statistics_of(net))
        if bad:
            assert_same_bits(weights(net), before)
