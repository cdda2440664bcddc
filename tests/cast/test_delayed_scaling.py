"""Scales from the largest values of earlier steps: the arithmetic, and the state that it needs."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import islice

from mpgluon import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    CheckpointError,
    Policy,
    amp,
    diagnostics,
    load_checkpoint,
    round_to,
    save_checkpoint,
)
from mpgluon.base.archive import read_archive, write_archive
from mpgluon.checkpoint.scale_histories import scale_histories
from mpgluon.formats.scaling import scale_exponents
from mpgluon.kernels.scale_histories import ScaleHistories, ScaleHistory
from mpgluon_tools.recorder.steps.recorded_step import RECORDED_STEP

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, STATIC, autocast_net, in_sequence, initialized
from mxnet import autograd, gluon
from mxnet.gluon import nn

pytestmark = [
    pytest.mark.usefixtures("native_operators"),
    pytest.mark.filterwarnings("ignore:Parameter .* is not used"),
]

DATA, WEIGHT, GRADIENT = range(3)


def delayed(steps):
    policy = Policy.parse("mixed_float8")
    return replace(policy, products=replace(policy.products, amax_history=steps))


class Reference:
    """A dense layer, and the largest values of its operands in all earlier steps."""

    def __init__(self, steps):
        self.steps, self.earlier = steps, []

    def rounded(self, values, operand):
        fmt = FLOAT8_E5M2 if operand == GRADIENT else FLOAT8_E4M3
        known = [step[operand] for step in self.earlier[-self.steps :]]
        scale = scale_exponents(max(known, default=0) or np.abs(values).max(), fmt)
        clipped = np.clip(np.ldexp(values.astype(np.float64), scale), -fmt.max, fmt.max)
        return np.ldexp(round_to(clipped, fmt), -scale)

    def step(self, passes):
        """Return the results and both gradients of each pass of a step."""
        found = []
        for data, weight, arriving in passes:
            x, w = self.rounded(data, DATA), self.rounded(weight, WEIGHT)
            g = self.rounded(arriving, GRADIENT)
            found.append([round_to(one, BFLOAT16) for one in (x @ w.T, g @ w, g.T @ x)])
        largest = [[np.abs(one).max() for one in operands] for operands in passes]
        self.earlier.append(np.max(largest, axis=0))
        return found


class Middle(nn.HybridBlock):
    """A dense layer between two others, which are the first and the last of the network."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.Dense(1)
            self.layer = nn.Dense(8, in_units=16, use_bias=False)
            self.last = nn.Dense(1)

    def hybrid_forward(self, F, x):
        return self.layer(x)


def middle(steps, *, hybridize=True, devices=None):
    net = autocast_net(initialized(Middle(), ctx=devices or mx.cpu()), delayed(steps))
    net.hybridize(hybridize, **STATIC)
    return net


def values_of(random, *shape, scale=1.0):
    """Return bfloat16 numbers, sums of whose products are exact."""
    values = random.uniform(0.25, 2, shape) * random.choice([-1, 1], shape)
    return round_to((values * scale).astype(np.float32), BFLOAT16)


def run(net, data, weight, arriving, device=None):
    """Return the result and the gradients of a pass."""
    net.layer.weight.set_data(mx.nd.array(weight))
    images = mx.nd.array(data, ctx=device or mx.cpu())
    images.attach_grad()
    with autograd.record():
        result = net(images)
    result.backward(mx.nd.array(arriving, ctx=device or mx.cpu()))
    gradient = net.layer.weight.grad(device or mx.cpu())
    return [one.asnumpy() for one in (result, images.grad, gradient)]


def operands(random, scale=1.0):
    return (
        values_of(random, 4, 16, scale=scale),
        values_of(random, 8, 16, scale=scale / 2),
        values_of(random, 4, 8, scale=scale / 1024),
    )


@BOTH
def test_scales_follow_from_the_largest_values_of_the_last_steps(hybridize):
    random, reference = np.random.RandomState(0), Reference(2)
    net = middle(2, hybridize=hybridize)
    saturated = 0
    for scale in (1, 1, 64, 1, 2**-10, 2**-10, 2**-10, 4096, 1):  # 2**-10 vanishes next to 64
        given = operands(random, scale)
        expected = reference.step([given])[0]
        for one, other in zip(run(net, *given), expected):
            np.testing.assert_array_equal(one, other)
        saturated += (reference.rounded(given[0], DATA) != given[0]).any()
    assert saturated
    (history,) = scale_histories(net).values()
    np.testing.assert_array_equal(history[0], np.transpose(reference.earlier[-2:]))


def test_inference_scales_as_the_next_step_would_and_changes_no_history():
    random, reference = np.random.RandomState(1), Reference(3)
    net = middle(3)
    for scale in (1, 4):
        given = operands(random, scale)
        run(net, *given)
        reference.step([given])
    before = scale_histories(net)
    data, weight, _ = operands(random, 512)
    net.layer.weight.set_data(mx.nd.array(weight))
    expected = reference.rounded(data, DATA) @ reference.rounded(weight, WEIGHT).T
    np.testing.assert_array_equal(net(mx.nd.array(data)).asnumpy(), round_to(expected, BFLOAT16))
    after = scale_histories(net)
    assert {name: value.tolist() for name, value in after.items()} == {
        name: value.tolist() for name, value in before.items()
    }


