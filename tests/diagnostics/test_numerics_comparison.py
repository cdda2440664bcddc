"""Ten planted differences between two runs, each named by the comparison of their recordings."""

from __future__ import annotations

import functools
import math

from mpgluon import diagnostics
from mpgluon.base.processor import computing_threads
from mpgluon.errors import CheckpointError
from mpgluon_tools.recorder.numerics.differences import difference_of

import mxnet as mx
import numpy as np
import pytest
from diagnostics_helpers import recorded
from mxnet import gluon
from mxnet.gluon import nn
from numerics_runs import BATCH, CLASSES, Run

compare = diagnostics.compare_numerics


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    @functools.cache
    def train(**options):
        return Run(**options).train(tmp_path_factory.mktemp("reference"))

    return train


def planted(tmp_path, change=None, before_step=None, **options):
    run = Run(**options)
    if change is not None:
        change(run)
    if before_step is not None:
        run.before_step = before_step
    return run.train(tmp_path / "other")


def at(step):
    """Do something before one step."""

    def decorate(function):
        return lambda run, number: function(run) if number == step else None

    return decorate


def test_the_same_run_twice_is_equal(reference, tmp_path):
    found = compare(reference(), planted(tmp_path))
    assert (found.step, found.agrees_until, found.compared) == (None, 5, 5)
    assert str(found) == "No difference in 5 recorded steps, 1 to 5."


@at(3)
def round_up(run):
    weight = run.net[3].weight.data()
    code = weight.asnumpy()
    code[0, 0] = np.nextafter(code[0, 0], np.float16(np.inf))
    weight[:] = mx.nd.array(code, dtype="float16")


def transpose(run):
    weight = run.net[0].weight.data()
    weight[:] = weight.swapaxes(2, 3)


def swap_labels(run):
    first = run.labels[2]
    other = np.flatnonzero(first != first[0])[0]
    first[[0, other]] = first[[other, 0]]


@at(4)
def lose_momentum(run):
    for updater in run.trainer._updaters:
        for momentum in updater.states.values():
            momentum[:] = 0


@at(4)
def lose_states(run):
    run.trainer._updaters[0].states.clear()
    run.trainer._updaters[0].states_synced.clear()


def decode_again(run):
    run.images[1] = np.round(run.images[1] * 255) / 255


class Faulty(nn.Activation):
    """The same result; its gradient is that of half of it."""

    def hybrid_forward(self, F, x):
        result = F.relu(x)
        return result * 0.5 + F.BlockGrad(result) * 0.5


def one_layer_more(run):
    run.net.add(nn.Dense(5, in_units=5))
    run.net[6].initialize(mx.init.Xavier())


