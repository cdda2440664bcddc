"""A network compared with itself in FP32: the worst layer comes first, and keeping it helps."""

from __future__ import annotations

import math

import mpgluon
from mpgluon import BFLOAT16, FLOAT16, Policy, amp
from mpgluon.cast.forward import forward_of
from mpgluon_tools.diagnostics.compare import compare_with_fp32, suggest_keep_fp32

import mxnet as mx
import numpy as np
import pytest
from diagnostics_helpers import Batch, InTwoSteps, Times, make_batch, make_net
from helpers import in_sequence, initialized
from mxnet import autograd, gluon
from mxnet.gluon import nn


class AllInOne(nn.HybridBlock):
    """Has named blocks in it, and computes a function."""

    def __init__(self, compute, prefix="net_", **blocks):
        super().__init__(prefix=prefix)
        self._compute = compute
        for name, block in blocks.items():
            setattr(self, name, block)

    def hybrid_forward(self, F, *inputs):
        return self._compute(F, self, *inputs)


def float16_batch(*inputs):
    """Return inputs in float16, whose products and sums are float16 from the first block on."""
    return Batch(tuple(mx.nd.array(one, dtype="float16") for one in inputs), None, lambda y, _: y)


def error_when_kept(net, batch, blocks):
    """Return the relative error of the result with some blocks kept; the network stays cast."""
    with autograd.train_mode():
        reference = net(*(one.astype("float32") for one in batch.arguments)).asnumpy()
    amp.autocast(net, "float16", keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, *blocks))
    with autograd.train_mode():
        result = net(*batch.arguments).asnumpy()
    return np.linalg.norm(result - reference) / np.linalg.norm(reference)


class Cancelling(nn.HybridBlock):
    """Adds a large number and subtracts it again: small values are lost in 16 bits."""

    def __init__(self, large=512, prefix=None):
        super().__init__(prefix=prefix)
        self._large = large

    def hybrid_forward(self, F, x):
        return (x + self._large) - self._large


def casts_of(net):
    forwards = [forward_of(block) for block in (net, net[0], net[1], net[2])]
    return [(forward, forward and forward.kept) for forward in forwards]


def parameters_of(net):
    return [p.data().asnumpy().tobytes() for p in net.collect_params().values()]


@pytest.mark.parametrize("dropout", [0, 0.5])  # which the comparison leaves out
@pytest.mark.parametrize(("dtype", "fmt"), [("float16", FLOAT16), ("bfloat16", BFLOAT16)])
def test_each_layer_introduces_some_rounding_errors_and_the_result_has_few(dtype, fmt, dropout):
    net = make_net(nn.Dropout(dropout, prefix="dropout_"))
    comparison = compare_with_fp32(net, make_batch(), dtype=dtype)
    assert net[2]._rate == dropout
    names = [layer.block.name.removeprefix("net_") for layer in comparison.layers]
    inside = ["residual_conv0", "residual_batchnorm0"]
    # And not the container of them all.
    assert names == ["conv0", *inside, "residual", "dropout", "dense0"]
    for layer in comparison.layers:
        if isinstance(layer.block, (nn.Conv2D, nn.Dense)):  # others compute in FP32 in bfloat16
            assert 0.1 * fmt.unit_roundoff < layer.introduced < 4 * fmt.unit_roundoff
        assert layer.output < 32 * fmt.unit_roundoff
    assert 0 < comparison.result < 32 * fmt.unit_roundoff


DROPS = {
    "operator": lambda F, _, x: F.Dropout(x, p=0.5),
    "operator, by default": lambda F, _, x: F.Dropout(x),
    "called by name": lambda _F, _, x: mx.nd.Dropout(x, 0.5),
    "recurrent": lambda _F, block, x: block.lstm(x.reshape((4, 4, 36))),
}


@pytest.mark.parametrize("way", ["float32", "float16"])
@pytest.mark.parametrize("drop", DROPS)
def test_values_dropped_at_random_do_not_count_as_errors(drop, way):
    def errors(compute, rate):
        mx.random.seed(1)
        lstm = gluon.rnn.LSTM(36, num_layers=2, dropout=rate, input_size=36, layout="NTC")
        blocks = {"lstm": lstm} if drop == "recurrent" else {}
        dropping = AllInOne(compute, "dropping_", **blocks)
        net = make_net(Cancelling(prefix="cancelling_"), nn.Dense(144), dropping, way=way)
        return compare_with_fp32(net, make_batch())

    found = errors(DROPS[drop], 0.5)
    alone = errors(DROPS[drop] if drop == "recurrent" else lambda _F, _, x: x * 1, 0)
    assert 0.01 < found.result == alone.result < 0.5
    for one, other in zip(found.layers, alone.layers):
        assert (one.output, one.introduced) == (other.output, other.introduced)


