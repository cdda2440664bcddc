"""Random small networks in which one layer overflows in float16 and in FP32 nothing does.

The layer is known by construction: weights or inputs are multiplied until its largest result is
beyond 65504, and what comes before it is not. :func:`first_by_hooks` finds it by other means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Callable, Optional

from mpgluon.cast.block import blocks_of
from mpgluon_tools.diagnostics.observe import Batch

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

FAR_BEYOND = 2.0**22  # 65504 is the largest float16
ALMOST = 40000.0  # twice of which is too large


class Residual(nn.HybridBlock):
    """Adds the result of the layers inside it to its input."""

    def __init__(self, *layers: Callable[[], gluon.Block]) -> None:
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            with self.body.name_scope():
                self.body.add(*(layer() for layer in layers))

    def hybrid_forward(self, F, x):
        return self.body(x) + x


class Unrolled(nn.HybridBlock):
    """Applies a recurrent cell to the five steps of a sequence (N, 5, C)."""

    def __init__(self, cell: Callable[[], gluon.Block]) -> None:
        super().__init__()
        with self.name_scope():
            self.cell = cell()

    def hybrid_forward(self, F, x):
        outputs, _ = self.cell.unroll(5, x, layout="NTC", merge_outputs=True)
        return outputs


class SumPooling(nn.HybridBlock):
    """Sums over windows of 3 x 3."""

    def hybrid_forward(self, F, x):
        return F.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="sum")


@dataclass(frozen=True)
class Planted:
    """A network and a batch.

    Attributes
    ----------
    seed : int
    make : callable
        Returns the network in FP32, with the same values and names of blocks each time.
    batch : Batch
    layer : str
        The name of the block that overflows first when the network computes in float16.
    """

    seed: int
    make: Callable[[], gluon.HybridBlock]
    batch: Batch
    layer: str


@cache
def planted(seed: int) -> Planted:
    """Return the network of a seed."""
    random = Random(seed)
    while True:
        made = _tried(seed, random)
        if made is not None:
            return made


def _tried(seed: int, random: Random) -> Optional[Planted]:
    """Return a random network; None if its weights would have to be infinite themselves."""
    family = ("images", "vectors", "sequences")[seed % 3]
    shape = {"images": (4, 3, 6, 6), "vectors": (8, 6), "sequences": (4, 5, 6)}[family]
    layers = [_layer(family, random) for _ in range(random.randint(3, 6))]
    kind = random.choice(("weights", "weights", "inputs", "sum"))
    at = 0 if kind == "inputs" else random.randrange(len(layers) + 1)
    if kind == "sum":  # which overflows, and neither of its operands does
        layers[at:at] = [_product(family), _doubling(family)]
    elif kind == "inputs":
        layers.insert(0, _product(family))
    values = np.random.RandomState(seed)
    data = values.standard_normal(shape)
    if kind == "inputs":
        data *= ALMOST / data.ravel()[np.abs(data).argmax()]
    inputs = mx.nd.array(data)
    labels = mx.nd.array(values.randint(0, 3, shape[0]), dtype="int32")
    batch = Batch(inputs, labels, gluon.loss.SoftmaxCrossEntropyLoss())

    def plain() -> gluon.HybridBlock:
        mx.random.seed(seed)
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(*(layer() for layer in layers))
            net.add(nn.Dense(3))
        net.initialize(mx.init.Normal(0.5))
        with autograd.train_mode():
            net(inputs)
        return net

    net = plain()
    weights = target = (
        net[at]
        if kind == "inputs"
        else random.choice([block for block in _leaves(net) if _weight_of(block) is not None])
    )
    size = FAR_BEYOND
    if kind == "sum":
        weights, target, size = net[at], net[at + 1], ALMOST
    weight = _weight_of(weights)
    factor = size / _largest_result(net, weights, inputs)
    if not np.abs(weight.data().asnumpy() * factor).max() < ALMOST:
        return None

    def make() -> gluon.HybridBlock:
        made = plain()
        large = made.collect_params()[weight.name]
        large.set_data(large.data() * factor)
        return made

    return Planted(seed, make, batch, target.name)


def _layer(family: str, random: Random) -> Callable[[], gluon.Block]:
    """Return a function that makes a layer that keeps all of a batch's shape but the channels."""
    size = random.choice((4, 5, 6))
    pooling = {"pool_size": 3, "strides": 1, "padding": 1}
    norms = [lambda: nn.LayerNorm(), lambda: nn.BatchNorm(axis=1 if family == "images" else -1)]
    everywhere = [_product(family, size), lambda: nn.Activation("relu"), *norms]
    own = {
        "images": [
            lambda: nn.Conv2D(size, 1, use_bias=False), lambda: nn.Conv2D(size, 3, padding=1),
            lambda: nn.MaxPool2D(**pooling), lambda: nn.AvgPool2D(**pooling),
            lambda: nn.GroupNorm(), lambda: nn.InstanceNorm(), lambda: SumPooling(),
            lambda: Residual(lambda: nn.MaxPool2D(**pooling), *norms[:1]),
        ],
        "vectors": [
            lambda: Residual(norms[0], lambda: nn.Activation("relu")),
            lambda: nn.Dense(size),
        ],
        "sequences": [
            lambda: Unrolled(lambda: rnn.RNNCell(size, activation="relu")),
            lambda: Unrolled(lambda: rnn.GRUCell(size)),
            lambda: Unrolled(lambda: rnn.LSTMCell(size)),
            lambda: rnn.RNN(size, activation="relu", layout="NTC"),
            lambda: rnn.GRU(size, layout="NTC"),
        ],
    }[family]  # fmt: skip
    return random.choice([*everywhere, *own])


def _product(family: str, size: int = 4) -> Callable[[], gluon.Block]:
    if family == "images":
        return lambda: nn.Conv2D(size, 1, use_bias=False)
    return lambda: nn.Dense(size, flatten=False, use_bias=False)


def _doubling(family: str) -> Callable[[], gluon.Block]:
    """Return a function that makes a sum that is at least twice its input where it is largest."""
    if family == "images":
        inner: Callable[[], gluon.Block] = lambda: nn.MaxPool2D(3, 1, 1)  # noqa: E731
    else:
        inner = lambda: nn.Activation("relu")  # noqa: E731
    return lambda: Residual(inner)


def _leaves(net: gluon.Block) -> Iterator[gluon.Block]:
    return (block for block in blocks_of(net) if not block._children)


def _weight_of(block: gluon.Block) -> Optional[gluon.Parameter]:
    """Return the parameter of which a block's result is a multiple; None if there is none."""
    relu = (
        getattr(block, "_activation", None) == "relu" or getattr(block, "_mode", "") == "rnn_relu"
    )
    if isinstance(block, (rnn.RNNCell, rnn.RNN)) and relu:
        return block._reg_params.get("i2h_weight") or block._reg_params["l0_i2h_weight"]
    if isinstance(block, (nn.Dense, nn.Conv2D)):
        return block.weight
    return block._reg_params.get("gamma")


def _largest_result(net: gluon.Block, block: gluon.Block, inputs: mx.nd.NDArray) -> float:
    """Return the largest result of a block, which has the sign of the largest absolute one."""
    found: list[np.ndarray] = []
    hook = block.register_forward_hook(
        lambda _, __, result: found.append(
            (result[0] if isinstance(result, tuple) else result).asnumpy()
        )
    )
    with autograd.train_mode():
        net(inputs)
    hook.detach()
    values = np.concatenate([one.ravel() for one in found])
    return float(values[np.abs(values).argmax()])
