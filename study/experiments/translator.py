"""Train a small translator of number words, in one format, and test it.

The numbers are drawn in :mod:`study.experiments.number_words`; the runs are listed in
:mod:`study.experiments.sequences`.

References
----------
Luong, Pham, Manning, "Effective Approaches to Attention-based Neural Machine Translation", EMNLP
2015, section 3.1: global attention, with the score called "general".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from mxnet import gluon
from mxnet.gluon import nn, rnn
from numpy.typing import NDArray

from study.experiments.experiment import Outcome
from study.experiments.loop import LoopSettings, fit, predict, start
from study.experiments.number_words import (
    ENGLISH,
    ENGLISH_LENGTH,
    GERMAN,
    GERMAN_LENGTH,
    draw_numbers,
    encode,
    english,
    german,
)
from study.experiments.sequence_scores import bleu

__all__ = ["TranslatorSettings", "make_network", "train", "translate"]

_MASKED = -1e4  # a score whose exponential is 0 in every format, and which float16 can hold


@dataclass(frozen=True)
class TranslatorSettings(LoopSettings):
    """All that a run depends on.

    Attributes
    ----------
    attention : bool
        Whether the decoder chooses which words it looks at; otherwise it has their mean.
    hidden : int
        Units of the decoder; each direction of the encoder has half as many.
    """

    attention: bool = True
    training_numbers: int = 800
    test_numbers: int = 1000
    epochs: int = 12
    batch_size: int = 20
    embedding: int = 32
    hidden: int = 64
    learning_rate: float = 0.004
    max_norm: float = 5.0


class _Translator(gluon.HybridBlock):
    """A bidirectional LSTM that reads, an LSTM that writes, and attention between them."""

    def __init__(self, settings: TranslatorSettings) -> None:
        super().__init__()
        width, hidden = settings.embedding, settings.hidden
        self._attention = settings.attention
        with self.name_scope():
            self.source = nn.Embedding(len(ENGLISH), width)
            self.reader = rnn.LSTM(hidden // 2, layout="NTC", bidirectional=True, input_size=width)
            self.target = nn.Embedding(len(GERMAN), width)
            self.writer = rnn.LSTM(hidden, layout="NTC", input_size=width)
            self.key = nn.Dense(hidden, flatten=False, use_bias=False, in_units=hidden)
            self.join = nn.Dense(hidden, "tanh", flatten=False, in_units=2 * hidden)
            self.out = nn.Dense(len(GERMAN), flatten=False, in_units=hidden)

    def hybrid_forward(self, F: Any, words: Any, before: Any) -> Any:  # noqa: N803 - Gluon's name
        """Return logits of each morpheme from the English words and the morphemes before it.

        Parameters
        ----------
        words : shape (N, ENGLISH_LENGTH), int32
        before : shape (N, GERMAN_LENGTH), int32
            The German text, one place later.
        """
        read = self.reader(self.source(words))
        written = self.writer(self.target(before))
        scores = F.batch_dot(written, self.key(read), transpose_b=True)
        if not self._attention:
            scores = F.zeros_like(scores)
        is_word = F.broadcast_like(F.expand_dims(words > 0, axis=1), scores)
        scores = F.where(is_word, scores, F.ones_like(scores) * _MASKED)
        seen = F.batch_dot(F.softmax(scores, axis=-1), read)
        return self.out(self.join(F.concat(seen, written, dim=-1)))


def make_network(settings: TranslatorSettings) -> gluon.HybridBlock:
    """Return a network with its first weights, in its format."""
    net = _Translator(settings)
    start(net, settings)
    return net


def train(settings: TranslatorSettings) -> Outcome:
    """Train on numbers and test on others."""
    training, test = draw_numbers(settings.training_numbers, settings.test_numbers, seed=0)
    (words, target), (test_words, test_target) = _tokens(training), _tokens(test)
    net = make_network(settings)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

    def score() -> dict[str, float]:
        likeliest = _likeliest(net, test_words, test_target)
        written = translate(net, test_words)
        return {
            "token_accuracy": float((likeliest == test_target)[test_target > 0].mean()),
            "sequence_accuracy": float((written == test_target).all(axis=1).mean()),
            "bleu": bleu(_texts(test_target), _texts(written)),
        }

    return fit(
        net,
        settings,
        [words, _before(target), target],
        lambda words, before, target: loss_fn(net(words, before), target),
        score,
    )


def translate(net: gluon.HybridBlock, words: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return translations, shape (N, GERMAN_LENGTH): after each morpheme the likeliest next one."""
    written = np.zeros((len(words), GERMAN_LENGTH), dtype=np.int32)
    for place in range(GERMAN_LENGTH):
        going_on = written[:, place - 1] > 0 if place else True
        written[:, place] = _likeliest(net, words, written)[:, place] * going_on
    return written


def _likeliest(
    net: gluon.HybridBlock, words: NDArray[np.int32], target: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Return the likeliest morpheme of each place, if those before it are the target's."""
    likeliest: NDArray[np.int32] = predict(net, words, _before(target)).argmax(axis=-1)
    return likeliest


def _before(target: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return a text one place later, which the decoder has when it writes each morpheme."""
    return np.pad(target[:, :-1], ((0, 0), (1, 0)))


def _tokens(numbers: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return (
        encode([english(one) for one in numbers], ENGLISH, ENGLISH_LENGTH),
        encode([german(one) for one in numbers], GERMAN, GERMAN_LENGTH),
    )


def _texts(tokens: NDArray[np.int32]) -> list[list[int]]:
    """Return each row up to its end."""
    return [list(takewhile(bool, row)) for row in tokens.tolist()]