@pytest.mark.parametrize("way", ["float32", "float16", "auto float16"])
@pytest.mark.parametrize("hybridize", [False, True])
def test_the_layer_that_cancels_is_at_the_top_and_the_network_is_left_as_it_was(way, hybridize):
    net = make_net(Cancelling(prefix="cancelling_"), way=way, hybridize=hybridize)
    batch = make_batch()
    before, output = parameters_of(net), net(batch.inputs).asnumpy()
    before_casts = casts_of(net)
    comparison = compare_with_fp32(net, batch, loss_scale=64.0)
    worst, second, *_ = comparison.ranked()
    assert worst.block.name == "cancelling"
    assert worst.introduced > 20 * second.introduced
    assert str(comparison).splitlines()[2].split()[:2] == ["cancelling", "Cancelling"]
    assert parameters_of(net) == before
    assert np.array_equal(net(batch.inputs).asnumpy(), output)
    assert casts_of(net) == before_casts


def test_an_output_that_overflows_is_an_infinite_error():
    net = make_net(Times(2.0**9, "large_"), InTwoSteps(prefix="square_"), way="float16")
    comparison = compare_with_fp32(net, make_batch())
    worst = comparison.ranked()[0]
    assert (worst.block.name, worst.introduced) == ("square", math.inf)
    assert comparison.result == math.inf


@pytest.mark.parametrize("faulty", [Cancelling, InTwoSteps])
def test_the_suggested_blocks_kept_in_fp32_bring_the_measured_error(faulty):
    def make():
        fault = faulty(prefix="faulty_")
        if faulty is Cancelling:
            return make_net(fault), fault
        return make_net(Times(2.0**9, "up_"), fault, Times(2.0**-9, "down_")), fault

    net, fault = make()
    batch = make_batch()
    suggestion = suggest_keep_fp32(net, batch)
    assert list(suggestion.blocks) == [fault]
    assert suggestion.error_after < suggestion.error_before / 10
    assert "keep faulty in FP32: the error goes from" in str(suggestion)

    error = error_when_kept(net, batch, [fault])
    assert error == pytest.approx(suggestion.error_after, rel=1e-3)  # both are sums of float32


def test_nothing_is_suggested_where_the_error_is_small():
    suggestion = suggest_keep_fp32(make_net(), make_batch())
    assert list(suggestion.blocks) == []
    assert suggestion.error_before == suggestion.error_after < 32 * FLOAT16.unit_roundoff
    assert str(suggestion).startswith("keep nothing more in FP32; the error is 0.00")


class Repeated(nn.HybridBlock):
    """Calls one layer twice."""

    def __init__(self):
        super().__init__(prefix="twice_")
        with self.name_scope():
            self.layer = nn.Dense(3, in_units=3)

    def hybrid_forward(self, F, x):
        return self.layer(F.relu(self.layer(x)))


def several_outputs(F, x):
    """Return a product and its square, of another size each."""
    y = F.dot(x, x)
    return y, F.broadcast_mul(y, y)


@pytest.mark.parametrize(
    ("make", "shape", "layers"),
    [
        (Repeated, (4, 3), 2),
        (lambda: in_sequence(gluon.rnn.LSTM(4, input_size=3), nn.Dense(2)), (5, 2, 3), 2),
        (lambda: in_sequence(gluon.rnn.GRU(4, input_size=3, bidirectional=True)), (5, 2, 3), 1),
        (
            lambda: AllInOne(
                lambda F, self, x: F.broadcast_add(*self.two(x)),
                two=nn.HybridLambda(several_outputs),
            ),
            (4, 4),
            2,
        ),
    ],
    ids=["called twice", "lstm", "bidirectional gru", "several outputs"],
)
def test_layers_of_every_kind_introduce_some_rounding_errors(make, shape, layers):
    net = initialized(make(), mx.init.Normal(0.3))
    batch = Batch(mx.nd.random.normal(shape=shape), None, lambda y, _: y)
    net(batch.inputs)
    comparison = compare_with_fp32(net, batch)
    assert len(comparison.layers) == layers
    assert 0 < comparison.layers[0].introduced < 32 * FLOAT16.unit_roundoff
    assert comparison.layers[0].output < 32 * FLOAT16.unit_roundoff
    assert comparison.result < 32 * FLOAT16.unit_roundoff


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_a_dense_layer_introduces_the_error_of_its_product_and_not_of_its_activation(activation):
    data = np.random.RandomState(0)
    inputs = np.abs(data.standard_normal((6, 4))).astype("float32") + 1
    weights = data.standard_normal((8, 4)).astype("float32")
    net = in_sequence(nn.Dense(8, in_units=4, activation=activation), nn.LayerNorm(in_channels=8))
    net.initialize()
    net[0].weight.set_data(mx.nd.array(weights))
    reference = inputs.astype("float64") @ weights.T
    narrow = [array.astype("float16").astype("float64") for array in (inputs, weights)]
    product = (narrow[0] @ narrow[1].T).astype("float16")
    expected = np.linalg.norm(product - reference) / np.linalg.norm(reference)
    layer = compare_with_fp32(net, Batch(mx.nd.array(inputs), None, lambda y, _: y)).layers[0]
    assert layer.block is net[0]
    # The oracle sums four products in float64, which float32 does to 4 * 2^-24 of 2^-12.
    assert layer.introduced == pytest.approx(expected, rel=4 * 2**-24 / 2**-12)


