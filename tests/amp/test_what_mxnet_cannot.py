"""Row-sparse weights and second derivatives: what works, and what is refused with a sentence."""

from __future__ import annotations

from contextlib import nullcontext

import mpgluon
from mpgluon import DynamicLossScale, TrainerStateError, amp, kernels
from mpgluon.kernels.bfloat16 import has_native_bfloat16

import mxnet as mx
import numpy as np
import pytest
from amp_helpers import ONE, each_device_list
from helpers import assert_same_bits, initialized, with_loss_scale
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import SparseEmbedding

# --- row-sparse weights ----------------------------------------------------------------------


def with_embedding(kind, devices=ONE):
    mx.random.seed(0)
    net = nn.Sequential()
    if kind == "sparse weight":
        net.add(SparseEmbedding(8, 3))
    else:
        net.add(nn.Embedding(8, 3, sparse_grad=kind == "sparse gradient"))
    net.add(nn.Dense(2, in_units=3, flatten=False))
    net.initialize(mx.init.Normal(0.5), ctx=devices)
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})


def train(net, trainer, devices=ONE, *, scaled=True):
    for words in ([1, 2, 2, 5], [0, 2, 7, 5]):
        with autograd.record():
            parts = gluon.utils.split_and_load(mx.nd.array(words), devices)
            losses = [(net(part) ** 2).sum(axis=1) for part in parts]
            with amp.scale_loss(losses, trainer) if scaled else nullcontext(losses) as heads:
                autograd.backward(heads)
        trainer.step(4)
    weight = net[0].weight
    value = weight.data() if weight._stype == "default" else weight.row_sparse_data(mx.nd.arange(8))
    return value.asnumpy()


@each_device_list
@pytest.mark.parametrize("loss_scale", ["dynamic", 8, 1, DynamicLossScale(2)], ids=str)
def test_row_sparse_weights_train_only_without_a_loss_scale_as_the_error_says(devices, loss_scale):
    net, trainer = with_embedding("sparse weight", devices)
    message = r"1 weights are stored as rows \(\w+weight: row_sparse\).*sparse_grad=True"
    with pytest.raises(TrainerStateError, match=message):
        amp.init_trainer(trainer, loss_scale)
    with pytest.raises(TrainerStateError, match="has no loss scale yet"):
        amp.loss_scale(trainer)
    control = train(*with_embedding("sparse weight", devices), devices, scaled=False)
    assert_same_bits([train(net, trainer, devices, scaled=False)], [control])
    net, trainer = with_embedding("sparse weight", devices)
    amp.init_trainer(trainer, "none")
    assert_same_bits([train(net, trainer, devices)], [control])


@each_device_list
@pytest.mark.parametrize("call", [mpgluon.save_checkpoint, mpgluon.load_checkpoint])
def test_checkpoints_refuse_row_sparse_weights_and_name_what_works(tmp_path, call, devices):
    net, trainer = with_embedding("sparse weight", devices)
    path = tmp_path / "c.npz"
    for _ in range(2):  # before and after a step
        with pytest.raises(TrainerStateError, match=r"row_sparse\), which a checkpoint can"):
            call(path, net, trainer)
        train(net, trainer, devices, scaled=False)
    assert not path.exists()


@each_device_list
def test_dense_weights_with_sparse_gradients_train_with_one_as_the_message_says(devices):
    net, trainer = with_embedding("sparse gradient", devices)
    amp.init_trainer(trainer, 64)
    net_of_control, control = with_embedding("dense", devices)
    amp.init_trainer(control, 64)
    ours, expected = train(net, trainer, devices), train(net_of_control, control, devices)
    np.testing.assert_array_equal(ours, expected)


