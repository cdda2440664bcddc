"""Errors of MXNet's ``multi_precision``, and mpgluon on the same scenario.

One test for each known fact about it, named after ``multi_precision``; then the masters
themselves: for every optimizer, on several devices, in files.
"""

import math

import mpgluon
from mpgluon import amp
from mpgluon.cast import fp32
from mpgluon.kernels.dtypes import cast
from mpgluon.trainer.step import TrainerState
from mpgluon.updates.gluon_trainer import loss_scaler_of

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

TENTH = float(np.float32(0.1))
ROUNDED = float(np.float16(TENTH))
TWO = [mx.cpu(0), mx.cpu(1)]
each_way = pytest.mark.parametrize("loss_scale", [None, "none", 128, "dynamic"])


def plain_weight(value=ROUNDED):
    """Return a float16 weight as MXNet alone would have it, without an FP32 past."""
    weight = gluon.Parameter("weight", shape=(1, 1), dtype="float16")
    weight.initialize(mx.init.Constant(value))
    return weight


def cast_layer(value=TENTH, ctx=None, dtype="float16"):
    """Return a layer whose only weight was ``value`` before the cast to ``dtype``, if any."""
    layer = nn.Dense(1, in_units=1, use_bias=False, prefix="layer_")
    layer.initialize(mx.init.Constant(value), ctx=ctx)
    if dtype is not None:
        mpgluon.cast_block(layer, dtype)
    return layer


def make_trainer(
    weight, loss_scale=None, optimizer="sgd", learning_rate=1.0, update_on_kvstore=None, **options
):
    arguments = {"learning_rate": learning_rate, "multi_precision": True, **options}
    trainer = gluon.Trainer([weight], optimizer, arguments, update_on_kvstore=update_on_kvstore)
    if loss_scale is not None:
        amp.init_trainer(trainer, loss_scale)
    return trainer


def step(weight, trainer, gradient=0.0):
    """Do a step in which the sum of all devices' gradients, as the loss has them, is given."""
    copies = weight.list_data()
    with autograd.record():
        losses = [cast(one, "float32") * (gradient / len(copies)) for one in copies]
        if isinstance(loss_scaler_of(trainer), TrainerState):
            with amp.scale_loss(losses, trainer) as losses:
                pass
    autograd.backward(losses)
    trainer.step(1)


def value_of(weight):
    values = {one.asnumpy().item() for one in weight.list_data()}
    assert len(values) == 1  # on all devices
    return values.pop()


# --- the rows --------------------------------------------------------------------------------


@each_way
def test_multi_precision_masters_begin_with_the_weight_before_it_was_rounded(loss_scale):
    weight = plain_weight()
    trainer = make_trainer(weight)
    step(weight, trainer)
    assert trainer._updaters[0].states[0][1].asscalar() == ROUNDED != TENTH  # the defect

    layer = cast_layer()
    step(layer.weight, make_trainer(layer.weight, loss_scale))
    assert value_of(layer.weight) == ROUNDED
    mpgluon.restore(layer)
    assert value_of(layer.weight) == TENTH  # the master


@each_way
@pytest.mark.parametrize("way", ["set_data", "load_parameters", "by hand", "load_checkpoint"])
def test_multi_precision_masters_follow_weights_that_are_set_later(way, loss_scale, tmp_path):
    path = str(tmp_path / "file")

    def run(weight, trainer, net=None):
        """Return the weight after two steps, a new value of 0.75 and a step down by 0.125."""
        step(weight, trainer, gradient=0.25)
        step(weight, trainer, gradient=0.25)
        if way == "set_data":
            weight.set_data(mx.nd.array([[0.75]]))
        elif way == "by hand":
            weight.data()[:] = 0.75
        else:
            other = cast_layer(0.75)
            if way == "load_parameters":
                other.save_parameters(path)
                (net.load_parameters(path) if net else weight.set_data(other.weight.data()))
            else:
                mpgluon.save_checkpoint(path, other, make_trainer(other.weight, loss_scale))
                mpgluon.load_checkpoint(path, net, trainer)
        step(weight, trainer, gradient=0.125)
        return value_of(weight)

    if way != "load_checkpoint":
        plain = plain_weight()
        assert run(plain, make_trainer(plain)) == np.float16(ROUNDED - 0.625)  # the defect
    layer = cast_layer()
    assert run(layer.weight, make_trainer(layer.weight, loss_scale), layer) == 0.75 - 0.125