class PlainSum(gluon.Block):
    def __init__(self, body):
        super().__init__(prefix="sum_")
        self.body = body

    def forward(self, x):
        return self.body(x) + x


def hybrid_sum(body):
    return AllInOne(lambda _, self, x: self.body(x) + x, "sum_", body=body)


def introduced_by(net, batch):
    return {layer.block.name: layer.introduced for layer in compare_with_fp32(net, batch).layers}


@pytest.mark.parametrize(
    ("container", "make_sum"),
    [(nn.HybridSequential, hybrid_sum), (nn.Sequential, hybrid_sum), (nn.Sequential, PlainSum)],
)
def test_a_sum_that_overflows_is_found_and_kept_with_all_that_is_in_its_block(container, make_sum):
    body = nn.HybridSequential(prefix="body_")
    body.add(Times(1.0, "same_"))
    net, sums = container(prefix=""), make_sum(body)
    net.add(Times(4e4, "up_"), sums, Times(2.0**-16, "down_"))
    batch = float16_batch(np.linspace(0.5, 1, 8))
    introduced = introduced_by(net, batch)
    assert list(introduced) == ["up", "same", "sum", "down"]  # neither body nor the whole
    assert max(introduced[name] for name in ("up", "same")) <= FLOAT16.unit_roundoff
    assert introduced["sum"] == math.inf
    suggestion = suggest_keep_fp32(net, batch)
    assert list(suggestion.blocks) == [sums]
    error = error_when_kept(net, batch, [sums])
    assert error == pytest.approx(suggestion.error_after, rel=1e-3)  # both are sums of float32


def test_computations_between_inner_blocks_count_though_one_of_them_comes_last():
    def attend(F, self, x):
        scores = F.batch_dot(self.queries(x), self.keys(x), transpose_b=True)
        return self.out(F.softmax(scores / 16))

    parts = {name: Times(factor, f"{name}_") for name, factor in
             (("queries", 300.0), ("keys", 300.0), ("out", 2.0))}  # fmt: skip
    net = in_sequence(AllInOne(attend, "attention_", **parts))
    x = np.random.RandomState(0).uniform(0.5, 1, (2, 3, 4))  # 300 * 300 * x is more than 65504
    introduced = introduced_by(net, float16_batch(x))
    assert list(introduced) == ["queries", "keys", "attention", "out"]
    assert introduced.pop("attention") > 0.1
    assert max(introduced.values()) < FLOAT16.unit_roundoff


def test_an_intended_mask_of_infinities_is_not_an_error():
    def masked(F, self, scores, mask):
        return self.softmax(F.broadcast_add(scores * 3, mask))

    softmax = nn.HybridLambda(lambda F, x: F.softmax(x), prefix="softmax_")
    net = AllInOne(masked, "masked_", softmax=softmax)
    scores = np.random.RandomState(0).standard_normal((3, 3))
    mask = np.where(np.tri(3), 0, -np.inf)
    layers = compare_with_fp32(net, float16_batch(scores, mask)).layers
    assert [layer.block.name for layer in layers] == ["masked", "softmax"]
    assert all(0 < layer.introduced < 2 * FLOAT16.unit_roundoff for layer in layers)


class Scale(nn.HybridBlock):
    """Multiplies by a factor twice."""

    def __init__(self):
        super().__init__(prefix="scale_")
        self.factor = self.params.get("factor", shape=(4,), init="ones")

    def hybrid_forward(self, F, x, factor):
        return F.broadcast_mul(F.broadcast_mul(x, factor), factor)


