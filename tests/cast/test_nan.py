"""Activations and pooling of a cast network keep NaN, which MXNet's on a CPU turn into numbers."""

from __future__ import annotations

import mpgluon
from mpgluon import amp
from mpgluon.graph.nan import keeping_nan

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, EACH_WAY, STATIC, WAYS, backward_from, in_sequence, in_way, initialized
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

PLACES = (0, 2, 2), (1, 0, 5)  # (image, row, column) of the NaN, in every channel


LAYERS = {
    "relu": lambda: nn.Activation("relu"),
    "leaky without a slope": lambda: nn.LeakyReLU(0),
    "max pooling": lambda: nn.MaxPool2D(3, 2),
    "max pooling beyond the edge": lambda: nn.MaxPool2D(3, 2, 1, ceil_mode=True),
    "global max pooling": lambda: nn.GlobalMaxPool2D(),
}


def images(with_nan=True):
    values = np.random.default_rng(0).standard_normal((2, 16, 6, 6)).astype("float32")
    for image, row, column in PLACES if with_nan else ():
        values[image, :, row, column] = np.nan
    return mx.nd.array(values)


def windows(layer):
    """Return where a layer's results have a NaN among their operands."""
    holes = np.zeros((2, 16, 6, 6), "float32")
    for image, row, column in PLACES:
        holes[image, :, row, column] = 1
    if isinstance(layer, (nn.Activation, nn.LeakyReLU)):
        return holes > 0
    return layer(mx.nd.array(holes)).asnumpy() > 0  # max pooling of zeros and ones, by MXNet


def made(layer, way, hybridize, *, blocked, kept=False):
    net = in_sequence(layer)
    if blocked:  # behind a convolution that changes nothing, in oneDNN's blocks of channels
        net = initialized(in_sequence(nn.Conv2D(16, 1, in_channels=16, use_bias=False), layer))
        net[0].weight.set_data(mx.nd.array(np.eye(16).reshape(16, 16, 1, 1)))
    WAYS[way](net, keep_fp32=[*mpgluon.NORMALIZATION_LAYERS, layer] if kept else ())
    net.hybridize(hybridize, **STATIC)
    return net


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("blocked", [False, True], ids=["plain", "blocked"])
@pytest.mark.parametrize("kind", LAYERS)
@BOTH
@EACH_WAY
def test_nan_comes_out_where_it_went_in_and_nothing_else_changes(
    way, hybridize, kind, blocked, training
):
    holes = windows(LAYERS[kind]())
    assert 0 < holes.sum() < holes.size or kind == "global max pooling"
    for kept in (False, True):
        net = made(LAYERS[kind](), way, hybridize, blocked=blocked, kept=kept)
        with autograd.record(train_mode=training):
            found = net(images()).asnumpy()
            without = net(images(with_nan=False)).asnumpy()
        np.testing.assert_array_equal(np.isnan(found), holes)
        assert found[~holes].tobytes() == without[~holes].tobytes()


