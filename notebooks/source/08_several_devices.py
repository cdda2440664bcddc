# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # What changes with several devices?
#
# Every device holds a copy of the network, a *replica*. Each replica computes the gradients of its
# part of the batch. The gradients are added, and every device makes the same step. So far this has
# nothing to do with number formats. In sixteen bits two questions are new: **who decides that a
# step is skipped, and in which format are gradients added?**
#
# ![Two devices with equal weights compute gradients of half of the batch each, in FP16. The
# gradients are summed in FP32. Are all finite? There is one answer for all: both make the same
# update, or both skip the step and halve S](figures/08_agree.svg)
#
# The drawing is this lesson in one picture. Each replica computes gradients in FP16 (`float16`).
# Their sum is computed in FP32 and sent back to all replicas; that exchange is called *all-reduce*.
# Then every replica checks the same sum, so all of them get the same answer: make the step, or skip
# it and halve the loss scale S.
#
# ## What you will be able to do
#
# - train on several devices, and say when that equals training on one;
# - explain why a program must look for an overflow *after* the gradients were added;
# - choose the format in which gradients are added;
# - run the same training loop in several processes, with MPI.
#
# You should know loss scaling (lesson 03) and casting (lesson 04). Everything runs on a CPU.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %% tags=["setup"]
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mpgluon
from mpgluon import amp
from mpgluon.tools.plots import FORMAT_LOOKS

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from teaching import check

WORKERS = 512 if FAST else 4096
random = np.random.default_rng(0)
squared_error = gluon.loss.L2Loss()
# 64 examples, one a row: 16 inputs and a target.
whole_numbers = (random.integers(-32, 33, (64, 17)) / 16).astype("float32")
any_numbers = random.standard_normal((64, 17)).astype("float32")

# %% [markdown]
# ## Two devices make the step of one, up to the order of a sum
#
# MXNet treats `mx.cpu(0)` and `mx.cpu(1)` as two devices, although both are this processor. With
# `mx.gpu(0)` and `mx.gpu(1)` the code of this lesson is the same.
#
# - `initialize(ctx=devices)` puts a replica of each weight on each device.
# - `gluon.utils.split_and_load` cuts a batch into parts, and sends one to each device.
# - `trainer.step` adds the gradients of all devices (the *kvstore* does that), divides the sum by
#   the size of the **whole** batch, and updates every replica.
# - `update_on_kvstore=False` means that the Trainer updates the weights, not the kvstore. Only then
#   can a step be skipped.

# %%
devices = [mx.cpu(0), mx.cpu(1)]


def one_step(examples, devices):
    """Return the weights on each device after one step of least squares, from weights of 1."""
    layer = nn.Dense(1, in_units=16, use_bias=False, weight_initializer="ones")
    layer.initialize(ctx=devices)
    trainer = gluon.Trainer(
        layer.collect_params(), "sgd", {"learning_rate": 2.0**-4}, update_on_kvstore=False
    )
    parts = gluon.utils.split_and_load(mx.nd.array(examples), devices)
    with autograd.record():
        losses = [squared_error(layer(part[:, :16]), part[:, 16:]) for part in parts]
    autograd.backward(losses)
    trainer.step(len(examples))  # the whole batch, not a part of it
    return [weight.asnumpy()[0] for weight in layer.weight.list_data()]


# %%
results = {}
for name, examples in (("multiples of 1/16", whole_numbers), ("any numbers", any_numbers)):
    (alone,) = one_step(examples, devices[:1])
    first, second = one_step(examples, devices)
    results[name] = alone, first, second
    print(
        f"{name}: two devices differ from one by at most {np.abs(first - alone).max():.1e},",
        f"from each other by {np.abs(first - second).max():.1f}",
    )

# %% tags=["claim"]
for _, first, second in results.values():
    assert np.array_equal(first, second)  # the replicas agree, always
alone, first, _ = results["multiples of 1/16"]
assert np.array_equal(first, alone)
alone, first, _ = results["any numbers"]
x, y = np.abs(any_numbers[:, :16]).astype("float64"), np.abs(any_numbers[:, 16])
largest_sum = (x.sum(axis=1) + y) @ x  # all terms with one sign
bound = 2 * 90 * 2.0**-24 * (largest_sum * 2.0**-4 / 64 + 1)  # fewer than 90 roundings in each
assert (np.abs(first.astype("float64") - alone) <= bound).all()

