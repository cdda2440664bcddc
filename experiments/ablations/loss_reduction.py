"""The loss in float16: a softmax over a large vocabulary, whose sum stops growing at 2048."""

from __future__ import annotations

import math
from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from experiments.ablations.ablation import (
    REFERENCE,
    RIGHT,
    WRONG,
    Ablation,
    Variants,
    draw_curve,
    figure_of,
    number,
)
from experiments.ablations.training import batches, cross_entropy, train
from experiments.experiment import Outcome
from experiments.series import means
from mpgluon import amp, cast_block

__all__ = ["ABLATION", "following_words", "run"]

_FOLLOWERS = 8


def following_words(
    vocabulary: int, pairs: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Draw words, and for each the word that follows it: one of eight that can.

    Words are as frequent as in a language (Zipf: the n-th one n times less than the first).

    Returns
    -------
    words, next_words : array of int32, shape (pairs,)
    """
    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, vocabulary + 1)
    frequency /= frequency.sum()
    followers = rng.choice(vocabulary, size=(vocabulary, _FOLLOWERS), p=frequency)
    words = rng.choice(vocabulary, size=pairs, p=frequency)
    chosen = followers[words, rng.integers(_FOLLOWERS, size=pairs)]
    return words.astype(np.int32), chosen.astype(np.int32)


def run(
    variant: str,
    *,
    steps: int,
    learning_rate: float,
    vocabulary: int,
    features: int,
    pairs: int,
    batch_size: int,
    every: int,
) -> Outcome:
    """Train an embedding and a layer, both cast to float16, to tell the next word.

    Parameters
    ----------
    variant : {"float32", "float16"}
        The format in which ``SoftmaxCrossEntropyLoss`` is given the logits, and so computes. The
        mean over the batch and all that follows are FP32.
    steps : int
    learning_rate : float
    vocabulary, features : int
    pairs : int
        How many pairs of words there are to learn from.
    batch_size : int
    every : int
        Steps of one point of the curves.
    """
    words, next_words = following_words(vocabulary, pairs)
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Embedding(vocabulary, features), nn.Dense(vocabulary, in_units=features))
    net.initialize(mx.init.Xavier())
    cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": learning_rate, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer)
    one_by_one = gluon.loss.SoftmaxCrossEntropyLoss()
    true_losses: list[float] = []

    def loss_fn(logits: NDArray, labels: NDArray) -> NDArray:
        true_losses.append(float(cross_entropy(logits.detach(), labels).asscalar()))
        return one_by_one(logits.astype(variant), labels).astype("float32").mean()

    losses = train(net, loss_fn, batches(words, next_words, batch_size), trainer, steps)
    true_curve, reported = means(true_losses, every), means(losses, every)
    return Outcome(
        figures={
            "first_true_loss": means(true_losses[:1], 1)[0],
            "first_reported_loss": means(losses[:1], 1)[0],
            "final_true_loss": true_curve[-1],
            "final_reported_loss": reported[-1],
        },
        curves={"true_loss": true_curve, "reported_loss": reported},
    )


def _text(records: Variants) -> str:
    wrong, right = records["float16"], records["float32"]
    vocabulary = wrong.config["vocabulary"]
    return (
        f"A network in float16 learns which of {vocabulary:,} words comes next. It begins with "
        f"equal probabilities, whose true loss is ln {vocabulary:,} = {math.log(vocabulary):.2f}. "
        "Given FP32 logits, the loss function reports "
        f"{figure_of(right, 'first_reported_loss')} in the first step; given float16 logits it "
        "computes in float16, where a sum of ones ends at 2048 (2049 is rounded back), and "
        f"reports {figure_of(wrong, 'first_reported_loss')}; ln 2048 is {math.log(2048):.2f}. Its "
        f"probabilities then add up to {number(vocabulary / 2048)} instead of 1, and all words "
        f"are pushed down too hard. After {wrong.config['steps']} steps the true loss is "
        f"{figure_of(wrong, 'final_true_loss')} with the float16 loss, which reports "
        f"{figure_of(wrong, 'final_reported_loss')}, and {figure_of(right, 'final_true_loss')} "
        "with the FP32 one. The network cast by mpgluon returns FP32 logits; "
        "`MXNET_SAFE_ACCUMULATION=1` makes MXNet's float16 softmax sum in FP32."
    )


def _draw(figure: Any, records: Variants) -> None:
    axes = figure.add_subplot()
    wrong, right = records["float16"], records["float32"]
    reported = {**REFERENCE, "linewidth": 2}
    draw_curve(axes, wrong, "true_loss", label="loss in float16: true loss", **WRONG)
    draw_curve(axes, wrong, "reported_loss", label="loss in float16: as reported", **reported)
    draw_curve(axes, right, "true_loss", label="loss in FP32: true and as reported", **RIGHT)
    axes.set_ylabel("cross-entropy of the training batches (nats)")
    axes.legend(frameon=False)


ABLATION = Ablation(
    name="loss_reduction",
    title="The loss in float16",
    run=run,
    variants=("float32", "float16"),
    wrong="float16",
    right="float32",
    settings={
        "steps": 150,
        "learning_rate": 0.5,
        "vocabulary": 32768,
        "features": 32,
        "pairs": 50000,
        "batch_size": 16,
        "every": 10,
    },
    figure="final_true_loss",
    unit="true loss at the end (nats)",
    text=_text,
    draw=_draw,
)
