"""Plain Blocks and functions that call operators of mx.nd and mx.sym by name."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from functools import partial

import mpgluon
from mpgluon import amp, diagnostics
from mpgluon.cast.arrays import format_of
from mpgluon.formats.float_format import format_named, round_to

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    BOTH,
    EACH_WAY,
    STATIC,
    WAYS,
    assert_same_bits,
    cast_net,
    gradients_of,
    in_way,
    initialized,
)
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn

pytestmark = pytest.mark.filterwarnings("ignore:All children of this Sequential layer")
IMAGES = nd.array(np.random.RandomState(0).standard_normal((2, 3, 6, 6)))


class OnGrid(gluon.Block):
    """Records the results of its children."""

    def __init__(self):
        super().__init__()
        self.returned = []

    def note(self, array):
        self.returned.append(array)
        return array


class Residual(OnGrid):
    """As in MXNet's style transfer: a sum, and an average of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.HybridSequential()
        self.inner.add(nn.Conv2D(3, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))

    def forward(self, x):
        return nd.Pooling(x + self.note(self.inner(x)), kernel=(2, 2), pool_type="avg")


class Gram(OnGrid):
    """As in MXNet's style transfer: a product of features with a parameter of the block's own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential()  # a plain container between
        self.inner.add(nn.Conv2D(4, 1), nn.InstanceNorm())
        self.weight = self.params.get("weight", shape=(1, 4, 4), init="uniform")

    def forward(self, x):
        features = self.note(self.inner(x)).reshape((0, 0, -1))
        gram = nd.batch_dot(features, features, transpose_b=True) / features.shape[2]
        return nd.batch_dot(nd.SwapAxis(self.weight.data(), 1, 2), gram[0:1])


class Scores(OnGrid):
    """As in MXNet's lstm_crf: loops over words, with a matrix of transitions."""

    def __init__(self):
        super().__init__()
        self.lstm, self.tags = rnn.LSTM(5, bidirectional=True), nn.Dense(4, flatten=False)
        self.transitions = self.params.get("transitions", shape=(4, 4), init="uniform")

    def forward(self, x):
        features = self.note(self.tags(self.lstm(x.reshape((6, 2, -1)))))
        alphas = nd.full((2, 4), -10000.0)
        for feature in features:
            alphas = nd.log_softmax(
                nd.dot(alphas.softmax(), nd.exp(self.transitions.data())) + feature
            )
        return alphas


class Tree(OnGrid):
    """As in MXNet's tree_lstm: a cell that is fed its own states, and gates by nd operators."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Dense(4), rnn.LSTMCell(4)
        self.gate = self.params.get("gate", shape=(4, 4), init="uniform")

    def forward(self, x):
        states = [nd.zeros((2, 4)), nd.zeros((2, 4))]
        for _ in range(3):
            output, states = self.cell(self.note(self.embed(x)), states)
            # With FP32 states the cell's sums are FP32, as with every FP32 operand.
            gate = nd.FullyConnected(output, self.gate.data(), no_bias=True, num_hidden=4)
            states = [nd.add_n(states[0], gate), nd.concat(states[1], gate)[:, :4]]
        return nd.stack(*states).sum(axis=0)


class Buffers(OnGrid):
    """Fills an array of its own with parts of results."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4)

    def forward(self, x):
        with autograd.pause():
            buffer = nd.zeros((2, 8))
            buffer[:, :4] = self.note(self.dense(x))
        return nd.dot(self.dense(x), nd.ones((4, 8)) / 4) + buffer


class Nested(OnGrid):
    """A plain Block in a plain Block, and one child that two parents share."""

    def __init__(self):
        super().__init__()
        self.residual = Residual()
        self.shared = nn.HybridSequential()
        self.shared.add(nn.Conv2D(3, 1))
        self.again = nn.HybridSequential()
        self.again.add(self.shared)

    def forward(self, x):
        x = self.residual(x)
        return nd.elemwise_add(self.note(self.shared(x)), self.note(self.again(x))) + x


