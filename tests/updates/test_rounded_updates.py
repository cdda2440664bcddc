"""bfloat16 weights: with masters, and with updates that are rounded to the weights themselves."""

import ctypes
import math

import mpgluon
from mpgluon import Policy, TrainerStateError, amp
from mpgluon.cast import fp32
from mpgluon.formats.float_format import BFLOAT16, round_to

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, EMULATED, assert_same_bits, in_sequence, parameters_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

POLICY = Policy.parse("params=bfloat16,compute=bfloat16,emulate=true")
WAYS = ("nearest", "stochastic", "kahan")
TWO = [mx.cpu(0), mx.cpu(1)]
EACH_WAY = pytest.mark.parametrize("way", WAYS)
QUIET = pytest.mark.filterwarnings("ignore")


def layer_of(values, ctx=None):
    """Return a cast layer with the given weights, and no bias."""
    layer = nn.Dense(len(values), in_units=len(values[0]), use_bias=False)
    layer.initialize(ctx=ctx)
    layer.weight.set_data(mx.nd.array(values))
    mpgluon.cast_block(layer, POLICY)
    return layer


def trainer_of(net, way, optimizer="sgd", *, loss_scale="none", seed=0, **options):
    """Return a Trainer with masters, for the way "masters", or with rounded updates."""
    options = {"learning_rate": 2.0**-12, "multi_precision": way == "masters", **options}
    trainer = gluon.Trainer(net.collect_params(), optimizer, options)
    rounding = {} if way == "masters" else {"update_rounding": way, "rounding_seed": seed}
    amp.init_trainer(trainer, loss_scale, **rounding)
    return trainer


def backward(loss, trainer):
    with amp.scale_loss(loss, trainer) as scaled:
        autograd.backward(scaled)


def step(weight, trainer, gradient):
    """Do a step with a gradient, an array of the weight's shape or a number."""
    for device in weight.list_ctx():
        with autograd.record():
            backward((weight.data(device) * gradient).sum(), trainer)
    trainer.step(len(weight.list_ctx()))


def is_bfloat16(array):
    return not (array.view(np.uint32) & 0xFFFF).any()


# --- what becomes of small updates -----------------------------------------------------------


def after_small_steps(way):
    """Return 4,096 weights of 1 after 256 steps of 2^-10 upwards: an eighth of the spacing."""
    layer = layer_of(np.ones((64, 64), np.float32))
    trainer = trainer_of(layer, way, learning_rate=2.0**-10)
    for _ in range(256):
        step(layer.weight, trainer, -1.0)
    return layer.weight.data().asnumpy()


@pytest.mark.parametrize(("way", "expected"), [("nearest", 1), ("masters", 1.25), ("kahan", 1.25)])
def test_small_updates_are_lost_in_rounding_to_nearest_only(way, expected):
    # The compensations are multiples of 2^-10 up to half a spacing, 2^-8: bfloat16 holds them.
    assert (after_small_steps(way) == expected).all()


def test_rounded_stochastically_updates_are_right_in_the_mean():
    weights = after_small_steps("stochastic")
    # Each of 256 steps moves a weight by 2^-7 with probability 2^-3: 32 +- 5.3 moves.
    deviation = 2.0**-7 * math.sqrt(256 * 2**-3 * (1 - 2**-3))
    assert abs(weights.mean() - 1.25) < 6 * deviation / math.sqrt(weights.size)
    assert abs(weights.std() - deviation) < 6 * deviation / math.sqrt(2 * weights.size)
    assert is_bfloat16(weights)


