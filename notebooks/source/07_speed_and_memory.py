# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Where does the time go, and the memory?
#
# Numbers of 16 bits promise faster training in less memory. How much of that will *your* network
# see? This notebook shows how to find out, and how not to fool yourself. FP32 are the usual numbers
# of 32 bits; FP16 (`"float16"` in code) and BF16 (`"bfloat16"`) have 16. A *step* is the training
# on one batch of images.
#
# ## What you will be able to do
#
# - time a step so that somebody else gets the same answer;
# - say which operators take the time, and how much 16 bits can gain at most;
# - foresee which layers a GPU's Tensor Cores speed up, and which do not fit them;
# - tell how much memory a batch needs, and whether the images come fast enough.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code with fewer repetitions

# %%
import gc
import json
import tempfile
import time

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, profiler
from mxnet.gluon.model_zoo import vision

import mpgluon
from mpgluon.diagnostics import alignment_report, check_machine, memory_estimate
from mpgluon.diagnostics.timing import interleave, quartiles, ratios
from mpgluon.plots import FORMAT_LOOKS
from mpgluon.tables import Table

# %% [markdown]
# ## A clock that does not wait measures nothing
#
# MXNet computes in the background. A call such as `mx.nd.dot` only *asks* for a product, and
# returns at once. `mx.nd.waitall()` waits until everything is done. Here we read the clock twice:
# after the question, and after the answer. We do so several times and take the *median*: the value
# in the middle when all are sorted. A single slow one does not impress it.

# %%
matrix = mx.nd.random.normal(shape=(1500, 1500))
mx.nd.waitall()
asked, answered = [], []
for _ in range(7):
    began = time.perf_counter()
    mx.nd.dot(matrix, matrix)
    asked.append(time.perf_counter() - began)
    mx.nd.waitall()
    answered.append(time.perf_counter() - began)
ask, answer = np.median(asked), np.median(answered)
print(f"asked for after {1000 * ask:.2f} ms, there after {1000 * answer:.1f} ms")
assert ask < answer / 5

# %% [markdown]
# Without the wait you time how fast Python asks. Worse: the work then falls into whatever is timed
# next. On a GPU it is just the same.
#
# ## The first step is not like the others
#
# The first step finds out all shapes, asks for memory, and chooses code for each operator. Later
# steps find that done. `make_step` returns a function that trains on one batch and waits. Its
# images are noise, and the weights stay as they are: that hardly changes the time.

# %%
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()


def make_step(net, size, batch_size=8):
    """Return a function that goes forward and backward through ``net`` once, and waits."""
    images = mx.nd.random.normal(shape=(batch_size, 3, size, size))
    labels = mx.nd.arange(batch_size, dtype="int32")

    def step():
        with autograd.record():
            loss = loss_fn(net(images), labels)
        loss.backward()
        mx.nd.waitall()

    return step


# %%
def seconds_of(case):
    began = time.perf_counter()
    case()
    return time.perf_counter() - began


mx.random.seed(0)
net = vision.resnet18_v1(classes=10)
net.initialize(mx.init.Xavier())
net.hybridize(static_alloc=True, static_shape=True)
step = make_step(net, size=32, batch_size=2)
first, *later = (seconds_of(step) for _ in range(10))
print(f"first step: {1000 * first:.0f} ms, median of the others: {1000 * np.median(later):.0f} ms")
assert first > 1.5 * np.median(later)

# %% [markdown]
# (`hybridize` turns a network into a fixed graph, which is faster.) So run a few steps before you
# measure. That is called a *warm-up*.
#
# On a GPU the first step can take much longer still. cuDNN, NVIDIA's library for convolutions, has
# several ways to compute each one. By default MXNet tries them out at the first batch of each
# shape, and keeps the fastest: *autotuning*. It announces "performance tests to find the best
# convolution algorithm". The environment variable `MXNET_CUDNN_AUTOTUNE_DEFAULT` decides: 0 turns
# it off, 1 (the default) tries ways that need little extra memory, 2 tries all. Leave it on if all
# batches have the same shape. If each has another, every batch is a first one. A CPU has no cuDNN,
# so this notebook cannot show it.
#
# ## Machines drift; ratios of neighbours do not
#
# A processor grows warm and slows down. Another program starts. If you time all of A and then all
# of B, then B pays. To see it, we invent such a machine. Its only work is to sleep, a bit longer at
# each call. A and B are the *same* function, so the honest ratio is 1.
#
# The cure: A and B take turns, in *rounds*. In each round both meet the same machine, and we divide
# their times. In every second round B goes first. At the end we take the median of the ratios, and
# the *quartiles*: a quarter of the ratios lies below the lower one, a quarter above the upper one.
# They say how far to trust the median. `interleave`, `ratios` and `quartiles` do this; the second
# cell checks the arithmetic by hand.

