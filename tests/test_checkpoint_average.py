"""The average of the weights in a checkpoint: it goes on bit for bit, or its absence is named."""

from __future__ import annotations

import mpgluon
from mpgluon import WeightAverage
from mpgluon.checkpoint import load_checkpoint, read_parameters, save_checkpoint

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn
from test_checkpoint import (
    ADAM,
    ONE,
    TWO,
    Training,
    assert_refused,
    read_file,
    steps_on,
    write_file,
)

DECAY, SAVED_AFTER, STEPS = 0.75, 4, 7
WAYS = ["float32", "float16", "autocast float16"]


class Averaged(Training):
    """A training whose average is updated after each step."""

    def __init__(self, *args, decay=DECAY, **options):
        super().__init__(*args, **options)
        self.average = WeightAverage(self.trainer, decay)

    def train(self, steps: int) -> Averaged:
        for _ in range(steps):
            super().train(1)
            self.average.update()
        return self

    def averages(self) -> dict[str, bytes]:
        parameters = self.net._collect_params_with_prefix()
        values = {name: self.average.value_of(parameter) for name, parameter in parameters.items()}
        return {name: one.asnumpy().tobytes() for name, one in values.items() if one is not None}

    def everything(self) -> dict:
        return {**super().everything(), "averages": self.averages(), "of": self.average.updates}


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one device", "two devices"])
@pytest.mark.parametrize("way", WAYS)
def test_an_average_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, way, devices):
    whole = Averaged(way, devices=devices).train(STEPS)
    first = Averaged(way, devices=devices).train(SAVED_AFTER)
    second = Averaged(way, devices=devices, seed=1).load(first.save(tmp_path / "c.npz"))
    assert second.everything() == first.everything()
    second.average.update()  # the step is already in the average
    assert second.averages() == first.averages() != {}
    second.step = SAVED_AFTER
    second.train(STEPS - SAVED_AFTER)
    assert second.averages() == whole.averages()
    assert second.average.updates == whole.average.updates == STEPS - 1
    assert second.arrays() == whole.arrays()


@pytest.mark.parametrize(("source", "target"), [("float16", "float32"), ("float32", "float16")])
def test_an_average_is_fp32_on_every_level(tmp_path, source, target):
    first = Averaged(source, ADAM).train(SAVED_AFTER)
    second = Averaged(target, ADAM, seed=1).load(first.save(tmp_path / "c.npz"))
    assert second.averages() == first.averages() != {}


def test_a_checkpoint_of_one_device_gives_its_average_to_two(tmp_path):
    one = Averaged().train(SAVED_AFTER)
    two = Averaged(devices=TWO, seed=1).load(one.save(tmp_path / "c.npz"))
    assert two.averages() == one.averages()
    with two.average.swapped_in():
        for parameter in two.net.collect_params().values():
            first, second = (data.asnumpy().tobytes() for data in parameter.list_data())
            assert first == second


def test_a_file_with_an_average_is_refused_by_a_trainer_without_one(tmp_path):
    averaged = Averaged(decay=0.875).train(2)
    path = averaged.save(tmp_path / "c.npz")
    plain = Training(seed=1)
    message = r"has an average of the weights, .* none; create mpgluon\.WeightAverage\(.*, 0\.875\)"
    assert_refused(path, plain, message)
    WeightAverage(plain.trainer, 0.875)  # as the message says
    assert plain.load(path).arrays() == averaged.arrays()


def test_a_file_without_an_average_is_named_and_can_be_loaded_first(tmp_path):
    path = Training().train(2).save(tmp_path / "c.npz")
    message = r"has no average of the weights, .* load it first, and then create .*, 0\.75\)"
    assert_refused(path, Averaged(seed=1), message)
    later = Training(seed=1).load(path)
    average = WeightAverage(later.trainer, DECAY)
    average.update()
    assert average.updates == 0
    later.train(2)
    average.update()
    assert average.updates == 1


def test_another_decay_is_refused_and_may_be_set_after_loading(tmp_path):
    first = Averaged(decay=0.75).train(2)
    path = first.save(tmp_path / "c.npz")
    message = r"its average had the decay 0\.75, this Trainer's has 0\.5; .* set average\.decay"
    assert_refused(path, Averaged(decay=0.5, seed=1), message)
    second = Averaged(decay=0.75, seed=1).load(path)
    second.average.decay = 0.5
    assert second.averages() == first.averages()


def test_a_file_from_before_there_were_averages_is_loaded(tmp_path):
    first = Training("float16").train(2)
    path = first.save(tmp_path / "c.npz")
    fields, arrays = read_file(path)
    del fields["trainer"]["average"]
    write_file(path, fields, arrays)
    assert Training("float16", seed=1).load(path).everything() == first.everything()


@pytest.mark.parametrize("array", [np.zeros((1, 2), np.float32), np.zeros(3, np.float16)])
def test_an_average_of_another_shape_or_format_is_refused(tmp_path, array):
    path = Averaged().train(2).save(tmp_path / "c.npz")
    fields, arrays = read_file(path)
    write_file(path, fields, {**arrays, "trainer/4.bias/average": array})
    message = r"its average of net_dense0_bias is float\d\d of shape .*float32 of shape \(3,\)"
    assert_refused(path, Averaged(seed=1), message)


@pytest.mark.parametrize("way", ["float32", "float16"])
def test_parameters_are_read_from_a_file_as_their_averages(tmp_path, way):
    training = Averaged(way)
    training.net[0].weight.grad_req = "null"
    training.train(3)
    values = read_parameters(training.save(tmp_path / "c.npz"))
    frozen = values.pop("0.weight")
    if way == "float16":
        mpgluon.restore(training.net)
    assert frozen.tobytes() == training.net[0].weight.data().asnumpy().tobytes()
    assert {name: value.tobytes() for name, value in values.items()} == training.averages()


@pytest.mark.parametrize("names", [["0.weight", "1.weight"], ["0.weight"], ["1.weight"]])
@pytest.mark.parametrize("cast", [False, True], ids=["float32", "float16"])
def test_a_shared_weight_has_its_average_under_each_of_its_names(tmp_path, cast, names):
    def make(seed):
        mx.random.seed(seed)
        first = nn.Dense(4, in_units=4, use_bias=False)
        net = nn.HybridSequential()
        net.add(first, nn.Dense(4, in_units=4, use_bias=False, params=first.params))
        net.initialize(mx.init.Normal(0.5))
        if cast:
            mpgluon.cast_block(net)
        options = {"learning_rate": 2.0**-6, "multi_precision": cast}
        trainer = gluon.Trainer(net.collect_params(), "sgd", options)
        return net, trainer, WeightAverage(trainer, DECAY)

    path = tmp_path / "c.npz"
    net, trainer, average = make(seed=0)
    for _ in range(3):
        steps_on(net, trainer, mx.nd.ones((2, 4)))
        average.update()
    save_checkpoint(path, net, trainer)
    expected = average.value_of(net[0].weight).asnumpy().tobytes()
    assert expected != net[0].weight.data().astype("float32").asnumpy().tobytes()
    values = {name: value.tobytes() for name, value in read_parameters(path).items()}
    assert values == dict.fromkeys(["0.weight", "1.weight"], expected)
    fields, arrays = read_file(path)  # a file of mpgluon 0.2.0 has one of the names
    for name in {"0.weight", "1.weight"} - set(names):
        del arrays[f"trainer/{name}/average"]
    write_file(path, fields, arrays)
    net, trainer, average = make(seed=1)
    load_checkpoint(path, net, trainer)
    assert average.value_of(net[0].weight).asnumpy().tobytes() == expected
