"""MXNet's control flow: states and branches have one format, whatever they are computed in."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, EACH_WAY, STATIC, WAYS, in_way, initialized
from mxnet import autograd, gluon
from mxnet.gluon import nn

X = np.random.RandomState(0).standard_normal((3, 4)).astype(np.float32)


class WhileLoop(gluon.HybridBlock):
    """Applies a dense layer to a state that begins as FP32, a number of times."""

    def __init__(self, *, by_name):
        super().__init__()
        self.by_name = by_name
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=4, activation="tanh")

    def hybrid_forward(self, F, x):
        def go_on(count, _):
            return count < 3

        def step(count, state):
            state = self.dense(state)
            return state, (count + 1, state)

        given = (F.zeros((1,)), x)
        if self.by_name:
            options = {"loop_vars": given, "func": step, "max_iterations": 5}
            outputs, (_, state) = F.contrib.while_loop(go_on, **options)
        else:
            outputs, (_, state) = F.contrib.while_loop(go_on, step, given, max_iterations=5)
        done = F.slice_axis(outputs, axis=0, begin=0, end=3)  # MXNet does not write the others
        return F.concat(state, F.sum(done, axis=0), dim=1)


class ForEach(gluon.HybridBlock):
    """A running sum of a dense layer's result for each row."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=4, flatten=False)

    def hybrid_forward(self, F, x):
        def step(row, total):
            total = self.dense(row.expand_dims(0)) + total
            return total, total

        outputs, total = F.contrib.foreach(step, x, F.zeros((1, 4)))
        return F.concat(outputs.reshape((-1, 4)), total, dim=0)


class Frames(gluon.HybridBlock):
    """Adds a dense layer's result of one row after another, which the count of rounds chooses."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=4)

    def hybrid_forward(self, F, x):
        def step(count, total):
            total = self.dense(F.take(x, count)) + total
            return total, (count + 1, total)

        given = (F.zeros((1,)), F.zeros((1, 4)))
        _, (_, total) = F.contrib.while_loop(
            lambda count, _: count < 3, step, given, max_iterations=3
        )
        return total


NETWORKS = {
    "while_loop": lambda: WhileLoop(by_name=False),
    "while_loop by name": lambda: WhileLoop(by_name=True),
    "while_loop with an index": Frames,
    "foreach": ForEach,
}


def run(make, cast, hybridize):
    mx.random.seed(3)
    net = initialized(make(), mx.init.Xavier())
    if cast is not None:
        cast(net)
    net.hybridize(hybridize, **STATIC)
    x = mx.nd.array(X)
    with autograd.record():
        result = net(x)
        loss = (result * result).sum()
    loss.backward()
    gradients = [p.grad().asnumpy().astype(np.float64) for p in net.collect_params().values()]
    return [result.asnumpy().astype(np.float64), *gradients]


@EACH_WAY
@BOTH
@pytest.mark.parametrize("network", NETWORKS)
def test_a_state_that_begins_in_fp32_may_be_computed_in_16_bits(network, way, hybridize):
    exact = run(NETWORKS[network], None, hybridize=False)
    found = run(NETWORKS[network], WAYS[way], hybridize)
    if hybridize and "while_loop" in network:
        # MXNet's own gradients of a hybridized while_loop include the uninitialized outputs of
        # rounds that did not take place: in plain FP32 they reach 1e31.
        found, exact = found[:1], exact[:1]
    unit = 2.0**-8 if "bfloat16" in way else 2.0**-11
    # Three rounds of a product, an activation and a sum: a dozen roundings, each of which the
    # matrices that follow may magnify, forward and backward.
    for one, other in zip(found, exact):
        assert 0 < np.abs(one - other).max() <= 64 * unit * np.abs(other).max()


class Choice(gluon.HybridBlock):
    """One of two branches: a dense layer, or an operand in another format."""

    def __init__(self, *, other, by_name):
        super().__init__()
        self.other, self.by_name = other, by_name
        with self.name_scope():
            self.first = nn.Dense(4, in_units=4)
            self.second = nn.Dense(4, in_units=4)

    def hybrid_forward(self, F, x):
        y = self.first(x)
        is_positive = F.sum(x) > 0

        def otherwise():
            return {"sum": y * 2, "input": x, "softmax": F.softmax(y)}[self.other]

        if self.by_name:
            options = {"else_func": otherwise, "then_func": lambda: self.second(y)}
            return F.contrib.cond(is_positive, **options) + 1
        return F.contrib.cond(is_positive, lambda: self.second(y), otherwise) + 1


@EACH_WAY
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("other", ["sum", "input", "softmax"])
def test_branches_may_be_computed_in_different_formats(other, by_name, way):
    for sign in (1, -1):
        mx.random.seed(3)
        net = initialized(Choice(other=other, by_name=by_name), mx.init.Xavier())
        x = mx.nd.array(sign * np.abs(X))
        exact = net(x).asnumpy()
        WAYS[way](net)
        imperative = net(x).asnumpy()
        net.hybridize(**STATIC)
        # Only forward: in plain FP32, too, MXNet's gradients of a hybridized cond include
        # uninitialized memory, for variables of the branch that was not taken.
        assert (net(x).asnumpy() == imperative).all()
        # Four roundings of numbers below the largest, which a matrix may magnify.
        unit = 2.0**-8 if "bfloat16" in way else 2.0**-11
        assert np.abs(imperative - exact).max() <= 16 * unit * np.abs(exact).max()


class LoopAtTheEnd(gluon.HybridBlock):
    """Its results are a loop's, and a cast puts operators behind them."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, in_units=4, flatten=False)

    def hybrid_forward(self, F, x):
        def step(row, total):
            total = self.dense(row.expand_dims(0)) + total
            return total, total

        return F.contrib.foreach(step, x, F.zeros((1, 4)))[0]


@EACH_WAY
def test_a_loop_at_the_end_of_a_static_graph_has_the_values_of_an_imperative_run(way):
    mx.random.seed(0)
    net = in_way(way, initialized(LoopAtTheEnd(), mx.init.Normal(1.0)))
    images = mx.nd.array(np.tile(X, (4, 1)))
    results = []
    for options in ({"active": False}, STATIC):
        net.hybridize(**options)
        for _ in range(3):
            with autograd.record():
                result = net(images)
                loss = (result * result).sum()
            loss.backward()
            results.append((result.asnumpy(), net.dense.weight.grad().asnumpy()))
    for outputs, gradient in results[1:]:
        np.testing.assert_allclose(outputs, results[0][0], rtol=0.05, atol=0.05)
        np.testing.assert_allclose(gradient, results[0][1], rtol=0.05, atol=0.5)
