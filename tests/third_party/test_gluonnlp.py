"""gluonnlp's Transformer and BERT, with sentences of different lengths: with masks."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from third_party_helpers import Case, check, every_way

gluonnlp = pytest.importorskip(
    "gluonnlp",
    reason="it is not installed (make test WITH=third-party)",
    exc_type=ImportError,
)

pytestmark = pytest.mark.third_party

WORDS, LENGTH, BATCH_SIZE, UNITS = 30, 7, 4, 16
LENGTHS = mx.nd.array([7, 5, 3, 1])


def words(step, shape=(BATCH_SIZE, LENGTH)):
    return mx.nd.array(np.random.default_rng(step).integers(4, WORDS, shape))


def make_transformer():
    encoder, decoder, one_step = gluonnlp.model.transformer.get_transformer_encoder_decoder(
        units=UNITS, hidden_size=2 * UNITS, num_heads=2, dropout=0.1
    )
    vocabulary = gluonnlp.Vocab({f"word {number}": 1 for number in range(WORDS - 4)})
    net = gluonnlp.model.translation.NMTModel(
        vocabulary, vocabulary, encoder, decoder, one_step, embed_size=UNITS, embed_dropout=0.1
    )
    net.initialize(mx.init.Xavier())
    net(words(0), words(0), LENGTHS, LENGTHS)
    return net


def translation_losses(net, step):
    source, target = words(step), words(step + 100)
    logits, _ = net(source, target, LENGTHS, LENGTHS)
    return gluonnlp.loss.MaskedSoftmaxCELoss()(logits, target, LENGTHS)


@every_way
def test_the_transformer_trains_in_float16_like_fp32(way, hybridize):
    check(Case(make_transformer, translation_losses, BATCH_SIZE, learning_rate=0.1), way, hybridize)


def make_bert():
    encoder = gluonnlp.model.BERTEncoder(
        units=UNITS, hidden_size=2 * UNITS, num_heads=2, dropout=0.1, max_length=LENGTH
    )
    net = gluonnlp.model.BERTModel(
        encoder, vocab_size=WORDS, token_type_vocab_size=2, units=UNITS, embed_size=UNITS
    )
    net.initialize(mx.init.Normal(0.1))
    net(words(0), words(0) > 15, LENGTHS, mx.nd.zeros((BATCH_SIZE, 2)))
    return net


def pretraining_losses(net, step):
    sentences = words(step)
    positions = mx.nd.array([[1, 5], [2, 4], [0, 2], [0, 0]])
    _, _, next_sentence, guesses = net(sentences, sentences > 15, LENGTHS, positions)
    loss_fn = gluon.loss.SoftmaxCELoss()
    hidden = mx.nd.pick(sentences.expand_dims(1).tile((1, 2, 1)), positions)
    return [loss_fn(next_sentence, mx.nd.array([0, 1, 1, 0])), loss_fn(guesses, hidden)]


@every_way
def test_bert_trains_in_float16_like_fp32(way, hybridize):
    check(Case(make_bert, pretraining_losses, BATCH_SIZE, learning_rate=0.1), way, hybridize)
