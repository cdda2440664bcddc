"""Float16 weights that an optimizer without FP32 masters updates, or that MXNet cannot compute."""

import logging
import re
from pathlib import Path

import mpgluon
from mpgluon import PrecisionError, amp
from mpgluon.updates.weight_findings import obstacle_without_masters

import mxnet as mx
import numpy as np
import pytest
from helpers import assert_same_bits, parameters_of
from mxnet import autograd, gluon
from mxnet.base import MXNetError
from mxnet.gluon import nn

OPTIMIZERS = sorted(
    name
    for name, kind in mx.optimizer.Optimizer.opt_registry.items()
    if kind.__module__.startswith("mxnet")
)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
# Whether it works without masters, by name: the first column of figures on the page.
WITHOUT_MASTERS = {
    cells[0]: cells[1] not in ("raises", "NaN")
    for line in PAGE.read_text().splitlines()
    if (cells := [cell.strip() for cell in line.strip("| ").split("|")])[0] in OPTIMIZERS
}


def make_net(cast=True, ctx=None):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(4, in_units=3, use_bias=False), nn.Dense(2, in_units=4, use_bias=False))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    if cast:
        mpgluon.cast_block(net)
    return net


def begin(net, optimizer="sgd", loss_scale=1, trainer_options=None, **options):
    """Return a Trainer that ``init_trainer`` has received."""
    trainer = gluon.Trainer(net.collect_params(), optimizer, options, **(trainer_options or {}))
    amp.init_trainer(trainer, loss_scale)
    return trainer


def step(net, trainer, images):
    with autograd.record():
        loss = gluon.loss.L2Loss()(net(images), mx.nd.zeros((len(images), 2)))
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(len(images))


def finite(net):
    return all(np.isfinite(p.data().asnumpy()).all() for p in net.collect_params().values())


@pytest.fixture
def warnings_of(caplog):
    caplog.set_level(logging.WARNING, "mpgluon")
    return caplog


def test_every_optimizer_is_on_the_page():
    assert sorted(WITHOUT_MASTERS) == OPTIMIZERS
    assert set(WITHOUT_MASTERS.values()) == {True, False}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_needs_masters_is_refused_and_others_are_warned_of(name, warnings_of):
    net = make_net()
    if WITHOUT_MASTERS[name]:
        begin(net, name)
        (message,) = warnings_of.messages
        assert "2 float16 weights without FP32 masters, net_dense0_weight first" in message
        assert "optimizer with multi_precision=True" in message
        return
    trainer = gluon.Trainer(net.collect_params(), name)
    before = dict(vars(trainer))
    with pytest.raises(PrecisionError, match="multi_precision") as error:
        amp.init_trainer(trainer)
    assert vars(trainer) == before
    assert re.search("0 in float16: a division by zero|its state is FP32", str(error.value))
    assert warnings_of.messages == []
    begin(net, name, multi_precision=True)
    assert warnings_of.messages == []


@pytest.mark.parametrize("name", [name for name, works in WITHOUT_MASTERS.items() if not works])
@pytest.mark.filterwarnings("ignore:Accumulating with float16 in optimizer")  # as MXNet says
def test_an_optimizer_that_is_refused_fails_in_mxnet(name, monkeypatch):
    monkeypatch.setattr("mpgluon.trainer.step.check_weights", lambda *_: None)
    net = make_net()
    trainer = begin(net, name)
    images = mx.nd.zeros((2, 3))  # the gradients are zeros, too
    if obstacle_without_masters(trainer.optimizer).startswith("its state is FP32"):
        with pytest.raises(MXNetError, match="expected float"):
            step(net, trainer, images)
        return
    step(net, trainer, images)
    assert not finite(net)


@pytest.mark.parametrize("name", ["adam", "nadam", "ftml"])
@pytest.mark.filterwarnings("ignore:Accumulating with float16 in optimizer")
def test_an_epsilon_that_float16_has_is_warned_of_only_and_works(name, warnings_of):
    net = make_net()
    trainer = begin(net, name, epsilon=1e-3)
    assert len(warnings_of.messages) == 1
    step(net, trainer, mx.nd.zeros((2, 3)))
    assert finite(net)


def test_an_optimizer_with_an_update_of_its_own_is_not_refused(warnings_of):
    class InFP32(mx.optimizer.Adam):
        def update(self, index, weight, grad, state):
            weight[:] = weight - (self.lr * grad.astype("float32")).astype("float16")

    net = make_net()
    trainer = gluon.Trainer(net.collect_params(), InFP32())
    amp.init_trainer(trainer)
    assert "InFP32 updates 2 float16 weights without" in warnings_of.messages[0]


