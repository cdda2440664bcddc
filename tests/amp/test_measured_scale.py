"""Training with the loss scale that native operators measure: no step is lost to find it."""

import mpgluon
from mpgluon import amp
from mpgluon.checkpoint import load_checkpoint, save_checkpoint

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, STATIC, in_sequence, run_python
from mxnet import autograd, gluon
from mxnet.gluon import nn

HOW = pytest.mark.parametrize("how", [mpgluon.cast_block, amp.autocast])


def network(how=mpgluon.cast_block, *, hybridize=True):
    net = in_sequence(
        nn.Conv2D(16, 3, in_channels=3, activation="relu"),
        nn.BatchNorm(in_channels=16),
        nn.Dense(5, in_units=16 * 36),
    )
    mx.random.seed(0)
    net.initialize(mx.init.Xavier())
    how(net)
    net.hybridize(hybridize, **STATIC)
    return net


def trainer_of(net, loss_scale="measured"):
    options = {"learning_rate": 2.0**-24, "multi_precision": True}  # gradients hardly change
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, loss_scale)
    return trainer


def step(net, trainer, factor=1.0, seed=0):
    data = mx.nd.array(np.random.default_rng(seed).standard_normal((4, 3, 8, 8)))
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    with autograd.record():
        loss = loss_fn(net(data), mx.nd.arange(4) % 5) * factor
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(4)
    return amp.step_was_skipped(trainer)


@pytest.mark.parametrize("operand", [mx.nd.ones((2, 3)) / 8, mx.nd.ones((4, 33))])
@pytest.mark.usefixtures("native_operators")
def test_the_largest_number_is_that_of_the_backward_pass(operand):
    net = in_sequence(nn.Dense(1, in_units=operand.shape[1], use_bias=False))
    net.initialize(mx.init.Constant(0.5))
    amp.autocast(net)
    trainer = trainer_of(net, mpgluon.MeasuredLossScale(init_scale=8.0))
    with autograd.record():
        loss = net(operand).reshape(-1) * 3
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(1)
    # Gradients of the result are 24, of the weight its sum over rows.
    of_weight = 24 * float(operand.sum(axis=0)[0].asscalar())
    assert amp.step_flags(trainer).largest == max(24, of_weight)


def dense_networks(count):
    nets = [in_sequence(nn.Dense(1, in_units=2, use_bias=False)) for _ in range(count)]
    for net in nets:
        net.initialize(mx.init.Constant(0.5))
        amp.autocast(net)
    return nets


@pytest.mark.parametrize("factors", [(3, 48), (48, 3)])
@pytest.mark.usefixtures("native_operators")
def test_the_largest_number_is_that_of_both_networks_of_a_trainer(factors):
    nets = dense_networks(2)
    parameters = [one for net in nets for one in net.collect_params().values()]
    trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 1})
    amp.init_trainer(trainer, mpgluon.MeasuredLossScale(init_scale=8.0))
    with autograd.record():
        loss = sum(net(mx.nd.ones((1, 2))) * factor for net, factor in zip(nets, factors))
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(1)
    assert amp.step_flags(trainer).largest == 8 * 48


@pytest.mark.parametrize("factors", [(3, 48), (48, 3)])
@pytest.mark.usefixtures("native_operators")
def test_a_scale_that_two_trainers_share_fits_the_larger_gradients(factors):
    shared = mpgluon.MeasuredLossScale(init_scale=8.0, margin=3)
    nets = dense_networks(2)
    trainers = [trainer_of(net, shared) for net in nets]
    for net, trainer, factor in zip(nets, trainers, factors):
        with autograd.record(), amp.scale_loss(net(mx.nd.ones((1, 2))) * factor, trainer) as scaled:
            scaled.backward()
        trainer.step(1)
    assert shared.scale == 2.0**7  # 48 * 2**7 * 2**3 is below 65504, and twice that is not


def mlp(*sizes, std=0.3):
    pairs = zip(sizes, sizes[1:])
    net = in_sequence(*(nn.Dense(o, in_units=i, activation="tanh") for i, o in pairs))
    mx.random.seed(0)
    net.initialize(mx.init.Normal(std))
    mpgluon.cast_block(net)
    net.hybridize()
    return net


def backward(loss, trainer):
    with amp.scale_loss(loss, trainer) as scaled:
        scaled.backward(retain_graph=True)


def normal(*shape, seed=0):
    return mx.nd.array(np.random.default_rng(seed).standard_normal(shape))


