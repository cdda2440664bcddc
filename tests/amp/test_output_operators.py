"""Operators that are output and loss in one: the loss scale reaches them, or they are refused."""

from __future__ import annotations

import gc

import mpgluon
from mpgluon import DynamicLossScale, PrecisionError, TrainerStateError, amp

import gluoncv.loss
import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, assert_same_bits, in_sequence, initialized, with_loss_scale
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
    "added to another loss": lambda F, x: (
        F.SoftmaxOutput(x, LABELS).sum(axis=1) + (x**2).sum(axis=1)
    ),
    "twice": lambda F, x: F.SoftmaxOutput(x, LABELS) * F.LinearRegressionOutput(x, TARGETS),
}
REFUSED = {
    "SVMOutput": (lambda F, x: F.SVMOutput(x, LABELS), "use gluon.loss.HingeLoss"),
    "MakeLoss": (lambda F, x: F.MakeLoss((x - TARGETS) ** 2), "leave it out: what it is given"),
    "make_loss": (lambda F, x: F.make_loss((x - TARGETS) ** 2), "leave it out: what it is given"),
}


def convert(net, kind):
    if kind == "cast":
        mpgluon.cast_block(net)
    elif kind == "autocast":
        amp.autocast(net, "float16")
    return net


def make_net(kind="float32", hybridize=False):
    mx.random.seed(0)
    np.random.seed(0)
    net = in_sequence(nn.Dense(4, in_units=5, activation="relu"), nn.Dense(CLASSES, in_units=4))
    net.initialize(mx.init.Normal(0.5))
    convert(net, kind).hybridize(hybridize)
    return net


def trainer_of(net, loss_scale=64, **options):
    options = {"learning_rate": 0.1, "multi_precision": True, **options}
    return with_loss_scale(gluon.Trainer(net.collect_params(), "sgd", options), loss_scale)


def backward(loss, trainer):
    with amp.scale_loss(loss, trainer) as scaled:
        autograd.backward(scaled)


def assert_refused(loss, trainer, message):
    """Scaling the loss must raise."""
    with pytest.raises(PrecisionError, match=message), amp.scale_loss(loss, trainer):
        pytest.fail("the loss was scaled")


def images(step):
    return mx.nd.array(np.random.default_rng(step).standard_normal((4, 5)))


def train(loss_of, loss_scale, kind="float32", *, hybridize=False, steps=3):
    net = make_net(kind, hybridize)
    trainer = trainer_of(net, loss_scale, momentum=0.9)
    for step in range(steps):
        with autograd.record():
            backward(loss_of(mx.nd, net(images(step))), trainer)
        trainer.step(4)
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


@pytest.mark.sampled(4)
@BOTH
@pytest.mark.parametrize("loss_scale", [2.0**-3, 1024, "dynamic"])
@pytest.mark.parametrize("name", REACHED)
def test_scaling_fp32_training_by_a_power_of_two_changes_no_bit(name, loss_scale, hybridize):
    if loss_scale == "dynamic":
        loss_scale = DynamicLossScale(64, growth_interval=1)
    control = train(REACHED[name], "none", hybridize=hybridize)
    assert not np.array_equal(control[0], make_net()[0].weight.data().asnumpy())
    assert_same_bits(train(REACHED[name], loss_scale, hybridize=hybridize), control)


@pytest.mark.sampled(4)
@BOTH
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


def test_a_refused_loss_leaves_no_trace_and_a_later_loss_is_searched_too():
    net = make_net()
    trainer = trainer_of(net)
    for _ in range(2):
        for _ in range(2):
            with autograd.record():
                loss = mx.nd.SVMOutput(net(images(0)), LABELS)
                assert_refused(loss, trainer, "contains SVMOutput")
        with autograd.record():
            backward(net(images(0)).sum(axis=1), trainer)
        trainer.step(4)


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


@pytest.mark.parametrize("kind", ["float32", "cast", "autocast"])
@pytest.mark.parametrize("place", ["loss", "network"])
def test_a_hybridized_block_with_such_an_operator_is_refused_by_name_until_it_is_imperative(
    kind, place
):
    if place == "loss":
        net, block = make_net(kind, hybridize=True), Output(softmax_output)
        trainer = trainer_of(net)
    else:
        net = block = WithHead()
        net.initialize()
        trainer = trainer_of(convert(net, kind))
    block.hybridize()

    def loss_of():
        return block(net(images(0)) if place == "loss" else images(0), LABELS)

    name = rf"{block.name} \({type(block).__name__}\)"
    message = rf"{name} is hybridized and contains SoftmaxOutput.*hybridize\(Fal"
    for _ in range(2):
        with autograd.record():
            assert_refused(loss_of(), trainer, message)
    block.hybridize(False)
    with autograd.record():
        backward(loss_of(), trainer)
    trainer.step(4)


@pytest.mark.parametrize("static_alloc", [False, True])
def test_a_hybridized_loss_of_two_operators_is_part_of_the_recorded_graph_or_refused(static_alloc):
    # MXNet records the operators of a graph of two nodes, unless its memory is fixed.
    loss_fn = Output(lambda F, x, labels: F.SoftmaxOutput(x, labels) * 2)
    loss_fn.hybridize(static_alloc=static_alloc)
    control = train(lambda F, x: F.SoftmaxOutput(x, LABELS) * 2, "none")
    if static_alloc:
        with pytest.raises(PrecisionError, match="is hybridized and contains SoftmaxOutput"):
            train(lambda _, x: loss_fn(x, LABELS), 1024)
    else:
        assert_same_bits(train(lambda _, x: loss_fn(x, LABELS), 1024), control)


