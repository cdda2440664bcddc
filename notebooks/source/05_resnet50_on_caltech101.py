# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Does ResNet-50 learn as well in sixteen bits?
#
# Lessons 01 to 04 each looked at one part of mixed precision. This lesson does a whole job: it
# trains ResNet-50 on photographs in three formats, compares the results, stops a run and continues
# it, and starts another run from trained weights. The drawing shows one training run.
#
# ![A run: a config of all options leads to a loader of images and int32 labels, and on to the loop
# of forward, scale_loss, backward and step. The loop writes a log and checkpoints. From a
# checkpoint the loop resumes to the same bits](figures/05_run.svg)
#
# A *loader* reads the images, and a *config* has all options of the run in one value. A
# *checkpoint* is a file from which a stopped run continues, to the same bits as if it had not been
# stopped.
#
# ## What you will be able to do
#
# - train an image classifier in FP32, FP16 and BF16, and say what each format needs;
# - compare training runs, and tell a real difference from luck;
# - stop a run at any step and continue it to the same bits;
# - start an FP16 run from trained FP32 weights.
#
# FP32 is Gluon's default format. FP16 (`"float16"` in code) and BF16 (`"bfloat16"`) have 16 bits.
# An *epoch* is one pass over the training images.

# %% tags=["parameters"]
FAST = False  # True: the same code with a small network, small images and few steps
SHARED = "../../shared"  # photographs beside the checkout, on some machines
DATA_DIRS = "../data", f"{SHARED}/caltech101", f"{SHARED}/caltech101-mini"  # the first that exists
RECORDS = "../study/results/evidence"  # runs on all of Caltech 101
CATEGORIES = (
    *("Leopards", "Motorbikes", "airplanes", "bonsai", "butterfly"),
    *("chandelier", "grand_piano", "ketch", "sunflower", "watch"),
)
MODEL, IMAGE_SIZE = ("resnet18_v1", 32) if FAST else ("resnet50_v2", 64)  # pixels
IMAGES_PER_CLASS, TRAIN_PER_CLASS = (12, 8) if FAST else (60, 40)
BATCH_SIZE, EPOCHS, SEED = (10, 2, 0) if FAST else (20, 8, 0)
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 1e-4

# %% tags=["setup"]
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

sys.path.append("..")  # recipes/ and study/ are beside this folder

import mpgluon
from mpgluon import amp
from mpgluon.tools.plots import FORMAT_LOOKS, draw_loss_scale
from mpgluon_tools.tables import Table

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from recipes.data import find_tree, list_images, render_shapes, stratified_split
from recipes.data.augment import IMAGENET_MEAN, IMAGENET_STD
from recipes.data.loaders import eval_loader, train_loader
from recipes.training import InterruptedRunError, TrainingConfig, train
from recipes.training.networks import build_network
from teaching import check

NAMES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
FORMATS = tuple(NAMES)


def records(name):
    """Return the recorded runs of a folder, seed by seed."""
    return [json.loads(path.read_text()) for path in sorted(Path(RECORDS, name).glob("*.json"))]


# %% [markdown]
# ## Rounding the images to FP16 loses nothing
#
# The photographs are from the data set Caltech 101. We take ten of its categories, so that the
# lesson takes only a few minutes. (`python scripts/download_caltech.py` fetches the photographs.
# Without them, ten kinds of rendered shapes take their place; the line below says which data was
# used.) You can also use images of your own: make a folder, and in it a folder for each category.

# %% tags=["setup"]
files = tempfile.TemporaryDirectory()  # all that this notebook writes; its last code removes it
WORK = Path(files.name)
found = [Path(folder) for folder in DATA_DIRS if (Path(folder) / "101_ObjectCategories").is_dir()]
source = find_tree(found[0]) if found else render_shapes(WORK, images_per_class=IMAGES_PER_CLASS)
chosen = CATEGORIES if found else list_images(source).classes
DATASET = "photographs of Caltech 101" if found else "rendered shapes (no photographs here)"


def copy_first(count, tree):
    """Copy the first images of each chosen category into one folder per category."""
    for path in (path for name in chosen for path in (source / name).iterdir()):
        if int(path.stem[-4:]) <= count:  # image_0001.jpg, image_0002.jpg, ...
            (tree / path.parent.name).mkdir(parents=True, exist_ok=True)
            (tree / path.parent.name / path.name).write_bytes(path.read_bytes())
    return list_images(tree)