def regression(way, steps=600):
    """Return how far a linear layer is from the weights that made its data, relative to before.

    Inputs are orthogonal, so each step takes a weight the same part of the way: by 1/128 of what
    is left, which soon is less than half a spacing of the weights.
    """
    random = np.random.RandomState(0)
    target = random.uniform(1.25, 1.75, (16, 16)).astype(np.float32)
    inputs = 4 * np.linalg.qr(random.standard_normal((16, 16)))[0].astype(np.float32)
    layer = layer_of(target + random.uniform(-0.2, 0.2, (16, 16)).astype(np.float32))
    trainer = trainer_of(layer, way, learning_rate=2.0**-7)
    x = mx.nd.array(inputs)
    y = mx.nd.dot(x, mx.nd.array(target.T))
    start = layer.weight.data().asnumpy()
    for _ in range(steps):
        with autograd.record():
            backward(((mx.nd.dot(x, layer.weight.data().T) - y) ** 2).sum() / 2, trainer)
        trainer.step(16)
    distance = np.abs(layer.weight.data().asnumpy() - target)
    return distance.mean(), np.abs(start - target).mean()


@pytest.mark.slow
def test_a_layer_learns_its_weights_except_where_updates_are_rounded_to_nearest():
    spacing = BFLOAT16.epsilon  # of weights between 1 and 2
    left, before = {}, 0.0
    for way in ("masters", *WAYS):
        left[way], before = regression(way)
    # To nearest a weight stands still while 1/128 of its distance is below half a spacing, 2^-8:
    # at distances below 0.5.
    assert left["nearest"] == before > 0.08
    # A rounded exact weight is off by a quarter of a spacing in the mean, half at most.
    assert left["masters"] < spacing / 2
    assert left["kahan"] < spacing / 2
    # A rounding adds a variance of a quarter of a squared spacing at most, and a step takes a 64th
    # of the variance away: 16 squared spacings are left at most, 4 spacings of deviation.
    assert left["stochastic"] < 4 * spacing < before / 2


# --- the arithmetic --------------------------------------------------------------------------

OPTIMIZERS = {
    **{"sgd": {}, "sgd momentum": {"momentum": 0.9, "wd": 0.01}, "nag": {"momentum": 0.9}},
    **{name: {} for name in ("adam", "rmsprop", "adagrad", "ftrl", "lamb", "signum", "test")},
}


@QUIET
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["nearest", "stochastic"])
def test_an_update_is_the_fp32_update_rounded_once(name, way):
    random = np.random.RandomState(1)
    start = random.standard_normal((5, 7)).astype(np.float32)
    layer = layer_of(start)
    optimizer = name.split()[0]
    options = {} if optimizer == "test" else {"learning_rate": 0.01, **OPTIMIZERS[name]}
    trainer = gluon.Trainer(layer.collect_params(), optimizer, options)
    amp.init_trainer(trainer, "none", update_rounding=way, rounding_seed=5)
    by_hand = mx.nd.array(round_to(start, BFLOAT16))
    updater = mx.optimizer.get_updater(mx.optimizer.create(optimizer, **options))
    for number in range(1, 6):
        gradient = mx.nd.array(random.standard_normal((5, 7)))
        step(layer.weight, trainer, gradient)
        updater(0, gradient, by_hand)
        key = (5, number, 0) if way == "stochastic" else None
        by_hand[:] = round_to(by_hand.asnumpy(), BFLOAT16, way, key=key)
        assert layer.weight.data().asnumpy().tobytes() == by_hand.asnumpy().tobytes()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_compensation_keeps_what_rounding_cuts_off(optimizer):
    random = np.random.RandomState(1)
    layer = layer_of(random.standard_normal((5, 7)))
    trainer = trainer_of(layer, "kahan", optimizer, learning_rate=2.0**-10)
    weight = layer.weight.data().asnumpy()
    lacks = np.zeros_like(weight)
    updater = mx.optimizer.get_updater(mx.optimizer.create(optimizer, learning_rate=2.0**-10))
    for _ in range(20):
        gradient = mx.nd.array(random.standard_normal((5, 7)))
        step(layer.weight, trainer, gradient)
        exact = mx.nd.array(weight + lacks)
        updater(0, gradient, exact)
        weight = round_to(exact.asnumpy(), BFLOAT16)
        lacks = round_to(exact.asnumpy() - weight, BFLOAT16)
        assert layer.weight.data().asnumpy().tobytes() == weight.tobytes()
    assert trainer._updaters[0].extra[0].asnumpy().tobytes() == lacks.tobytes()