# %%
calls = 0


def same_work():
    global calls
    calls += 1
    time.sleep(0.005 * (1 + calls / 40))


all_of_a = [seconds_of(same_work) for _ in range(20)]
all_of_b = [seconds_of(same_work) for _ in range(20)]
one_after_the_other = np.median(all_of_b) / np.median(all_of_a)
print(f"first all of A, then all of B: B seems to take {one_after_the_other:.2f} times as long")
assert one_after_the_other > 1.15

# %%
calls = 0
seconds = interleave({"A": same_work, "B": same_work}, rounds=20, warm_up=0)
found = ratios(seconds["B"], seconds["A"])
by_hand = np.array(seconds["B"]) / np.array(seconds["A"])
q = quartiles(found)
print(f"in rounds: median {q.median:.3f}, quartiles {q.lower:.3f} and {q.upper:.3f}")
disturbed = [*sorted(found)[:-1], 10.0]  # as if one round had been interrupted
mean, median = np.mean(disturbed), np.median(disturbed)
print(f"with one disturbed round: mean {mean:.3f}, median {median:.3f}")
assert np.array_equal(found, by_hand)
assert np.allclose([q.lower, q.median, q.upper], np.percentile(by_hand, [25, 50, 75]))
assert abs(q.median - 1) < 0.1
assert abs(median - 1) < 0.1 < mean - 1

# %% [markdown]
# ## Convolutions take most of a step
#
# MXNet has a *profiler*: it notes when each operator begins and ends. `aggregate_stats` adds the
# times up by operator. The network must not be hybridized here, or several operators appear as one.
# We profile some steps of ResNet-18, after a warm-up. Operators that begin with `_backward_` belong
# to the backward pass. MXNet calls a ReLU `Activation`, and a dense layer `FullyConnected`. `add_n`
# adds the gradients of a result that was used more than once. (`DeleteVariable`, if it appears,
# gives memory back.)

# %%
files = tempfile.TemporaryDirectory()  # all that this notebook writes; its last code removes it
options = {"filename": f"{files.name}/profile", "continuous_dump": False}  # no writing later on
profiler.set_config(profile_all=True, aggregate_stats=True, **options)
resnet18 = vision.resnet18_v1(classes=10)
resnet18.initialize(mx.init.Xavier())
step = make_step(resnet18, size=64)
step()  # the warm-up
profiler.set_state("run")
for _ in range(3 if FAST else 10):
    step()
profiler.set_state("stop")
operators = json.loads(profiler.dumps(reset=True, format="json"))["Time"]["operator"]
times = {name: entry["Total"] for name, entry in operators.items()}

# %%
conv_share = sum(t for name, t in times.items() if "Convolution" in name) / sum(times.values())
print(f"{len(times)} kinds of operators; convolutions take {conv_share:.0%} of their time")
assert conv_share > 0.5
largest = sorted(times, key=times.get, reverse=True)[:7][::-1]
percent = [100 * times[name] / sum(times.values()) for name in largest]
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
bars = axes.barh(largest, percent, color="0.7", edgecolor="black")
axes.bar_label(bars, fmt="%.1f", padding=3)
axes.set(xlabel="share of the time of all operators (%)", xlim=(0, 1.1 * max(percent)))
axes.set_title("One step of ResNet-18 at 64 pixels: the seven largest shares")
plt.show()

# %% [markdown]
# ## What is not accelerated limits the gain
#
# Say that only the convolutions become $k$ times as fast, and that they take the share $p$ of the
# time. Of a step that took 1, the part $1 - p$ stays, and $p$ becomes $p / k$. So the whole becomes
# faster by
#
# $$\frac{1}{1 - p + p / k}.$$
#
# This is Amdahl's law. Even if $k$ is infinite the gain ends at $1 / (1 - p)$. If convolutions take
# half of the time, nothing that speeds up only them can double the speed.


