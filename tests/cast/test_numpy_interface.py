"""Networks of MXNet's NumPy interface: the same bits as with mx.nd; mixtures are refused."""

from __future__ import annotations

import mpgluon
from mpgluon import PrecisionError, amp

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    BOTH,
    EACH_WAY,
    SAME_BITS_HYBRIDIZED,
    WAYS,
    assert_same_bits,
    backward_from,
    cast_net,
    in_sequence,
    in_way,
    initialized,
    parameters_of,
)
from interfaces import Both, interface, made
from mxnet import autograd, gluon
from mxnet.gluon import nn

VALUES = np.random.RandomState(0).standard_normal((2, 4)).astype(np.float32)


class CallsNumPy(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.np.tanh(x.as_np_ndarray()).as_nd_ndarray()


class CallsExtension(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.npx.relu(x.as_np_ndarray()).as_nd_ndarray()


@mx.util.use_np
class Decorated(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.relu(x)


class OwnArrays(gluon.HybridBlock):
    """An ordinary block that calls NumPy itself, for settings."""

    def hybrid_forward(self, F, x):
        return F.relu(x) * float(np.sqrt(2))


def in_a_function(F, x):
    return F.np.tanh(x.as_np_ndarray()).as_nd_ndarray()


class CallsItInAFunction(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return in_a_function(F, x)


def network(kind):
    mx.random.seed(0)
    return initialized(in_sequence(nn.Dense(4), kind(), nn.Dense(3)), mx.init.Uniform(1))


def state(net):
    return {
        place: (np.dtype(p.dtype).name, p.data().asnumpy().tobytes(), sorted(vars(p)))
        for place, p in net._collect_params_with_prefix().items()
    }, [sorted(vars(block)) for block in (net, *net)]


@EACH_WAY
def test_a_block_decorated_for_the_interface_is_refused_while_it_is_switched_off(way):
    net = network(Decorated)
    for parameter in net.collect_params().values():
        parameter.shape = (*(parameter.shape[:1]), *(4,) * (len(parameter.shape) - 1))
    for parameter in net.collect_params().values():
        parameter._finish_deferred_init()
    before = state(net)
    with pytest.raises(PrecisionError, match=r"use_np, .* switched off.*set_np") as caught:
        WAYS[way](net)
    assert f"{net[1].name} (Decorated)" in str(caught.value)
    assert "Nothing was changed" in str(caught.value)
    assert state(net) == before


@EACH_WAY
def test_parameters_of_the_other_interface_are_refused(way):
    plain = initialized(nn.Dense(3, in_units=4))
    with mx.util.np_array(active=True):
        net = initialized(nn.Dense(3, in_units=4))
        with pytest.raises(PrecisionError, match=r"mx\.nd arrays.*switched on.*reset_np"):
            WAYS[way](plain)
    with pytest.raises(PrecisionError, match=r"mx\.np arrays.*switched off.*set_np"):
        WAYS[way](net)
    assert "hybrid_forward" not in vars(net)


@EACH_WAY
@BOTH
def test_switching_the_interface_between_cast_and_call_is_an_error(way, hybridize):
    with mx.util.np_array(active=True):
        net = in_way(way, initialized(nn.Dense(3, in_units=4)))
        net.hybridize(hybridize)
    with pytest.raises(PrecisionError, match=r"switched off since .*set_np"):
        net(mx.np.array(VALUES))


@pytest.mark.parametrize("kind", [CallsNumPy, CallsExtension, Decorated])
def test_a_kept_block_may_call_it(kind):
    net = network(kind)
    assert net[1].name in amp.autocast(net, "float16", keep_fp32=(net[1],)).kept_fp32
    if kind is not Decorated:
        assert net(mx.nd.array(VALUES)).dtype == np.float32


@EACH_WAY
@BOTH
@pytest.mark.parametrize("kind", [CallsNumPy, CallsExtension, CallsItInAFunction])
def test_a_network_that_calls_it_is_restored_before_the_error(kind, way, hybridize):
    net, again = network(kind), network(kind)
    for one in (net, again):
        mx.random.seed(0)
        one(mx.nd.array(VALUES))
    before = state(again)
    WAYS[way](net)
    net.hybridize(hybridize)
    with pytest.raises(PrecisionError, match=r"received a call of F\.npx?, .*keep_fp32"):
        net(mx.nd.array(VALUES))
    net.hybridize(False)
    assert state(net)[0] == before[0]
    assert all("hybrid_forward" not in vars(block) for block in (net, *net))
    expected = again(mx.nd.array(VALUES)).asnumpy()
    assert np.array_equal(net(mx.nd.array(VALUES)).asnumpy(), expected)


def test_a_trained_network_keeps_its_cast_when_it_first_asks_later():
    class Later(gluon.HybridBlock):
        wants = False

        def hybrid_forward(self, F, x):
            return in_a_function(F, x) if self.wants else F.tanh(x)

    net = cast_net(network(Later))
    net(mx.nd.array(VALUES))
    net[1].wants = True
    with pytest.raises(PrecisionError, match=r"received a call of F\.np"):
        net(mx.nd.array(VALUES))
    assert net[0].weight.dtype == "float16"


@EACH_WAY
def test_calls_of_numpy_itself_are_accepted(way):
    net = in_way(way, network(OwnArrays))
    assert net(mx.nd.array(VALUES)).dtype == np.float32


# A network in both interfaces.


def trained(in_numpy, way, hybridize, *, optimizer="sgd", checkpoint=None, first_step=0):
    """Train for three steps in one of the two interfaces; return all that is left of it.

    The checkpoint is written after two steps, or read before the third.
    """
    with interface(in_numpy):
        return _trained(in_numpy, way, hybridize, optimizer, checkpoint, first_step)


def _trained(in_numpy, way, hybridize, optimizer, checkpoint, first_step):
    array = mx.np.array if in_numpy else mx.nd.array
    random = np.random.RandomState(3)
    net = made(way, hybridize, random)
    options = {"learning_rate": 0.05, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), optimizer, options)
    amp.init_trainer(trainer, mpgluon.DynamicLossScale(2.0**10, growth_interval=2))
    average = mpgluon.WeightAverage(trainer, 0.9)
    loss_of, losses = gluon.loss.SoftmaxCrossEntropyLoss(), []
    if first_step:
        mpgluon.load_checkpoint(checkpoint, net, trainer)
    for step in range(first_step, 3):
        random = np.random.RandomState(step)
        images = array(random.standard_normal((4, 3, 8, 8)).astype(np.float32))
        labels = array(random.randint(0, 20, 4), dtype="int32")
        with autograd.record():
            loss = loss_of(net(images), labels)
            with amp.scale_loss(loss * (np.inf if step == 1 else 1), trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        amp.clip_global_norm(trainer, 1.0, 4)
        trainer.step(4)
        average.update()
        losses.append(loss.asnumpy())
        if checkpoint is not None and step == 1:
            mpgluon.save_checkpoint(checkpoint, net, trainer)
    with average.swapped_in():
        averaged = {f"averaged {k}": v for k, v in parameters_of(net).items()}
    rest = {"losses": np.stack(losses[-1:]), "scale": np.float64(amp.loss_scale(trainer))}
    assert amp.skipped_steps(trainer) == 1
    return {**parameters_of(net), **averaged, **rest}


@BOTH
@pytest.mark.parametrize("way", [None, *WAYS])
def test_a_network_trains_to_the_same_bits_in_both_interfaces(way, hybridize):
    in_nd = trained(False, way, hybridize)
    assert_same_bits(trained(True, way, hybridize), in_nd)


@pytest.mark.parametrize("optimizer", ["adam", "nag", "lamb", "rmsprop"])
def test_each_optimizer_updates_as_in_the_other_interface(optimizer):
    in_nd = trained(False, "cast float16", True, optimizer=optimizer)
    assert_same_bits(trained(True, "cast float16", True, optimizer=optimizer), in_nd)


class WithNumbers(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        in_numpy = mx.util.is_np_array()
        x = F.np.dot(x, F.np.ones((4, 4)) * 0.25) if in_numpy else F.dot(x, F.ones((4, 4)) * 0.25)
        x = 0.7 - (x * 0.3 + 0.1) / 0.7
        return x * (1.1 / x) - 0.3 / x


@BOTH
@pytest.mark.parametrize("way", SAME_BITS_HYBRIDIZED)
def test_numbers_that_meet_arrays_are_rounded_as_in_the_other_interface(way, hybridize):
    results = []
    for in_numpy in (False, True):
        with interface(in_numpy) as array:
            net = in_way(way, WithNumbers())
            net.hybridize(hybridize)
            results.append([net(array(np.tile(VALUES, (8, 1)))).asnumpy().reshape(-1)])
    assert_same_bits(*results)


class CallsLegacy(gluon.HybridBlock):
    """Calls operators that the NumPy interface lacks, in either interface."""

    def __init__(self):
        super().__init__(prefix="legacy_")
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=4)

    def hybrid_forward(self, F, x):
        x = self.dense(x)
        if not mx.util.is_np_array():
            return F.softsign(x) + F.L2Normalization(F.BlockGrad(x) * x)
        old = x.as_nd_ndarray()
        normed = F.L2Normalization(F.BlockGrad(old) * old)
        return F.softsign(old).as_np_ndarray() + normed.as_np_ndarray()


@BOTH
@pytest.mark.parametrize("way", SAME_BITS_HYBRIDIZED)
def test_an_operator_of_mx_nd_between_two_conversions_follows_the_table(way, hybridize):
    results = []
    for in_numpy in (False, True):
        with mx.util.np_array(in_numpy):
            net = initialized(CallsLegacy(), mx.init.Zero())
            array = mx.np.array if in_numpy else mx.nd.array
            net.dense.weight.set_data(array(np.resize(VALUES, (4, 4))))
            WAYS[way](net)
            net.hybridize(hybridize)
            with autograd.record():
                result = net(array(VALUES))
            autograd.backward(result)
            gradient = net.dense.weight.grad()
            results.append({"result": result.asnumpy(), "gradient": gradient.asnumpy()})
    assert_same_bits(results[1], results[0])


class Embeds(gluon.HybridBlock):
    def __init__(self):
        super().__init__(prefix="embeds_")
        with self.name_scope():
            self.embedding = nn.Embedding(4, 4)

    def hybrid_forward(self, F, x):
        x = self.embedding(x)
        x = F.np.tanh(x) if mx.util.is_np_array() else F.tanh(x)
        return x * x


@BOTH
@pytest.mark.parametrize("policy", ["float16", "params=bfloat16,compute=bfloat16,emulate=true"])
def test_what_follows_an_embedding_is_in_the_format_of_its_weights(policy, hybridize):
    results = []
    for in_numpy in (False, True):
        with mx.util.np_array(in_numpy):
            array, net = mx.np.array if in_numpy else mx.nd.array, Embeds()
            net.initialize()
            net.embedding.weight.set_data(array(np.resize(VALUES, (4, 4))))
            mpgluon.cast_block(net, mpgluon.Policy.parse(policy))
            net.hybridize(hybridize)
            results.append({"result": net(array([0, 3, 1], dtype="int32")).asnumpy()})
    assert_same_bits(results[1], results[0])


class Sum(gluon.HybridBlock):
    """Adds a value of its own, which has one row, to its input."""

    def __init__(self):
        super().__init__(prefix="sum_")
        self.dense = nn.Dense(4, in_units=4, prefix="sum_dense_")
        self.row = self.params.get("row", shape=(1, 4), init=mx.init.Uniform(1))

    def hybrid_forward(self, F, x, row):
        y = self.dense(x)
        return (y + self.dense(row)) + y


@pytest.mark.usefixtures("numpy_interface")
@pytest.mark.parametrize("way", SAME_BITS_HYBRIDIZED)
@pytest.mark.parametrize(
    "function",
    [
        *(["zeros_like", "around", "rint", "sign", "ceil", "floor", "trunc", "fix"]),
        *(["isfinite", "isinf", "isnan", "isneginf", "isposinf", "logical_not"]),
    ],
)
def test_an_operator_without_a_gradient_does_not_change_the_order_in_which_others_add(
    function, way
):
    class Sums(gluon.HybridBlock):  # four gradients are added from right to left, five are not
        def hybrid_forward(self, F, x):
            x = x * 1.3
            without = getattr(F.np, function)(x)
            return F.np.where(x > 0.5, x * 0.7, x) + without * x + F.np.tanh(x)

    def results(hybridize):
        net = in_way(way, Sums())
        net.hybridize(hybridize)
        x = mx.np.array(np.random.RandomState(0).standard_normal((4, 17, 8)), dtype="float16")
        x.attach_grad()
        loss = backward_from(lambda: (net(x) * 3.7).sum())
        return {"loss": loss.asnumpy(), "gradient": x.grad.asnumpy()}

    assert_same_bits(results(False), results(True))


@pytest.mark.usefixtures("numpy_interface")
@pytest.mark.parametrize("way", SAME_BITS_HYBRIDIZED)
def test_a_sum_whose_operands_had_one_shape_may_broadcast_later(way):
    net = in_way(way, initialized(Sum(), mx.init.Uniform(1)))
    for rows in (1, 3, 1, 2, 3):
        x = mx.np.array(np.random.RandomState(rows).standard_normal((rows, 4)), dtype="float32")
        net.hybridize(False)
        expected = net(x).asnumpy()
        net.hybridize()
        np.testing.assert_array_equal(net(x).asnumpy(), expected)
    net.hybridize()
    for rows in (1, 3, 1):  # with one graph, not a new one each time
        x = mx.np.array(np.random.RandomState(rows).standard_normal((rows, 4)), dtype="float32")
        assert net(x).shape == (rows, 4)


def test_a_checkpoint_continues_to_the_same_bits(tmp_path):
    file = tmp_path / "checkpoint"
    expected = trained(True, "cast float16", True, checkpoint=file)
    assert_same_bits(trained(True, "cast float16", True, checkpoint=file, first_step=2), expected)


@pytest.mark.usefixtures("numpy_interface")
@EACH_WAY
def test_restore_gives_the_fp32_network_back(way):
    net = initialized(Both())
    before = parameters_of(net)
    images = mx.np.array(np.ones((2, 3, 8, 8), np.float32))
    expected = net(images).asnumpy()
    WAYS[way](net)
    assert isinstance(net(images), mx.np.ndarray)
    mpgluon.restore(net)
    assert_same_bits(parameters_of(net), before)
    assert np.array_equal(net(images).asnumpy(), expected)
