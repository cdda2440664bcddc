# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # What changes with more devices, and after training?
#
# One network, several devices: each computes gradients of its part of a batch, the parts are added,
# and all devices make the same step. In 16 bits two questions are new. Who decides that a step is
# skipped? And in which format are gradients added? After training there are two more: which weights
# are the result, the 16-bit ones or their FP32 masters? And how do they leave this program?
#
# ## What you will be able to do
#
# - train on several devices, and say in which cases that equals training on one;
# - say why an overflow must be looked for after gradients were added, and in which format to add;
# - get FP32 weights out of a network in 16 bits, and measure what 16 bits cost in inference;
# - choose between a checkpoint, a parameter file and an export, and load an export where there is
#   no mpgluon.
#
# You should know casting (lesson 4) and loss scaling (lesson 3). FP16 stands for `float16` in code,
# BF16 for `bfloat16`. Everything runs on a CPU.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %%
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mpgluon
from mpgluon import amp
from mpgluon.plots import FORMAT_LOOKS

IMAGES_PER_CLASS, EPOCHS, WORKERS = (12, 6, 512) if FAST else (32, 10, 4096)
random = np.random.default_rng(0)
devices = [mx.cpu(0), mx.cpu(1)]
squared_error = gluon.loss.L2Loss()

# %% [markdown]
# ## Two devices make the step of one, but for the order of a sum
#
# MXNet takes `mx.cpu(0)` and `mx.cpu(1)` for two devices, though both are this processor. All that
# follows is written in the same way for `mx.gpu(0)` and `mx.gpu(1)`.
#
# - `initialize(ctx=devices)` puts a copy of each weight, a *replica*, on each device.
# - `gluon.utils.split_and_load` cuts a batch into parts, and sends each device one.
# - `trainer.step` adds the gradients of all devices (that is the *kvstore*'s work), divides by the
#   size of the **whole** batch, and updates every replica. `update_on_kvstore=False` says that the
#   Trainer itself updates, not the kvstore. Only so can a step be skipped.


# %%
def one_step(inputs, targets, devices, rate=2.0**-4):
    """Return each device's weights after one step of least squares, from weights that are 1."""
    layer = nn.Dense(1, in_units=inputs.shape[1], use_bias=False, weight_initializer="ones")
    layer.initialize(ctx=devices)
    options = {"kvstore": "device", "update_on_kvstore": False}
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": rate}, **options)
    arrays = (mx.nd.array(inputs), mx.nd.array(targets))
    parts = zip(*(gluon.utils.split_and_load(array, devices) for array in arrays))
    with autograd.record():
        losses = [squared_error(layer(x), y) for x, y in parts]
    autograd.backward(losses)
    trainer.step(len(inputs))
    return [weight.asnumpy().astype("float64")[0] for weight in layer.weight.list_data()]


# %%
whole_numbers = random.integers(-32, 33, (64, 17)) / 16
any_numbers = random.standard_normal((64, 17)).astype("float32")
for name, data in (("multiples of 1/16", whole_numbers), ("any numbers", any_numbers)):
    (alone,) = one_step(data[:, :16], data[:, 16:], devices[:1])
    first, second = one_step(data[:, :16], data[:, 16:], devices)
    print(f"{name}: two devices differ from one by at most {np.abs(first - alone).max():.1e}")
    assert np.array_equal(first, second)  # the replicas agree, always
    if data is whole_numbers:
        assert np.array_equal(first, alone)

x, y = np.abs(any_numbers[:, :16]).astype("float64"), np.abs(any_numbers[:, 16:])
sizes = x.T @ (x.sum(axis=1, keepdims=True) + y)[:, 0]  # largest possible sum, all signs equal
order = 2 * 90 * 2.0**-24 * (sizes * 2.0**-4 / 64 + 1)  # fewer than 90 roundings in each of both
assert (np.abs(first - alone) <= order).all()