# %%
def gain(share, factor):
    return 1 / (1 - share + share / factor)


factors = (2, 4, 8, 1000)
rows = [(str(k), *(f"{gain(p, k):.2f}" for p in (0.5, conv_share))) for k in factors]
print(Table(("convolutions faster by", "if they take half", "with the share above"), rows))
new_times = {name: t / (2 if "Convolution" in name else 1) for name, t in times.items()}
assert np.isclose(gain(conv_share, 2), sum(times.values()) / sum(new_times.values()))
assert gain(0.5, 1000) < 2

# %% [markdown]
# ## On a CPU, BF16 is faster where there are instructions for it; FP16 costs what FP32 does
#
# Some processors multiply BF16 numbers directly. `check_machine`, the doctor, reads from the
# operating system whether this one does. We ask what it says on that topic. BF16 is timed only if
# it says "ok". Elsewhere it is computed like FP16, below, and costs what that costs.
#
# FP16 is another matter. MXNet has no FP16 matrix products for CPUs. So `mpgluon` computes in FP32,
# with exact products, and rounds each result to FP16 once (lesson 4). In a hybridized
# network the rounding is done by operators of its own, in C++, which are compiled when they are
# first needed. `mpgluon.native.available()` says whether they are there. Without them, MXNet's own
# operators give the same bits. So they do in a network that is not hybridized (*imperative*), with
# casts before and after each operator.
#
# We time forward and backward through ResNet-50 in each format, in rounds. `cast_block` makes the
# network FP16, `amp.autocast` BF16. All are hybridized but for one.

# %%
doctor = {finding.topic: finding for finding in check_machine().findings}["bfloat16"]
has_bfloat16 = doctor.level == "ok"
print(f"{doctor.level}: {doctor.what}. {doctor.why}".strip())


def in_format(name):
    net = vision.resnet50_v1(classes=10)
    net.initialize(mx.init.Xavier())
    if name.startswith("float16"):
        mpgluon.cast_block(net)
    elif name == "bfloat16":
        mpgluon.amp.autocast(net, "bfloat16")
    if "imperative" not in name:
        net.hybridize(static_alloc=True, static_shape=True)
    return net


# %%
formats = ("float32", "float16", "float16 imperative", *(["bfloat16"] if has_bfloat16 else []))
steps = {name: make_step(in_format(name), size=112) for name in formats}
seconds = interleave(steps, rounds=5 if FAST else 15, warm_up=1)
to_fp32 = {name: quartiles(ratios(seconds[name], seconds["float32"])) for name in formats}
rows = [
    (name, f"{np.median(seconds[name]):.3f}", *(f"{r:.2f}" for r in (q.lower, q.median, q.upper)))
    for name, q in to_fp32.items()
]
print(Table(("format", "s per step", "lower quartile", "ratio to FP32", "upper quartile"), rows))
print("operators in C++:", mpgluon.native.available())
fp16, imperative = to_fp32["float16"].median, to_fp32["float16 imperative"].median
assert fp16 < (2 if mpgluon.native.available() else 6)
assert imperative > 1.3 * fp16 or not mpgluon.native.available()
if has_bfloat16:
    assert to_fp32["bfloat16"].median < min(0.9, fp16)

# %% [markdown]
# A ratio below 1 means faster than FP32. FP16 cannot gain anything here: all products and sums are
# done in FP32, and rounded besides. What you get for about the price of FP32 is a GPU's arithmetic,
# to study it, to debug it, or to run the same script as on a GPU. Hybridize for that, and use BF16
# to be fast.
#
# ## A layer with few operations per byte waits for memory
#
# GPUs compute FP16 in *Tensor Cores*, units made for matrix products. But any processor has two
# limits: how many operations it does in a second, and how many bytes it moves in a second. The
# *arithmetic intensity* of a layer is the number of its operations divided by the bytes that it
# reads and writes. Below we take the published limits of NVIDIA's V100, the first GPU with Tensor
# Cores. A dense layer multiplies inputs of shape (batch, inputs) by a weight of shape (inputs,
# outputs). A product and an addition count as two operations.

