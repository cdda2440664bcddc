"""The average of a Trainer's weights: its value, and that the network comes back from it."""

import math

import mpgluon
from mpgluon import TrainerStateError, WeightAverage, amp
from mpgluon.cast import fp32

import mxnet as mx
import numpy as np
import pytest
from helpers import STATIC, assert_same_bits, in_sequence, parameters_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mxnet import autograd, gluon
from mxnet.gluon import nn
from test_checkpoint import ONE, TWO, Training, fp32_everything

DECAY = 0.75
WAYS = ["float32", "float16", "autocast float16", "autocast bfloat16"]
SKIPPED_STEP = 3  # by Training, if it has a loss scale
each_way = pytest.mark.parametrize("way", WAYS)


def fp32_weights(training: Training) -> dict[str, np.ndarray]:
    """Return the values to average: masters, FP32 parameters, means of statistics."""
    masters = getattr(training.trainer._updaters[0], "masters", {})
    index = {id(p): i for i, p in enumerate(training.trainer._params)}
    values = {}
    mx.nd.waitall()
    for name, parameter in training.net._collect_params_with_prefix().items():
        copies = [data.asnumpy() for data in parameter.list_data()]
        if "running" in name and len(copies) == 2:
            values[name] = copies[0] + (copies[1] - copies[0]) / np.float32(2)
        else:
            master = masters.get(index[id(parameter)])
            values[name] = copies[0] if master is None else master.asnumpy()
        assert values[name].dtype == np.float32
    return values


def averaged(way="float32", steps=0, **options) -> tuple[Training, WeightAverage]:
    """Return a training and its average, updated after each of some steps."""
    training = Training(way, **options)
    average = WeightAverage(training.trainer, DECAY)
    train(training, average, steps)
    return training, average


def train(training: Training, average: WeightAverage, steps: int) -> None:
    for _ in range(steps):
        training.train(1)
        average.update()


def averages(training: Training, average: WeightAverage) -> dict[str, np.ndarray]:
    parameters = training.net._collect_params_with_prefix()
    values = {name: average.value_of(parameter) for name, parameter in parameters.items()}
    return {name: value.asnumpy() for name, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("devices", "scaled"),
    [(ONE, True), (ONE, False), (TWO, True)],
    ids=["one device", "no loss scale", "two devices"],
)
@each_way
def test_the_average_is_that_of_fp32_weights_after_each_step_not_skipped(way, devices, scaled):
    training, average = averaged(way, devices=devices, scaled=scaled)
    expected: dict[str, np.ndarray] = {}
    for step in range(1, 6):
        average.update()  # nothing was stepped since
        training.train(1)
        average.update()
        average.update()
        if scaled and step == SKIPPED_STEP:
            assert amp.step_was_skipped(training.trainer)
        elif not expected:
            expected = fp32_weights(training)
        else:
            for name, weight in fp32_weights(training).items():
                change = (weight - expected[name]) * np.float32(1 - DECAY)
                expected[name] = expected[name] + change
        assert_same_bits(averages(training, average), expected)
    assert average.updates == (4 if scaled else 5)
    assert any((expected[name] != value).any() for name, value in fp32_weights(training).items())