KINDS = [Residual, Gram, Scores, Tree, Buffers, Nested]


def run(kind, way=None, hybridize=False, inside=False):
    mx.random.seed(0)
    block = kind()
    net = block
    if inside:
        net = nn.Sequential()
        net.add(nn.Conv2D(3, 1), block, nn.Dense(3))
    net.initialize(mx.init.Xavier())
    net(IMAGES)
    report = WAYS[way](net) if way else None
    block.returned.clear()
    net.hybridize(hybridize, **STATIC)
    with autograd.record():
        result = net(IMAGES)
        loss = (result**2).mean()
    loss.backward()
    return block.returned, result, gradients_of(net), report


@pytest.mark.sampled(4)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
@BOTH
@EACH_WAY
@pytest.mark.parametrize("kind", KINDS)
def test_plain_code_runs_and_trains_on_values_of_the_format(kind, way, hybridize, inside):
    _, expected, expected_gradients, _ = run(kind, inside=inside)
    returned, result, gradients, report = run(kind, way, hybridize, inside)
    grid = format_named("bfloat16" if "bfloat16" in way else "float16")
    for array in returned:
        if way == "autocast bfloat16":
            continue  # FP32 between products, where the processor has them
        assert format_of(array) == ("float16" if grid.name == "float16" else grid)
        values = array.astype("float32").asnumpy()
        assert np.array_equal(values, round_to(values, grid))
    assert result.dtype == np.float32
    tolerance = 2**-4 if "bfloat16" in way else 2**-7
    size = max(1, np.abs(expected.asnumpy()).max())
    np.testing.assert_allclose(result.asnumpy(), expected.asnumpy(), atol=tolerance * size)
    assert gradients.keys() == expected_gradients.keys()
    difference = sum(np.sum((gradients[k] - expected_gradients[k]) ** 2.0) for k in gradients)
    total = sum(np.sum(gradient**2.0) for gradient in expected_gradients.values())
    assert difference < (4 * tolerance) ** 2 * total  # in the whole gradient's direction
    assert report.beyond_reach == ()


def test_between_blocks_that_are_cast_values_stay_in_16_bits():
    seen = []
    net = initialized(Gram())
    net(IMAGES)
    mpgluon.cast_block(net)
    net.inner[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    net(IMAGES)
    assert seen == [np.float16]


class Reads(gluon.Block):
    """A block with a parameter for its forward pass, and one for its loss."""

    def __init__(self):
        super().__init__()
        self.weight = self.params.get("weight", shape=(4, 4), init="uniform")
        self.transitions = self.params.get("transitions", shape=(4, 4), init="uniform")

    def forward(self, x):
        return self.product(x)

    def product(self, x):
        return nd.dot(x, self.weight.data())

    def loss(self, x):
        return nd.sum(nd.dot(self(x), self.transitions.data()) ** 2)


class ReadsInAFunctionInside(Reads):
    def forward(self, x):
        return [self.transitions.data() and super(type(self), self).forward(y) for y in x]


class ReadsInAProperty(Reads):
    @property
    def both(self):
        return nd.dot(self.weight.data(), self.transitions.data())

    def forward(self, x):
        return nd.dot(super().forward(x), self.both)


class ReadsByName(Reads):
    def forward(self, x):
        return nd.dot(super().forward(x), getattr(self, "transitions").data())  # noqa: B009


@pytest.mark.parametrize(
    ("kind", "others_dtype"),
    [
        (Reads, np.float32),
        (ReadsInAFunctionInside, np.float16),
        (ReadsInAProperty, np.float16),
        (ReadsByName, np.float16),
    ],
)
def test_a_parameter_that_only_other_code_than_the_forward_pass_reads_stays_fp32(
    kind, others_dtype
):
    net = initialized(kind())
    report = mpgluon.cast_block(net)
    assert net.weight.data().dtype == np.float16
    assert net.transitions.data().dtype == others_dtype
    assert report.parameters_kept == (others_dtype == np.float32)


@EACH_WAY
def test_a_loss_with_a_parameter_of_its_own_trains_as_in_fp32(way):
    def trained(way):
        mx.random.seed(0)
        net = initialized(Reads())
        if way is not None:
            WAYS[way](net)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
        amp.init_trainer(trainer, 128.0)
        for _ in range(3):
            with autograd.record():
                loss = net.loss(IMAGES[0, :, :4, :4].sum(axis=0))
            with amp.scale_loss(loss, trainer) as scaled_loss:
                scaled_loss.backward()
            trainer.step(1)
        return {name: p.data().asnumpy() for name, p in net._collect_params_with_prefix().items()}

    expected, found = trained(None), trained(way)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=2**-7)