# %%
PEAK = {"FP32": 15.7e12, "FP16": 125e12}  # operations per second, V100 (see References)
BANDWIDTH = 900e9  # bytes per second


def dense_intensity(batch, inputs, outputs, bytes_each=2):
    numbers = batch * inputs + inputs * outputs + batch * outputs
    return 2 * batch * inputs * outputs / (bytes_each * numbers)


for batch in (1, 512):
    print(f"batch {batch}: {dense_intensity(batch, 1024, 4096):.1f} operations per byte")
needed = {name: peak / BANDWIDTH for name, peak in PEAK.items()}
print("to keep a V100 busy:", {name: f"{value:.1f}" for name, value in needed.items()})
assert [round(dense_intensity(b, 1024, 4096)) for b in (1, 512)] == [1, 315]  # as NVIDIA's guide
assert dense_intensity(1, 1024, 4096) < needed["FP16"] < dense_intensity(512, 1024, 4096)

# %% [markdown]
# With a batch of 1 the Tensor Cores starve: to read the weights takes longer than to use them.
#
# ## Tensor Cores help convolutions, not BatchNorm and ReLU
#
# Now all layers of ResNet-50 with a batch of 32. `trace` lists the operators with their shapes, and
# computes nothing. For operators that are no products we count roughly, per result: one operation
# for ReLU and sums, nine for pooling, eight for BatchNorm.
#
# The picture is called a *roofline*. The roof is the highest speed that is possible: its slope is
# what memory allows, its flat part what arithmetic allows. Each marker is a layer, as fast as it
# could be. Layers on the slope wait for memory. Where the two roofs are one, Tensor Cores change
# nothing; FP16 still helps, because its numbers have half the bytes. Where the roofs part, Tensor
# Cores help, the more the further to the right. From both limits follows the least time of each
# layer in each format, and so what FP16 gains if both reach their roofs.

# %%
from mpgluon.graph.description import trace

PRODUCTS = ("Convolution", "FullyConnected")
PER_RESULT = {"Activation": 1, "broadcast_add": 1, "elemwise_add": 1, "Pooling": 9, "BatchNorm": 8}
resnet50, shape = vision.resnet50_v1(classes=1000), (32, 3, 224, 224)
graph, layers = trace(resnet50, shape), []
for node in graph.nodes:
    results, inputs = np.prod(node.outputs[0].shape), graph.shapes(node)
    each = PER_RESULT.get(node.operator, 0)
    if node.operator in PRODUCTS:
        each = 2 * np.prod(inputs[1][1:])  # the weight of one result
    if each:
        layers.append((node.operator, each * results, results + sum(map(np.prod, inputs))))
by_hand = sum(operations for operator, operations, _ in layers if operator in PRODUCTS)
assert by_hand == 2 * alignment_report(resnet50, shape).multiply_adds  # mpgluon counts the same

# %%
figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
reach = np.geomspace(0.1, 2000, 200)  # operations per byte
looks = {"FP32": FORMAT_LOOKS["float32"], "FP16": FORMAT_LOOKS["float16"]}
for name, peak in PEAK.items():
    roof, look = np.minimum(peak, BANDWIDTH * reach) / 1e12, {**looks[name], "marker": ""}
    axes.loglog(reach, roof, label=f"roof, {name}", **look)
markers = {"Convolution": "o", "FullyConnected": "*", "BatchNorm": "s", "Activation": "^"}
for kind, marker in markers.items():
    intensity = np.array([work / (2 * n) for operator, work, n in layers if operator == kind])
    speed = np.minimum(PEAK["FP16"], BANDWIDTH * intensity) / 1e12
    color = looks["FP16"]["color"]
    axes.plot(intensity, speed, marker, color=color, mfc="none", ms=9, label=kind)
axes.set(xlabel="arithmetic intensity in FP16 (operations per byte)", ylim=(0.05, 300))
axes.set(ylabel="highest speed ($10^{12}$ operations / s)")
axes.set_title("Layers of ResNet-50, batch 32, under the roof of a V100 (computed, not measured)")
axes.legend(frameon=False, loc="lower right")
plt.show()