class Critic(gluon.HybridBlock):
    """A network of operators that MXNet can differentiate twice."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.Dense(4, in_units=3)
            self.last = nn.Dense(1, in_units=4)

    def hybrid_forward(self, F, x):
        return self.last(F.tanh(self.first(x)))


def penalty(net, x, weight=1):
    """Return the outputs of a network, and for each image its output plus a gradient penalty."""
    x.attach_grad()
    scores = net(x)
    (gradient,) = autograd.grad(scores, [x], create_graph=True, retain_graph=True)
    return scores, weight * (gradient * gradient).sum(axis=1) + scores.reshape((-1,))


def penalized(prepare, loss_scale=None, *, hybridize=False, weight=1):
    """Take two steps with a gradient penalty, and return the weights."""
    mx.random.seed(0)
    np.random.seed(0)
    net = initialized(Critic(), mx.init.Normal(1))
    prepare(net)
    net.hybridize(hybridize)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
    if loss_scale is not None:
        amp.init_trainer(trainer, loss_scale)
    for _ in range(2):
        with autograd.record():
            _, loss = penalty(net, mx.nd.array(np.random.standard_normal((5, 3))), weight)
            with amp.scale_loss(loss, trainer) if loss_scale else nullcontext(loss) as scaled:
                scaled.backward()
        trainer.step(5)
    return [p.data().asnumpy() for p in net.collect_params().values()]


KEPT = {
    "plain": lambda _: None,
    "cast, kept": lambda net: mpgluon.cast_block(net, keep_fp32=[net]),
    "autocast, kept": lambda net: amp.autocast(net, keep_fp32=[net]),
    "cast, its layers kept": lambda net: mpgluon.cast_block(net, keep_fp32=[net.first, net.last]),
}


@pytest.mark.parametrize("loss_scale", [64, "dynamic"])
@pytest.mark.parametrize("how", KEPT)
def test_a_gradient_penalty_through_fp32_blocks_is_scaled_like_any_loss(how, loss_scale):
    if loss_scale == "dynamic":
        loss_scale = DynamicLossScale(8, growth_interval=1)
    assert_same_bits(penalized(KEPT[how], loss_scale), penalized(KEPT["plain"]))


SIXTEEN = {
    "cast": mpgluon.cast_block,
    "autocast": amp.autocast,
    "autocast bfloat16": lambda net: amp.autocast(net, "bfloat16"),
}


@pytest.mark.parametrize("loss_scale", [64, None])
@pytest.mark.parametrize("how", SIXTEEN)
def test_a_gradient_penalty_through_a_hybridized_network_is_refused_by_name(how, loss_scale):
    with pytest.raises(mx.MXNetError, match="CachedOp does not support higher order gradients"):
        penalized(SIXTEEN[how], loss_scale, hybridize=True)


@pytest.mark.filterwarnings("ignore:Accumulating with float16")
@pytest.mark.parametrize("how", SIXTEEN)
def test_a_gradient_penalty_through_16_bits_is_right_where_it_is_not_refused(how):
    """MXNet's casts are refused; the native operators that round are not."""
    if not kernels.available() or (how == "autocast bfloat16" and has_native_bfloat16()):
        with pytest.raises(mx.MXNetError, match="_backward_amp_cast is non-differentiable"):
            penalized(SIXTEEN[how], 64)
        return
    narrow = penalized(SIXTEEN[how], 64)
    # Each of two steps rounds at most eight times between a weight and its gradient.
    unit = 2**-8 if how == "autocast bfloat16" else 2**-11
    for weight, expected in zip(narrow, penalized(KEPT["plain"])):
        assert np.abs(weight - expected).max() <= 2 * 8 * unit / 2 * np.abs(expected).max()
    without = penalized(SIXTEEN[how], 64, weight=0)
    assert np.abs(without[0] - narrow[0]).max() > 0.05  # more than the rounding: it is learned from


def test_an_operator_with_a_gradient_of_its_own_added_to_a_penalty_is_refused():
    net = initialized(Critic())
    trainer = with_loss_scale(gluon.Trainer(net.collect_params(), "sgd"), 64)
    with autograd.record():
        scores, loss = penalty(net, mx.nd.ones((5, 3)))
        loss = loss + mx.nd.SoftmaxOutput(scores, mx.nd.zeros(5)).sum(axis=1)
        with pytest.raises(mpgluon.PrecisionError, match="and a gradient of a gradient"):
            amp.scale_loss(loss, trainer).__enter__()


def test_a_cast_leaves_initialized_row_sparse_weights_in_fp32():
    net, _ = with_embedding("sparse weight")
    before = net(mx.nd.array([1, 2])).asnumpy()
    report = mpgluon.cast_block(net)
    assert (report.parameters_cast, report.parameters_kept) == (2, 1)
    assert net[0].weight.dtype == "float32"
    np.testing.assert_allclose(net(mx.nd.array([1, 2])).asnumpy(), before, rtol=0.01)
