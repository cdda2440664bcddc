"""Planted overflows are found where they were planted."""

from __future__ import annotations

import logging
import math

import mpgluon
from mpgluon import DynamicLossScale, Policy, TrainerStateError, amp
from mpgluon_tools.diagnostics.observe import observing
from mpgluon_tools.diagnostics.overflow import OverflowLocator, locate_overflow

import mxnet as mx
import pytest
from diagnostics_helpers import (
    WAYS,
    Batch,
    InTwoSteps,
    Times,
    backward,
    make_batch,
    make_net,
    scaled_trainer,
    train_step,
)
from helpers import assert_same_bits, initialized, parameters_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

both = pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])
SIXTEEN = pytest.mark.parametrize("way", ["float16", "auto float16"])


class Product(nn.HybridBlock):
    """A product that is too large, between sums that are not."""

    def hybrid_forward(self, F, x):
        large = x + x
        return large * large - large


class Masked(nn.HybridBlock):
    """Softmax of unmasked scores: masked ones are minus infinity in float16, and meant to be."""

    def hybrid_forward(self, F, x):
        masked = F.where(x > -10, x, F.ones_like(x) * -1e9)
        return F.softmax(F.concat(masked, F.ones_like(x) * -1e9, dim=1))


def masked_layers():
    return nn.Dense(6, in_units=144), Masked(prefix="masked_"), nn.Dense(144, in_units=12)


# 2**12 times some 1 fits, and 2**12 times that does not; later results are infinite too.
TWICE_LARGE = lambda: (Times(2.0**12, "first_"), Times(2.0**12, "second_"))  # noqa: E731
FORWARD = {
    "a layer": (lambda: (*TWICE_LARGE(), Times(2.0**-24, "third_")), "second", 2.0**12),
    "after a mask": (lambda: (*masked_layers(), *TWICE_LARGE()), "second", 0),
    "hidden in a block": (
        lambda: (Times(2.0**9, "large_"), InTwoSteps(prefix="square_")), "square", 256
    ),
    "by Python's operator": (
        lambda: (Times(2.0**9, "large_"), Product(prefix="product_")), "product", 256
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORWARD)
@SIXTEEN
@both
def test_a_layer_that_overflows_in_forward_is_named_with_its_operator(case, way, hybridize):
    make, block, least = FORWARD[case]
    net = make_net(*make(), way=way, hybridize=hybridize)
    report = locate_overflow(net, make_batch())
    assert (report.direction, report.block) == ("forward", block)
    assert report.kind == type(next(one for one in net if one.name == block)).__name__
    assert (report.what, report.dtype) == ("what broadcast_mul returned", "float16")
    assert least <= report.largest_before <= 65504


@pytest.mark.usefixtures("native_operators")
def test_a_nan_of_a_format_without_infinities_is_located_with_its_format():
    net = make_net(Times(2.0**4, "first_"), InTwoSteps(prefix="square_"))
    amp.autocast(net, Policy.parse("compute=float8_e4m3"))
    report = locate_overflow(net, make_batch())
    assert (report.block, report.what) == ("square", "what broadcast_mul returned")
    assert (report.dtype, report.shape) == ("float8_e4m3", (4, 4, 6, 6))
    assert 21 < report.largest_before <= 448  # whose square is beyond 464


@SIXTEEN
@both
def test_a_layer_that_overflows_only_in_backward_is_named(way, hybridize):
    # Forward all is of size 1; backward the gradient grows by 2**12 between the two.
    layers = (Times(2.0**-12, "down_"), nn.Activation("tanh"), Times(2.0**12, "up_"))
    net, batch = make_net(*layers, way=way, hybridize=hybridize), make_batch()
    assert locate_overflow(net, batch, loss_scale=2.0**2) is None
    report = locate_overflow(net, batch, loss_scale=2.0**9)
    assert (report.direction, report.kind) == ("backward", "Activation")
    assert report.what == "the gradient of what the block returned"  # the first that "up" computes
    assert report.dtype == "float16"
    assert 0 < report.largest_before < 65504
    assert report.loss_scale == 2.0**9


class Float16Mean(nn.HybridBlock):
    """A mean whose sum is in float16, which the policy does not reach."""

    def hybrid_forward(self, F, x):
        return mx.nd.sum(mx.nd.NDArray.astype(x, "float16")).astype("float32") / x.size


def test_a_loss_that_is_reduced_in_float16_is_named():
    net = make_net(way="float32")
    net.add(Float16Mean(prefix="mean_"))
    batch = Batch(make_batch().inputs, None, lambda mean, _: mean)
    net[2].weight.set_data(mx.nd.zeros((5, 144)))
    net[2].bias.set_data(mx.nd.full((5,), 2.0**12))  # 20 of these are more than 65504
    report = locate_overflow(net, batch)
    assert (report.direction, report.block) == ("forward", "mean")


def test_a_parameters_gradient_that_overflows_alone_is_named():
    # 256 images of 16 with a gradient of 16 each: the sum for the weight is 65536.
    layer = initialized(nn.Dense(1, in_units=1, use_bias=False, prefix="layer_"), mx.init.One())
    mpgluon.cast_block(layer)
    batch = Batch(mx.nd.full((256, 1), 16), None, lambda y, _: y)
    report = locate_overflow(layer, batch, loss_scale=16.0)
    assert (report.direction, report.block) == ("backward", "layer")
    assert (report.what, report.largest_before) == ("the gradient of layer_weight", 16)
    assert locate_overflow(layer, batch, loss_scale=8.0) is None


def overflowing_net(way="float32", hybridize=False):
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Dense(4, in_units=108), *TWICE_LARGE())
    net.initialize(mx.init.Normal(0.1))
    WAYS[way](net)
    net.hybridize(hybridize)
    return net