# %% [markdown]
# Multiples of 1/16 add up exactly in FP32, in any order. So two devices agree with one, bit for
# bit. Other numbers are rounded after each addition, and two devices add in another order than one.
# The difference is FP32's rounding, not a mistake.
#
# The two replicas always agree bit for bit. They received the same sum, so they made the same step.
# **Most of this lesson is about keeping it so.**
#
# BatchNorm is an exception to "two devices make the step of one": each device computes the mean and
# the variance of its own part. That has nothing to do with 16 bits, and matters less the more
# images each device has. (`gluon.contrib.nn.SyncBatchNorm` uses all devices together.)
#
# ## A replica that checks only its own gradient drifts away
#
# Gradients are multiplied by a loss scale S. Sooner or later one overflows, on *one* device: the
# one with an unusual image. Suppose that each replica checks its own gradient before the sum. If
# this gradient is not finite, the replica sends nothing, skips the step, and halves its own S. The
# other replica does not notice this, and makes its step.
#
# Here are two such replicas by hand, in NumPy. In step 10 the second one meets an infinity.
# `DynamicLossScale` is the rule of lesson 03: halve S after an overflow. The function `agree` gets
# the gradients of both replicas. It returns their sum, and for each replica whether it makes the
# step.


# %%
def two_replicas(agree, steps=40):
    """Return the largest difference between the replicas after each step, and both scales."""
    weights, differences = np.ones((2, 16), "float32"), []
    scales = [mpgluon.DynamicLossScale(2.0**8) for _ in weights]
    parts = [(part[:, :16], part[:, 16]) for part in np.split(any_numbers, 2)]
    for step in range(1, steps + 1):
        slopes = [(x @ w - y) @ x / 64 for (x, y), w in zip(parts, weights)]
        gradients = [(s * scale.scale).astype("float16") for s, scale in zip(slopes, scales)]
        if step == 10:
            gradients[1][0] = np.inf
        shared, finite = agree([gradient.astype("float32") for gradient in gradients])
        for number, scale in enumerate(scales):
            if finite[number]:
                weights[number] -= 0.2 * shared / scale.scale
            scale.update(finite[number])
        differences.append(np.abs(weights[0] - weights[1]).max())
    return np.array(differences), [scale.scale for scale in scales]


def check_own_gradient(gradients):
    finite = [bool(np.isfinite(gradient).all()) for gradient in gradients]
    return sum(gradient for gradient, fine in zip(gradients, finite) if fine), finite


# %%
apart, scales = two_replicas(check_own_gradient)
print(f"after step  9 the replicas differ by {apart[8]:.3f}")
print(f"after step 10 the replicas differ by {apart[9]:.3f}")
print(f"after step 40 the replicas differ by {apart[-1]:.3f}")
print(f"their scales are {scales[0]:.0f} and {scales[1]:.0f}")

# %% tags=["claim"]
assert (apart[:9] == 0).all()
assert (apart[9:] > 0).all()  # from step 10 on, for ever
assert scales == [2.0**8, 2.0**7]

# %% [markdown]
# Up to step 9 the replicas are equal. After one missed step they are never equal again. Their
# scales differ too: the sum now mixes gradients that were multiplied by 256 with others that were
# multiplied by 128, and each replica divides it by its own S. There is no error and no message. You
# would only notice that the network learns badly.
#
# ## If every replica checks the sum, all decide alike
#
# The cure needs no further message between replicas, because **an infinity survives every sum**:
# infinity plus any finite number is infinity, and infinity minus infinity is NaN. Every replica
# receives the sum, so every replica sees it.


# %%
def check_sum(gradients):
    total = sum(gradients)
    return total, [bool(np.isfinite(total).all())] * 2


agreed, agreed_scales = two_replicas(check_sum)
print(f"the replicas differ by at most {agreed.max():.3f} in all 40 steps; S is {agreed_scales}")

