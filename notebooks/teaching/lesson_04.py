"""Lesson 04: pictures of which one quarter is brighter, and the exercises."""

from __future__ import annotations

from typing import Any

import mpgluon

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from teaching.exercises import Verdict, exercise, number_of

__all__ = ["make_images"]


def make_images(count: int, seed: int) -> tuple[NDArray, NDArray]:
    """Return pictures of whole numbers from 0 to 255, and which quarter of each is brighter.

    Their shapes are (count, 3, 8, 8), FP32, and (count,), int32; the quarters are 0 to 3.
    """
    random = np.random.default_rng(seed)
    quarters = random.integers(0, 4, count)
    pixels = random.integers(0, 192, (count, 3, 8, 8))
    for picture, quarter in zip(pixels, quarters):
        top, left = 4 * (quarter // 2), 4 * (quarter % 2)
        picture[:, top : top + 4, left : left + 4] += 64
    return mx.nd.array(pixels), mx.nd.array(quarters, dtype="int32")


@exercise("04.1")
def smallest_whose_exponential_overflows(answer: Any) -> Verdict:
    with np.errstate(over="ignore"):
        x = np.float16(number_of(answer, "no unit"))
        before = np.nextafter(x, np.float16(0))
        result, result_before = np.exp(x), np.exp(before)
    if np.isinf(x):
        return Verdict(False, f"{answer:g} is not an FP16 number: rounded to FP16 it is {x}.")
    if np.isfinite(result):
        return Verdict(False, f"In FP16 e^{float(x):g} is {result:g}, which is still finite.")
    if np.isinf(result_before):
        return Verdict(
            False,
            f"e^{float(x):g} is infinite in FP16, but so is e^{float(before):g}, and that is a "
            "smaller FP16 number.",
        )
    return Verdict(
        True,
        f"e^{float(x):g} is infinite in FP16. One FP16 number below, e^{float(before):g} is "
        f"{result_before:g}, the largest exponential that FP16 holds.",
    )


@exercise("04.2")
def sums_in_fp16(answer: Any) -> Verdict:
    if not callable(answer):
        raise TypeError(f"the answer is a function of inputs, weight and bias, received {answer!r}")
    growth = {}
    for width in (64, 4096):
        random = np.random.default_rng(0)
        inputs, weight = (random.standard_normal((n, width)).astype("float16") for n in (16, 32))
        bias = random.standard_normal(32).astype("float16")
        given = np.asarray(answer(inputs, weight, bias))
        if given.shape != (16, 32) or given.dtype != np.float16:
            return Verdict(
                False,
                f"For 16 rows of inputs and 32 of the weight it returns {given.dtype} of shape "
                f"{given.shape}, and not float16 of shape (16, 32).",
            )
        exact = inputs.astype("float64") @ weight.T.astype("float64") + bias
        fp32_sums = (inputs.astype("float32") @ weight.T.astype("float32") + bias).astype("float16")
        error, error_of_fp32 = (np.abs(sums - exact).mean() for sums in (given, fp32_sums))
        growth[width] = float(error / error_of_fp32)
    found = (
        f"The mean error is {growth[64]:.1f} times that of FP32 sums with 64 inputs, and "
        f"{growth[4096]:.1f} times with 4,096"
    )
    if not growth[4096] < 100:
        return Verdict(False, f"{found}. That is more than roundings do: is the result right?")
    if growth[64] < 2 or growth[4096] < 10:
        return Verdict(
            False,
            f"{found}: these sums are not FP16. NumPy adds FP16 numbers in FP32 in `@` and in "
            '`sum`; np.cumsum(…, dtype="float16") rounds after every addition.',
        )
    return Verdict(True, f"{found}. The longer an FP16 sum, the more it loses.")


class RootMeanSquare(nn.HybridBlock):
    """The lesson's own normalization: its product overflows in FP16."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803 - Gluon's name
        mean = F.mean(F.broadcast_mul(x, x), axis=(1, 2, 3), keepdims=True)
        return F.broadcast_div(x, F.sqrt(mean))


def _make_net() -> gluon.Block:
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1, in_channels=3), RootMeanSquare())
        net.add(nn.Activation("relu"), nn.Dense(4, in_units=8 * 8 * 8))
    net.initialize(mx.init.Xavier())
    return net


@exercise("04.3")
def one_operator_in_fp32(answer: Any) -> Verdict:
    if not isinstance(answer, str):
        raise TypeError(f"the answer is the name of an operator, as text, received {answer!r}")
    net, images = _make_net(), make_images(200, seed=1)[0]
    expected = net(images).asnumpy().argmax(axis=1)
    mpgluon.cast_block(net, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, answer))
    logits = net(images).asnumpy()
    agree = np.mean(logits.argmax(axis=1) == expected)
    found = f"With {answer} in FP32, {agree:.0%} of the answers are those of the FP32 network"
    if (logits == logits[0]).all():
        return Verdict(False, f"{found}: all pictures still get the same logits, {logits[0]}.")
    if answer.rpartition(":")[2] != "broadcast_mul":
        return Verdict(
            False,
            f"{found}. But that operator does not overflow: it makes FP32 numbers of what arrives "
            "at the one that does, and all its own work is in FP32 now.",
        )
    return Verdict(bool(agree > 0.95), f"{found}, and all other operators are cast as before.")
