# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # What are the answers to the exercises?
#
# Each heading below is an exercise: 01.2 is the second one of lesson 01. Try it yourself first. A
# solution here is one of many, and the shortest that we found. Each one prints its answer, and
# asserts that it is as large as the exercise says.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %%
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

import mpgluon
from mpgluon import BFLOAT16, FLOAT16, FloatFormat, amp, fp16_utils, round_to
from mpgluon.tables import Table

# %%
every_float16 = np.arange(2**16, dtype=np.uint16).view(np.float16)
every_float16 = np.sort(every_float16[np.isfinite(every_float16)])  # the finite ones

# %% [markdown]
# ## Lesson 01: Which numbers do sixteen bits hold?
#
# ### 01.1 At which value does a sum of 0.001s stop in float16?
#
# We add until nothing changes. The spacing doubles at each power of two, so the sum stops at one.

# %%
total, before = np.float16(0), None
while total != before:
    total, before = total + np.float16(0.001), total
half_below, half_above = np.spacing(np.float16([3.99, 4])).astype(float) / 2
print(f"the sum stops at {float(total)}")
print(f"half the spacing below it is {half_below:.6f}, above it {half_above:.6f}")
assert total == 4
assert half_below < float(np.float16(0.001)) < half_above

# %% [markdown]
# ### 01.2 How many of the finite float16 numbers are subnormal?
#
# Those that are below the smallest normal number, and not zero.

# %%
sizes = np.abs(every_float16.astype(np.float64))
subnormal = (sizes > 0) & (sizes < FLOAT16.smallest_normal)
print(f"{subnormal.sum():,} of {len(sizes):,}, that is {subnormal.mean():.1%}")
assert subnormal.sum() == 2 * (2**10 - 1)  # two signs; ten bits, and not all of them 0
assert 0.02 < subnormal.mean() < 0.05

# %% [markdown]
# ### 01.3 Which float16 from 1 up to 4 has a wrong square root after a detour through 23 bits?
#
# We round each root to 23 significant bits and then to float16, and compare with rounding at once.

# %%
arguments = sizes[(sizes >= 1) & (sizes < 4)]
roots = np.sqrt(arguments)  # in float64, whose 53 bits are more than enough
detour = round_to(roots, FloatFormat("23 bits", significand_bits=23, exponent_bits=8))
wrong = np.unique(arguments[round_to(detour, FLOAT16) != round_to(roots, FLOAT16)])
print(f"{wrong[0]} = 4 - 2^-9, the last float16 below 4")
assert wrong.tolist() == [4 - 2.0**-9]
assert wrong[0] == np.nextafter(np.float16(4), np.float16(0))

# %% [markdown]
# ## Lesson 02: Why does a network in 16 bits need a copy of its weights in 32?
#
# ### 02.1 How many bytes per weight do weights, gradients and masters take?
#
# We ask the arrays themselves: of a layer in FP32, and of the same layer after the cast. (Adam's
# averages would come on top, the same in both.)


# %%
def bytes_per_weight(*arrays):
    return sum(np.dtype(array.dtype).itemsize for array in arrays)


layer = nn.Dense(8, in_units=8, use_bias=False)
layer.initialize()
fp32_bytes = bytes_per_weight(layer.weight.data(), layer.weight.grad())
mpgluon.cast_block(layer)
_, (master,) = fp16_utils.prep_param_lists(layer)
fp16_bytes = bytes_per_weight(layer.weight.data(), layer.weight.grad(), master.data())
print(f"FP32: {fp32_bytes} bytes, float16 with a master: {fp16_bytes} bytes")
assert fp32_bytes == fp16_bytes == 4 + 4 == 2 + 2 + 4

# %% [markdown]
# ### 02.2 From which learning rate on does the weight move without a master?
#
# The weight is 1, its target 1.25. We take one step with each float16 as the learning rate.
# Exactly $2^{-9}$ makes an update of half a spacing, which is rounded to the even neighbour: to 1
# again.

# %%
rates = every_float16[(every_float16 > 0) & (every_float16 < 1)]
weights = np.float16(1) - rates * (np.float16(1) - np.float16(1.25))
smallest = float(rates[weights != 1].min())
print(f"{smallest:.6f}, just above 2^-9 = {2.0**-9:.6f}")
assert smallest == float(np.nextafter(np.float16(2**-9), np.float16(1)))
assert 0.001 < smallest < 0.003