@pytest.mark.usefixtures("native_operators")
def test_the_scales_of_a_gan_stay_where_their_first_steps_put_them():
    generator, discriminator = mlp(4, 16, 8), mlp(8, 16, 1)
    of_generator, of_discriminator = trainer_of(generator), trainer_of(discriminator)
    loss_fn = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    ones, scales = mx.nd.ones((64,)), []
    for seed in range(12):
        noise, real = normal(64, 4, seed=seed), normal(64, 8, seed=seed)
        with autograd.record():
            fake = discriminator(generator(noise).detach())
            backward(loss_fn(discriminator(real), ones) + loss_fn(fake, 0 * ones), of_discriminator)
        of_discriminator.step(64)
        assert (discriminator[0].weight.grad() != 0).asnumpy().mean() > 0.95
        with autograd.record():
            backward(loss_fn(discriminator(generator(noise)), ones), of_generator)
        of_generator.step(64)
        scales.append([amp.loss_scale(of_discriminator), amp.loss_scale(of_generator)])
    assert min(scales[0]) > 2**4
    assert (np.abs(np.log2(scales) - np.log2(scales[0])) <= 1).all()


@pytest.mark.usefixtures("native_operators")
def test_the_numbers_of_a_frozen_network_in_the_loss_count():
    net, judge = mlp(8, 16, 8), mlp(8, 64, 16, std=0.001)
    judge.collect_params().setattr("grad_req", "null")
    trainer = trainer_of(net, mpgluon.MeasuredLossScale(init_scale=2.0**4))
    for _ in range(20):
        with autograd.record():
            backward(judge(net(normal(4, 8)).astype("float16")).astype("float32").sum(), trainer)
        trainer.step(1)
        assert not amp.step_was_skipped(trainer)
    assert amp.step_flags(trainer).largest == amp.loss_scale(trainer)  # d loss / d result is 1


@pytest.mark.usefixtures("native_operators")
def test_passes_before_the_loss_of_a_step_do_not_count():
    net, pixels = mlp(8, 16, 1), mx.nd.ones((4, 8))
    trainer, scales = trainer_of(net), []
    pixels.attach_grad()
    for _ in range(6):
        with autograd.record():
            backward((net(pixels) * 2.0**15).sum(), trainer)
        trainer.step(4)
        scales.append(amp.loss_scale(trainer))
        with autograd.record():
            loss = (net(pixels) * 2.0**15).sum()
        autograd.grad(loss, [pixels])[0].wait_to_read()  # without the loss scale, which is below 1
    assert scales[0] < 1
    assert scales == [scales[0]] * 6


@pytest.mark.usefixtures("native_operators")
def test_a_trainer_whose_step_never_comes_changes_nothing_for_others():
    given_up = [mlp(8, 16, 1), mlp(8, 16, 1)]
    trainers = [trainer_of(one) for one in given_up]
    for net, trainer in zip(given_up, trainers):
        with autograd.record():
            backward(net(normal(4, 8)).sum() * 2.0**14, trainer)
    net = network()
    trainer = trainer_of(net)
    step(net, trainer)
    alone = network()
    other = trainer_of(alone)
    for one in trainers:
        one.step(4)
    step(alone, other)
    assert amp.step_flags(trainer).largest == amp.step_flags(other).largest
    assert amp.loss_scale(trainer) == amp.loss_scale(other)


@pytest.mark.usefixtures("native_operators")
def test_a_network_without_a_cast_in_the_loss_changes_nothing():
    net, plain = mlp(8, 16, 8), in_sequence(nn.Dense(1, in_units=8))
    plain.initialize(mx.init.One())
    shared = mpgluon.MeasuredLossScale()
    trainers = [trainer_of(net, shared), trainer_of(plain, shared)]
    with autograd.record():
        backward(plain(net(normal(4, 8)).astype("float32")).sum(), trainers)
    for one in trainers:
        one.step(4)
    assert 1 < amp.step_flags(trainers[0]).largest < 2**5
    assert shared.scale > 2**8


@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize("other", ["measured", "dynamic"])
@pytest.mark.parametrize("in_turn", [False, True])
def test_two_trainers_of_one_network_have_numbers_each(other, in_turn):
    net = in_sequence(nn.Dense(8, in_units=8), nn.Dense(8, in_units=8))
    mx.random.seed(0)
    net.initialize(mx.init.Xavier())
    mpgluon.cast_block(net)
    first, second = trainer_of(net[0], other), trainer_of(net[1])
    for _ in range(4):
        with autograd.record():
            of_first = (net[0](normal(4, 8)).astype("float32") ** 2).mean()
            of_second = (net[1](normal(4, 8)).astype("float32") ** 2).mean()
        backward(of_first, first)
        if in_turn:
            first.step(4)
        backward(of_second, second)
        if not in_turn:
            first.step(4)
        second.step(4)
    assert (amp.step_flags(first).largest is None) == (other == "dynamic")
    assert 2**4 < amp.loss_scale(second) < 2**24
    assert 65504 / 2**6 < amp.step_flags(second).largest <= 65504 / 2**3


