"""Labels in float16: above 2048 it skips odd numbers, and images learn their neighbour's class."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from experiments.ablations.ablation import (
    RIGHT,
    WRONG,
    Ablation,
    Variants,
    draw_curve,
    figure_of,
    percent,
)
from experiments.ablations.training import batches, cross_entropy, train
from experiments.experiment import Outcome
from experiments.series import means, rounded
from mpgluon import amp, cast_block

__all__ = ["ABLATION", "run"]

EXACT = 2**11 + 1
"""How many labels, from 0, float16 holds before the first gap."""


def run(
    variant: str,
    *,
    steps: int,
    learning_rate: float,
    classes: int,
    features: int,
    samples_per_class: int,
    spread: float,
    batch_size: int,
    every: int,
) -> Outcome:
    """Train one layer in float16 to tell many classes of points apart.

    Parameters
    ----------
    variant : {"int32", "float16"}
        The format of the labels that the loss is given.
    steps : int
    learning_rate : float
    classes : int
        More than ``EXACT``.
    features : int
        Coordinates of a point. A class has a centre, of standard deviation 1 in each.
    samples_per_class : int
        For training; there is one for the test.
    spread : float
        Standard deviation of a class in each coordinate.
    batch_size : int
    every : int
        Steps from one test to the next.
    """
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(classes, features))
    labels = np.repeat(np.arange(classes, dtype=np.int32), samples_per_class)
    noise = rng.normal(scale=spread, size=(len(labels), features))
    points = (centres[labels] + noise).astype(np.float32)
    test = mx.nd.array(centres + rng.normal(scale=spread, size=centres.shape))
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Dense(classes, in_units=features))
    net.initialize(mx.init.Xavier())
    cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": learning_rate, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer)

    def loss_fn(logits: NDArray, chosen: NDArray) -> NDArray:
        return cross_entropy(logits, chosen.astype(variant))

    below: list[float] = []
    above: list[float] = []

    def look(step: int) -> None:
        if step % every == 0:
            right = net(test).argmax(axis=1).asnumpy() == np.arange(classes)
            below.append(float(right[:EXACT].mean()))
            above.append(float(right[EXACT:].mean()))

    losses = train(
        net, loss_fn, batches(points, labels, batch_size), trainer, steps, after_step=look
    )
    curve = means(losses, every)
    return Outcome(
        figures={
            "final_loss": curve[-1],
            "accuracy_below": rounded(below[-1]),
            "accuracy_above": rounded(above[-1]),
        },
        curves={
            "loss": curve,
            "accuracy_below": [rounded(share) for share in below],
            "accuracy_above": [rounded(share) for share in above],
        },
    )


def _text(records: Variants) -> str:
    wrong, right = records["float16"], records["int32"]
    classes = wrong.config["classes"]
    return (
        f"One layer tells {classes:,} classes apart, in float16 with masters and a loss scale. "
        "Beyond 2048 float16 holds only every second integer: label 2049 becomes 2048, and 2051 "
        "becomes 2052. With float16 labels the test accuracy on classes above 2048 is "
        f"{percent(wrong.outcome.figures['accuracy_above'])}, with int32 labels "
        f"{percent(right.outcome.figures['accuracy_above'])}; on the classes up to there it is "
        f"{percent(wrong.outcome.figures['accuracy_below'])} and "
        f"{percent(right.outcome.figures['accuracy_below'])}. The training loss compares with "
        f"the labels that it was given, and ends at {figure_of(wrong, 'final_loss')} and "
        f"{figure_of(right, 'final_loss')}."
    )


def _draw(figure: Any, records: Variants) -> None:
    above, loss = figure.subplots(1, 2)
    for axes, curve in ((above, "accuracy_above"), (loss, "loss")):
        draw_curve(axes, records["int32"], curve, label="labels in int32", **RIGHT)
        draw_curve(axes, records["float16"], curve, label="labels in float16", **WRONG)
    above.set_ylim(0, 1.05)
    above.set_ylabel("test accuracy on classes above 2048")
    above.legend(frameon=False)
    loss.set_ylabel("training loss (nats)")
    loss.set_yscale("log")
    loss.yaxis.set_major_formatter("{x:g}")


ABLATION = Ablation(
    name="labels",
    title="Labels in float16",
    run=run,
    variants=("int32", "float16"),
    wrong="float16",
    right="int32",
    settings={
        "steps": 300,
        "learning_rate": 2.0,
        "classes": 4096,
        "features": 64,
        "samples_per_class": 8,
        "spread": 0.8,
        "batch_size": 512,
        "every": 20,
    },
    figure="accuracy_above",
    unit="test accuracy on classes above 2048",
    text=_text,
    draw=_draw,
)