@BOTH
@EACH_WAY
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("kept", [False, True], ids=["cast", "kept in FP32"])
def test_nan_in_another_dtype_comes_out_too(kept, dtype, way, hybridize):
    class Layers(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            x = F.cast(x, dtype)
            relu, pooled = F.Activation(x, act_type="relu"), F.Pooling(x, kernel=(3, 3))
            return F.cast(relu, "float32"), F.cast(pooled, "float32")

    net, x = Layers(), images()
    WAYS[way](net, keep_fp32=[Layers] if kept else ())
    net.hybridize(hybridize, **STATIC)
    x.attach_grad()
    with autograd.record():
        relu, pooled = net(x)
    relu.backward(mx.nd.ones_like(relu))
    values = images().asnumpy().astype(dtype).astype("float32")
    np.testing.assert_array_equal(relu.asnumpy(), np.maximum(values, 0))
    windows_of_3 = np.lib.stride_tricks.sliding_window_view(values, (3, 3), axis=(2, 3))
    np.testing.assert_array_equal(pooled.asnumpy(), windows_of_3.max(axis=(4, 5)))
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(x.grad.asnumpy()[numbers], values[numbers] > 0)


@BOTH
@EACH_WAY
def test_a_recurrent_layer_with_relu_keeps_nan_in_the_sequences_that_have_one(way, hybridize):
    for states in (False, True):
        layer = in_way(way, initialized(rnn.RNN(4, activation="relu", input_size=3)))
        layer.hybridize(hybridize)
        sequences = np.ones((5, 3, 3), "float32")  # time, batch, channels
        sequences[2, 1, 0] = np.nan
        begin = [layer.begin_state(3)] if states else []
        results = layer(mx.nd.array(sequences), *begin)
        for array in [results[0], *results[1]] if states else [results]:
            assert np.isnan(array.asnumpy()).any(axis=(0, 2)).tolist() == [False, True, False]


@EACH_WAY
def test_pooling_of_regions_keeps_nan(way):
    class Regions(nn.HybridBlock):
        def hybrid_forward(self, F, x, regions):
            return F.ROIPooling(x, regions, (1, 1), 1.0)

    net = in_way(way, Regions())
    regions = mx.nd.array([[0, 0, 0, 5, 5], [0, 0, 4, 5, 5], [1, 0, 0, 5, 1]])
    for _ in range(2):
        found = np.isnan(net(images(), regions).asnumpy())
        assert found.all(axis=(1, 2, 3)).tolist() == [True, False, True]
        assert found.any(axis=(1, 2, 3)).tolist() == [True, False, True]
        net.hybridize()


@EACH_WAY
def test_operators_write_into_an_array_that_they_are_given(way):
    class Written(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            y = F.zeros_like(x)
            F.Activation(x, act_type="relu", out=y)
            z = F.zeros_like(x)
            F.Pooling(y, kernel=(1, 1), pool_type="max", out=z)
            return y + z

    net = in_way(way, Written())
    found = net(images()).asnumpy()
    expected = net(images(with_nan=False)).asnumpy()
    assert (expected > 0).any()
    assert np.isnan(found).sum() == np.isnan(images().asnumpy()).sum()
    assert (found == expected)[~np.isnan(found)].all()


def test_a_relu_in_the_body_of_a_loop_keeps_nan():
    class Loop(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            def body(row, state):
                made = F.Activation(row + state, act_type="relu")
                return made, made

            return F.contrib.foreach(body, x, F.zeros_like(F.slice_axis(x, 0, 0, 1)).sum(axis=0))[0]

    net = Loop()
    WAYS["autocast float16"](net)
    rows = mx.nd.array([[1.0, 2.0], [np.nan, 1.0], [1.0, 1.0]])
    for _ in range(2):
        assert np.isnan(net(rows).asnumpy()).tolist() == [[False] * 2, [True, False], [True, False]]
        net.hybridize()


def test_plain_networks_are_untouched():
    """MXNet itself drops NaN; if this fails, mpgluon.graph.nan is not needed any more."""
    net = in_sequence(nn.Activation("relu"), nn.MaxPool2D(3, 2))
    assert not np.isnan(net(images()).asnumpy()).any()
    for way in ("autocast float16", "cast float16"):
        WAYS[way](net)
        assert np.isnan(net(images()).asnumpy()).any()
        mpgluon.restore(net)
        assert not np.isnan(net(images()).asnumpy()).any()


@BOTH
def test_the_gradient_of_relu_is_mxnets_and_nan_where_the_value_is(hybridize):
    values = mx.nd.array([-1.0, 0.0, 2.0, np.inf, -np.inf, np.nan] * 16)
    arriving = mx.nd.array(np.repeat([1.0, -2.0, np.inf, np.nan], 24))
    gradients = []
    for function in (mx.nd.relu, None):
        net = in_sequence(nn.Activation("relu"))
        if function is None:
            WAYS["autocast float16"](net)
            net.hybridize(hybridize)
            function = net
        values.attach_grad()
        with autograd.record():
            result = function(values)
        result.backward(arriving)
        gradients.append(values.grad.asnumpy())
    np.testing.assert_array_equal(*gradients)  # NaN equals NaN


# These operators of one array are queries, positions, choices and signs, in FP32 as in 16 bits.
DROPPING = """
    sign argmax argmax_channel argmin argsort topk logical_not nansum nanprod diag
    linalg_extractdiag linalg_sumlogdiag all_finite multi_all_finite shape_array size_array
    zeros_like ones_like sample_multinomial sample_poisson
"""


@pytest.mark.filterwarnings("ignore")  # of operators that are called without their options
def test_all_other_operators_of_one_array_keep_nan_by_themselves():
    values = np.linspace(0.1, 0.9, 128, dtype="float32").reshape(2, 4, 4, 4)
    values[1, 2, 3, 1] = np.nan
    kept, dropped = [], []
    for name in sorted(set(dir(mx.nd)) & set(dir(mx.sym))):
        function = getattr(mx.nd, name)
        if not callable(function) or isinstance(function, type) or name in ("save", "load"):
            continue
        try:
            result = keeping_nan(name, function)(mx.nd.array(values))
            arrays = [one.asnumpy() for one in (result if isinstance(result, list) else [result])]
        except (mx.MXNetError, TypeError, AssertionError, AttributeError, ValueError):
            continue  # it takes something else than one array
        (kept if any(np.isnan(array).any() for array in arrays) else dropped).append(name)
    assert set(dropped) == set(DROPPING.split())
    assert len(kept) > 80


REMOVERS = {
    "sign": lambda F, x: F.sign(x),
    "nansum": lambda F, x: F.nansum(x, axis=1),
    "nanprod": lambda F, x: F.nanprod(x, axis=1),
    "argmax": lambda F, x: F.argmax(x, axis=1),
    "topk": lambda F, x: F.topk(x, axis=1, ret_typ="value"),
    "comparison": lambda F, x: F.relu(x > 0),
    "condition": lambda F, x: F.where(x > 0, x, F.zeros_like(x)),
    "power": lambda F, x: F.relu(x**0),
}


class Remover(nn.HybridBlock):
    def __init__(self, remove):
        super().__init__()
        self.remove = remove
        self.weight = self.params.get("weight", shape=(1,), init="ones")

    def hybrid_forward(self, F, x, weight):
        return F.broadcast_add(self.remove(F, F.sqrt(x)), weight)


@pytest.mark.parametrize("remove", REMOVERS)
@BOTH
@EACH_WAY
def test_what_removes_a_nan_in_fp32_removes_it_and_the_step_is_made(remove, way, hybridize):
    net = initialized(Remover(REMOVERS[remove]))
    values = mx.nd.array([[1, -1, 4], [0.25, 4, 9]])  # the root of -1 is NaN, others are exact
    expected = net(values).asnumpy()
    assert np.isfinite(expected).all()
    WAYS[way](net)
    net.hybridize(hybridize)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
    amp.init_trainer(trainer, 16)
    result = backward_from(lambda: net(values), trainer)
    trainer.step(1)
    assert result.asnumpy().tolist() == expected.tolist()
    assert not amp.step_was_skipped(trainer)
    assert net.weight.data().asscalar() != 1