# %% [markdown]
# Multiples of 1/16 add up exactly in FP32, in any order. So two devices and one agree bit for bit.
# Other numbers are rounded after each addition, and two devices add in another order than one. The
# assertion allows what FP32 roundings can do, and no more.
#
# The two replicas always agree, bit for bit. They got the same sum, so they made the same step.
# **Everything in this lesson's first half is about keeping it so.**
#
# One thing differs even so: BatchNorm subtracts the mean of a batch, and each device knows its own
# part only. It is no matter of 16 bits, and the more images each device has, the less it matters.
# (`gluon.contrib.nn.SyncBatchNorm` computes the statistics of all devices together.)
#
# ## Who looks at its own gradient only drifts away
#
# Gradients are multiplied by a loss scale S. Sooner or later one overflows, on *one* device: the
# one with the unlucky image. Suppose that each replica looks at its own gradient. If it is not
# finite, the replica sends nothing, skips the step and halves its own S. The others know nothing
# of it, and step.
#
# Here are two replicas by hand, least squares again. In step 10 the second one meets an infinity.
# `DynamicLossScale` is the rule from lesson 3, in plain numbers: halve after an overflow.


# %%
def two_replicas(agree, steps=40):
    """Return the distance between the replicas after each step, and both scales."""
    weights, distances = np.ones((2, 16), "float32"), []
    scales = [mpgluon.DynamicLossScale(2.0**8) for _ in weights]
    parts = [(part[:, :16], part[:, 16]) for part in np.split(any_numbers, 2)]
    for step in range(1, steps + 1):
        slopes = [(x @ w - y) @ x / 64 for (x, y), w in zip(parts, weights)]
        gradients = [(s * scale.scale).astype("float16") for s, scale in zip(slopes, scales)]
        gradients[1][0] = np.inf if step == 10 else gradients[1][0]
        shared, finite = agree([gradient.astype("float32") for gradient in gradients])
        for number, scale in enumerate(scales):
            weights[number] -= 0.2 * shared / scale.scale if finite[number] else 0
            scale.update(finite[number])
        distances.append(np.abs(weights[0] - weights[1]).max())
    return np.array(distances), [scale.scale for scale in scales]


# %%
def each_for_itself(gradients):
    finite = [bool(np.isfinite(gradient).all()) for gradient in gradients]
    return sum(gradient for gradient, fine in zip(gradients, finite) if fine), finite


def after_the_sum(gradients):
    return sum(gradients), [bool(np.isfinite(sum(gradients)).all())] * 2


# %%
figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
(drift, drift_scales), (agreed, agreed_scales) = map(two_replicas, (each_for_itself, after_the_sum))
axes.plot(range(1, 41), drift, "k-x", label="each looks at its own gradient")
axes.plot(range(1, 41), agreed, "k--o", mfc="w", markersize=4, label="both look at the sum")
axes.set(xlabel="step", ylabel="largest difference of a weight (no unit)")
axes.set_title("How far two replicas of one network are apart")
axes.legend(frameon=False)
plt.show()
print(f"each for itself: apart by {drift[9]:.3f}, in the end {drift[-1]:.3f}; S {drift_scales}")
print(f"after the sum: apart by {agreed.max():.3f}; S {agreed_scales}")
assert (drift[:9] == 0).all()
assert (drift[9:] > 0).all()  # from step 10 on
assert drift_scales == [2.0**8, 2.0**7]
assert (agreed == 0).all()
assert agreed_scales == [2.0**7, 2.0**7]

# %% [markdown]
# One missed step, and the replicas never meet again: nothing pulls them together. Their scales
# differ, too. So the second gradient counts half in the sum, the second replica divides by half as
# much, and the two move apart. There is no error and no message.
#
# The cure costs nothing. **An infinity survives every sum.** If each replica looks at the *sum*,
# all of them see it, and all decide alike without a further message.
#
# ## With `amp` all devices skip, and the scale falls once
#
# After `amp.init_trainer`, each step looks at the gradients of every device when they have been
# added. We put an infinity among those of device 1, then of device 0. The first and the last step
# have none.

# %%
layer = nn.Dense(1, in_units=16)
layer.initialize(ctx=devices)
mpgluon.cast_block(layer)
options = {"learning_rate": 0.1, "multi_precision": True}
trainer = gluon.Trainer(layer.collect_params(), "sgd", options, kvstore="device")
amp.init_trainer(trainer, mpgluon.DynamicLossScale(2.0**8))  # sets update_on_kvstore=False itself
parts = gluon.utils.split_and_load(mx.nd.array(any_numbers), devices)

