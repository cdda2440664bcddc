# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Does ResNet-50 learn as well in sixteen bits?
#
# ## What you will be able to do
#
# - train an image classifier in FP32, float16 and bfloat16, and say what each needs;
# - compare three training runs, and know which differences mean nothing;
# - stop a run at any step and continue it to the same bits;
# - start a 16-bit run from FP32 parameters that are trained already.
#
# **Words used here.** Gluon computes in *FP32*: numbers of 32 bits. *FP16* (`"float16"` in code)
# and *BF16* (`"bfloat16"`) have 16. FP16 is finer, but its largest number is 65504: above that, it
# *overflows* to infinity. BF16 has FP32's range, and only 8 significant bits. *Mixed precision*
# uses 16 bits where most of the work is, and FP32 where rounding would hurt.

# %% tags=["parameters"]
FAST = False  # True: the same code with a small network, small images and few steps
SHARED = "../../shared"  # photographs beside the checkout, on some machines
DATA_DIRS = "../data", f"{SHARED}/caltech101", f"{SHARED}/caltech101-mini"  # the first that exists
RECORDS = "../results/evidence/caltech101"  # runs on all of Caltech 101
CATEGORIES = (
    *("Leopards", "Motorbikes", "airplanes", "bonsai", "butterfly"),
    *("chandelier", "grand_piano", "ketch", "sunflower", "watch"),
)
MODEL, IMAGE_SIZE = ("cifar_resnet20_v1", 32) if FAST else ("resnet50_v2", 64)  # pixels
IMAGES_PER_CLASS, TRAIN_PER_CLASS = (12, 8) if FAST else (60, 40)
BATCH_SIZE, EPOCHS, SEED = (10, 3, 0) if FAST else (20, 10, 0)
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 1e-4

# %%
import json
import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

# %% [markdown]
# ## 1. Rounding images to float16 loses nothing
#
# The images are photographs of Caltech 101, the first of ten of its categories, so that the lesson
# takes minutes; section 3 has the result on all 101 categories. `scripts/download_caltech.py`
# fetches them into `data/`. Any folder with `101_ObjectCategories` in it will do: name it in
# `DATA_DIRS`. If there is none, ten rendered shapes take their place. A line below says which data
# was used. We copy the images into one folder per category: any images of yours in that layout
# will do.
#
# A *loader* decodes images, cuts out a square, shrinks it and *normalizes*: from each colour it
# subtracts the mean of many photographs, and divides by their standard deviation. The picture
# shows one image of each category as the network will see it.
# %%
from mpgluon.data import find_tree, list_images, render_shapes

files = tempfile.TemporaryDirectory()  # all that this notebook writes; the last cell removes it
WORK = Path(files.name)
found = [Path(folder) for folder in DATA_DIRS if (Path(folder) / "101_ObjectCategories").is_dir()]
source = find_tree(found[0]) if found else render_shapes(WORK, images_per_class=IMAGES_PER_CLASS)
chosen = CATEGORIES if found else list_images(source).classes
DATASET = "photographs of Caltech 101" if found else "rendered shapes (no photographs here)"


# %%
def copy_first(count, tree):
    for path in (path for name in chosen for path in (source / name).iterdir()):
        if int(path.stem[-4:]) <= count:  # image_0001.jpg, image_0002.jpg, ...
            (tree / path.parent.name).mkdir(parents=True, exist_ok=True)
            (tree / path.parent.name / path.name).write_bytes(path.read_bytes())
    return list_images(tree)


folder = copy_first(IMAGES_PER_CLASS, WORK / "images")
print(f"data set: {DATASET}, {len(folder)} images, {len(folder.classes)} categories")

# %%
from mpgluon.data.augment import IMAGENET_MEAN, IMAGENET_STD
from mpgluon.data.loaders import eval_loader, train_loader

first = [int(np.flatnonzero(folder.labels == label)[0]) for label in range(10)]
images, labels = next(iter(eval_loader(folder, first, batch_size=10, image_size=IMAGE_SIZE)))
pixels = images.asnumpy().transpose(0, 2, 3, 1) * IMAGENET_STD + IMAGENET_MEAN