def test_restore_takes_it_off_again():
    net = initialized(Gram())
    before = net(IMAGES).asnumpy()
    amp.autocast(net, "float16")
    assert not np.array_equal(net(IMAGES).asnumpy(), before)
    amp.restore(net)
    assert np.array_equal(net(IMAGES).asnumpy(), before)
    assert "forward" not in vars(net.inner)


# The same computation, with operators of F and of mx.nd.


def attention(F, x, weight):
    x = F.broadcast_mul(F.LayerNorm(x, F.ones(5), F.zeros(5)), F.sigmoid(x) + 0.3)
    scores = F.batch_dot(F.expand_dims(x, 0), F.expand_dims(x, 0), transpose_b=True)
    x = F.batch_dot(F.softmax(scores * 0.7), F.expand_dims(F.dot(x, weight), 0))
    first = F.relu(F.slice_axis(x, axis=2, begin=0, end=4))
    return F.broadcast_sub(first, F.mean(x, axis=2, keepdims=True))


class WithF(gluon.HybridBlock):
    def __init__(self):
        super().__init__(prefix="same_")
        self.dense = nn.Dense(5, in_units=3, prefix="same_dense_")
        self.weight = self.params.get("weight", shape=(5, 5))

    def hybrid_forward(self, F, x, weight):
        return attention(F, self.dense(x), weight)


class ByName(gluon.Block):
    def __init__(self):
        super().__init__(prefix="same_")
        self.dense = nn.Dense(5, in_units=3, prefix="same_dense_")
        self.weight = self.params.get("weight", shape=(5, 5))

    def forward(self, x):
        return attention(nd, self.dense(x), self.weight.data())


def namespace_of(x):
    """Return ``mx.nd`` or ``mx.sym``, as the distributions of GluonTS find their operators."""
    return mx.sym if isinstance(x, mx.sym.Symbol) else nd


class ByNameInHybrid(WithF):
    def hybrid_forward(self, F, x, weight):
        return attention(namespace_of(x), self.dense(x), weight)


@pytest.mark.parametrize(
    ("kind", "hybridize"), [(ByName, False), (ByNameInHybrid, False), (ByNameInHybrid, True)]
)
@EACH_WAY
def test_operators_called_by_name_compute_as_those_of_f(way, kind, hybridize):
    results = []
    for one in (WithF, kind):
        mx.random.seed(0)
        net = in_way(way, initialized(one(), mx.init.Xavier()))
        net.hybridize(hybridize, **STATIC)
        x = nd.array(np.random.RandomState(1).standard_normal((4, 3)))
        with autograd.record():
            result = net(x)
            (result * nd.arange(16).reshape((1, 4, 4))).backward()
        results.append([result.asnumpy(), *gradients_of(net).values()])
    assert_same_bits(*results)


def several_results(F, x, weight):
    first, second = F.split(x, num_outputs=2, axis=0)
    values, places = F.topk(F.dot(first, weight), k=2, ret_typ="both")
    return F.broadcast_add(F.broadcast_mul(values, places), F.mean(second))


def normalized(F, x, weight):
    x = F.LayerNorm(x, F.ones(5), F.zeros(5))
    return F.FullyConnected(F.relu(x), weight, no_bias=True, num_hidden=5)


