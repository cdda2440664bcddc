"""Ways to train a network of MXNet's NumPy interface: the bits of the same network in mx.nd."""

from __future__ import annotations

import copy
import logging
import pickle

import mpgluon
from mpgluon import DynamicLossScale, amp, contrib_amp
from mpgluon.fp16_utils import (
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
)
from mpgluon.trainer import networks

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, assert_same_bits, backward_from, gradients_of, parameters_of
from interfaces import images_of, in_both, interface, made
from mxnet import autograd, gluon
from mxnet.gluon.contrib.estimator import Estimator

# MXNet's own split_and_load warns of its own call.
pytestmark = pytest.mark.filterwarnings("ignore:ndarray.as_in_context has been renamed")

CASTS = pytest.mark.parametrize("way", ["cast float16", "autocast bfloat16"])
TWO = [mx.cpu(0), mx.cpu(1)]
OPTIONS = {"learning_rate": 0.1, "momentum": 0.9}
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def without_dropout(net):
    net.drop._rate = 0
    return net


def labels_of(array):
    return array(np.arange(4), dtype="int32")


def trainer_of(net, **options):
    options = {**OPTIONS, "multi_precision": True, **options}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, DynamicLossScale(2.0**10, growth_interval=2))
    return trainer


def step(net, trainer, array, seed, *, devices=None, factor=1):
    images, labels = images_of(array, seed), labels_of(array)
    pairs = [(images, labels)]
    if devices is not None:
        pairs = zip(*(gluon.utils.split_and_load(one, devices) for one in (images, labels)))
    backward_from(lambda: [LOSS(net(image), label) * factor for image, label in pairs], trainer)


@CASTS
@BOTH
def test_gradients_that_accumulate_have_the_same_bits_and_a_skip_empties_them(way, hybridize):
    if hybridize and way == "autocast bfloat16":
        way = "emulated bfloat16"  # a graph in native bfloat16 stays in it between other layers

    def accumulated(array):
        net, results = without_dropout(made(way, hybridize)), []
        for parameter in net.collect_params().values():
            parameter.grad_req = "add" if parameter.grad_req == "write" else "null"
        trainer = trainer_of(net)
        for number in range(6):
            step(net, trainer, array, number, factor=np.inf if number == 2 else 1)
            if number % 2:
                results += gradients_of(net).values()
                trainer.step(8)
                results += gradients_of(net).values()
                net.collect_params().zero_grad()
        assert amp.skipped_steps(trainer) == 1
        return [*results, *parameters_of(net).values()]

    assert_same_bits(*in_both(accumulated))


def test_two_devices_train_to_the_same_bits():
    def trained(array):
        net = without_dropout(made())
        net.collect_params().reset_ctx(TWO)
        mpgluon.cast_block(net)
        trainer = trainer_of(net)
        for number in range(3):
            step(net, trainer, array, number, devices=TWO, factor=np.inf if number == 1 else 1)
            trainer.step(4)
        assert amp.skipped_steps(trainer) == 1
        arrays = [one for p in net.collect_params().values() for one in p.list_data()]
        return [array.asnumpy() for array in arrays]

    assert_same_bits(*in_both(trained))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
def test_bfloat16_weights_without_masters_train_and_go_on_to_the_same_bits(rounding, tmp_path):
    def begun():
        net = without_dropout(made())
        mpgluon.cast_block(net, "bfloat16")
        trainer = gluon.Trainer(net.collect_params(), "sgd", OPTIONS)
        amp.init_trainer(trainer, update_rounding=rounding)
        return net, trainer

    def trained(array):
        net, trainer = begun()
        for number in range(6):
            if number == 3:
                mpgluon.save_checkpoint(tmp_path / "c.npz", net, trainer)
                net, trainer = begun()
                mpgluon.load_checkpoint(tmp_path / "c.npz", net, trainer)
            step(net, trainer, array, number)
            trainer.step(4)
        return list(parameters_of(net).values())

    assert_same_bits(*in_both(trained))


def prepared(net):
    return mpgluon.prepare(net, "float16", "sgd", OPTIONS)


def initialized_by_contrib_amp(net):
    contrib_amp.init()
    trainer = gluon.Trainer(net.collect_params(), "sgd", OPTIONS)
    amp.init_trainer(trainer)
    return trainer


@pytest.mark.parametrize("begin", [prepared, initialized_by_contrib_amp])
def test_other_ways_to_begin_train_to_the_same_bits(begin, monkeypatch):
    monkeypatch.setattr(networks, "_requested", None)

    def trained(array):
        net = without_dropout(made())
        trainer = begin(net)
        for number in range(2):
            step(net, trainer, array, number)
            trainer.step(4)
        return list(parameters_of(net).values())

    assert_same_bits(*in_both(trained))


def test_a_loop_with_masters_by_hand_trains_to_the_same_bits():
    def trained(array):
        net = network_to_half(without_dropout(made()))
        model_params, master_params = prep_param_lists(net)
        trainer = gluon.Trainer(master_params, "sgd", OPTIONS)
        for number in range(2):
            with autograd.record():
                loss = LOSS(net(images_of(array, number)), labels_of(array)) * 128
            autograd.backward(loss)
            model_grads_to_master_grads(model_params, master_params)
            trainer.step(4 * 128)
            master_params_to_model_params(model_params, master_params)
        return [*parameters_of(net).values(), *(p.data().asnumpy() for p in master_params)]

    assert_same_bits(*in_both(trained))


def test_an_estimator_trains_to_the_same_bits():
    def trained(array):
        net = without_dropout(made("cast float16"))
        trainer = trainer_of(net)
        images = images_of(array, count=8).asnumpy()
        data = gluon.data.ArrayDataset(images, np.arange(8, dtype=np.int32))
        estimator = Estimator(
            net,
            LOSS,
            [mx.metric.Accuracy()],
            trainer=trainer,
            context=[mx.cpu()],
            batch_processor=mpgluon.estimator.BatchProcessor(),
        )
        estimator.logger.setLevel(logging.ERROR)
        batches = gluon.data.DataLoader(data, 4)
        estimator.fit(batches, val_data=batches, epochs=1)
        metrics = [*estimator.train_metrics, *estimator.val_metrics]
        return [np.array(metric.get()[1]) for metric in metrics] + list(parameters_of(net).values())

    assert_same_bits(*in_both(trained))


@BOTH
def test_copies_and_pickles_compute_the_same_bits(hybridize):
    with interface(in_numpy=True) as array:
        net, images = made("cast float16", hybridize), images_of(array)
        expected = net(images)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            result = other(images)
            assert isinstance(result, mx.np.ndarray)
            assert_same_bits([result.asnumpy()], [expected.asnumpy()])
