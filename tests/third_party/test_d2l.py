"""The networks of "Dive into Deep Learning" in 16 bits, by the package that comes with the book.

Zhang, Lipton, Li, Smola, "Dive into Deep Learning", its MXNet edition. All of it is written for
MXNet's NumPy interface, and most networks are plain Blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mpgluon
from mpgluon import BFLOAT16, FLOAT16, FloatFormat, amp, round_to

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

d2l = pytest.importorskip("d2l.mxnet", reason="the book's package: make test WITH=third-party")
mx.npx.reset_np()  # which importing it has switched on

pytestmark = [
    pytest.mark.third_party,
    pytest.mark.usefixtures("numpy_interface"),
    pytest.mark.filterwarnings("ignore:ndarray.as_in_context has been renamed"),  # by MXNet itself
]

WAYS = {
    "cast float16": lambda net: mpgluon.cast_block(net, "float16"),
    "autocast float16": lambda net: amp.autocast(net, "float16"),
    "autocast bfloat16": lambda net: amp.autocast(net, "bfloat16"),
    "autocast emulated bfloat16": lambda net: amp.autocast(net, "emulated_bfloat16"),
}
FORMATS = {way: BFLOAT16 if "bfloat16" in way else FLOAT16 for way in WAYS}
RANDOM = np.random.RandomState(0)
CLASSES, WORDS, BATCH = 10, 30, 4


def normal(*shape: int) -> Any:
    return mx.np.array(RANDOM.standard_normal(shape).astype(np.float32))


def integers(most: int, *shape: int) -> Any:
    return mx.np.array(RANDOM.randint(0, most, shape).astype(np.int32))


def cross_entropy(result: Any, labels: Any) -> Any:
    """Return the loss of each row, by the book's own function."""
    return d2l.Classifier.loss(None, result, labels, averaged=False)


@dataclass(frozen=True)
class Case:
    """A network of the book, where it stands there, and a batch for it.

    Attributes
    ----------
    chapter : str
    make : callable
        Returns the network, with or without values.
    batch : callable
        Returns the network's arguments and the labels.
    loss : callable
        Takes the network's result and the labels; returns a loss of any shape.
    """

    chapter: str
    make: Callable[[], gluon.Block]
    batch: Callable[[], tuple[tuple[Any, ...], Any]]
    loss: Callable[[Any, Any], Any] = cross_entropy


def images(size: int = 28, channels: int = 1) -> Callable[[], Any]:
    return lambda: ((normal(BATCH, channels, size, size),), integers(CLASSES, BATCH))


def sequential(*layers: gluon.Block) -> nn.Sequential:
    net = nn.Sequential()
    net.add(*layers)
    return net


def vgg() -> gluon.Block:
    def block(channels: int, count: int) -> list[gluon.Block]:
        layers = [nn.Conv2D(channels, 3, padding=1, activation="relu") for _ in range(count)]
        return [*layers, nn.MaxPool2D(2, 2)]

    return sequential(*block(8, 1), *block(16, 2), nn.Dense(32, activation="relu"), nn.Dense(10))


def network_in_network() -> gluon.Block:
    def block(channels: int, size: int, strides: int, padding: int) -> list[gluon.Block]:
        first = nn.Conv2D(channels, size, strides, padding, activation="relu")
        return [first, *(nn.Conv2D(channels, 1, activation="relu") for _ in range(2))]

    return sequential(
        *block(16, 5, 2, 2),
        nn.MaxPool2D(3, 2),
        *block(10, 3, 1, 1),
        nn.GlobalAvgPool2D(),
        nn.Flatten(),
    )