# %%
def least_seconds(operations, numbers, name):
    bytes_each = 2 if name == "FP16" else 4
    return max(operations / PEAK[name], bytes_each * numbers / BANDWIDTH)


least = {name: np.array([least_seconds(w, n, name) for _, w, n in layers]) for name in PEAK}
kinds, gains = np.array([kind for kind, *_ in layers]), least["FP32"] / least["FP16"]
for kind in markers:
    print(f"{kind}: {gains[kinds == kind].min():.2f} to {gains[kinds == kind].max():.2f} times")
whole = least["FP32"].sum() / least["FP16"].sum()
print(f"the whole forward pass: {whole:.2f} times as fast as in FP32, if both reach their roofs")
assert np.allclose(gains[(kinds == "BatchNorm") | (kinds == "Activation")], 2)  # half the bytes
assert gains[kinds == "Convolution"].min() < 3 < 7 < gains.max() < 8
assert 2 < whole < gains.max()

# %% [markdown]
# ## Tensor Cores want multiples of 8
#
# Tensor Cores multiply small tiles of a matrix. In FP16, sides that are multiples of 8 fill them.
# Others are padded with zeros, or take a slower way. By hand we look at the shapes of all weights:
# rows are a layer's outputs, columns its inputs. `alignment_report` looks at every product, and
# computes nothing. It counts *multiply-adds*: one product and one addition each. We compare
# ResNet-50 for 101 classes with one for 104.


# %%
def misfits(net):
    net.initialize()
    net(mx.nd.zeros((1, 3, 32, 32)))  # now all shapes are known
    weights = net.collect_params(".*weight").values()
    return [one.name for one in weights if one.shape[0] % 8 or one.shape[1] % 8]


reports = {}
for classes in (101, 104):
    net = vision.resnet50_v1(classes=classes, prefix="net_")
    reports[classes] = alignment_report(net, (32, 3, 224, 224))
    print(f"{classes} classes: {reports[classes]}\n")
    assert len(misfits(net)) == len(reports[classes].misaligned)
assert [len(report.misaligned) for report in reports.values()] == [2, 1]
assert reports[101].products[-1].advice == "classes 101 -> 104"

# %% [markdown]
# So give the network 104 classes, and never use the last three. One misfit is left: the first
# convolution, with the three colours of an image. The advice is to leave that to cuDNN, or to store
# a fourth, empty channel, and the channels last (an order called NHWC). Depthwise convolutions are
# those that filter each channel by itself. ResNet has none; exercise 3 is about them.
#
# ## FP16 halves the memory that grows with the batch
#
# A step keeps *activations*: results of layers that the backward pass will need. They grow with the
# batch. Parameters, gradients and the optimizer's memory do not. `memory_estimate` counts all of
# them from shapes; `ctx=mx.gpu()` counts for a GPU, and needs none. The policy `float16` is
# `cast_block`. There the optimizer keeps an FP32 copy of each parameter (the *master*, lesson 2),
# so apart from activations nothing is saved. `mixed_float16` is `amp.autocast`, with FP32
# parameters. Workspaces of convolutions and gradients of activations are not counted: compare
# policies by these figures, and leave room.
#
# The last cell of this section fails **on purpose**: it asks for the estimate of a network that is
# cast already.

# %%
policies = ("float32", "mixed_float16", "float16")
how = {"optimizer_params": {"momentum": 0.9}, "policies": policies, "ctx": mx.gpu()}
estimates = {
    batch: memory_estimate(resnet50, (batch, 3, 224, 224), **how) for batch in (8, 64, 128)
}
print(estimates[64], "\n")
totals = {b: {one.name: one.total for one in e.policies} for b, e in estimates.items()}
for batch, of in totals.items():
    print(f"batch {batch}: float16 takes {of['float16'] / of['float32']:.0%} of FP32's memory")
small, large = (estimates[batch].policies for batch in (8, 64))
assert large[0].activations == 8 * small[0].activations
assert 0.5 <= large[2].activations / large[0].activations < 0.55
assert len({one.total - one.activations for one in (*small, *large)}) == 1  # all the rest

