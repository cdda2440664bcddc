"""The exercises of lesson 10: folding, leads of logits, and the share of rounded weights."""

from __future__ import annotations

from functools import cache
from typing import Any

from mpgluon import BFLOAT16, amp, round_to

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.gluon import nn

from teaching.exercises import Verdict, exercise, number_of

_LOGIT_ERROR = 0.25
_SHARE_TOLERANCE = 25  # points: eight trainings of the lesson had shares of 49 to 77 %


@exercise("10.1")
def fold_into_the_next_layer(answer: Any) -> Verdict:
    if not callable(answer):
        raise TypeError(
            "the answer is a function fold(weight, bias, gamma, beta, mean, variance, epsilon), "
            f"received {answer!r}"
        )
    random = np.random.default_rng(0)
    weight, bias = random.standard_normal((4, 8)), random.standard_normal(4)
    gamma, beta, mean = random.uniform(0.5, 2, 8), *random.standard_normal((2, 8))
    variance, epsilon = random.uniform(0.5, 2, 8), 1e-5
    variance[0] = 1e-5  # here epsilon counts
    inputs = mean + np.sqrt(variance) * random.standard_normal((100, 8))
    new_weight, new_bias = (
        np.asarray(one)
        for one in answer(*(a.copy() for a in (weight, bias, gamma, beta, mean, variance)), epsilon)
    )
    if new_weight.shape != (4, 8) or new_bias.shape != (4,):
        return Verdict(
            False,
            f"The weight must have the shape (4, 8) and the bias (4,), received {new_weight.shape} "
            f"and {new_bias.shape}.",
        )
    factor = gamma / np.sqrt(variance + epsilon)
    expected = ((inputs - mean) * factor + beta) @ weight.T + bias
    error = _relative(inputs @ new_weight.T + new_bias, expected)
    if error < 1e-5:
        return Verdict(
            True,
            f"Over 100 inputs one dense layer gives the numbers of both, to {error:.1e}: the "
            "factor goes into the columns of W, and beta - mean * factor through W into the bias.",
        )
    meaning = f"Over 100 inputs the outputs are wrong by up to {error:.2g} of the largest one. "
    without_epsilon = gamma / np.sqrt(variance)
    if np.allclose(new_weight, weight * without_epsilon, rtol=1e-5):
        meaning += (
            "One feature has a variance of 1e-5; there epsilon doubles what is under the root."
        )
    elif np.allclose(new_weight, weight * factor, rtol=1e-5):
        meaning += "The weight is right, and the bias is not: W must be applied to the summand."
    else:
        meaning += (
            "The weight is not W with its columns multiplied by gamma / sqrt(variance + eps)."
        )
    return Verdict(False, meaning)


@exercise("10.2")
def lead_that_is_enough(answer: Any) -> Verdict:
    lead = number_of(answer, "no unit")
    if lead < 0:
        return Verdict(False, f"A lead is not negative, and {lead:g} is.")
    tried = (lead + 2 * _LOGIT_ERROR) / 2  # between the answer and a sufficient value
    if lead < 2 * _LOGIT_ERROR:
        first, second = tried - _LOGIT_ERROR, _LOGIT_ERROR
        return Verdict(
            False,
            f"A lead of {tried:g} is larger than {lead:g}. The logits {tried:g} and 0 may become "
            f"{first:g} and {second:g}: the decision changes.",
        )
    if lead > 2 * _LOGIT_ERROR:
        first, second = tried - _LOGIT_ERROR, _LOGIT_ERROR
        return Verdict(
            False,
            f"With a lead above {lead:g} nothing can change, but it is not the smallest such "
            f"number. At a lead of {tried:g} the logits {tried:g} and 0 become {first:g} and "
            f"{second:g} at worst, and the decision stays.",
        )
    return Verdict(
        True,
        f"The logits {lead:g} and 0 may both become {_LOGIT_ERROR:g}, a tie. With any larger lead "
        "the first stays ahead.",
    )


@exercise("10.3")
def share_of_the_weights(answer: Any) -> Verdict:
    share = number_of(answer, "percent")
    by_weights, by_everything = _bfloat16_errors()
    found = 100 * by_weights / by_everything
    measured = (
        f"In a network with the lesson's layers and random weights the mean error is "
        f"{by_weights:.2g} with BF16 weights and {by_everything:.2g} with all in BF16: "
        f"{found:.0f} %"
    )
    if abs(share - found) > _SHARE_TOLERANCE:
        return Verdict(False, f"{measured}, and {share:.0f} % is another result.")
    return Verdict(
        True,
        f"{measured}. Independent errors add like the sides of a right-angled triangle: with "
        f"{found:.0f} % the rounding between the layers has "
        f"{np.sqrt(max(0.0, 1e4 - found**2)):.0f} %.",
    )


@cache
def _bfloat16_errors() -> tuple[float, float]:
    """Return the mean error of the logits with BF16 weights alone, and with all in BF16."""
    mx.random.seed(0)
    net = nn.HybridSequential()
    for before, after in ((3, 16), (16, 32), (32, 64)):
        net.add(nn.Conv2D(after, 3, padding=1, in_channels=before))
        net.add(nn.BatchNorm(in_channels=after), nn.Activation("relu"), nn.MaxPool2D())
    net.add(nn.Flatten(), nn.Dense(10, in_units=1024))
    net.initialize(mx.init.Xavier())
    images = mx.nd.random.normal(shape=(100, 3, 32, 32))
    exact = _logits(net, images)
    amp.autocast(net, "bfloat16")
    by_everything = np.abs(_logits(net, images) - exact).max(axis=1).mean()
    amp.restore(net)
    for layer in net:
        if isinstance(layer, (nn.Conv2D, nn.Dense)):
            weight = layer.weight.data().asnumpy()
            layer.weight.set_data(mx.nd.array(round_to(weight, BFLOAT16)))
    by_weights = np.abs(_logits(net, images) - exact).max(axis=1).mean()
    return float(by_weights), float(by_everything)


def _logits(net: gluon.HybridBlock, images: mx.nd.NDArray) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = net(images).asnumpy()
    return found


def _relative(found: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())