@BOTH
def test_all_passes_before_a_backward_pass_have_the_scales_of_one_step(hybridize):
    random, reference = np.random.RandomState(2), Reference(4)
    net = middle(4, hybridize=hybridize)
    given = operands(random)
    run(net, *given)
    reference.step([given])
    _, weight, _ = operands(random, 2)
    passes = [(one[0], weight, one[2]) for one in (operands(random, 2), operands(random, 128))]
    expected = reference.step(passes)
    net.layer.weight.set_data(mx.nd.array(weight))
    images = [mx.nd.array(data) for data, _, _ in passes]
    for one in images:
        one.attach_grad()
    with autograd.record():
        results = [net(one) for one in images]
    autograd.backward(results, [mx.nd.array(arriving) for _, _, arriving in passes])
    for result, image, (of_result, of_data, _) in zip(results, images, expected):
        np.testing.assert_array_equal(result.asnumpy(), of_result)
        np.testing.assert_array_equal(image.grad.asnumpy(), of_data)
    (history,) = scale_histories(net).values()
    np.testing.assert_array_equal(history[0, :, -2:], np.transpose(reference.earlier))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_gives_nan_and_enters_no_history(bad):
    random = np.random.RandomState(3)
    net = middle(3)
    data, weight, arriving = operands(random)
    run(net, data, weight, arriving)
    broken = arriving.copy()
    broken[3, 7] = bad
    result, of_data, of_weight = run(net, data, weight, broken)
    assert np.isfinite(result).all()
    assert np.isnan(of_data).all()
    assert np.isnan(of_weight).all()
    (history,) = scale_histories(net).values()
    assert history[0, GRADIENT].tolist() == [0, np.abs(arriving).max(), 0]
    assert np.isfinite(run(net, data, weight, arriving)[1]).all()


def test_each_device_has_its_own_history():
    random, devices = np.random.RandomState(4), [mx.cpu(0), mx.cpu(1)]
    net = middle(2, devices=devices)
    for place, device in enumerate(devices):
        for scale in (1, 2):
            run(net, *operands(random, scale * 16**place), device=device)
    (history,) = scale_histories(net).values()
    assert history.shape == (2, 3, 2)
    assert (history[1] > 4 * history[0]).all()


def test_a_new_cast_starts_without_largest_values_of_earlier_steps():
    random = np.random.RandomState(5)
    net = middle(5)
    run(net, *operands(random, 64))
    amp.restore(net)
    gc.collect()  # frees the numbers of its histories, for the next cast
    amp.autocast(net, delayed(5))
    net.hybridize(**STATIC)
    given, reference = operands(random), Reference(5)
    for one, other in zip(run(net, *given), reference.step([given])[0]):
        np.testing.assert_array_equal(one, other)


def network():
    mx.random.seed(3)
    net = in_sequence(
        nn.Conv2D(16, 3, in_channels=3),
        nn.Conv2D(16, 3, in_channels=16),
        nn.Dense(8),
        nn.Dense(4, in_units=8),
    )
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 3, 8, 8)))
    return net


def trained(policy):
    net = autocast_net(network(), policy)
    net.hybridize(**STATIC)
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})


def train(net, trainer, batches):
    losses = []
    for seed in batches:
        random = np.random.RandomState(seed)
        images = mx.nd.array(random.normal(size=(8, 3, 8, 8)) * 2.0 ** (seed % 5))
        labels = mx.nd.array(random.randint(0, 4, 8))
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(images), labels)
        autograd.backward(loss)
        trainer.step(8)
        losses.append(loss.asnumpy().tolist())
    return losses


def weights_of(net):
    return [p.data().asnumpy().tobytes() for p in net.collect_params().values()]


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path):
    net, trainer = trained(delayed(4))
    train(net, trainer, range(6))
    save_checkpoint(tmp_path / "run.npz", net, trainer)
    losses = train(net, trainer, range(6, 12))
    other, its_trainer = trained(delayed(4))
    load_checkpoint(tmp_path / "run.npz", other, its_trainer)
    assert train(other, its_trainer, range(6, 12)) == losses
    assert weights_of(other) == weights_of(net)
    forgetful, its_trainer = trained(delayed(4))
    load_checkpoint(without_histories(tmp_path / "run.npz"), forgetful, its_trainer)
    assert train(forgetful, its_trainer, range(6, 12)) != losses  # so the histories do count


def without_histories(path):
    header, arrays = read_archive(path)
    kept = {name: one for name, one in arrays.items() if not name.startswith("scale_history/")}
    write_archive(path.with_name("without.npz"), header, kept)
    return path.with_name("without.npz")


