"""The program of each rank of `test_equality`: all scenarios in one job, results in one file."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext

from mpgluon import amp, cast_block
from mpgluon.base.blocks import interface, set_value
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
    """Return a Trainer's gradient after the exchange, from one value per element."""
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


def one_step(
    processes: MpiProcesses, *, scale: float = 2.0, magnitude: float = 1.0, **options
) -> Iterator[gluon.Trainer]:
    """Yield a Trainer that is about to step, and again after its step."""
    net = nn.Dense(4, in_units=4, use_bias=False, prefix="dense_")
    net.initialize(mx.init.One())
    cast_block(net, "float16")
    store = MpiKVStore(processes)
    options = {"learning_rate": 0.5, "multi_precision": True, **options}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options, kvstore=store)
    amp.init_trainer(trainer, scale)
    store.attach(trainer)
    with autograd.record():
        loss = net(mx.nd.full((1, 4), magnitude)).sum()
    with amp.scale_loss(loss, trainer) as scaled_loss:
        scaled_loss.backward()
    yield trainer
    trainer.step(1)
    yield trainer


def with_a_layer_on_rank_0(
    processes: MpiProcesses, *, scale: float = 0, attached_first: bool = True, largest: float = 1.0
) -> np.ndarray:
    """Return two weights after each step; all ranks use the second one, then rank 0 alone.

    Rank 0's gradient for it is then multiplied by ``largest``.
    """
    net = nn.HybridSequential()
    net.add(*(nn.Dense(1, in_units=1, use_bias=False) for _ in range(2)))
    net.initialize(mx.init.One())
    store, options = MpiKVStore(processes), {"learning_rate": 1 / 64}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options, kvstore=store)
    if attached_first:
        store.attach(trainer)
    if scale:
        amp.init_trainer(trainer, scale)
    if not attached_first:
        store.attach(trainer)
    weights = []
    for ranks in ([*range(processes.world_size)], [0], [0]):
        with autograd.record():
            hidden = net[0](mx.nd.ones((1, 1)))
            loss = net[1](hidden) if processes.rank in ranks else hidden
            with amp.scale_loss(loss, trainer) if scale else nullcontext(loss) as scaled:
                scaled.backward()
        if ranks == [0] and processes.is_first:
            net[1].weight.grad()[:] *= largest
        if scale:
            amp.clip_global_norm(trainer, 100, batch_size=processes.world_size)
        trainer.step(processes.world_size, ignore_stale_grad=True)
        weights.append([layer.weight.data().asnumpy().item() for layer in net])
    check_agreement(processes, net)
    return np.array(weights)


DIFFERENT = {
    "rescale_grad": lambda trainer, rank: trainer.step(1 + rank),
    "lr": lambda trainer, rank: trainer.set_learning_rate(rank / 2),
    "wd": lambda trainer, rank: setattr(trainer.optimizer, "wd", rank / 2),
    "lr_mult": lambda trainer, rank: setattr(trainer._params[0], "lr_mult", 1 + rank),
    "clip factor": lambda trainer, rank: amp.clip_global_norm(trainer, 1 + rank, batch_size=1),
}


def refused(processes: MpiProcesses, name: str) -> np.ndarray:
    """Return the message, if it is the same on all ranks, of a step with other numbers on one."""
    rank = processes.rank
    schedule = mx.lr_scheduler.PolyScheduler(2 + 2 * rank, 0.5) if name == "schedule" else None
    scale = 2.0**rank if name == "loss scale" else 2.0
    steps = one_step(processes, scale=scale, lr_scheduler=schedule)
    trainer, message = next(steps), ""
    try:
        DIFFERENT.get(name, lambda *_: None)(trainer, rank)
        next(steps)
    except DistributedError as error:
        message = str(error)
    assert set(processes.gather(message, "messages")) == {message}
    return np.array(message)


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
        # Other initial weights on each rank: all must begin with the weights of rank 0.
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
        for name in (*DIFFERENT, "loss scale", "schedule"):
            results[f"refused/{name}"] = refused(processes, name)
        of_last = 6e4 if rank == size - 1 else 1.0
        for name, how in {"layer": {"magnitude": of_last}, "sum": {"scale": 2.0**15}}.items():
            *_, trainer = one_step(processes, **how)
            flags = str(amp.step_flags(trainer))
            assert set(processes.gather(flags, "flags")) == {flags}
            results[f"flags/{name}"] = np.array(flags)
        one = with_a_layer_on_rank_0
        results["layer-on-one-rank"] = one(processes)
        results["layer-on-one-rank/scaled"] = one(processes, scale=8)
        results["layer-on-one-rank/attached later"] = one(processes, scale=8, attached_first=False)
        results["layer-on-one-rank/overflow"] = one(processes, scale=8, largest=math.inf)
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