folder = copy_first(IMAGES_PER_CLASS, WORK / "images")
print(f"data set: {DATASET}, {len(folder)} images, {len(folder.classes)} categories")

# %% [markdown]
# The loader decodes the images, cuts out a square, shrinks it, and *normalizes* it: from each
# colour it subtracts the mean of many photographs, and divides by their standard deviation. Here is
# the first image of each category, as the network will see it.

# %%
first = [int(np.flatnonzero(folder.labels == label)[0]) for label in range(10)]
shape = {"batch_size": 10, "image_size": IMAGE_SIZE}
images, labels = next(iter(eval_loader(folder, first, **shape)))

# %% tags=["plot"] alt="Ten small images in two rows, one of each category, with label and name"
pixels = images.asnumpy().transpose(0, 2, 3, 1) * IMAGENET_STD + IMAGENET_MEAN
figure, panels = plt.subplots(2, 5, figsize=(9, 4.2), layout="constrained")
for axes, image, label in zip(panels.flat, pixels, labels.asnumpy()):
    axes.imshow(image.clip(0, 1))
    axes.set_title(f"{label}: {folder.classes[label]}")
    axes.axis("off")
figure.suptitle(f"{IMAGE_SIZE} x {IMAGE_SIZE} pixels are enough to tell ten categories apart")
plt.show()

# %% [markdown]
# A colour in a file has 256 levels. Does FP16 keep them apart after normalization? We try all 256
# with NumPy. Then we ask the loader for FP16 images.
#
# Labels are numbers too, but not measurements: a rounded label is another category. FP16 has no odd
# numbers above 2048. So labels stay `int32`, in whatever format the images are.

# %%
levels = (np.arange(256, dtype=np.float32)[:, None] / 255 - IMAGENET_MEAN) / IMAGENET_STD
different = [len(np.unique(channel.astype(np.float16))) for channel in levels.T]
fp16_images, fp16_labels = next(iter(eval_loader(folder, first, dtype="float16", **shape)))
print("levels that FP16 tells apart, in red, green and blue:", different)
print("label 2049 in FP16 would become", int(np.float16(2049)))
print("the loader's images and labels:", fp16_images.dtype.__name__, fp16_labels.dtype.__name__)

# %% tags=["claim"]
assert different == [256, 256, 256]
assert np.array_equal(fp16_images.asnumpy(), images.asnumpy().astype(np.float16))
assert fp16_labels.dtype == np.int32

# %% [markdown]
# ## One loop trains in all three formats
#
# The lessons before showed that FP16 needs three things:
#
# 1. A cast: `cast_block` makes weights and computation FP16, and leaves BatchNorm in FP32
#    ([lesson 04](04_casting_a_network.ipynb)).
# 2. *Master weights*, FP32 copies that the optimizer updates: `multi_precision`
#    ([lesson 02](02_lost_updates.ipynb)).
# 3. A *loss scale* S, which multiplies the loss before the backward pass, so that small gradients
#    do not become zero: `init_trainer` and `scale_loss` ([lesson 03](03_lost_gradients.ipynb)).
#
# BF16 needs less. *Autocast* leaves the weights in FP32 and rounds them each time they are used, so
# no separate masters are needed. BF16 has FP32's range, so there is no loss scale (`"none"`). With
# `"none"`, the same loop also trains in FP32.

