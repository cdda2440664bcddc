"""Recurrent layers, embeddings and a Transformer block train in 16 bits, to the same bits twice."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    BOTH,
    EACH_WAY,
    SAME_BITS_HYBRIDIZED,
    STATIC,
    WAYS,
    assert_same_bits,
    autocast_net,
    gradients_of,
    in_way,
    initialized,
    parameters_of,
    train,
)
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

BATCH, TIME, WIDTH = 4, 5, 6
LABELS = mx.nd.array([0, 1, 2, 1], dtype="int32")


def random_array(*shape):
    return mx.nd.array(np.random.RandomState(1).standard_normal(shape), dtype="float32")


class Recurrent(gluon.HybridBlock):
    """A recurrent layer and a Dense layer on its last step."""

    def __init__(self, layer, states=()):
        super().__init__()
        self.layer, self.states = layer, states
        with self.name_scope():
            self.out = nn.Dense(3)

    def hybrid_forward(self, F, x, *rest):
        if rest and not self.states:  # lengths; MXNet wants the states too
            steps = self.layer(x, sequence_length=rest[0])
        elif rest:
            steps, _ = self.layer(x, list(rest))
        else:
            steps = self.layer(x)
        return self.out(F.mean(steps, axis=self.layer._layout.find("T")))


def recurrent_cases():
    for kind in (rnn.LSTM, rnn.GRU, rnn.RNN):
        yield f"{kind.__name__}", lambda kind=kind: kind(8)
    yield "two layers", lambda: rnn.LSTM(8, num_layers=2)
    yield "bidirectional", lambda: rnn.GRU(8, bidirectional=True)
    yield "NTC", lambda: rnn.LSTM(8, layout="NTC", bidirectional=True, num_layers=2)
    yield "relu NTC", lambda: rnn.RNN(8, activation="relu", layout="NTC")


CASES = dict(recurrent_cases())


def check(build, way, inputs):
    """Train imperative and hybridized and demand equal bits, and outputs near FP32's."""
    results = []
    for hybridize in (False, True):
        mx.random.seed(0)
        net = initialized(build(), mx.init.Xavier())
        reference = net(*inputs).asnumpy()
        before = parameters_of(net)
        report = WAYS[way](net)
        net.hybridize(hybridize, **STATIC)
        assert report.beyond_reach == ()
        outputs = net(*inputs)
        assert outputs.dtype == np.float32
        # Nothing here amplifies: gates have slopes below 1 and normalization sees unit variance.
        # A few dozen roundings of values below 4 stay below a hundred unit roundoffs.
        unit_roundoff = 2.0**-8 if "bfloat16" in way else 2.0**-11
        assert 0 < np.abs(outputs.asnumpy() - reference).max() <= 100 * unit_roundoff
        losses = train(net, inputs, LABELS, steps=3)
        assert np.isfinite(losses).all()
        after = parameters_of(net)
        assert [name for name in after if (after[name] == before[name]).all()] == []
        results.append({**after, "outputs": outputs.asnumpy(), "losses": np.array(losses)})
    if way in SAME_BITS_HYBRIDIZED:
        assert_same_bits(*results)


@EACH_WAY
@pytest.mark.parametrize("case", CASES)
def test_a_recurrent_layer_trains_and_in_float16_to_the_same_bits_hybridized(case, way):
    layer = CASES[case]
    shape = (BATCH, TIME, WIDTH) if "NTC" in case else (TIME, BATCH, WIDTH)
    check(lambda: Recurrent(layer()), way, [random_array(*shape)])


@EACH_WAY
@pytest.mark.parametrize("kind", [rnn.LSTM, rnn.GRU])
def test_a_recurrent_layer_takes_states_in_fp32(kind, way):
    states = [random_array(1, BATCH, 8)] * (2 if kind is rnn.LSTM else 1)
    inputs = [random_array(TIME, BATCH, WIDTH), *states]
    check(lambda: Recurrent(kind(8), states=tuple(range(len(states)))), way, inputs)