# %% [markdown]
# ### 02.3 Below which ratio of update to weight does a bfloat16 weight lose every update?
#
# Three bits less than float16: the limit of 1/4096 becomes eight times larger. Numbers from 1 up to
# 2 are enough for a test, because a power of two more or less changes nothing about the digits.

# %%
numbers = 1 + np.arange(2**7) / 2**7  # every bfloat16 from 1 up to 2
shares = {}
for ratio in (2**-12, 2**-10, 2**-9, 1.01 * 2**-9, 1.01 * 2**-8):
    results = [round_to(numbers + sign * numbers * ratio, BFLOAT16) for sign in (1, -1)]
    shares[ratio] = np.mean([result == numbers for result in results])
    print(f"update = weight / {1 / ratio:6.1f}: {shares[ratio]:6.1%} are lost")
assert shares[2**-9] == 1 > shares[1.01 * 2**-9]
assert shares[1.01 * 2**-8] == 0
assert 0.001 < 2**-9 < 0.003

# %% [markdown]
# ## Lesson 03: Where do small gradients go?
#
# Two of the exercises need the lesson's network, trained in FP32. Here are its images and its loop
# once more, with `amp` for both formats.

# %%
from mpgluon.data.shapes import render_image
from mpgluon.diagnostics.exponents import batch_exponents
from mpgluon.diagnostics.observe import Batch
from mpgluon.diagnostics.ranges import range_report
from mpgluon.training.networks import build_network