# %% tags=["setup"]
train_indices, test_indices = stratified_split(folder.labels, TRAIN_PER_CLASS, seed=SEED)
EPOCH_STEPS = len(train_indices) // BATCH_SIZE
TOTAL_STEPS = EPOCHS * EPOCH_STEPS
growth_interval = max(10, TOTAL_STEPS // 10)  # as train() chooses it
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()


def network():
    mx.random.seed(SEED)
    np.random.seed(SEED)  # MXNet draws first weights from both
    return build_network(MODEL, classes=10, image_size=IMAGE_SIZE, devices=[mx.cpu()])


def adam(net, **more):
    """Return a Trainer whose learning rate climbs for one epoch, then falls to zero."""
    schedule = mx.lr_scheduler.CosineScheduler(
        TOTAL_STEPS, base_lr=LEARNING_RATE, warmup_steps=min(EPOCH_STEPS, TOTAL_STEPS // 2)
    )
    options = {"learning_rate": LEARNING_RATE, "lr_scheduler": schedule, "wd": WEIGHT_DECAY}
    return gluon.Trainer(net.collect_params(), "adam", {**options, **more})


def first_batches(dtype, count=8):
    """Return training batches as train() makes them: crops of half an image or more."""
    dtype = "float16" if dtype == "float16" else "float32"
    options = {"scale": (0.5, 1), "seed": SEED, "batch_size": BATCH_SIZE, "image_size": IMAGE_SIZE}
    return list(islice(train_loader(folder, train_indices, dtype=dtype, **options), count))


# %%
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


def training_step(net, trainer, images, labels):
    images.attach_grad()  # for ResNet v2, see below
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(len(labels))  # after an overflow it changes nothing, and halves S
    return float(loss.asnumpy().mean(dtype="float64"))


by_hand = {}
for dtype in FORMATS:
    net, trainer = start(dtype)
    by_hand[dtype] = [training_step(net, trainer, *batch) for batch in first_batches(dtype)]
    print(f"{NAMES[dtype]}, the first losses:", *(f"{loss:.4f}" for loss in by_hand[dtype][:4]))

# %% [markdown]
# FP16's first losses all come from the initial weights: its first steps overflowed and were
# skipped.
#
# (Most tutorials do not have the line `images.attach_grad()`. ResNet v2 begins with a BatchNorm
# without trainable parameters. MXNet updates the running averages of a BatchNorm in the backward
# pass. It leaves this pass out for a layer that has nothing to learn, unless the layer's input asks
# for a gradient. Without this line the network would be tested with other averages than it was
# trained with.)
#
# `recipes.training.train` is this loop, with a test after each epoch, a log and checkpoints, as in
# the drawing at the top. All that a run depends on is in its config: model, data, batch, schedule,
# seed, format. `python scripts/train_caltech.py --dtype float16 --epochs 8 …` makes the same value
# from options.

# %%
CONFIG = TrainingConfig(
    model=MODEL, data_dir=str(WORK / "images"), train_per_class=TRAIN_PER_CLASS,
    image_size=IMAGE_SIZE, min_crop_area=0.5, batch_size=BATCH_SIZE, epochs=EPOCHS,
    warmup_epochs=1, optimizer="adam", learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY,
    workers=0, seed=SEED, keep_checkpoints=1,
)  # fmt: skip

# %% [markdown]
# We train in three formats, from the same initial weights, with the same images in the same order.

# %%
results, steps, epochs = {}, {}, {}


def run(config, name):
    """Train; return results and the log's events of steps and of epochs."""
    result = train(replace(config, output_dir=str(WORK / name)))
    lines = (WORK / name / "history.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    return result, *([e for e in log if e["event"] == kind] for kind in ("step", "epoch"))


for dtype in FORMATS:
    results[dtype], steps[dtype], epochs[dtype] = run(replace(CONFIG, dtype=dtype), dtype)

print(f"{MODEL}, {len(train_indices)} training and {len(test_indices)} test images,", end=" ")
print(f"{TOTAL_STEPS} steps in each format")
for dtype in FORMATS:
    same = [step["loss"] for step in steps[dtype][:8]] == by_hand[dtype]
    first_loss, last_loss = (epochs[dtype][n]["train_loss"] for n in (0, -1))
    print(f"{NAMES[dtype]}: training loss {first_loss:.2f} in the first epoch,", end=" ")
    print(f"{last_loss:.2f} in the last; first losses equal to those above: {same}")

# %% [markdown]
# The first eight losses of each run equal those of our own loop, bit for bit. And the loss falls in
# all three formats.

# %% tags=["claim"]
assert not set(train_indices) & set(test_indices)
for dtype in FORMATS:
    assert [step["loss"] for step in steps[dtype][:8]] == by_hand[dtype]
    assert epochs[dtype][-1]["train_loss"] < epochs[dtype][0]["train_loss"]
assert abs(by_hand["float16"][0] / by_hand["float32"][0] - 1) < 0.05
assert steps["float16"][0]["skipped"]

# %% [markdown]
# ## The formats differ by no more than luck
#
# Here are the curves of the training loss, and of the share of right answers on the test images.

# %% tags=["plot"] alt="Training loss falls, test accuracy rises; three formats cross"
figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for dtype in FORMATS:
    numbers = [epoch["epoch"] + 1 for epoch in epochs[dtype]]
    for axes, name in zip(panels, ("train_loss", "test_accuracy")):
        values = [epoch[name] for epoch in epochs[dtype]]
        axes.plot(numbers, values, mfc="w", label=NAMES[dtype], **FORMAT_LOOKS[dtype])
panels[0].set(ylabel="training loss", title="The loss falls in all formats")
panels[1].set(ylabel="test accuracy (share)", title="The test accuracy rises in all formats")
for axes, corner in zip(panels, ("upper right", "lower right")):
    axes.set(xlabel="epoch", xticks=range(1, EPOCHS + 1), ylim=(0, None))
    axes.legend(loc=corner)
plt.show()

# %% [markdown]
# The lines need not coincide. A rounding changes a loss a little, and after some steps the runs are
# different, as they would be with different seeds. So do not ask whether the last accuracies are
# equal. Ask whether they differ by more than luck.
#
# The effect of luck can be computed. If a network is right with probability $p$, its accuracy on
# $n$ test images has a *standard error* of $\sqrt{p(1-p)/n}$. The standard error of the difference
# of two such accuracies is $\sqrt{2}$ times as large. If two networks are equally good, a
# difference above three standard errors is rare.

# %%
base, n = results["float32"]["test_accuracy"], len(test_indices)
luck = 3 * np.sqrt(2 * base * (1 - base) / n)
rows = []
for dtype in FORMATS:
    accuracy, loss = results[dtype]["test_accuracy"], epochs[dtype][-1]["train_loss"]
    skipped = str(results[dtype]["skipped_steps"])
    rows += [(NAMES[dtype], f"{accuracy:.3f}", f"{accuracy - base:+.3f}", f"{loss:.3f}", skipped)]
print(Table(("format", "test accuracy", "minus FP32", "training loss", "skipped steps"), rows))
print(f"three standard errors with {n} test images: {luck:.3f}; guessing would be right in 0.100")

# %% tags=["claim"]
assert all(abs(results[dtype]["test_accuracy"] - base) < luck for dtype in FORMATS)

# %% [markdown]
# ## On all of Caltech 101, three seeds show no difference either
#
# With few test images, only large differences can be seen. So the three formats were also trained
# on all 101 categories, with three seeds each. From each category, 30 photographs were for
# training, and up to 50 others for testing. That takes hours, so this notebook reads the records of
# those runs. (`python study/scripts/evidence.py run caltech101` repeats them, with this same
# `train`.)
#
# Some categories have 50 test photographs, others only one. The literature therefore gives the
# *mean of the categories' accuracies*, in which all categories count equally. It is given in
# *points*, which are hundredths.
#
# Runs with the same seed have the same split, the same initial weights and the same order of
# images. So we subtract FP32's result seed by seed. The three differences give a *95 % interval* of
# their mean, by Student's t with two degrees of freedom.

# %%
recorded = {dtype: records(f"caltech101/{dtype}") for dtype in FORMATS}
points = {
    dtype: np.array([100 * run["figures"]["test_accuracy_per_class"] for run in runs])
    for dtype, runs in recorded.items()
}
rows, intervals = [], {}
for dtype, of_seeds in points.items():
    difference = of_seeds - points["float32"]
    error = difference.std(ddof=1) / np.sqrt(len(difference))
    intervals[dtype] = difference.mean() + 4.303 * error * np.array([-1, 1])
    interval = "{:+.1f} to {:+.1f}".format(*intervals[dtype]) if error else ""
    figures = [run["figures"] for run in recorded[dtype]]
    skipped = f"{sum(f['skipped_steps'] for f in figures)} of {sum(f['steps'] for f in figures)}"
    mean = (f"{of_seeds.mean():.1f}", f"{difference.mean():+.1f}")
    rows += [(NAMES[dtype], *mean, interval, skipped)]
print(f"{recorded['float16'][0]['config']['model']} on Caltech 101, {len(of_seeds)} seeds")
print(Table(("format", "mean (points)", "minus FP32", "95 % interval", "skipped steps"), rows))

# %% tags=["plot"] alt="Three nearly equal curves; differences to FP32 around zero"
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for dtype, runs in recorded.items():
    curves = 100 * np.array([run["curves"]["test_accuracy_per_class"] for run in runs])
    numbers = range(1, curves.shape[1] + 1)
    left.plot(numbers, curves.mean(axis=0), label=NAMES[dtype], mfc="w", **FORMAT_LOOKS[dtype])
left.set(xlabel="epoch", ylabel="mean of 101 categories (points)", ylim=(0, None))
left.set_title("The three lines nearly coincide")
left.legend(loc="lower right")
for place, dtype in enumerate(FORMATS[1:]):
    look = {"color": FORMAT_LOOKS[dtype]["color"], "marker": FORMAT_LOOKS[dtype]["marker"]}
    difference = points[dtype] - points["float32"]
    right.plot([place, place], intervals[dtype], color=look["color"], linewidth=2)
    right.plot(np.full(len(difference), place), difference, linestyle="none", mfc="w", **look)
    right.text(place + 0.06, intervals[dtype][1], "95 % interval", va="top")
right.axhline(0, color=FORMAT_LOOKS["float32"]["color"], linewidth=1)
right.text(-0.38, 0.1, "FP32")
right.set(xticks=(0, 1), xticklabels=[NAMES[dtype] for dtype in FORMATS[1:]], xlim=(-0.4, 1.6))
right.set(ylabel="difference to FP32 (points)", title="Both intervals contain zero (marks: seeds)")
plt.show()

# %% [markdown]
# Both intervals contain zero: three seeds show no difference. But they do not prove that there is
# none. A loss of as many points as the lower end of an interval is possible.

# %% tags=["claim"]
assert all(len(of_seeds) == 3 for of_seeds in points.values())
assert all(low < 0 < high for low, high in (intervals[dtype] for dtype in FORMATS[1:]))

# %% [markdown]
# ## The loss scale's curve follows from which steps were skipped
#
# S starts at $2^{16}$, which is too high on purpose: an overflow is noticed, but a gradient that
# became zero is not. An overflow skips the step and halves S. After `growth_interval` good steps in
# a row S doubles. A skipped step costs one batch and harms nothing else: weights, masters and
# schedule stay as they were.
#
# The class `DynamicLossScale` is this rule. We give it only one thing from the log: for each step,
# whether it was skipped.

# %%
rule, replayed = mpgluon.DynamicLossScale(growth_interval=growth_interval), []
for step in steps["float16"]:
    replayed.append(rule.scale)
    rule.update(grads_finite=not step["skipped"])
same = replayed == [step["loss_scale"] for step in steps["float16"]]
print("skipped steps:", [step["step"] for step in steps["float16"] if step["skipped"]])
print("replayed scale equals the log's in every step:", same)

# %% tags=["plot"] alt="The loss scale falls from 65536, climbs, is halved at each skipped step"
figure, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
draw_loss_scale(axes, steps["float16"])
axes.set(xlabel="step", title="The loss scale falls until nothing overflows, then tries again")
plt.show()

# %% tags=["claim"]
assert same

# %% [markdown]
# ## A parameter file is not a checkpoint
#
# `net.save_parameters` saves the FP16 weights. It does not save the masters, Adam's running
# averages, the schedule's position or the loss scale. A checkpoint has all of them. We do four FP16
# steps, save in both ways, and do two more steps. Then two new networks continue, one from each
# file. (S starts low here, so that no step is skipped.)

# %%
batches = first_batches("float16")
net, trainer = start("float16", init_scale=2.0**8)
for batch in batches[:4]:
    training_step(net, trainer, *batch)
net.save_parameters(str(WORK / "net.params"))
mpgluon.save_checkpoint(WORK / "run.npz", net, trainer)
expected = [training_step(net, trainer, *batch) for batch in batches[4:6]]

net, trainer = start("float16", init_scale=2.0**8)
net.load_parameters(str(WORK / "net.params"))
from_parameters = [training_step(net, trainer, *batch) for batch in batches[4:6]]

net, trainer = start("float16", init_scale=2.0**8)
mpgluon.load_checkpoint(WORK / "run.npz", net, trainer)
from_checkpoint = [training_step(net, trainer, *batch) for batch in batches[4:6]]

print("losses of the run itself:     ", expected)
print("continued from its parameters:", from_parameters)
print("continued from its checkpoint:", from_checkpoint)

# %% [markdown]
# The first loss is right in both cases: it needs the weights only. The second loss comes after an
# update, which used masters, averages and schedule. The parameter file does not have these.

# %% tags=["claim"]
assert from_checkpoint == expected
assert from_parameters[0] == expected[0]
assert from_parameters[1] != expected[1]

# %% [markdown]
# ## A run that was stopped goes on to the same bits
#
# `train` writes a checkpoint after each epoch. When it receives a signal to stop (Ctrl-C sends
# SIGINT, clusters send SIGTERM), it finishes the step, writes one more checkpoint, and ends. We
# train a short FP16 run to its end. Then we start the same run again, and a second thread sends
# SIGINT after three steps. `resume=True` continues it.

# %% tags=["setup"]
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


# %%
run(SHORT, "whole")

threading.Thread(target=stop_after_three_steps).start()
try:
    train(SHORT)
    stopped_by = None
except InterruptedRunError as error:
    stopped_by = error.signal
    print("stopped by", stopped_by.name, "after", error.checkpoint.stem.replace("-0000", " "))

train(SHORT, resume=True)
one, other = (mx.nd.load(str(WORK / name / "final.params")) for name in ("whole", "stopped"))
equal = [np.array_equal(one[name].asnumpy(), other[name].asnumpy()) for name in one]
print(f"{sum(equal)} of {len(equal)} arrays of parameters are identical")

# %% [markdown]
# A run cannot change its format when it continues. The next cell fails **on purpose**: it asks to
# go on in FP32. A checkpoint contains its config, so `train` can refuse before it changes anything.

# %%
try:
    train(replace(SHORT, dtype="float32"), resume=True)
    message = ""
except ValueError as error:
    message = str(error).replace(str(WORK), "runs")
print(message)

# %% tags=["claim"]
assert stopped_by == signal.SIGINT
assert one.keys() == other.keys()
assert all(equal)
assert "dtype was 'float16', is 'float32'" in message

# %% [markdown]
# ## Trained FP32 weights are a good start for an FP16 run
#
# A network with trained FP32 parameters needs no training from scratch. The order matters: load
# first, then cast. `cast_block` rounds the weights, and keeps their FP32 values: the masters will
# start with those. So nothing is lost. To show this, we undo the cast (`restore`) and compare.

# %%
net = network()
net.load_parameters(str(WORK / "float32" / "final.params"))
before = {name: p.data().asnumpy() for name, p in net.collect_params().items()}
mpgluon.cast_block(net)
rounded = {name: p.data().asnumpy() for name, p in net.collect_params().items()}
mpgluon.restore(net)
after = {name: p.data().asnumpy() for name, p in net.collect_params().items()}

moved = [name for name in before if not np.array_equal(before[name], rounded[name])]
unharmed = [name for name in before if np.array_equal(before[name], after[name])]
print(f"{len(moved)} of {len(before)} arrays were rounded by the cast;", end=" ")
print(f"{len(unharmed)} are as in the file when it is taken off")

# %% [markdown]
# Now an FP16 run starts from the FP32 network that was trained above, with a tenth of the learning
# rate, as is usual for *fine-tuning*. The option `pretrained` of a config loads and casts in the
# right order. We compare it with the FP16 run from random weights, which has the same training
# images. (No run was trained on the test images.)

# %%
TUNE = replace(
    CONFIG, dtype="float16", pretrained=str(WORK / "float32" / "final.params"),
    epochs=1 if FAST else 3, warmup_epochs=0, learning_rate=LEARNING_RATE / 10,
)  # fmt: skip
tuned, _, tuned_epochs = run(TUNE, "tuned")
starts = {"random weights": epochs["float16"], "trained FP32 weights": tuned_epochs}
rows = []
for name, events in starts.items():
    last = events[TUNE.epochs - 1]
    losses = (f"{event['train_loss']:.3f}" for event in (events[0], last))
    rows.append((name, *losses, f"{last['test_accuracy']:.3f}"))
headings = ("started from", "loss, first epoch", f"epoch {TUNE.epochs}", "test accuracy then")
print(f"FP16 runs, {TUNE.epochs} epochs. The FP32 network had a test accuracy of {base:.3f}")
print(Table(headings, rows))

# %% [markdown]
# Usually the trained weights come from *other* categories. Then the last layer, whose size is
# different, keeps its random weights. The records have such runs: trained on 81 categories of
# Caltech 101, then on the other 20, with three seeds.

# %%
rows = []
for origin in ("scratch", "pretrained"):
    for dtype in ("float32", "float16"):
        figures = [run["figures"] for run in records(f"fine_tuning/{dtype}/{origin}")]
        of_seeds = 100 * np.array([of_run["test_accuracy_per_class"] for of_run in figures])
        rows.append((origin, NAMES[dtype], f"{of_seeds.mean():.1f}", f"{of_seeds.std(ddof=1):.1f}"))
print(Table(("start", "format", "mean of 20 categories (points)", "spread of seeds"), rows))

# %% tags=["claim"]
assert moved
assert all(np.array_equal(rounded[n], before[n].astype(np.float16)) for n in moved)
assert len(unharmed) == len(before)
assert tuned_epochs[0]["train_loss"] < epochs["float16"][0]["train_loss"]
assert tuned["test_accuracy"] > base - luck  # not worse than the network it started from
assert float(rows[3][2]) > float(rows[1][2]) + 10  # FP16: pretrained, from scratch
files.cleanup()

# %% [markdown]
# ## Summary
#
# - Images may be rounded to FP16. Labels stay integers.
# - FP16 needs a cast, FP32 masters and a loss scale. BF16 needs autocast only. The loop is the
#   same.
# - All three formats learned, on all of Caltech 101 too. Compare accuracies by their standard error
#   or by several seeds, and by the mean of the categories where their sizes differ.
# - The loss scale starts too high, costs a few steps, and settles. The log is enough to replay it.
# - Continue a run from a checkpoint. From a parameter file alone, its results are different.
# - Load FP32 parameters first, cast afterwards. The masters are then unrounded.
#
# [Lesson 07](07_speed_and_memory.ipynb) shows which format is faster on your machine.

# %% [markdown]
# ## Exercises

# %% [markdown]
# **05.1** (level 1) Two networks are right in about 70 % of the cases. You see a difference of 2
# points (0.02). How many test images must there be at least, so that 0.02 is three standard errors
# of the difference? Hand in a number of test images.

# %%
answer = ...
check("05.1", answer)

# %% tags=["solution"]
# Three standard errors are 3 * sqrt(2 p (1 - p) / n). They equal d for n = 18 p (1 - p) / d^2.
assert check("05.1", int(np.ceil(18 * 0.7 * 0.3 / 0.02**2)))

# %% [markdown]
# **05.2** (level 3) A run has 2,000 steps. S starts at $2^{13}$, and gradients overflow whenever S
# is above $2^{13}$. In steps 1,000 to 1,002 the batches are bad: there, gradients overflow whenever
# S is above $2^{10}$. Which `growth_interval` skips at most 2 % of the steps, and has S back at
# $2^{13}$ by step 1,300? Hand in a number of steps.

# %%
answer = ...
check("05.2", answer)

# %% tags=["solution"]
# At its limit, S is doubled after each interval, and the next step is skipped: one in about 50
# steps may be. The bad batches halve S three times. Each doubling back takes an interval, and
# three of them fit into 300 steps if it is below 100. So anything between is right.
assert check("05.2", 75)

# %% [markdown]
# **05.3** (level 2) Write a function with two arguments: a network, and the path of a file with its
# FP32 parameters (written by `net.save_parameters`). Afterwards the network is FP16, and its
# masters start with exactly the numbers of the file. Hand in the function.


# %%
def begin(net, path): ...  # your lines here


answer = ...  # begin
check("05.3", answer)


# %% tags=["solution"]
def load_then_cast(net, path):
    net.load_parameters(path)  # FP32 values into an FP32 network
    mpgluon.cast_block(net)  # rounds them, and remembers what they were


assert check("05.3", load_then_cast)

# %% [markdown]
# Three more experiments, each with minutes of training: FP32 with `seed=1` (does the accuracy
# change by more than between formats?); FP16 with `growth_interval=5` (how many steps are
# skipped?); six categories in FP32, then FP16 on the other four.
#
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3: masters, loss scaling,
#   sums in FP32.
# - NVIDIA, "Training With Mixed Precision" user guide, section "Choosing A Scaling Factor".
# - He et al., "Identity Mappings in Deep Residual Networks", ECCV 2016: ResNet v2.
# - Li, Andreeto, Ranzato, Perona, "Caltech 101 (1.0)", CaltechDATA, 2022.

# %% [markdown]
# [← 04 What happens to a network that is cast to sixteen bits?](04_casting_a_network.ipynb) ·
# [All lessons](README.md) ·
# [06 Which layer breaks in sixteen bits? →](06_reading_the_diagnostics.ipynb)
