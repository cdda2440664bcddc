"""Checkpoints with valid checksums and edited contents: used as they are, or refused unchanged."""

import copy
import functools
import math
import operator

import mpgluon
from mpgluon import CheckpointError
from mpgluon.checkpoint import load_checkpoint, read_extra, save_checkpoint

import mxnet as mx
import numpy as np
import pytest
from test_checkpoint import ADAM, NADAM, SGD, TWO, Training, read_file, write_file

VALUES = [None, -1, 7, 1.5, 1e30, True, math.inf, -(10**400), "text", [0], {"text": 1}]
REMOVED = object()


def places_in(value, place=()):
    """Yield the path of every field, and of the first and the last element of long lists."""
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = sorted({0: value[0], len(value) - 1: value[-1]}.items()) if value else []
    else:
        inner = []
    for name, one in inner:
        yield (*place, name)
        yield from places_in(one, (*place, name))


def edited(header, place, value):
    header = copy.deepcopy(header)
    parent = header
    for name in place[:-1]:
        parent = parent[name]
    if value is REMOVED:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    return header


def refused_or_usable(path, training, original):
    """Load a file; if it is refused, nothing has changed, else the next step can be made."""
    before = training.everything()
    message = None
    try:
        load_checkpoint(path, training.net, training.trainer)
    except CheckpointError as error:
        message = str(error)
    if message is not None:
        assert str(path) in message
        assert training.everything() == before
        return True
    training.train(1)
    np.random.random(700)
    np.random.standard_normal(2)
    load_checkpoint(original, training.net, training.trainer)
    return False


# The loss scale and the average are in the first, Nadam's schedule in the second.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "optimizer", "averaged", "schedule"),
    [
        ("float16", SGD, True, False),
        ("float32", NADAM, False, False),
        ("bfloat16 weights kahan", ADAM, False, True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*learning rate:UserWarning")
def test_any_edited_field_is_refused_or_can_be_used(tmp_path, way, optimizer, averaged, schedule):
    name, options = optimizer
    if schedule:
        scheduler = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.01)
        optimizer = (name, {**options, "lr_scheduler": scheduler})
    training = Training(way, optimizer)
    average = mpgluon.WeightAverage(training.trainer, 0.9) if averaged else None
    training.train(2)
    if average is not None:
        average.update()
    original, path = tmp_path / "original.npz", tmp_path / "edited.npz"
    save_checkpoint(original, training.net, training.trainer, epoch=3)
    fields, arrays = read_file(original)
    places = list(places_in(fields))
    refusals = 0
    for place in places:
        for value in (REMOVED, *VALUES):
            if place[:2] == ("trainer", "lr_scheduler") and isinstance(value, (int, float)):
                continue  # a schedule of MXNet's with another step may never end
            write_file(path, edited(fields, place, value), arrays)
            refusals += refused_or_usable(path, training, original)
    assert ("trainer", "num_update") in places
    assert refusals > 4 * len(places)


@pytest.mark.filterwarnings("ignore:.*learning rate:UserWarning")
def test_a_number_of_the_header_is_finite_and_of_its_kind_and_a_count_is_not_negative(tmp_path):
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.01)
    sgd = ("sgd", {"learning_rate": 0.05, "lr_scheduler": schedule})
    training = Training("bfloat16 weights stochastic", sgd)
    average = mpgluon.WeightAverage(training.trainer, 0.9)
    training.train(1)
    average.update()
    path = tmp_path / "saved.npz"
    save_checkpoint(path, training.net, training.trainer)
    header, arrays = read_file(path)
    numbers = 0
    for place in places_in(header):
        number = functools.reduce(operator.getitem, place, header)
        if not isinstance(number, (int, float)):
            continue
        numbers += 1
        is_count = isinstance(number, int) and "lr" not in str(place[-1])
        for value in [10**400, math.nan, True, *([-1] if is_count else [])]:
            write_file(path, edited(header, place, value), arrays)
            with pytest.raises(CheckpointError, match=r"saved\.npz"):
                load_checkpoint(path, training.net, training.trainer)
    assert numbers > 30


@pytest.mark.parametrize("value", [REMOVED, None, [], 3])
def test_reading_extra_alone_refuses_a_header_without_it(tmp_path, value):
    training, path = Training(), tmp_path / "saved.npz"
    save_checkpoint(path, training.net, training.trainer, epoch=3)
    fields, arrays = read_file(path)
    write_file(path, edited(fields, ("extra",), value), arrays)
    with pytest.raises(CheckpointError, match=r"saved\.npz is damaged: its extra .*use an earlier"):
        read_extra(path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["float32", "float16", "bfloat16 weights stochastic"])
def test_any_array_of_another_shape_or_dtype_is_refused_and_changes_nothing(tmp_path, way):
    training = Training(way, devices=TWO)
    training.train(2)
    original, path = tmp_path / "original.npz", tmp_path / "edited.npz"
    save_checkpoint(original, training.net, training.trainer)
    fields, arrays = read_file(original)
    assert any(name.startswith("replica/") for name in arrays)
    for name, array in arrays.items():
        others = [array.astype(dtype) for dtype in ("<U3", "int8", "float64")]
        for other in (array[..., None], array.reshape(-1)[:1], *others):
            if other.shape == array.shape and other.dtype == array.dtype:
                continue
            write_file(path, fields, {**arrays, name: other})
            assert refused_or_usable(path, training, original), (name, other.shape, other.dtype)
        write_file(path, fields, {key: value for key, value in arrays.items() if key != name})
        refused_or_usable(path, training, original)