# %%
for bad_device in (None, 1, 0, None):
    before, scale = layer.weight.data(devices[0]).asnumpy(), amp.loss_scale(trainer)
    with autograd.record():
        losses = [squared_error(layer(part[:, :16]), part[:, 16:]) for part in parts]
        with amp.scale_loss(losses, trainer) as scaled_losses:
            autograd.backward(scaled_losses)
    if bad_device is not None:
        layer.weight.list_grad()[bad_device][0, 0] = np.inf
    trainer.step(64)
    first, second = (weight.asnumpy() for weight in layer.weight.list_data())
    print(f"infinity on device {bad_device}: S {scale:.0f} -> {amp.loss_scale(trainer):.0f}")
    assert np.array_equal(first, second)
    assert np.array_equal(first, before) == (bad_device is not None)
    assert amp.loss_scale(trainer) == (scale if bad_device is None else scale / 2)
assert amp.skipped_steps(trainer) == 2

# %% [markdown]
# MXNet's own `contrib.amp` looks at the first device only. Where gradients were added before, that
# is enough. Without a kvstore, an infinity on the second device goes into the weights. And with
# MXNet's default for several devices, which updates inside the kvstore, nobody looks at all.
#
# ## Add in FP32: a sum in FP16 gets worse with every worker
#
# Gradients of a network in FP16 are FP16 numbers: half as many bytes to send as in FP32.
# But in which format are they *added*? Let many *workers* (devices or computers) each have a
# gradient: something common to all, and noise. We add theirs in three ways, and compare with a sum
# in `float64`, numbers of 64 bits:
#
# - one after the other in FP16, rounding after each addition;
# - in FP16 by pairs, then pairs of pairs, as a *tree*;
# - in FP32, rounding the result to FP16 once.

# %%
common = 2.0 ** random.uniform(-6, 2, 1000)
noise = common * random.standard_normal((WORKERS, 1000))
gradients = (common + noise).astype("float16")


def tree(rows):
    return rows[0] if len(rows) == 1 else tree(rows[::2] + rows[1::2])


ways = {
    "FP16, one by one": lambda rows: np.cumsum(rows, axis=0, dtype="float16")[-1],
    "FP16, as a tree": tree,
    "FP32, rounded once": lambda rows: rows.sum(axis=0, dtype="float32").astype("float16"),
}

# %%
counts, errors = 2 ** np.arange(1, int(np.log2(WORKERS)) + 1), {}
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
fp32, fp16 = FORMAT_LOOKS["float32"], FORMAT_LOOKS["float16"]
looks = fp16, {**fp16, "linestyle": ":", "marker": "v"}, fp32
for (name, add), look in zip(ways.items(), looks):
    sums = [(add(gradients[:n]), gradients[:n].sum(axis=0, dtype="float64")) for n in counts]
    error = [np.linalg.norm(found - exact) / np.linalg.norm(exact) for found, exact in sums]
    axes.loglog(counts, error, base=2, mfc="w", label=name, **look)
    print(f"{name}: {error[0]:.1e} with 2 workers, {error[-1]:.1e} with {WORKERS}")
    errors[name] = np.array(error)
axes.set(xlabel="workers (count)", ylabel="relative error", title="Sums of FP16 gradients")
axes.legend(frameon=False)
plt.show()
one_by_one, by_tree, once = errors.values()
assert (once <= 2.0**-11 * 1.01).all()  # half a unit of FP16's last digit; FP32's share is tiny
assert one_by_one[-1] > 5 * by_tree[-1] > 6 * once[-1]

# %% [markdown]
# Two workers are harmless: there is one addition. With more, each addition rounds again, and the
# sum of many is so much larger than the next one's gradient that little of it arrives. A tree is
# better and still worse than FP32. So: send 16 bits if you like, **add in 32**.
#
# ## Dividing before adding loses what the loss scale has saved
#
# An FP16 sum has a second problem: it overflows, although no worker did. The usual remedy is to
# divide each gradient by the number of workers first. With $2^k$ workers that moves everything to
# the left by $k$ powers of two, and small gradients fall off FP16's edge ($2^{-24}$).

# %%
small = (2.0 ** random.uniform(-24, -10, 100_000)).astype("float16")
large = np.full(WORKERS, 2.0**10, "float16")
with np.errstate(over="ignore"):  # the overflow is what we want to see
    fp16_total = np.cumsum(large, dtype="float16")[-1]
