"""Networks of sequences: both kinds of attention are one function, which is that of the paper."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from benchmarks.sequences import KINDS, TOKENS, build_sequence_network

LENGTH, SEQUENCES, WIDTH = 6, 3, 32


def network(kind: str, layers: int = 2):
    mx.random.seed(0)
    return build_sequence_network(kind, layers=layers, width=WIDTH, ctx=mx.cpu())


def tokens() -> mx.nd.NDArray:
    drawn = np.random.RandomState(0).randint(0, TOKENS, size=(LENGTH, SEQUENCES))
    return mx.nd.array(drawn, dtype="int32")


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_network_has_logits_at_each_place_and_sequences_do_not_touch(kind, hybridized):
    net = network(kind)
    if hybridized:
        net.hybridize(static_alloc=True, static_shape=True)
    logits = net(tokens()).asnumpy()
    assert logits.shape == (LENGTH, SEQUENCES, TOKENS)
    other = tokens()
    other[0, 1] = (other[0, 1] + 1) % TOKENS
    changed = (net(other).asnumpy() != logits).any(axis=-1)
    assert changed[:, 1].all()  # the token is seen from all places after it
    assert not changed[:, [0, 2]].any()


def test_both_kinds_of_attention_are_the_same_function_of_the_same_parameters():
    one, other = network("attention"), network("attention by batch_dot")
    mine, theirs = (list(net.collect_params().values()) for net in (one, other))
    assert [p.shape for p in mine] == [p.shape for p in theirs]
    for source, target in zip(mine, theirs):
        target.set_data(source.data())
    np.testing.assert_allclose(one(tokens()).asnumpy(), other(tokens()).asnumpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["attention", "attention by batch_dot"])
def test_attention_is_the_mean_of_values_weighted_by_the_softmax_of_scaled_products(kind):
    layer = network(kind, layers=1)[1]
    inputs = np.random.RandomState(1).standard_normal((LENGTH, SEQUENCES, WIDTH)).astype("float32")
    projected = layer.projection(mx.nd.array(inputs))
    attend = layer._attend_interleaved if kind == "attention" else layer._attend
    found = attend(mx.nd, projected).asnumpy().reshape(LENGTH, SEQUENCES, 8, -1)
    queries, keys, values = np.moveaxis(
        projected.asnumpy().reshape(LENGTH, SEQUENCES, 8, 3, WIDTH // 8), 3, 0
    )
    scores = np.einsum("qnhd,knhd->nhqk", queries, keys) / np.sqrt(WIDTH // 8)
    expected = np.einsum("nhqk,knhd->qnhd", softmax(scores), values)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "width", "message"),
    [
        ("rnn", 16, "kind must be one of lstm, gru, attention.*received 'rnn'"),
        ("attention", 12, "width must be a multiple of 8, received 12"),
    ],
)
def test_other_networks_are_refused(kind, width, message):
    with pytest.raises(ValueError, match=message):
        build_sequence_network(kind, layers=1, width=width, ctx=mx.cpu())
