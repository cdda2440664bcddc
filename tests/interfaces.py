"""One network in both of MXNet's interfaces, mx.nd and mx.np: what each computes is the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable, Optional

import mxnet as mx
import numpy as np
import pytest
from helpers import STATIC, WAYS
from mxnet import gluon
from mxnet.gluon import nn

IN_NUMPY = pytest.mark.parametrize("in_numpy", [False, True], ids=["mx.nd", "mx.np"])


@contextmanager
def interface(in_numpy: bool) -> Iterator[Callable[..., Any]]:
    """Switch one of the interfaces on inside the block, and yield what makes its arrays."""
    if in_numpy:
        mx.npx.set_np()
    try:
        yield mx.np.array if in_numpy else mx.nd.array
    finally:
        mx.npx.reset_np()


def in_both(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return the results of a function of ``mx.nd.array`` and of ``mx.np.array``, in this order."""
    results = []
    for in_numpy in (False, True):
        with interface(in_numpy) as array:
            mx.random.seed(0)
            results.append(function(array, *args, **kwargs))
    return results[0], results[1]


class Both(gluon.HybridBlock):
    """Has the usual kinds of layers; computes with F.np and F.npx where that is switched on."""

    def __init__(self):
        super().__init__(prefix="both_")
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Conv2D(8, 3, padding=1, in_channels=3))
            self.body.add(nn.BatchNorm(in_channels=8), nn.Activation("relu"))
            self.again = nn.Conv2D(8, 3, padding=1, in_channels=8)
            self.pool, self.norm = nn.MaxPool2D(2, 2), nn.LayerNorm(in_channels=8)
            self.dense, self.drop = nn.Dense(10, in_units=8), nn.Dropout(0.2)
            self.matrix = self.params.get("matrix", shape=(10, 10))

    def hybrid_forward(self, F, x, matrix):
        in_numpy = mx.util.is_np_array()
        np_, npx = (F.np, F.npx) if in_numpy else (F, F)
        first = self.body(x)
        x = self.pool(npx.relu(self.again(first) + first))
        x = self.drop(self.dense(self.norm(np_.mean(x, axis=(2, 3)))))
        x = np_.dot(np_.tanh(x) * 0.5, matrix)
        if in_numpy:
            return np_.concatenate([x, npx.softmax(x) * 2], axis=1)
        return F.concat(x, F.softmax(x) * 2, dim=1)


def made(
    way: Optional[str] = None,
    hybridize: bool = False,
    random: Optional[np.random.RandomState] = None,
) -> Both:
    """Return the network with the same values in both interfaces, cast in one of ``WAYS``."""
    random = random or np.random.RandomState(3)
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    mx.random.seed(0)
    net = Both()
    net.initialize(mx.init.One())
    for place, parameter in sorted(net._collect_params_with_prefix().items()):
        offset = float(place.endswith(("gamma", "var")))
        values = 0.3 * random.standard_normal(parameter.shape) + offset
        parameter.set_data(array(values.astype(np.float32)))
    if way is not None:
        WAYS[way](net)
    net.hybridize(hybridize, **STATIC)
    return net


def images_of(array: Callable[..., Any], seed: int = 0, count: int = 4) -> Any:
    """Return a batch of images for the network, made by ``mx.nd.array`` or ``mx.np.array``."""
    random = np.random.RandomState(seed)
    return array(random.standard_normal((count, 3, 8, 8)).astype(np.float32))