fp32_total = large.sum(dtype="float32")
print(f"{WORKERS} gradients of 1024 add up to {fp16_total} in FP16, {fp32_total:.0f} in FP32")
shares = {count: np.mean(small / np.float16(count) == 0) for count in (2, 8, 64, 512)}
print("lost by dividing first:", {count: f"{share:.0%}" for count, share in shares.items()})
assert np.isinf(fp16_total)
assert fp32_total == WORKERS * 1024
assert (np.diff(list(shares.values())) > 0).all()
assert (small.astype("float32") / 512 > 0).all()

# %% [markdown]
# The sum in FP32 needs neither remedy. What is divided, is divided in FP32: by the batch and by S,
# inside the optimizer.
#
# ## Several processes
#
# Past one computer, each device gets a process (a running program) of its own, and a library made
# for that (MPI or Horovod) carries the gradients between them. The rules are:
#
# - **Sum in FP32.**
# - **Check after the sum.** Then every process decides alike, and all scales stay equal.
# - **One seed for the order of an epoch.** All processes shuffle alike, and each takes its share.
#   If each had its own seed, some images would be seen twice and others never.
# - **Rank 0 writes.** Processes are numbered, and the number is called *rank*. All have the same
#   weights, so one of them writes checkpoints, logs and pictures.
#
# `mpirun -np 2` starts a program twice. Here it is the training script, with a small network on few
# drawings; each process takes half of every batch. The lines of the training loop stay as they are:
# [docs/distributed.md](../docs/distributed.md) has those around it.


