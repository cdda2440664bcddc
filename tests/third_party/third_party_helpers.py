"""Train a third-party network a few steps in 16 bits, and compare with FP32.

A network is a :class:`Case`: how to make it, and what its losses are. How far a 16-bit run may be
from FP32's is measured on the network itself: by how far FP32 moves from FP32 when its first
weights change by half a unit of the format's last place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, Optional, Union

import mpgluon
from mpgluon import FloatFormat, amp

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

STEPS = 3
REPETITIONS = 3  # of FP32 runs with changed weights


def change_a_little(net: gluon.Block, fmt: FloatFormat = mpgluon.FLOAT16) -> None:
    """Change each weight by half a unit of the format's last place at most."""
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            noise = mx.nd.random.uniform(-1, 1, parameter.shape)
            parameter.reset_ctx(parameter.list_ctx())  # out of the layout that inference left
            parameter.set_data(parameter.data() * (1 + fmt.unit_roundoff / 2 * noise))


FLOAT16 = {
    "cast": mpgluon.cast_block,
    "autocast": lambda net: amp.autocast(net, "float16"),
}
WAYS = {**FLOAT16, "autocast bfloat16": lambda net: amp.autocast(net, "bfloat16")}


def format_of(way: str) -> FloatFormat:
    """Return the format that a way of casting computes in."""
    return mpgluon.FLOAT16 if way in FLOAT16 else mpgluon.BFLOAT16


class Case(NamedTuple):
    """A network and its training.

    Attributes
    ----------
    make : callable
        Returns the network with initialized FP32 parameters, of known shapes.
    losses : callable
        Takes the network and the number of the step; returns an NDArray, or a list of them.
    batch_size : int
        What ``trainer.step`` is given.
    optimizer, learning_rate, loss_scale
        Options of the Trainer. The largest gradient times the scale stays below 65504.
    uses : int
        How often a pass uses one weight: so many gradients are rounded and added up.
    data_roundings : int
        How often values are rounded that reach the loss without a weight: data of a likelihood.
    """

    make: Callable[[], gluon.Block]
    losses: Callable[[gluon.Block, int], Union[mx.nd.NDArray, list[mx.nd.NDArray]]]
    batch_size: int
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    loss_scale: float = 2.0**10
    uses: int = 1
    data_roundings: int = 0


class Run(NamedTuple):
    """The results of a training run: its losses, and by how much each parameter has moved."""

    losses: list[np.ndarray]
    moved: dict[str, np.ndarray]


def train(
    case: Case, way: str, hybridize: bool = False, change: Optional[tuple[FloatFormat, int]] = None
) -> Run:
    """Train some steps: as plain FP32 or, with a loss scale, in 16 bits.

    ``change`` is the format and the seed of :func:`change_a_little`.
    """
    mx.random.seed(0)
    np.random.seed(0)
    net = case.make()
    mx.nd.waitall()  # inference changes the layout of weights that are being read
    places = net._collect_params_with_prefix()
    start = {name: parameter.data().asnumpy() for name, parameter in places.items()}
    if change is not None:
        mx.random.seed(change[1])
        change_a_little(net, change[0])
        start = {name: parameter.data().asnumpy() for name, parameter in places.items()}
    if way in WAYS:
        WAYS[way](net)
    net.hybridize(hybridize)
    options: dict[str, Any] = {"learning_rate": case.learning_rate}
    if way == "cast":
        options["multi_precision"] = True
    trainer = gluon.Trainer(net.collect_params(), case.optimizer, options)
    if way in WAYS:
        amp.init_trainer(trainer, case.loss_scale)
    losses = []
    for step in range(STEPS):
        mx.random.seed(step)  # the same Dropout masks in every run
        with autograd.record():
            loss = case.losses(net, step)
            if way not in WAYS:
                autograd.backward(loss)
            else:
                with amp.scale_loss(loss, trainer) as scaled_loss:
                    autograd.backward(scaled_loss)
        trainer.step(case.batch_size)
        assert way not in WAYS or not amp.step_was_skipped(trainer)
        losses += [one.asnumpy() for one in (loss if isinstance(loss, list) else [loss])]
    if way == "cast":
        mpgluon.restore(net)  # to its masters
    trained = {name: p for name, p in places.items() if p.grad_req != "null"}
    return Run(losses, {name: p.data().asnumpy() - start[name] for name, p in trained.items()})


def length(arrays: Iterable[np.ndarray]) -> float:
    """Return the norm of all arrays together."""
    return float(np.sqrt(sum((one**2).sum(dtype=np.float64) for one in arrays)))


def distance(left: Iterable[np.ndarray], right: Iterable[np.ndarray]) -> float:
    """Return the norm of the difference, relative to the norm of ``right``."""
    right = list(right)
    return length(one - other for one, other in zip(left, right)) / length(right)


class Reference(NamedTuple):
    """FP32's run, and how far it moves from itself when its first weights change a little."""

    run: Run
    loss_noise: float
    weight_noise: float


@lru_cache(maxsize=2)
def reference(case: Case, fmt: FloatFormat) -> Reference:
    """Train in FP32, once as it is and three times with changed weights."""
    fp32 = train(case, "FP32")
    loss_noise = weight_noise = 0.0
    for seed in range(REPETITIONS):
        changed = train(case, "FP32", change=(fmt, seed))
        loss_noise = max(loss_noise, distance(changed.losses, fp32.losses))
        weight_noise = max(weight_noise, distance(changed.moved.values(), fp32.moved.values()))
    return Reference(fp32, loss_noise, weight_noise)


def check(case: Case, way: str, hybridize: bool) -> None:
    """Assert that a 16-bit run trains what FP32 trains, as far from it as rounding takes it.

    The losses' bound: FP32's own distance, its first weights changed by up to half the unit
    roundoff u of themselves, times 4. In 16 bits each layer rounds its weight, its product, its
    normalization and its sum, so four times where one value was changed, which is twice the norm;
    and by up to u of a value (just above a power of two), which is twice again. A rounding of data
    that reach the loss without a weight adds u.

    The weights' bound is the bound of their updates, and u more for each rounding of a gradient
    itself. In deep networks with small batches it exceeds 1 and says little, so that the length of
    the whole movement is compared as well: a wrong division by a loss scale is by 2 at least.
    """
    fmt = format_of(way)
    fp32, loss_noise, weight_noise = reference(case, fmt)
    found = train(case, way, hybridize)
    assert all(np.isfinite(loss).all() for loss in fp32.losses + found.losses)
    assert [name for name, moved in fp32.moved.items() if moved.any()] == [
        name for name, moved in found.moved.items() if moved.any()
    ]
    bound = 4 * loss_noise + case.data_roundings * fmt.unit_roundoff
    assert distance(found.losses, fp32.losses) < bound
    bound = 4 * weight_noise + case.uses * fmt.unit_roundoff
    assert distance(found.moved.values(), fp32.moved.values()) < bound
    assert 0.5 < length(found.moved.values()) / length(fp32.moved.values()) < 2


def _ways(names: Iterable[str]) -> pytest.MarkDecorator:
    hybridized = {"imperative": False, "hybridized": True}
    return pytest.mark.parametrize(
        ("way", "hybridize"),
        [(way, hybridize) for way in names for hybridize in hybridized.values()],
        ids=[f"{way}, {how}" for way in names for how in hybridized],
    )


every_way, every_way_and_format = _ways(FLOAT16), _ways(WAYS)
