"""The program of each rank of `test_equality`: all scenarios in one job, results in one file."""

from __future__ import annotations

import sys

from mpgluon.blocks import interface, set_value
from mpgluon.distributed import (
    DistributedError,
    MpiKVStore,
    MpiProcesses,
    average_batch_norm,
    check_agreement,
    share_state,
)

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from small_training import FIRST_SCALE, batches, make_net, train


def summed(processes: MpiProcesses, values: list[float], dtype: str) -> np.ndarray:
    """Return what a Trainer's gradient is after the exchange, from one value per element."""
    weight = gluon.Parameter("weight", shape=(len(values),), dtype=dtype)
    weight.initialize(mx.init.Zero())
    trainer = gluon.Trainer([weight], "sgd", {}, kvstore=MpiKVStore(processes))
    weight.grad()[:] = mx.nd.array(values, dtype=dtype)
    trainer.allreduce_grads()
    return weight.grad().asnumpy()


def first_sum(processes: MpiProcesses) -> np.ndarray:
    """Return the last layer's float16 gradient of the first step, summed, in scaled units."""
    net = make_net("float16")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {}, kvstore=MpiKVStore(processes))
    images, labels = batches()[0]
    mine = slice(processes.rank, None, processes.world_size)
    with autograd.record():
        outputs = net(mx.nd.array(images[mine], dtype="float16"))
        labels = mx.nd.array(labels[mine], dtype="int32")
        scaled_loss = gluon.loss.SoftmaxCrossEntropyLoss()(outputs, labels) * FIRST_SCALE
    scaled_loss.backward()
    trainer.allreduce_grads()
    return net[2].weight.grad().asnumpy()


def averaged(processes: MpiProcesses) -> np.ndarray:
    """Return BatchNorm's mean and variance after averaging; rank r begins with r and 1 + 2 r."""
    net = nn.HybridSequential()
    net.add(nn.Dense(3, in_units=2), nn.HybridSequential())
    net[1].add(nn.BatchNorm(in_channels=3))
    net.initialize()
    layer = net[1][0]
    set_value(layer.running_mean, mx.nd.full((3,), processes.rank))
    set_value(layer.running_var, mx.nd.full((3,), 1 + 2 * processes.rank))
    average_batch_norm(processes, net)
    return np.stack([layer.running_mean.data().asnumpy(), layer.running_var.data().asnumpy()])


def main(folder: str) -> None:
    """Run all scenarios."""
    with MpiProcesses(timeout=60) as processes:
        rank, size = processes.rank, processes.world_size
        results: dict[str, np.ndarray] = {}

        def run(name: str, dtype: str, *, fused: bool = True, shared: bool = False, **options):
            store = MpiKVStore(processes)

            def prepare(net, trainer):
                if fused:
                    store.attach(trainer)
                if shared:
                    share_state(processes, net, trainer)
                nets.append(net)

            nets: list = []
            options.setdefault("rank", rank)
            outcome = train(dtype, store=store, prepare=prepare, world_size=size, **options)
            check_agreement(processes, nets[0])
            mine = {f"{name}/{key}": np.asarray(value) for key, value in outcome.items()}
            for others in processes.gather(mine, f"results of {name}"):
                assert all(np.array_equal(mine[key], others[key]) for key in mine), (name, rank)
            results.update(mine)

        for dtype in ("float32", "float16", "bfloat16"):
            run(dtype, dtype)
            run(f"{dtype}-one-by-one", dtype, fused=False)
            run(f"{dtype}-poisoned", dtype, poisoned_rank=size - 1)
            run(f"{dtype}-control", dtype, without_bad_step=True)
            with interface(in_numpy=True):
                run(f"{dtype}-in-numpy", dtype, poisoned_rank=size - 1)
        # Other initial weights on each rank: all must begin with those of rank 0.
        run("float32-other-seeds", "float32", seed=rank)
        run("float16-other-seeds", "float16", seed=rank, shared=True)
        try:
            run("float16-other-masters", "float16", seed=rank)
        except DistributedError as error:
            results["other-masters"] = np.array(str(error))
        results["batch-norm"] = averaged(processes)
        with interface(in_numpy=True):
            results["batch-norm-in-numpy"] = averaged(processes)
        results["first-sum"] = first_sum(processes)
        sign = {"both": [1, 1, -1, -1], "every other": [1, -1, 1, -1], "outer": [1, -1, -1, 1]}
        large = [6e4 * sign[kind][rank % 4] for kind in sign]
        if size == 4:
            results["cancelling"] = summed(processes, large, "float16")
        results["beyond"] = summed(processes, [4e4], "float16")
        results["float64"] = summed(processes, [1 + rank * 2.0**-40], "float64")
        if processes.is_first:
            np.savez(f"{folder}/results.npz", **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
