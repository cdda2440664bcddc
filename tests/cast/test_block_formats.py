"""Blocks that need to know their format, for a mask's lowest number, learn it from a cast."""

from __future__ import annotations

import mpgluon
from mpgluon import Policy, PrecisionError, amp
from mpgluon.diagnostics import check_network

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, STATIC, WAYS, backward_from, cast_net, in_sequence, in_way, initialized
from mxnet import gluon
from mxnet.gluon import nn

FLOAT16 = pytest.mark.parametrize("way", ["cast float16", "autocast float16"])
BFLOAT16 = {
    "native": lambda net: amp.autocast(net, "bfloat16"),
    "emulated": lambda net: amp.autocast(net, Policy.parse("emulated_bfloat16")),
}
SCORES = mx.nd.array(np.random.RandomState(0).standard_normal((2, 3, 4)))
MASK = mx.nd.array(np.array([[[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]] * 2))


class Attention(gluon.HybridBlock):
    """A masked softmax as gluonnlp's attention cells compute it."""

    def __init__(self):
        self._dtype = np.float32
        super().__init__()
        with self.name_scope():
            self.score = nn.Dense(4, flatten=False)

    def cast(self, dtype):
        self._dtype = dtype
        super().cast(dtype)

    def hybrid_forward(self, F, x, mask):
        lowest = -1e4 if np.dtype(self._dtype) == np.float16 else -1e18
        score = self.score(x)
        score = F.where(mask, score, lowest * F.ones_like(score))
        return F.softmax(score, axis=-1) * mask


class LooksOnly(Attention):
    """The same without a ``cast`` of its own: it only looks at ``_dtype``."""

    cast = gluon.HybridBlock.cast


class Careless(Attention):
    """The same, whatever the format."""

    cast = gluon.HybridBlock.cast

    def __init__(self):
        super().__init__()
        del self._dtype

    def hybrid_forward(self, F, x, mask):
        score = self.score(x)
        score = F.where(mask, score, F.ones_like(score) * -1e18)
        return F.softmax(score, axis=-1) * mask


class AnotherName(gluon.HybridBlock):
    """A block that keeps more than the name of its format, and casts parts itself."""

    def __init__(self):
        super().__init__()
        self.lowest, self.told = -1e18, 0
        with self.name_scope():
            self.score, self.others = nn.Dense(4, flatten=False), [nn.LayerNorm()]
            self.register_child(self.others[0])
            self.scale = self.params.get("scale", shape=(1,), init="ones")

    def cast(self, dtype):
        super().cast(dtype)
        self.score.weight.cast(dtype)
        for other in self.others:
            other.cast("float32")
        self.scale.cast("float16")
        self.lowest = -1e4 if dtype == "float16" else -1e18
        self.fresh = True

    def hybrid_forward(self, F, x, mask, scale):
        score = F.broadcast_mul(self.others[0](self.score(x)), scale)
        score = F.where(mask, score, F.ones_like(score) * self.lowest)
        return F.softmax(score, axis=-1) * mask


def made(kind, initialize=True):
    mx.random.seed(0)
    net = kind()
    if initialize:
        net.initialize(mx.init.Uniform(1))
        net(SCORES, MASK)
    return net


def attributes_of_its_own(net):
    return {name: value for name, value in vars(net).items() if name not in vars(nn.Flatten())}


def trained_gradient(net):
    backward_from(lambda: (net(SCORES, MASK) ** 2).sum())
    return net.score.weight.grad().asnumpy().astype(np.float32)


@BOTH
@FLOAT16
@pytest.mark.parametrize("kind", [Attention, LooksOnly, AnotherName, Careless])
def test_a_row_that_is_all_masked_is_zero_and_trains_as_in_fp32(kind, way, hybridize):
    expected = trained_gradient(made(kind))
    net = made(kind)
    report = WAYS[way](net)
    net.hybridize(hybridize, **STATIC)
    found = trained_gradient(net)
    assert net(SCORES, MASK).asnumpy()[:, 2].tolist() == [[0] * 4] * 2
    np.testing.assert_allclose(found, expected, atol=2**-8)
    assert report.told_format == (() if kind is Careless else (net.name,))
    told = f"1 block whose own format was set to float16 ({net.name})" in str(report)
    assert told == (kind is not Careless)


@FLOAT16
@pytest.mark.parametrize("kind", [Attention, LooksOnly, AnotherName])
def test_restore_removes_the_format(kind, way):
    net = made(kind)
    before = attributes_of_its_own(net)
    expected = trained_gradient(net)
    WAYS[way](net)
    assert attributes_of_its_own(net) != before
    amp.restore(net)
    assert attributes_of_its_own(net) == before
    assert trained_gradient(net).tobytes() == expected.tobytes()


@FLOAT16
def test_a_cast_method_receives_the_format_without_casting_parameters_or_children(way):
    net = in_way(way, made(AnotherName))
    expected = np.float16 if way == "cast float16" else np.float32
    assert net.score.weight.data().dtype == net.scale.data().dtype == expected
    assert np.dtype(net.others[0].gamma.dtype) == np.float32
    assert isinstance(net.others[0], nn.LayerNorm)
    assert net.told == 0


@BOTH
@pytest.mark.parametrize("way", list(BFLOAT16))
@pytest.mark.parametrize("kind", [Attention, LooksOnly, AnotherName])
def test_bfloat16_has_the_range_of_fp32_and_no_cast_method_is_called(kind, way, hybridize):
    net = made(kind)
    report = BFLOAT16[way](net)
    net.hybridize(hybridize)
    assert report.told_format == ()
    assert np.isfinite(trained_gradient(net)).all()


def test_cast_is_not_called_on_kept_blocks_and_restore_removes_the_attributes_it_set():
    class Two(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.first, self.second = Attention(), Attention()

        def hybrid_forward(self, F, x, mask):
            return self.second(self.first(x, mask), mask)

    net = initialized(Two())
    assert amp.autocast(net, "float16", keep_fp32=(net.second,)).told_format == (net.first.name,)
    assert net.second._dtype == np.float32
    amp.restore(net.first)
    assert net.first._dtype == np.float32
    assert np.isfinite(net(SCORES, MASK).asnumpy()).all()
    amp.restore(net)
    assert net.first._dtype == np.float32


def test_cast_is_not_called_on_layers_of_gluon():
    net = in_sequence(nn.BatchNorm(), gluon.rnn.LSTM(4), nn.Dense(3))
    assert mpgluon.cast_block(net).told_format == ()
    assert net[1]._dtype == "float32"


def test_a_cast_method_that_fails_leaves_the_network_as_it_was():
    class Fails(Attention):
        def cast(self, dtype):
            raise PrecisionError(f"no {dtype} here")

    net = made(Fails)
    with pytest.raises(PrecisionError, match="no float16 here"):
        mpgluon.cast_block(net)
    assert net._dtype == np.float32
    assert np.dtype(net.score.weight.dtype) == np.float32
    assert trained_gradient(net).tobytes() == trained_gradient(made(Attention)).tobytes()


@FLOAT16
def test_check_network_names_the_operator_and_the_block_of_a_number_that_float16_lacks(way):
    net = in_way(way, made(Careless))
    (finding,) = check_network(net, [SCORES.shape, MASK.shape]).findings
    assert finding.level == "note"
    assert f"broadcast_mul in {net.name} computes with -1e+18, in FP32" in finding.what
    assert "-inf" in finding.why
    assert "-10000" in finding.fix


@pytest.mark.parametrize("kind", [Attention, LooksOnly, AnotherName])
def test_check_network_is_content_with_blocks_that_know_their_format(kind):
    net = cast_net(made(kind))
    assert [one.level for one in check_network(net, [SCORES.shape, MASK.shape]).findings] == ["ok"]


WRITES = {
    "added": (lambda F, x: x + 1e5, "note"),  # noqa: ARG005
    "subtracted from": (lambda F, x: -1e6 - x, "note"),  # noqa: ARG005
    "divided by": (lambda F, x: x / 1e30, "note"),  # noqa: ARG005
    "compared": (lambda F, x: x * (x > -1e18), "note"),  # noqa: ARG005
    "a bound": (lambda F, x: F.clip(F.maximum(x, -1e18), -1, 1), "note"),
    "another bound": (lambda F, x: F.clip(x, 1e-8, 1), "note"),
    "small": (lambda F, x: x * 1e-30, "note"),  # noqa: ARG005
    "sequence mask": (
        lambda F, x: F.SequenceMask(x, F.ones((3,)), use_sequence_length=True, value=-1e9),
        "note",
    ),
    "padded": (
        lambda F, x: F.pad(
            F.reshape(x, (1, 1, 4, 3)),
            mode="constant",
            pad_width=(0,) * 6 + (1, 1),
            constant_value=1e9,
        ),
        "note",
    ),
    "filled": (lambda F, x: x * F.full((4, 3), -7e4, dtype="float16"), "warning"),
    "filled with little": (lambda F, x: x * F.full((4, 3), 1e-8, dtype="float16"), "warning"),
    "rounded": (lambda F, x: (x - 1e18).astype("float16"), "warning"),  # noqa: ARG005
    "the largest": (lambda F, x: x * 65504, "ok"),  # noqa: ARG005
    "rounds to the largest": (lambda F, x: x * 65519, "ok"),  # noqa: ARG005
    "rounds to the smallest": (lambda F, x: x * 3e-8, "ok"),  # noqa: ARG005
    "infinite already": (lambda F, x: x * float("-inf"), "ok"),  # noqa: ARG005
    "in FP32": (lambda F, x: x.astype("float32") * -1e18, "ok"),  # noqa: ARG005
    "no operand": (lambda F, x: F.tile(x, 70000), "ok"),
}


@pytest.mark.parametrize("case", list(WRITES))
def test_what_counts_as_a_number_that_float16_lacks(case):
    function, level = WRITES[case]
    net = initialized(in_sequence(nn.Dense(3), nn.HybridLambda(function)))
    amp.autocast(net, "float16")
    assert {one.level for one in check_network(net, (4, 5)).findings} == {level}


def test_check_network_has_nothing_to_say_of_bfloat16_and_fp32():
    net = made(Careless)
    shapes = [SCORES.shape, MASK.shape]
    assert not check_network(net, shapes).at_level("warning")
    amp.autocast(net, "bfloat16")
    assert not check_network(net, shapes).at_level("warning")