# %% tags=["plot"] alt="Two replicas differ from step 10 on, unless both check the sum."
figure, axes = plt.subplots(figsize=(6.2, 3.8), layout="constrained")
steps = np.arange(1, 41)
axes.plot(steps, apart, "k-x", markersize=5)
axes.plot(steps, agreed, "-o", color="0.45", mfc="w", markersize=4)
axes.axvline(10, color="0.7", linewidth=1, linestyle=":", zorder=0)
axes.text(10.4, 0.97 * apart.max(), "an infinity on the second device", va="top", color="0.35")
axes.annotate(
    "each checks its own gradient",
    (18, apart[17]),
    xytext=(12, -12),
    textcoords="offset points",
    va="top",
)
axes.annotate(
    "both check the sum: 0 in every step",
    (32, 0),
    xytext=(0, 8),
    textcoords="offset points",
    ha="center",
    color="0.35",
)
axes.set(xlabel="step", ylabel="largest difference of a weight", ylim=(-0.04 * apart.max(), None))
axes.set_title("One step that only one replica skips\nseparates the replicas for good")
plt.show()

# %% tags=["claim"]
assert (agreed == 0).all()
assert agreed_scales == [2.0**7, 2.0**7]

# %% [markdown]
# ## With `amp`, all devices skip together and the scale falls once
#
# After `amp.init_trainer`, every step checks the gradients of all devices after they were added.
# Here the network is cast to FP16, with FP32 masters. We put an infinity among the gradients of
# device 1 in the second step, and of device 0 in the third. The loop is the same as for one device,
# with a list of losses in place of one loss.


# %%
def cast_layer(devices):
    layer = nn.Dense(1, in_units=16, use_bias=False, weight_initializer="ones")
    layer.initialize(ctx=devices)
    mpgluon.cast_block(layer)
    return layer


options = {"learning_rate": 0.1, "multi_precision": True}
layer = cast_layer(devices)
trainer = gluon.Trainer(layer.collect_params(), "sgd", options)
amp.init_trainer(trainer, mpgluon.DynamicLossScale(2.0**8))  # sets update_on_kvstore=False itself
parts = gluon.utils.split_and_load(mx.nd.array(any_numbers), devices)

weights_of_step, scale_of_step = [], []
for bad_device in (None, 1, 0, None):
    scale = amp.loss_scale(trainer)
    with autograd.record():
        losses = [squared_error(layer(part[:, :16]), part[:, 16:]) for part in parts]
        with amp.scale_loss(losses, trainer) as scaled_losses:
            autograd.backward(scaled_losses)
    if bad_device is not None:
        layer.weight.list_grad()[bad_device][0, 0] = np.inf
    trainer.step(64)
    what = "all skip" if amp.step_was_skipped(trainer) else "all update"
    print(
        f"infinity on device {bad_device}: {what}, S {scale:.0f} -> {amp.loss_scale(trainer):.0f}"
    )
    weights_of_step.append([weight.asnumpy() for weight in layer.weight.list_data()])
    scale_of_step.append(amp.loss_scale(trainer))

# %% tags=["claim"]
for first, second in weights_of_step:
    assert np.array_equal(first, second)
after_1, after_2, after_3, after_4 = (first for first, _ in weights_of_step)
assert np.array_equal(after_1, after_2)
assert np.array_equal(after_2, after_3)
assert not np.array_equal(after_3, after_4)
assert scale_of_step == [256, 128, 64, 64]
assert amp.skipped_steps(trainer) == 2

# %% [markdown]
# MXNet's own `contrib.amp` checks the gradients of the first device only. That is enough if they
# were added before. Without a kvstore, an infinity on the second device goes into the weights. And
# with several devices MXNet updates inside the kvstore by default: then nobody checks.
#
# `amp.init_trainer` changes that default, and refuses a Trainer that was explicitly made to update
# in the kvstore. Here is the message, **on purpose**:

# %%
inside = gluon.Trainer(layer.collect_params(), "sgd", options, update_on_kvstore=True)
message = ""
try:
    amp.init_trainer(inside)
except mpgluon.TrainerStateError as error:
    message = str(error)
print(f"TrainerStateError: {message}")

# %% tags=["claim"]
assert "create it with update_on_kvstore=False" in message

