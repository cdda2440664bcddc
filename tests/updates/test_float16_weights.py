"""Float16 weights that an optimizer without FP32 masters updates, or that MXNet cannot compute."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import mpgluon
from mpgluon import PrecisionError, amp
from mpgluon.diagnostics.optimizers import optimizer_names
from mpgluon.updates.weight_findings import obstacle_without_masters

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.base import MXNetError
from mxnet.gluon import nn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
# Whether it works without masters, by name: the first column of figures on the page.
WITHOUT_MASTERS = {
    cells[0]: cells[1] not in ("raises", "NaN")
    for line in PAGE.read_text().splitlines()
    if (cells := [cell.strip() for cell in line.strip("| ").split("|")])[0] in optimizer_names()
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
    assert sorted(WITHOUT_MASTERS) == optimizer_names()
    assert set(WITHOUT_MASTERS.values()) == {True, False}


@pytest.mark.parametrize("name", optimizer_names())
def test_an_optimizer_that_cannot_work_without_masters_is_refused_and_others_are_warned_of(
    name, warnings_of
):
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