def test_compensation_of_a_weight_that_was_set_is_dropped():
    layer = layer_of(np.ones((2, 2), np.float32))
    trainer = trainer_of(layer, "kahan")
    for _ in range(8):
        step(layer.weight, trainer, -1.0)  # 2^-9 to come
    layer.weight.set_data(mx.nd.array([[1, 2.0**-9], [0, -(2.0**-3)]]))
    step(layer.weight, trainer, 0.0)
    found = layer.weight.data().asnumpy() + trainer._updaters[0].extra[0].asnumpy()
    # At 1 the compensation is less than half a spacing; elsewhere more, and not of this weight.
    assert found.tolist() == [[1 + 2.0**-9, 2.0**-9], [0, -(2.0**-3)]]


def test_fp32_parameters_of_a_bfloat16_network_are_updated_in_fp32():
    def run(cast):
        mx.random.seed(0)
        layer = nn.BatchNorm(in_channels=3)
        net = in_sequence(layer, nn.Dense(2, in_units=3))
        net.initialize(mx.init.Normal(0.5))
        if cast:
            mpgluon.cast_block(net, POLICY)
        trainer = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 0.001})
        amp.init_trainer(trainer, "none")
        for _ in range(3):
            with autograd.record():
                outputs = layer(mx.nd.arange(12).reshape((4, 3)))
                backward((outputs * mx.nd.array([1, 2, 3])).sum(), trainer)
            trainer.step(4)
        return layer.beta.data().asnumpy()

    assert not is_bfloat16(run(True))
    assert run(True).tobytes() == run(False).tobytes()


# --- steps that are skipped, devices, the kvstore --------------------------------------------


@EACH_WAY
def test_a_skipped_step_changes_nothing_and_uses_no_random_bits(way):
    def run(overflow_at):
        layer = layer_of(np.linspace(1, 2, 40, dtype=np.float32).reshape(8, 5))
        scale = mpgluon.DynamicLossScale(init_scale=4.0, growth_interval=100)
        trainer = trainer_of(layer, way, loss_scale=scale)
        for number in range(6):
            if number == overflow_at:
                before = layer.weight.data().asnumpy()
                step(layer.weight, trainer, np.inf)
                assert amp.step_was_skipped(trainer)
                assert layer.weight.data().asnumpy().tobytes() == before.tobytes()
            step(layer.weight, trainer, float(number - 2))
        return layer.weight.data().asnumpy()

    assert run(overflow_at=3).tobytes() == run(overflow_at=None).tobytes()


@EACH_WAY
def test_all_devices_round_to_the_same_bits(way):
    layer = layer_of(np.linspace(1, 2, 40, dtype=np.float32).reshape(8, 5), ctx=TWO)
    alone = layer_of(np.linspace(1, 2, 40, dtype=np.float32).reshape(8, 5))
    trainers = [trainer_of(one, way) for one in (layer, alone)]
    for number in range(5):
        for one, trainer in zip((layer, alone), trainers):
            step(one.weight, trainer, float(number - 1))
    expected = alone.weight.data().asnumpy()
    assert_same_bits([one.asnumpy() for one in layer.weight.list_data()], [expected] * 2)


@EACH_WAY
def test_the_number_of_threads_changes_no_bit(way):
    openmp = ctypes.CDLL("libgomp.so.1")
    threads = openmp.omp_get_max_threads()
    weights = []
    try:
        for count in (1, 3):
            openmp.omp_set_num_threads(count)
            layer = layer_of(np.linspace(1, 2, 3000, dtype=np.float32).reshape(40, 75))
            trainer = trainer_of(layer, way)
            for _ in range(3):
                step(layer.weight, trainer, -1.0)
            weights.append(layer.weight.data().asnumpy())
    finally:
        openmp.omp_set_num_threads(threads)
    assert_same_bits(weights[:1], weights[1:])


