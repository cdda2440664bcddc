"""SGD with momentum, weight by weight: the bits of MXNet's updater, and MXNet's own elsewhere."""

import mpgluon
from mpgluon import amp, kernels
from mpgluon.updates import gluon_trainer, updater

import mxnet as mx
import pytest
from helpers import assert_same_bits, in_sequence, parameters_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mxnet import autograd, gluon
from mxnet.gluon import nn

OPTIONS = {"learning_rate": 0.1, "momentum": 0.9}
settings_of_sgd = st.fixed_dictionaries(
    {
        "learning_rate": st.floats(1e-3, 1),
        "momentum": st.sampled_from((0.0, 0.5, 0.9)),
        "wd": st.sampled_from((0.0, 1e-4, 0.3)),
        "clip_gradient": st.sampled_from((None, 0.01)),
    }
)


def train_masters(shape, options, *, natively):
    """Return the weight, its master and momentum after three steps of a cast layer."""
    mx.random.seed(1)
    layer = nn.Dense(shape[0], in_units=shape[1], use_bias=False)
    layer.initialize(mx.init.Normal(0.5))
    mpgluon.cast_block(layer)
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {**options, "multi_precision": True})
    amp.init_trainer(trainer, 2.0**6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "available", lambda: natively)
        for _ in range(3):
            with autograd.record():
                loss = layer(mx.nd.ones((2, shape[1])))
                with amp.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
            trainer.step(2)
    (updater,) = gluon_trainer.updaters_of(trainer)
    found = {"weight": layer.weight.data(), "master": updater.masters[0]}
    if options["momentum"]:
        found["momentum"] = updater.states[0]
    return {name: array.asnumpy() for name, array in found.items()}


@pytest.mark.usefixtures("native_operators")
@settings(max_examples=20, deadline=None)
@given(settings_of_sgd)
@example({"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4, "clip_gradient": 0.01})
def test_masters_that_are_updated_natively_have_the_bits_of_mxnets_operators(options):
    shape = (3, 8197)  # parts of 8192, and a rest
    expected = train_masters(shape, options, natively=False)
    assert_same_bits(train_masters(shape, options, natively=True), expected)


def train(optimizer, options, *, own, frozen_first=False):
    """Return the weights after five steps; a schedule, and factors of single parameters."""
    mx.random.seed(1)
    net = in_sequence(nn.Dense(5, in_units=33), nn.Dense(3, in_units=5), nn.Dense(2, in_units=3))
    net.initialize(mx.init.Normal(0.5))
    net[1].weight.lr_mult, net[0].bias.wd_mult = 0.5, 2.0
    net[0].collect_params().setattr("grad_req", "null" if frozen_first else "write")
    schedule = mx.lr_scheduler.FactorScheduler(1, 0.75, base_lr=options["learning_rate"])
    trainer = gluon.Trainer(net.collect_params(), optimizer, {**options, "lr_scheduler": schedule})
    if own:
        amp.init_trainer(trainer, "none")
    for step in range(5):
        if step == 2:
            net.collect_params().setattr("grad_req", "write")
        with autograd.record():
            loss = (net(mx.nd.random.normal(shape=(4, 33))) ** 2).sum()
        loss.backward()
        trainer.step(4)
    return parameters_of(net)


@pytest.fixture
def updated_alone(monkeypatch):
    """Count the weights that MXNet's operator for one weight updates."""
    counted, update = [], mx.nd.sgd_mom_update
    assert updater._one_weight_has_the_same_bits()

    def counting(*args, **kwargs):
        counted.append(1)
        return update(*args, **kwargs)

    monkeypatch.setattr(mx.nd, "sgd_mom_update", counting)
    return counted


@settings(max_examples=30, deadline=None)
@given(settings_of_sgd, st.booleans())
def test_weights_have_the_bits_of_mxnets_updater(options, frozen_first):
    expected = train("sgd", options, own=False, frozen_first=frozen_first)
    assert_same_bits(train("sgd", options, own=True, frozen_first=frozen_first), expected)


def test_all_steps_update_weight_by_weight(updated_alone):
    train("sgd", OPTIONS, own=True)
    assert len(updated_alone) == 5 * 6


@pytest.mark.parametrize("optimizer", ["nag", "lbsgd"])
def test_other_optimizers_update_as_mxnet_does(optimizer, updated_alone):
    expected = train(optimizer, OPTIONS, own=False)
    assert_same_bits(train(optimizer, OPTIONS, own=True), expected)
    assert not updated_alone


def test_where_the_bits_differ_mxnets_updater_stays(updated_alone, monkeypatch):
    monkeypatch.setattr(updater, "_one_weight_has_the_same_bits", lambda: False)
    train("sgd", OPTIONS, own=True)
    assert not updated_alone