def test_multi_precision_rescale_grad_is_applied_in_fp32_so_the_scale_belongs_there():
    # 2**-26 is not a float16 number, and 2**-10 divided by 2**16 is 2**-26.
    optimizer = mx.optimizer.SGD(learning_rate=1, multi_precision=True, rescale_grad=2.0**-16)
    updater = mx.optimizer.get_updater(optimizer)
    updater(0, mx.nd.array([2.0**-10], dtype="float16"), mx.nd.zeros(1, dtype="float16"))
    assert updater.states[0][1].asscalar() == -(2.0**-26)

    layer = cast_layer(0.0)
    step(layer.weight, make_trainer(layer.weight, 2.0**16), gradient=2.0**-26)
    assert layer.weight.grad().asscalar() == 2.0**-10  # never divided itself
    mpgluon.restore(layer)
    assert value_of(layer.weight) == -(2.0**-26)


def test_multi_precision_gives_bfloat16_weights_no_master_so_they_are_never_made():
    optimizer = mx.optimizer.SGD(multi_precision=True)
    weight = cast(mx.nd.ones(1), "bfloat16")
    assert optimizer.create_state_multi_precision(0, weight) is None  # the defect

    layer = cast_layer(1.0, dtype=None)
    amp.autocast(layer, "bfloat16")
    trainer = make_trainer(layer.weight, "none")
    for _ in range(4):  # each less than half the distance to the next bfloat16 number
        step(layer.weight, trainer, gradient=2.0**-10)
    assert layer.weight.data().dtype == np.float32  # the parameter is its own master
    assert value_of(layer.weight) == 1 - 4 * 2.0**-10


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_multi_precision_counts_no_update_and_moves_no_schedule_in_a_skipped_step(optimizer):
    layer = cast_layer()
    schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=2.0**-3)
    trainer = make_trainer(layer.weight, 8, optimizer, learning_rate=2.0**-3, lr_scheduler=schedule)
    seen = []
    for gradient in (0.5, math.inf, math.nan, 0.5):
        step(layer.weight, trainer, gradient)
        seen.append((trainer.optimizer.num_update, trainer.learning_rate))
    assert [updates for updates, _ in seen] == [1, 1, 1, 2]
    assert seen[0] == seen[1] == seen[2] != seen[3]


# --- every optimizer -------------------------------------------------------------------------

SHAPE, STEPS = (6, 4), 12
_drawn = np.random.default_rng(0)
START = _drawn.standard_normal(SHAPE).astype(np.float32) / 8
GRADIENTS = [(_drawn.standard_normal(SHAPE) / 16).astype(np.float16) for _ in range(STEPS)]
OPTIONS = {"momentum": {"momentum": 0.9}, "decay": {"wd": 0.01}, "clipped": {"clip_gradient": 0.02}}
NO_DECAY = ("groupadagrad",)  # it refuses one
BROKEN_MOMENTUM = ("dcasgd",)  # MXNet compares an array with None


def optimizers():
    """Yield every optimizer of MXNet with every option that it has."""
    for name, kind in sorted(mx.optimizer.Optimizer.opt_registry.items()):
        if kind.__module__.startswith("mxnet"):
            yield pytest.param(name, {}, id=name)
            for option, arguments in OPTIONS.items():
                takes_momentum = "momentum" in kind.__init__.__code__.co_varnames
                if option == "momentum" and (name in BROKEN_MOMENTUM or not takes_momentum):
                    continue
                if option == "decay" and name in NO_DECAY:
                    continue
                yield pytest.param(name, arguments, id=f"{name}-{option}")


def trajectory(name, options, dtype, scale):
    """Return the weight after each step on the given gradients times ``scale``."""
    mx.random.seed(1)  # SGLD adds noise
    layer = nn.Dense(SHAPE[0], in_units=SHAPE[1], use_bias=False)
    layer.initialize()
    layer.weight.set_data(mx.nd.array(START))
    if dtype == "float16":
        mpgluon.cast_block(layer)
    trainer = gluon.Trainer(
        layer.collect_params(),
        mx.optimizer.create(name, multi_precision=dtype == "float16", **options),
    )
    amp.init_trainer(trainer, scale)
    weights = []
    for gradient in GRADIENTS:
        with autograd.record():
            target = mx.nd.array(gradient.astype(np.float32))
            loss = cast(layer.weight.data(), "float32") * target
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
        trainer.step(8)
        weights.append(layer.weight.data().asnumpy())
    mpgluon.restore(layer)
    return weights, layer.weight.data().asnumpy()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "options"), list(optimizers()))