def test_another_seed_rounds_to_other_bits():
    weights = []
    for seed in (0, 0, 1):
        layer = layer_of(np.ones((8, 5), np.float32))
        trainer = trainer_of(layer, "stochastic", seed=seed)
        for _ in range(5):
            step(layer.weight, trainer, -16.0)
        weights.append(layer.weight.data().asnumpy().tobytes())
    assert weights[0] == weights[1] != weights[2]


def test_each_weight_is_rounded_with_bits_of_its_own():
    net = in_sequence(*(layer_of(np.ones((8, 5), np.float32)) for _ in range(2)))
    trainer = trainer_of(net, "stochastic")
    first, second = (layer.weight for layer in net)
    with autograd.record():
        backward(-16.0 * (first.data().sum() + second.data().sum()), trainer)
    trainer.step(1)
    assert (first.data() != second.data()).asnumpy().any()


def test_weights_that_the_kvstore_would_update_are_refused():
    layer = layer_of(np.ones((2, 2), np.float32), ctx=TWO)
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 0.5})
    for device in TWO:
        with autograd.record():
            loss = layer.weight.data(device).sum()
        loss.backward()
    with pytest.raises(TrainerStateError, match="kvstore, which does not support bfloat16; create"):
        trainer.step(1)
    asked = {"update_on_kvstore": True}
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 0.5}, **asked)
    with pytest.raises(TrainerStateError, match="update_on_kvstore=False"):
        amp.init_trainer(trainer, "none")


def test_without_init_trainer_updates_are_rounded_to_nearest():
    layer = layer_of(np.ones((2, 2), np.float32))
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 3 * 2.0**-10})
    with autograd.record():
        loss = layer.weight.data().sum()
    loss.backward()
    trainer.step(1)
    assert (layer.weight.data().asnumpy() == 1 - 2.0**-8).all()  # the tie went to the even one


# --- masters ---------------------------------------------------------------------------------


@BOTH
def test_masters_have_the_bits_of_autocast_and_weights_are_them_rounded(hybridize):
    def run(cast):
        mx.random.seed(0)
        net = in_sequence(
            nn.Conv2D(4, 3, in_channels=2), nn.BatchNorm(in_channels=4), nn.Dense(3, in_units=64)
        )
        net.initialize(mx.init.Normal(0.5))
        mpgluon.cast_block(net, POLICY) if cast else amp.autocast(net, EMULATED)
        if hybridize:
            net.hybridize(static_alloc=True, static_shape=True)
        trainer = trainer_of(net, "masters", learning_rate=0.05, momentum=0.9)
        for _ in range(4):
            with autograd.record():
                backward((net(mx.nd.random.normal(shape=(4, 2, 6, 6))) ** 2).sum(), trainer)
            trainer.step(40)
        return net

    net, expected = run(True), parameters_of(run(False))
    narrow = [name for name in expected if name[0] != "1"]
    rounded = {name: round_to(expected[name], BFLOAT16) for name in narrow}
    assert_same_bits({name: parameters_of(net)[name] for name in narrow}, rounded)
    mpgluon.restore(net)
    assert_same_bits(parameters_of(net), expected)


def test_masters_begin_before_the_cast_and_follow_weights_that_are_set():
    layer = layer_of(np.float32([[0.1, 0.2]]))
    trainer = trainer_of(layer, "masters")
    step(layer.weight, trainer, 0.0)
    assert fp32.known(layer.weight).asnumpy().tolist() == np.float32([[0.1, 0.2]]).tolist()
    layer.weight.set_data(mx.nd.array([[0.1, 0.75]]))
    step(layer.weight, trainer, 0.0)
    expected = round_to(np.float32([[0.1, 0.75]]), BFLOAT16)
    assert layer.weight.data().asnumpy().tobytes() == expected.tobytes()