CHANGES = {
    # The change; the step that differs; attributes of the difference; words.
    "another epsilon of a batch norm": (
        lambda run: run.net[1]._kwargs.update(eps=1e-2),
        1, {"kind": "activation", "name": "1", "block": "BatchNorm", "is_rounding": False},
        # It normalizes each channel over 8 images of 6 by 6 pixels.
        ["computes something else. Rounding alone does not explain it: sums of 288 numbers"]),
    "a lost cast": (
        lambda run: setattr(run, "cast_options", {"keep_fp32": [nn.BatchNorm, run.net[5]]}),
        1, {"id": ("weight", "5.weight", 0), "formats": ("float16", "float32")},
        ["a cast, or a layer in FP32, was lost or added"]),
    "a transposed weight": (transpose, 1, {"id": ("weight", "0.weight", 0)},
        ["The norm is the same, as of a transposed"]),
    "a swapped label": (swap_labels, 3, {"kind": "label", "differing": 2},
        ["The labels are not the same ones, while the inputs are."]),
    "a frozen layer": (
        lambda run: run.net[3].collect_params().setattr("grad_req", "null"), 1, {},
        ["the gradient of 3.weight is in the first recording only",
         "3.weight is frozen in the other (its grad_req is 'null')"]),
    "another image decoder": (decode_again, 2, {"id": ("input", "0", 0)},
        ["another order, augmentation, decoder or normalization"]),
    "a fault in a backward pass": (
        lambda run: setattr(run.net[2], "__class__", Faulty), 1,
        {"id": ("activation gradient", "1", 0)},
        ["the backward pass of what takes its result differs"]),
    "another network": (one_layer_more, 1, {},
        ["networks: the second alone has weight of 6.weight, weight of 6.bias, activation of 6"]),
    "another learning rate": (lambda run: run.options.update(learning_rate=0.06), 1, {},
        ["learning rate 0.05 and 0.06"]),
    "another loss scale": (lambda run: setattr(run, "scale", 8.0), 1, {},
        ["loss scale 16.0 and 8.0"]),
    "another weight decay": (lambda run: run.options.update(wd=1e-2), 1, {},
        ["in the update: update of"]),
    "another loss": (
        lambda run: setattr(run, "loss_fn", gluon.loss.SoftmaxCrossEntropyLoss(weight=2.0)), 1, {},
        ["in the forward pass: loss"]),
    "one number rounded to the other side": (lambda run: setattr(run, "before_step", round_up),
        3, {"id": ("weight", "3.weight", 0), "differing": 1, "units": 1.0},
        ["step 2 left equal ones, so they were changed after it"]),
    "another random state": (
        lambda run: setattr(run, "before_step", at(2)(lambda run: setattr(run, "seed", 100))),
        2, {"block": "Dropout"}, ["another random state"]),
    "a lost momentum": (lambda run: setattr(run, "before_step", lose_momentum),
        4, {"kind": "state"},
        ["The optimizer's arrays (such as the momentum) differ before the step",
         "step 3 computed other ones, or they were changed after it"]),
    "an optimizer whose state is gone": (lambda run: setattr(run, "before_step", lose_states),
        4, {}, ["lost where the run was continued"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_with_its_step_and_place(reference, tmp_path, name):
    change, step, attributes, words = CHANGES[name]
    found = compare(reference(), planted(tmp_path, change))
    assert (found.step, found.agrees_until or 0) == (step, step - 1)
    for attribute, value in attributes.items():
        of = found.difference.id if attribute in ("kind", "name") else found.difference
        assert getattr(of, attribute) == value
    assert all(word in found.sentence for word in words)


class Turned(nn.Dense):
    """The same numbers, added from the other end, as another library may."""

    def hybrid_forward(self, F, x, weight, bias=None):
        flat, turned = F.reverse(F.Flatten(x), axis=1), F.reverse(weight, axis=1)
        return F.FullyConnected(flat, turned, bias, num_hidden=self._units, flatten=True)


class TurnedBatch:
    """The same layer, which adds its batch from the other end, forward or backward."""

    def hybrid_forward(self, F, x, *args, **parameters):
        result = super().hybrid_forward(F, F.reverse(x, axis=0), *args, **parameters)
        return F.reverse(result, axis=0)


class TurnedConvolution(TurnedBatch, nn.Conv2D):
    pass


class TurnedNorm(TurnedBatch, nn.BatchNorm):
    pass


@pytest.mark.parametrize(
    ("cast", "place", "other", "frozen", "name", "terms"),
    [
        (None, 3, Turned, "", ("activation", "3"), 4 * 36),
        (None, 1, TurnedNorm, "", ("activation", "1"), BATCH * 36),
        ("float16", 1, TurnedNorm, "", ("activation", "1"), BATCH * 36),
        (None, 0, TurnedConvolution, "", ("gradient", "0.weight"), BATCH * 36),
        # Gradients that arrive from a BatchNorm add up to 0: only their roundings are left.
        (None, 0, TurnedConvolution, "0.weight", ("gradient", "0.bias"), BATCH * 36),
        ("float16", 0, TurnedConvolution, "", ("gradient", "0.bias"), BATCH * 36),
    ],
)
def test_sums_in_another_order(tmp_path, cast, place, other, frozen, name, terms):
    folders = []
    for layer in (None, other):
        run = Run(cast=cast, dropout=0.0)
        if layer is not None:
            run.net[place].__class__ = layer
        if frozen:
            run.net._collect_params_with_prefix()[frozen].grad_req = "null"
        folders.append(run.train(tmp_path / str(len(folders)), steps=1, arrays=(1, 1)))
    found = compare(*folders)
    assert found.difference.id[:2] == name
    assert (found.difference.is_rounding, found.difference.terms) == (True, terms)
    assert f"Rounding can explain it: sums of {terms} numbers in another order" in str(found)


def test_a_parameter_that_no_step_uses(reference, tmp_path):
    def without_bias(F, x, weight, **_):
        return F.FullyConnected(x, weight, no_bias=True, num_hidden=CLASSES)

    @at(1)
    def leave_out(run):
        run.net[5].hybrid_forward = without_bias
        run.trainer.step = functools.partial(run.trainer.step, ignore_stale_grad=True)

    found = compare(reference(cast=None), planted(tmp_path, before_step=leave_out, cast=None))
    assert found.step == 1
    assert "the gradient of 5.bias is in the first recording only" in found.sentence
    assert "(its grad_req is 'null'), or not used" in found.sentence


def with_adam(run):
    run.optimizer, run.cast, run.options = "adam", None, {"learning_rate": 0.01, "wd": 1e-4}


def smooth_labels(run):
    def loss(logits, labels):
        smooth = mx.nd.one_hot(labels, CLASSES) * 0.9 + 0.1 / CLASSES
        return gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False)(logits, smooth)

    run.loss_fn = loss


SETTINGS = {
    # The change, what both runs have; the step, kind and name that are to be found.
    "momentum of a BatchNorm": (
        lambda run: run.net[1]._kwargs.update(momentum=0.8), (), (1, "running statistic", "1.run")
    ),
    "rate of a Dropout": (
        lambda run: setattr(run.net[4], "_rate", 0.4), (), (1, "activation", "4")
    ),
    "weight decay of a bias, Adam": (
        lambda run: setattr(run.net[5].bias, "wd_mult", 1.5), (with_adam,), (2, "update", "5.bias")
    ),
    "weight decay of a weight": (
        lambda run: setattr(run.net[3].weight, "wd_mult", 1.01), (), (1, "update", "3.weight")
    ),
    "momentum of SGD": (
        lambda run: run.options.update(momentum=0.8), (), (2, "update", "0.weight")
    ),
    "beta2 of Adam": (
        lambda run: run.options.update(beta2=0.99), (with_adam,), (1, "update", "0.weight")
    ),
    "smoothed labels": (smooth_labels, (), (1, "loss", "")),
    "order of the batches": (
        lambda run: setattr(run, "images", run.images[::-1]), (), (1, "input", "0")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_is_placed_and_not_said_to_be_rounding_or_chance(tmp_path, name):
    change, both, (step, kind, of) = SETTINGS[name]
    folders = []
    for changes in (both, (*both, change)):
        run = Run()
        for one in changes:
            one(run)
        folders.append(run.train(tmp_path / str(len(folders)), steps=2))
    found = compare(*folders)
    assert (found.step, found.difference.id.kind) == (step, kind)
    assert found.difference.id.name.startswith(of)
    assert found.difference.is_rounding in (False, None)
    for untrue in ("can explain", "changed after", "another random state", "were lost"):
        assert untrue not in found.sentence


def test_a_difference_between_recorded_steps_asks_for_all_of_them(tmp_path):
    @at(3)
    def nudge(run):
        run.net[5].bias.data()[:] += 1

    plain = Run().train(tmp_path / "a", every=4)
    other = Run()
    other.before_step = nudge
    found = compare(plain, other.train(tmp_path / "b", every=4))
    assert (found.step, found.agrees_until) == (4, 1)
    assert "record each of these (every=1)" in found.sentence


def test_steps_without_activations_name_the_gradient_and_ask_for_them(tmp_path):
    options = {"every": 2, "activations_every": 100}
    plain, other = Run(), Run()

    @at(2)
    def change_loss(run):
        run.loss_fn = gluon.loss.SoftmaxCrossEntropyLoss(weight=2.0)

    other.before_step = change_loss
    folders = plain.train(tmp_path / "a", **options), other.train(tmp_path / "b", **options)
    found = compare(*folders)
    assert (found.step, found.difference.id.kind) == (2, "loss")
    assert "record them (activations_every=1) to see the layer" in found.sentence


def test_a_recording_with_activations_and_one_without_are_of_one_network(tmp_path):
    folders = [Run().train(tmp_path / str(n), every=2, activations_every=n) for n in (2, 100)]
    assert compare(*folders).step is None


def test_all_values_of_one_and_some_of_the_other_compare_those_that_both_have(tmp_path):
    other = Run()
    other.images[1] += 1
    folder = other.train(tmp_path / "b", arrays=(2, 2))
    found = compare(Run().train(tmp_path / "a"), folder)
    assert (found.difference.differing, found.difference.values) == (16, 16)
    assert "16 of the 16 values that are kept of 864 differ" in found.sentence


def test_settings_that_differ_stand_with_the_first_difference(tmp_path, monkeypatch):
    folders = [
        Run(cast=None).train(tmp_path / name, every=2, activations_every=number)
        for name, number in (("a", 2), ("b", 4))
    ]
    other = Run(cast=None)
    other.images += 1
    monkeypatch.setenv("OMP_NUM_THREADS", str(computing_threads() + 1))
    found = compare(folders[0], other.train(tmp_path / "c", every=2, activations_every=4))
    threads = computing_threads()
    words = (
        "The recordings also differ in: activations every 2 and 4; threads "
        f"{threads - 1} and {threads}."
    )
    assert found.settings == words
    assert words in str(found)
    assert compare(*folders).settings == ""


def test_whole_arrays_count_every_number(tmp_path):
    def one_pixel(run):
        run.images[1, 0, 0, 0, 1] += 1e-6

    plain = Run().train(tmp_path / "a", arrays=(2, 2))
    other = Run()
    one_pixel(other)
    folder = other.train(tmp_path / "b", arrays=(2, 2))
    found = compare(plain, folder)
    assert (found.difference.differing, found.difference.values) == (1, 8 * 3 * 36)
    sampled = compare(Run().train(tmp_path / "c"), folder)
    assert sampled.difference.differing == 0
    assert "but not in the 16 values" in sampled.sentence


def test_another_number_of_devices(reference, tmp_path):
    run = Run()
    run.devices = [mx.cpu(0), mx.cpu(1)]
    found = compare(reference(), run.train(tmp_path / "two"))
    assert "the layers are called up to 1 and 2 times in a step, as on another" in found.sentence


def test_no_step_in_common(tmp_path):
    a = Run().train(tmp_path / "a", steps=1)
    Run().train(tmp_path / "b", steps=2, every=2)
    (tmp_path / "b" / "step-00000001.npz").unlink()
    with pytest.raises(CheckpointError, match="no recorded step in common: steps 1 to 1"):
        compare(a, tmp_path / "b")


@pytest.mark.parametrize(
    ("a", "b", "fmt", "differing", "units"),
    [
        ([1, np.nan, np.inf], [1, np.nan, np.inf], "float32", 0, math.nan),
        ([1, np.nan], [1, 2], "float32", 1, math.inf),
        # Units of the larger number: from 2 on they are twice as large as below.
        ([2, 1], [2 - 2**-22, 1], "float32", 1, 1.0),
        ([2, 1], [2 - 2**-9, 1 + 2**-10], "float16", 2, 1.0),
        ([2**-24, 1], [2**-23, 1], "float16", 1, 1.0),  # of subnormal numbers
    ],
)
def test_differences_are_counted_in_units_of_the_larger_number(a, b, fmt, differing, units):
    found = difference_of(recorded(a, fmt), recorded(b, fmt))
    assert found.differing == differing
    assert found.units == units or (math.isnan(found.units) and math.isnan(units))


def test_numbers_in_another_format_are_never_a_rounding_of_sums():
    found = difference_of(recorded([1, 2], "float16"), recorded([1, 2]), terms=100)
    assert found.is_rounding is False
    assert str(found) == "float16 and float32"
