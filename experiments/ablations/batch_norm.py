"""BatchNorm's sums in float16: they stop growing, or overflow."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt
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
    number,
    percent,
)
from experiments.ablations.float16_batch_norm import Float16BatchNorm, float16_statistics
from experiments.ablations.training import batches, cross_entropy, shapes, train
from experiments.experiment import Outcome
from experiments.series import means, rounded
from mpgluon import amp, cast_block

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
    """Train a small ResNet-like beginning: BatchNorm on the images, then two convolutions.

    Parameters
    ----------
    variant : {"float32", "float16", "float16-bytes"}
        The format of BatchNorm; all else is float16 with masters and a dynamic loss scale. With
        "bytes" the pixels are from 0 to 255, otherwise from 0 to 1.
    steps, images_per_class, image_size, batch_size : int
    learning_rate : float
    every : int
        Steps of one point of the curves.
    """
    images, labels = shapes(images_per_class, image_size)
    if variant != "float16-bytes":
        images /= 255
    net = _network(nn.BatchNorm if variant == "float32" else Float16BatchNorm)
    # In the cast network, what follows BatchNorm rounds its result to float16 again.
    cast_block(net, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, Float16BatchNorm))
    options = {"learning_rate": learning_rate, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer)
    accuracies: list[float] = []
    skips: list[bool] = []

    def loss_fn(logits: NDArray, chosen: NDArray) -> NDArray:
        right = logits.argmax(axis=1).asnumpy() == chosen.asnumpy()
        accuracies.append(float(right.mean()))
        return cross_entropy(logits, chosen)

    def look(_: int) -> None:
        skips.append(amp.step_was_skipped(trainer))

    data = batches(images, labels, batch_size)
    losses = train(net, loss_fn, data, trainer, steps, after_step=look)
    loss_curve, accuracy_curve = means(losses, every), means(accuracies, every)
    return Outcome(
        figures={
            "final_loss": loss_curve[-1],
            "final_accuracy": accuracy_curve[-1],
            "skipped_steps": sum(skips),
            "first_skipped_step": skips.index(True) + 1 if any(skips) else None,
            **_first_statistics(images[:batch_size]),
        },
        curves={"loss": loss_curve, "accuracy": accuracy_curve},
    )


def _network(batch_norm: Any) -> gluon.Block:
    mx.random.seed(0)
    net = nn.Sequential()
    net.add(batch_norm(in_channels=3))
    for channels, inputs in ((16, 3), (32, 16)):
        net.add(nn.Conv2D(channels, 3, padding=1, in_channels=inputs))
        net.add(batch_norm(in_channels=channels), nn.Activation("relu"), nn.MaxPool2D())
    net.add(nn.GlobalAvgPool2D(), nn.Dense(10, in_units=32))
    net.initialize(mx.init.Xavier())
    return net


def _first_statistics(images: npt.NDArray[Any]) -> dict[str, Any]:
    """Return mean and variance of the images' first channel, and what float16 sums make of them."""
    pixels = images[:, 0].reshape(-1, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, variance = float16_statistics(pixels.astype(np.float16))
    return {
        "values_per_channel": len(pixels),
        "true_mean": rounded(float(pixels.astype(np.float64).mean())),
        "true_variance": rounded(float(pixels.astype(np.float64).var())),
        "float16_mean": rounded(float(mean[0])),
        "float16_variance": rounded(float(variance[0])),
    }


def _text(records: Variants) -> str:
    wrong, right = records["float16"], records["float32"]
    found, bytes_found = wrong.outcome.figures, records["float16-bytes"].outcome.figures
    return (
        "A small network with BatchNorm on its images, as in ResNet v2, and behind each "
        "convolution. Here its sums run in float16, one element after another, as in a kernel "
        f"written without thought. A channel of a batch has {found['values_per_channel']:,} "
        "pixels, and a running sum stops growing where the next pixel is less than half its "
        f"spacing. Of pixels from 0 to 1 with the mean {number(found['true_mean'])} and the "
        f"variance {number(found['true_variance'])} it makes {number(found['float16_mean'])} and "
        f"{number(found['float16_variance'])}: the training accuracy ends at "
        f"{percent(found['final_accuracy'])} instead of "
        f"{percent(right.outcome.figures['final_accuracy'])}, and "
        f"{found['skipped_steps']} of {wrong.config['steps']} steps are skipped for gradients "
        "that are not finite. Of pixels from 0 to 255 it makes the mean "
        f"{number(bytes_found['float16_mean'])} (65504 is the largest sum that float16 holds), and "
        f"{bytes_found['skipped_steps']} of {wrong.config['steps']} steps are skipped."
    )


def _draw(figure: Any, records: Variants) -> None:
    loss, accuracy = figure.subplots(1, 2)
    labels = {
        "float32": ("BatchNorm in FP32", RIGHT),
        "float16": ("in float16, pixels from 0 to 1", WRONG),
        "float16-bytes": ("in float16, pixels from 0 to 255", {**REFERENCE, "linewidth": 2}),
    }
    for variant, (label, look) in labels.items():
        draw_curve(loss, records[variant], "loss", label=label, **look)
        draw_curve(accuracy, records[variant], "accuracy", label=label, **look)
    loss.set_ylim(bottom=0)
    loss.set_ylabel("training loss (nats)")
    loss.legend(frameon=False)
    accuracy.set_ylim(0, 1.05)
    accuracy.set_ylabel("training accuracy")


ABLATION = Ablation(
    name="batch_norm",
    title="BatchNorm in float16",
    run=run,
    variants=("float32", "float16", "float16-bytes"),
    wrong="float16",
    right="float32",
    settings={
        "steps": 80,
        "learning_rate": 0.05,
        "images_per_class": 20,
        "image_size": 24,
        "batch_size": 32,
        "every": 4,
    },
    figure="final_accuracy",
    unit="training accuracy at the end",
    text=_text,
    draw=_draw,
)
