"""Gradients of several devices are summed in FP32."""

from __future__ import annotations

from mpgluon import amp, cast_block
from mpgluon.updates import gluon_trainer

import mxnet as mx
import numpy as np
import pytest
from helpers import initialized, with_loss_scale
from mxnet import autograd, gluon

FOUR = [mx.cpu(place) for place in range(4)]


def step(gradients, **options):
    """Make a step with one gradient of a FP16 weight on each device; return Trainer and weight."""
    net = gluon.nn.Dense(1, in_units=gradients.shape[1], use_bias=False)
    net.initialize(mx.init.Zero(), ctx=FOUR)
    cast_block(net)
    settings = {"learning_rate": 1.0, "multi_precision": True}
    trainer = with_loss_scale(gluon.Trainer(net.collect_params(), "sgd", settings, **options), 1.0)
    with autograd.record():
        losses = [
            net(mx.nd.array(row[None], ctx=device, dtype="float16")).astype("float32").sum()
            for row, device in zip(gradients, FOUR)
        ]
        with amp.scale_loss(losses, trainer) as scaled_losses:
            autograd.backward(scaled_losses)
    trainer.step(1)
    return trainer, net.weight


@pytest.mark.parametrize("kvstore", ["device", "local"])
def test_a_sum_of_fp16_gradients_is_rounded_once(kvstore):
    gradients = np.random.default_rng(0).normal(size=(4, 500)).astype("float16")
    gradients[:, 0] = 2048, 1, 1, 1
    gradients[:, 1] = 60000, 60000, -60000, 8
    _, weight = step(gradients, kvstore=kvstore)
    expected = gradients.astype("float32").sum(axis=0).astype("float16")
    assert expected[0] == 2052
    for device in FOUR:
        np.testing.assert_array_equal(weight.grad(device).asnumpy()[0], expected)
        np.testing.assert_array_equal(weight.data(device).asnumpy()[0], -expected)


@pytest.mark.parametrize("kvstore", ["device", "local"])
def test_a_sum_of_fp16_gradients_that_are_stored_as_rows_is_rounded_once(kvstore):
    net = gluon.nn.Embedding(5, 1, sparse_grad=True)
    net.initialize(mx.init.Zero(), ctx=FOUR)
    cast_block(net)
    settings = {"learning_rate": 1.0, "multi_precision": True}
    options = {"kvstore": kvstore, "update_on_kvstore": False}
    trainer = with_loss_scale(gluon.Trainer(net.collect_params(), "sgd", settings, **options), 1.0)
    gradients = [[[1, 2048], [2, 1]], [[1, 1]], [[4, 3], [1, 1]], [[1, 1]]]  # rows and numbers
    with autograd.record():
        losses = []
        for device, of_device in zip(FOUR, (np.array(one).T for one in gradients)):
            rows, values = (mx.nd.array(one, ctx=device) for one in of_device)
            losses.append((net(rows).astype("float32").reshape(-1) * values).sum())
        with amp.scale_loss(losses, trainer) as scaled_losses:
            autograd.backward(scaled_losses)
    trainer.step(1)
    for device in FOUR:
        gradient = net.weight.grad(device)
        assert (gradient.stype, gradient.dtype) == ("row_sparse", np.float16)
        assert gradient.asnumpy().ravel().tolist() == [0, 2052, 1, 0, 3]
        assert net.weight.data(device).asnumpy().ravel().tolist() == [0, -2052, -1, 0, -3]


def test_a_sum_that_overflows_skips_the_step_on_all_devices():
    trainer, weight = step(np.full((4, 3), 20000.0))
    assert amp.step_was_skipped(trainer)
    assert all((weight.data(device).asnumpy() == 0).all() for device in FOUR)


def test_a_kvstore_that_compresses_gradients_is_left_alone():
    net = initialized(gluon.nn.Dense(1, in_units=3), ctx=FOUR)
    compression = {"type": "2bit", "threshold": 0.5}
    trainer = gluon.Trainer(net.collect_params(), "sgd", compression_params=compression)
    gluon_trainer.begin(trainer)
    assert gluon_trainer.reduces_gradients(trainer)
    assert not gluon_trainer.sums_locally(trainer)


def test_the_trainer_has_its_own_kvstore_back_also_after_an_error(monkeypatch):
    trainer, _ = step(np.ones((4, 3)))
    kvstore = trainer._kvstore
    assert type(kvstore) is mx.kvstore.KVStore

    def fail(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(gluon.Parameter, "list_grad", fail)
    with pytest.raises(RuntimeError):
        trainer.allreduce_grads()
    assert trainer._kvstore is kvstore