class Inception(nn.Block):
    """GoogLeNet's block: four paths, joined along the channels."""

    def __init__(self, *channels: int) -> None:
        super().__init__()
        one, three, five, pooled = channels
        self.one = nn.Conv2D(one, 1, activation="relu")
        self.three = sequential(
            nn.Conv2D(three // 2, 1, activation="relu"),
            nn.Conv2D(three, 3, padding=1, activation="relu"),
        )
        self.five = sequential(
            nn.Conv2D(five // 2, 1, activation="relu"),
            nn.Conv2D(five, 5, padding=2, activation="relu"),
        )
        self.pooled = sequential(nn.MaxPool2D(3, 1, 1), nn.Conv2D(pooled, 1, activation="relu"))

    def forward(self, x: Any) -> Any:
        paths = [path(x) for path in (self.one, self.three, self.five, self.pooled)]
        return mx.np.concatenate(paths, axis=1)


class DenseBlock(nn.Block):
    """DenseNet's block: each layer receives what all before it have returned."""

    def __init__(self, layers: int, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential()
        for _ in range(layers):
            self.net.add(
                sequential(nn.BatchNorm(), nn.Activation("relu"), nn.Conv2D(channels, 3, padding=1))
            )

    def forward(self, x: Any) -> Any:
        for block in self.net:
            x = mx.np.concatenate((x, block(x)), axis=1)
        return x


def resnet() -> gluon.Block:
    return sequential(
        nn.Conv2D(8, 7, 2, 3),
        nn.BatchNorm(),
        nn.Activation("relu"),
        nn.MaxPool2D(3, 2, 1),
        d2l.Residual(8),
        d2l.Residual(8),
        d2l.Residual(16, use_1x1conv=True, strides=2),
        d2l.Residual(16),
        nn.GlobalAvgPool2D(),
        nn.Dense(CLASSES),
    )


def language_model(kind: type, *arguments: int) -> Callable[[], gluon.Block]:
    def make() -> gluon.Block:
        return d2l.RNNLM(kind(16, *arguments), vocab_size=WORDS)

    return make


def words() -> Any:
    return (integers(WORDS, BATCH, 8),), integers(WORDS, BATCH, 8)


class Seq2SeqDecoder(d2l.Decoder):
    """The book's decoder without attention: the encoder's last state with each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.rnn = d2l.GRU(16, 2)
        self.dense = nn.Dense(WORDS, flatten=False)

    def init_state(self, enc_outputs: Any, *_: Any) -> Any:
        return enc_outputs

    def forward(self, x: Any, state: Any) -> Any:
        embedded = self.embedding(x.T)
        enc_output, hidden = state
        context = mx.np.tile(enc_output[-1], (embedded.shape[0], 1, 1))
        outputs, hidden = self.rnn(mx.np.concatenate((embedded, context), -1), hidden)
        return self.dense(outputs).swapaxes(0, 1), [enc_output, hidden]


class Seq2SeqAttentionDecoder(d2l.AttentionDecoder):
    """The book's decoder with Bahdanau attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = d2l.AdditiveAttention(16, 0)
        self.embedding = nn.Embedding(WORDS, 8)
        self.rnn = rnn.GRU(16, 2)
        self.dense = nn.Dense(WORDS, flatten=False)

    def init_state(self, enc_outputs: Any, enc_valid_lens: Any) -> Any:
        outputs, hidden = enc_outputs
        return outputs.swapaxes(0, 1), hidden, enc_valid_lens

    def forward(self, x: Any, state: Any) -> Any:
        enc_outputs, hidden, enc_valid_lens = state
        hidden, outputs = [hidden], []
        for one in self.embedding(x).swapaxes(0, 1):
            query = mx.np.expand_dims(hidden[0][-1], axis=1)
            context = self.attention(query, enc_outputs, enc_outputs, enc_valid_lens)
            one = mx.np.concatenate((context, mx.np.expand_dims(one, axis=1)), axis=-1)
            out, hidden = self.rnn(one.swapaxes(0, 1), hidden)
            outputs.append(out)
        outputs = self.dense(mx.np.concatenate(outputs, axis=0))
        return outputs.swapaxes(0, 1), [enc_outputs, hidden[0], enc_valid_lens]


def seq2seq(decoder: type) -> Callable[[], gluon.Block]:
    def make() -> gluon.Block:
        encoder = d2l.Seq2SeqEncoder(WORDS, 8, 16, 2)
        return d2l.EncoderDecoder(encoder, decoder())

    return make


def pairs() -> Any:
    lengths = mx.np.array([3, 8, 5, 2], dtype="int32")
    return (integers(WORDS, BATCH, 8), integers(WORDS, BATCH, 7), lengths), integers(
        WORDS, BATCH, 7
    )


class TransformerClassifier(nn.Block):
    """The book's transformer encoder with a dense layer, as in its chapter on inference."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = d2l.TransformerEncoder(WORDS, 16, 32, 4, 2, 0)
        self.dense = nn.Dense(CLASSES)

    def forward(self, x: Any, valid_lens: Any) -> Any:
        return self.dense(self.encoder(x, valid_lens)[:, 0, :])


def bert_batch() -> Any:
    lengths = mx.np.array([3, 8, 5, 2], dtype="float32")
    arguments = integers(WORDS, BATCH, 8), integers(2, BATCH, 8), lengths, integers(8, BATCH, 3)
    return arguments, (integers(WORDS, BATCH, 3), integers(2, BATCH))


def bert_loss(result: Any, labels: Any) -> Any:
    """Return the loss of masked words and of next sentences, one number for each example."""
    _, masked, following = result
    masked_loss = cross_entropy(masked, labels[0]).reshape(BATCH, -1).mean(axis=1)
    return masked_loss + cross_entropy(following, labels[1])


class Factorization(nn.Block):
    """Matrix factorization, from the chapter on recommender systems."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 8), nn.Embedding(WORDS, 8)
        self.user_bias, self.item_bias = nn.Embedding(20, 1), nn.Embedding(WORDS, 1)

    def forward(self, user: Any, item: Any) -> Any:
        products = (self.users(user) * self.items(item)).sum(axis=1)
        return products + mx.np.squeeze(self.user_bias(user)) + mx.np.squeeze(self.item_bias(item))


class FullyConvolutional(nn.Block):
    """The end of the book's FCN: a class for each pixel, by a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.net = sequential(
            nn.Conv2D(8, 3, 2, 1, activation="relu"),
            nn.Conv2D(CLASSES, 1),
            nn.Conv2DTranspose(CLASSES, kernel_size=4, padding=1, strides=2),
        )

    def forward(self, x: Any) -> Any:
        return self.net(x).transpose(0, 2, 3, 1)


CASES = {
    "softmax regression": Case("4.5", lambda: d2l.SoftmaxRegression(CLASSES, 0.1), images()),
    "LeNet": Case("7.6", lambda: d2l.LeNet(), images()),
    "VGG": Case("8.2", vgg, images()),
    "NiN": Case("8.3", network_in_network, images()),
    "GoogLeNet": Case(
        "8.4",
        lambda: sequential(
            nn.Conv2D(8, 3, 2, 1), Inception(4, 8, 4, 4), nn.GlobalAvgPool2D(), nn.Dense(CLASSES)
        ),
        images(),
    ),
    "ResNet": Case("8.6", resnet, images(64)),
    "ResNeXt": Case(
        "8.6",
        lambda: sequential(
            nn.Conv2D(16, 3, 1, 1), d2l.ResNeXtBlock(32, 4, 1, True, 2), nn.Dense(CLASSES)
        ),
        images(),
    ),
    "DenseNet": Case(
        "8.7",
        lambda: sequential(
            nn.Conv2D(8, 3, 2, 1), DenseBlock(3, 4), nn.GlobalAvgPool2D(), nn.Dense(CLASSES)
        ),
        images(),
    ),
    "RNN": Case("9.6", language_model(d2l.RNN), words),
    "GRU": Case("10.2", language_model(d2l.GRU, 2), words),
    "seq2seq": Case("10.7", seq2seq(Seq2SeqDecoder), pairs),
    "seq2seq with attention": Case("11.4", seq2seq(Seq2SeqAttentionDecoder), pairs),
    "transformer encoder": Case(
        "11.7",
        TransformerClassifier,
        lambda: (
            (integers(WORDS, BATCH, 8), mx.np.array([3, 8, 5, 2])),
            integers(CLASSES, BATCH),
        ),
    ),
    "FCN": Case(
        "14.11",
        FullyConvolutional,
        lambda: ((normal(BATCH, 3, 16, 16),), integers(CLASSES, BATCH, 16, 16)),
    ),
    "BERT": Case(
        "15.10", lambda: d2l.BERTModel(WORDS, 16, 32, 2, 2, 0.0, max_len=8), bert_batch, bert_loss
    ),
    "matrix factorization": Case(
        "21.3",
        Factorization,
        lambda: ((integers(20, 16), integers(WORDS, 16)), normal(16)),
        lambda result, labels: gluon.loss.L2Loss()(result, labels),
    ),
}


def rounded(case: Case, fmt: FloatFormat) -> Case:
    """Return a case whose inputs and first weights are rounded; the rest is FP32."""

    def make() -> gluon.Block:
        net = case.make()
        net.round_to = fmt
        return net

    def batch() -> tuple[tuple[Any, ...], Any]:
        arguments, labels = case.batch()
        return tuple(_round(one, fmt) for one in arguments), labels

    return replace(case, make=make, batch=batch)


def _round(array: Any, fmt: FloatFormat) -> Any:
    is_float = array.dtype == np.float32
    return mx.np.array(round_to(array.asnumpy(), fmt)) if is_float else array


def train(case: Case, way: str, *, steps: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of each step, and the first step's gradient of all parameters."""
    RANDOM.seed(1)
    mx.random.seed(1)
    arguments, labels = case.batch()
    net = case.make()
    net.initialize(mx.init.Xavier(), force_reinit=True)
    net(*arguments)
    if way in WAYS:
        WAYS[way](net)
    elif hasattr(net, "round_to"):
        for parameter in net.collect_params().values():
            parameter.set_data(_round(parameter.data(), net.round_to))
    options = {"learning_rate": 0.05, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, mpgluon.StaticLossScale(2.0**6))
    losses, gradients = [], None
    for _ in range(steps):
        with autograd.record():
            loss = case.loss(net(*arguments), labels)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        if gradients is None:
            unscaled = amp.unscaled_gradients(trainer)
            parameters = net._collect_params_with_prefix().values()  # names count blocks
            gradients = [
                unscaled[p.name].asnumpy().ravel() for p in parameters if p.name in unscaled
            ]
        trainer.step(loss.size)
        losses.append(float(loss.mean().asnumpy()))
    assert amp.skipped_steps(trainer) == 0
    return np.array(losses), np.concatenate(gradients)


def distance(gradient: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(gradient - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_network_of_the_book_trains_in_16_bits_as_in_fp32(name, way):
    losses, gradient = train(CASES[name], "FP32")
    narrow_losses, narrow_gradient = train(CASES[name], way)
    assert losses[-1] < losses[0]
    assert narrow_losses[-1] < narrow_losses[0]
    # The measure is the change that rounding only inputs and weights makes, of which there are more
    # roundings in a cast network: of each layer's result and gradient, independent of each other.
    fmt = FORMATS[way]
    _, control = train(rounded(CASES[name], fmt), "FP32", steps=1)
    bound = 4 * distance(control, gradient) + 4 * fmt.unit_roundoff
    error = distance(narrow_gradient, gradient)
    assert error <= bound
    assert np.abs(narrow_losses - losses).max() <= bound * losses[0]
    # Autocast rounds products of matrices only, which matrix factorization has none of.
    assert error > 0 or (name == "matrix factorization" and "autocast" in way)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "d2l.md"
COLUMNS = ("cast float16", "autocast float16", "autocast bfloat16")


def row_of(name: str) -> str:
    """Return a network's row of the page's table."""
    _, gradient = train(CASES[name], "FP32", steps=1)
    errors = []
    for way in COLUMNS:
        _, narrow = train(CASES[name], way, steps=1)
        errors.append(distance(narrow, gradient))
    cells = " | ".join(f"{error:.1g}" if error else "0" for error in errors)
    return f"| {CASES[name].chapter} | {name} | {cells} |"


@pytest.mark.usefixtures("native_bfloat16")
@pytest.mark.parametrize("name", CASES)
def test_the_table_of_the_page_has_these_figures(name):
    assert row_of(name) in PAGE.read_text().splitlines()


def test_the_code_of_the_page_trains_a_network_of_the_book(monkeypatch):
    monkeypatch.setattr(d2l.ProgressBoard, "draw", lambda *_, **__: None)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)

    class Digits(d2l.DataModule):
        def __init__(self):
            super().__init__()
            self.batch_size = 8

        def get_dataloader(self, train):
            return self.get_tensorloader([normal(32, 1, 28, 28), integers(10, 32)], train)

    names = {"data": Digits()}
    for block in blocks:
        exec(block, names)
    trainer = names["model"].trainer
    assert trainer.train_batch_idx == 8
    assert amp.loss_scale(trainer.optim) > 1