@pytest.mark.parametrize("cast", [mpgluon.cast_block, amp.autocast])
def test_a_loops_own_average_stands_still_in_float16_and_not_under_autocast(cast):
    steps, begin, end = 200, 1.0, 1.25
    layer = nn.Dense(1, in_units=1, use_bias=False)
    layer.initialize(mx.init.Constant(begin))
    cast(layer, "float16")
    # The first step leaves the weight, the second moves it to where it stays.
    gradients = [0.0, begin - end] + [0.0] * (steps - 1)
    trainer = gluon.Trainer(
        layer.collect_params(), "sgd", {"learning_rate": 1.0, "multi_precision": True}
    )
    average = WeightAverage(trainer, 0.999)
    own = layer.weight.data().copy()
    for gradient in gradients:
        step_with(layer.weight, trainer, gradient)
        average.update()
        weight = layer.weight.data()
        own = own + (weight - own) * 0.001
    assert layer.weight.data().asscalar() == end
    (value,) = average.value_of(layer.weight).asnumpy().ravel()
    # In each step, three roundings by half a unit of a number below 2: at most 2**-24 each.
    expected = end + (begin - end) * 0.999**steps
    assert value == pytest.approx(expected, abs=3 * steps * 2.0**-24)
    assert value > 1.04
    if cast is amp.autocast:
        assert own.asscalar() == pytest.approx(expected, abs=3 * steps * 2.0**-24)
    else:
        assert (own.dtype, own.asscalar()) == (np.float16, begin)


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one device", "two devices"])
@pytest.mark.parametrize("way", WAYS)
def test_swapped_in_the_network_has_the_rounded_average_and_then_its_own_bits_again(way, devices):
    training, average = averaged(way, 4, devices=devices)
    images = mx.nd.array(np.random.RandomState(0).randn(3, 2, 4, 4))
    before, masters = training.arrays(), fp32_everything(training)
    logits = training.net(images).asnumpy()
    values = averages(training, average)
    with average.swapped_in():
        parameters = training.net._collect_params_with_prefix()
        for name, parameter in parameters.items():
            for data in parameter.list_data():
                assert data.asnumpy().tobytes() == values[name].astype(parameter.dtype).tobytes()
            if parameter.dtype == np.float16:  # as in an export
                wide = fp32.fp32_value(parameter.list_data()[0], fp32.known(parameter))
                assert wide.asnumpy().tobytes() == values[name].tobytes()
        assert (training.net(images).asnumpy() != logits).any()
    assert training.arrays() == before
    assert fp32_everything(training) == masters
    assert training.net(images).asnumpy().tobytes() == logits.tobytes()
    assert_same_bits(averages(training, average), values)


@pytest.mark.parametrize("way", ["float32", "float16", "autocast bfloat16"])
def test_training_goes_on_after_evaluations_as_if_there_were_no_average(way):
    control = Training(way)
    control.train(6)
    training, average = averaged(way)
    for _ in range(6):
        train(training, average, 1)
        with average.swapped_in():
            training.net(mx.nd.ones((5, 2, 4, 4)))
    assert training.everything() == control.everything()
    assert fp32_everything(training) == fp32_everything(control)


@pytest.mark.parametrize("fails", ["python", "mxnet"])
def test_an_exception_in_the_block_brings_the_weights_back_too(fails):
    training, average = averaged("float16", 2)
    before, masters = training.arrays(), fp32_everything(training)

    def evaluate():
        if fails == "python":
            raise ZeroDivisionError
        mx.nd.random.normal(0, -1, shape=(2, 2))  # asynchronous: raised where the devices are

    with pytest.raises((ZeroDivisionError, mx.MXNetError)), average.swapped_in():
        evaluate()
    assert training.arrays() == before
    assert fp32_everything(training) == masters
    training.train(1)  # nothing is left of the block


def test_a_hybridized_network_computes_with_the_average():
    net = in_sequence(nn.Conv2D(16, 3, in_channels=8), nn.GlobalAvgPool2D(), nn.Dense(2))
    net.initialize()
    images = mx.nd.array(np.random.RandomState(0).randn(4, 8, 6, 6))
    net.hybridize(**STATIC)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 4.0})
    net(images)
    average = WeightAverage(trainer, 0.5)
    for _ in range(2):
        with autograd.record():
            loss = (net(images) ** 2).sum()
        loss.backward()
        trainer.step(4)
        net(images)  # oneDNN changes the layout of a convolution's weight
        average.update()
    weights = [p.data().asnumpy() for p in net.collect_params().values()]
    logits = net(images).asnumpy()
    for parameter in net.collect_params().values():
        parameter.set_data(average.value_of(parameter))
    expected = net(images).asnumpy()
    for parameter, weight in zip(net.collect_params().values(), weights):
        parameter.set_data(mx.nd.array(weight))
    with average.swapped_in():
        assert net(images).asnumpy().tobytes() == expected.tobytes() != logits.tobytes()
    assert net(images).asnumpy().tobytes() == logits.tobytes()


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("average.swapped_in", lambda _, average, __: average.swapped_in().__enter__()),
        ("average.update", lambda _, average, __: average.update()),
        ("trainer.step", lambda training, *_: training.trainer.step(4)),
        ("trainer.step", lambda training, *_: training.trainer.update(4)),
        ("trainer.step", lambda training, *_: training.train(1)),
        ("save_checkpoint", lambda training, _, path: training.save(path)),
        ("load_checkpoint", lambda training, _, path: training.load(path)),
    ],
)
@pytest.mark.parametrize("scaled", [True, False], ids=["loss scale", "no loss scale"])
def test_calls_that_would_use_the_average_as_the_weights_are_refused(tmp_path, named, call, scaled):
    training, average = averaged(steps=2, scaled=scaled)
    path = training.save(tmp_path / "saved.npz")
    before, content = training.everything(), path.read_bytes()
    values = averages(training, average)
    message = rf"^{named} was called while the average is in the network"
    with average.swapped_in(), pytest.raises(TrainerStateError, match=message):
        call(training, average, path)
    assert training.everything() == {**before, "numpy": repr(np.random.get_state())}
    assert_same_bits(averages(training, average), values)
    assert path.read_bytes() == content
    with average.swapped_in():
        pass
    training.train(1)


