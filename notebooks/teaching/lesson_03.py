"""The exercises of lesson 03: the effect of a loss scale on gradients, a run and one step."""

from __future__ import annotations

from typing import Any

import mpgluon

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon

from teaching.exercises import Verdict, exercise, number_of

_LARGEST = 60000.0  # the largest gradient of 03.1, times S
_SMALLEST = 2.0**-24  # one of the smallest, times S: FP16 can just hold it
_RUN = 3000  # steps of the run of 03.2
_CEILING = 2.0**20  # the largest scale at which none of its gradients overflows


@exercise("03.1")
def divisor_for_the_sum(answer: Any) -> Verdict:
    divisor = number_of(answer, "the divisor of S")
    if divisor <= 0:
        return Verdict(False, f"S divided by {divisor:g} is not a positive number.")
    scale = 2.0**19
    try:
        mpgluon.StaticLossScale(scale / divisor)
    except ValueError as error:
        return Verdict(False, f"mpgluon refuses 2^19 / {divisor:g} as a scale: {error}.")
    with np.errstate(over="ignore"):
        largest = float(np.float16(_LARGEST * 40 / divisor))
    if np.isinf(largest):
        return Verdict(
            False,
            f"60000 x 40 / {divisor:g} is {_LARGEST * 40 / divisor:g}, in FP16 infinity: each "
            "step overflows and is skipped.",
        )
    smallest = float(np.float16(_SMALLEST * 40 / divisor))
    if divisor > 64:
        kept = "zero" if smallest == 0 else f"{smallest:.2g}, with fewer digits than necessary"
        return Verdict(
            False,
            f"Nothing overflows: the largest gradient is now {largest:g}. But 64 would do, and "
            f"what was 2^-24 is now {kept}.",
        )
    return Verdict(True, f"The largest gradient is now {largest:g}; half of {divisor:g} overflows.")


@exercise("03.2")
def interval_of_a_short_run(answer: Any) -> Verdict:
    interval = number_of(answer, "steps")
    if interval < 1 or interval != int(interval):
        raise TypeError(f"a growth_interval is a whole number of steps, received {answer!r}")
    dynamic = mpgluon.DynamicLossScale(init_scale=2.0**16, growth_interval=int(interval))
    arrived, skips, after_1000 = None, 0, 0.0
    for step in range(1, _RUN + 1):
        finite = dynamic.scale <= _CEILING
        skips += not finite
        dynamic.update(grads_finite=finite)
        if arrived is None and dynamic.scale >= _CEILING:
            arrived = step
        if step == 1000:
            after_1000 = dynamic.scale
    if arrived is None or arrived > 1000:
        later = f"it gets there in step {arrived}" if arrived else "it never gets there"
        return Verdict(
            False,
            f"After 1,000 steps S is 2^{np.log2(after_1000):.0f}; {later}, and ends at "
            f"2^{np.log2(dynamic.scale):.0f} after {_RUN:,}.",
        )
    found = f"S gets there in step {arrived}, and then {skips} of the {_RUN:,} steps are skipped"
    if interval == 250:
        return Verdict(True, f"{found}.")
    return Verdict(False, f"{found}. A longer interval is early enough too, and skips fewer steps.")


@exercise("03.3")
def one_step_by_hand(answer: Any) -> Verdict:
    if not callable(answer):
        raise TypeError(f"the answer is a function (net, loss_of, trainer, S), received {answer!r}")
    expected = _fp32_step()
    weights, following = _fp16_step(answer, 2.0**16)
    if not weights.any():
        return Verdict(
            False, "The weights do not move: all of their gradients are below 2^-25, so zero."
        )
    ratio = float(np.median(weights / expected))
    if not np.allclose(weights, expected, rtol=2.0**-8):
        return Verdict(
            False, f"With S = 65536 the weights move {ratio:.3g} times as far as in FP32."
        )
    if following != 2.0**16:
        return Verdict(
            False,
            f"A step without an overflow changes S from 65536 to {following!r}; it should stay.",
        )
    weights, following = _fp16_step(answer, 2.0**45)
    if weights.any():
        return Verdict(
            False,
            f"With S = 2^45 the gradients overflow, and the weights become {weights.ravel()}: the "
            "step was not skipped.",
        )
    if following != 2.0**44:
        words = (
            "S stays as it is, and overflows again" if following == 2.0**45 else f"{following!r}"
        )
        return Verdict(False, f"After an overflow S = 2^45 has to become 2^44. Here: {words}.")
    return Verdict(
        True,
        "In FP16 the weights move as far as in FP32; an overflow leaves them alone and halves S.",
    )


_X = np.array([[1, 2, -1], [0.5, -1, 3]], dtype=np.float32)
_TARGET = np.array([[4], [-2]], dtype=np.float32)
_SMALL = 2.0**-28  # a factor that makes each gradient smaller than FP16's smallest number
_RATE = 2.0**24


def _loss_of(net: gluon.Block) -> Any:
    squared = gluon.loss.L2Loss()(net(mx.nd.array(_X)), mx.nd.array(_TARGET))
    return squared.mean() * _SMALL


def _fp32_step() -> npt.NDArray[np.float32]:
    """Return weights of 0 after one step in FP32, from the formula of the gradient."""
    gradient = _SMALL * (0 - _TARGET).T @ _X / len(_X)
    return np.asarray(-_RATE * gradient)


def _fp16_step(step: Any, scale: float) -> tuple[npt.NDArray[np.float32], Any]:
    """Return the same weights after one step of the answer, and the scale that it returns."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(1, in_units=3, use_bias=False, weight_initializer="zeros"))
    net.initialize()
    mpgluon.cast_block(net)
    options = {"learning_rate": _RATE, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    following = step(net, _loss_of, trainer, scale)
    (weight,) = net.collect_params().values()
    return weight.data().astype("float32").asnumpy(), following