def test_a_checkpoint_of_other_steps_or_another_policy_can_be_loaded(tmp_path):
    net, trainer = trained(delayed(4))
    train(net, trainer, range(6))
    save_checkpoint(tmp_path / "run.npz", net, trainer)
    known = scale_histories(net)
    assert known.keys() == {"2/0", "3/0"}  # the network itself is block 0
    for steps in (2, 7):
        other, its_trainer = trained(delayed(steps))
        load_checkpoint(tmp_path / "run.npz", other, its_trainer)
        for name, found in scale_histories(other).items():
            kept = min(steps, 4)
            np.testing.assert_array_equal(found[..., -kept:], known[name][..., -kept:])
            assert not found[..., :-kept].any()
    current, its_trainer = trained(Policy.parse("mixed_float8"))
    load_checkpoint(tmp_path / "run.npz", current, its_trainer)
    assert scale_histories(current) == {}
    save_checkpoint(tmp_path / "current.npz", current, its_trainer)
    load_checkpoint(tmp_path / "current.npz", net, trainer)
    assert not any(one.any() for one in scale_histories(net).values())


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((1, 3, 4)), np.zeros((3, 4), np.float32), np.zeros((1, 2, 4), np.float32),
        np.full((1, 3, 4), -1, np.float32), np.full((1, 3, 4), np.nan, np.float32),
        np.zeros((0, 3, 4), np.float32),
    ],
)  # fmt: skip
def test_a_damaged_history_is_refused_and_nothing_is_changed(bad, tmp_path):
    net, trainer = trained(delayed(4))
    train(net, trainer, range(2))
    save_checkpoint(tmp_path / "run.npz", net, trainer)
    header, arrays = read_archive(tmp_path / "run.npz")
    write_archive(tmp_path / "bad.npz", header, {**arrays, "scale_history/2/0": bad})
    train(net, trainer, range(2))
    before = weights_of(net)
    with pytest.raises(CheckpointError, match="2/0 in earlier steps"):
        load_checkpoint(tmp_path / "bad.npz", net, trainer)
    assert weights_of(net) == before


def test_diagnostics_leave_the_histories_as_they_are():
    net, trainer = trained(delayed(4))
    train(net, trainer, range(3))
    before = scale_histories(net)
    images, labels = mx.nd.random.normal(shape=(8, 3, 8, 8)) * 64, mx.nd.arange(8) % 4
    batch = diagnostics.Batch(images, labels, gluon.loss.SoftmaxCrossEntropyLoss())
    diagnostics.range_report(net, batch, fmt=FLOAT8_E4M3)
    diagnostics.locate_overflow(net, batch)
    after = scale_histories(net)
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def test_a_recorded_step_is_replayed_with_its_scales(tmp_path):
    net, trainer = trained(delayed(4))
    amp.init_trainer(trainer, 2.0**118)
    recorder = diagnostics.FlightRecorder(net, trainer, tmp_path / "steps")
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    for factor in (0.5, 0.25, 2.0**10):  # the last one's gradients are infinite in some layers
        images, labels = mx.nd.random.normal(shape=(8, 3, 8, 8)) * factor, mx.nd.arange(8) % 4
        with recorder.step(images, labels):
            with autograd.record():
                loss = loss_fn(net(images), labels)
                with amp.scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
            trainer.step(8)
    (path,) = (tmp_path / "steps").iterdir()
    again = diagnostics.replay(path, network(), cures=False)
    marks = [mark for of_all in again.recorded.gradients.values() for mark in of_all]
    assert any(mark.not_finite for mark in marks)
    assert not all(mark.not_finite for mark in marks)
    assert again.same_bits
    header, arrays = read_archive(path, kind=RECORDED_STEP)
    kept = {name: one for name, one in arrays.items() if not name.startswith("scale_history/")}
    assert len(arrays) - len(kept) == 2
    write_archive(path, header, kept, RECORDED_STEP)
    assert not diagnostics.replay(path, network(), cures=False).same_bits


def test_amax_history_is_parsed_printed_and_validated():
    policy = Policy.parse(
        "compute=float8_e4m3,gradient=float8_e5m2,scaling=tensor,between=bfloat16,amax_history=16"
    )
    assert policy == delayed(16)
    assert "from the largest values of 16 steps" in str(amp.autocast(network(), policy))
    bad = ("mx,amax_history=4", "none,amax_history=4", "tensor,amax_history=-1",
           "tensor,amax_history=many", "tensor,amax_history=1.5")  # fmt: skip
    for text in bad:
        with pytest.raises(ValueError, match="amax_history is a number of steps"):
            Policy.parse(f"compute=float8_e4m3,between=bfloat16,scaling={text}")
    with pytest.raises(ValueError, match="received True"):
        delayed(True)


@pytest.mark.usefixtures("native_operators")
def test_a_history_that_is_used_again_begins_without_values():
    first = ScaleHistory(7)  # steps that no other test has
    first.set_values(0, np.ones((3, 7)))
    number = first.number
    del first
    again = ScaleHistory(7)
    assert again.number == number
    assert not again.values(0).any()


@pytest.mark.usefixtures("native_operators")
def test_each_product_has_a_history_of_its_own():
    histories = ScaleHistories(2)
    turns = [list(islice(histories.in_turn(), 3)) for _ in range(2)]
    assert turns[0] == turns[1]
    assert len({*turns[0]}) == 3