# %% [markdown]
# ## Add in FP32: in FP16 each worker adds a rounding
#
# Gradients of a network in FP16 are FP16 numbers: half as many bytes to send as in FP32. But in
# which format are they *added*? Suppose that each of many *workers* (devices, or computers) has a
# gradient: a part that is common to all, and noise. We add the gradients of all workers in three
# ways:
#
# - in FP16 one after the other, rounding after each addition;
# - in FP16 by pairs, then pairs of pairs, as a *tree*;
# - in FP32, rounding the result to FP16 once.
#
# Each is compared with the same sum in 64 bits.

# %%
common = 2.0 ** random.uniform(-6, 2, 1000)  # of a thousand weights
noise = common * random.standard_normal((WORKERS, 1000))
gradients = (common + noise).astype("float16")  # a row for each worker


def add_one_by_one(rows):
    return np.cumsum(rows, axis=0, dtype="float16")[-1]


def add_as_a_tree(rows):
    return rows[0] if len(rows) == 1 else add_as_a_tree(rows[::2] + rows[1::2])


def add_in_fp32(rows):
    return rows.sum(axis=0, dtype="float32").astype("float16")


# %%
counts = 2 ** np.arange(1, int(np.log2(WORKERS)) + 1)
ways = {
    "FP16, one by one": add_one_by_one,
    "FP16, as a tree": add_as_a_tree,
    "FP32, rounded once": add_in_fp32,
}
errors = {name: [] for name in ways}
for count in counts:
    exact = gradients[:count].sum(axis=0, dtype="float64")
    for name, add in ways.items():
        error = add(gradients[:count]) - exact
        errors[name].append(np.linalg.norm(error) / np.linalg.norm(exact))
for name, error in errors.items():
    print(
        f"{name:18}: relative error {error[0]:.1e} with 2 workers, {error[-1]:.1e} with {WORKERS}"
    )

# %% tags=["plot"] alt="Error of three sums: in FP16 it grows with the workers, in FP32 not."
figure, axes = plt.subplots(figsize=(6.2, 4.2), layout="constrained")
fp32, fp16 = FORMAT_LOOKS["float32"], FORMAT_LOOKS["float16"]
looks = fp16, {**fp16, "linestyle": ":", "marker": "D"}, fp32
for (name, error), look in zip(errors.items(), looks):
    axes.loglog(counts, error, base=2, mfc="w", **look)
    axes.annotate(
        name,
        (counts[-1], error[-1]),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        color=look["color"],
    )
axes.set_xlim(1.7, counts[-1] * 100)  # room for the names of the curves
axes.set_xticks(counts[::2])
axes.set(xlabel="workers", ylabel="relative error of the sum")
axes.set_title("Added one by one in FP16,\na sum gets worse with every worker")
plt.show()

# %% tags=["claim"]
one_by_one, by_tree, once = (np.array(error) for error in errors.values())
assert (once <= 2.0**-11 * 1.01).all()  # half of FP16's last digit; FP32's own share is tiny
assert one_by_one[-1] > 5 * by_tree[-1] > 6 * once[-1]
assert np.isclose(one_by_one[0], once[0])  # two workers: one addition, one rounding

# %% [markdown]
# With two workers the three ways are the same: there is one addition, and one rounding. With more,
# each addition rounds again. The sum of many gradients is also much larger than the next gradient,
# so much of that gradient is rounded away (as small updates are in lesson 02). A tree is better,
# but still worse than FP32. So: send 16 bits if you like, **add in 32**.
#
# ## Dividing before adding loses what the loss scale has saved
#
# An FP16 sum has a second problem: it can overflow although no worker's gradient did. The usual
# remedy is to divide each gradient by the number of workers first. With $2^k$ workers every
# gradient then becomes $2^k$ times as small, and small gradients fall below FP16's smallest number,
# $2^{-24}$.

# %%
large = np.full(WORKERS, 2.0**10, "float16")
with np.errstate(over="ignore"):  # the overflow is what we want to see
    fp16_total = np.cumsum(large, dtype="float16")[-1]
fp32_total = large.sum(dtype="float32")
print(f"{WORKERS} gradients of 1024 add up to {fp16_total} in FP16, {fp32_total:.0f} in FP32")

small = (2.0 ** random.uniform(-24, -10, 100_000)).astype("float16")
lost = {count: np.mean(small / np.float16(count) == 0) for count in (2, 8, 64, 512)}
for count, share in lost.items():
    print(f"divided by {count:3} workers first: {share:4.0%} of the small gradients become 0")

