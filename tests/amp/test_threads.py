"""Trainings in several threads, each with its own Trainer, as plain Gluon allows them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier, Event

import mpgluon
from mpgluon import DynamicLossScale, Policy, TrainerStateError, amp, kernels

import mxnet as mx
import numpy as np
import pytest
from amp_helpers import BATCH_SIZE, LOSS, batches, make_net, make_trainer, weights
from helpers import assert_same_bits, in_sequence
from mxnet import autograd, gluon
from mxnet.gluon import nn

DELAYED = "compute=float8_e4m3,gradient=float8_e5m2,between=bfloat16,scaling=tensor,amax_history=4"
KINDS = {
    "float16 weights": lambda net: mpgluon.cast_block(net),
    "bfloat16 weights": lambda net: mpgluon.cast_block(net, "bfloat16"),
    "float16": lambda net: amp.autocast(net),
    "bfloat16": lambda net: amp.autocast(net, "bfloat16"),
    "delayed scales": lambda net: amp.autocast(net, Policy.parse(DELAYED)),
}


def run_in_threads(*works):
    """Run functions at once, each in a thread of its own, and return their results in order."""
    start = Barrier(len(works))

    def run(work):
        start.wait(60)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works, timeout=120))


def make(seed, kind, hybridize):
    rng = np.random.default_rng(seed)
    net = in_sequence(
        *(nn.Conv2D(4, 3, in_channels=2), nn.BatchNorm(in_channels=4), nn.Activation("relu")),
        *(nn.Dense(16, in_units=64), nn.Dense(5, in_units=16)),
    )
    net.initialize()
    for parameter in net.collect_params(".*weight").values():
        parameter.set_data(mx.nd.array(rng.normal(0, 0.3, parameter.shape)))
    KINDS[kind](net)
    net.hybridize(hybridize)
    optimizer = {"learning_rate": 0.05, "momentum": 0.9, "multi_precision": "weights" in kind}
    trainer = gluon.Trainer(net.collect_params(), "sgd", optimizer)
    amp.init_trainer(trainer, DynamicLossScale(2.0**12, growth_interval=3))
    return net, trainer


def train(seed, net, trainer, steps=15):
    rng, loss_fn = np.random.default_rng(seed), gluon.loss.SoftmaxCrossEntropyLoss()
    for _ in range(steps):
        images = mx.nd.array(rng.standard_normal((4, 2, 6, 6)))
        labels = mx.nd.array(rng.integers(0, 5, 4))
        with autograd.record(), amp.scale_loss(loss_fn(net(images), labels), trainer) as scaled:
            scaled.backward()
        trainer.step(4)
    values = [p.data().asnumpy() for p in net.collect_params().values()]
    return [*values, np.array([amp.loss_scale(trainer), amp.skipped_steps(trainer)])]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])
@pytest.mark.parametrize("made", ["in the main thread", "in its own thread"])
def test_each_of_several_threads_trains_to_the_bits_of_a_training_alone(made, hybridize):
    kinds = [*KINDS, "float16 weights"]
    if not kernels.load():
        kinds.remove("delayed scales")
    expected = [train(seed, *make(seed, kind, hybridize)) for seed, kind in enumerate(kinds)]
    for _ in range(3):
        works = []
        for seed, kind in enumerate(kinds):
            if made == "in the main thread":
                pair = make(seed, kind, hybridize)
                works.append(lambda seed=seed, pair=pair: train(seed, *pair))
            else:
                works.append(lambda seed=seed, kind=kind: train(seed, *make(seed, kind, hybridize)))
        for values, alone in zip(run_in_threads(*works), expected):
            assert_same_bits(values, alone)


@pytest.mark.slow
def test_the_main_thread_and_another_one_may_train_at_once_with_trainers_of_the_main_thread():
    expected = [train(seed, *make(seed, "float16 weights", False)) for seed in range(2)]
    for _ in range(5):
        pairs = [make(seed, "float16 weights", False) for seed in range(2)]
        with ThreadPoolExecutor(1) as pool:
            there = pool.submit(train, 1, *pairs[1])
            assert_same_bits(train(0, *pairs[0]), expected[0])
            assert_same_bits(there.result(60), expected[1])


@pytest.mark.parametrize("backward_there", ["before the block", "inside the block"])
@pytest.mark.parametrize("step_there", ["inside the block", "after the block"])
@pytest.mark.parametrize("scale", [None, "none", 8])
def test_another_threads_first_step_is_its_own_although_a_loss_is_being_scaled_here(
    backward_there, step_there, scale
):
    # The main thread has made both Trainers, so it watches the second until it is used elsewhere.
    images, targets = next(batches())
    here, there, alone = (make_net("float16") for _ in range(3))
    trainer_here = make_trainer(here, loss_scale=8)
    trainer_there, trainer_alone = (make_trainer(net, loss_scale=scale) for net in (there, alone))

    def backward(net, trainer):
        with autograd.record():
            loss = LOSS(net(images), targets)
            with nullcontext(loss) if scale is None else amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()

    with ThreadPoolExecutor(1) as pool:
        if backward_there == "before the block":
            pool.submit(backward, there, trainer_there).result(60)
        with autograd.record(), amp.scale_loss(LOSS(here(images), targets), trainer_here) as scaled:
            if backward_there == "inside the block":
                pool.submit(backward, there, trainer_there).result(60)
            scaled.backward()
            if step_there == "inside the block":
                pool.submit(trainer_there.step, BATCH_SIZE).result(60)
        if step_there == "after the block":
            pool.submit(trainer_there.step, BATCH_SIZE).result(60)
    trainer_here.step(BATCH_SIZE)
    backward(alone, trainer_alone)
    trainer_alone.step(BATCH_SIZE)
    assert_same_bits(weights(there), weights(alone))


def test_in_each_thread_a_step_on_gradients_of_another_trainers_loss_raises():
    # As of a generator and a discriminator; the main thread has made both Trainers.
    images, targets = next(batches())
    pairs = []
    for _ in range(3):
        net = make_net("float16")
        parts = [net[0].collect_params(), net[2].collect_params()]
        optimizer = {"learning_rate": 0.1, "multi_precision": True}
        trainers = [gluon.Trainer(part, "sgd", optimizer) for part in parts]
        for trainer in trainers:
            amp.init_trainer(trainer, 8)
        pairs.append((net, trainers))

    def step(net, trainers, named):
        with autograd.record(), amp.scale_loss(LOSS(net(images), targets), named) as scaled:
            scaled.backward()
        for trainer in trainers:
            trainer.step(BATCH_SIZE)

    def work(net, trainers):
        for _ in range(3):
            step(net, trainers, trainers)
        with pytest.raises(TrainerStateError, match="for another Trainer only"):
            step(net, trainers, trainers[:1])

    run_in_threads(*(lambda pair=pair: work(*pair) for pair in pairs))


@pytest.mark.slow
def test_a_loss_of_a_hybridized_network_leaves_tuples_alone_that_another_thread_is_making():
    ended = Event()

    def make_tuples():
        while not ended.is_set():
            assert len(tuple(number for number in range(1000))) == 1000

    def scale_losses():
        try:
            for seed in range(20):
                train(seed, *make(seed, "float16", hybridize=True), steps=1)
        finally:
            ended.set()

    run_in_threads(make_tuples, scale_losses)