@pytest.mark.parametrize("loss_scale", ["none", "dynamic"])
def test_the_refusal_does_not_depend_on_the_loss_scale(loss_scale):
    with pytest.raises(PrecisionError, match="RMSProp updates 2 float16 weights without"):
        begin(make_net(), "rmsprop", loss_scale)


def test_weights_that_are_not_float16_or_not_trained_cause_no_warning(warnings_of):
    begin(make_net(cast=False), "adam")
    net = make_net(cast=False)
    amp.autocast(net, "float16")
    begin(net, "adam")
    net = make_net()
    net.collect_params().setattr("grad_req", "null")
    begin(net, "adam")
    assert warnings_of.messages == []


def test_net_cast_on_a_cpu_is_warned_of_before_mxnet_refuses(warnings_of):
    net = make_net(cast=False)
    net.cast("float16")
    begin(net, multi_precision=True)
    (message,) = warnings_of.messages
    assert message.startswith("float16 parameters that cast_block did not make: net_dense0_weight")
    assert "mpgluon.cast_block(net)" in message
    with pytest.raises(MXNetError, match="float16 fully connected layer"):
        net(mx.nd.ones((1, 3), dtype="float16")).asnumpy()


NO_MASTERS = "SGD updates 2 float16 weights without FP32 masters"
NO_LOSS_SCALE = "this Trainer has no loss scale, though gradients are float16"


def plain_steps(net, trainer, count=2):
    """Train as a loop in plain Gluon does."""
    for _ in range(count):
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(mx.nd.ones((2, 3))), mx.nd.zeros((2, 2)))
        loss.backward()
        trainer.step(2)


def after_steps(trainer_first, hybridize=False, **options):
    """Train a network whose Trainer was made before or after the cast, and return it."""
    net = make_net(cast=False)
    arguments = (net.collect_params(), "sgd", options)
    trainer = gluon.Trainer(*arguments) if trainer_first else None
    mpgluon.cast_block(net)
    net.hybridize(hybridize)
    plain_steps(net, trainer or gluon.Trainer(*arguments))
    return net


@pytest.mark.parametrize("trainer_first", [False, True])
@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.filterwarnings("ignore:Accumulating with float16 in optimizer")
def test_a_loop_with_the_cast_alone_logs_once_what_it_lacks(trainer_first, hybridize, warnings_of):
    after_steps(trainer_first, hybridize, learning_rate=0.1)
    (message,) = warnings_of.messages
    masters, loss_scale = message.splitlines()
    assert masters.startswith(NO_MASTERS)
    assert "multi_precision=True" in masters
    assert loss_scale.startswith(NO_LOSS_SCALE)
    assert "call amp.init_trainer(trainer)" in loss_scale


@pytest.mark.parametrize(
    ("cast", "masters", "expected"),
    [
        (mpgluon.cast_block, True, [NO_LOSS_SCALE]),
        (amp.autocast, False, [NO_LOSS_SCALE]),
        (lambda net: amp.autocast(net, "bfloat16"), False, []),
        (lambda net: mpgluon.cast_block(net, "bfloat16"), True, []),
        (type, False, []),  # not cast
    ],
)
def test_without_init_trainer_a_loop_logs_what_it_needs(cast, masters, expected, warnings_of):
    net = make_net(cast=False)
    cast(net)
    options = {"multi_precision": masters}
    plain_steps(net, gluon.Trainer(net.collect_params(), "sgd", options))
    assert [message[: len(NO_LOSS_SCALE)] for message in warnings_of.messages] == expected


def test_a_loop_that_renounced_a_loss_scale_logs_nothing(warnings_of):
    net = make_net()
    plain_steps(net, begin(net, loss_scale="none", multi_precision=True))
    assert warnings_of.messages == []


@pytest.mark.filterwarnings("ignore:Accumulating with float16 in optimizer")
def test_an_optimizer_that_makes_nan_of_float16_weights_is_refused_without_init_trainer_too():
    net = make_net()
    before = parameters_of(net)
    with pytest.raises(PrecisionError, match=r"Adam updates 2 float16 weights.*multi_precision"):
        plain_steps(net, gluon.Trainer(net.collect_params(), "adam"))
    assert_same_bits(parameters_of(net), before)


@pytest.mark.parametrize("multi_precision", [True, False])
@pytest.mark.filterwarnings("ignore:Accumulating with float16 in optimizer")
def test_a_trainer_from_before_the_cast_trains_as_one_from_after_it(multi_precision):
    weights = []
    for trainer_first in (True, False):
        mx.random.seed(0)
        net = after_steps(trainer_first, multi_precision=multi_precision)
        mpgluon.restore(net)
        weights.append(parameters_of(net))
    assert_same_bits(*weights)
