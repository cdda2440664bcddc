"""Masters left out: the optimizer adds small updates to float16 weights themselves."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.gluon import nn

from experiments.ablations.ablation import (
    REFERENCE,
    RIGHT,
    WRONG,
    Ablation,
    Variants,
    draw_curve,
    figure_of,
    percent,
)
from experiments.ablations.training import batches, cross_entropy, shapes, train
from experiments.experiment import Outcome
from experiments.series import means, rounded
from mpgluon import amp, cast_block
from mpgluon.trainer.inside import parameters_of

__all__ = ["ABLATION", "run"]


def run(
    variant: str,
    *,
    steps: int,
    learning_rate: float,
    images_per_class: int,
    image_size: int,
    batch_size: int,
    every: int,
) -> Outcome:
    """Train a small convolutional network with plain SGD and without a loss scale.

    Parameters
    ----------
    variant : {"float32", "with", "without"}
        The last two are the cast network, with FP32 masters and with MXNet's own optimizer on
        float16 weights (``multi_precision=False``, the default there).
    steps, images_per_class, image_size, batch_size : int
    learning_rate : float
    every : int
        Steps of one point of the curve; weights are looked at that often.
    """
    images, labels = shapes(images_per_class, image_size)
    mx.random.seed(0)
    net = nn.HybridSequential()
    for channels in (16, 32):
        net.add(nn.Conv2D(channels, 3, padding=1, activation="relu"), nn.MaxPool2D())
    net.add(nn.Dense(64, activation="relu"), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 3, image_size, image_size)))  # all shapes are known from here on
    if variant != "float32":
        cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": learning_rate, "multi_precision": variant == "with"}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, "none")

    before: list[npt.NDArray[Any]] = []
    unchanged: list[float] = []

    def look(step: int) -> None:
        if step % every == every - 1:
            before[:] = [parameter.data().asnumpy() for parameter in parameters_of(trainer)]
        elif step % every == 0:
            unchanged.append(_share_unchanged(before, parameters_of(trainer)))

    data = batches(images / 127.5 - 1, labels, batch_size)
    losses = train(net, cross_entropy, data, trainer, steps, after_step=look)
    curve = means(losses, every)
    return Outcome(
        figures={"final_loss": curve[-1], "unchanged": rounded(float(np.mean(unchanged)))},
        curves={"loss": curve, "unchanged": [rounded(share) for share in unchanged]},
    )


def _share_unchanged(before: list[npt.NDArray[Any]], parameters: list[gluon.Parameter]) -> float:
    """Return which share of the weights kept its value, of those with a gradient."""
    stayed = trained = 0
    for old, parameter in zip(before, parameters):
        has_gradient = parameter.grad().asnumpy() != 0
        trained += int(has_gradient.sum())
        stayed += int((parameter.data().asnumpy() == old)[has_gradient].sum())
    return stayed / trained


def _text(records: Variants) -> str:
    without, full, reference = (records[name] for name in ("without", "with", "float32"))
    settings = without.config
    return (
        f"A small convolutional network learns ten shapes with plain SGD and a learning rate of "
        f"{settings['learning_rate']:g}, for {settings['steps']:,} steps. An update below a "
        "quarter of the spacing of float16 around its weight is lost for certain, and is lost "
        "again in every step that follows. Without masters "
        f"{percent(without.outcome.figures['unchanged'])} of the updates leave their weight as it "
        f"was, and the loss ends at {figure_of(without, 'final_loss')}. With FP32 masters "
        f"{percent(full.outcome.figures['unchanged'])} of them do not show in the float16 weight "
        "at once either, but the master collects them: the loss ends at "
        f"{figure_of(full, 'final_loss')}, and in FP32 at {figure_of(reference, 'final_loss')}."
    )


def _draw(figure: Any, records: Variants) -> None:
    loss, share = figure.subplots(1, 2)
    labels = {"float32": "FP32", "with": "float16, FP32 masters", "without": "float16, no masters"}
    for (variant, label), look in zip(labels.items(), (REFERENCE, RIGHT, WRONG)):
        draw_curve(loss, records[variant], "loss", label=label, **look)
        draw_curve(share, records[variant], "unchanged", label=label, **look)
    loss.set_ylabel("training loss (nats)")
    loss.legend(frameon=False)
    share.set_ylabel("share of weights that an update\nleaves unchanged")
    share.set_ylim(-0.03, 1.03)


ABLATION = Ablation(
    name="masters",
    title="No master weights",
    run=run,
    variants=("float32", "with", "without"),
    wrong="without",
    right="with",
    settings={
        "steps": 2400,
        "learning_rate": 3e-4,
        "images_per_class": 40,
        "image_size": 16,
        "batch_size": 40,
        "every": 50,
    },
    figure="final_loss",
    unit="training loss at the end",
    text=_text,
    draw=_draw,
)
