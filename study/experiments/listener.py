"""Train a small recurrent network that writes down spoken digits, in one format, and test it.

References
----------
Graves, Fernandez, Gomez, Schmidhuber, "Connectionist Temporal Classification", ICML 2006.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from mxnet import gluon
from mxnet.gluon import nn, rnn
from numpy.typing import NDArray

from study.experiments.experiment import Outcome
from study.experiments.loop import LoopSettings, fit, predict, start
from study.experiments.sequence_scores import edit_distance
from study.experiments.spoken_digits import BANDS, draw_strings, encode, frames_of, record

__all__ = ["BLANK", "ListenerSettings", "make_network", "read_off", "train"]

BLANK = 10  # the last output, as CTCLoss of Gluon wants it
_SOUND_SEED = 1  # keeps the draws of sounds apart from others


@dataclass(frozen=True)
class ListenerSettings(LoopSettings):
    """All that a run depends on.

    Attributes
    ----------
    hidden : int
        Units of each direction.
    """

    training_strings: int = 1500
    test_strings: int = 1000
    epochs: int = 12
    hidden: int = 48
    learning_rate: float = 0.006
    max_norm: float = 5.0


class _Listener(gluon.HybridBlock):
    """A bidirectional LSTM, and a Dense layer on each frame."""

    def __init__(self, settings: ListenerSettings) -> None:
        super().__init__()
        with self.name_scope():
            self.lstm = rnn.LSTM(
                settings.hidden, layout="NTC", bidirectional=True, input_size=BANDS
            )
            self.out = nn.Dense(BLANK + 1, flatten=False, in_units=2 * settings.hidden)

    def hybrid_forward(self, F: Any, frames: Any) -> Any:  # noqa: ARG002, N803 - Gluon's name
        """Return logits, shape (N, FRAMES, BLANK + 1), of frames, shape (N, FRAMES, BANDS)."""
        return self.out(self.lstm(frames))


def make_network(settings: ListenerSettings) -> gluon.HybridBlock:
    """Return a network with its first weights, in its format."""
    net = _Listener(settings)
    start(net, settings)
    return net


def train(settings: ListenerSettings) -> Outcome:
    """Train on recordings and test on others, of other digits by other voices."""
    training, test = draw_strings(settings.training_strings, settings.test_strings, seed=0)
    rng = np.random.default_rng(_SOUND_SEED)
    heard, test_heard = (
        np.stack([frames_of(record(one, rng)) for one in strings]) for strings in (training, test)
    )
    mean, spread = (of(heard, axis=(0, 1)) for of in (np.mean, np.std))
    heard, test_heard = ((one - mean) / spread for one in (heard, test_heard))
    net = make_network(settings)
    loss_fn = gluon.loss.CTCLoss(layout="NTC", label_layout="NT")

    def score() -> dict[str, float]:
        written = read_off(predict(net, test_heard))
        errors = sum(map(edit_distance, test, written))
        return {
            "label_error_rate": errors / sum(map(len, test)),
            "sequence_accuracy": float(np.mean([a == b for a, b in zip(test, written)])),
        }

    return fit(net, settings, [heard, encode(training)], lambda x, y: loss_fn(net(x), y), score)


def read_off(logits: NDArray[np.float32]) -> list[str]:
    """Return the digits of the likeliest path: without repetitions, then without blanks."""
    texts = []
    for path in logits.argmax(axis=-1):
        first = np.concatenate([[True], path[1:] != path[:-1]])
        texts.append("".join(map(str, path[first & (path != BLANK)])))
    return texts