# %%
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
for name in policies:
    gib = [of[name] / 2**30 for of in totals.values()]
    axes.plot(list(totals), gib, mfc="white", label=name, **FORMAT_LOOKS[name])
axes.set(xlabel="batch size (images)", ylabel="memory (GiB)", xlim=(0, None), ylim=(0, None))
axes.set_title("ResNet-50, 224 pixels, SGD with momentum: estimate for one step on a GPU")
axes.legend(frameon=False)
plt.show()

# %%
cast_net = vision.resnet18_v1(classes=10, prefix="resnet18_")
cast_net.initialize()
mpgluon.cast_block(cast_net)
message = ""
try:
    memory_estimate(cast_net, (8, 3, 64, 64))
except mpgluon.PrecisionError as error:
    message = str(error)
print(message)
assert "estimate before the cast, or call mpgluon.restore first" in message

# %% [markdown]
# ## The profiler finds the memory that was estimated
#
# An estimate should be checked once. The same profiler counts memory too. We let it watch one
# forward pass of ResNet-18 in FP32. What is there at the end, and was not at the beginning, are the
# activations (without the images, which were there before). It says between which figures the
# memory moved, in kilobytes of 1000 bytes. The highest is a little more than what stays.

# %%
images = mx.nd.ones((8, 3, 64, 64))
(estimate,) = memory_estimate(resnet18, images.shape, policies=["float32"]).policies
gc.collect(), mx.nd.waitall()  # whatever is to be given back is given back now
profiler.set_state("run")
mx.nd.ones(1).wait_to_read()  # a first entry, from which to count
with autograd.record():
    result = resnet18(images)
mx.nd.waitall()
profiler.set_state("stop")
counter = json.loads(profiler.dumps(reset=True, format="json"))["Memory"]["Device Storage"]
measured = 1000 * (counter["Memory: cpu/0"]["Max"] - counter["Memory: cpu/0"]["Min"])
expected = estimate.activations - images.size * 4
print(f"estimated {expected / 2**20:.2f} MiB, measured {measured / 2**20:.2f} MiB")
assert 0.99 * expected < measured < 1.1 * expected

# %% [markdown]
# ## The images are the first suspect
#
# All speed is worth nothing if the step waits for images. To read and decode files takes time, and
# 16 bits do not shorten it. So split the time of the training loop in two: until the batch is
# there, and until the step is done. The same loader feeds a large network and a tiny one. The
# images are drawn by `render_shapes`, and stored as JPEG files.


# %%
def fetch_and_train(net):
    """Return two medians over batches: seconds until it was there, and seconds of its step."""
    spans, began = [], time.perf_counter()
    for images, labels in train_loader(folder, range(len(folder)), batch_size=8, image_size=112):
        fetched = time.perf_counter()
        with autograd.record():
            loss = loss_fn(net(images), labels)
        loss.backward()
        mx.nd.waitall()
        spans.append((fetched - began, time.perf_counter() - fetched))
        began = time.perf_counter()
    return np.median(spans[2:], axis=0)  # without a warm-up of two batches


# %%
from mpgluon.data import list_images, render_shapes
from mpgluon.data.loaders import train_loader

folder = list_images(render_shapes(files.name, images_per_class=8 if FAST else 16))
tiny = gluon.nn.HybridSequential()
tiny.add(gluon.nn.AvgPool2D(16), gluon.nn.Dense(10))
tiny.initialize()
first_to_improve = {}
for name, net in {"ResNet-50": in_format("float32"), "tiny": tiny}.items():
    loading, training = fetch_and_train(net)
    print(f"{name}: loader {8 / loading:.0f} images/s, step {8 / training:.0f} images/s,", end=" ")
    print(f"{loading / (loading + training):.0%} of the time spent waiting for images")
    first_to_improve[name] = "loader" if loading > training else "step"
assert first_to_improve == {"ResNet-50": "step", "tiny": "loader"}