@pytest.mark.parametrize("scale", [1, 2.0**13])
def test_masters_of_every_optimizer_are_the_weights_of_fp32_training(name, options, scale):
    weights, reference = trajectory(name, options, "float32", 1)
    assert not np.array_equal(reference, START)
    float16_weights, masters = trajectory(name, options, "float16", scale)
    assert masters.tobytes() == reference.tobytes()
    for float16_weight, weight in zip(float16_weights, weights):
        assert float16_weight.tobytes() == weight.astype(np.float16).tobytes()


def test_lars_squares_in_float16_with_multi_precision_and_in_fp32_with_masters():
    # The square of a gradient of 256 is infinite in float16, and MXNet's LARS then does not move
    # the weights at all; scaled gradients are as large as that most of the time.
    def run(weight, trainer):
        for _ in range(2):
            step(weight, trainer, gradient=256.0)
        return value_of(weight)

    options = {"optimizer": "lars", "learning_rate": 2.0**10, "momentum": 0.9}
    plain = plain_weight(0.5)
    assert run(plain, make_trainer(plain, **options)) == 0.5  # the defect
    layer = cast_layer(0.5)
    assert run(layer.weight, make_trainer(layer.weight, **options)) < 0.5


class Unusual(mx.optimizer.SGD):
    """An optimizer that arranges its own state for float16 weights."""

    def create_state_multi_precision(self, index, weight):
        return {"weight": weight.astype("float32")} if weight.dtype == np.float16 else None


def test_an_optimizer_with_an_arrangement_of_its_own_trains_and_is_not_saved_by_halves(tmp_path):
    layer = cast_layer()
    trainer = gluon.Trainer(layer.collect_params(), Unusual(learning_rate=1, multi_precision=True))
    amp.init_trainer(trainer)
    step(layer.weight, trainer, gradient=0.5)
    with pytest.raises(mpgluon.TrainerStateError, match="Unusual arranges its state"):
        trainer.save_states(str(tmp_path / "trainer.states"))
    mpgluon.save_checkpoint(tmp_path / "c.npz", layer, trainer)
    mpgluon.load_checkpoint(tmp_path / "c.npz", layer, trainer)
    mpgluon.restore(layer)
    assert value_of(layer.weight) == np.float32(TENTH) - np.float32(0.5)


def test_with_multi_precision_false_there_are_no_masters():
    # 1 + 2**-12 is not a float16 number: each update is lost, as the first notebook shows.
    layer = cast_layer(1.0)
    trainer = make_trainer(layer.weight, 8, multi_precision=False)
    with pytest.warns(UserWarning, match="Consider using multi_precision=True"):
        step(layer.weight, trainer, gradient=-(2.0**-12))
    for _ in range(7):
        step(layer.weight, trainer, gradient=-(2.0**-12))
    assert value_of(layer.weight) == 1
    layer = cast_layer(1.0)
    trainer = make_trainer(layer.weight, 8)
    for _ in range(8):
        step(layer.weight, trainer, gradient=-(2.0**-12))
    assert value_of(layer.weight) == 1 + 8 * 2.0**-12


# --- devices, files, the life of a network ---------------------------------------------------


@each_way
def test_masters_on_several_devices_begin_and_stay_equal(loss_scale):
    layer = cast_layer(ctx=TWO)
    trainer = make_trainer(layer.weight, loss_scale, update_on_kvstore=False)
    for _ in range(3):
        step(layer.weight, trainer, gradient=2.0**-6)
    first, second = (updater.masters[0].asscalar() for updater in trainer._updaters)
    assert first == second
    layer.weight.set_data(mx.nd.array([[0.5]]))
    step(layer.weight, trainer, gradient=0.25)
    assert value_of(layer.weight) == 0.25


def test_a_second_trainer_goes_on_from_the_masters_of_the_first():
    layer = cast_layer()
    for expected in (TENTH - 2.0**-16, TENTH - 2.0**-15):
        step(layer.weight, make_trainer(layer.weight, 8), gradient=2.0**-16)
        master = fp32.known(layer.weight)
        assert master.asscalar() == pytest.approx(expected, abs=2.0**-28)  # one FP32 rounding