figure, panels = plt.subplots(2, 5, figsize=(9, 4.2), layout="constrained")
for axes, image, label in zip(panels.flat, pixels, labels.asnumpy()):
    axes.imshow(image.clip(0, 1))
    axes.set_title(f"{label}: {folder.classes[label]}")
    axes.axis("off")
figure.suptitle(f"One image of each category, {IMAGE_SIZE} x {IMAGE_SIZE} pixels: label and name")
plt.show()

# %% [markdown]
# A colour in a file has 256 levels. Does float16 keep them apart after normalization? We do it
# with NumPy first. Then we ask the loader for float16 images and compare.
#
# The labels are numbers too, but not measurements: a rounded label is another category. In
# float16 the odd numbers above 2048 do not exist. So labels stay `int32`.

# %%
from mpgluon import BFLOAT16, FLOAT16, FLOAT32

assert (FLOAT16.max, BFLOAT16.significand_bits) == (65504, 8)  # "Words used here"
assert BFLOAT16.exponent_bits == FLOAT32.exponent_bits  # so their ranges are alike
levels = (np.arange(256, dtype=np.float32)[:, None] / 255 - IMAGENET_MEAN) / IMAGENET_STD
different = [len(np.unique(channel.astype(np.float16))) for channel in levels.T]
print("levels that float16 tells apart, in red, green and blue:", different)

how = {"batch_size": 10, "image_size": IMAGE_SIZE, "dtype": "float16"}
fp16_images, fp16_labels = next(iter(eval_loader(folder, first, **how)))
print("label 2049 in float16 would become", int(np.float16(2049)))

assert different == [256, 256, 256]
assert np.array_equal(fp16_images.asnumpy(), images.asnumpy().astype(np.float16))
assert fp16_labels.dtype == np.int32

# %% [markdown]
# ## 2. Three changes turn an FP32 loop into a float16 loop
#
# First a network and a loop as anyone would write them in FP32. `build_network` takes a network of
# that name from a model zoo and gives it random weights. The *schedule* lets the learning rate
# climb for one epoch and then fall to zero. (An *epoch* is one pass over the training images.)
# `TrainingConfig` holds all that a run depends on: section 3 will need it.
#
# One line of the loop is not in most tutorials: `images.attach_grad()`. ResNet v2 begins with a
# layer that normalizes its images by running averages (*BatchNorm*). MXNet renews those averages
# in the backward pass, and that pass leaves out a layer with nothing to learn, unless its input
# wants a gradient. Without the line, the network would be tested on images that are normalized
# differently from those it was trained on.

# %%
from mpgluon.data import stratified_split
from mpgluon.training import InterruptedRunError, TrainingConfig, train

