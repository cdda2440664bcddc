"""``gluon.contrib.estimator``: ``fit`` trains as a loop with a scaled loss does."""

import logging
import math

import mpgluon
from mpgluon import DynamicLossScale, TrainerStateError, amp

import mxnet as mx
import numpy as np
import pytest
from helpers import assert_same_bits
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.estimator import BatchEnd, Estimator

ONE, TWO = [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]
BATCH_SIZE, BATCHES = 4, 5
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def make(way, devices, loss_scale):
    mx.random.seed(0)
    np.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Dense(8, in_units=3, activation="relu"), nn.Dense(2, in_units=8))
    net.initialize(mx.init.Normal(0.5), ctx=devices)
    if way == "cast":
        mpgluon.cast_block(net)
    elif way == "autocast":
        amp.autocast(net, "float16")
    net.hybridize()
    options = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options, update_on_kvstore=False)
    if loss_scale is not None:
        amp.init_trainer(trainer, loss_scale)
    return net, trainer


def data():
    random = np.random.default_rng(0)
    images = random.standard_normal((BATCHES * BATCH_SIZE, 3)).astype(np.float32)
    labels = (images.sum(axis=1) > 0).astype(np.int32)
    return gluon.data.DataLoader(gluon.data.ArrayDataset(images, labels), BATCH_SIZE)


def estimator_of(net, trainer, devices, **options):
    metrics = [mx.metric.Accuracy()]
    options.setdefault("batch_processor", mpgluon.estimator.BatchProcessor())
    estimator = Estimator(net, LOSS, metrics, trainer=trainer, context=devices, **options)
    estimator.logger.setLevel(logging.ERROR)  # it prints a line for each batch
    return estimator


def weights(net):
    return [one.asnumpy() for p in net.collect_params().values() for one in p.list_data()]


def by_hand(way, devices, loss_scale):
    net, trainer = make(way, devices, loss_scale)
    for images, labels in data():
        parts = zip(*(gluon.utils.split_and_load(one, devices) for one in (images, labels)))
        with autograd.record():
            losses = [LOSS(net(image), label) for image, label in parts]
            with amp.scale_loss(losses, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(BATCH_SIZE)
    return weights(net)


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one device", "two devices"])
@pytest.mark.parametrize("way", ["float32", "cast", "autocast"])
def test_fit_gives_the_weights_of_a_loop_by_hand(way, devices):
    net, trainer = make(way, devices, DynamicLossScale(64, growth_interval=2))
    estimator = estimator_of(net, trainer, devices)
    losses = []

    class Keep(BatchEnd):
        def batch_end(self, estimator, *args, **kwargs):
            losses.extend(loss.mean().asscalar() for loss in kwargs["loss"])

    estimator.fit(data(), epochs=1, event_handlers=[Keep()])
    assert_same_bits(weights(net), by_hand(way, devices, 64))
    assert amp.loss_scale(trainer) == 256  # doubled after two of five steps, and after four
    assert len(losses) == BATCHES * len(devices)
    assert all(0 < loss < 4 for loss in losses)  # as they were before they were scaled


def test_an_overflow_skips_its_batch_and_validation_goes_on():
    class Spoil(BatchEnd):
        """Comes between backward and the step."""

        priority = -3000

        def __init__(self):
            self.batch = 0

        def batch_end(self, estimator, *args, **kwargs):
            self.batch += 1
            if self.batch == 2:
                estimator.net[0].weight.grad()[0, 0] = math.inf

    net, trainer = make("cast", ONE, DynamicLossScale(64))
    estimator = estimator_of(net, trainer, ONE)
    estimator.fit(data(), val_data=data(), epochs=1, event_handlers=[Spoil()])
    assert (amp.skipped_steps(trainer), amp.loss_scale(trainer)) == (1, 32)
    assert trainer.optimizer.num_update == BATCHES - 1
    accuracy = next(m for m in estimator.val_metrics if "accuracy" in m.name)
    assert accuracy.get()[1] > 0


def test_an_estimator_without_a_batch_processor_trains_unscaled_and_warns_once(caplog):
    net, trainer = make("autocast", ONE, 64)
    estimator = estimator_of(net, trainer, ONE, batch_processor=None)
    estimator.fit(data(), epochs=1)
    (message,) = caplog.messages
    assert "batch_processor=mpgluon.estimator.BatchProcessor()" in message
    control, other = make("autocast", ONE, "none")
    estimator_of(control, other, ONE).fit(data(), epochs=1)
    assert_same_bits(weights(net), weights(control))


def test_a_trainer_without_a_loss_scale_is_refused_at_the_first_batch():
    net, trainer = make("cast", ONE, None)
    with pytest.raises(TrainerStateError, match=r"call amp\.init_trainer\(trainer\) right after"):
        estimator_of(net, trainer, ONE).fit(data(), epochs=1)
