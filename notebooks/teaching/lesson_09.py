"""The exercises of lesson 09: accumulated parts, gradients in true units, two losses."""

from __future__ import annotations

from typing import Any

import mpgluon
from mpgluon import amp

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon

from teaching.exercises import Verdict, exercise, number_of

_RANDOM = np.random.default_rng(9)
_X = _RANDOM.normal(size=(64, 3)).astype(np.float32)
_Y = _RANDOM.normal(3, 1, size=(64, 1)).astype(np.float32)
_WEIGHT = np.array([[1, -0.5, 0.25]], dtype=np.float32)
_SCALE = 2.0**8
_RATE = 0.25


@exercise("09.1")
def batch_size_of_four_parts(answer: Any) -> Verdict:
    batch_size = number_of(answer, "images")
    if batch_size <= 0:
        return Verdict(False, f"A batch of {batch_size:g} images is refused.")
    net, trainer = _network()
    for parameter in net.collect_params().values():
        parameter.grad_req = "add"
    for part in range(0, 64, 16):
        with autograd.record():
            loss = _squared_error(net, slice(part, part + 16))
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
    norm = amp.clip_global_norm(trainer, 100.0, batch_size)
    trainer.step(batch_size)
    expected = float(np.linalg.norm(_gradient_of_error()))
    found = (
        f"The four parts give a norm of {norm:.3g}, the whole batch one of {expected:.3g}; the "
        f"weights move {_moved(net) / (_RATE * expected):.3g} times as far"
    )
    if np.isclose(norm, expected, rtol=0.01):
        return Verdict(True, f"{found}.")
    return Verdict(False, f"{found}. The step divides a sum over all images by {batch_size:g}.")


@exercise("09.2")
def largest_gradient(answer: Any) -> Verdict:
    if not callable(answer):
        raise TypeError(f"the answer is a function (net, trainer, batch_size), received {answer!r}")
    true = float(np.abs(_gradient_of_error()).max())
    for factor in (1.0, 2.0**-30):
        net, trainer = _network()
        with autograd.record():
            loss = _squared_error(net) * factor
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        found, expected = number_of(answer(net, trainer, 64), "the largest gradient"), true * factor
        if not np.isclose(found, expected, rtol=2.0**-8, atol=0):
            return Verdict(
                False,
                f"With S = {_SCALE:g} and 64 images it returns {found:.4g}, the true value is "
                f"{expected:.4g}: {_cause(found / expected)}.",
            )
    return Verdict(
        True, f"It returns {found:.4g}, the true value, also below the smallest number of FP16."
    )


def _cause(ratio: float) -> str:
    for factor, words in (
        (_SCALE * 64, "it is not divided by S, nor by the batch size"),
        (_SCALE, "it is not divided by S"),
        (64.0, "it is not divided by the batch size"),
        (1 / _SCALE, "it is divided by S twice"),
    ):
        if np.isclose(ratio, factor, rtol=0.01, atol=0):
            return words
    if ratio == 0:
        return "FP16 cannot hold it"
    if 0.5 < ratio < 2:
        return "it was rounded to FP16 on the way"
    return f"that is {ratio:.4g} times as much"


@exercise("09.3")
def step_of_two_losses(answer: Any) -> Verdict:
    if not callable(answer):
        raise TypeError(
            f"the answer is a function (net, trainer, losses_of, batch_size), received {answer!r}"
        )
    net, trainer = _network()
    answer(net, trainer, _two_losses, 64)
    (weight,) = net.collect_params().values()
    moved = (weight.data().astype("float32").asnumpy() - _WEIGHT).ravel() / -_RATE
    gradients = np.stack([_gradient_of_error().ravel(), _gradient_of_size().ravel()], axis=1)
    shares = np.linalg.lstsq(gradients, moved, rcond=None)[0]
    first, second = (abs(round(float(share), 2)) for share in shares)
    found = (
        f"The weights move by {first:g} times the gradient of the first loss plus {second:g} times "
        "that of the second"
    )
    if np.allclose(shares, 1, atol=0.02):
        return Verdict(True, f"{found}.")
    if second == 1 and first == 0:
        found += ": the second backward has replaced the gradients of the first"
    return Verdict(False, f"{found}.")


def _network() -> tuple[gluon.Block, gluon.Trainer]:
    """Return one layer of three weights in FP16, and its Trainer with a static scale."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(1, in_units=3, use_bias=False))
    net.initialize()
    net[0].weight.set_data(mx.nd.array(_WEIGHT))
    mpgluon.cast_block(net)
    options = {"learning_rate": _RATE, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, _SCALE)
    return net, trainer


def _squared_error(net: gluon.Block, part: slice = slice(None)) -> Any:
    return gluon.loss.L2Loss()(net(mx.nd.array(_X[part])), mx.nd.array(_Y[part]))


def _two_losses(net: gluon.Block) -> list[Any]:
    outputs = net(mx.nd.array(_X))
    return [gluon.loss.L2Loss()(outputs, mx.nd.array(_Y)), 0.5 * (outputs**2).mean(axis=1)]


def _gradient_of_error() -> npt.NDArray[np.float32]:
    """Return the gradient of the mean of half the squared errors, from its formula."""
    return np.asarray((_X @ _WEIGHT.T - _Y).T @ _X / len(_X))


def _gradient_of_size() -> npt.NDArray[np.float32]:
    """Return the gradient of the mean of half the squared outputs, from its formula."""
    return np.asarray((_X @ _WEIGHT.T).T @ _X / len(_X))


def _moved(net: gluon.Block) -> float:
    (weight,) = net.collect_params().values()
    return float(np.linalg.norm(weight.data().astype("float32").asnumpy() - _WEIGHT))
