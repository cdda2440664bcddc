"""A loss scale that can shrink no further while every step overflows: said once, then an error."""

from __future__ import annotations

import logging
import math
import re

import mpgluon
from mpgluon import DynamicLossScale, LossScaleCollapseError, amp

import mxnet as mx
import numpy as np
import pytest
from helpers import backward_from, cast_net, initialized
from mxnet import gluon
from mxnet.gluon import nn

DEPTH = 12  # more than ten layers: by name, dense10 comes before dense2


def make_net(way="float32"):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(DEPTH):
            net.add(nn.Dense(2, in_units=2))
    net.initialize(mx.init.One())
    if way == "float16":
        mpgluon.cast_block(net)
    elif way != "float32":
        amp.autocast(net, way.split()[1])
    return net


def make_trainer(net, loss_scale, **options):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
    amp.init_trainer(trainer, loss_scale, **options)
    return trainer


def step(net, trainer, bad=(), value=math.nan):
    """Do one step; the weights' gradients of the layers in ``bad`` are not finite."""
    backward_from(lambda: net(mx.nd.ones((1, 2)) * 2.0**-14).sum(), trainer)
    for layer in bad:
        net[layer].weight.grad()[-1, -1] = value
    trainer.step(1)


def test_a_run_that_has_collapsed_warns_once_and_raises_after_max_consecutive_skips(caplog):
    net = make_net()
    trainer = make_trainer(net, DynamicLossScale(4.0), max_consecutive_skips=5)
    before = net[0].weight.data().asnumpy()
    with caplog.at_level(logging.WARNING, "mpgluon"):
        for _ in range(2):  # from 4 to the floor: no news
            step(net, trainer, bad=[3])
        assert amp.loss_scale(trainer) == 1
        step(net, trainer, bad=[3])
        assert caplog.messages == []
        for _ in range(3):
            step(net, trainer, bad=[3])
        (message,) = caplog.messages
        with pytest.raises(LossScaleCollapseError, match="5 steps in a row") as error:
            step(net, trainer, bad=[3])
        assert len(caplog.messages) == 1
    assert "2 steps in a row" in message
    for text in (message, str(error.value)):
        assert "the loss scale, 1, can shrink no further" in text
        assert "net_dense3_weight (float32, NaN, on cpu(0))" in text
    assert np.array_equal(net[0].weight.data().asnumpy(), before)
    assert amp.skipped_steps(trainer) == 7


def test_a_scale_that_is_stuck_at_its_smallest_warns_once_with_the_cure(caplog):
    net = make_net()
    trainer = make_trainer(net, DynamicLossScale(1.0, growth_interval=100))
    trainer.set_learning_rate(0.0)
    with caplog.at_level(logging.WARNING, "mpgluon"):
        for number in range(14):
            step(net, trainer, bad=[3] * (number % 2))
            assert len(caplog.messages) == (number >= 9)
    assert "5 steps were skipped at a loss scale of 1, which can shrink no" in caplog.messages[0]
    assert "DynamicLossScale(min_scale=2.0**-10)" in caplog.messages[0]


def test_where_no_step_is_good_a_smaller_scale_is_not_advised(caplog):
    net = make_net()
    trainer = make_trainer(net, DynamicLossScale(1.0))
    with caplog.at_level(logging.WARNING, "mpgluon"):
        for _ in range(9):
            step(net, trainer, bad=[3])
    (message,) = caplog.messages
    assert "2 steps in a row" in message


def test_a_finite_step_ends_the_count_and_a_second_collapse_warns_again(caplog):
    net = make_net()
    trainer = make_trainer(net, 8, max_consecutive_skips=3)
    with caplog.at_level(logging.WARNING, "mpgluon"):
        for _ in range(2):
            step(net, trainer, bad=[3])
            step(net, trainer, bad=[3])
            step(net, trainer)
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("way", ["float32", "float16", "auto float16", "auto bfloat16"])
@pytest.mark.parametrize("bad", [[10, 2], [11], [1, 0, 7]])
@pytest.mark.parametrize("hybridize", [False, True])
def test_the_first_bad_parameter_is_named_by_forward_order(way, bad, hybridize):
    net = make_net(way)
    net.hybridize(hybridize)
    trainer = make_trainer(net, 2.0**0, max_consecutive_skips=1)
    dtype = "float16" if way == "float16" else "float32"
    with pytest.raises(
        LossScaleCollapseError, match=rf"net_dense{min(bad)}_weight \({dtype}, infinite"
    ):
        step(net, trainer, bad, value=-math.inf)


def test_forward_order_is_that_of_the_calls_and_not_of_the_names_in_a_cast_network():
    class Backwards(nn.HybridSequential):
        def __init__(self):
            super().__init__(prefix="backwards_")
            with self.name_scope():
                self.add(nn.Dense(2, in_units=2, prefix="a_"), nn.Dense(2, in_units=2, prefix="b_"))

        def hybrid_forward(self, F, x):
            return self[0](self[1](x))

    net = cast_net(initialized(Backwards()))
    trainer = make_trainer(net, 1, max_consecutive_skips=1)
    with pytest.raises(LossScaleCollapseError, match="that of backwards_b_weight"):
        step(net, trainer, bad=[0, 1])


def test_the_count_survives_a_checkpoint(tmp_path):
    first, second = make_net(), make_net()
    trainers = [make_trainer(net, 1, max_consecutive_skips=3) for net in (first, second)]
    step(first, trainers[0], bad=[0])
    step(first, trainers[0], bad=[0])
    mpgluon.save_checkpoint(tmp_path / "c.npz", first, trainers[0])
    mpgluon.load_checkpoint(tmp_path / "c.npz", second, trainers[1])
    with pytest.raises(LossScaleCollapseError, match="3 steps in a row"):
        step(second, trainers[1], bad=[0])


@pytest.mark.parametrize("bad", ["weights", "gradients"])
def test_weights_are_named_as_the_cause_only_if_they_are_nan(bad):
    net = make_net("float16")
    trainer = make_trainer(net, 1, max_consecutive_skips=1)
    if bad == "weights":
        net[5].weight.data()[0, 0] = math.nan
    with pytest.raises(LossScaleCollapseError) as error:
        step(net, trainer, bad=[3] if bad == "gradients" else [])
    cause = re.search(
        r"Weights are not finite themselves, first net_dense5_weight \(float16, NaN, on cpu"
        r"\(0\)\), so no loss scale helps: .* without FP32 masters",
        str(error.value),
    )
    assert bool(cause) == ("Weights are not finite" in str(error.value)) == (bad == "weights")
    assert ("OverflowLocator" in str(error.value)) == (bad == "gradients")


def test_with_max_consecutive_skips_none_a_run_never_raises():
    net = make_net()
    trainer = make_trainer(net, 1, max_consecutive_skips=None)
    for _ in range(40):
        step(net, trainer, bad=[0])
    assert amp.skipped_steps(trainer) == 40


@pytest.mark.parametrize(
    ("value", "kind"),
    [(0, ValueError), (-1, ValueError)] + [(value, TypeError) for value in (1.5, "3", True)],
)
def test_a_max_consecutive_skips_that_is_not_a_number_of_steps_is_refused(value, kind):
    net = make_net()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with pytest.raises(kind, match="max_consecutive_skips must be"):
        amp.init_trainer(trainer, max_consecutive_skips=value)
    amp.init_trainer(trainer)  # nothing was changed