@pytest.mark.parametrize("optimizer", ["sgd", "nag", "adam", "lars", "lamb"])
@pytest.mark.parametrize("before", ["plain", "amp"])
def test_saved_trainer_states_have_mxnets_arrangement_and_go_both_ways(optimizer, before, tmp_path):
    # A plain MXNet Trainer reads a file of mpgluon and the reverse: equal steps follow.
    path = str(tmp_path / "trainer.states")
    options = {} if optimizer in ("adam", "lamb") else {"momentum": 0.5}
    weights = {"plain": plain_weight(0.5), "amp": cast_layer(0.5).weight}
    trainers = {
        name: make_trainer(weight, "none" if name == "amp" else None, optimizer, 0.25, **options)
        for name, weight in weights.items()
    }
    for _ in range(2):
        step(weights[before], trainers[before], gradient=2.0**-4)
    trainers[before].save_states(path)
    value = value_of(weights[before])
    results = set()
    for name, weight in weights.items():
        trainers[name].load_states(path)
        weight.set_data(mx.nd.array([[value]]))
        for _ in range(3):
            step(weight, trainers[name], gradient=2.0**-4)
        results.add(value_of(weight))
    assert len(results) == 1
    assert value not in results


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["sgd", "nag", "adam", "lamb"])
def test_states_of_fp32_training_go_on_in_16_bits_with_masters(optimizer, dtype, tmp_path):
    # The file's optimizer has multi_precision=False: bfloat16 weights lost their masters by it.
    path = str(tmp_path / "trainer.states")
    options = {} if optimizer in ("adam", "lamb") else {"momentum": 0.5}
    layer = cast_layer(1.0, dtype=None)
    trainer = make_trainer(
        layer.weight, None, optimizer, 2.0**-12, multi_precision=False, **options
    )
    step(layer.weight, trainer, gradient=1)
    trainer.save_states(path)
    other = cast_layer(value_of(layer.weight), dtype=dtype)
    resumed = make_trainer(other.weight, "none", "sgd", 1.0)
    resumed.load_states(path)
    for weight, one in ((layer.weight, trainer), (other.weight, resumed)):
        step(weight, one, gradient=1)
        step(weight, one, gradient=0.5)
    mpgluon.restore(other)
    assert value_of(other.weight) == value_of(layer.weight)
    assert value_of(layer.weight) < 1 - 2.0**-12


