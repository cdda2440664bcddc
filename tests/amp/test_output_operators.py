"""Operators that are output and loss in one: the loss scale reaches them, or they are refused."""

from __future__ import annotations

import gc

import mpgluon
from mpgluon import DynamicLossScale, PrecisionError, TrainerStateError, amp

import gluoncv.loss
import mxnet as mx
import numpy as np
import pytest
from helpers import assert_same_bits
from mxnet import autograd, gluon
from mxnet.gluon import nn

CLASSES = 3
LABELS = mx.nd.array([0, 2, 1, 2])
TARGETS = mx.nd.array(np.linspace(-1, 1, 12).reshape(4, CLASSES))

REACHED = {
    "softmax": lambda F, x: F.SoftmaxOutput(x, LABELS),
    "softmax, by its other name": lambda F, x: F.Softmax(x, LABELS),
    "softmax, half": lambda F, x: F.SoftmaxOutput(x, LABELS, grad_scale=0.5),
    "softmax, out_grad": lambda F, x: F.SoftmaxOutput(x, LABELS, out_grad=True),
    "softmax, smooth": lambda F, x: F.SoftmaxOutput(
        x, LABELS, smooth_alpha=0.125, normalization="batch"
    ),
    "softmax, ignoring": lambda F, x: F.SoftmaxOutput(
        x, LABELS, use_ignore=True, ignore_label=2, normalization="valid", grad_scale=0.3
    ),
    "softmax, several outputs": lambda F, x: F.SoftmaxOutput(
        x.reshape((2, 2, CLASSES)).swapaxes(1, 2), LABELS.reshape((2, 2)), multi_output=True
    ),
    "softmax, shape preserved": lambda F, x: F.SoftmaxOutput(
        x.reshape((2, 2, CLASSES)), LABELS.reshape((2, 2)), preserve_shape=True
    ),
    "linear": lambda F, x: F.LinearRegressionOutput(x, TARGETS),
    "linear, three times": lambda F, x: F.LinearRegressionOutput(x, TARGETS, grad_scale=3),
    "logistic": lambda F, x: F.LogisticRegressionOutput(x, TARGETS),
    "absolute": lambda F, x: F.MAERegressionOutput(x, TARGETS),
    "beside another loss": lambda F, x: F.SoftmaxOutput(x, LABELS).sum(axis=1) + (x**2).sum(axis=1),
    "twice": lambda F, x: F.SoftmaxOutput(x, LABELS) * F.LinearRegressionOutput(x, TARGETS),
}
REFUSED = {
    "SVMOutput": (lambda F, x: F.SVMOutput(x, LABELS), "use gluon.loss.HingeLoss"),
    "MakeLoss": (lambda F, x: F.MakeLoss((x - TARGETS) ** 2), "leave it out: what it is given"),
    "make_loss": (lambda F, x: F.make_loss((x - TARGETS) ** 2), "leave it out: what it is given"),
}


def make_net(kind="float32", hybridize=False):
    mx.random.seed(0)
    np.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=5, activation="relu"), nn.Dense(CLASSES, in_units=4))
    net.initialize(mx.init.Normal(0.5))
    if kind == "cast":
        mpgluon.cast_block(net)
    elif kind == "autocast":
        amp.autocast(net, "float16")
    net.hybridize(hybridize)
    return net


def images(step):
    return mx.nd.array(np.random.default_rng(step).standard_normal((4, 5)))


def train(loss_of, loss_scale, kind="float32", *, hybridize=False, steps=3):
    net = make_net(kind, hybridize)
    options = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, loss_scale)
    for step in range(steps):
        with autograd.record():
            loss = loss_of(mx.nd, net(images(step)))
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(4)
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


@pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])
@pytest.mark.parametrize("loss_scale", [2.0**-3, 1024, DynamicLossScale(64, growth_interval=1)])
@pytest.mark.parametrize("name", REACHED)
def test_scaling_fp32_training_by_a_power_of_two_changes_no_bit(name, loss_scale, hybridize):
    if isinstance(loss_scale, DynamicLossScale):
        loss_scale = DynamicLossScale(64, growth_interval=1)
    control = train(REACHED[name], "none", hybridize=hybridize)
    assert not np.array_equal(control[0], make_net()[0].weight.data().asnumpy())
    assert_same_bits(train(REACHED[name], loss_scale, hybridize=hybridize), control)


@pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])
@pytest.mark.parametrize("kind", ["cast", "autocast"])
@pytest.mark.parametrize("name", REACHED)
def test_float16_training_follows_fp32_training(name, kind, hybridize):
    fp32 = train(REACHED[name], "none")
    float16 = train(REACHED[name], 1024, kind, hybridize=hybridize)
    start = [p.data().asnumpy() for p in make_net().collect_params().values()]
    for one, other, before in zip(fp32, float16, start):
        moved = np.abs(one - before).max()
        # Some dozen roundings of 2**-11 on the way to each of three updates, and the weight's.
        rounding = 64 * 2.0**-11 * moved + 2.0**-11 * np.abs(one).max()
        assert np.abs(one - other).max() <= rounding


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_that_the_scale_does_not_reach_is_refused_by_name_with_advice(name):
    loss_of, advice = REFUSED[name]
    with pytest.raises(PrecisionError, match=rf"the loss contains {name}, .*{advice}"):
        train(loss_of, 1024)
    train(loss_of, "none")  # as the message says


def test_a_refused_loss_leaves_no_trace():
    net = make_net()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer, 64)
    for _ in range(2):
        with autograd.record():
            loss = mx.nd.SVMOutput(net(images(0)), LABELS)
            with pytest.raises(PrecisionError), amp.scale_loss(loss, trainer):
                pytest.fail("the loss was scaled")
    with autograd.record(), amp.scale_loss(net(images(0)).sum(axis=1), trainer) as scaled:
        scaled.backward()
    trainer.step(4)


# --- in hybridized blocks --------------------------------------------------------------------


class Output(gluon.HybridBlock):
    """A loss without parameters."""

    def __init__(self, loss_of):
        super().__init__()
        self._loss_of = loss_of

    def hybrid_forward(self, F, x, labels):
        return self._loss_of(F, x, labels)