def test_hybridized_blocks_that_are_not_part_of_the_loss_are_ignored():
    gc.collect()  # blocks of earlier tests: those without parameters look alike
    elsewhere = initialized(WithHead())
    three_inputs = Output(lambda F, x, labels: F.SoftmaxOutput(x, labels[0]) * labels[1])
    for block in (elsewhere, three_inputs):
        block.hybridize()
    elsewhere(images(0), LABELS)
    three_inputs(images(0)[:, :CLASSES], [LABELS, TARGETS])
    net = make_net(hybridize=True)
    loss_fn = Output(lambda F, x, labels: -F.pick(F.log_softmax(x), labels))
    loss_fn.hybridize()
    trainer = trainer_of(net)
    with autograd.record():
        backward(loss_fn(net(images(0)), LABELS), trainer)
    trainer.step(4)


def test_a_graph_is_searched_once_unless_it_has_such_an_operator(monkeypatch):
    looks = []
    original = mx.sym.Symbol.tojson
    monkeypatch.setattr(
        mx.sym.Symbol, "tojson", lambda self, **kw: looks.append(1) or original(self, **kw)
    )
    train(lambda _, x: (x**2).sum(axis=1), 64, steps=5)
    assert len(looks) == 1


def test_two_graphs_that_look_alike_are_distinguished_after_some_steps():
    net = make_net()
    trainer = trainer_of(net)
    refused = 0
    for step in range(200):
        with autograd.record():
            outputs = net(images(0))  # one operator more, and one input, in both
            loss = outputs - TARGETS if step == 0 else mx.nd.SVMOutput(outputs, LABELS)
            try:
                backward(loss, trainer)
            except PrecisionError:
                refused += 1
    assert refused == 100


def test_a_graph_that_is_kept_for_a_second_backward_pass_is_scaled_once():
    gradients = []
    for scales in ((8,), (8, 8), (8, 64)):
        net = make_net()
        with autograd.record():
            loss = mx.nd.SoftmaxOutput(net(images(0)), LABELS, grad_scale=0.5)
            for scale in scales:
                with amp.scale_loss(loss, trainer_of(net, scale)) as scaled:
                    scaled.backward(retain_graph=True)
        gradients.append(net[0].weight.grad().asnumpy() / scales[-1])
    assert_same_bits(gradients[1:], [gradients[0]] * 2)


def test_every_device_and_every_trainer_has_its_share():
    def run(scale):
        devices = [mx.cpu(0), mx.cpu(1)]
        net = make_net()
        net.collect_params().reset_ctx(devices)
        trainers = [trainer_of(layer, scale) for layer in net]
        with autograd.record():
            losses = [
                mx.nd.SoftmaxOutput(net(part), LABELS[:2].as_in_context(part.context))
                for part in gluon.utils.split_and_load(images(0), devices)
            ]
            backward(losses, trainers)
        for trainer in trainers:
            trainer.step(4)
        return [one.asnumpy() for p in net.collect_params().values() for one in p.list_data()]

    assert_same_bits(run(1024), run("none"))


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


@BOTH
@pytest.mark.parametrize("kind", ["float32", "cast", "autocast"])
@pytest.mark.parametrize("size_average", [True, False])
def test_segmentation_with_gluoncvs_own_loss_trains_as_in_fp32(size_average, kind, hybridize):
    def run(kind, loss_scale, *, hybridize):
        mx.random.seed(0)
        np.random.seed(0)
        net = initialized(Segmentation(), mx.init.Xavier())
        convert(net, kind).hybridize(hybridize)
        trainer = trainer_of(net, loss_scale, learning_rate=2.0**-5)
        loss_fn = gluoncv.loss.MixSoftmaxCrossEntropyLoss(
            aux=True, aux_weight=0.5, ignore_label=-1, size_average=size_average
        )
        data = np.random.default_rng(0)
        for _ in range(3):
            x = mx.nd.array(data.standard_normal((2, 2, 8, 8)))
            labels = mx.nd.array(data.integers(-1, CLASSES, (2, 8, 8)), dtype="int32")
            with autograd.record():
                backward(loss_fn(*net(x), labels), trainer)
            trainer.step(2)
        assert amp.skipped_steps(trainer) == 0
        return [p.data().asnumpy() for p in net.collect_params().values() if p.grad_req != "null"]

    fp32 = run("float32", "none", hybridize=False)
    # Hybridized, MXNet adds the same FP32 numbers in another order. In float16 each of some dozen
    # roundings on the way is one of 2**-11; BatchNorm divides by a spread.
    unit = 2.0**-20 if kind == "float32" else 64 * 2.0**-11
    for one, other in zip(run(kind, 256, hybridize=hybridize), fp32):
        assert np.abs(one - other).max() <= unit * np.abs(other).max()


def test_a_loss_scaled_twice_is_refused_by_its_graph():
    net = make_net()
    trainers = [trainer_of(layer, 8) for layer in net]
    with autograd.record():
        with amp.scale_loss(net(images(0)).sum(axis=1), trainers[0]) as scaled:
            pass
        total = scaled.mean() + 1
        with pytest.raises(TrainerStateError, match="has multiplied already"):
            amp.scale_loss(total, trainers[1]).__enter__()