# %%
def two_processes(folder):
    """Train in two processes, and return what rank 0 has written of each step."""
    program = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    words = f"""{program} -np 2 --allow-run-as-root --oversubscribe --bind-to none
        {sys.executable} ../scripts/train_caltech.py --kvstore mpi --dtype float16 --workers 0
        --dataset shapes --images-per-class 4 --train-per-class 3 --batch-size 5 --epochs 3
        --model cifar_resnet20_v1 --image-size 32 --data-dir {folder} --output-dir {folder}/run"""
    subprocess.run(words.split(), check=True, capture_output=True)
    events = map(json.loads, (Path(folder) / "run" / "history.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "step"]


with tempfile.TemporaryDirectory() as folder:
    steps = two_processes(folder)
scales, skipped = zip(*((step["loss_scale"], step["skipped"]) for step in steps))
print(f"S from {scales[0]:.0f} to {scales[-1]:.0f}, {sum(skipped)} steps skipped by both")
assert scales[0] / scales[-1] == 2 ** sum(skipped[:-1])  # the last scale is before the last step
assert all(step["images"] == 10 for step in steps)  # 5 in each process

# %% [markdown]
# ## After training the masters are the result
#
# Now a network to do something with: three convolutions with BatchNorm, trained in FP16 on drawings
# of ten shapes, 32 x 32 pixels. Other drawings are kept for the test.


# %%
from mpgluon.data.shapes import render_image


def draw(first, count):
    """Return drawings of all ten classes, and their labels."""
    pixels = []
    for number in range(10 * count):
        image = render_image(number % 10, first + number // 10).convert("RGB").resize((32, 32))
        pixels.append(np.asarray(image).transpose(2, 0, 1) / 127.5 - 1)  # from -1 to 1
    return mx.nd.array(pixels), mx.nd.array(np.arange(10 * count) % 10, dtype="int32")


images, labels = draw(0, IMAGES_PER_CLASS)
test_images, test_labels = draw(1000, 20)


# %%
def make_network():
    mx.random.seed(0)  # the same initial weights every time
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for before, after in ((3, 16), (16, 32), (32, 64)):
            net.add(nn.Conv2D(after, 3, padding=1, in_channels=before))
            net.add(nn.BatchNorm(in_channels=after), nn.Activation("relu"), nn.MaxPool2D())
        net.add(nn.Flatten(), nn.Dense(10, in_units=1024))
    net.initialize(mx.init.Xavier())
    return net


cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

# %%
net = make_network()
mpgluon.cast_block(net)
net.hybridize(static_alloc=True, static_shape=True)
trainer = gluon.Trainer(net.collect_params(), "adam", {"multi_precision": True})
amp.init_trainer(trainer)
for start in list(range(0, len(images), 40)) * EPOCHS:
    batch_images, batch_labels = images[start : start + 40], labels[start : start + 40]
    with autograd.record():
        loss = cross_entropy(net(batch_images), batch_labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(len(batch_labels))
logits = {"float16": net(test_images).asnumpy()}
print(f"last loss {loss.mean().asscalar():.3f}, {amp.skipped_steps(trainer)} steps were skipped")

# %% [markdown]
# The network's weights are FP16. The optimizer worked on FP32 *masters*, and rounded them into the
# network after each step. The masters are what was trained. First we write everything to files,
# for later. Then `mpgluon.restore` takes the cast off and puts the masters in. A checkpoint keeps
# the masters, and `read_parameters` reads them from it: both must agree. (Whoever wants to train on
# needs a new Trainer: the old one was made for FP16 weights.)

# %%
from mpgluon.checkpoint import read_parameters

work = tempfile.TemporaryDirectory()
folder = Path(work.name)
mpgluon.save_checkpoint(folder / "checkpoint.npz", net, trainer, epochs=EPOCHS)
net.save_parameters(str(folder / "float16.params"))
net.export(str(folder / "float16"))
in_fp16 = {name: p.data().asnumpy() for name, p in net._collect_params_with_prefix().items()}
mpgluon.restore(net)
net.save_parameters(str(folder / "float32.params"))
masters = {name: p.data().asnumpy() for name, p in net._collect_params_with_prefix().items()}

# %%
from_file = read_parameters(folder / "checkpoint.npz")
rounded = [name for name, weight in in_fp16.items() if weight.dtype == np.float16]
differ = np.mean(np.concatenate([(masters[name] != in_fp16[name]).ravel() for name in rounded]))
print(f"{len(rounded)} arrays were FP16; {differ:.1%} of their masters are no FP16 numbers")
assert {weight.dtype.name for weight in masters.values()} == {"float32"}
assert masters.keys() == from_file.keys()
assert all(np.array_equal(masters[name], from_file[name]) for name in masters)
assert all(np.array_equal(masters[name].astype("float16"), in_fp16[name]) for name in rounded)
assert differ > 0.9

# %% [markdown]
# ## In inference 16 bits change logits a little, and a decision only where it was close
#
# *Inference* is running a trained network. It may use 16 bits for speed and memory, and needs no
# loss scale: there are no gradients. We compare the FP32 network, on the masters, with the cast
# network as it was trained. If the processor has instructions for BF16 (`check_machine` knows), we
# also take BF16, by `autocast`. The *logits* are the ten numbers that the network returns, and the
# largest one decides.
#
# In the picture each image has a mark for each format. To the right: its *lead*, by which the
# largest logit exceeds the second. Upwards: the largest error of its ten logits.

# %%
from mpgluon.diagnostics.doctor import check_machine

bfloat16 = {finding.topic: finding for finding in check_machine().findings}["bfloat16"]
net.hybridize()
logits["float32"] = net(test_images).asnumpy()
if bfloat16.level == "ok":
    amp.autocast(net, "bfloat16")
    net.hybridize()
    logits["bfloat16"] = net(test_images).asnumpy()
    mpgluon.restore(net)
for name, found in logits.items():
    accuracy = np.mean(found.argmax(axis=1) == test_labels.asnumpy())
    print(f"{name}: {accuracy:.3f} of the test images are recognised")
    assert accuracy > 0.3  # guessing would give 0.1

# %%
(second, best), wide, errors = np.sort(logits["float32"])[:, -2:].T, logits["float32"], {}
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
for name in ("float16", "bfloat16")[: len(logits) - 1]:
    narrow = logits[name]
    same = narrow.argmax(axis=1) == wide.argmax(axis=1)
    errors[name] = error = np.abs(narrow - wide).max(axis=1)
    look = {**FORMAT_LOOKS[name], "linestyle": "none"}
    axes.loglog(best - second, error, mfc="w", markersize=4, label=name, **look)
    print(f"{name}: {same.mean():.1%} of the decisions are those of FP32,", end=" ")
    print(f"largest error {error.max() / np.abs(wide).max():.1e} of the largest logit")
    assert same[2 * error < best - second].all()
axes.axline((0.1, 0.05), (1, 0.5), color="0.5", label="half the lead: a decision can change above")
axes.set(xlabel="lead of the best logit", ylabel="error of the logits", title="Each test image")
axes.legend(frameon=False, fontsize="small")
plt.show()
assert 0 < errors["float16"].mean() < errors.get("bfloat16", np.inf).mean()

# %% [markdown]
# For a decision to change, one of two logits must be wrong by at least half the lead. Where the
# error is less, nothing can happen. Most images are far below the line. So the accuracy changes, if
# at all, by images that were undecided anyway. BF16 has three binary digits less than FP16, hence
# its larger errors.
#
# ## Three files for three purposes
#
# A **checkpoint** continues a run. A **parameter file** holds weights, for whoever has the code of
# the network. An **export** is weights and the *graph* (the list of operators), for whoever has
# nothing but MXNet. The first cell below lists them.
#
# A checkpoint is the largest: FP16 weights, masters, Adam's two running averages for each weight,
# and random states. The second cell loads it into a network that was not cast. Its FP32 weights
# become the masters, and training can go on in FP32. A checkpoint is strict about everything else:
# with SGD in place of Adam, loading fails, here **on purpose**, and changes nothing.
#
# Parameter files are lenient. In the third cell plain Gluon loads both; `cast_dtype=True` allows
# another format than the file's. The masters are FP32 weights like any others.

# %%
from mpgluon.tables import Table

files = {
    "checkpoint.npz": ("go on training, bit for bit", "the network, mpgluon"),
    "float16.params": ("FP16 weights", "the network"),
    "float32.params": ("FP32 weights, from the masters", "the network"),
    "float16-0000.params": ("inference elsewhere; with -symbol.json", "MXNet only"),
}
size = {name: (folder / name).stat().st_size / 1024 for name in files}
rows = [(name, *texts, f"{size[name]:.0f}") for name, texts in files.items()]
print(Table(("file", "what for", "what it needs", "KiB"), rows))
count = sum(weight.size for weight in masters.values())
print(f"{count} numbers take {2 * count / 1024:.0f} KiB in 16 bits, {4 * count / 1024:.0f} in 32")
assert size["float16.params"] < 0.55 * size["float32.params"]
assert size["checkpoint.npz"] > 3 * size["float32.params"]

# %%
uncast = make_network()
uncast_trainer = gluon.Trainer(uncast.collect_params(), "adam", {"multi_precision": True})
amp.init_trainer(uncast_trainer)
mpgluon.load_checkpoint(folder / "checkpoint.npz", uncast, uncast_trainer)
loaded = [p.data().asnumpy() for p in uncast.collect_params().values()]
assert all(np.array_equal(one, master) for one, master in zip(loaded, masters.values()))

other = make_network()
other_trainer = gluon.Trainer(other.collect_params(), "sgd", {"multi_precision": True})
amp.init_trainer(other_trainer)
before = other[0].weight.data().asnumpy()
message = ""
try:
    mpgluon.load_checkpoint(folder / "checkpoint.npz", other, other_trainer)
except mpgluon.CheckpointError as error:
    message = str(error).replace(str(folder), "runs")
print(f"CheckpointError: {message}")
assert "Adam" in message
assert np.array_equal(other[0].weight.data().asnumpy(), before)  # nothing was changed

# %%
plain = make_network()
from_parameters = {}
for name in ("float16", "float32"):
    plain.load_parameters(str(folder / f"{name}.params"), cast_dtype=True)
    from_parameters[name] = plain(test_images).asnumpy()
loaded = [p.data().asnumpy() for p in plain.collect_params().values()]
difference = np.abs(from_parameters["float16"] - from_parameters["float32"]).max()
print(f"rounding the masters to FP16 moved a logit by up to {difference:.1e}")
assert all(np.array_equal(one, master) for one, master in zip(loaded, masters.values()))
assert difference > 0

# %% [markdown]
# ## An export computes the same bits where there is no mpgluon
#
# We start a second Python, which knows MXNet only. It loads the graph with
# `gluon.SymbolBlock.imports`, runs it on the test images, and writes its logits.

# %%
READER = """
import sys
import numpy
numpy.bool = bool  # MXNet 1.9.1 asks for it, and NumPy 1.24 has dropped it
import mxnet as mx
graph, parameters, images, result = sys.argv[1:]
block = mx.gluon.SymbolBlock.imports(graph, ["data"], parameters)
mx.nd.save(result, block(mx.nd.load(images)[0]))
print("elsewhere: was mpgluon imported?", "mpgluon" in sys.modules)
"""
mx.nd.save(str(folder / "images.nd"), test_images)


# %%
def elsewhere(name):
    """Return the logits that a fresh Python computes from an export."""
    names = (f"{name}-symbol.json", f"{name}-0000.params", "images.nd", "logits.nd")
    command = [sys.executable, "-c", READER, *(str(folder / name) for name in names)]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")
    return mx.nd.load(str(folder / "logits.nd"))[0].asnumpy()


there = elsewhere("float16")
print(f"largest difference of a logit: {np.abs(there - logits['float16']).max()}")
assert np.array_equal(there, logits["float16"])
assert not np.array_equal(there, logits["float32"])

# %% [markdown]
# Equal bit for bit: the casts are part of the graph. It has MXNet's own operators only, not the
# compiled ones with which mpgluon may have run it. And the casts are those of the device on which
# the network ran before the export: on a CPU they surround operators that compute in FP32, on a GPU
# operators take FP16 itself. So export on the kind of device that will run the graph.
#
# ## Gluon's default drops the casts, and says nothing
#
# `HybridBlock.export` has an argument `remove_amp_cast`, and in Gluon its default is `True`: it
# removes casts from the graph. What is written then is the FP32 network. A cast or autocast
# network of mpgluon keeps its casts unless told otherwise. We tell it otherwise.

# %%
amp.autocast(net, "float16")
net.hybridize()
net(test_images).wait_to_read()  # an export writes the graph of the latest run
for name, options in (("kept", {}), ("removed", {"remove_amp_cast": True})):
    net.export(str(folder / name), **options)
    there, kib = elsewhere(name), (folder / f"{name}-0000.params").stat().st_size / 1024
    apart = {dtype: float(np.abs(there - logits[dtype]).max()) for dtype in ("float16", "float32")}
    print(f"casts {name}: {kib:.0f} KiB, differences {apart}")
    assert (apart["float16"] == 0) == (name == "kept")
    assert (apart["float32"] == 0) == (name == "removed")
    assert kib > 1.9 * size["float16-0000.params"]
work.cleanup()

# %% [markdown]
# With its casts the export agrees with the FP16 network. Without them it differs from the FP32
# network by 0.0: it *is* the FP32 network. So compare outputs after every export, not accuracies,
# which hardly differ. Look at the sizes, too. Autocast keeps FP32 parameters, and so does its
# export. Half the size comes from `cast_block`. (To leave MXNet altogether, there is ONNX:
# [docs/deployment.md](../docs/deployment.md).)
#
# ## Summary
#
# - Several devices make the step of one, up to the order of a sum; replicas stay equal bit for bit.
#   BatchNorm sees its own device only.
# - Look for an overflow **after** the sum. Then all devices skip alike and all scales fall alike.
# - Add gradients in FP32. In FP16 the error grows with the number of workers; dividing first
#   loses small gradients.
# - The masters are the result of a training in FP16. `mpgluon.restore` puts them into the network.
# - In inference, 16 bits change a decision only where it was close. Measure it on your own network.
# - A checkpoint continues a run, parameters need the network's code, an export needs MXNet only.
#   Keep its casts, and compare its outputs.
#
# ## Exercises
#
# 1. Write a third way for `two_replicas`: each replica looks at its own gradient, but adds all of
#    them. What becomes of the weights? (In step 10 one of the first replica's 16 weights becomes
#    infinite. In step 11 all weights of the second become NaN, except that one, which becomes
#    infinite.)
# 2. Add gradients without anything in common, `noise` alone, in the three ways. Is FP16 one by one
#    still so much worse than the tree? (With 4096 workers by a factor of about ten.)
# 3. Round the masters of convolutions and dense layers to BF16 (BatchNorm's stay), with
#    `mpgluon.round_to(master, mpgluon.BFLOAT16)`. Put them into a plain network, and compare its
#    logits with FP32. How much of the mean BF16 error comes from the weights alone? (More than
#    half; the rest is rounding between the layers.)
#
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3: masters, loss scaling.
# - NVIDIA, "Training With Mixed Precision" user guide.
# - IEEE 754-2019, section 6.1: arithmetic with infinities.
# - Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, chapter 4: summation.
