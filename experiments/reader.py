"""Train a small LSTM to classify reviews, in one format, and test it.

The reviews are generated in :mod:`experiments.sentences`; the runs are listed in
:mod:`experiments.recurrent`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mpgluon
from mpgluon import amp

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn
from numpy.typing import NDArray

from experiments.experiment import Outcome
from experiments.sentences import LENGTH, VOCABULARY, encode, make_reviews
from experiments.series import means

__all__ = ["FORMATS", "WINDOW", "ReaderSettings", "make_network", "train"]

FORMATS = ("float32", "float16", "mixed_float16", "bfloat16")
WINDOW = 10  # steps of which a curve has the mean
_TEST_BATCH = 500
_LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
_NOISE_SEED, _ORDER_SEED = 1, 2  # keep draws of different purposes apart


@dataclass(frozen=True)
class ReaderSettings:
    """All that a run depends on.

    Attributes
    ----------
    dtype : str
        One of ``FORMATS``: "float16" is the cast network, "mixed_float16" autocast.
    layer : {"lstm", "cells", "bag"}
        Gluon's recurrent layer, which is one operator for all words; the same network a word at a
        time, of operators that each round their result; or the mean over the words, which ignores
        their order.
    seed : int
        Decides the first weights and the order of the reviews, but not the reviews.
    label_noise : float
        The share of the training reviews whose label is wrong.
    forget_bias : float
        First bias of the LSTM's forget gates.
    learning_rate : float
        Adam's first learning rate, which falls to 0 in a straight line.
    max_norm : float
        The limit to which the gradients' global norm is clipped, in true units.
    init_scale, growth_interval
        Settings of the dynamic loss scale, in float16.
    """

    dtype: str = "float32"
    layer: str = "lstm"
    seed: int = 0
    training_reviews: int = 3000
    test_reviews: int = 4000
    label_noise: float = 0.15
    epochs: int = 14
    batch_size: int = 25
    embedding: int = 32
    hidden: int = 64
    forget_bias: float = 1.0
    learning_rate: float = 0.004
    max_norm: float = 0.5
    init_scale: float = 2.0**16
    growth_interval: int = 100

    def __post_init__(self) -> None:
        if self.dtype not in FORMATS:
            raise ValueError(f"dtype must be one of {', '.join(FORMATS)}; received {self.dtype!r}")
        if self.training_reviews % self.batch_size:
            raise ValueError(
                f"training_reviews must be a multiple of batch_size, received "
                f"{self.training_reviews} and {self.batch_size}"
            )

    @property
    def has_loss_scale(self) -> bool:
        """Whether the loss is scaled: FP32 and bfloat16 have exponents enough without it."""
        return self.dtype in ("float16", "mixed_float16")


class _Reader(gluon.HybridBlock):
    """Embedding, LSTM, and a Dense layer on the output after the last word.

    References
    ----------
    Jozefowicz, Zaremba, Sutskever, "An Empirical Exploration of Recurrent Network Architectures",
    ICML 2015, section 5: a forget gate that begins open.
    """

    def __init__(self, settings: ReaderSettings) -> None:
        super().__init__()
        options = {
            "hidden_size": settings.hidden,
            "input_size": settings.embedding,
            # With a bias of 0, one seed in five does not learn in so few steps.
            "i2h_bias_initializer": mx.init.LSTMBias(settings.forget_bias),
        }
        self._in_cells = settings.layer == "cells"
        with self.name_scope():
            self.embedding = nn.Embedding(len(VOCABULARY), settings.embedding)
            if self._in_cells:
                self.lstm = rnn.LSTMCell(**options)
            else:
                self.lstm = rnn.LSTM(layout="NTC", **options)
            self.out = nn.Dense(2, in_units=settings.hidden)

    def hybrid_forward(self, F: Any, tokens: Any) -> Any:  # noqa: N803 - Gluon's name
        """Return logits, shape (N, 2), of tokens, shape (N, LENGTH)."""
        words = self.embedding(tokens)
        if self._in_cells:
            outputs, _ = self.lstm.unroll(LENGTH, words, layout="NTC", merge_outputs=False)
            return self.out(outputs[-1])
        return self.out(F.slice_axis(self.lstm(words), axis=1, begin=-1, end=None))


class _Bag(gluon.HybridBlock):
    """Embedding, mean over the words, two Dense layers."""

    def __init__(self, settings: ReaderSettings) -> None:
        super().__init__()
        with self.name_scope():
            self.embedding = nn.Embedding(len(VOCABULARY), settings.embedding)
            self.hidden = nn.Dense(settings.hidden, "relu", in_units=settings.embedding)
            self.out = nn.Dense(2, in_units=settings.hidden)

    def hybrid_forward(self, F: Any, tokens: Any) -> Any:  # noqa: N803 - Gluon's name
        """Return logits, shape (N, 2), of tokens, shape (N, LENGTH)."""
        return self.out(self.hidden(F.mean(self.embedding(tokens), axis=1)))


def make_network(settings: ReaderSettings) -> gluon.HybridBlock:
    """Return a network with its first weights, in its format.

    The first weights depend on the seed only, not on the format or the use of cells.
    """
    mx.random.seed(settings.seed)
    net = _Bag(settings) if settings.layer == "bag" else _Reader(settings)
    net.initialize(mx.init.Xavier())
    if settings.dtype == "float16":
        mpgluon.cast_block(net)
    elif settings.dtype != "float32":
        amp.autocast(net, settings.dtype.replace("mixed_", ""))
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def train(settings: ReaderSettings) -> Outcome:
    """Train on reviews, with some wrong labels, and test on others, with right ones."""
    training, test = make_reviews(settings.training_reviews, settings.test_reviews, seed=0)
    tokens, labels = encode(training)
    rng = np.random.default_rng(_NOISE_SEED)
    labels ^= rng.random(len(labels)) < settings.label_noise
    test_tokens, test_labels = encode(test)
    net = make_network(settings)
    batches = settings.training_reviews // settings.batch_size
    trainer = _make_trainer(net, settings, steps=batches * settings.epochs)
    rng = np.random.default_rng([_ORDER_SEED, settings.seed])
    losses, norms, scales, seconds = [], [], [], 0.0
    accuracies = [_accuracy(net, test_tokens, test_labels)]
    for _ in range(settings.epochs):
        began = time.perf_counter()
        for chosen in np.split(rng.permutation(len(tokens)), batches):
            scales.append(amp.loss_scale(trainer))
            loss, norm = _step(net, trainer, tokens[chosen], labels[chosen], settings.max_norm)
            losses.append(loss)
            norms.append(norm)
        seconds += time.perf_counter() - began
        accuracies.append(_accuracy(net, test_tokens, test_labels))
    curves: dict[str, Sequence[Any]] = {"loss": means(losses, WINDOW), "test_accuracy": accuracies}
    if settings.has_loss_scale:
        curves["loss_scale"] = scales[::WINDOW]
    return Outcome(
        figures={
            "test_accuracy": accuracies[-1],
            "final_loss": means(losses, batches)[-1],
            "steps": len(losses),
            "skipped_steps": amp.skipped_steps(trainer),
            "clipped_steps": sum(settings.max_norm < norm < math.inf for norm in norms),
            "final_scale": amp.loss_scale(trainer),
        },
        curves=curves,
        times={"seconds_per_step": seconds / len(losses)},
    )


def _make_trainer(net: gluon.Block, settings: ReaderSettings, steps: int) -> gluon.Trainer:
    schedule = mx.lr_scheduler.PolyScheduler(steps, settings.learning_rate, pwr=1)
    options = {
        "learning_rate": settings.learning_rate,
        "lr_scheduler": schedule,
        "multi_precision": True,
    }
    trainer = gluon.Trainer(net.collect_params(), "adam", options)
    scale = mpgluon.DynamicLossScale(settings.init_scale, growth_interval=settings.growth_interval)
    amp.init_trainer(trainer, scale if settings.has_loss_scale else "none")
    return trainer


def _step(
    net: gluon.Block,
    trainer: gluon.Trainer,
    tokens: NDArray[np.int32],
    labels: NDArray[np.int32],
    max_norm: float,
) -> tuple[float, float]:
    """Do one step; return the mean loss, and the gradients' norm before clipping."""
    with autograd.record():
        logits = net(mx.nd.array(tokens, dtype="int32"))
        loss = _LOSS(logits, mx.nd.array(labels, dtype="int32"))
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    norm = amp.clip_global_norm(trainer, max_norm, len(labels))
    trainer.step(len(labels))
    return float(loss.mean().asscalar()), norm


def _accuracy(net: gluon.Block, tokens: NDArray[np.int32], labels: NDArray[np.int32]) -> float:
    right = 0
    for start in range(0, len(labels), _TEST_BATCH):
        part = slice(start, start + _TEST_BATCH)
        logits = net(mx.nd.array(tokens[part], dtype="int32")).asnumpy()
        right += int((logits.argmax(axis=1) == labels[part]).sum())
    return right / len(labels)