# %% tags=["claim"]
assert np.isinf(fp16_total)
assert fp32_total == WORKERS * 1024
assert (np.diff(list(lost.values())) > 0).all()
assert (small.astype("float32") / 512 > 0).all()

# %% [markdown]
# A sum in FP32 has neither problem. The division, by the size of the batch and by S, happens in
# FP32 too, inside the optimizer.
#
# ## Several processes keep the same rules
#
# With more than one computer, each device gets a process (a running program) of its own, and a
# library such as MPI or Horovod carries gradients between them. The number of a process is its
# *rank*. The rules:
#
# - **Add in FP32**, and **check after the sum**: then all ranks decide alike.
# - **One seed for the order of an epoch.** All processes shuffle alike, and each takes its share.
#   With a seed for each process, some images would be seen twice and others never.
# - **Rank 0 writes.** All ranks have the same weights, so one of them writes checkpoints and logs.
#
# Below is a whole program, for as many processes as you like. It trains the layer of the section
# about `amp`. In the second step, rank 1 meets an infinity. Two things differ from a loop on one
# device: `MpiKVStore` adds gradients over all processes, in FP32, and `trainer.step` gets the size
# of the batch of all processes.

# %%
PROGRAM = """
import sys
import mpgluon
import mxnet as mx
import numpy as np
from mpgluon import amp
from mpgluon.distributed import MpiKVStore, MpiProcesses
from mxnet import autograd, gluon

squared_error = gluon.loss.L2Loss()
with MpiProcesses(timeout=60) as processes:  # an error in one process ends all
    rank, world_size = processes.rank, processes.world_size
    part = mx.nd.array(np.split(np.load(sys.argv[1]), world_size)[rank])  # this rank's share

    layer = gluon.nn.Dense(1, in_units=16, use_bias=False, weight_initializer="ones")
    layer.initialize()
    mpgluon.cast_block(layer)
    store = MpiKVStore(processes)
    options = {"learning_rate": 0.1, "multi_precision": True}
    trainer = gluon.Trainer(layer.collect_params(), "sgd", options, kvstore=store)
    amp.init_trainer(trainer, mpgluon.DynamicLossScale(2.0**8))
    store.attach(trainer)  # rank 0's weights on all ranks

    for step in range(1, 5):
        with autograd.record():
            loss = squared_error(layer(part[:, :16]), part[:, 16:])
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        if (step, rank) == (2, 1):
            layer.weight.grad()[0, 0] = np.inf
        trainer.step(len(part) * world_size)
        what = "skip" if amp.step_was_skipped(trainer) else "update"
        print(f"step {step}, rank {rank}: {what}, S is now {amp.loss_scale(trainer):.0f}")
    np.save(f"{sys.argv[2]}/rank{rank}.npy", layer.weight.data().asnumpy())
"""


# %% [markdown]
# `mpirun -np 2 python program.py` starts it twice. (`--oversubscribe` allows more processes than
# cores, and `--allow-run-as-root` is for containers. `pip install mpgluon[mpi]` brings `mpirun`.)

# %%
mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "program.py").write_text(PROGRAM)
    np.save(f"{folder}/examples.npy", any_numbers)
    command = f"{mpirun} -np 2 --allow-run-as-root --oversubscribe --bind-to none {sys.executable}"
    arguments = f"{folder}/program.py {folder}/examples.npy {folder}"
    run = subprocess.run(
        f"{command} {arguments}".split(),
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # two processes share this processor
    )
    weights_of_ranks = [np.load(f"{folder}/rank{rank}.npy") for rank in range(2)]
lines = sorted(line for line in run.stdout.splitlines() if line.startswith("step"))
print("\n".join(lines))

# %% [markdown]
# Both ranks skip the second step, and both scales fall to 128, though rank 0's own gradient was
# fine. The result equals that of two devices in one process, bit for bit. The next cell checks
# this.

# %% tags=["claim"]
verdicts = [line.partition(": ")[2] for line in lines]
assert verdicts[::2] == verdicts[1::2]  # of ranks 0 and 1
assert ["skip" in verdict for verdict in verdicts[::2]] == [False, True, False, False]

