"""Networks of the kind of MXNet's examples: plain Blocks with ``mx.nd`` operators of their own.

Written from the computations of the examples: Gatys' Gram matrices, Lample's LSTM-CRF, Tai's
child-sum tree-LSTM.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from third_party_helpers import Case, check, every_way

pytestmark = pytest.mark.third_party


class ReflectionConv(gluon.Block):
    """A convolution of an image that is continued by its reflection."""

    def __init__(self, channels, size, stride=1):
        super().__init__()
        self.margin = size // 2
        self.convolution = nn.Conv2D(channels, size, stride)

    def forward(self, x):
        margin = (0, 0, 0, 0) + 2 * (self.margin, self.margin)
        return self.convolution(nd.pad(x, mode="reflect", pad_width=margin))


class Residual(gluon.Block):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential()
        for _ in range(2):
            self.body.add(ReflectionConv(channels, 3), nn.InstanceNorm())

    def forward(self, x):
        return nd.relu(x + self.body(x))


class Enlarging(gluon.Block):
    def __init__(self, channels):
        super().__init__()
        self.after = ReflectionConv(channels, 3)

    def forward(self, x):
        return self.after(nd.UpSampling(x, scale=2, sample_type="nearest"))


class StyleTransfer(gluon.Block):
    """Paints an image; ``features`` judge it and are not trained."""

    def __init__(self):
        super().__init__()
        self.painter = nn.Sequential()
        self.painter.add(ReflectionConv(8, 5), nn.InstanceNorm(), nn.Activation("relu"))
        self.painter.add(ReflectionConv(8, 3, 2), Residual(8), Enlarging(8), ReflectionConv(3, 5))
        self.features = nn.HybridSequential()
        self.features.add(nn.Conv2D(8, 3, activation="relu"), nn.Conv2D(8, 3))

    def forward(self, images):
        return self.features(self.painter(images))


def gram_matrix(features):
    batch_size, channels, height, width = features.shape
    flat = features.reshape((batch_size, channels, height * width))
    return nd.batch_dot(flat, flat, transpose_b=True) / (channels * height * width)


def make_style_transfer():
    net = StyleTransfer()
    net.initialize(mx.init.Xavier())
    net.features.collect_params().setattr("grad_req", "null")
    net(nd.zeros((1, 3, 16, 16)))
    return net


def style_losses(net, step):
    images = nd.array(np.random.default_rng(step).standard_normal((2, 3, 16, 16)))
    features = net(images)
    with autograd.pause():  # a part of a cast network, called by itself, gives FP32 too
        content = net.features(images)
        style = gram_matrix(net.features(nd.flip(images, axis=3)))
    content_loss = nd.mean((features - content) ** 2, axis=0, exclude=True)
    return [content_loss, 10 * nd.sum((gram_matrix(features) - style) ** 2, axis=0, exclude=True)]


@every_way
def test_a_style_transfer_network_trains_in_float16_like_fp32(way, hybridize):
    check(Case(make_style_transfer, style_losses, 2, learning_rate=0.001), way, hybridize)


WORDS, TAGS, UNITS = 20, 4, 16


class LSTMCRF(gluon.Block):
    """Scores for the tags of a sentence, and for each tag after another one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, UNITS)
        self.lstm = gluon.rnn.LSTM(UNITS // 2, bidirectional=True)
        self.scores = nn.Dense(TAGS, flatten=False)
        self.transitions = self.params.get("transitions", shape=(TAGS, TAGS))

    def forward(self, sentence):
        hidden = self.lstm(self.embedding(sentence).expand_dims(1))
        return self.scores(hidden).reshape((-1, TAGS))

    def loss(self, sentence, tags):
        """Return the logarithm of all paths' sum, less the score of the true one."""
        emissions, transitions = self(sentence), self.transitions.data()
        paths, score = emissions[0], emissions[0][tags[0]]
        for place in range(1, len(tags)):
            entering = paths.expand_dims(1) + transitions + emissions[place].expand_dims(0)
            largest = nd.max(entering, axis=0)
            paths = nd.log(nd.sum(nd.exp(entering - largest.expand_dims(0)), axis=0)) + largest
            score = (
                score + transitions[tags[place - 1], tags[place]] + emissions[place][tags[place]]
            )
        largest = nd.max(paths)
        return nd.log(nd.sum(nd.exp(paths - largest))) + largest - score


def make_lstm_crf():
    net = LSTMCRF()
    net.initialize(mx.init.Xavier())
    net(nd.arange(5))
    return net


def tagging_losses(net, step):
    random = np.random.default_rng(step)
    lengths = (6, 4)
    return [
        net.loss(nd.array(random.integers(0, WORDS, size)), random.integers(0, TAGS, size).tolist())
        for size in lengths
    ]


@every_way
def test_an_lstm_crf_trains_in_float16_like_fp32(way, hybridize):
    check(Case(make_lstm_crf, tagging_losses, 2, learning_rate=0.1), way, hybridize)


class TreeLSTM(gluon.Block):
    """A state for each node of a tree ``(word, children)``, from the sum of its children's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, UNITS)
        self.gates = nn.Dense(3 * UNITS, in_units=2 * UNITS)
        self.forget = nn.Dense(UNITS, in_units=2 * UNITS)
        self.classifier = nn.Dense(TAGS, in_units=UNITS)

    def node(self, tree):
        word, children = tree
        x = self.embedding(nd.array([word]))
        states = [self.node(child) for child in children]
        hidden = nd.add_n(*[h for h, _ in states]) if states else nd.zeros((1, UNITS))
        gates = self.gates(nd.concat(x, hidden, dim=1))
        entering, leaving, update = nd.split(gates, num_outputs=3, axis=1)
        cell = nd.sigmoid(entering) * nd.tanh(update)
        for h, c in states:
            cell = cell + nd.sigmoid(self.forget(nd.concat(x, h, dim=1))) * c
        return nd.sigmoid(leaving) * nd.tanh(cell), cell

    def forward(self, tree):
        hidden, _ = self.node(tree)
        return self.classifier(hidden)


TREES = [
    (1, [(2, []), (3, [(4, []), (5, [])])]),
    (6, [(7, [(8, [(9, [])])])]),
    (10, [(1, []), (2, []), (3, [])]),
]
NODES = 13


def make_tree_lstm():
    net = TreeLSTM()
    net.initialize(mx.init.Xavier())
    net(TREES[0])
    return net


def tree_losses(net, step):
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    return [
        loss_fn(net(tree), nd.array([(step + place) % TAGS])) for place, tree in enumerate(TREES)
    ]


@every_way
def test_a_tree_lstm_trains_in_float16_like_fp32(way, hybridize):
    case = Case(make_tree_lstm, tree_losses, len(TREES), learning_rate=0.1, uses=NODES)
    check(case, way, hybridize)
