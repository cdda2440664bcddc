"""The kvstore in one process: sums over devices, numbers of messages, and errors."""

from __future__ import annotations

from mpgluon import amp
from mpgluon.distributed import DistributedError, MpiKVStore, OneProcess
from mpgluon.distributed.buckets import BUCKET_ELEMENTS, Gradient, make_buckets
from mpgluon.distributed.processes import Processes
from mpgluon.distributed.state import (
    check_agreement,
    numbers_of_step,
    refuse_different_numbers,
)

import mxnet as mx
import numpy as np
import pytest
from helpers import in_sequence, initialized, with_loss_scale
from mxnet import autograd, gluon
from mxnet.gluon import nn

DEVICES = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]


class Recorder(OneProcess):
    """One process that writes down the messages that it would send."""

    def __init__(self) -> None:
        self.rolls: list[str] = []
        self.messages: list[int] = []

    def gather(self, value, purpose):
        self.rolls.append(purpose)
        return [value]

    def sum_in_place(self, values, purpose):
        self.messages.append(values.size)


def parameter(values: list[list[float]], dtype: str) -> gluon.Parameter:
    """Return a parameter whose gradient on each device is a row of ``values``."""
    one = gluon.Parameter("weight", shape=(len(values[0]),), dtype=dtype)
    one.initialize(mx.init.Zero(), ctx=DEVICES[: len(values)])
    for gradient, row in zip(one.list_grad(), values):
        gradient[:] = mx.nd.array(row, dtype=dtype)
    return one


def reduced(values: list[list[float]], dtype: str) -> list[np.ndarray]:
    one = parameter(values, dtype)
    trainer = gluon.Trainer([one], "sgd", {}, kvstore=MpiKVStore(OneProcess()))
    trainer.allreduce_grads()
    return [gradient.asnumpy() for gradient in one.list_grad()]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_device_gets_the_sum_over_devices(dtype):
    sums = reduced([[1, 2], [30, 40], [500, 600]], dtype)
    assert [array.tolist() for array in sums] == [[531, 642]] * 3
    assert {array.dtype.name for array in sums} == {dtype}


def test_float16_gradients_of_devices_are_added_in_float32_and_rounded_once():
    # 2048 + 1 is 2048 in float16, which has only even numbers there; 2050 is the sum.
    assert [array.tolist() for array in reduced([[2048], [1], [1]], "float16")] == [[2050]] * 3


def test_infinities_and_nans_are_in_the_sum_of_all_devices():
    for sums in reduced([[np.inf, np.nan, 1], [1, 1, 1]], "float16"):
        np.testing.assert_equal(sums, np.float16([np.inf, np.nan, 2]))


def test_every_finite_float16_gradient_of_one_device_is_exchanged_unchanged():
    every_finite = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every_finite = every_finite[np.isfinite(every_finite)]
    (exchanged,) = reduced([every_finite.tolist()], "float16")
    assert exchanged.tobytes() == every_finite.tobytes()


def recorded(*layers: gluon.Block, attached: bool = True):
    """Return a network, its Trainer, and a record of the messages of its kvstore."""
    processes = Recorder()
    net = initialized(in_sequence(*layers))
    store = MpiKVStore(processes)
    trainer = with_loss_scale(gluon.Trainer(net.collect_params(), "sgd", {}, kvstore=store))
    if attached:
        store.attach(trainer)
    return net, trainer, processes


def backward(net, trainer):
    with autograd.record(), amp.scale_loss(net(mx.nd.ones((1, 3))).sum(), trainer) as scaled:
        scaled.backward()


def thirty_layers() -> list[nn.Dense]:
    return [nn.Dense(3, in_units=3) for _ in range(30)]


@pytest.mark.parametrize("attached", [True, False])
def test_attached_gradients_travel_together_and_the_others_one_by_one(attached):
    net, trainer, processes = recorded(*thirty_layers(), attached=attached)
    backward(net, trainer)
    trainer.step(1)
    assert len(processes.rolls) == (1 if attached else 60)
    assert sorted(processes.messages) == ([30 * (9 + 3)] if attached else [3] * 30 + [9] * 30)


def test_gradients_are_exchanged_once_when_they_are_clipped_before_the_step():
    net, trainer, processes = recorded(*thirty_layers())
    backward(net, trainer)
    amp.clip_global_norm(trainer, 1.0, batch_size=1)
    trainer.step(1)
    assert len(processes.messages) == 1
    assert len(processes.rolls) == 2  # the numbers of the step, its clip factor too, come after


def test_descriptions_differ_when_gradients_cannot_be_added():
    purposes = []
    for shape, dtype in [((2, 3), "float32"), ((3, 2), "float32"), ((2, 3), "float16")]:
        processes = Recorder()
        one = initialized(gluon.Parameter("weight", shape=shape, dtype=dtype))
        gluon.Trainer([one], "sgd", {}, kvstore=MpiKVStore(processes)).allreduce_grads()
        purposes += processes.rolls
    assert len(set(purposes)) == 3
    assert all("1 gradients, 6 numbers" in purpose for purpose in purposes)