CONFIG = TrainingConfig(
    model=MODEL, data_dir=str(WORK / "images"), train_per_class=TRAIN_PER_CLASS,
    image_size=IMAGE_SIZE, min_crop_area=0.5, batch_size=BATCH_SIZE, epochs=EPOCHS,
    warmup_epochs=1, optimizer="adam", learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY,
    workers=0, seed=SEED, keep_checkpoints=1,
)  # fmt: skip
train_indices, test_indices = stratified_split(folder.labels, TRAIN_PER_CLASS, seed=SEED)
EPOCH_STEPS = len(train_indices) // BATCH_SIZE
TOTAL_STEPS = EPOCHS * EPOCH_STEPS
growth_interval = max(10, TOTAL_STEPS // 10)  # of the loss scale, explained below
print(len(train_indices), "training and", len(test_indices), "test images;", TOTAL_STEPS, "steps")
assert not set(train_indices) & set(test_indices)


# %%
from mpgluon.training.networks import build_network


def network():
    mx.random.seed(SEED)
    np.random.seed(SEED)  # MXNet draws first weights from both
    return build_network(MODEL, classes=10, image_size=IMAGE_SIZE, devices=[mx.cpu()])


def adam(net, **more):
    schedule = mx.lr_scheduler.CosineScheduler(
        TOTAL_STEPS, base_lr=LEARNING_RATE, warmup_steps=EPOCH_STEPS
    )
    options = {"learning_rate": LEARNING_RATE, "lr_scheduler": schedule, "wd": WEIGHT_DECAY}
    return gluon.Trainer(net.collect_params(), "adam", {**options, **more})


# %%
net = network()
net.hybridize(static_alloc=True, static_shape=True)
trainer, loss_fn = adam(net), gluon.loss.SoftmaxCrossEntropyLoss()
shape = {"batch_size": BATCH_SIZE, "image_size": IMAGE_SIZE}
loader_options = {"scale": (0.5, 1), "seed": SEED, **shape}  # crops of half an image or more
plain_losses = []
for images, labels in train_loader(folder, train_indices, **loader_options):
    images.attach_grad()
    with autograd.record():
        loss = loss_fn(net(images), labels)
    loss.backward()
    trainer.step(len(labels))
    plain_losses.append(float(loss.asnumpy().mean(dtype="float64")))
print(f"FP32, by hand, first loss {plain_losses[0]:.4f}, last loss {plain_losses[-1]:.4f}")

# %% [markdown]
# Now float16, and what is new (`start` below has the first two and half of the third,
# `mixed_step` the rest):
#
# 1. `cast_block` turns weights and computation to float16. BatchNorm stays FP32: it adds up many
#    squares.
# 2. `multi_precision` keeps an FP32 copy of each weight, its *master*. The optimizer changes the
#    master. Small changes would vanish in a float16 weight.
# 3. `init_trainer` and `scale_loss` multiply the loss by the *loss scale* S before the backward
#    pass, which makes all gradients S times larger, so that small ones do not become zero.
#    `trainer.step` divides by S. If a gradient overflowed, the step changes nothing and S is
#    halved. After `growth_interval` good steps in a row S is doubled.
#
# bfloat16 needs less. *Autocast* leaves the weights in FP32 and rounds them each time they are
# used: they are their own masters. BF16's range is FP32's, so S may be 1, which `"none"` means.

# %%
import mpgluon
from mpgluon import amp


def start(dtype, init_scale=2.0**16):
    net, loss_scale = network(), "none"
    if dtype == "float16":
        mpgluon.cast_block(net)
        loss_scale = mpgluon.DynamicLossScale(init_scale, growth_interval=growth_interval)
    elif dtype == "bfloat16":
        amp.autocast(net, "bfloat16")
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = adam(net, multi_precision=dtype == "float16")
    amp.init_trainer(trainer, loss_scale)
    return net, trainer


# %%
def mixed_step(net, trainer, images, labels):
    images.attach_grad()
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(len(labels))  # skips itself after an overflow
    return float(loss.asnumpy().mean(dtype="float64"))


net, trainer = start("float16")
batches = list(islice(train_loader(folder, train_indices, dtype="float16", **loader_options), 8))
mixed_losses = [mixed_step(net, trainer, *batch) for batch in batches]
print(f"by hand, first loss: {mixed_losses[0]:.4f} in float16, {plain_losses[0]:.4f} in FP32")
assert abs(mixed_losses[0] / plain_losses[0] - 1) < 0.05

# %% [markdown]
# ## 3. Three formats, one result
#
# `mpgluon.training.train` is the same loop with a test after each epoch, a log and checkpoints. We
# run it three times, from the same first weights, with the same images in the same order. Are
# these runs really the loops of section 2? The first epoch in FP32 and the first steps in float16
# must then have had the same losses: not nearly, but bit for bit.

# %%
FORMATS = ("float32", "float16", "bfloat16")
results, steps, epochs = {}, {}, {}


def run(config, name):
    """Train; return results and the log's events of steps and of epochs."""
    config = replace(config, output_dir=str(WORK / name))
    result = train(config)
    lines = (WORK / name / "history.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    return result, *([e for e in log if e["event"] == kind] for kind in ("step", "epoch"))


for dtype in FORMATS:
    results[dtype], steps[dtype], epochs[dtype] = run(replace(CONFIG, dtype=dtype), dtype)


# %%
print(f"{EPOCHS} epochs, {len(steps['float16'])} steps in each format, {MODEL}, {DATASET}")
same = {
    "FP32": [step["loss"] for step in steps["float32"][:EPOCH_STEPS]] == plain_losses,
    "float16": [step["loss"] for step in steps["float16"][:8]] == mixed_losses,
}
print("equal losses by hand and by train():", same)
assert all(same.values())

# %%
from mpgluon.plots import FORMAT_LOOKS, draw_loss_scale

figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for dtype in FORMATS:
    numbers = [epoch["epoch"] + 1 for epoch in epochs[dtype]]
    for axes, name in zip(panels, ("train_loss", "test_accuracy")):
        values = [epoch[name] for epoch in epochs[dtype]]
        axes.plot(numbers, values, mfc="w", label=dtype, **FORMAT_LOOKS[dtype])
titles = "Loss, mean of each epoch", "Right answers in the test"
panels[0].set(xlabel="epoch", ylabel="training loss, mean of -log(p)", title=titles[0])
panels[1].set(xlabel="epoch", ylabel="test accuracy (share)", title=titles[1])
for axes, corner in zip(panels, ("upper right", "lower right")):
    axes.set(xticks=range(1, EPOCHS + 1), ylim=(0, None))
    axes.legend(loc=corner)
plt.show()

# %% [markdown]
# The lines do not coincide, and need not. Rounding changes a loss a little, and a little later
# each run goes its own way, as it would with another seed. float16 also begins late: its first
# steps were skipped (section 4). So the question is not whether the
# final accuracies are equal, but whether they differ by more than luck.
#
# Luck has a size. Among $n$ test images, an accuracy $p$ has a *standard error* of
# $\sqrt{p(1-p)/n}$, and the difference of two accuracies $\sqrt{2}$ times that. Differences above
# three standard errors are rare if both networks are equally good.

# %%
from mpgluon.tables import Table

base, n = results["float32"]["test_accuracy"], len(test_indices)
luck = 3 * np.sqrt(2 * base * (1 - base) / n)
rows = []
for dtype in FORMATS:
    losses, accuracy = [e["train_loss"] for e in epochs[dtype]], results[dtype]["test_accuracy"]
    skipped = str(results[dtype]["skipped_steps"])
    rows += [(dtype, f"{accuracy:.3f}", f"{accuracy - base:+.3f}", f"{losses[-1]:.3f}", skipped)]
    assert losses[-1] < losses[0]
    assert abs(accuracy - base) < luck
print(Table(("format", "test accuracy", "minus FP32", "training loss", "skipped steps"), rows))
print(f"three standard errors with {n} test images: {luck:.3f}; guessing would be right in 0.100")

# %% [markdown]
# ### All of Caltech 101
#
# Two hundred test images show only large differences. So the three formats were also trained on
# all 101 categories, with three seeds each: 30 photographs of each category for training, and up to
# 50 of the others for testing. That takes hours, and this notebook reads the records of those runs
# instead of repeating them (`python scripts/evidence.py run caltech101` does; it is the same
# `train`, with the recipe above).
#
# Some categories have 50 test photographs, others a single one. The literature therefore gives the
# *mean of the categories' accuracies*, in which each category counts as much as another. Hundredths
# of an accuracy are called points.

# %%
recorded = {
    dtype: [json.loads(path.read_text()) for path in sorted(Path(RECORDS, dtype).glob("*.json"))]
    for dtype in FORMATS
}
points = {
    dtype: np.array([100 * run["figures"]["test_accuracy_per_class"] for run in runs])
    for dtype, runs in recorded.items()
}
rows = []
for dtype, of_seeds in points.items():
    skipped = sum(run["figures"]["skipped_steps"] for run in recorded[dtype])
    steps_done = sum(run["figures"]["steps"] for run in recorded[dtype])
    mean, spread = of_seeds.mean(), of_seeds.std(ddof=1)
    rows += [(dtype, f"{mean:.1f}", f"{spread:.1f}", f"{skipped} of {steps_done}")]
print(f"{recorded['float16'][0]['config']['model']} on Caltech 101, {len(of_seeds)} seeds")
print(Table(("format", "mean accuracy (points)", "spread of the seeds", "skipped steps"), rows))

# %%
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for dtype, runs in recorded.items():
    curves = 100 * np.array([run["curves"]["test_accuracy_per_class"] for run in runs])
    numbers = range(1, curves.shape[1] + 1)
    axes.plot(numbers, curves.T, color=FORMAT_LOOKS[dtype]["color"], linewidth=0.6, alpha=0.5)
    axes.plot(numbers, curves.mean(axis=0), label=dtype, **FORMAT_LOOKS[dtype])
axes.set(xlabel="epoch", ylabel="mean of 101 categories (points)", ylim=(0, None))
axes.set(title="ResNet-50 on all of Caltech 101; thin lines are seeds")
axes.legend(loc="lower right")
plt.show()

# Differences of the same seed: same split, same first weights, same order of the images.
differences = points["float16"] - points["float32"]
error = differences.std(ddof=1) / np.sqrt(len(differences))
print(f"float16 minus FP32: {differences.mean():+.1f}, standard error {error:.1f} points")
assert abs(differences.mean()) < 4.3 * error  # 95 % of Student's t with two degrees of freedom

# %% [markdown]
# ## 4. The loss scale's life follows from which steps overflowed
#
# S starts at $2^{16}$, on purpose too high: an overflow is noticed, a gradient that became zero is
# not. The rule is short. An overflow halves S and starts the count anew. `growth_interval` good
# steps in a row double it. A skipped step costs one batch and harms nothing: weights, masters and
# the schedule stay as they were.
#
# Below is the rule in plain Python, fed with nothing but the log's answers to "was this step
# skipped?". Then comes `DynamicLossScale`, fed with the same.


# %%
def scales_by_hand(skipped, interval):
    scale, good, scales = 2.0**16, 0, []
    for overflowed in skipped:
        scales.append(scale)
        good = 0 if overflowed else good + 1
        if overflowed:
            scale = max(scale / 2, 1.0)
        elif good == interval:
            scale, good = min(scale * 2, 2.0**24), 0
    return scales


skipped = [step["skipped"] for step in steps["float16"]]
by_hand = scales_by_hand(skipped, growth_interval)

# %%
machine, by_mpgluon = mpgluon.DynamicLossScale(growth_interval=growth_interval), []
for overflowed in skipped:
    by_mpgluon.append(machine.scale)
    machine.update(not overflowed)
figure, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
draw_loss_scale(axes, steps["float16"])
axes.set(xlabel="step", title="Loss scale of the float16 run; crosses are skipped steps")
plt.show()
print("skipped steps:", [step["step"] for step in steps["float16"] if step["skipped"]])
assert by_hand == by_mpgluon == [step["loss_scale"] for step in steps["float16"]]

# %% [markdown]
# ## 5. On a CPU a float16 step costs about what an FP32 step costs
#
# MXNet has no float16 matrix products for CPUs (lesson 4). So mpgluon computes each operation in
# FP32 and rounds its result once, much as a Tensor Core does, and no time is gained. In a
# hybridized network little is lost, either: the rounding is done by operators in C++, which are
# compiled when they are first needed. `mpgluon.native.available()` says whether that worked.
# Without them MXNet's own operators give the same bits, more slowly. bfloat16 is fast where the
# processor has instructions for it.
#
# We measure in turn, one step of each per round, so that a busy machine slows down all three alike.
# The median of the rounds is printed.


# %%
from mpgluon.diagnostics.timing import interleave, quartiles, ratios


def timed_step(dtype):
    run, (images, labels) = start(dtype), batches[0]
    images = images.astype("float16" if dtype == "float16" else "float32")
    return lambda: (mixed_step(*run, images, labels), mx.nd.waitall())


seconds = interleave({dtype: timed_step(dtype) for dtype in FORMATS}, rounds=7)
relative = {d: quartiles(ratios(own, seconds["float32"])).median for d, own in seconds.items()}
rows = [(d, f"{quartiles(seconds[d]).median:.3f}", f"{relative[d]:.2f}") for d in FORMATS]
print(Table(("format", "seconds per step", "relative to FP32"), rows))
print("operators in C++:", mpgluon.native.available())
assert relative["float16"] < (2 if mpgluon.native.available() else 6)

# %% [markdown]
# ## 6. A parameter file is not a checkpoint
#
# `net.save_parameters` keeps the float16 weights. It does not keep the masters, Adam's running
# averages, the schedule's position or the loss scale. A *checkpoint* keeps all of them. We do four
# float16 steps, save both ways, and do two more. Then two new networks go on from the two files.
# (S begins low here, so that no step is skipped.)


# %%
net, trainer = start("float16", init_scale=2.0**8)
for batch in batches[:4]:
    mixed_step(net, trainer, *batch)
net.save_parameters(str(WORK / "net.params"))
mpgluon.save_checkpoint(WORK / "run.npz", net, trainer, note="after some steps")
expected = [mixed_step(net, trainer, *batch) for batch in batches[4:6]]

# %%
net, trainer = start("float16", init_scale=2.0**8)
net.load_parameters(str(WORK / "net.params"))
from_parameters = [mixed_step(net, trainer, *batch) for batch in batches[4:6]]

net, trainer = start("float16", init_scale=2.0**8)
extra = mpgluon.load_checkpoint(WORK / "run.npz", net, trainer)
from_checkpoint = [mixed_step(net, trainer, *batch) for batch in batches[4:6]]

print("the run itself:     ", expected)
print("from its parameters:", from_parameters)
print("from its checkpoint:", from_checkpoint, extra)
assert from_checkpoint == expected
assert from_parameters[0] == expected[0]
assert from_parameters[1] != expected[1]

# %% [markdown]
# The first loss agrees both ways: it needs the weights only. The second comes after an update, and
# the update is where masters, averages and schedule were missing.
#
# ### A run that is stopped goes on to the same bits
#
# `train` writes a checkpoint after each epoch. When it is told to stop (Ctrl-C sends the signal
# SIGINT; clusters send SIGTERM), it finishes the step, writes one more, and ends. We let a short
# float16 run go to its end. We start the same run again, and a second thread sends SIGINT as soon
# as the log knows of three steps.
#
# A run cannot change its format on the way, though. The last cell of this section fails on purpose:
# it tries to go on in FP32. A checkpoint knows its config, and `train` refuses before anything is
# changed.

# %%
copy_first(3, WORK / "few")
SHORT = replace(
    CONFIG, dtype="float16", data_dir=str(WORK / "few"), train_per_class=2, epochs=4,
    batch_size=4, output_dir=str(WORK / "stopped"),
)  # fmt: skip


def stop_after_three_steps():
    log = WORK / "stopped" / "history.jsonl"
    while not log.exists() or log.read_text().count('"event": "step"') < 3:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGINT)


whole = run(SHORT, "whole")

# %%
threading.Thread(target=stop_after_three_steps).start()
try:
    train(SHORT)
    stopped = None
except InterruptedRunError as error:
    stopped = error
print("stopped by", stopped.signal.name, "after", stopped.checkpoint.stem.replace("-0000", " "))

train(SHORT, resume=True)
one, other = (mx.nd.load(str(WORK / name / "final.params")) for name in ("whole", "stopped"))
equal = [np.array_equal(one[name].asnumpy(), other[name].asnumpy()) for name in one]
print(f"{sum(equal)} of {len(equal)} arrays of parameters are identical")
assert one.keys() == other.keys()
assert all(equal)

# %%
try:
    train(replace(SHORT, dtype="float32"), resume=True)
    message = ""
except ValueError as error:
    message = str(error).replace(str(WORK), "runs")
print(message)
assert "dtype was 'float16', is 'float32'" in message

# %% [markdown]
# ## 7. FP32 parameters are a good beginning for a float16 run
#
# Who has FP32 parameters need not train again. The order matters: load first, then cast.
# `cast_block` rounds the weights, but remembers their FP32 values. The masters will begin with
# those. So nothing is lost, which taking the cast off again shows.

# %%
net = network()
net.load_parameters(str(WORK / "float32" / "final.params"))
before = {name: p.data().asnumpy() for name, p in net.collect_params().items()}
print(mpgluon.cast_block(net))
rounded = {name: p.data().asnumpy() for name, p in net.collect_params().items()}
mpgluon.restore(net)
after = {name: p.data().asnumpy() for name, p in net.collect_params().items()}

moved = [name for name in before if not np.array_equal(before[name], rounded[name])]
print(f"{len(moved)} of {len(before)} arrays were rounded by the cast")
by_hand = all(np.array_equal(rounded[n], before[n].astype(np.float16)) for n in moved)
assert moved
assert by_hand
assert all(np.array_equal(before[name], after[name]) for name in before)

# %% [markdown]
# Now the float16 run that begins with the FP32 network of section 3. It has a tenth of the learning
# rate, as usual for *fine-tuning*, and few epochs. The float16 run of section 3 began with random
# weights, on the same training images: it is the comparison. (The test images were never trained
# on, in any run.) `pretrained=` of the config loads and casts in the right order. It also serves
# for other categories: where their number differs, the last layer keeps its random weights.

# %%
TUNE = replace(
    CONFIG, dtype="float16", pretrained=str(WORK / "float32" / "final.params"),
    epochs=2 if FAST else 3, warmup_epochs=0, learning_rate=LEARNING_RATE / 10,
)  # fmt: skip
tuned, _, tuned_epochs = run(TUNE, "tuned")
beginnings = {"random weights": epochs["float16"], "FP32 parameters": tuned_epochs}
rows = []
for name, events in beginnings.items():
    last = events[TUNE.epochs - 1]
    losses = (f"{event['train_loss']:.3f}" for event in (events[0], last))
    rows.append((name, *losses, f"{last['test_accuracy']:.3f}"))
print(f"after {TUNE.epochs} epochs in float16, begun with")
print(Table(("", "loss, first epoch", "loss, last epoch", "test accuracy"), rows))

# %%
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
axes.axhline(base, color=FORMAT_LOOKS["float32"]["color"], label="FP32, at its end")
looks = FORMAT_LOOKS["float16"], {**FORMAT_LOOKS["float16"], "linestyle": ":", "marker": "v"}
for (name, events), look in zip(beginnings.items(), looks):
    accuracies = [event["test_accuracy"] for event in events]
    axes.plot(range(1, len(events) + 1), accuracies, mfc="w", label=name, **look)
axes.set(xlabel="float16 epoch", ylabel="test accuracy (share)", ylim=(0, 1))
axes.set(title="Two beginnings of a float16 run", xticks=range(1, EPOCHS + 1))
axes.legend(loc="lower right")
plt.show()

assert tuned_epochs[0]["train_loss"] < epochs["float16"][0]["train_loss"]
assert tuned["test_accuracy"] > base - luck  # not worse than the network it began with
files.cleanup()

# %% [markdown]
# ## Summary
#
# - Images may be rounded to float16. Labels stay integers.
# - float16 needs a cast, FP32 masters and a loss scale: three changes to the loop. bfloat16 needs
#   a cast only.
# - All three formats learned, on all of Caltech 101 too. Compare accuracies with their standard
#   error in hand, and by the mean of the categories where these differ in size.
# - The loss scale begins too high, loses a few steps, and settles. Its life can be replayed.
# - On a CPU float16 has exact products, FP32 sums, and about FP32's speed. Measure yours.
# - Resume from a checkpoint. A parameter file continues another run than the one it came from.
# - Load FP32 parameters first, cast afterwards. The masters are then unrounded.
#
# ## Exercises
#
# 1. Train FP32 with `seed=1` (another split, other weights, another order). How much does the test
#    accuracy change? (On 200 test images: a few hundredths, as much as between formats.)
# 2. Give the float16 config `growth_interval=5`. How many steps are skipped? (Some dozens of 200:
#    once S has reached its limit, five good steps double it, and the next one overflows.)
# 3. Train FP32 on six categories, then fine-tune in float16 on the other four, ten images each.
#    (Keep the full learning rate: the last layer begins anew.) What does the first task give the
#    second? (Some tenths of accuracy in the first epochs, a few hundredths at the end: a few
#    hundred photographs are a small beginning.)
#
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3: masters, loss scaling,
#   sums in FP32.
# - NVIDIA, "Training With Mixed Precision" user guide, section "Choosing A Scaling Factor".
# - IEEE 754-2019, section 3.6: the parameters of binary16 and binary32.
# - He et al., "Identity Mappings in Deep Residual Networks", ECCV 2016: ResNet v2.
# - Li, Andreeto, Ranzato, Perona, "Caltech 101 (1.0)", CaltechDATA, 2022.