# %%
images_per_class, epochs = (8, 8) if FAST else (16, 12)
pixels = [
    np.asarray(render_image(number % 10, number // 10).convert("RGB").resize((32, 32)))
    for number in range(10 * images_per_class)
]
images = mx.nd.array(np.stack(pixels).transpose(0, 3, 1, 2) / 127.5 - 1)
labels = mx.nd.array(np.arange(len(pixels)) % 10, dtype="int32")
batches = [(images[i : i + 40], labels[i : i + 40]) for i in range(0, len(pixels), 40)]
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


# %%
def train_step(net, trainer, loss_of, inputs, labels):
    """Train on one batch; return the mean loss."""
    with autograd.record():
        loss = loss_of(net(inputs), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(loss.size)
    return loss.mean()


# %%
def make_network(dtype):
    mx.random.seed(0)
    net = build_network("cifar_resnet20_v1", classes=10, image_size=32, devices=[mx.cpu()])
    if dtype == "float16":
        mpgluon.cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


# %%
def trained(dtype, weight=1.0):
    """Train on ``weight`` times the loss; return the network and the last epoch's mean loss."""
    net = make_network(dtype)
    options = {"learning_rate": 0.01 / weight, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, "none")

    def weighted_loss(logits, labels):
        return weight * cross_entropy(logits, labels).mean()

    losses = [train_step(net, trainer, weighted_loss, *batch) for batch in batches * epochs]
    return net, np.mean([loss.asscalar() for loss in losses[-len(batches) :]]) / weight


fp32_net, fp32_loss = trained("float32")

# %% [markdown]
# ### 03.1 The sum of the losses instead of their mean: how far does the histogram move?
#
# The sum of 40 losses is 40 times their mean, and so is each gradient. 40 lies between $2^5$ and
# $2^6$. The recommended scale is a power of two, so it falls by one of them.

# %%
middles, scales = {}, {}
for way in ("mean", "sum"):
    batch = Batch(*batches[0], lambda z, y, way=way: getattr(cross_entropy(z, y), way)())
    found = batch_exponents(fp32_net, batch).overall()["activation gradients"]
    middles[way] = np.average(found.exponents, weights=found.counts)
    scales[way] = range_report(fp32_net, batch).recommended_loss_scale()
moved = middles["sum"] - middles["mean"]
print(f"the histogram moves by {moved:.2f} bins on average; log2(40) = {np.log2(40):.2f}")
print(f"recommended scale: {scales['mean']:.0f} with the mean, {scales['sum']:.0f} with the sum")
assert 5 < moved < 6
assert scales["mean"] / scales["sum"] in (32, 64)

# %% [markdown]
# ### 03.2 From a scale of $2^{16}$ to $2^{20}$ with `growth_interval=2000`: how many steps?
#
# Four times the scale doubles, each time after 2000 good steps in a row. A short run ends long
# before. For it, begin higher or choose a shorter interval: `mpgluon.training.train` takes a tenth
# of the run, unless told otherwise.

# %%
loss_scale, steps = mpgluon.DynamicLossScale(init_scale=2.0**16, growth_interval=2000), 0
while loss_scale.scale < 2.0**20:
    loss_scale.update(grads_finite=True)
    steps += 1
print(f"{steps} steps")
assert steps == 4 * 2000

# %% [markdown]
# ### 03.3 FP16 without a loss scale: how much worse is the last epoch than FP32's?
#
# On the loss itself hardly at all: most gradients are large enough. On the lesson's small loss, the
# same times $2^{-12}$, it is another matter.

# %%
fp16_net, own_loss = trained("float16")  # 08.3 needs the network
_, small_loss = trained("float16", weight=2.0**-12)
print(f"last epoch: FP32 {fp32_loss:.3f}, FP16 without a scale {own_loss:.3f}")
print(f"the same on the small loss: {small_loss:.3f}")
assert abs(own_loss - fp32_loss) < 0.1 * abs(small_loss - fp32_loss)

# %% [markdown]
# ## Lesson 04: What happens to a network that is cast to sixteen bits?
#
# ### 04.1 From which $x$ on does $e^x$ overflow in FP16?
#
# From about $\ln 65520$ on, for what is at least 65520 is rounded to infinity.

# %%
positive = every_float16[every_float16 > 0]
with np.errstate(over="ignore"):  # the overflow is what we look for
    first = float(positive[np.isinf(np.exp(positive))].min())
print(f"from {first} on; ln 65520 = {np.log(65520):.4f}")
assert first - float(np.spacing(np.float16(first))) < np.log(65520) <= first
assert 5 < first < 20

# %% [markdown]
# ### 04.2 A dense layer with `float16` sums: how much larger does its error become?
#
# The longer the sum, the larger its roundings. With FP32 sums there is one rounding to FP16,
# however many numbers are added.

# %%
random, growth = np.random.default_rng(0), {}
for inputs in (64, 4096):
    x, weight = (random.standard_normal((n, inputs)).astype("float16") for n in (16, 32))
    products = x[:, None].astype("float64") * weight[None].astype("float64")
    exact = products.sum(axis=-1)
    fp16_sums = np.cumsum(products.astype("float16"), axis=-1, dtype="float16")[..., -1]
    fp32_sums = (x.astype("float32") @ weight.T.astype("float32")).astype("float16")
    errors = [np.abs(sums - exact).mean() for sums in (fp16_sums, fp32_sums)]
    growth[inputs] = errors[0] / errors[1]
    print(f"{inputs:4} inputs: mean error {errors[0]:.4f}, {growth[inputs]:.1f} times as large")
assert 2 < growth[64] < 10 < growth[4096] < 100

# %% [markdown]
# ### 04.3 The convolution or the last layer in FP32: which brings the logits closer to FP32?
#
# Neither, on the average of many batches. Both errors have the order of $10^{-4}$, and even with
# both layers in FP32 the error hardly falls. Most of it is made between them, where the activation
# and the pooling round to FP16.


# %%
def small_net():
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1, in_channels=3), nn.BatchNorm(in_channels=8))
        net.add(nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Flatten())
        net.add(nn.LayerNorm(in_channels=8), nn.Dense(10, in_units=8))
    net.initialize(mx.init.Xavier())
    return net


noise = [mx.nd.array(random.standard_normal((16, 3, 8, 8))) for _ in range(5 if FAST else 40)]
kept = {"nothing": (), "convolution": (0,), "last layer": (-1,), "both": (0, -1)}
kept["activation and pooling"] = (2, 3)

# %%
reference, mean_errors = [small_net()(batch).asnumpy() for batch in noise], {}
for name, places in kept.items():
    net = small_net()
    keep = (*mpgluon.NORMALIZATION_LAYERS, *(net[place] for place in places))
    mpgluon.cast_block(net, keep_fp32=keep)
    differences = [np.abs(net(x).asnumpy() - y) / np.abs(y).max() for x, y in zip(noise, reference)]
    mean_errors[name] = np.mean(differences)
rows = [(name, f"{error:.1e}") for name, error in mean_errors.items()]
print(Table(("kept in FP32", "mean error / largest logit"), rows))
assert all(1e-4 < mean_errors[name] < 1e-3 for name in ("convolution", "last layer"))
assert 0.8 < mean_errors["convolution"] / mean_errors["last layer"] < 1.25
assert mean_errors["activation and pooling"] < 0.8 * mean_errors["both"]

# %% [markdown]
# ## Lesson 05: Does ResNet-50 learn as well in sixteen bits?
#
# The lesson's exercises ask for trainings of minutes. Here they are **smaller**: rendered shapes
# instead of photographs, 32 x 32 pixels instead of 64, a ResNet with 20 layers instead of 50, and
# the images and epochs that the next cell prints. What follows holds for these. With ResNet-50 and
# photographs, replace the config by the lesson's.
#
# `of_some_classes` copies some of the classes into a folder of their own.

# %%
from mpgluon.data import list_images, render_shapes
from mpgluon.training import TrainingConfig, train

files = tempfile.TemporaryDirectory()  # all that is written here; removed after 05.3
WORK = Path(files.name)
SHAPES = render_shapes(WORK, images_per_class=24 if FAST else 60)
CLASSES = list_images(SHAPES).classes


def of_some_classes(names):
    for name in names:
        shutil.copytree(SHAPES / name, WORK / f"{len(names)} classes" / name)
    return str(WORK / f"{len(names)} classes")


# %%
CONFIG = TrainingConfig(
    model="cifar_resnet20_v1", data_dir=of_some_classes(CLASSES), image_size=32,
    train_per_class=12 if FAST else 40, min_crop_area=0.5, batch_size=10 if FAST else 20,
    epochs=4 if FAST else 8, warmup_epochs=1, optimizer="adam", learning_rate=1e-3, workers=0,
    keep_checkpoints=1,
)  # fmt: skip


# %%
def run(name, **changes):
    """Train; return the results and the test accuracy after each epoch."""
    result = train(replace(CONFIG, output_dir=str(WORK / name), **changes))
    lines = (WORK / name / "history.jsonl").read_text().splitlines()
    log = [event for event in map(json.loads, lines) if event["event"] == "epoch"]
    return result, np.array([event["test_accuracy"] for event in log])


test_images = len(list_images(CONFIG.data_dir)) - 10 * CONFIG.train_per_class
print(f"{10 * CONFIG.train_per_class} training images, {test_images} test images")
print(f"{CONFIG.epochs} epochs of {10 * CONFIG.train_per_class // CONFIG.batch_size} steps")

# %% [markdown]
# ### 05.1 FP32 with `seed=1`: how much does the test accuracy change?
#
# By luck, and luck has a size: the standard error of the difference of two accuracies.

# %%
(zero, _), (one, _) = (run(f"seed{seed}", seed=seed) for seed in (0, 1))
share = zero["test_accuracy"]
difference = one["test_accuracy"] - share
luck = np.sqrt(2 * share * (1 - share) / test_images)
print(f"seed 0: {share:.3f}, seed 1: {one['test_accuracy']:.3f}, difference {difference:+.3f}")
print(f"standard error of a difference: {luck:.3f}")
assert abs(difference) < 4 * luck
assert abs(difference) < 0.1 or FAST  # too few images and epochs for hundredths in fast mode

# %% [markdown]
# ### 05.2 float16 with `growth_interval=5`: how many steps are skipped?
#
# Some at the beginning, until the scale fits. After that it meets its limit again and again: five
# good steps, a doubling, an overflow. That is about one step in six, however long the run.

# %%
often, _ = run("often", dtype="float16", growth_interval=5)
steps = CONFIG.epochs * 10 * CONFIG.train_per_class // CONFIG.batch_size
print(f"{often['skipped_steps']} of {steps} steps, {often['skipped_steps'] / steps:.0%}")
assert 0.05 < often["skipped_steps"] / steps < 0.35

# %% [markdown]
# ### 05.3 Six classes in FP32, then four others in float16: what does the first task give?
#
# A head start. The four new classes have ten training images each. After the second and the third
# epoch the network that knows six other classes is ahead. In the end the two are a few hundredths
# apart, which may be luck: these shapes are easy enough to learn from the beginning. (We keep the
# full learning rate, because the last layer begins anew.)

# %%
six, _ = run("six", data_dir=of_some_classes(CLASSES[:6]))
four = {
    "dtype": "float16", "data_dir": of_some_classes(CLASSES[6:]), "train_per_class": 10,
    "batch_size": 10, "epochs": 5 if FAST else 10,
}  # fmt: skip
accuracies = {
    "random weights": run("random", **four)[1],
    "six classes": run("tuned", pretrained=str(WORK / "six" / "final.params"), **four)[1],
}
headings = ("begun with", *(f"epoch {epoch}" for epoch in range(1, four["epochs"] + 1)))
print(Table(headings, [(n, *(f"{a:.2f}" for a in curve)) for n, curve in accuracies.items()]))
gain = accuracies["six classes"] - accuracies["random weights"]
assert gain[1:3].mean() > 0.1 or (FAST and gain.mean() > 0)  # chance is larger in fast mode
assert abs(gain[-1]) < 0.15 or FAST  # in fast mode the end comes too early
files.cleanup()

# %% [markdown]
# ## Lesson 06: Which layer breaks in sixteen bits?
#
# The lesson's sounds, its network and its loop once more. What is new are two arguments: the layer
# that computes the energy, and a divisor of the sounds.


# %%
def make_sounds(count, seed):
    """Return sounds, shape (count, 1, 256), and which of four pitches each has."""
    random = np.random.default_rng(seed)
    pitches = random.integers(0, 4, count)
    phases = np.array([0.03, 0.06, 0.12, 0.24])[pitches, None] * np.arange(256)
    tones = np.sin(2 * np.pi * (phases + random.uniform(0, 1, (count, 1))))
    tones += 0.3 * random.standard_normal((count, 256))  # noise
    loudness = 2.0 ** random.uniform(5, 14, (count, 1))
    sounds = np.clip(np.round(tones * loudness), -32768, 32767)
    return mx.nd.array(sounds[:, None]), mx.nd.array(pitches, dtype="int32")


# %%
class Energy(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.log(F.mean(F.broadcast_mul(x, x), axis=2) + 1)


# %%
def make_listener(energy):
    mx.random.seed(1)
    net = nn.HybridSequential()
    net.add(nn.Conv1D(16, 16, strides=4, in_channels=1, use_bias=False), energy)
    net.add(nn.Dense(32, in_units=16, activation="tanh"), nn.Dense(4, in_units=32))
    net.initialize(mx.init.Xavier())
    mpgluon.cast_block(net)
    return net


# %%
def train_listener(net, loss_scale, divisor=1):
    """Train in FP16; return which steps were skipped, and the accuracy on new sounds."""
    options = {"learning_rate": 0.01, "multi_precision": True}
    trainer, skipped = gluon.Trainer(net.collect_params(), "adam", options), []
    amp.init_trainer(trainer, loss_scale)
    for step in range(60 if FAST else 150):
        sounds, pitches = make_sounds(32, seed=step)
        train_step(net, trainer, cross_entropy, sounds / divisor, pitches)
        skipped += [step + 1] if amp.step_was_skipped(trainer) else []
    sounds, pitches = make_sounds(400, seed=10_000)
    found = net(sounds / divisor).asnumpy().argmax(axis=1)
    return skipped, np.mean(found == pitches.asnumpy())


# %% [markdown]
# ### 06.1 `F.square(x)` instead of `F.broadcast_mul(x, x)`: how many steps are skipped?
#
# A product follows its operands. `square` is one of the operators that mpgluon computes in FP32,
# because it overflows so easily. So nothing overflows forward, and only the scale has to be found.


# %%
class SquareEnergy(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.log(F.mean(F.square(x), axis=2) + 1)


skipped, accuracy = train_listener(make_listener(SquareEnergy()), "dynamic")
print(f"skipped steps: {skipped}, accuracy on new sounds: {accuracy:.1%}")
assert skipped == list(range(1, len(skipped) + 1))  # at the beginning, and never again
assert 0 < len(skipped) < 10
assert accuracy > 0.9

# %% [markdown]
# ### 06.2 Divide the sounds by a power of two: which one is needed?
#
# The energy must not overflow in any step of the training. The filters grow meanwhile, so a divisor
# that is enough for the first step may be too small later. We train with each power, and take the
# first with which hardly a step is skipped.

# %%
lost_steps = {}
for divisor in (2**6, 2**7, 2**8, 2**9, 2**10):
    scale = mpgluon.DynamicLossScale(init_scale=2.0**8)
    skipped, accuracy = train_listener(make_listener(Energy()), scale, divisor)
    lost_steps[divisor] = len(skipped)
    print(f"divided by {divisor:4}: {len(skipped):3} steps skipped, accuracy {accuracy:.1%}")
needed = min(divisor for divisor, count in lost_steps.items() if count <= 3)
print(f"needed: {needed}")
assert 100 <= needed < 1000

# %% [markdown]
# ### 06.3 How much memory does the float16 policy save with a batch of 8, and with 256?
#
# Parameters, gradients and masters take the same in both. Activations are halved, and only they
# grow with the batch.

# %%
from mpgluon.diagnostics.memory import memory_estimate

saved = {}
for batch_size in (8, 256):
    shape = (batch_size, 3, 64, 64)
    estimate = memory_estimate(vision.resnet18_v1(classes=101), shape, ctx=mx.gpu())
    total = {policy.name: policy.total for policy in estimate.policies}
    saved[batch_size] = 1 - total["float16"] / total["float32"]
    print(f"batch of {batch_size:3}: {saved[batch_size]:.1%} saved")
assert 0.01 < saved[8] < 0.1 < saved[256] < 0.5

# %% [markdown]
# ## Lesson 07: Where does the time go, and the memory?
#
# ### 07.1 From which batch size on does ResNet-50's last layer keep a V100 busy in FP16?
#
# It must do as many operations per byte as the GPU can do while it moves one. NVIDIA's figures for
# a second are 125 · 10¹² operations and 900 · 10⁹ bytes. The layer has 2048 inputs and 1000
# outputs.


# %%
def intensity(batch, inputs, outputs):
    """Return the operations per byte of a dense layer in FP16."""
    numbers = batch * inputs + inputs * outputs + batch * outputs
    return 2 * batch * inputs * outputs / (2 * numbers)


per_byte = 125e12 / 900e9
smallest = next(batch for batch in range(1, 10_000) if intensity(batch, 2048, 1000) >= per_byte)
print(f"needed: {per_byte:.1f} operations per byte; from a batch of {smallest} on")
assert 100 < smallest < 200

# %% [markdown]
# ### 07.2 How many images of 224 pixels fit into 16 GiB when ResNet-50 is trained with momentum?
#
# All but the activations is the same for every batch, and activations grow in proportion. So two
# estimates are enough. The answers are upper limits: workspaces and gradients of activations also
# want room.

# %%
options = {"optimizer_params": {"momentum": 0.9}, "policies": ("float32", "float16")}
resnet50 = vision.resnet50_v1(classes=1000)
one, two = (
    memory_estimate(resnet50, (batch, 3, 224, 224), ctx=mx.gpu(), **options).policies
    for batch in (1, 2)
)
fitting = {}
for with_one, with_two in zip(one, two):
    for_each = with_two.total - with_one.total
    fitting[with_one.name] = int((16 * 2**30 - (with_one.total - for_each)) // for_each)
print(f"images that fit, with nothing else in memory: {fitting}")
assert 100 < fitting["float32"] < fitting["float16"] < 1000
assert 1.8 < fitting["float16"] / fitting["float32"] < 2

# %% [markdown]
# ### 07.3 MobileNet's depthwise convolutions: their share of the work, and their intensity?
#
# One channel in each group means few operations for each number that is read. `trace` lists the
# operators with their shapes, and computes nothing.

# %%
from mpgluon.diagnostics import alignment_report
from mpgluon.graph.description import trace

mobilenet, shape = vision.mobilenet1_0(classes=1000), (32, 3, 224, 224)
report, graph, intensities = alignment_report(mobilenet, shape), trace(mobilenet, shape), []
for node in graph.nodes:
    if int(node.attributes.get("num_group", "1")) > 1:
        results, inputs = np.prod(node.outputs[0].shape), graph.shapes(node)
        operations = 2 * results * np.prod(inputs[1][1:])
        intensities.append(operations / (2 * (results + sum(map(np.prod, inputs)))))

# %%
depthwise = [product for product in report.products if product.role == "depthwise"]
share = sum(product.multiply_adds for product in depthwise) / report.multiply_adds
print(f"{len(depthwise)} depthwise convolutions carry {share:.1%} of all multiply-adds")
print(f"at most {max(intensities):.1f} operations per byte, of {per_byte:.0f} that a V100 needs")
assert len(intensities) == len(depthwise)
assert 0.01 < share < 0.1
assert 1 < max(intensities) < 10 < per_byte

# %% [markdown]
# ## Lesson 08: What changes with more devices, and after training?
#
# ### 08.1 Each replica looks at its own gradient, but adds all: what becomes of the weights?
#
# The first replica's gradient is finite, so it steps with a sum that is not. One of its weights
# becomes infinite, and its next gradient is NaN, except in that weight's place, where it is
# infinite. It skips that step itself. But the second replica, whose own gradient is fine, adds it.

# %%
generator = np.random.default_rng(0)
parts = generator.standard_normal((2, 32, 17)).astype("float32")
replicas, scales = np.ones((2, 16), "float32"), [2.0**8, 2.0**8]

# %%
for step in range(1, 12):
    with np.errstate(invalid="ignore"):  # infinity minus infinity, which we look for
        slopes = [(p[:, :16] @ w - p[:, 16]) @ p[:, :16] / 64 for p, w in zip(parts, replicas)]
    gradients = [(slope * s).astype("float16") for slope, s in zip(slopes, scales)]
    gradients[1][0] = np.inf if step == 10 else gradients[1][0]
    shared = sum(gradient.astype("float32") for gradient in gradients)
    for number, gradient in enumerate(gradients):
        fine = np.isfinite(gradient).all()
        replicas[number] -= 0.2 * shared / scales[number] if fine else 0
        scales[number] /= 1 if fine else 2
    infinite, nan = np.isinf(replicas).sum(axis=1), np.isnan(replicas).sum(axis=1)
    if step >= 9:
        print(f"step {step:2}: infinite weights of each replica {infinite}, NaN {nan}")
assert [infinite.tolist(), nan.tolist()] == [[1, 1], [0, 15]]

# %% [markdown]
# ### 08.2 Gradients that are noise alone: is FP16 one by one still much worse than the tree?
#
# A sum of noise grows like the root of the number of workers, not like the number. So it stays
# smaller, and each addition loses less. It still loses.


# %%
def tree(rows):
    return rows[0] if len(rows) == 1 else tree(rows[::2] + rows[1::2])


# %%
spread = 2.0 ** generator.uniform(-6, 2, 1000)
rows = (spread * generator.standard_normal((512 if FAST else 4096, 1000))).astype("float16")
exact = rows.sum(axis=0, dtype="float64")
sums = {
    "one by one": np.cumsum(rows, axis=0, dtype="float16")[-1],
    "as a tree": tree(rows),
    "in FP32": rows.sum(axis=0, dtype="float32").astype("float16"),
}
apart = {name: np.linalg.norm(s - exact) / np.linalg.norm(exact) for name, s in sums.items()}
print(f"{len(rows)} workers:", {name: f"{error:.1e}" for name, error in apart.items()})
print(f"one by one is {apart['one by one'] / apart['as a tree']:.0f} times as wrong as the tree")
assert 2 < apart["one by one"] / apart["as a tree"] < 40

# %% [markdown]
# ### 08.3 The masters rounded to BF16: how much of the BF16 error comes from the weights alone?
#
# We take the network that was trained in FP16 for 03.3, and put its masters back with `restore`.
# Autocast rounds the weights of convolutions and dense layers, and leaves BatchNorm's alone, so we
# do the same. (Where the processor has no instructions for BF16, only the first number is printed.)

# %%
from mpgluon.diagnostics import check_machine


def logits_of(net):
    net.hybridize()
    return net(images).asnumpy()


mpgluon.restore(fp16_net)
wide, mean_error = logits_of(fp16_net), {}
if {finding.topic: finding.level for finding in check_machine().findings}["bfloat16"] == "ok":
    amp.autocast(fp16_net, "bfloat16")
    mean_error["BF16 everywhere"] = np.abs(logits_of(fp16_net) - wide).max(axis=1).mean()
    mpgluon.restore(fp16_net)

# %%
for name, parameter in fp16_net.collect_params().items():
    if "batchnorm" not in name:
        parameter.set_data(mx.nd.array(round_to(parameter.data().asnumpy(), BFLOAT16)))
by_weights = np.abs(logits_of(fp16_net) - wide).max(axis=1).mean()
print(f"mean error of the logits with BF16 weights: {by_weights:.1e}")
assert by_weights > 0
for name, error in mean_error.items():
    print(f"with {name}: {error:.1e}; the weights' share is {by_weights / error:.0%}")
    assert 0.5 < by_weights / error < 1.2