@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize(
    ("policy", "searches"),
    [
        ("params=float32,compute=float8_e4m3", True),
        ("params=float32,compute=float6_e3m2", True),
        ("bfloat16", False),
        ("params=float32,compute=float16", False),
    ],
)
def test_narrow_formats_that_are_not_measured_are_searched(policy, searches):
    net = in_sequence(nn.Dense(1, in_units=2, use_bias=False))
    net.initialize(mx.init.Constant(0.5))
    options = {"learning_rate": 2.0**-24}
    trainer = mpgluon.prepare(net, policy, "sgd", options, loss_scale="measured")
    for _ in range(5):
        with autograd.record():
            backward(net(mx.nd.ones((1, 2))) * 0, trainer)
        trainer.step(1)
    assert amp.loss_scale(trainer) == (2**5 if searches else 1)
    assert amp.step_flags(trainer).largest == (None if searches else 0)


@pytest.mark.usefixtures("native_operators")
def test_batches_that_train_nothing_are_reported_at_the_smallest_scale(caplog):
    net = network()
    trainer = trainer_of(net, mpgluon.MeasuredLossScale(min_scale=1.0))
    skipped = [step(net, trainer, factor) for factor in (1, 2.0**20) * 6]
    assert skipped == [False, True] * 6
    assert "5 steps were skipped at a loss scale of 1, which can shrink no further" in caplog.text


@HOW
@BOTH
@pytest.mark.parametrize("factor", [2.0**-10, 1.0, 2.0**12])
@pytest.mark.usefixtures("native_operators")
def test_no_step_is_lost_and_the_scale_fits_after_one(how, hybridize, factor):
    net = network(how, hybridize=hybridize)
    trainer = trainer_of(net)
    scales = []
    for seed in range(6):
        assert not step(net, trainer, factor, seed)
        scales.append(amp.loss_scale(trainer))
        assert amp.step_flags(trainer).largest > 0
    largest = amp.step_flags(trainer).largest
    assert scales[0] == scales[1] != 1
    assert 65504 / 2**6 < largest <= 65504 / 2**2  # the margin is 3, and batches differ
    dynamic = network(how, hybridize=hybridize)
    other = trainer_of(dynamic, "dynamic")
    assert step(dynamic, other, factor) == (factor >= 1)


@pytest.mark.usefixtures("native_operators")
def test_a_bad_batch_is_skipped_and_the_next_one_is_not():
    net = network()
    trainer = trainer_of(net)
    skipped, first = [], []
    for factor in (1, 1, 2.0**14, 1, 1):
        skipped.append(step(net, trainer, factor))
        first.append(amp.step_flags(trainer).first("backward"))
    assert skipped == [False, False, True, False, False]
    assert [one is None for one in first] == [True, True, False, True, True]


@pytest.mark.usefixtures("native_operators")
def test_a_checkpoint_continues_to_the_same_scales(tmp_path):
    factors = [1.0, 2.0**6, 1.0, 2.0**-6, 1.0]

    def scales(net, trainer, numbers):
        found = []
        for number in numbers:
            step(net, trainer, factors[number], number)
            found.append(amp.loss_scale(trainer))
        return found

    net = network()
    trainer = trainer_of(net)
    expected = scales(net, trainer, range(5))
    net = network()
    trainer = trainer_of(net)
    scales(net, trainer, range(2))
    save_checkpoint(tmp_path / "step.npz", net, trainer)
    net = network()
    trainer = trainer_of(net)
    load_checkpoint(tmp_path / "step.npz", net, trainer)
    assert scales(net, trainer, range(2, 5)) == expected[2:]


@pytest.mark.multiprocess
def test_without_native_operators_at_most_one_step_is_lost(monkeypatch):
    monkeypatch.setenv("MPGLUON_NATIVE", "0")
    code = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/amp"]
import mpgluon
from mpgluon import amp
from test_measured_scale import network, step, trainer_of
net = network(amp.autocast)
trainer = trainer_of(net)
skipped = [step(net, trainer, seed=seed) for seed in range(24)]
assert amp.step_flags(trainer).largest is None
print(sum(skipped), skipped[-1], amp.loss_scale(trainer) > 2**6)
"""
    done = run_python(code, mpgluon.__path__[0] + "/../tests")
    assert done.stdout.split() == ["1", "False", "True"], done.stderr