# %% [markdown]
# A loader that is the slower one gets processes of its own (`num_workers=4`): they decode the next
# batches while the network computes. A GPU makes the step so much faster that the loader often
# becomes the slower one.
#
# ## Others measured gains between these limits, and no loss of accuracy
#
# A CPU cannot show what Tensor Cores do, so we quote. NVIDIA trained ResNet-50 v1.5 (one stride is
# elsewhere than in v1) with MXNet on V100 GPUs of 16 GB, and published images per second, loading
# included. Batches were not equal: 96 images per GPU in FP32, and 192 in *mixed precision*, that
# is, FP16 with FP32 masters. Micikevicius et al. trained on ImageNet with and without the method
# of these notebooks, with equal settings. Their figures are top-1 accuracies: the share of images
# whose most probable class is the right one.
#
# And `mpgluon` on a GPU? The last cell shows what has been recorded so far in `results/`.

# %%
published = {1: (384, 1376), 4: (1513, 5357), 8: (3005, 10723)}  # GPUs: FP32, mixed precision
speedups = [mixed / fp32 for fp32, mixed in published.values()]
rows = [
    tuple(map(str, (n, *both, round(b, 2)))) for (n, both), b in zip(published.items(), speedups)
]
print(Table(("GPUs", "FP32 images/s", "mixed images/s", "times as fast"), rows), "\n")
networks = ("AlexNet", "VGG-D", "Inception v1", "Inception v2", "Inception v3", "ResNet-50")
fp32 = np.array([56.77, 65.40, 68.33, 70.03, 73.85, 75.92])  # percent
mixed = np.array([56.93, 65.43, 68.43, 70.02, 74.13, 76.04])
rows = [(n, f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}") for n, a, b in zip(networks, fp32, mixed)]
print(Table(("network", "FP32 %", "mixed precision %", "difference"), rows))
assert all(2 < speedup < PEAK["FP16"] / PEAK["FP32"] for speedup in speedups)
assert np.abs(mixed - fp32).max() < 0.3

# %%
from pathlib import Path

records = sorted(Path("../results").glob("gpu-*.json"))
for record in records:
    print(f"{record.name}:", json.dumps(json.loads(record.read_text()), indent=1))
if not records:
    print("nothing yet: mpgluon's own times above are all of this CPU, and none is of a GPU")
files.cleanup()
assert not Path(files.name).exists()

# %% [markdown]
# ## Summary
#
# - Wait before you read the clock, warm up, let cases take turns, and report the median of ratios
#   with quartiles.
# - The profiler says where a step's time goes. What is not accelerated limits the gain.
# - BF16 is faster on a CPU with instructions for it; the doctor knows. FP16 on a CPU is for its
#   arithmetic, at about the price of FP32 if the network is hybridized.
# - Tensor Cores help layers with many operations per byte, and with sides that are multiples of 8.
#   For the others FP16 halves the bytes, no more.
# - FP16 halves activations; what belongs to parameters takes as much as before. So it saves most
#   with large batches.
# - Before you accelerate a step, see that it does not wait for images.
#
# ## Exercises
#
# 1. From which batch size on does the last layer of ResNet-50 (2048 inputs, 1000 outputs) do enough
#    operations per byte to keep a V100 busy in FP16? (Expected: between one and two hundred.)
# 2. How many images of 224 pixels fit into 16 GiB when ResNet-50 is trained with momentum, by
#    `memory_estimate`, in FP32 and with the policy `float16`? (Expected: some hundreds. The second
#    is nearly twice the first.)
# 3. MobileNet (`vision.mobilenet1_0`) has depthwise convolutions: those with a `num_group` above 1.
#    Which share of its multiply-adds do they carry? What is the highest arithmetic intensity of one
#    of them in FP16, with a batch of 32? (Expected: a few percent; a few operations per byte, so
#    they wait for memory, however fast the Tensor Cores are.)
#
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018: section 4.1, Table 1 (accuracies).
# - NVIDIA, DeepLearningExamples, "ResNet-50 v1.5 for MXNet" (MxNet/Classification/RN50v1.5,
#   README.md), "Training performance: NVIDIA DGX-1 (8x V100 16GB)", container mxnet-20.12-py3.
# - NVIDIA, "GPU Performance Background User's Guide" and "Matrix Multiplication Background User's
#   Guide": arithmetic intensity, limits of the V100, multiples of 8.
# - NVIDIA, "Training With Mixed Precision" user guide.
# - Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
#   Architectures", Communications of the ACM, 2009.
# - Amdahl, "Validity of the single processor approach to achieving large scale computing
#   capabilities", AFIPS 1967.
