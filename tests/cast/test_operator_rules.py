"""FP32 for one operator instead of a block, and 16 bits for one that the table keeps in FP32."""

from __future__ import annotations

import mpgluon
from mpgluon import BFLOAT16, FLOAT16, amp, round_to

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    BOTH,
    SAME_BITS_HYBRIDIZED,
    STATIC,
    WAYS,
    assert_same_bits,
    autocast_net,
    gradients_of,
    in_sequence,
    in_way,
    initialized,
)
from mxnet import autograd, gluon
from mxnet.gluon import nn

SAME_BITS = pytest.mark.parametrize("way", SAME_BITS_HYBRIDIZED)
FORMATS = {"cast float16": FLOAT16, "autocast float16": FLOAT16, "emulated bfloat16": BFLOAT16}


class Mixed(nn.HybridBlock):
    """One operator of each kind: products, normalization, sums, exponentials, and Python's own."""

    def __init__(self, prefix="mixed_"):
        super().__init__(prefix=prefix)
        with self.name_scope():
            self.convolution = nn.Conv2D(4, 3, padding=1, in_channels=2, prefix="convolution_")
            self.norm = nn.BatchNorm(in_channels=4, prefix="norm_")
            self.up = nn.Conv2DTranspose(4, 2, strides=2, in_channels=4, prefix="up_")
            self.head = nn.Dense(3, in_units=4, prefix="head_")

    def hybrid_forward(self, F, x):
        x = F.relu(self.norm(self.convolution(x))) + 0.1
        x = self.up(x) * 0.7 + 0.1
        x = F.mean(x + F.exp(x * -0.3), axis=(2, 3))
        weight = F.sum(F.square(x), axis=1, keepdims=True)
        return F.broadcast_mul(F.softmax(self.head(x)), weight)


def make_net():
    mx.random.seed(0)
    return initialized(Mixed(), mx.init.Normal(0.4))


def outcome(net, data, hybridize):
    """Return the result of a forward pass and the gradients of all weights, as NumPy arrays."""
    net.hybridize(hybridize, **STATIC)
    with autograd.record():
        result = net(data)
    result.backward(mx.nd.array(np.linspace(-1, 1, result.size)).reshape(result.shape))
    return {"result": result.asnumpy(), **gradients_of(net)}


DATA = mx.nd.array(np.random.default_rng(0).standard_normal((3, 2, 4, 4)))
WISHES = {
    "products": {"keep_fp32": ["Convolution", "FullyConnected"]},
    "Deconvolution": {"keep_fp32": ["Deconvolution"]},
    "BatchNorm": {"keep_fp32": ["BatchNorm"]},
    "Python's operators": {"keep_fp32": ["broadcast_add", "broadcast_mul"]},
    "one block": {"keep_fp32": ["mixed_convolution:Convolution"]},
    "softmax": {"compute_16": ["softmax"]},
    "sums": {"compute_16": ["mean", "sum"]},
    "all in FP32": {"compute_16": ["exp", "square", "mean", "sum", "softmax"]},
    "both": {"keep_fp32": ["Convolution"], "compute_16": ["mixed:mean", "exp"]},
}


@SAME_BITS
@pytest.mark.parametrize("wishes", WISHES)
def test_hybridized_and_imperative_give_the_same_bits_and_others_than_without(way, wishes):
    asked = dict(WISHES[wishes])
    if way == "cast float16" and "keep_fp32" in asked:
        asked["keep_fp32"] = [*mpgluon.NORMALIZATION_LAYERS, *asked["keep_fp32"]]
    outcomes = []
    for options, hybridize in ((asked, False), (asked, True), ({}, False)):
        net = in_way(way, make_net(), **options)
        outcomes.append(outcome(net, DATA, hybridize))
    assert_same_bits(outcomes[0], outcomes[1])
    assert any((outcomes[0][name] != outcomes[2][name]).any() for name in outcomes[0])


