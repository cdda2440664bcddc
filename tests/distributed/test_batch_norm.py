"""BatchNorm over processes, and over the devices of one."""

from __future__ import annotations

from mpgluon import PrecisionError, WeightAverage, cast_block
from mpgluon.distributed import OneProcess, average_batch_norm, synchronize_batch_norm
from mpgluon.distributed.processes import Processes

import mxnet as mx
import numpy as np
import pytest
from helpers import in_sequence, initialized
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import SyncBatchNorm


@pytest.mark.slow
@pytest.mark.multiprocess
def test_running_statistics_are_averaged_over_processes(scenarios):
    ranks, results = scenarios
    mean = sum(range(ranks)) / ranks  # exact in float32
    assert results["batch-norm"].tolist() == [[mean] * 3, [1 + 2 * mean] * 3]
    assert results["batch-norm-in-numpy"].tolist() == results["batch-norm"].tolist()


class Residual(nn.HybridBlock):
    """A network with one BatchNorm as an attribute, and one in a sequence."""

    def __init__(self) -> None:
        super().__init__(prefix="residual_")
        with self.name_scope():
            self.norm = nn.BatchNorm(in_channels=3, momentum=0.8, epsilon=1e-3, scale=False)
            self.body = nn.HybridSequential()
            with self.body.name_scope():
                self.body.add(nn.Conv2D(3, 1, in_channels=3), nn.BatchNorm(in_channels=3))

    def hybrid_forward(self, F, images):
        return images + self.body(self.norm(images))


def make_net(contexts=None) -> Residual:
    mx.random.seed(0)
    return initialized(Residual(), mx.init.Xavier(), ctx=contexts)


def test_one_process_keeps_its_statistics():
    net = make_net()
    net.norm.running_mean.set_data(mx.nd.array([1.0, 2.0, 3.0]))
    average_batch_norm(OneProcess(), net)
    assert net.norm.running_mean.data().asnumpy().tolist() == [1, 2, 3]


class WithZeros(Processes):
    """Two processes, of which the other one has zeros."""

    world_size = 2


def test_statistics_and_their_average_become_the_mean_of_two_processes():
    net = make_net()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
    average = WeightAverage(trainer, 0.5)
    with autograd.record():
        loss = net(mx.nd.ones((2, 3, 4, 4)))
    loss.backward()
    trainer.step(2)
    average.update()
    running = [net.norm.running_mean, net.body[1].running_var]
    before = [[p.data().asnumpy(), average.value_of(p).asnumpy()] for p in running]
    assert all(array.all() for pair in before for array in pair)
    average_batch_norm(WithZeros(), net, average)
    for parameter, (statistics, averaged) in zip(running, before):
        assert (parameter.data().asnumpy() == statistics / 2).all()
        assert (average.value_of(parameter).asnumpy() == averaged / 2).all()


def run(net: Residual, dtype: str) -> list[np.ndarray]:
    images = mx.nd.array(np.random.RandomState(0).randn(8, 3, 4, 4), dtype=dtype)
    with autograd.record():
        outputs = net(images)
        loss = (outputs.astype("float32") ** 2).sum()
    loss.backward()
    gradients = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
    statistics = [net.norm.running_mean.data(), net.body[1].running_var.data()]
    return [array.asnumpy().astype(np.float64) for array in (outputs, *gradients, *statistics)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_synchronized_network_computes_on_one_device_as_before(dtype):
    plain, synchronized = make_net(), make_net()
    assert synchronize_batch_norm(synchronized, 1) == [
        "residual_batchnorm0",
        "residual_hybridsequential0_batchnorm0",
    ]
    assert isinstance(synchronized.norm, SyncBatchNorm)
    assert isinstance(synchronized.body[1], SyncBatchNorm)
    assert synchronized.collect_params().keys() == plain.collect_params().keys()
    if dtype == "float16":
        for net in (plain, synchronized):
            cast_block(net)
    u = {"float32": 2.0**-24, "float16": 2.0**-11}[dtype]
    expected = run(plain, dtype)
    # Sums of 128 terms in another order, through two layers; the largest of all numbers sets the
    # scale, since gradients of a normalization are differences of terms of that size.
    bound = 256 * u * max(abs(one).max() for one in expected)
    for one, other in zip(expected, run(synchronized, dtype)):
        np.testing.assert_allclose(one, other, rtol=0, atol=bound)


def test_several_cpu_devices_are_refused_instead_of_hanging():
    net = make_net([mx.cpu(0), mx.cpu(1)])
    with pytest.raises(PrecisionError, match=r"hangs on several CPU devices; residual_batchnorm0"):
        synchronize_batch_norm(net, 2)
    assert not isinstance(net.norm, SyncBatchNorm)


def test_another_axis_is_refused():
    net = initialized(in_sequence(nn.BatchNorm(axis=-1, in_channels=3)))
    with pytest.raises(ValueError, match="normalizes axis -1, and SyncBatchNorm only 1"):
        synchronize_batch_norm(net, 1)