def comparisons(F, x, weight):  # results are numbers, not bool as in the NumPy interface
    larger = F.broadcast_greater(x, F.max(x, axis=1, keepdims=True) * 0.5)
    place = F.expand_dims(F.argmax(x, axis=1), 1)
    return F.broadcast_mul(F.dot(F.broadcast_mul(larger, x), weight), F.broadcast_add(place, place))


def plain_symbols(F, x, weight):
    noise = F.zeros((4, 5)) + 2.0**-20  # in FP32 before and after a product
    return F.dot(F.broadcast_add(x, noise), weight) / (F.ones((4, 5)) + 0.001)


def a_loop(F, x, weight):
    def body(row, state):
        state = F.dot(row, weight) + state
        return F.tanh(state), state

    rows, _ = F.contrib.foreach(body, F.expand_dims(x, 1), F.zeros((1, 5)))
    return F.reshape(rows, (4, 5))


@BOTH
@EACH_WAY
@pytest.mark.parametrize(
    "function", [several_results, normalized, comparisons, plain_symbols, a_loop]
)
def test_a_hybrid_block_may_call_any_operator_by_name(function, way, hybridize):
    class Block(WithF):
        def __init__(self, by_name):
            super().__init__()
            self.by_name = by_name

        def hybrid_forward(self, F, x, weight):
            return function(namespace_of(x) if self.by_name else F, self.dense(x), weight)

    results = []
    for by_name in (False, True):
        mx.random.seed(0)
        net = in_way(way, initialized(Block(by_name), mx.init.Xavier()))
        net.hybridize(hybridize)
        with autograd.record():
            result = net(nd.array(np.random.RandomState(1).standard_normal((4, 3))))
            result.backward()
        results.append([result.asnumpy(), *gradients_of(net).values()])
    assert np.isfinite(results[0][0]).all()
    assert_same_bits(*results)


def test_outside_of_a_forward_pass_operators_are_mxnets_own():
    net = cast_net(initialized(ByName()))
    net(nd.ones((4, 3)))
    assert nd.register._imperative_invoke.__module__ == "mxnet._ctypes.ndarray"
    assert nd.dot(nd.full((1, 1), 1 + 2**-20), nd.ones((1, 1))).asscalar() == np.float32(1 + 2**-20)


def test_an_error_in_a_forward_pass_leaves_mxnets_own_operators():
    net = cast_net(initialized(ByName()))
    with pytest.raises(mx.MXNetError):
        net(nd.ones((4, 7))).wait_to_read()
    assert nd.register._imperative_invoke.__module__ == "mxnet._ctypes.ndarray"


def test_a_namedtuple_of_results_stays_one():
    Results = namedtuple("Results", "first second")

    class Two(gluon.Block):
        def __init__(self):
            super().__init__()
            self.inner = nn.Dense(2, in_units=3)

        def forward(self, x):
            result = self.inner(x)
            return Results(result, result * 2)

    net = cast_net(initialized(Two()))
    results = net(nd.ones((1, 3)))
    assert isinstance(results, Results)
    assert_same_bits(results.second.asnumpy(), 2 * results.first.asnumpy())
    assert not diagnostics.range_report(
        net, diagnostics.Batch(nd.ones((1, 3)), None, lambda both, _: both.first)
    ).broken_gradients()


@pytest.mark.parametrize("container", [dict, OrderedDict, partial(defaultdict, list)])
def test_arrays_in_a_dict_of_results_are_fp32_for_the_loss(container):
    class ByName(gluon.Block):
        def __init__(self):
            super().__init__()
            self.inner = nn.Dense(2, in_units=3)

        def forward(self, x):
            results = container()
            results.update(logits=self.inner(x) * 2.0**14, more=[self.inner(x)])
            return results

    net = cast_net(initialized(ByName(), mx.init.One()))
    results = net(nd.ones((1, 3)))
    assert type(results) is type(container())
    assert results["logits"].dtype == results["more"][0].dtype == np.float32
    assert results["logits"].sum().asscalar() == 2 * 3 * 2.0**14