@pytest.mark.parametrize("way", FORMATS)
@BOTH
def test_a_product_kept_in_fp32_is_not_rounded(way, hybridize):
    layer = initialized(nn.Dense(1, in_units=2, use_bias=False))
    layer.weight.set_data(mx.nd.array([[1, 1]]))
    net = in_way(way, in_sequence(layer), keep_fp32=["FullyConnected"])
    net.hybridize(hybridize)
    result = net(mx.nd.array([[1, 2.0**-14]]))  # 1 + 2**-14 is in neither format
    assert result.asscalar() == 1 + 2.0**-14


@pytest.mark.parametrize("way", FORMATS)
@BOTH
@pytest.mark.parametrize("as_method", [False, True])
def test_an_operator_that_the_table_keeps_in_fp32_may_return_16_bits(way, hybridize, as_method):
    class Softmax(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            return x.softmax() if as_method else F.softmax(x)

    data = mx.nd.array([[0.1, 0.2, 0.7]])
    expected = mx.nd.softmax(mx.nd.array(round_to(data.asnumpy(), FORMATS[way]))).asnumpy()
    for options, rounded in (({}, False), ({"compute_16": ["softmax"]}, True)):
        net = initialized(in_sequence(nn.HybridLambda(lambda F, x: F.identity(x)), Softmax()))
        WAYS[way](net, **options)
        net.hybridize(hybridize)
        result = net(data.astype("float16") if FORMATS[way] == FLOAT16 else data).asnumpy()
        on_grid = np.array_equal(result, round_to(result, FORMATS[way]))
        assert on_grid == rounded
        if on_grid and FORMATS[way] == FLOAT16:
            np.testing.assert_array_equal(result, round_to(expected, FORMATS[way]))


@BOTH
@pytest.mark.parametrize("name", ["broadcast_add", "elemwise_add"])
def test_a_sum_written_with_plus_has_one_name(hybridize, name):
    class Sum(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            x = F.relu(x)
            return x + F.broadcast_mul(x, F.ones_like(x) * 2.0**-12)

    net = autocast_net(in_sequence(Sum()), "float16", keep_fp32=[name])
    net.hybridize(hybridize)
    assert net(mx.nd.array([[1]], dtype="float16")).asscalar() == 1 + 2.0**-12


@BOTH
@pytest.mark.parametrize("block", ["first", "0", "second", "1"])
def test_a_rule_for_one_block_holds_in_that_block_only(hybridize, block):
    net = in_sequence(
        *(
            nn.Dense(1, in_units=1, weight_initializer="ones", prefix=p)
            for p in ("first_", "second_")
        )
    )
    net.initialize()
    amp.autocast(net, "float16", keep_fp32=[f"{block}:FullyConnected"])
    net.hybridize(hybridize)
    # If the second layer rounds, so does the network; if only the first does, the bias shows.
    net[1].bias.set_data(mx.nd.array([2.0**-12]))
    expected = 1 + 2.0**-12 if block in ("second", "1") else 1
    assert net(mx.nd.ones((1, 1))).asscalar() == expected


@pytest.mark.parametrize("name", ["FullyConnected", "same:FullyConnected"])
def test_blocks_that_share_a_name_share_its_rule(name):
    def square(F, x):
        return F.FullyConnected(x, x, no_bias=True, num_hidden=1)

    net = nn.HybridSequential(prefix="same_")
    net.add(*(nn.HybridLambda(square, prefix="same_") for _ in range(2)))
    amp.autocast(net, "float16", keep_fp32=[name])
    number = np.float32(1 + 2.0**-6)  # float16 holds neither its square nor its fourth power
    assert net(mx.nd.array([[number]])).asscalar() == (number * number) ** 2


def test_a_rule_for_a_block_does_not_hold_in_its_children():
    class Parent(nn.HybridBlock):
        def __init__(self):
            super().__init__(prefix="parent_")
            self.child = nn.Dense(1, in_units=2, use_bias=False)

        def hybrid_forward(self, F, x):
            own = F.FullyConnected(x, x, no_bias=True, num_hidden=1)
            return F.broadcast_add(self.child(x), own)

    net = initialized(Parent())
    data = mx.nd.array([[1, 2.0**-6]])
    net.child.weight.set_data(data)
    amp.autocast(net, "float16", keep_fp32=["parent:FullyConnected"])
    # Both products are 1 + 2**-12, which the child rounds to 1.
    assert net(data).asscalar() == 2 + 2.0**-12


def test_the_rule_for_a_block_precedes_the_one_for_all():
    net = in_sequence(nn.Dense(2, in_units=2, prefix="a_"), nn.HybridLambda("exp", prefix="b_"))
    net.initialize()
    amp.autocast(net, "float16", keep_fp32=["b:exp"], compute_16=["exp"])
    result = net(mx.nd.ones((1, 2))).asnumpy()
    assert not np.array_equal(result, round_to(result, FLOAT16))


@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")
def test_an_imported_graph_follows_the_rules_too(tmp_path):
    source = initialized(in_sequence(nn.Dense(3, in_units=2, weight_initializer="ones")))
    source.hybridize()
    source(mx.nd.ones((1, 2)))
    source.export(str(tmp_path / "net"))
    files = [str(tmp_path / name) for name in ("net-symbol.json", "net-0000.params")]
    net = gluon.SymbolBlock.imports(files[0], ["data"], files[1])
    amp.autocast(net, "float16", keep_fp32=["FullyConnected"])
    assert net(mx.nd.array([[1, 2.0**-12]])).asnumpy().tolist() == [3 * [1 + 2.0**-12]]


def test_restore_takes_the_rules_off():
    net = make_net()
    plain = net(DATA).asnumpy()
    amp.autocast(net, "float16", compute_16=["softmax"])
    amp.restore(net)
    np.testing.assert_array_equal(net(DATA).asnumpy(), plain)
    amp.autocast(net, "float16")
    again = autocast_net(make_net(), "float16")
    assert_same_bits(outcome(net, DATA, False), outcome(again, DATA, False))


def test_the_report_shows_both():
    names = ["Convolution", "up:Deconvolution"]
    report = amp.autocast(make_net(), "float16", keep_fp32=iter(names), compute_16=["exp"])
    assert report.operators_fp32 == ("Convolution", "up:Deconvolution")
    assert report.operators_16 == ("exp",)
    assert "2 operators with results in float32, as asked for: Convolution, up:Dec" in str(report)
    assert "1 operator with results in float16, as asked for: exp" in str(report)
    assert "as asked for" not in str(amp.autocast(make_net()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_fp32": ["Convolutoin"]}, "'Convolutoin', nor .* mean 'Convolution'"),
        ({"keep_fp32": ["contrib.box_iuo"]}, "did you mean 'contrib.box_iou'"),
        ({"keep_fp32": ["nope"]}, "nor mixed a block of that name or place$"),
        ({"keep_fp32": ["mixed_haed"]}, "nor mixed a block of that .*mean 'mixed_head'"),
        ({"keep_fp32": ["mixed_haed:FullyConnected"]}, "no block of mixed .*mean 'mixed_head'"),
        ({"keep_fp32": ["hed:FullyConnected"]}, "did you mean 'head'"),
        ({"keep_fp32": ["reshape"]}, "reshape does no arithmetic"),
        ({"compute_16": ["Cast"]}, "Cast decides its formats itself"),
        ({"compute_16": ["Convolution"]}, "Convolution is not kept in FP32 by the table"),
        ({"compute_16": ["argmax"]}, "argmax is a loss, or returns counts, positions"),
        ({"compute_16": ["CTCLoss"]}, "CTCLoss is a loss"),
        ({"compute_16": ["exp"], "keep_fp32": ["exp"]}, "both name 'exp'"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_changed(options, message):
    net = make_net()
    with pytest.raises(ValueError, match=message):
        amp.autocast(net, "float16", **options)
    amp.autocast(net, "float16")


def test_a_block_that_is_kept_as_a_whole_has_no_rules():
    net = make_net()
    with pytest.raises(ValueError, match="names no block of mixed that computes in 16 bits"):
        amp.autocast(net, "float16", keep_fp32=[net.head, "head:FullyConnected"])


@pytest.mark.parametrize(
    "options", [{"compute_16": "exp"}, {"keep_fp32": "exp"}, {"compute_16": [nn.Dense]}]
)
def test_other_types_than_collections_of_names_are_refused(options):
    with pytest.raises(TypeError, match=r"keep_fp32 is a collection|compute_16 (is a|holds)"):
        amp.autocast(make_net(), "float16", **options)