def test_parameters_that_a_cast_has_rounded_take_part_in_the_trial():
    net = initialized(in_sequence(Scale(), Times(2.0**-10, "down_")))
    net[0].factor.set_data(mx.nd.full(4, 256.0))
    batch = float16_batch(np.linspace(1, 2, 8).reshape((2, 4)))
    mpgluon.cast_block(net)
    # float16 times float16 is float16, where 65536 is infinite.
    assert compare_with_fp32(net, batch).layers[0].introduced == math.inf
    mpgluon.restore(net)
    # Under autocast the factors are FP32, and a product with one of them is FP32.
    assert compare_with_fp32(net, batch).layers[0].introduced < FLOAT16.unit_roundoff


def test_a_layer_that_keep_fp32_cannot_change_is_not_suggested():
    net = in_sequence(nn.LayerNorm(in_channels=4, prefix="norm_"), Times(2.0**-20, "down_"))
    net.initialize()
    net[0].gamma.set_data(mx.nd.full(4, 1e6))
    batch = float16_batch(np.random.RandomState(0).standard_normal((3, 4)))
    suggestion = suggest_keep_fp32(net, batch)
    assert net[0] not in (*suggestion.blocks, *suggestion.tried)
    assert suggestion.error_after == math.inf
    assert not error_when_kept(net, batch, [net[0]]) < math.inf  # it returns float16 all the same


def unhelpable_gradients():
    net = in_sequence(nn.Dense(3, in_units=4, prefix="dense_"), Times(2.0, "twice_"))
    net.initialize(mx.init.One())
    return net, float16_batch(np.ones((2, 4))), {"loss_scale": 2.0**20}


def two_faults():
    between = nn.Dense(144, in_units=144)
    net = make_net(Cancelling(prefix="one_"), between, Cancelling(prefix="two_"))
    return net, make_batch(), {"at_most": 1, "limit": 1e-3}


def outermost():
    net = AllInOne(
        lambda _, self, x: self.down(self.up(x) * 2.0**12),
        up=Times(2.0**12, "up_"),
        down=Times(2.0**-24, "down_"),
    )
    return net, float16_batch(np.linspace(1, 2, 9)), {}


def impossible_limit():
    net = in_sequence(Times(3.0, "three_"), Times(5.0, "five_"))
    return net, float16_batch(np.random.RandomState(0).standard_normal((5, 20))), {"limit": 1e-9}


NOTHING_HELPS = "no layer was found whose FP32 helps; the error of inf is above the limit of 0.016"


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (unhelpable_gradients, [
            NOTHING_HELPS, "tried: no layer;", "range_report",
            "the output gradient of twice is not finite at a loss scale of 1.04858e+06",
        ]),
        (two_faults, [
            "keep two in FP32: the error goes from ",
            "which is still above the limit of 0.001; tried: two; ",
            "most of what remains is introduced by one",
        ]),
        (outermost, [
            NOTHING_HELPS, "most of what remains is introduced by net, the network as a whole",
        ]),
        (impossible_limit, [
            "above the limit of 1e-09; tried: no layer; most of what remains is introduced by ",
        ]),
    ],
)  # fmt: skip
def test_an_error_above_the_limit_is_reported_with_the_layers_that_were_tried(make, parts):
    net, batch, options = make()
    suggestion = suggest_keep_fp32(net, batch, **options)
    assert suggestion.error_after > suggestion.limit
    assert "keep nothing more" not in str(suggestion)
    for part in parts:
        assert part in str(suggestion)


@pytest.mark.usefixtures("native_operators")
def test_under_a_policy_the_products_of_eight_bits_err_most():
    net = make_net()
    scaled = compare_with_fp32(net, make_batch(), dtype=Policy.parse("mixed_float8"))
    between = compare_with_fp32(net, make_batch(), dtype=Policy.parse("emulated_bfloat16"))
    assert 0 < between.result < scaled.result < 1
    # The convolution in the middle; the first one and the dense layer compute in bfloat16.
    (middle,) = (one for one in scaled.layers if one.block is net[1].convolution)
    assert middle.introduced == max(one.introduced for one in scaled.layers)
    assert forward_of(net) is None


def test_a_trainer_of_the_compared_fp32_network_stays_plain():
    net = make_net()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    compare_with_fp32(net, make_batch())
    assert getattr(trainer, "_amp_loss_scaler", None) is None
