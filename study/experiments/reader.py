"""Train a small LSTM to classify reviews, in one format, and test it.

The reviews are generated in :mod:`study.experiments.sentences`; the runs are listed in
:mod:`study.experiments.recurrent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn, rnn

from study.experiments.experiment import Outcome
from study.experiments.loop import LoopSettings, fit, predict, start
from study.experiments.sentences import LENGTH, VOCABULARY, encode, make_reviews

__all__ = ["ReaderSettings", "make_network", "train"]

_NOISE_SEED = 1  # keeps draws of different purposes apart


@dataclass(frozen=True)
class ReaderSettings(LoopSettings):
    """All that a run depends on.

    Attributes
    ----------
    layer : {"lstm", "cells", "bag"}
        Gluon's recurrent layer, which is one operator for all words; the same network a word at a
        time, of operators that each round their result; or the mean over the words, which ignores
        their order.
    label_noise : float
        The share of the training reviews whose label is wrong.
    forget_bias : float
        First bias of the LSTM's forget gates.
    """

    layer: str = "lstm"
    training_reviews: int = 3000
    test_reviews: int = 4000
    label_noise: float = 0.15
    embedding: int = 32
    hidden: int = 64
    forget_bias: float = 1.0


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
    net = _Bag(settings) if settings.layer == "bag" else _Reader(settings)
    start(net, settings)
    return net


def train(settings: ReaderSettings) -> Outcome:
    """Train on reviews, with some wrong labels, and test on others, with right ones."""
    training, test = make_reviews(settings.training_reviews, settings.test_reviews, seed=0)
    tokens, labels = encode(training)
    rng = np.random.default_rng(_NOISE_SEED)
    labels ^= rng.random(len(labels)) < settings.label_noise
    test_tokens, test_labels = encode(test)
    net = make_network(settings)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

    def score() -> dict[str, float]:
        right = predict(net, test_tokens).argmax(axis=1) == test_labels
        return {"test_accuracy": float(right.mean())}

    return fit(net, settings, [tokens, labels], lambda x, y: loss_fn(net(x), y), score)
