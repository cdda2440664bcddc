"""Networks of sequences: recurrent layers, and a transformer encoder with two kinds of attention.

Each predicts a token at each place of its sequences, as a language model does. Places are the first
axis, T, and sequences the second, N.
"""

from __future__ import annotations

import math
from typing import Any

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn, rnn

__all__ = ["KINDS", "TOKENS", "build_sequence_network"]

TOKENS = 1000
KINDS = ("lstm", "gru", "attention", "attention by batch_dot")
_HEADS = 8
_WIDENING = 4  # hidden units of the feed-forward part for each unit of the width


def build_sequence_network(
    kind: str, *, layers: int, width: int, ctx: mx.Context
) -> gluon.HybridBlock:
    """Return a network from tokens, shape (T, N), to logits, shape (T, N, `TOKENS`), initialized.

    Parameters
    ----------
    kind : {"lstm", "gru", "attention", "attention by batch_dot"}
        Recurrent layers, each one operator for all places; or encoder layers whose attention is
        computed by MXNet's operators for interleaved queries, keys and values, or by ``batch_dot``
        in the same function of the same parameters.
    layers, width : int
        Units of the embedding and of each layer. For attention a multiple of 8, its heads.
    ctx : Context

    Raises
    ------
    ValueError
        If there is no such kind, or the width does not suit the heads.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; received {kind!r}")
    net = nn.HybridSequential()
    net.add(nn.Embedding(TOKENS, width))
    if kind in ("lstm", "gru"):
        layer = rnn.LSTM if kind == "lstm" else rnn.GRU
        net.add(layer(width, layers, input_size=width))
    else:
        if width % _HEADS:
            raise ValueError(f"width must be a multiple of {_HEADS}, received {width}")
        for _ in range(layers):
            net.add(_EncoderLayer(width, interleaved=kind == "attention"))
    net.add(nn.Dense(TOKENS, flatten=False, in_units=width))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    return net


class _EncoderLayer(gluon.HybridBlock):
    """Attention and a feed-forward part, each added to its input and normalized; no dropout.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", NIPS 2017, section 3.1.
    """

    def __init__(self, width: int, *, interleaved: bool) -> None:
        super().__init__()
        self._width, self._interleaved = width, interleaved
        with self.name_scope():
            # For each head its query, key and value, one after the other.
            self.projection = nn.Dense(3 * width, flatten=False, in_units=width)
            self.out = nn.Dense(width, flatten=False, in_units=width)
            self.hidden = nn.Dense(
                _WIDENING * width, activation="relu", flatten=False, in_units=width
            )
            self.narrow = nn.Dense(width, flatten=False, in_units=_WIDENING * width)
            self.norm_attention = nn.LayerNorm(in_channels=width)
            self.norm = nn.LayerNorm(in_channels=width)

    def hybrid_forward(self, F: Any, inputs: Any) -> Any:  # noqa: N803 - Gluon's name
        """Return an array of the shape of the inputs, (T, N, width)."""
        attend = self._attend_interleaved if self._interleaved else self._attend
        values = self.norm_attention(inputs + self.out(attend(F, self.projection(inputs))))
        return self.norm(values + self.narrow(self.hidden(values)))

    def _attend_interleaved(self, F: Any, projected: Any) -> Any:  # noqa: N803
        scores = F.contrib.interleaved_matmul_selfatt_qk(projected, heads=_HEADS)
        weights = F.softmax(scores, axis=-1)
        return F.contrib.interleaved_matmul_selfatt_valatt(projected, weights, heads=_HEADS)

    def _attend(self, F: Any, projected: Any) -> Any:  # noqa: N803
        # (T, N, 3 * width) to (N * heads, T, 3 * units of a head).
        by_head = F.transpose(F.reshape(projected, shape=(0, 0, _HEADS, -1)), axes=(1, 2, 0, 3))
        queries, keys, values = F.split(F.reshape(by_head, shape=(-3, 0, 0)), 3, axis=-1)
        queries = queries / math.sqrt(self._width // _HEADS)
        weights = F.softmax(F.batch_dot(queries, keys, transpose_b=True), axis=-1)
        attended = F.reshape(F.batch_dot(weights, values), shape=(-4, -1, _HEADS, 0, 0))
        return F.reshape(F.transpose(attended, axes=(2, 0, 1, 3)), shape=(0, 0, -3))