@EACH_WAY
@BOTH
def test_sequence_lengths_are_obeyed_or_refused_as_by_mxnet_itself(way, hybridize):
    def run(net):
        data, lengths = random_array(TIME, BATCH, WIDTH), mx.nd.array([1, 2, 3, 5])
        try:
            return net(data, lengths).asnumpy()
        except mx.MXNetError as error:
            return str(error).splitlines()[-1].split("Check failed")[-1]

    def build():
        mx.random.seed(0)
        net = initialized(Recurrent(rnn.LSTM(8, use_sequence_length=True)), mx.init.Xavier())
        run(net)  # gives the parameters their values, in FP32
        return net

    plain = run(build())
    net = in_way(way, build())
    net.hybridize(hybridize)
    cast = run(net)
    if isinstance(plain, str):  # MXNet 1.9.1 knows lengths with cuDNN only
        assert cast == plain
    else:
        assert np.allclose(cast, plain, atol=2.0**-4)


class Unrolled(gluon.HybridBlock):
    """A cell, unrolled over the steps."""

    def __init__(self, kind):
        super().__init__()
        with self.name_scope():
            self.cell, self.out = kind(8), nn.Dense(3)

    def hybrid_forward(self, F, x):
        steps, _ = self.cell.unroll(TIME, x, layout="NTC", merge_outputs=True)
        return self.out(steps)


@EACH_WAY
@pytest.mark.parametrize("kind", [rnn.LSTMCell, rnn.GRUCell, rnn.RNNCell])
def test_an_unrolled_cell_trains_and_in_float16_to_the_same_bits_hybridized(kind, way):
    check(lambda: Unrolled(kind), way, [random_array(BATCH, TIME, WIDTH)])


class Steps(gluon.HybridBlock):
    """A function of the steps of a cell, which MXNet's own ``stack`` joins, not the stand-in's."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        with self.name_scope():
            self.cell = rnn.RNNCell(8, input_size=WIDTH)

    def hybrid_forward(self, F, x):
        return self.function(F, self.cell.unroll(TIME, x, layout="NTC", merge_outputs=True)[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda F, steps: steps,  # noqa: ARG005
        lambda F, steps: F.identity(steps),
        lambda F, steps: F.LeakyReLU(steps, act_type="gelu"),
        lambda F, steps: F.broadcast_add(steps, F.tanh(steps)),
        lambda F, steps: F.relu(steps) - steps,
        lambda F, steps: F.identity(steps) + F.ones((BATCH, TIME, 8), dtype="float32"),
    ],
    ids=["returned", "a copy", "an activation", "a sum", "a difference", "a copy and FP32 numbers"],
)
@pytest.mark.parametrize("way", SAME_BITS_HYBRIDIZED)
def test_results_of_mxnets_own_operators_are_rounded_as_in_an_imperative_run(way, function):
    results = []
    for hybridize in (False, True):
        mx.random.seed(0)
        net = in_way(way, initialized(Steps(function), mx.init.Xavier()))
        net.hybridize(hybridize)
        x = random_array(BATCH, TIME, WIDTH)
        x.attach_grad()
        with autograd.record():
            result = net(x)
            loss = (result * random_array(BATCH, TIME, 8)).sum()
        loss.backward()
        values = {"result": result.asnumpy(), "x": x.grad.asnumpy()}
        results.append({**values, **gradients_of(net)})
    assert_same_bits(*results)


class TextClassifier(gluon.HybridBlock):
    """Embedding, LSTM, Dense."""

    def __init__(self, words):
        super().__init__()
        with self.name_scope():
            self.embedding = nn.Embedding(words, 7)
            self.lstm = rnn.LSTM(8, layout="NTC")
            self.out = nn.Dense(3)

    def hybrid_forward(self, F, tokens):
        return self.out(self.lstm(self.embedding(tokens)))


@EACH_WAY
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_text_classifier_reads_words_beyond_2048(way, dtype):
    # Neighbours that float16 cannot tell apart must be different words.
    tokens = np.arange(BATCH * TIME).reshape(BATCH, TIME) + 2040
    check(lambda: TextClassifier(2100), way, [mx.nd.array(tokens, dtype=dtype)])


class TransformerBlock(gluon.HybridBlock):
    """Self-attention and a feed-forward layer, each with a residual sum and normalization."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        with self.name_scope():
            self.query = nn.Dense(width, flatten=False)
            # A bias of the keys would shift all scores of a row alike, and have no gradient.
            self.key = nn.Dense(width, flatten=False, use_bias=False)
            self.value = nn.Dense(width, flatten=False)
            self.projection = nn.Dense(width, flatten=False)
            self.first, self.second = nn.LayerNorm(), nn.LayerNorm()
            self.widen = nn.Dense(4 * width, flatten=False)
            self.gelu, self.dropout = nn.GELU(), nn.Dropout(0.1)
            self.narrow = nn.Dense(width, flatten=False)

    def split(self, F, x):
        """Return (N, T, C) as (N heads, T, C / heads)."""
        x = F.transpose(F.reshape(x, (0, 0, self.heads, -1)), (0, 2, 1, 3))
        return F.reshape(x, (-3, 0, 0))

    def hybrid_forward(self, F, x, mask):
        query, key, value = (self.split(F, d(x)) for d in (self.query, self.key, self.value))
        # Not "+ mask": with static_alloc, MXNet 1.9.1 then returns garbage as the gradient of
        # scores, in plain FP32 too, if the mask is an input that has no gradient itself.
        scores = F.batch_dot(query * self.scale, key, transpose_b=True)
        scores = F.broadcast_add(scores, mask)
        mixed = F.batch_dot(F.softmax(scores, axis=-1), value)
        mixed = F.reshape(mixed, (-4, -1, self.heads, 0, 0)).transpose((0, 2, 1, 3))
        mixed = F.reshape(mixed, (0, 0, -3))
        x = self.first(x + self.dropout(self.projection(mixed)))
        return self.second(x + self.narrow(self.gelu(self.widen(x))))