def squared(outputs, _):
    return (outputs * 2.0**-10) ** 2


@SIXTEEN
@both
def test_the_locator_reports_the_first_skipped_step_and_changes_nothing(way, hybridize, caplog):
    loud = Batch(make_batch().inputs, None, squared)
    quiet = Batch(loud.inputs * 2.0**-18, None, squared)

    def train(locate):
        net = overflowing_net(way, hybridize)
        trainer = scaled_trainer(net, 2.0)
        locator = OverflowLocator(net, trainer) if locate else None
        for batch in (quiet, loud, quiet):
            train_step(net, trainer, batch)
        return net, trainer, locator

    with caplog.at_level(logging.WARNING, "mpgluon"):
        net, trainer, locator = train(locate=True)
    assert amp.skipped_steps(trainer) == 1
    report = locator.report
    assert (report.direction, report.block, report.loss_scale) == ("forward", "second", 2)
    assert caplog.messages == [str(report)]
    words = "the first array that is not finite is what broadcast_mul returned in second (Times)"
    assert words in str(report)
    assert_same_bits(parameters_of(net), parameters_of(train(locate=False)[0]))


@pytest.fixture
def located():
    """Return a network, its Trainer and its locator, after a step whose gradients overflowed."""
    net = make_net(way="float16")
    trainer = scaled_trainer(net, DynamicLossScale(2.0**24))
    locator = OverflowLocator(net, trainer)
    train_step(net, trainer, make_batch())
    return net, trainer, locator


def test_the_locator_names_a_gradient_where_forward_is_finite(located):
    _, _, locator = located
    assert locator.report.direction == "backward"
    assert locator.report.what.startswith("the gradient of net_dense0_")  # the last layer
    assert locator.report.loss_scale == 2.0**24
    on_demand = locator.locate(make_batch())
    assert on_demand.direction == "backward"
    assert on_demand.loss_scale == 2.0**23  # as it is now


def test_the_locator_waits_for_one_report_at_a_time_until_it_is_detached(located):
    net, trainer, locator = located
    first = locator.report
    train_step(net, trainer, make_batch())
    assert locator.report is first
    locator.report = None
    train_step(net, trainer, make_batch())
    assert locator.report.loss_scale == 2.0**22
    locator.report = None
    locator.detach()
    train_step(net, trainer, make_batch())
    assert locator.report is None
    assert amp.skipped_steps(trainer) == 4


def test_the_locator_looks_again_where_the_loss_scale_can_sink_no_further(caplog):
    net = make_net(way="float16")
    trainer = scaled_trainer(net, DynamicLossScale(2.0**3))
    locator = OverflowLocator(net, trainer)
    batch = make_batch()
    loud = Batch(batch.inputs, batch.labels, lambda y, _: y.astype("float32") * 1e38)
    with caplog.at_level(logging.WARNING, "mpgluon.diagnostics"):
        for _ in range(6):
            train_step(net, trainer, loud)
    assert amp.skipped_steps(trainer) == 6
    assert locator.report.loss_scale == 1
    reports = [text for text in caplog.messages if text.startswith("backward")]
    assert len(reports) == 2  # at 8 and at 1
    assert reports[1] == str(locator.report)


def test_the_locator_needs_a_trainer_that_skips_steps():
    net = make_net()
    with pytest.raises(TrainerStateError, match="has no loss scale yet"):
        OverflowLocator(net, gluon.Trainer(net.collect_params(), "sgd"))