@pytest.mark.parametrize("call", [mpgluon.save_checkpoint, mpgluon.load_checkpoint])
def test_a_checkpoint_with_another_trainer_of_the_network_is_refused_too(tmp_path, call):
    net = nn.HybridSequential()
    net.add(nn.Dense(2, in_units=2), nn.Dense(1, in_units=2))
    net.initialize()
    body, head = (gluon.Trainer(one.collect_params(), "sgd") for one in net)
    path = tmp_path / "head.npz"
    mpgluon.save_checkpoint(path, net, head)
    before, weight = path.read_bytes(), net[0].weight.data().asnumpy()
    with (
        WeightAverage(body, 0.9).swapped_in(),
        pytest.raises(TrainerStateError, match="while the average is in the network"),
    ):
        call(path, net, head)
    assert path.read_bytes() == before
    np.testing.assert_array_equal(net[0].weight.data().asnumpy(), weight)


def test_restoring_inside_the_block_gives_the_fp32_average_and_after_it_the_masters():
    training, average = averaged("float16", 4)
    values, masters = averages(training, average), fp32_weights(training)
    with average.swapped_in():
        mpgluon.restore(training.net)
        assert_same_bits(parameters_of(training.net), values)
    assert_same_bits(parameters_of(training.net), masters)


def test_casting_inside_the_block_keeps_the_fp32_values_of_the_weights():
    training, average = averaged(steps=2, scaled=False)
    before = fp32_weights(training)
    with average.swapped_in():
        mpgluon.cast_block(training.net)
    weight = training.net[4].weight
    assert weight.data().asnumpy().tobytes() == before["4.weight"].astype(np.float16).tobytes()
    mpgluon.restore(training.net)
    assert_same_bits(fp32_weights(training), before)


float16_bits = st.lists(st.integers(0, 2**16 - 1), min_size=6, max_size=6)


@settings(max_examples=15, deadline=None)
@given(weights=float16_bits, average_of=st.lists(st.floats(-1e5, 1e5, width=32), min_size=6))
def test_any_float16_weight_and_any_master_come_back(weights, average_of):
    layer = nn.Dense(2, in_units=3, use_bias=False)
    layer.initialize(mx.init.Constant(0.1))
    mpgluon.cast_block(layer)
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {"multi_precision": True})
    average = WeightAverage(trainer, 0.5)
    step_with(layer.weight, trainer, 1)
    average.update()
    average.value_of(layer.weight)[:] = np.array(average_of[:6], np.float32).reshape(2, 3)
    # A weight that was set since the step is no longer its rounded master.
    bits = np.array(weights, np.uint16).view(np.float16).reshape(2, 3)
    layer.weight.set_data(mx.nd.array(bits, dtype="float16"))
    before, master = layer.weight.data().asnumpy(), fp32.known(layer.weight)
    values = master.asnumpy()
    with average.swapped_in():
        layer(mx.nd.ones((1, 3)))
        assert fp32.known(layer.weight) is not master
    assert layer.weight.data().asnumpy().tobytes() == before.tobytes()
    assert fp32.known(layer.weight) is master
    assert master.asnumpy().tobytes() == values.tobytes()


def test_before_the_first_step_the_network_keeps_its_weights():
    training, average = averaged("float16")
    before = training.arrays()
    average.update()
    with average.swapped_in():
        assert training.arrays() == before
    assert (average.updates, averages(training, average)) == (0, {})


