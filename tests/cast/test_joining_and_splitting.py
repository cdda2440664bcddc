"""Operators that join and split values, in every format and every way to hybridize a network.

The oracle is the plain FP32 network, imperative: all numbers are small integers, which every format
holds, and so are their sums.
"""

from __future__ import annotations

import re
from itertools import product

import mxnet as mx
import numpy as np
import pytest
from helpers import EACH_WAY, STATIC, WAYS, in_way, initialized, outputs_of
from interfaces import interface
from mxnet import autograd, gluon
from mxnet.gluon import nn

pytestmark = pytest.mark.filterwarnings("ignore:The .* input to HybridBlock is not used")
MODES = (None, {}, {"static_alloc": True}, STATIC)
SHAPE = (4, 2, 4, 2)
# On values with the first sizes of SHAPE; in front of each the least number of dimensions.
OPERATORS = """
1 F.concat(a, b, dim=0)
1 F.concat(a, b, a, dim=-1)
2 F.concat(a, b, dim=1)
1 F.stack(a, b, axis=0)
1 F.stack(a, b, axis=-1)
2 F.stack(a, b, axis=1)
1 F.split(a, num_outputs=2, axis=-1)
2 F.split(a, num_outputs=2, axis=1, squeeze_axis=True)
2 F.SliceChannel(b, num_outputs=4, axis=0, squeeze_axis=True)
1 F.split_v2(a, 2)
1 F.split_v2(b, (1, 3), axis=0)
2 F.split_v2(b, 2, axis=1, squeeze_axis=True)
1 F.np.concatenate([a, b], axis=0)
1 F.np.concatenate([a, b, a], axis=-1)
1 F.np.stack([a, b], axis=0)
1 F.np.stack([a, b], axis=-1)
1 F.np.hstack([a, b])
1 F.np.hstack([a])
1 F.np.hstack([a, a, b])
1 F.np.vstack([a, b])
1 F.np.dstack([a, b])
1 F.np.column_stack([a, b])
1 F.np.append(a, b, axis=0)
1 F.np.append(a, b)
1 F.np.split(a, 2)
1 F.np.split(b, (1, 3))
1 F.np.split(a, 2, axis=-1)
1 F.np.array_split(a, 3)
1 F.np.array_split(b, (1,), axis=-1)
1 F.np.hsplit(a, 2)
2 F.np.hsplit(a, (1,))
2 F.np.vsplit(a, 2)
2 F.np.vsplit(b, (1, 3))
3 F.np.dsplit(a, 2)
3 F.np.dsplit(b, (1, 3))
"""


class Net(gluon.HybridBlock):
    """Two values of the compute format, or one and an input, and an operator on them."""

    def __init__(self, shape, code, mixed):
        super().__init__()
        self.shape, self.code, self.mixed = shape, code, mixed
        with self.name_scope():
            size = int(np.prod(shape))
            self.product = nn.Dense(size, use_bias=False, in_units=size)

    def hybrid_forward(self, F, x, y):
        reshape = F.np.reshape if mx.util.is_np_array() else F.reshape

        def copied(value):  # by a product with the identity
            return reshape(self.product(reshape(value, (1, -1))), self.shape)

        return eval(self.code, {"F": F}, {"a": x if self.mixed else copied(x), "b": copied(y)})


def found(array, way, mode, code, shape, mixed, is_recorded):
    """Return the results of an operator, and the gradients of its operands."""
    net = initialized(Net(shape, code, mixed))
    net.product.weight.set_data(array(np.eye(int(np.prod(shape)))))
    if way is not None:
        WAYS[way](net)
    if mode is not None:
        net.hybridize(**mode)
    values = np.random.default_rng(len(code)).integers(-8, 9, (2, *shape))
    inputs = [array(one, dtype="float32") for one in values]
    for _ in range(2):
        if not is_recorded:
            results = outputs_of(net(*inputs))
            continue
        for one in inputs:
            one.attach_grad()
        with autograd.record():
            results = outputs_of(net(*inputs))
            loss = sum((one.astype("float32") ** 2).sum() for one in results)
        loss.backward()
    arrays = [*results, *(one.grad for one in inputs if is_recorded)]
    return [one.astype("float32").asnumpy() for one in arrays]


@EACH_WAY
@pytest.mark.sampled(10)
@pytest.mark.parametrize("line", OPERATORS.strip().splitlines())
def test_joining_and_splitting_is_exact_however_a_network_is_hybridized(way, line):
    least, code = line.split(" ", 1)
    may_mix = {"a", "b"} <= set(re.findall(r"\w+", code))
    with interface("F.np." in code) as array:
        for dimensions, mixed, is_recorded in product(
            range(int(least), 5), {False, may_mix}, (True, False)
        ):
            case = (code, SHAPE[:dimensions], mixed, is_recorded)
            expected = found(array, None, None, *case)
            for mode in MODES:
                for one, other in zip(found(array, way, mode, *case), expected, strict=True):
                    np.testing.assert_array_equal(one, other, str((case, mode)))


@EACH_WAY
@pytest.mark.parametrize("mode", MODES[1:])
def test_stacked_values_have_known_shapes_and_the_axis_of_the_arrays_that_come(way, mode):
    class Stacked(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            y = F.npx.relu(x)
            return F.np.hstack([x, y]), F.npx.fully_connected(  # whose operand has a known shape
                F.np.dstack([x, y]), F.np.ones((1, 2)), num_hidden=1, no_bias=True, flatten=False
            )

    with interface(True) as array:
        net = in_way(way, Stacked())
        net.hybridize(**mode)
        for shape in ((3,), (3, 2), (2, 3)):
            x = np.arange(-2, np.prod(shape) - 2).reshape(shape)
            both = [x, np.maximum(x, 0)]
            stacked, summed = net(array(x, dtype="float32"))
            np.testing.assert_array_equal(stacked.asnumpy(), np.hstack(both))
            np.testing.assert_array_equal(summed.asnumpy()[..., 0], np.dstack(both).sum(axis=-1))