def test_nothing_is_computed_while_steps_are_finite(monkeypatch):
    net = make_net(way="float16", hybridize=True)
    trainer = scaled_trainer(net, 2.0)
    train_step(net, trainer, make_batch())

    def calls(step):
        made = []
        for name in ("asnumpy", "copy", "copyto"):
            original = getattr(mx.nd.NDArray, name)
            monkeypatch.setattr(
                mx.nd.NDArray, name, lambda *a, n=name, o=original: made.append(n) or o(*a)
            )
        step()
        monkeypatch.undo()
        return made

    batch = make_batch()
    before = calls(lambda: train_step(net, trainer, batch))
    OverflowLocator(net, trainer)
    assert calls(lambda: train_step(net, trainer, batch)) == before


@SIXTEEN
def test_an_infinity_that_a_softmax_takes_away_is_not_an_overflow(way):
    net = make_net(*masked_layers(), way=way)
    assert locate_overflow(net, make_batch(), loss_scale=8.0) is None
    assert locate_overflow(net, make_batch(), loss_scale=2.0**24).direction == "backward"


@SIXTEEN
@both
def test_an_overflow_that_a_saturated_function_hides_from_the_loss_is_named(way, hybridize):
    # tanh(inf) is 1 and its gradient 0, which the weight's gradient multiplies by infinity.
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Dense(1, in_units=108, weight_initializer="ones"), Times(2.0**14, "large_"))
    net.add(nn.Dense(3, in_units=1, weight_initializer="ones"), nn.Activation("tanh"))
    net.add(nn.Dense(2, in_units=3))
    net.initialize()
    WAYS[way](net)
    net.hybridize(hybridize)
    labels = mx.nd.array([0, 1, 0, 1], dtype="int32")
    batch = Batch(mx.nd.abs(make_batch().inputs), labels, gluon.loss.SoftmaxCrossEntropyLoss())
    report = locate_overflow(net, batch)
    assert (report.direction, report.block) == ("forward", "large")
    trainer = scaled_trainer(net, 2.0)
    locator = OverflowLocator(net, trainer)
    train_step(net, trainer, batch)
    assert (locator.report.direction, locator.report.block) == ("forward", "large")


def test_every_forward_pass_of_an_accumulated_step_is_looked_at():
    net = overflowing_net("float16")
    net.collect_params().setattr("grad_req", "add")
    trainer = scaled_trainer(net, 2.0)
    locator = OverflowLocator(net, trainer)
    loud = make_batch().inputs
    for images in (loud, loud * 2.0**-18):
        backward(net, trainer, Batch(images, None, squared))
    trainer.step(4)
    assert (locator.report.direction, locator.report.block) == ("forward", "second")


def test_a_parameter_of_no_block_is_named_with_the_network():
    class Loose(nn.HybridBlock):
        def __init__(self):
            super().__init__(prefix="loose_")
            self.scales = [self.params.get("scale", shape=(1,), init="ones")]

        def hybrid_forward(self, F, x):
            return F.broadcast_mul(x, self.scales[0].data())

    net = initialized(Loose())
    trainer = scaled_trainer(net, 2.0)
    locator = OverflowLocator(net, trainer)
    with autograd.record(), amp.scale_loss(net(mx.nd.ones(1)), trainer) as scaled:
        pass
    scaled.backward()
    net.scales[0].grad()[:] = math.inf
    trainer.step(1)
    assert (locator.report.block, locator.report.what) == ("loose", "the gradient of loose_scale")


def test_another_observer_does_not_see_the_run_of_a_locator():
    net = make_net(Times(2.0**10, "times_"), way="float16")
    trainer = scaled_trainer(net, DynamicLossScale(2.0**20))
    locator, seen = OverflowLocator(net, trainer), []
    with observing(net, lambda one: seen.append(one.block)):
        backward(net, trainer, make_batch())
        in_the_step = list(seen)
        trainer.step(1)
    assert locator.report is not None
    assert seen == in_the_step != []


def test_a_diagnosis_between_two_steps_is_not_taken_for_a_step():
    net = make_net(way="float16")
    locator = OverflowLocator(net, scaled_trainer(net, 2.0**4))
    locate_overflow(net, make_batch())
    assert locator._inputs == []


def test_a_locator_may_be_detached_twice():
    net = make_net(way="float16")
    locator = OverflowLocator(net, scaled_trainer(net, 2.0**4))
    locator.detach()
    locator.detach()