def test_a_frozen_parameter_and_one_of_another_trainer_have_no_average_until_it_is_trained():
    training = Training(scaled=False)
    frozen, other = training.net[0].weight, training.net[4].weight
    frozen.grad_req = "null"
    average = WeightAverage(training.trainer, 0.5)
    train(training, average, 1)
    assert average.value_of(frozen) is None
    assert average.value_of(Training().net[0].weight) is None
    before = frozen.data().asnumpy()
    with average.swapped_in():
        assert frozen.data().asnumpy().tobytes() == before.tobytes()
    frozen.grad_req = "write"
    train(training, average, 1)
    assert average.value_of(frozen).asnumpy().tobytes() == frozen.data().asnumpy().tobytes()
    other.grad_req = "null"
    assert (average.value_of(other) != other.data()).sum() > 0
    average.decay = 2.0**-8  # of the distance, each time
    train(training, average, 4)
    found, weight = (one.asnumpy() for one in (average.value_of(other), other.data()))
    np.testing.assert_allclose(found, weight, rtol=2.0**-22)


def test_several_steps_between_updates_count_as_one():
    training, average = averaged(steps=1, scaled=False)
    average.decay = 0.5
    first = fp32_weights(training)
    training.train(3)
    average.update()
    now = fp32_weights(training)
    expected = {n: first[n] + (now[n] - first[n]) * np.float32(0.5) for n in now}
    assert_same_bits(averages(training, average), expected)


def step_with(weight, trainer, gradient):
    weight.grad()[:] = gradient
    weight.data()._fresh_grad = True
    trainer.step(1)


def test_the_average_uses_the_masters_of_mxnets_own_multi_precision():
    weight = gluon.Parameter("weight", shape=(1, 1), dtype="float16")
    weight.initialize(mx.init.Constant(1.0))
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0, "multi_precision": True})
    average = WeightAverage(trainer, 0.5)
    step_with(weight, trainer, 2.0**-13)  # less than half a unit of the float16 weight
    average.update()
    assert weight.data().asscalar() == 1
    assert average.value_of(weight).asscalar() == 1 - 2.0**-13


@pytest.mark.parametrize("decay", [0, 1, 1.0, -0.1, 1.001, math.nan, math.inf])
def test_a_decay_outside_0_to_1_is_refused(decay):
    trainer = Training().trainer
    with pytest.raises(ValueError, match="decay must be between 0 and 1") as error:
        WeightAverage(trainer, decay)
    assert f"received {decay!r};" in str(error.value)
    average = WeightAverage(trainer, 0.5)  # the refused one is not there
    with pytest.raises(ValueError, match="decay must be between 0 and 1"):
        average.decay = decay
    assert average.decay == 0.5


@pytest.mark.parametrize("decay", ["0.999", None, True, [0.9]])
def test_a_decay_that_is_not_a_number_is_refused(decay):
    with pytest.raises(TypeError, match="decay must be a number, received"):
        WeightAverage(Training().trainer, decay)


def test_another_object_than_a_trainer_and_a_second_average_are_refused():
    with pytest.raises(TypeError, match=r"takes a gluon\.Trainer, received Dense"):
        WeightAverage(nn.Dense(2, in_units=2), 0.9)
    trainer = Training().trainer
    WeightAverage(trainer, 0.9)
    with pytest.raises(TrainerStateError, match="one Trainer, one average"):
        WeightAverage(trainer, 0.99)


def test_a_trainer_that_updates_in_its_kvstore_is_refused_until_it_has_a_loss_scale():
    training = Training(devices=TWO, scaled=False)
    with pytest.raises(TrainerStateError, match=r"or call amp\.init_trainer"):
        WeightAverage(training.trainer, 0.9)
    amp.init_trainer(training.trainer)
    WeightAverage(training.trainer, 0.9)


def test_weights_that_are_stored_as_rows_are_refused():
    weight = gluon.Parameter("rows", shape=(3, 2), stype="row_sparse", grad_stype="row_sparse")
    weight.initialize()
    trainer = gluon.Trainer([weight], "sgd")
    with pytest.raises(TrainerStateError, match=r"1 weights are stored as rows \(rows: row"):
        WeightAverage(trainer, 0.9)


@each_way
def test_weights_that_were_clipped_after_a_step_are_averaged_as_they_are(way):
    training, average = averaged(way)
    training.train(1)
    weight = training.net[4].weight
    weight.set_data(weight.data().clip(-0.25, 0.25))
    average.update()
    assert abs(average.value_of(weight).asnumpy()).max() == 0.25


def test_a_step_after_a_rollback_counts_and_the_rollback_does_not(tmp_path):
    states = str(tmp_path / "states")
    training, average = averaged("float16", steps=1)
    training.trainer.save_states(states)
    train(training, average, 1)
    training.trainer.load_states(states)
    average.update()
    assert average.updates == 2
    training.train(1)  # skipped
    train(training, average, 1)
    assert average.updates == 3