layer = cast_layer(devices)
trainer = gluon.Trainer(layer.collect_params(), "sgd", options)
amp.init_trainer(trainer, mpgluon.DynamicLossScale(2.0**8))
for step in range(1, 5):
    with autograd.record():
        losses = [squared_error(layer(part[:, :16]), part[:, 16:]) for part in parts]
        with amp.scale_loss(losses, trainer) as scaled_losses:
            autograd.backward(scaled_losses)
    if step == 2:
        layer.weight.list_grad()[1][0, 0] = np.inf
    trainer.step(64)
for weights in weights_of_ranks:
    assert np.array_equal(weights, layer.weight.data(devices[0]).asnumpy())

# %% [markdown]
# [More than one device](../docs/distributed.md) has the commands for several GPUs and several
# computers, what happens when a process fails, and how to continue a run with another number of
# processes. `scripts/train_caltech.py --kvstore mpi` is the training script in several processes.
#
# ## Summary
#
# - Several devices make the step of one, up to the order of a sum. The replicas stay equal bit for
#   bit. BatchNorm sees the images of its own device only.
# - Check for an overflow **after** the sum. Then all replicas skip together, and all scales fall
#   together, without a further message.
# - Add gradients in FP32. If they are added one by one in FP16, the error grows with the number of
#   workers; dividing first loses small gradients.
# - Several processes keep the same rules. One seed decides the order of the images, and rank 0
#   writes the files.

# %% [markdown]
# ## Exercises
#
# Each exercise checks your answer by running it. A solution is folded below it.

# %% [markdown]
# **08.1** (level 3) Some systems add gradients in a format without an infinity (FP8's E4M3, for
# example). An overflow then becomes the largest number, and a check of the sum finds nothing. The
# function below has this fault. Write an `agree(gradients)` for `two_replicas` that returns the
# same clipped sum, but makes *both* replicas skip if *any* gradient has an infinity, and makes both
# step otherwise. `gradients` is a list of two FP32 arrays, in which an overflow is still `inf`.
# Hand in the function.


# %%
def agree(gradients):
    total = np.clip(sum(gradients), -65504, 65504)  # no infinity survives this sum
    return total, [bool(np.isfinite(total).all())] * 2


answer = ...
check("08.1", answer)


# %% tags=["solution"]
def agree_by_message(gradients):
    """Let each replica check its own gradient, and tell the others what it found."""
    total = np.clip(sum(gradients), -65504, 65504)
    everyone = all(bool(np.isfinite(gradient).all()) for gradient in gradients)
    return total, [everyone] * len(gradients)


# Between computers the verdicts are one more number in the sum: how many replicas say no.
assert check("08.1", agree_by_message)

# %% [markdown]
# **08.2** (level 1) Every worker has the same gradient, $2^{-18}$, in FP16. A library divides it by
# the number of workers, rounds to FP16, and then adds all of them in FP32. From which number of
# workers on, a power of two, is the result 0? Hand in the number.

# %%
answer = ...
check("08.2", answer)

# %% tags=["solution"]
# FP16's smallest number is 2^-24. Half of it, 2^-25, is rounded to the even neighbour, 0.
workers = 1
while np.float16(2.0**-18 / workers) > 0:
    workers *= 2
print(f"{workers} workers")
assert check("08.2", workers)

# %% [markdown]
# **08.3** (level 2) Write `share(epoch, rank, world_size, count)`. It returns the numbers of the
# images that the process `rank` sees in an epoch, in their order. Together the `world_size`
# processes must see each of the `count` images once. All processes must get equally many images,
# and each epoch must have another order. Hand in the function.

# %%
answer = ...
check("08.3", answer)


# %% tags=["solution"]
def share(epoch, rank, world_size, count):
    """Shuffle alike in all processes, with a seed for the epoch, and take every n-th image."""
    order = np.random.default_rng(epoch).permutation(count)  # the rank is not in the seed
    return order[rank::world_size]


assert check("08.3", share)

# %% [markdown]
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3: loss scaling.
# - Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, section 3:
#   several workers, and common mistakes.
# - IEEE 754-2019, section 6.1: arithmetic with infinities.
# - Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, chapter 4: summation.

# %% [markdown]
# [← 07 Where does the time go, and the memory?](07_speed_and_memory.ipynb) ·
# [All lessons](README.md) ·
# [09 What changes in a training loop of your own? →](09_a_loop_of_your_own.ipynb)
