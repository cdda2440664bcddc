"""A training loop as gluoncv's scripts write it, made float16 by the lines that a user changes."""

from __future__ import annotations

import mpgluon
from mpgluon import amp

import gluoncv
import mxnet as mx
import numpy as np
import pytest
from gluoncv.utils import LRScheduler
from mxnet import autograd, gluon
from third_party_helpers import FLOAT16

pytestmark = pytest.mark.third_party

DEVICES = [mx.cpu(0), mx.cpu(1)]
BATCH_SIZE, BATCHES, EPOCHS, CLASSES = 16, 3, 2, 10


def batches():
    random = np.random.default_rng(0)
    for _ in range(BATCHES):
        labels = random.integers(0, CLASSES, BATCH_SIZE)
        images = random.standard_normal((BATCH_SIZE, 3, 32, 32))
        images[:, 0] += labels[:, None, None] / 2  # something to learn
        yield mx.nd.array(images), mx.nd.array(labels)


def train(way="FP32", hybridize=False, noise=0.0):
    """Return the mean loss of each batch."""
    mx.random.seed(0)
    np.random.seed(0)
    net = gluoncv.model_zoo.get_model("cifar_resnet20_v1", classes=CLASSES)
    net.initialize(mx.init.Xavier(), ctx=DEVICES)
    net(mx.nd.zeros((1, 3, 32, 32), ctx=DEVICES[0]))
    mx.nd.waitall()
    random = np.random.default_rng(1)
    for parameter in net.collect_params(".*weight|.*gamma").values():
        changed = 1 + noise * random.uniform(-1, 1, parameter.shape)
        parameter.set_data(parameter.data(DEVICES[0]) * mx.nd.array(changed))
    float16 = way in FLOAT16
    if float16:
        FLOAT16[way](net)  # changed
    net.hybridize(hybridize)
    schedule = LRScheduler("poly", base_lr=0.05, nepochs=EPOCHS, iters_per_epoch=BATCHES, power=2)
    options = {"lr_scheduler": schedule, "momentum": 0.9, "wd": 1e-4}
    if way == "cast":
        options["multi_precision"] = True  # changed
    trainer = gluon.Trainer(net.collect_params(), "nag", options)
    if float16:
        amp.init_trainer(trainer, mpgluon.DynamicLossScale(init_scale=2.0**8))  # changed
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    metric, means = mx.metric.Accuracy(), []
    for _ in range(EPOCHS):
        metric.reset()
        for images, labels in batches():
            data = gluon.utils.split_and_load(images, ctx_list=DEVICES, batch_axis=0)
            label = gluon.utils.split_and_load(labels, ctx_list=DEVICES, batch_axis=0)
            with autograd.record():
                output = [net(one) for one in data]
                loss = [loss_fn(one, truth) for one, truth in zip(output, label)]
                if float16:
                    with amp.scale_loss(loss, trainer) as scaled_loss:  # changed
                        autograd.backward(scaled_loss)
            if not float16:
                for one in loss:
                    one.backward()
            trainer.step(BATCH_SIZE)
            assert not float16 or not amp.step_was_skipped(trainer)
            metric.update(label, output)
            means.append(np.mean([one.mean().asscalar() for one in loss]))
    assert trainer.learning_rate < 0.05
    assert metric.num_inst == BATCHES * BATCH_SIZE
    return np.array(means)


@pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])
@pytest.mark.parametrize("way", FLOAT16)
def test_gluoncvs_loop_on_two_devices_trains_in_float16_like_fp32(way, hybridize):
    fp32 = train()
    changed = train(noise=2.0**-12)
    found = train(way, hybridize)
    assert np.isfinite(found).all()
    assert fp32[BATCHES:].mean() < fp32[:BATCHES].mean()
    assert found[BATCHES:].mean() < found[:BATCHES].mean()
    # third_party_helpers.check says why 4.
    assert np.linalg.norm(found - fp32) < 4 * np.linalg.norm(changed - fp32)