class WithHead(gluon.HybridBlock):
    """A network that returns its loss."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(CLASSES, in_units=5)

    def hybrid_forward(self, F, x, labels):
        return F.SoftmaxOutput(self.dense(x), labels).sum(axis=1)


def softmax_output(F, x, labels):
    return -F.log(F.pick(F.SoftmaxOutput(x, labels), labels))


def cross_entropy(F, x, labels):
    return -F.pick(F.log_softmax(x), labels)


@pytest.mark.parametrize("kind", ["float32", "cast", "autocast"])
def test_a_hybridized_loss_is_refused_with_its_name_and_works_once_it_is_not(kind):
    net, loss_fn = make_net(kind, hybridize=True), Output(softmax_output)
    loss_fn.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
    amp.init_trainer(trainer, 64)
    message = rf"{loss_fn.name} \(Output\) is hybridized and contains SoftmaxOutput.*hybridize\(Fal"
    for _ in range(2):
        with autograd.record():
            loss = loss_fn(net(images(0)), LABELS)
            with pytest.raises(PrecisionError, match=message), amp.scale_loss(loss, trainer):
                pytest.fail("the loss was scaled")
    loss_fn.hybridize(False)
    with autograd.record(), amp.scale_loss(loss_fn(net(images(0)), LABELS), trainer) as scaled:
        scaled.backward()
    trainer.step(4)


@pytest.mark.parametrize("cast", [False, True])
def test_a_hybridized_network_that_ends_in_such_an_operator_is_refused(cast):
    net = WithHead()
    net.initialize()
    if cast:
        mpgluon.cast_block(net)
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
    amp.init_trainer(trainer, 64)
    with autograd.record():
        loss = net(images(0), LABELS)
        refused = pytest.raises(PrecisionError, match=rf"{net.name} \(WithHead\) is hybridized")
        with refused, amp.scale_loss(loss, trainer):
            pytest.fail("the loss was scaled")
    net.hybridize(False)
    with autograd.record(), amp.scale_loss(net(images(0), LABELS), trainer) as scaled:
        scaled.backward()
    trainer.step(4)


@pytest.mark.parametrize("static_alloc", [False, True])
def test_a_hybridized_loss_of_two_operators_is_part_of_the_recorded_graph_or_refused(static_alloc):
    # MXNet records what is in a graph of two nodes, unless its memory is fixed.
    loss_fn = Output(lambda F, x, labels: F.SoftmaxOutput(x, labels) * 2)
    loss_fn.hybridize(static_alloc=static_alloc)
    control = train(lambda F, x: F.SoftmaxOutput(x, LABELS) * 2, "none")
    if static_alloc:
        with pytest.raises(PrecisionError, match="is hybridized and contains SoftmaxOutput"):
            train(lambda _, x: loss_fn(x, LABELS), 1024)
    else:
        assert_same_bits(train(lambda _, x: loss_fn(x, LABELS), 1024), control)


def test_hybridized_blocks_that_have_nothing_to_do_with_the_loss_are_left_alone():
    gc.collect()  # what the tests before it have left: blocks without parameters look alike
    elsewhere = WithHead()
    elsewhere.initialize()
    three_inputs = Output(lambda F, x, labels: F.SoftmaxOutput(x, labels[0]) * labels[1])
    for block in (elsewhere, three_inputs):
        block.hybridize()
    elsewhere(images(0), LABELS)
    three_inputs(images(0)[:, :CLASSES], [LABELS, TARGETS])
    net, loss_fn = make_net(hybridize=True), Output(cross_entropy)
    loss_fn.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    amp.init_trainer(trainer, 64)
    with autograd.record(), amp.scale_loss(loss_fn(net(images(0)), LABELS), trainer) as scaled:
        scaled.backward()
    trainer.step(4)


def test_a_graph_is_searched_once_unless_it_has_such_an_operator(monkeypatch):
    looks = []
    original = mx.sym.Symbol.tojson
    monkeypatch.setattr(
        mx.sym.Symbol, "tojson", lambda self, **kw: looks.append(1) or original(self, **kw)
    )
    train(lambda _, x: (x**2).sum(axis=1), 64, steps=5)
    assert len(looks) == 1


def test_two_graphs_that_look_alike_are_told_apart_after_a_while():
    net = make_net()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    amp.init_trainer(trainer, 64)
    refused = 0
    for step in range(200):
        with autograd.record():
            outputs = net(images(0))  # one operator more, and one input, in both
            loss = outputs - TARGETS if step == 0 else mx.nd.SVMOutput(outputs, LABELS)
            try:
                with amp.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
            except PrecisionError:
                refused += 1
    assert refused == 100


def test_a_later_loss_is_searched_too():
    net = make_net()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    amp.init_trainer(trainer, 64)
    with autograd.record(), amp.scale_loss((net(images(0)) ** 2).sum(axis=1), trainer) as scaled:
        scaled.backward()
    trainer.step(4)
    with autograd.record():
        loss = mx.nd.SVMOutput(net(images(1)), LABELS)
        with pytest.raises(PrecisionError, match="contains SVMOutput"):
            amp.scale_loss(loss, trainer).__enter__()


def test_a_graph_that_is_kept_for_a_second_backward_pass_is_scaled_once():
    gradients = []
    for scales in ((8,), (8, 8), (8, 64)):
        net = make_net()
        with autograd.record():
            loss = mx.nd.SoftmaxOutput(net(images(0)), LABELS, grad_scale=0.5)
            for scale in scales:
                trainer = gluon.Trainer(net.collect_params(), "sgd")
                amp.init_trainer(trainer, scale)
                with amp.scale_loss(loss, trainer) as scaled:
                    scaled.backward(retain_graph=True)
        gradients.append(net[0].weight.grad().asnumpy() / scales[-1])
    assert_same_bits(gradients[1:], [gradients[0]] * 2)


def test_every_device_and_every_trainer_has_its_share():
    def run(scale):
        devices = [mx.cpu(0), mx.cpu(1)]
        net = make_net()
        net.collect_params().reset_ctx(devices)
        trainers = [gluon.Trainer(layer.collect_params(), "sgd") for layer in net]
        for trainer in trainers:
            amp.init_trainer(trainer, scale)
        with autograd.record():
            losses = [
                mx.nd.SoftmaxOutput(net(part), LABELS[:2].as_in_context(part.context))
                for part in gluon.utils.split_and_load(images(0), devices)
            ]
            with amp.scale_loss(losses, trainers) as scaled:
                autograd.backward(scaled)
        for trainer in trainers:
            trainer.step(4)
        return [one.asnumpy() for p in net.collect_params().values() for one in p.list_data()]

    assert_same_bits(run(1024), run("none"))


# --- gluoncv's segmentation losses -----------------------------------------------------------


class Segmentation(gluon.HybridBlock):
    """Two outputs with a class for each pixel, as FCN, PSPNet and DeepLab have in training."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.stem = nn.Conv2D(8, 3, padding=1, in_channels=2, activation="relu")
            self.norm = nn.BatchNorm(in_channels=8)
            self.head = nn.Conv2D(CLASSES, 1, in_channels=8)
            self.auxiliary = nn.Conv2D(CLASSES, 1, in_channels=8)

    def hybrid_forward(self, F, x):
        features = self.stem(x)
        return self.head(self.norm(features)), self.auxiliary(features)


@pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])
@pytest.mark.parametrize("kind", ["float32", "cast", "autocast"])
@pytest.mark.parametrize("size_average", [True, False])
def test_segmentation_with_gluoncvs_own_loss_trains_as_in_fp32(size_average, kind, hybridize):
    def run(kind, loss_scale, *, hybridize):
        mx.random.seed(0)
        np.random.seed(0)
        net = Segmentation()
        net.initialize(mx.init.Xavier())
        if kind == "cast":
            mpgluon.cast_block(net)
        elif kind == "autocast":
            amp.autocast(net, "float16")
        net.hybridize(hybridize)
        options = {"learning_rate": 2.0**-5, "multi_precision": True}
        trainer = gluon.Trainer(net.collect_params(), "sgd", options)
        amp.init_trainer(trainer, loss_scale)
        loss_fn = gluoncv.loss.MixSoftmaxCrossEntropyLoss(
            aux=True, aux_weight=0.5, ignore_label=-1, size_average=size_average
        )
        data = np.random.default_rng(0)
        for _ in range(3):
            x = mx.nd.array(data.standard_normal((2, 2, 8, 8)))
            labels = mx.nd.array(data.integers(-1, CLASSES, (2, 8, 8)), dtype="int32")
            with autograd.record():
                losses = loss_fn(*net(x), labels)
                with amp.scale_loss(losses, trainer) as scaled:
                    autograd.backward(scaled)
            trainer.step(2)
        assert amp.skipped_steps(trainer) == 0
        return [p.data().asnumpy() for p in net.collect_params().values() if p.grad_req != "null"]

    fp32 = run("float32", "none", hybridize=False)
    ours = run(kind, 256, hybridize=hybridize)
    if kind == "float32":
        for one, other in zip(ours, fp32):
            # Hybridized, MXNet adds the same numbers in another order.
            np.testing.assert_allclose(one, other, rtol=0, atol=2.0**-20 * np.abs(other).max())
        return
    for one, other in zip(ours, fp32):
        # Each of some dozen roundings on the way is one of 2**-11; BatchNorm divides by a spread.
        assert np.abs(one - other).max() <= 64 * 2.0**-11 * np.abs(other).max()


def test_a_loss_scaled_twice_is_found_in_its_graph():
    net = make_net()
    trainers = [gluon.Trainer(layer.collect_params(), "sgd") for layer in net]
    for trainer in trainers:
        amp.init_trainer(trainer, 8)
    with autograd.record():
        with amp.scale_loss(net(images(0)).sum(axis=1), trainers[0]) as scaled:
            pass
        total = scaled.mean() + 1
        with pytest.raises(TrainerStateError, match="has multiplied already"):
            amp.scale_loss(total, trainers[1]).__enter__()
