"""Imported graphs are cast operator by operator, to the bits of the network that they came from."""

from __future__ import annotations

import re

import mpgluon
from mpgluon import PrecisionError

import mxnet as mx
import numpy as np
import pytest
from gluoncv.model_zoo import get_model
from gluoncv.nn.feature import FeatureExpander
from helpers import (
    BOTH,
    EACH_WAY,
    STATIC,
    WAYS,
    assert_same_bits,
    in_sequence,
    initialized,
    parameters_of,
    train,
)
from mxnet import autograd, gluon
from mxnet.gluon import nn

IMAGES = mx.nd.array(np.random.RandomState(0).standard_normal((4, 3, 12, 12)))

pytestmark = pytest.mark.filterwarnings("ignore:.*Cannot decide type:UserWarning")


class Small(nn.HybridBlock):
    """A residual network with two results."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.Conv2D(16, 3, padding=1, in_channels=3)
            self.norm = nn.BatchNorm(in_channels=16)
            self.second = nn.Conv2D(16, 3, padding=1, use_bias=False, in_channels=16)
            self.layer_norm = nn.LayerNorm(axis=1, in_channels=16)
            self.dense = nn.Dense(5, in_units=32)

    def hybrid_forward(self, F, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(x + self.layer_norm(self.second(x)))
        halves = F.split(F.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max"), 2, axis=1)
        pooled = F.concat(*(F.mean(half, axis=(2, 3)) * 1.5 for half in halves), dim=1)
        pooled = F.concat(pooled, F.clip(pooled, -0.5, 0.5), dim=1)
        return self.dense(pooled), F.softmax(pooled)


def original_and_import() -> tuple[gluon.HybridBlock, gluon.SymbolBlock]:
    mx.random.seed(0)
    net = initialized(Small(), mx.init.Xavier())
    net(IMAGES)
    data = mx.sym.var("data")
    imported = initialized(gluon.SymbolBlock(list(net(data)), data))
    imported(IMAGES)
    own = imported.collect_params()
    for name, parameter in net.collect_params().items():
        own[name].set_data(parameter.data())
    return net, imported


def results(net) -> dict[str, np.ndarray]:
    for _ in range(2):
        with autograd.record():
            logits, shares = net(IMAGES)
            loss = (logits * logits).sum() + (shares * shares).sum()
        loss.backward()
    mx.nd.waitall()
    parameters = net.collect_params().values()
    found = {"logits": logits.asnumpy(), "shares": shares.asnumpy()}
    found |= {p.name: p.data().asnumpy() for p in parameters}
    return found | {f"d {p.name}": p.grad().asnumpy() for p in parameters if p.grad_req != "null"}


@EACH_WAY
def test_an_imported_graph_has_the_bits_of_the_hybridized_network(way):
    net, imported = original_and_import()
    reports = [WAYS[way](one) for one in (net, imported)]
    net.hybridize(**STATIC)
    assert reports[0].parameters_cast == reports[1].parameters_cast
    assert reports[1].beyond_reach == ()
    assert [re.sub(r".*?(batch|layer)norm.*", r"\1", one) for one in reports[1].kept_fp32] == [
        "batch",
        "layer",
    ]
    assert_same_bits(results(imported), results(net))


@EACH_WAY
def test_operators_that_graphs_name_otherwise_than_f_are_cast_too(way, tmp_path):
    net = in_sequence(
        nn.HybridLambda(lambda F, x: F.image.normalize(x, mean=(0.5,), std=(2.0,))),
        nn.Dense(5, in_units=3 * 12 * 12),
        nn.HybridLambda(lambda F, x: F.cumsum(x, axis=1)),
    )
    net.initialize()
    net.hybridize()
    net(IMAGES)
    net.export(str(tmp_path / "net"))
    imported = gluon.SymbolBlock.imports(
        str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    )
    WAYS[way](net)
    WAYS[way](imported)
    assert (imported(IMAGES).asnumpy() == net(IMAGES).asnumpy()).all()


@EACH_WAY
def test_restore_gives_the_graph_and_the_parameters_back(way):
    _, imported = original_and_import()
    graph, attributes = imported._cached_graph, set(vars(imported))
    before, in_fp32 = parameters_of(imported), [out.asnumpy() for out in imported(IMAGES)]
    WAYS[way](imported)
    assert any((a.asnumpy() != b).any() for a, b in zip(imported(IMAGES), in_fp32))
    mpgluon.restore(imported)
    assert imported._cached_graph is graph
    assert set(vars(imported)) == attributes
    assert_same_bits(parameters_of(imported), before)
    assert all((a.asnumpy() == b).all() for a, b in zip(imported(IMAGES), in_fp32))


@EACH_WAY
@BOTH
def test_it_trains_as_a_part_of_a_network(way, hybridize):
    data = mx.sym.var("data")
    inner = mx.sym.Activation(
        mx.sym.Convolution(data, kernel=(3, 3), num_filter=8, name="c"), act_type="relu"
    )
    net = initialized(in_sequence(nn.Conv2D(8, 3), gluon.SymbolBlock(inner, data), nn.Dense(3)))
    WAYS[way](net)  # before shapes are known
    net.hybridize(hybridize, **STATIC)
    losses = train(net, [IMAGES], mx.nd.array([0, 1, 2, 0], dtype="int32"), steps=4)
    assert losses[-1].mean() < losses[0].mean()


@pytest.mark.filterwarnings("ignore:Parameter .* is already initialized:UserWarning")
def test_a_feature_expander_of_gluoncv_is_cast():
    backbone = initialized(gluon.model_zoo.vision.resnet18_v1(classes=10))
    backbone(mx.nd.zeros((1, 3, 64, 64)))
    internals = backbone(mx.sym.var("data")).get_internals().list_outputs()
    last = next(name for name in internals if name.endswith("stage4_activation1_output"))
    last = last.removeprefix(backbone.prefix)
    net = initialized(FeatureExpander(backbone, outputs=[last], num_filters=[16], inputs=("data",)))
    images = mx.nd.random.normal(shape=(2, 3, 64, 64))
    net(images)
    for name, variance in net.collect_params(".*var").items():
        if name.startswith("expand"):  # gluoncv's are random, some negative: NaN, which ReLU hides
            variance.set_data(mx.nd.ones(variance.shape))
    expected = [one.asnumpy() for one in net(images)]
    assert mpgluon.cast_block(net).cast == (net.name,)
    norms = [p for name, p in net.collect_params().items() if "batchnorm" in name or "_bn" in name]
    assert norms
    assert all(np.dtype(parameter.dtype) == np.float32 for parameter in norms)
    for found, one in zip(net(images), expected):
        assert found.dtype == np.float32
        scale = np.abs(one).max()
        assert 0 < np.abs(found.asnumpy() - one).max() < 0.05 * scale


def with_control_flow():
    data, state = mx.sym.var("data"), mx.sym.var("state")
    out, _ = mx.sym.contrib.foreach(lambda x, s: (x + s, x + s), data, state)
    return gluon.SymbolBlock(out, [data, state])


def in_float16_already():
    data = mx.sym.var("data")
    return gluon.SymbolBlock(mx.sym.amp_cast(data, dtype="float16") * 2, data)


def with_float16_inside():
    data = mx.sym.var("data")
    indices = mx.sym.argmax(data, axis=1)
    return gluon.SymbolBlock(mx.sym.one_hot(indices, 4, dtype="float16").astype("float32"), data)


def fused_by_a_backend():
    data = mx.sym.var("data")
    dense = mx.sym.FullyConnected(data, num_hidden=4, name="dense")
    return gluon.SymbolBlock(mx.sym.relu(dense).get_backend_symbol("MKLDNN"), data)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_control_flow, r"control flow \(_foreach "),
        (in_float16_already, r"asks for float16 itself \(amp_cast "),
        (with_float16_inside, r"asks for float16 itself \(one_hot "),
        (fused_by_a_backend, r"a backend fused \(_sg_mkldnn_fully_connected "),
        (lambda: get_model("mobilenet1.0_int8"), r"8-bit integers \(_sg_mkldnn_conv "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_cast_is_refused_and_nothing_is_changed(make, reason):
    net = initialized(in_sequence(nn.Dense(4, in_units=3), make()))
    attributes = [set(vars(block)) for block in (net, *net)]
    with pytest.raises(PrecisionError, match=rf"{net[1].name}.*{reason}.*keep_fp32"):
        mpgluon.cast_block(net)
    assert [set(vars(block)) for block in (net, *net)] == attributes
    assert np.dtype(net[0].weight.dtype) == np.float32
    mpgluon.cast_block(net, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, net[1]))
