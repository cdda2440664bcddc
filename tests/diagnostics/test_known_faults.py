"""Faults of MXNet's own operators are found where they are planted, and not in sound networks."""

from __future__ import annotations

import mpgluon
from mpgluon.diagnostics import check_network, check_training

import mxnet as mx
import numpy as np
import pytest
from helpers import in_sequence, initialized
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn
from mxnet.gluon.model_zoo import vision

STATIC, IMPERATIVE = {"static_alloc": True}, {"active": False}


class Planted(gluon.HybridBlock):
    """Computes a function of F, an image after a convolution, and perhaps another input."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Conv2D(16, 1, in_channels=8)

    def hybrid_forward(self, F, x, *others):
        return self.function(F, self.layer(x), *others)


def columns(F, x):
    x = F.flatten(x)
    x = F.concat(*[F.slice_axis(x, axis=1, begin=i, end=i + 1) for i in range(2)], dim=1)
    return F.log_softmax(x)


def halves(F, x, weight):
    return deconvolution(F, F.concat(*F.split(x, 2, axis=1), dim=1), weight)


def deconvolution(F, x, weight):
    return F.Deconvolution(x, weight, kernel=(3, 3), num_filter=4)


WEIGHT = (16, 4, 3, 3)
# The function, how its block is hybridized, the shape of another input, a word of the message,
# and whether a cast network has the fault too.
FAULTS = {
    "slope": (lambda F, x, y: F.LeakyReLU(x, y, act_type="prelu"), {}, (16,), "slope", False),
    "mask": (lambda F, x, y: F.tanh(x + y), STATIC, (2, 16, 4, 4), "static_alloc", False),
    "columns": (columns, IMPERATIVE, None, "columns", False),
    "halves": (halves, IMPERATIVE, WEIGHT, "8 channels", False),
    "last": (lambda F, x: F.SequenceLast(x), IMPERATIVE, None, "outside of its array", True),
    "bfloat16": (lambda F, x: F.transpose(F.amp_cast(x, dtype="bfloat16")),
        *(IMPERATIVE, None, "bfloat16", False)),
    "weight": (lambda F, x, y: deconvolution(F, x, F.tanh(y)),
        *(IMPERATIVE, WEIGHT, "weight is computed", False)),
    "backend": (lambda F, x: F.relu(x), {"backend": "MKLDNN"}, None, "backend MKLDNN", True),
    "input": (lambda _, x, y: [x, y], {}, (2, 3), "returns its input", False),
}  # fmt: skip


def said(net, *shapes):
    return [one.what + one.why for one in check_network(net, shapes).at_level("error")]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    function, flags, other, word, in_cast_networks = FAULTS[name]
    shapes = [(2, 8, 4, 4)] + [other] * (other is not None)
    net = Planted(function)
    net.hybridize(**flags)
    (text,) = said(net, *shapes)
    assert word in text
    if flags in ({}, STATIC):
        net.hybridize(active=False)
        assert not said(net, *shapes)
        net.hybridize(**flags)
    mpgluon.amp.autocast(net, "float16")
    assert [word in text for text in said(net, *shapes)] == [True] * in_cast_networks


def test_a_batch_norm_that_never_learns_is_found_and_a_frozen_one_is_not():
    norm = nn.BatchNorm(scale=False, center=False, in_channels=8)
    (text,) = said(in_sequence(norm, nn.Conv2D(4, 1, in_channels=8)), (2, 8, 4, 4))
    assert "running statistics" in text
    assert not said(in_sequence(nn.Conv2D(8, 1, in_channels=8), norm), (2, 8, 4, 4))
    frozen = in_sequence(nn.BatchNorm(in_channels=8))
    frozen.collect_params().setattr("grad_req", "null")
    assert not said(frozen, (2, 8, 4, 4))


class Attention(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        self.query, self.key = (nn.Dense(8, in_units=8, flatten=False) for _ in range(2))
        self.norm = nn.LayerNorm(in_channels=8)

    def hybrid_forward(self, F, x, mask):
        scores = F.batch_dot(self.query(x), self.key(x), transpose_b=True)
        return self.norm(x + F.batch_dot(F.softmax(F.broadcast_add(scores, mask)), x))


@pytest.mark.parametrize("flags", [IMPERATIVE, {}, {**STATIC, "static_shape": True}], ids=str)
def test_nothing_is_said_of_sound_networks(flags):
    for net, *shapes in (
        (vision.resnet18_v1(), (2, 3, 32, 32)),
        (Attention(), (2, 5, 8), (2, 1, 5)),
        (
            in_sequence(nn.Conv2D(8, 1, in_channels=4), nn.BatchNormReLU(in_channels=8)),
            (2, 4, 4, 4),
        ),
        (in_sequence(rnn.LSTM(4, input_size=3), nn.Dense(2, in_units=8)), (5, 2, 3)),
    ):
        net.hybridize(**flags)
        assert not said(net, *shapes)


@pytest.mark.parametrize(("optimizer", "found"), [("nadam", True), ("sgld", True), ("adam", False)])
def test_optimizers_whose_devices_drift_apart_are_found(optimizer, found):
    net = nn.Dense(2, in_units=2)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    errors = check_training(net, gluon.Trainer(net.collect_params(), optimizer)).at_level("error")
    assert [one.topic for one in errors] == ["optimizer"] * found


@pytest.mark.parametrize(
    ("optimizer", "lr_mult", "level"),
    [
        *(("adamax", 1, "warning"), ("adam", 1, None)),
        *((name, 0, "error") for name in ("ftml", "ftrl")),
        *((name, 1, None) for name in ("ftml", "ftrl")),
    ],
)
def test_optimizers_that_make_nan_are_found(optimizer, lr_mult, level):
    weight = initialized(gluon.Parameter("weight", shape=(2,)))
    weight.lr_mult = lr_mult
    trainer = gluon.Trainer([weight], optimizer)
    found = [one for one in check_training(trainer=trainer).findings if one.topic == "optimizer"]
    assert [one.level for one in found] == ([] if level is None else [level])
    with autograd.record():
        loss = (weight.data() * mx.nd.array([0, 1])).sum()
    loss.backward()
    trainer.step(1)
    assert np.isnan(weight.data().asnumpy()).any() == (level is not None)


@pytest.mark.usefixtures("numpy_interface")
def test_a_relu_that_the_numpy_interface_leaves_out_is_found():
    fused = nn.BatchNormReLU(in_channels=2)
    apart = in_sequence(nn.BatchNorm(in_channels=2), nn.Activation("relu"))
    for net in (fused, apart):
        net.initialize()
    x = mx.np.array([[-1.0, 1.0], [1.0, -1.0]])
    assert fused(x).min() < 0 <= apart(x).min()
    assert not said(apart, (2, 2))
    (text,) = said(fused, (2, 2))
    assert "BatchNormReLU of the NumPy interface" in text