def test_trainer_states_keep_masters_and_refuse_compensations(tmp_path):
    path = str(tmp_path / "states")
    layer = layer_of(np.float32([[0.1, 0.2]]))
    trainer = trainer_of(layer, "masters", momentum=0.5)
    step(layer.weight, trainer, 1.0)
    trainer.save_states(path)
    master = fp32.known(layer.weight).asnumpy()
    step(layer.weight, trainer, 1.0)
    trainer.load_states(path)
    assert trainer._updaters[0].masters[0].asnumpy().tobytes() == master.tobytes()

    layer = layer_of(np.float32([[0.1, 0.2]]))
    trainer = trainer_of(layer, "kahan")
    step(layer.weight, trainer, 1.0)
    with pytest.raises(TrainerStateError, match=r"save with mpgluon\.save_checkpoint"):
        trainer.save_states(path)


@pytest.mark.parametrize("way", ["masters", "kahan"])
def test_an_average_swaps_in_rounded_and_out_bit_for_bit(way):
    layer = layer_of(np.linspace(1, 2, 12, dtype=np.float32).reshape(3, 4))
    trainer = trainer_of(layer, way)
    average = mpgluon.WeightAverage(trainer, 0.5)
    for _ in range(3):
        step(layer.weight, trainer, -3.0)
        average.update()
    before = layer.weight.data().asnumpy()
    exact = average.value_of(layer.weight).asnumpy()
    with average.swapped_in():
        inside = layer.weight.data().asnumpy()
        assert inside.tobytes() == round_to(exact, BFLOAT16).tobytes()
    assert layer.weight.data().asnumpy().tobytes() == before.tobytes()
    assert is_bfloat16(exact) == (way == "kahan" and (exact == before).all())
    step(layer.weight, trainer, 0.0)


# --- refusals and warnings -------------------------------------------------------------------


def test_update_rounding_without_bfloat16_weights_or_with_masters_is_refused():
    plain = nn.Dense(1, in_units=1)
    plain.initialize()
    trainer = gluon.Trainer(plain.collect_params(), "sgd")
    with pytest.raises(ValueError, match=r"'kahan' is for bfloat16 weights .*cast_block\(net, "):
        amp.init_trainer(trainer, update_rounding="kahan")
    layer = layer_of(np.ones((1, 1), np.float32))
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {"multi_precision": True})
    with pytest.raises(ValueError, match=r"'stochastic' is for .* multi_precision=True and "):
        amp.init_trainer(trainer, update_rounding="stochastic")
    amp.init_trainer(trainer)  # a refusal has changed nothing


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"update_rounding": "up"}, ValueError, "one of nearest, stochastic, kahan; received 'up'"),
        ({"rounding_seed": -1}, ValueError, "rounding_seed must be at least 0, received -1"),
        ({"rounding_seed": 0.5}, TypeError, "rounding_seed must be an int, received 0.5"),
        ({"rounding_seed": True}, TypeError, "rounding_seed must be an int, received True"),
    ],
)
def test_a_bad_argument_is_refused(arguments, error, message):
    layer = layer_of(np.ones((1, 1), np.float32))
    trainer = gluon.Trainer(layer.collect_params(), "sgd")
    with pytest.raises(error, match=message):
        amp.init_trainer(trainer, **arguments)


@pytest.mark.parametrize(("way", "warns"), [("nearest", 1), ("masters", 0), ("kahan", 0)])
def test_a_warning_says_which_updates_will_be_lost(way, warns, caplog):
    trainer_of(layer_of(np.ones((1, 1), np.float32)), way)
    warnings = [one for one in caplog.messages if "without FP32 masters" in one]
    assert len(warnings) == warns
    assert all("below 1/512 of their weight are lost" in one for one in warnings)
    assert all("update_rounding=" in one for one in warnings)
