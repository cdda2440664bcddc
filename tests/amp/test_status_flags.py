"""Which layers overflowed in a step: the flags that native roundings raise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import mpgluon
from mpgluon import amp
from mpgluon.diagnostics import Batch, OverflowLocator, locate_overflow

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, STATIC, in_sequence, initialized
from mxnet import autograd, gluon
from mxnet.gluon import nn

pytestmark = pytest.mark.usefixtures("native_operators")

CASTS = {
    "cast": mpgluon.cast_block,
    "autocast": amp.autocast,
    "float8": lambda net: amp.autocast(net, "mixed_float8"),
}
SIXTEEN = pytest.mark.parametrize("how", ["cast", "autocast"])
LARGE = 2.0**15  # times images of about 1: some fit, and the results of a convolution do not


def make(how="cast", hybridize=False, ctx=None):
    net = in_sequence(
        nn.Conv2D(16, 3, in_channels=3, prefix="first_"),
        nn.BatchNorm(in_channels=16, prefix="norm_"),
        nn.Activation("relu", prefix="relu_"),
        nn.MaxPool2D(2, 2, prefix="pool_"),
        nn.Conv2D(16, 2, in_channels=16, prefix="second_"),
        nn.Activation("relu", prefix="relu2_"),
        nn.Dense(5, in_units=16 * 4, prefix="last_"),
    )
    mx.random.seed(0)
    net.initialize(mx.init.Xavier(), ctx=ctx)
    CASTS[how](net)
    if hybridize:
        net.hybridize(**STATIC)
    return net


def trainer_of(net, loss_scale=16.0, **options):
    parameters = net if isinstance(net, list) else net.collect_params()
    trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 2.0**-10, "multi_precision": True})
    amp.init_trainer(trainer, loss_scale, **options)
    return trainer


def step(net, trainer, factor=1.0):
    data = np.random.default_rng(0).standard_normal((4, 3, 8, 8))
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    with autograd.record():
        backward(loss_fn(net(mx.nd.array(data * factor)), mx.nd.arange(4) % 5), trainer)
    trainer.step(4)


def backward(losses, trainers):
    with amp.scale_loss(losses, trainers) as scaled:
        autograd.backward(scaled)


def raised(trainer, direction="forward"):
    """Return the flags of each layer in a pass, as text."""
    flags = {f.layer: str(getattr(f, direction)) for f in amp.step_flags(trainer)}
    return {layer: words for layer, words in flags.items() if words}


@SIXTEEN
@BOTH
def test_a_layer_that_overflows_is_named_in_that_step_alone(how, hybridize):
    net = make(how, hybridize)
    trainer = trainer_of(net)
    step(net, trainer)
    assert not amp.step_flags(trainer)
    assert str(amp.step_flags(trainer)) == "no layer raised a flag"
    weight, small = net[0].weight, net[0].weight.data().copy()
    weight.set_data(mx.nd.full(weight.shape, LARGE))
    step(net, trainer)
    assert raised(trainer)["first"] == "overflow"
    assert amp.step_flags(trainer).first("forward").layer == "first"
    assert "first (Conv2D, cpu(0)) forward: overflow" in str(amp.step_flags(trainer))
    assert amp.step_was_skipped(trainer)
    if hybridize:  # imperative runs leave normalization to MXNet
        assert raised(trainer)["norm"] == "invalid"
    weight.set_data(small)
    step(net, trainer)
    assert not amp.step_flags(trainer)
    assert not amp.step_was_skipped(trainer)


class Times(nn.HybridBlock):
    """Multiplies its input by a number."""

    def hybrid_forward(self, F, x):
        return x * 2.0**15


class Logarithm(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.log(-F.abs(x) - 1)


@SIXTEEN
@BOTH
def test_a_product_with_a_number_that_overflows_is_named(how, hybridize):
    first, last = nn.Dense(8, in_units=3 * 8 * 8), nn.Dense(5, in_units=8)
    net = initialized(in_sequence(first, Times(prefix="times_"), last), mx.init.Xavier())
    CASTS[how](net)
    net.hybridize(hybridize)
    trainer = trainer_of(net)
    step(net, trainer, 8.0)
    assert amp.step_was_skipped(trainer)
    assert raised(trainer)["times"] == "overflow"
    assert amp.step_flags(trainer).first("forward").layer == "times"


def test_a_nan_that_an_imperative_run_does_not_note_is_explained():
    net = in_sequence(Logarithm(prefix="log_"), nn.Dense(5, in_units=3 * 8 * 8, prefix="last_"))
    net.initialize(mx.init.Xavier())
    mpgluon.cast_block(net)
    trainer = trainer_of(net)
    step(net, trainer)
    assert amp.step_was_skipped(trainer)
    text = str(amp.step_flags(trainer))
    assert "no layer raised a flag; the step was skipped nevertheless" in text
    assert "ran imperatively, without net.hybridize(), where a NaN is not noted" in text
    assert not amp.step_flags(trainer)
    locator = OverflowLocator(net, trainer)  # as the text advises
    step(net, trainer)
    assert locator.report.block == "log"


def test_a_step_that_another_cause_skipped_is_explained():
    net = make(hybridize=True)
    trainer = trainer_of(net)
    with autograd.record():
        backward((net(mx.nd.ones((4, 3, 8, 8))) + np.nan).sum(), trainer)
    trainer.step(4)
    assert amp.step_was_skipped(trainer)
    assert "the loss, the input, or an operator that rounds nothing" in str(amp.step_flags(trainer))


@SIXTEEN
@BOTH
def test_an_overflow_of_the_backward_pass_is_named_there(how, hybridize):
    net = make(how, hybridize)
    trainer = trainer_of(net, 2.0**24)
    step(net, trainer)
    assert amp.step_was_skipped(trainer)
    assert not raised(trainer)
    flags = raised(trainer, "backward")
    # 2^24 times a gradient of the logits is too large: the network's own result is rounded first.
    assert flags[net.name] == "overflow"
    assert amp.step_flags(trainer).first("backward").layer == net.name
    assert amp.step_flags(trainer).first("forward") is None


@pytest.mark.parametrize("where", ["first", "second", "last"])
@BOTH
def test_the_first_layer_that_overflows_is_the_one_whose_weights_are_too_large(where, hybridize):
    net = make(hybridize=hybridize)
    layer = next(one for one in net if one.name == where)
    layer.weight.set_data(mx.nd.full(layer.weight.shape, 2.0**15))
    trainer = trainer_of(net)
    step(net, trainer)
    assert amp.step_was_skipped(trainer)
    assert amp.step_flags(trainer).first("forward").layer == where


@BOTH
def test_an_intended_infinity_skips_no_step_and_is_not_blamed_for_a_later_one(hybridize):
    class Steep(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            steep = F.broadcast_mul(x, F.ones_like(x) * 2.0**12)
            return F.tanh(F.broadcast_mul(steep, F.ones_like(x) * 2.0**12))  # infinite, then 1

    net = in_sequence(
        nn.Dense(8, in_units=6, prefix="first_"), Steep(prefix="steep_"), nn.Dense(3, prefix="d_")
    )
    net.initialize(mx.init.Xavier())
    data = mx.nd.array(np.random.default_rng(0).standard_normal((4, 6)))
    net(data)
    mpgluon.cast_block(net)
    net.hybridize(hybridize)
    trainer = trainer_of(net)
    for bad in (False, False, False, True):
        if bad:
            net[2].weight.set_data(mx.nd.full((3, 8), 2.0**15))
        with autograd.record():
            backward((net(data) ** 2).sum(), trainer)
        trainer.step(4)
        assert amp.step_was_skipped(trainer) is bad
        assert raised(trainer)["steep"] == "overflow"
        first = amp.step_flags(trainer).first("forward")
        assert first.layer == "d" if bad else first is None
        assert len(raised(trainer)) == 1 or bad


def test_each_device_has_its_own_flags():
    devices = [mx.cpu(0), mx.cpu(1)]
    net = make(ctx=devices)
    trainer = trainer_of(net)
    data = np.random.default_rng(0).standard_normal((4, 3, 8, 8))
    with autograd.record():
        factors = zip((1.0, LARGE), devices)
        losses = [net(mx.nd.array(data * factor, ctx=ctx)).sum() for factor, ctx in factors]
        backward(losses, trainer)
    trainer.step(8)
    assert {f.device for f in amp.step_flags(trainer) if f.forward.overflow} == {"cpu(1)"}


@BOTH
def test_results_that_become_zero_are_counted_if_asked_for(hybridize):
    net = initialized(nn.Dense(4, in_units=4, use_bias=False, prefix="layer_"), mx.init.One())
    mpgluon.cast_block(net)
    net.hybridize(hybridize)
    for counts in (False, True):
        trainer = trainer_of(net, count_underflow=counts)
        with autograd.record():
            backward(net(mx.nd.full((2, 4), 2.0**-30)).sum(), trainer)
        trainer.step(2)
        flags = {f.layer: f for f in amp.step_flags(trainer)}
        # The images, 8 numbers, become zero where they enter, and so nothing is lost behind.
        assert ("layer" in flags) is counts
    assert flags["layer"].forward.underflow == 8
    assert not flags["layer"].forward.overflow
    assert "8 results to zero" in str(flags["layer"])


def test_an_evaluation_between_steps_raises_nothing():
    net = make(hybridize=True)
    trainer = trainer_of(net)
    step(net, trainer)
    net(mx.nd.full((2, 3, 8, 8), 60000.0))
    step(net, trainer)
    assert not amp.step_flags(trainer)


def test_networks_in_threads_raise_flags_of_their_own():
    def train(factor):
        net = make(hybridize=True)
        trainer = trainer_of(net)
        layers = []
        for _ in range(20):
            step(net, trainer, factor)
            layers.append(tuple(raised(trainer)))
        return layers

    with ThreadPoolExecutor(2) as pool:
        quiet, loud = pool.map(train, (1.0, LARGE), timeout=120)
    assert quiet == [()] * 20
    assert all("first" in layers for layers in loud)


def test_trainers_of_one_loss_return_the_same_flags_and_a_new_one_returns_none():
    net = make()
    everything = list(net.collect_params().values())
    trainers = [trainer_of(part) for part in (everything[:5], everything[5:])]
    assert not any(map(amp.step_flags, trainers))
    with autograd.record():
        backward(net(mx.nd.full((2, 3, 8, 8), 60000.0)).sum(), trainers)
    for trainer in trainers:
        trainer.step(2)
    assert all(raised(trainer)["first"] == "overflow" for trainer in trainers)


def test_slots_of_deleted_networks_are_used_again():
    from mpgluon.cast.status_flags import Layers

    def train():
        net = make(hybridize=True)
        step(net, trainer_of(net), factor=LARGE)

    train()
    before = Layers._made
    for _ in range(3):
        train()
    assert Layers._made <= before + 8 * 2


def test_the_next_step_has_none_of_the_flags_of_a_diagnosis():
    net = make()
    trainer = trainer_of(net)
    step(net, trainer)
    order = [flags.layer for flags in flags_of_a_bad_step(net, trainer)]
    images = LARGE * np.random.default_rng(0).standard_normal((4, 3, 8, 8))
    batch = Batch(mx.nd.array(images), mx.nd.zeros(4), gluon.loss.SoftmaxCrossEntropyLoss())
    for _ in range(2):
        assert locate_overflow(net, batch) is not None
        step(net, trainer)
        assert not amp.step_flags(trainer)
        assert not amp.step_flags(trainer).usual
    assert [flags.layer for flags in flags_of_a_bad_step(net, trainer)] == order


def flags_of_a_bad_step(net, trainer):
    step(net, trainer, LARGE)
    assert amp.step_was_skipped(trainer)
    return amp.step_flags(trainer)


def test_the_run_of_a_locator_raises_no_flag():
    net = make()
    trainer = trainer_of(net)
    locator = OverflowLocator(net, trainer)
    step(net, trainer, LARGE)
    assert locator.report is not None
    first = amp.step_flags(trainer).first("forward")
    step(net, trainer)
    assert not amp.step_flags(trainer)
    step(net, trainer, LARGE)
    assert amp.step_flags(trainer).first("forward") == first is not None
