"""The exercises of lesson 05: luck in a test, the loss scale's interval, weights from a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mpgluon
from mpgluon import amp
from mpgluon.checkpoint import read_parameters

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from teaching.exercises import Verdict, exercise, number_of

ACCURACY, DIFFERENCE, PAIRS = 0.7, 0.02, 20_000
STEPS, HIGHEST_SCALE = 2000, 2.0**13
BAD_STEPS, SCALE_OF_BAD_STEPS, BACK_BY = range(1000, 1003), 2.0**10, 1300


@exercise("05.1")
def enough_test_images(answer: Any) -> Verdict:
    images = round(number_of(answer, "test images"))
    if images < 1:
        return Verdict(False, "Without a test image there is no accuracy.")
    generator = np.random.default_rng(0)
    right = generator.binomial(images, ACCURACY, (2, PAIRS)) / images
    by_luck = (abs(right[0] - right[1]) >= DIFFERENCE).mean()
    found = (
        f"With {images} test images, {by_luck:.1%} of {PAIRS} simulated pairs of networks that "
        "are equally good differ by 2 points or more."
    )
    needed = 9 * 2 * ACCURACY * (1 - ACCURACY) / DIFFERENCE**2
    if images < 0.999 * needed:
        return Verdict(False, f"{found} A difference of 2 points can be luck.")
    if images > 1.1 * needed:
        return Verdict(False, f"{found} That is rarer than asked for: fewer images are enough.")
    return Verdict(True, f"{found} So a difference of 2 points is rarely luck.")


class _Run(NamedTuple):
    skipped: int
    back_at: int


def _run_with(growth_interval: int) -> _Run:
    """Update a run's loss scale at every step; return the skipped steps and when it was back."""
    machine = mpgluon.DynamicLossScale(HIGHEST_SCALE, growth_interval=growth_interval)
    skipped, back_at = 0, STEPS + 1
    for step in range(1, STEPS + 1):
        limit = SCALE_OF_BAD_STEPS if step in BAD_STEPS else HIGHEST_SCALE
        if step > BAD_STEPS[-1] and machine.scale >= HIGHEST_SCALE:
            back_at = min(back_at, step)
        finite = machine.scale <= limit
        skipped += not finite
        machine.update(finite)
    return _Run(skipped, back_at)


@exercise("05.2")
def interval_for_both(answer: Any) -> Verdict:
    number = number_of(answer, "steps")
    if number != int(number) or number < 1:
        return Verdict(False, f"A growth_interval is a whole number of steps, 1 or more: {number}.")
    run = _run_with(int(number))
    share = run.skipped / STEPS
    back = f"in step {run.back_at}" if run.back_at <= STEPS else "never in this run"
    found = (
        f"With growth_interval={int(number)}, {run.skipped} of {STEPS} steps are skipped "
        f"({share:.1%}), and the loss scale is back {back}."
    )
    if share > 0.02:
        return Verdict(False, f"{found} It tries the next scale too often.")
    if run.back_at > BACK_BY:
        return Verdict(False, f"{found} Until then small gradients become zero.")
    return Verdict(True, found)


_ERRORS = (mx.MXNetError, mpgluon.MpgluonError, AssertionError, TypeError, ValueError)


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def _small_network() -> gluon.nn.HybridSequential:
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(16, in_units=8, activation="relu"), gluon.nn.Dense(4, in_units=16))
    net.initialize(mx.init.Normal(0.1))
    return net


def _first_masters(net: gluon.Block, folder: Path) -> Iterator[Any]:
    """Yield the optimizer's initial value of each parameter, after a step at learning rate 0."""
    options = {"learning_rate": 0.0, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, 1.0)
    with autograd.record():
        loss = net(mx.nd.ones((2, 8))).astype("float32").sum()
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    trainer.step(2)
    mpgluon.save_checkpoint(folder / "masters.npz", net, trainer)
    yield from read_parameters(folder / "masters.npz").values()


@exercise("05.3")
def fp16_network_from_an_fp32_file(answer: Any) -> Verdict:
    if not callable(answer):
        raise TypeError(f"the answer is a function of a network and a path, received {answer!r}")
    with TemporaryDirectory() as name:
        folder = Path(name)
        trained, net = _small_network(), _small_network()
        trained.save_parameters(str(folder / "fp32.params"))
        try:
            answer(net, str(folder / "fp32.params"))
        except _ERRORS as error:
            return Verdict(False, f"Your function ends in an error: {_last_line(error)}")
        dtypes = {np.dtype(p.dtype).name for p in net.collect_params().values()}
        if dtypes != {"float16"}:
            return Verdict(False, f"The network's parameters are {', '.join(dtypes)}, not float16.")
        file = np.concatenate(
            [p.data().asnumpy().ravel() for p in trained.collect_params().values()]
        )
        try:
            masters = np.concatenate([array.ravel() for array in _first_masters(net, folder)])
        except _ERRORS as error:
            return Verdict(False, f"The network does not train afterwards: {_last_line(error)}")
    equal, close = int((masters == file).sum()), np.allclose(masters, file, rtol=2**-10, atol=1e-6)
    found = f"{equal} of the file's {file.size} numbers arrive in the masters as they are."
    if equal == file.size:
        return Verdict(True, found)
    if close:
        return Verdict(False, f"{found} The others were rounded to FP16 first: load, then cast.")
    return Verdict(False, f"{found} The others are not from the file.")