@pytest.mark.parametrize("multi_precision", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_states_with_masters_are_refused_where_none_are_kept(optimizer, multi_precision, tmp_path):
    path = str(tmp_path / "trainer.states")
    options = {"momentum": 0.5} if optimizer == "sgd" else {}
    weight = cast_layer().weight
    trainer = make_trainer(weight, 8, optimizer, **options)
    step(weight, trainer)
    trainer.save_states(path)
    layer = cast_layer(dtype=None)
    trainer = make_trainer(layer.weight, None, optimizer, multi_precision=multi_precision)
    amp.init_trainer(trainer)
    with pytest.raises(mpgluon.TrainerStateError, match="16-bit weight with its FP32 master"):
        trainer.load_states(path)


@pytest.mark.parametrize(
    ("units", "layers", "message"),
    [(5, 1, "shape .*: it is another network's"), (1, 2, "has 1 parameters: it is that of anoth")],
)
def test_states_of_another_network_are_refused(units, layers, message, tmp_path):
    path = str(tmp_path / "trainer.states")
    net = nn.HybridSequential()
    for _ in range(layers):
        net.add(nn.Dense(units, in_units=units, use_bias=False))
    net.initialize()
    mpgluon.cast_block(net)
    options = {"momentum": 0.5, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    with autograd.record():
        loss = net(mx.nd.ones((2, units))).sum()
    loss.backward()
    trainer.step(2)
    trainer.save_states(path)
    trainer = make_trainer(cast_layer().weight, 8, momentum=0.5)
    with pytest.raises(mpgluon.TrainerStateError, match=message):
        trainer.load_states(path)


def test_the_optimizer_of_a_file_may_be_of_another_kind(tmp_path):
    path = str(tmp_path / "trainer.states")
    weight = cast_layer().weight
    trainer = make_trainer(weight, 8, "adam")  # it updates weights one by one, SGD does not
    step(weight, trainer)
    trainer.save_states(path)
    trainer = make_trainer(weight, 8, "sgd", momentum=0.5)
    trainer.load_states(path)
    step(weight, trainer)
    assert isinstance(trainer.optimizer, mx.optimizer.Adam)


@pytest.mark.parametrize("kind", ["cast", "plain"])
def test_a_trainer_that_has_stepped_keeps_its_masters_when_it_gets_a_loss_scale(kind):
    weight = cast_layer(1.0).weight if kind == "cast" else plain_weight(1.0)
    trainer = make_trainer(weight, momentum=0.5)
    step(weight, trainer, gradient=-(2.0**-12))
    assert value_of(weight) == 1
    amp.init_trainer(trainer, 128)
    step(weight, trainer, gradient=-(2.0**-12))
    step(weight, trainer, gradient=-(2.0**-12))
    assert value_of(weight) == np.float16(1 + 2.0**-12 * (1 + 1.5 + 1.75))


def test_masters_of_deferred_weights_begin_with_the_drawn_fp32_values():
    layer = nn.Dense(3)
    layer.initialize()
    mpgluon.cast_block(layer)
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {"multi_precision": True})
    amp.init_trainer(trainer, 8)
    with autograd.record(), amp.scale_loss(layer(mx.nd.ones((2, 5))), trainer) as scaled:
        scaled.backward()
    before = layer.weight.data().asnumpy()
    trainer.step(1)
    mpgluon.restore(layer)
    difference = before.astype(np.float32) - layer.weight.data().asnumpy()
    assert difference == pytest.approx(np.float32(0.01) * 2, abs=2.0**-24)  # two images of ones


def test_one_element_that_is_written_leaves_the_masters_of_the_others():
    # Each update alone is lost in float16; together they are not, unless the masters are.
    layer = nn.Dense(2, in_units=1, use_bias=False)
    layer.initialize(mx.init.One())
    mpgluon.cast_block(layer)
    trainer = make_trainer(layer.weight, 8)
    for _ in range(8):
        step(layer.weight, trainer, gradient=-(2.0**-12))
        layer.weight.data()[0, 0] = 0.25
    assert layer.weight.data().asnumpy().ravel().tolist() == [0.25, 1 + 8 * 2.0**-12]
    mpgluon.restore(layer)
    assert layer.weight.data().asnumpy().ravel().tolist() == [0.25, 1 + 8 * 2.0**-12]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_network_that_was_restored_for_a_while_is_restored_with_its_masters_in_the_end(dtype):
    results = []
    for evaluates in (False, True):
        layer = cast_layer(1.0, dtype=dtype)
        trainer = make_trainer(layer.weight, 8)
        for _ in range(2):
            step(layer.weight, trainer, gradient=2.0**-15)
            if evaluates:
                mpgluon.restore(layer)
                layer(mx.nd.ones((1, 1)))
                mpgluon.cast_block(layer, dtype)
        step(layer.weight, trainer, gradient=2.0**-15)
        mpgluon.restore(layer)
        results.append(value_of(layer.weight))
    assert results == [1 - 3 * 2.0**-15] * 2


@pytest.mark.parametrize("skipped", [False, True])
def test_save_states_keeps_masters_even_if_every_step_was_skipped(tmp_path, skipped):
    path = str(tmp_path / "states")
    layer = cast_layer()
    trainer = make_trainer(layer.weight, 8)
    step(layer.weight, trainer, gradient=math.inf if skipped else 2.0**-16)
    trainer.save_states(path)
    other = cast_layer(ROUNDED)  # the same weight, without the FP32 past
    trainer = make_trainer(other.weight, 8)
    trainer.load_states(path)
    step(other.weight, trainer)
    mpgluon.restore(other)
    assert value_of(other.weight) == np.float32(TENTH) - np.float32(0 if skipped else 2.0**-16)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        *(("sgd", {}), ("sgd", {"momentum": 0.9}), ("adam", {}), ("rmsprop", {})),
        *(("signum", {"momentum": 0.0}), ("signum", {"momentum": 0.9})),
    ],
)
def test_a_trainer_that_has_stepped_before_the_cast_is_refused_with_advice(optimizer, options):
    layer = nn.Dense(2, in_units=5, use_bias=False)
    layer.initialize()
    trainer = make_trainer(layer.weight, None, optimizer, **options)
    step(layer.weight, trainer, gradient=0.5)
    mpgluon.cast_block(layer)
    with pytest.raises(mpgluon.TrainerStateError, match="make a new Trainer after it"):
        amp.init_trainer(trainer)


def test_two_trainers_may_share_an_optimizer():
    layers = [cast_layer(1.0), cast_layer(0.5)]
    optimizer = mx.optimizer.SGD(learning_rate=1, multi_precision=True)
    trainers = [gluon.Trainer(layer.collect_params(), optimizer) for layer in layers]
    for layer, trainer in zip(layers, trainers):
        amp.init_trainer(trainer, 8)
        step(layer.weight, trainer, gradient=2.0**-14)
    for layer in layers:
        mpgluon.restore(layer)
    assert [value_of(layer.weight) for layer in layers] == [1 - 2.0**-14, 0.5 - 2.0**-14]