class Transformer(gluon.HybridBlock):
    """An embedding with positions, a Transformer block, and a classifier of the mean."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.embedding = nn.Embedding(3000, 8)
            self.positions = self.params.get("positions", shape=(TIME, 8), init="uniform")
            self.block, self.out = TransformerBlock(8, heads=2), nn.Dense(3)

    def hybrid_forward(self, F, tokens, mask, positions):
        x = F.broadcast_add(self.embedding(tokens), positions.expand_dims(0))
        return self.out(self.block(x, mask).mean(axis=1))


@EACH_WAY
def test_a_transformer_block_trains_and_in_float16_to_the_same_bits_hybridized(way):
    tokens = np.arange(BATCH * TIME).reshape(BATCH, TIME) + 2040
    mask = np.triu(np.full((TIME, TIME), -1e4), k=1)[None].repeat(2 * BATCH, axis=0)
    inputs = [mx.nd.array(tokens, dtype="int32"), mx.nd.array(mask, dtype="float32")]
    check(Transformer, way, inputs)


@BOTH
def test_the_scores_of_attention_are_normalized_in_fp32(hybridize):
    # A row of 3000 equal scores: float16 accumulation would be off by half.
    class Scores(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            return F.softmax(F.batch_dot(x, x, transpose_b=True), axis=-1)

    net = autocast_net(Scores())
    net.hybridize(hybridize)
    shares = net(mx.nd.ones((1, 3000, 2))).asnumpy()[0, 0].astype(np.float64)
    assert abs(shares.sum() - 1) <= 3001 * 2.0**-24


@EACH_WAY
def test_states_begun_by_the_layer_itself_have_the_right_format(way):
    layer = in_way(way, initialized(rnn.GRU(8, input_size=WIDTH)))
    with autograd.record():
        result, states = layer(
            random_array(TIME, BATCH, WIDTH), layer.begin_state(batch_size=BATCH)
        )
    result.backward()
    assert result.dtype == np.float32
    assert all(state.dtype == np.float32 for state in states)
