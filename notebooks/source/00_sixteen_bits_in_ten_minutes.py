# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Sixteen bits in ten minutes
#
# You have a Gluon network that trains in FP32, with numbers of 32 bits. Three changes let it train
# in FP16 (`float16`): its numbers take half the memory, GPUs with Tensor Cores multiply them much
# faster, and it learns nearly as well. This page makes the changes one by one, in the training of a
# ResNet-18 on small pictures. It needs no GPU; on a GPU, the changed lines are the same.
#
# ![A Gluon training loop in which four lines are marked as new. 1: cast_block, which makes the
# network FP16 and leaves BatchNorm in FP32. 2: multi_precision, which keeps FP32 masters of the
# weights. 3: init_trainer and scale_loss, which multiply the loss by a scale S that adapts. The
# unchanged trainer.step divides by S, or skips the step](figures/00_three_changes.svg)
#
# ## What you will be able to do
#
# - turn your FP32 loop into an FP16 loop, and know the purpose of each change;
# - check that the network learns nearly as before, and gives the same answers;
# - fine-tune a trained network on other categories, from its checkpoint;
# - say what FP16 costs and saves on your machine, in seconds and in MiB.

# %% tags=["parameters"]
FAST = False  # True: the same code with a smaller network, smaller images and fewer steps

# %% [markdown]
# ## You begin with an FP32 loop
#
# The pictures are *shapes*: coloured figures of random size, place and rotation, on cluttered
# backgrounds. This repository renders them, so there is nothing to download. We train on ten
# categories, and later fine-tune on four others.

# %% tags=["setup"]
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.append("..")  # recipes/ and study/ are beside this folder

import mpgluon
from mpgluon import amp
from mpgluon.tools.plots import FORMAT_LOOKS
from mpgluon_tools.tables import Table

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon.model_zoo import vision

from recipes.data import list_images, render_shapes, stratified_split
from recipes.data.augment import IMAGENET_MEAN, IMAGENET_STD
from recipes.data.loaders import eval_loader, train_loader
from recipes.data.shapes import class_names
from teaching import check

IMAGE_SIZE = 32 if FAST else 48  # pixels
BATCH_SIZE, EPOCHS, TUNING_EPOCHS = (8, 2, 2) if FAST else (20, 8, 4)
TRAIN, TEST = (8, 4) if FAST else (40, 20)  # images of each category

files = tempfile.TemporaryDirectory()  # all that this page writes
WORK = Path(files.name)
source = render_shapes(WORK, classes=14, images_per_class=TRAIN + TEST)
chosen = class_names(14)


def batches_of(categories, train_count):
    """Return names, and batches for training and for the test: images, and labels as int32."""
    tree = WORK / categories[0]
    for category in categories:
        (tree / category).mkdir(parents=True)
        for path in sorted((source / category).iterdir())[: TRAIN + TEST]:
            (tree / category / path.name).write_bytes(path.read_bytes())
    folder = list_images(tree)
    train, test = stratified_split(folder.labels, train_count, seed=0)
    shape = {"batch_size": BATCH_SIZE, "image_size": IMAGE_SIZE}
    training = train_loader(folder, train, scale=(0.5, 1), **shape)
    return folder.classes, training, list(eval_loader(folder, test, **shape))


