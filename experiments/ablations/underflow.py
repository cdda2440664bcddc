"""The loss scale left out: a mean over pixels whose gradients are too small for float16."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

import mpgluon
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
from experiments.ablations.training import batches, shapes, train
from experiments.experiment import Outcome
from experiments.series import means, rounded
from mpgluon import amp, cast_block
from mpgluon.diagnostics.exponents import batch_exponents
from mpgluon.diagnostics.observe import Batch

__all__ = ["ABLATION", "run"]

_squares = gluon.loss.L2Loss()


def _loss(outputs: NDArray, images: NDArray) -> NDArray:
    return _squares(outputs, images).mean()


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
    """Train an autoencoder to repeat images, with half the squared error averaged over all pixels.

    Parameters
    ----------
    variant : {"float32", "scaled", "unscaled"}
        The last two are the cast network with a dynamic loss scale and without one.
    steps, images_per_class, image_size, batch_size : int
    learning_rate : float
    every : int
        Steps of one point of the curve.
    """
    images = shapes(images_per_class, image_size)[0] / 255
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 4, strides=4, activation="relu"))
    net.add(nn.Conv2D(16, 3, padding=1, activation="relu"))
    net.add(nn.Conv2D(16, 3, padding=1, activation="relu"))
    net.add(nn.Conv2DTranspose(3, 4, strides=4, activation="sigmoid"))
    net.initialize(mx.init.Xavier())
    first = mx.nd.array(images[:batch_size])
    net(first)  # all shapes are known from here on
    if variant != "float32":
        cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": learning_rate, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, "dynamic" if variant == "scaled" else "none")
    losses = train(net, _loss, batches(images, images, batch_size), trainer, steps)
    curve = means(losses, every)
    scale = amp.loss_scale(trainer)
    nonzero = _nonzero_gradients(net, first, scale)
    mpgluon.restore(net)  # the same weights, but in FP32
    return Outcome(
        figures={
            "final_loss": curve[-1],
            "lost_gradients": rounded(1 - nonzero / _nonzero_gradients(net, first, 1.0)),
            "loss_scale": scale,
            "elements_of_the_mean": int(first.size),
        },
        curves={"loss": curve},
    )


def _nonzero_gradients(net: gluon.Block, images: NDArray, scale: float) -> int:
    """Return how many gradients, of what the layers return, are not zero."""
    found = batch_exponents(net, Batch(images, images, _loss), loss_scale=scale)
    return int(found.overall()["activation gradients"].counts.sum())


def _text(records: Variants) -> str:
    unscaled, scaled, reference = (records[name] for name in ("unscaled", "scaled", "float32"))
    elements = unscaled.outcome.figures["elements_of_the_mean"]
    return (
        f"An autoencoder repeats images of {unscaled.config['image_size']} pixels. Its loss is a "
        f"mean over {elements:,} numbers, so each begins with a gradient of its error divided by "
        "that, and float16 has nothing between zero and 6e-8. Without a loss scale "
        f"{percent(unscaled.outcome.figures['lost_gradients'])} of the gradients that layers hand "
        "back, not zero in FP32 with the same weights, are zero at the end of training, and the "
        f"loss is {figure_of(unscaled, 'final_loss')}. A dynamic loss scale, "
        f"{scaled.outcome.figures['loss_scale']:,.0f} at the end, leaves "
        f"{percent(scaled.outcome.figures['lost_gradients'])} of them zero, and the loss is "
        f"{figure_of(scaled, 'final_loss')}; in FP32 it is {figure_of(reference, 'final_loss')}."
    )


def _draw(figure: Any, records: Variants) -> None:
    axes = figure.add_subplot()
    draw_curve(axes, records["float32"], "loss", label="FP32", **REFERENCE)
    draw_curve(axes, records["scaled"], "loss", label="float16, dynamic loss scale", **RIGHT)
    draw_curve(axes, records["unscaled"], "loss", label="float16, no loss scale", **WRONG)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("loss (half the mean squared error,\npixels from 0 to 1)")
    axes.legend(frameon=False)


ABLATION = Ablation(
    name="underflow",
    title="No loss scale",
    run=run,
    variants=("float32", "scaled", "unscaled"),
    wrong="unscaled",
    right="scaled",
    settings={
        "steps": 100,
        "learning_rate": 1.0,
        "images_per_class": 8,
        "image_size": 224,
        "batch_size": 16,
        "every": 5,
    },
    figure="final_loss",
    unit="loss at the end",
    text=_text,
    draw=_draw,
)
