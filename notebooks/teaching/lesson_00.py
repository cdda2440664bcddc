"""The exercises of lesson 00: how a loss scale begins, and the three changes to an FP32 loop."""

from __future__ import annotations

from typing import Any

import mpgluon
from mpgluon import amp

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from teaching.exercises import Verdict, exercise, number_of

_LARGEST = 3  # the gradient of exercise 00.1, before it is multiplied by S
_STEPS = 40  # of exercise 00.2; the first ones are skipped, since S begins too high


@exercise("00.1")
def steps_until_the_scale_fits(answer: Any) -> Verdict:
    value = number_of(answer, "steps")
    scale = mpgluon.DynamicLossScale()
    begin, skipped = scale.scale, 0
    with np.errstate(over="ignore"):
        while np.isinf(np.float16(_LARGEST * scale.scale)):
            scale.update(grads_finite=False)
            skipped += 1
    if value == skipped:
        return Verdict(
            True,
            f"After {skipped} skipped steps S is {scale.scale:g}, and the largest gradient is "
            f"{_LARGEST * scale.scale:g}, which FP16 holds.",
        )
    if value < 0 or value != int(value):
        return Verdict(False, f"{value:g} is not a number of steps.")
    then = begin / 2**value
    steps = "step" if value == 1 else "steps"
    gradient = f"After {value:g} skipped {steps} S is {then:g}, and the largest gradient is "
    if value < skipped:
        return Verdict(False, f"{gradient}{_LARGEST * then:g}: that still overflows in FP16.")
    return Verdict(
        False, f"{gradient}{_LARGEST * then:g}. But with S = {scale.scale:g} it fits already."
    )


def _make_net() -> gluon.Block:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(4, in_units=8, weight_initializer=mx.init.One()))
        net.add(nn.BatchNorm(in_channels=4), nn.Dense(1, in_units=4))
    mx.random.seed(0)
    net.initialize(mx.init.Xavier())
    return net


@exercise("00.2")
def three_changes(answer: Any) -> Verdict:
    if not callable(answer):
        raise TypeError(f"the answer is a function of a network, received {answer!r}")
    net = _make_net()
    try:
        trainer = answer(net)
        return _train(net, trainer)
    except mpgluon.TrainerStateError as error:
        return Verdict(False, f"Change 3 is missing: {error}.")
    except mpgluon.PrecisionError as error:
        return Verdict(False, f"Change 2 is missing: {error}.")


def _train(net: gluon.Block, trainer: Any) -> Verdict:
    """Train the small network with an answer's Trainer; it raises if change 2 or 3 is missing."""
    if not isinstance(trainer, gluon.Trainer) or not isinstance(
        trainer.optimizer, mx.optimizer.Adam
    ):
        return Verdict(False, f"It returns {trainer!r}, and not a gluon.Trainer with Adam.")
    weight = net[0].weight
    if (dtype := np.dtype(weight.dtype)) != np.float16:
        return Verdict(False, f"Change 1 is missing: the weights are still {dtype.name}.")
    random = np.random.default_rng(0)
    images, targets = (mx.nd.array(random.standard_normal((16, n))) for n in (8, 1))
    loss_fn = gluon.loss.L2Loss()
    for _ in range(_STEPS):
        with autograd.record():
            loss = loss_fn(net(images), targets)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(16)
    moved = float(np.mean(weight.data().asnumpy() != 1))
    steps = _STEPS - amp.skipped_steps(trainer)
    rate, spacing = trainer.learning_rate, float(np.spacing(np.float16(0.9)))
    found = f"After {steps} updates by about {rate:g}, {moved:.0%} of the weights have left 1"
    return Verdict(
        moved > 0.5,
        f"{found}, though FP16's next number is {spacing:.5f} away: the masters collect the "
        "updates."
        if moved > 0.5
        else f"{found}: FP16's next number is {spacing:.5f} away.",
    )