def adam(net, batches, epochs, **more):
    """Return a Trainer whose learning rate climbs for an epoch, then falls to zero."""
    steps = epochs * len(batches)
    climb = min(len(batches), steps // 2)
    schedule = mx.lr_scheduler.CosineScheduler(steps, base_lr=0.001, warmup_steps=climb)
    options = {"learning_rate": 0.001, "lr_scheduler": schedule, **more}
    return gluon.Trainer(net.collect_params(), "adam", options)


names, training, test = batches_of(chosen[:10], TRAIN)
print(f"{len(training)} batches of {BATCH_SIZE} images in an epoch, of {len(names)} categories")

# %% tags=["plot"] alt="Ten small pictures in two rows, one of each category, with its name."
pixels, labels = (np.concatenate([array.asnumpy() for array in arrays]) for arrays in zip(*test))
pixels = pixels.transpose(0, 2, 3, 1) * IMAGENET_STD + IMAGENET_MEAN

figure, panels = plt.subplots(2, 5, figsize=(6, 2.9), layout="constrained")
for label, axes in enumerate(panels.flat):
    axes.imshow(pixels[labels == label][0].clip(0, 1))
    axes.set_title(names[label], fontsize=11)
    axes.axis("off")
plt.show()

# %% [markdown]
# This is the training loop that you know. `accuracy` is the share of the test images that a network
# classifies correctly. `adam` (in the set-up) returns a `gluon.Trainer` with Adam and a schedule of
# learning rates; it passes further options to the optimizer.


# %%
def new_network(classes):
    mx.random.seed(0)
    np.random.seed(0)
    net = vision.resnet18_v1(classes=classes)
    net.initialize(mx.init.MSRAPrelu("in", slope=0))
    net(mx.nd.zeros((1, 3, IMAGE_SIZE, IMAGE_SIZE)))  # now all shapes are known
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def accuracy(net, test):
    right = [net(images).asnumpy().argmax(axis=1) == labels.asnumpy() for images, labels in test]
    return np.concatenate(right).mean()


loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()


def train_fp32(net, trainer, training, test, epochs):
    history = []
    for _ in range(epochs):
        losses = []
        for images, labels in training:
            with autograd.record():
                loss = loss_fn(net(images), labels)
            loss.backward()
            trainer.step(len(labels))
            losses.append(loss.mean().asscalar())
        history.append((np.mean(losses), accuracy(net, test)))
    return history


# %%
fp32_net = new_network(classes=10)
trainer = adam(fp32_net, training, EPOCHS)
fp32_history = train_fp32(fp32_net, trainer, training, test, EPOCHS)
print(f"FP32: test accuracy {fp32_history[-1][1]:.2f}")

# %% [markdown]
# ## Change 1: cast the network, and leave BatchNorm in FP32
#
# `cast_block` changes weights and computation to FP16. BatchNorm stays in FP32, because its sums of
# squares would overflow in FP16. The network's result is FP32, so the loss is FP32 too. Labels stay
# `int32`: FP16 cannot hold 2049, for example.

# %%
net = new_network(classes=10)
report = mpgluon.cast_block(net)
print(report)

# %% tags=["unseen"]
formats = {name: np.dtype(p.dtype).name for name, p in net.collect_params().items()}
assert all((f == "float32") == ("batchnorm" in name) for name, f in formats.items())
assert net(test[0][0]).dtype == np.float32

# %% [markdown]
# [Lesson 04](04_casting_a_network.ipynb) explains which layers stay in FP32, and how to keep
# others. [Lesson 01](01_sixteen_bits.ipynb) shows which numbers FP16 can hold.
#
# ## Change 2: let the optimizer keep FP32 weights
#
# A small update of an FP16 weight is rounded away. With `multi_precision` the optimizer updates an
# FP32 copy of each weight, its *master*, and writes the rounded master into the network
# ([lesson 02](02_lost_updates.ipynb)).

# %%
trainer = adam(net, training, EPOCHS, multi_precision=True)

# %% [markdown]
# ## Change 3: scale the loss
#
# Small gradients become zero in FP16. So the loss is multiplied by a *loss scale* S before the
# backward pass. This makes all gradients S times as large, and `trainer.step` divides them by S
# again. S begins at 65536 and adapts: if a gradient overflows (becomes infinite), the step is
# skipped and S is halved ([lesson 03](03_lost_gradients.ipynb)).

# %%
amp.init_trainer(trainer)


def train_fp16(net, trainer, training, test, epochs):
    history = []
    for _ in range(epochs):
        losses = []
        for images, labels in training:
            with autograd.record():
                loss = loss_fn(net(images), labels)
                with amp.scale_loss(loss, trainer) as scaled_loss:  # new
                    autograd.backward(scaled_loss)
            trainer.step(len(labels))  # divides by S, or skips
            losses.append(loss.mean().asscalar())
        history.append((np.mean(losses), accuracy(net, test)))
    return history


# %%
training.set_epoch(0)  # the same images in the same order
fp16_history = train_fp16(net, trainer, training, test, EPOCHS)
print(f"FP16: test accuracy {fp16_history[-1][1]:.2f}")

# %% [markdown]
# These are all the changes. [Lesson 09](09_a_loop_of_your_own.ipynb) adds accumulation of
# gradients, clipping and a second loss.
#
# ## FP16 learns nearly as well as FP32
#
# Both runs began with the same weights, and saw the same images in the same order.

# %% tags=["plot"] alt="Loss and test accuracy by epoch; FP16 stays close to FP32."
figure, panels = plt.subplots(1, 2, figsize=(6, 3), layout="constrained")
looks = ("FP32", fp32_history, "float32"), ("FP16", fp16_history, "float16")
for name, history, dtype in looks:
    for axes, curve in zip(panels, zip(*history)):
        axes.plot(range(1, EPOCHS + 1), curve, mfc="w", label=name, **FORMAT_LOOKS[dtype])
for axes in panels:
    axes.set(xlabel="epoch", ylim=(0, None), xticks=range(1, EPOCHS + 1))
panels[0].set(ylabel="training loss", title="Both formats learn ...")
panels[1].set(ylabel="test accuracy (share)", title="... and are right as often")
panels[0].legend()
plt.show()


# %% tags=["setup"]
rows = []
fp16_skipped = amp.skipped_steps(trainer)
for name, history, skipped in (("FP32", fp32_history, 0), ("FP16", fp16_history, fp16_skipped)):
    loss, share = history[-1]
    rows.append((name, f"{loss:.3f}", f"{share:.2f}", f"{skipped}"))
print(Table(("", "training loss", "test accuracy", "skipped steps"), rows))

tested = sum(len(labels) for _, labels in test)
share = np.mean([fp32_history[-1][1], fp16_history[-1][1]])
chance = np.sqrt(2 * share * (1 - share) / tested)
print(f"with {tested} test images, chance alone makes accuracies differ by about {chance:.2f}")

# %% tags=["unseen"]
assert abs(fp32_history[-1][1] - fp16_history[-1][1]) <= 4 * chance
assert FAST or min(fp32_history[-1][1], fp16_history[-1][1]) > 0.9
assert FAST or fp16_history[-1][0] < fp16_history[0][0] / 2
assert fp16_skipped < EPOCHS * len(training) / (1 if FAST else 5)

# %% [markdown]
# The two lines need not coincide: rounding changes a loss a little, and from then on the two runs
# differ. FP16 also starts to learn a little later: S is too large at first, on purpose, and each
# skipped step halves it. [Lesson 05](05_resnet50_on_caltech101.ipynb) compares three formats on
# photographs, with several seeds. [Lesson 06](06_reading_the_diagnostics.ipynb) helps if a run does
# not learn in FP16.
#
# ## Fine-tune from a checkpoint, with a new head
#
# A checkpoint holds the FP32 masters, the optimizer's state and S. Load it, perhaps on another day,
# into a network and a Trainer that are made as above.

# %%
mpgluon.save_checkpoint(WORK / "ten.npz", net, trainer)

trained = new_network(classes=10)
mpgluon.cast_block(trained)
trainer = adam(trained, training, EPOCHS, multi_precision=True)
amp.init_trainer(trainer)
mpgluon.load_checkpoint(WORK / "ten.npz", trained, trainer)
print(f"test accuracy {accuracy(trained, test):.2f}, loss scale {amp.loss_scale(trainer):g}")

# %% tags=["unseen"]
assert accuracy(trained, test) == fp16_history[-1][1]
assert amp.loss_scale(trainer) == 2.0 ** (16 - fp16_skipped)

# %% [markdown]
# Now we train on the four other categories, with half as many images. `restore` makes the network
# FP32 again, with the values of the masters. A new network takes all its layers except the last
# one. The new network is cast after that, so its masters begin with unrounded values. S begins at
# its last value.

# %%
mpgluon.restore(trained)
tuned = new_network(classes=4)
tuned.features = trained.features  # the last layer, tuned.output, keeps its random weights

# %% tags=["unseen"]
masters = mpgluon.checkpoint.read_parameters(WORK / "ten.npz")
taken = {name: p.data().asnumpy() for name, p in tuned._collect_params_with_prefix().items()}
features = [name for name in masters if name.startswith("features.")]
assert len(features) == len(masters) - 2
assert all(np.array_equal(taken[name], masters[name]) for name in features)
assert any((masters[name] != masters[name].astype("float16")).any() for name in features)

# %%
new_names, new_training, new_test = batches_of(chosen[10:], TRAIN // 2)
loss_scale = amp.loss_scale(trainer)


def tune(net):
    mpgluon.cast_block(net)
    trainer = adam(net, new_training, TUNING_EPOCHS, multi_precision=True)
    amp.init_trainer(trainer, mpgluon.DynamicLossScale(init_scale=loss_scale))
    new_training.set_epoch(0)
    return train_fp16(net, trainer, new_training, new_test, TUNING_EPOCHS)


tuned_history = tune(tuned)
fresh_history = tune(new_network(classes=4))
print(f"categories: {', '.join(new_names)}; test accuracy after each epoch,")
for beginning, history in (("ten categories", tuned_history), ("random weights", fresh_history)):
    print(f"begun with {beginning}:", *(f"{share:.2f}" for _, share in history))

# %% tags=["unseen"]
assert FAST or tuned_history[1][1] > fresh_history[1][1] + 0.2

# %% [markdown]
# With the features learned on the first ten categories, the network is far ahead after two epochs.
# (On images as simple as these, the network that begins with random weights then catches up.)
# [Lesson 10](10_after_training.ipynb) shows what else can be made from a trained network, from a
# parameter file to an ONNX file.
#
# ## Both networks give the same answers, where they are sure
#
# Here are eight of the test images: first the four of which the FP32 network is least sure, then
# four others. Above each image is its right category. To the right of it are the answers of both
# networks, with the probability that each network gives to its answer; the line is as long as the
# probability. A cross marks a wrong answer. (One image in twenty is grey, so its hue does not
# help.)

# %% tags=["setup"]
networks = {"float32": ("FP32", fp32_net), "float16": ("FP16", net)}
probabilities = {
    dtype: np.concatenate([network(images).softmax().asnumpy() for images, _ in test])
    for dtype, (_, network) in networks.items()
}
answers = {dtype: shares.argmax(axis=1) for dtype, shares in probabilities.items()}
surest = probabilities["float32"].max(axis=1).argsort()  # least sure first
eight = [*surest[:4], *surest[[tested // 5 * fifth for fifth in (1, 2, 3, 4)]]]

# %% tags=["plot"] alt="Eight images, each with the answers of FP32 and FP16 and their probabilities: both are unsure of the first four, and sure of the last four."
figure, panels = plt.subplots(4, 4, figsize=(6, 6), width_ratios=(1, 2, 1, 2), layout="constrained")
for place, (picture, lines) in zip(eight, panels.reshape(8, 2)):
    picture.imshow(pixels[place].clip(0, 1))
    picture.set_title(names[labels[place]])
    picture.axis("off")
    for height, (dtype, (name, _)) in zip((1, 0), networks.items()):
        answer = answers[dtype][place]
        probability = probabilities[dtype][place, answer]
        cross = "" if answer == labels[place] else " \N{BALLOT X}"
        lines.plot((0, probability), (height, height), markevery=[1], **FORMAT_LOOKS[dtype])
        lines.text(0, height + 0.2, f"{name}: {names[answer]} {probability:.2f}{cross}")
    lines.set(xlim=(-0.02, 1.08), ylim=(-0.3, 1.8), xticks=(0, 0.5, 1), xticklabels=(), yticks=())
    lines.spines[["left", "top", "right"]].set_visible(False)
for lines in panels[-1, 1::2]:
    lines.set_xticklabels(("0", "0.5", "1"))
    lines.set_xlabel("probability")
plt.show()

equal = answers["float32"] == answers["float16"]
print(f"both networks give the same answer to {equal.sum()} of the {tested} test images")

# %% tags=["unseen"]
for dtype, history in (("float32", fp32_history), ("float16", fp16_history)):
    assert np.mean(answers[dtype] == labels) == history[-1][1]
    assert np.allclose(probabilities[dtype].sum(axis=1), 1, atol=1e-5)
sure = np.minimum(*(shares.max(axis=1) for shares in probabilities.values())) > 0.9
assert FAST or (sure.mean() > 0.8 and equal[sure].mean() > 0.99)
assert FAST or equal.mean() > 0.9

# %% [markdown]
# ## What sixteen bits cost and save on this machine
#
# We time training steps (forward, backward and update) of both networks in turn, on one batch. The
# shortest time is shown, because other work on the machine only adds time. Then we add up the
# memory for the parameters: the network itself, a gradient for each parameter, and the arrays of
# the optimizer. These are Adam's two running averages, and in FP16 also the masters.


# %% tags=["setup"]
def mebibytes(arrays):
    return sum(array.size * np.dtype(array.dtype).itemsize for array in arrays) / 2**20


def timed(net, trainer, images, labels):
    began = time.perf_counter()
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(len(labels))
    mx.nd.waitall()  # MXNet computes in the background
    return time.perf_counter() - began


trainers, seconds = {}, {"float32": [], "float16": []}
for dtype, (_, network) in networks.items():
    trainers[dtype] = adam(network, training, EPOCHS, multi_precision=dtype == "float16")
    fp16_scale = mpgluon.DynamicLossScale(init_scale=loss_scale / 16)  # no step is to be skipped
    amp.init_trainer(trainers[dtype], fp16_scale if dtype == "float16" else mpgluon.NoLossScale())
training.set_epoch(0)
batch = next(iter(training))
for _ in range(3 if FAST else 12):
    for dtype, (_, network) in networks.items():
        seconds[dtype].append(timed(network, trainers[dtype], *batch))

rows, sizes = [], {}
for dtype, (name, network) in networks.items():
    trainers[dtype].save_states(str(WORK / dtype))
    parameters = network.collect_params().values()
    sizes[dtype] = (
        mebibytes(p.data() for p in parameters),
        mebibytes(p.grad() for p in parameters if p.grad_req != "null"),
        (WORK / dtype).stat().st_size / 2**20,
    )
    step = f"{min(seconds[dtype]):.2f}"
    rows.append((name, step, *(f"{size:.0f}" for size in (*sizes[dtype], sum(sizes[dtype])))))
threads = os.environ.get("OMP_NUM_THREADS", os.cpu_count())
print(f"threads: {threads}; arithmetic of FP16: {report.arithmetic}; sizes in MiB")
print(Table(("", "seconds per step", "network", "gradients", "optimizer", "together"), rows))

# %% tags=["unseen"]
assert not any(map(amp.skipped_steps, trainers.values()))
(fp32_size, fp32_gradients, fp32_optimizer), (size, gradients, optimizer) = sizes.values()
assert abs(size / fp32_size - 0.5) < 0.01
assert abs(gradients / fp32_gradients - 0.5) < 0.01
assert abs(optimizer / fp32_optimizer - 1.5) < 0.01  # two means, and masters
files.cleanup()

# %% [markdown]
# - **Memory.** The FP16 network takes half the memory, and so do its gradients; but the masters
#   take as much as was saved. Predictions need only the network, so they save half. Training saves
#   memory where it grows with the batch, in the results of the layers that the backward pass needs:
#   [lesson 07](07_speed_and_memory.ipynb) measures it.
# - **Time.** A CPU computes in FP32 and rounds each result to FP16 (FP16 is *emulated*), so FP16
#   saves no time there. It saves time where the hardware multiplies FP16 numbers: on a GPU with
#   Tensor Cores. The seconds above were measured on the machine that made this page, where other
#   programs may have run.
#
# ## Summary
#
# - Three changes turn an FP32 loop into an FP16 loop: `cast_block`, `multi_precision=True`, and a
#   loss scale.
# - The FP16 network learns nearly as well, and gives the same answers where both networks are sure.
# - A checkpoint holds the FP32 masters, so training can continue in either format.
# - FP16 halves the memory of the network. It makes a GPU with Tensor Cores faster, not a CPU.
#
# ## Exercises
#
# Each answer is checked by running it. A solution is folded below each.

# %% [markdown]
# **00.1** (level 1) A network's largest gradient is 3, before it is multiplied by S. The largest
# FP16 number is 65504, and S begins at 65536. How many steps are skipped before the first step that
# is not skipped? Hand in a number.

# %%
answer = ...
check("00.1", answer)

# %% tags=["solution"]
# 3 x 65536, 3 x 32768 overflow; 3 x 16384 = 49152 does not.
assert check("00.1", 2)

# %% [markdown]
# **00.2** (level 2) Write `to_fp16(net)`, which makes all three changes to an FP32 network and
# returns a `gluon.Trainer` with Adam and a learning rate of 0.0001. Hand in the function. The check
# trains a small network with it.


# %%
def to_fp16(net):
    return gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.0001})  # change this


answer = ...
check("00.2", answer)


# %% tags=["solution"]
def with_three_changes(net):
    mpgluon.cast_block(net)
    options = {"learning_rate": 0.0001, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "adam", options)
    amp.init_trainer(trainer)
    return trainer


assert check("00.2", with_three_changes)

# %% [markdown]
# ## Where to go from here
#
# - What do sixteen bits hold, and what do they lose? Lessons [01](01_sixteen_bits.ipynb),
#   [02](02_lost_updates.ipynb) and [03](03_lost_gradients.ipynb).
# - BF16 (`bfloat16`) needs one change only, `amp.autocast(net, "bfloat16")`:
#   [lesson 04](04_casting_a_network.ipynb).
# - Three formats side by side, and a run that is stopped and continues to the same bits:
#   [lesson 05](05_resnet50_on_caltech101.ipynb).
# - A network that does not learn in FP16: [lesson 06](06_reading_the_diagnostics.ipynb).
# - Time and memory: [lesson 07](07_speed_and_memory.ipynb).
# - Several devices: [lesson 08](08_several_devices.ipynb).
# - Accumulated gradients, clipping, two losses: [lesson 09](09_a_loop_of_your_own.ipynb).
# - Files for other programs: [lesson 10](10_after_training.ipynb).
# - Numbers of eight bits, and of six: [lesson 11](11_after_sixteen_bits.ipynb).
#
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018.
# - NVIDIA, "Training With Mixed Precision" user guide.
#
# ## The whole job is one command
#
# The second line trains ResNet-50 v2 on all of Caltech 101, at 224 pixels, and writes a log,
# checkpoints and curves. It is meant for a GPU; on a CPU, try `make demo` first.
#
# ```
# python scripts/download_caltech.py --data-dir data
# python scripts/train_caltech.py --dtype float16
# ```

# %% [markdown]
# [All lessons](README.md) · [01 Which numbers do sixteen bits hold? →](01_sixteen_bits.ipynb)