def test_a_frozen_parameter_leaves_the_exchange_and_may_come_back():
    net, trainer, processes = recorded(nn.Dense(2, in_units=3))
    for request in ("write", "null", "write"):
        net[0].bias.grad_req = request
        backward(net, trainer)
        trainer.step(1)
    assert processes.messages == [8, 6, 8]


def gradients(*sizes: int, dtype: str = "float32") -> list[Gradient]:
    return [Gradient(key, (size,), dtype) for key, size in enumerate(sizes)]


def test_buckets_are_filled_from_the_last_gradient_and_hold_a_large_one_alone():
    half = BUCKET_ELEMENTS // 2
    sizes = [bucket.values.size for bucket in make_buckets(gradients(half, 3 * half, half, half))]
    assert sizes == [2 * half, 3 * half, half]


def test_float64_gradients_have_buckets_of_their_own():
    mixed = [*gradients(4), Gradient(1, (5,), "float64"), Gradient(2, (6,), "float16")]
    sizes = {bucket.values.dtype.name: bucket.values.size for bucket in make_buckets(mixed)}
    assert sizes == {"float32": 10, "float64": 5}


def test_gradients_of_integers_are_refused():
    with pytest.raises(TypeError, match="gradient 0 is int32; float16, float32 and float64 can be"):
        make_buckets(gradients(3, dtype="int32"))


def test_an_update_inside_the_kvstore_is_refused():
    one = parameter([[1.0], [2.0]], "float32")
    store = MpiKVStore(OneProcess())
    trainer = gluon.Trainer([one], "sgd", {}, kvstore=store, update_on_kvstore=True)
    with pytest.raises(ValueError, match="Please set update_on_kvstore=False"):
        trainer.step(1)
    with pytest.raises(DistributedError, match="sums gradients in place"):
        store.pushpull(0, one.list_grad(), out=one.list_data())


def test_a_trainer_with_the_kvstore_of_one_process_trains_like_one_without():
    weights = []
    for kvstore in (None, MpiKVStore(OneProcess())):
        mx.random.seed(0)
        net = initialized(nn.Dense(2, in_units=3))
        trainer = gluon.Trainer(net.collect_params(), "adam", {}, kvstore=kvstore)
        for step in range(3):
            with autograd.record():
                loss = (net(mx.nd.ones((1, 3)) * step) ** 2).sum()
            autograd.backward(loss)
            trainer.step(1)
        weights.append(net.weight.data().asnumpy())
    assert np.array_equal(*weights)


def test_the_numbers_of_a_step_are_those_of_its_update():
    net = initialized(in_sequence(nn.Dense(1, in_units=1)))
    schedule = Halves()
    options = {"learning_rate": 8.0, "lr_scheduler": schedule, "momentum": 0.5}
    trainer = with_loss_scale(gluon.Trainer(net.collect_params(), "sgd", options), 128)
    net.collect_params().setattr("lr_mult", 3.0)
    with autograd.record(), amp.scale_loss(net(mx.nd.ones((1, 1))), trainer) as scaled:
        scaled.backward()
    for _ in range(2):  # asking does not advance the schedule
        numbers = numbers_of_step(trainer)
        assert numbers["learning rate of the schedule"] == 4.0
        assert (numbers["momentum"], numbers["loss scale"]) == (0.5, 128)
        assert numbers["(lr_mult, wd_mult) of parameter 0"] == (3.0, 1.0)
    assert schedule.calls == 0


class Halves(mx.lr_scheduler.LRScheduler):
    """Counts its calls, and returns half of the rate after each."""

    calls = 0

    def __call__(self, num_update):
        self.calls += 1
        return self.base_lr / 2**self.calls


class WithOtherNumbers(Processes):
    """Two processes, of which the other one has another momentum."""

    world_size = 2

    def gather(self, value, purpose):
        if isinstance(value, dict):
            return [value, {**value, "momentum": 0.5}]
        checksum, also = value
        return [value, (checksum + 1, also)]


def test_numbers_of_a_step_that_differ_are_named_with_their_values():
    numbers = {"momentum": 0.9, "rescale_grad": 0.25}
    with pytest.raises(DistributedError, match=r"differently: momentum is 0\.9 on .* 0, 0\.5 on"):
        refuse_different_numbers(WithOtherNumbers(), numbers, "test")
    assert refuse_different_numbers(Recorder(), numbers, "test", "new") == ["new"]


class WithAnother(Processes):
    """Two processes, of which the other one has other weights."""

    world_size = 2

    def gather(self, value, purpose):
        return [value, {**value, "0.weight": 0}]


def test_another_weight_on_a_rank_is_named():
    net = initialized(in_sequence(nn.Dense(1, in_units=1)))
    with pytest.raises(DistributedError, match=r"rank 1 .* 1 of 2 .* first is 0\.weight"):
        check_agreement(WithAnother(), net)
