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
# see? This lesson shows how to find out, and how not to be misled by a clock.
#
# A *step* is the training on one batch of images. FP32 is Gluon's default format. FP16
# (`"float16"` in code) and BF16 (`"bfloat16"`) have 16 bits. *Tensor Cores* are the units of a GPU
# that multiply matrices in 16 bits.
#
# ![Five bars, a sketch: the parts of a step's time. On a CPU, emulated FP16 adds a short part for
# rounding to FP32's step, and native BF16 has shorter products. On a GPU, Tensor Cores shrink the
# products most, 16 bits halve what moves through memory, and the update
# stays](figures/07_step_time.svg)
#
# The sketch shows the parts of a step's time: products, the numbers that move through memory,
# rounding and the update. (Waiting for images is not drawn. *Emulated* FP16 is computed in FP32,
# and rounded.) 16 bits shorten some of these parts. Look next at the parts that stay long.
#
# ## What you will be able to do
#
# - time a training step so that somebody else gets the same answer;
# - say which operators take the time, and how much 16 bits can gain at most;
# - set a CPU up so that no time is lost;
# - foresee which layers a GPU's Tensor Cores speed up, and which do not fit them;
# - tell how much memory a batch needs, and whether the images come fast enough.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code with fewer repetitions

# %% tags=["setup"]
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append("..")  # recipes/ is beside this folder

import mpgluon
from mpgluon.diagnostics import alignment_report, check_machine
from mpgluon.graph.description import trace
from mpgluon.tools.plots import FORMAT_LOOKS
from mpgluon_tools.tables import Table
from mpgluon_tools.timing import interleave, quartiles, ratios

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, profiler
from mxnet.gluon.model_zoo import vision

from recipes.data import list_images, render_shapes
from recipes.data.loaders import train_loader
from teaching import check

NAMES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
HAS_PROC = Path("/proc/self/status").exists()  # Linux tells there about threads and memory


def in_new_process(program, *arguments, **variables):
    """Run a Python program in a process of its own, and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, **variables}, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return json.loads(done.stdout)


# %% [markdown]
# ## A clock that does not wait measures nothing
#
# MXNet computes in the background. A call such as `mx.nd.dot` only *asks* for a product, and
# returns at once. `mx.nd.waitall()` waits until everything is done. We read the clock twice: after
# the call, and after the wait. We do so several times and take the *median*, the middle value when
# all are sorted: a single slow call hardly changes it.

# %%
matrix = mx.nd.random.normal(shape=(1500, 1500))
mx.nd.waitall()
asked, done = [], []
for _ in range(7):
    began = time.perf_counter()
    mx.nd.dot(matrix, matrix)
    asked.append(time.perf_counter() - began)
    mx.nd.waitall()
    done.append(time.perf_counter() - began)
print(f"the call returns after {1000 * np.median(asked):.2f} ms,", end=" ")
print(f"the product is there after {1000 * np.median(done):.1f} ms")

# %% [markdown]
# Without the wait you time how fast Python asks. Worse, the work is then counted in the time of the
# next operation. The same is true on a GPU.

# %% tags=["claim"]
if not FAST:  # times: in fast mode other lessons run at the same time
    assert np.median(asked) < np.median(done) / 5

# %% [markdown]
# ## The first step is slower than all others
#
# In the first step MXNet finds out all shapes, allocates memory and chooses code for each operator.
# Later steps use what it found. `make_step` returns a function that goes forward and backward on
# one batch, and waits. Its images are noise, and the weights stay as they are: neither changes the
# time.

# %%
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()


def make_step(net, size, batch_size=8):
    images = mx.nd.random.normal(shape=(batch_size, 3, size, size))
    labels = mx.nd.arange(batch_size, dtype="int32")

    def step():
        with autograd.record():
            loss = loss_fn(net(images), labels)
        loss.backward()
        mx.nd.waitall()

    return step


def seconds_of(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


net = vision.resnet18_v1(classes=10)
net.initialize(mx.init.Xavier())
net.hybridize(static_alloc=True, static_shape=True)
step = make_step(net, size=32, batch_size=2)
first, *later = (seconds_of(step) for _ in range(10))
print(f"first step: {1000 * first:.0f} ms, median of the others: {1000 * np.median(later):.0f} ms")

# %% [markdown]
# So do a few steps before you measure: a *warm-up*.
#
# On a GPU the first step can take much longer still. cuDNN, NVIDIA's library for convolutions, has
# several ways to compute each one. By default MXNet tries them at the first batch of each shape and
# keeps the fastest (*autotuning*; it prints "performance tests to find the best convolution
# algorithm"). `MXNET_CUDNN_AUTOTUNE_DEFAULT=0` turns that off: do so if each batch has another
# shape, since then every batch is the first of its shape.

# %% tags=["claim"]
if not FAST:  # times: in fast mode other lessons run at the same time
    assert first > 1.5 * np.median(later)

# %% [markdown]
# ## Machines drift; ratios of neighbours do not
#
# A processor grows warm and slows down. Another program starts. If you time all of A and then all
# of B, only B is measured on the slower machine. To see this, we invent such a machine: its only
# work is to sleep, a bit longer at each call. A and B are the *same* function, so the true ratio
# is 1.
#
# The cure: A and B take turns, in *rounds*, and in every second round B goes first. In each round
# both find the machine in the same state, so we divide their times round by round. At the end we
# take the median of the ratios, and the *quartiles*: a quarter of the ratios is below the lower
# one, a quarter above the upper one. The quartiles say how far to trust the median. `interleave`,
# `ratios` and `quartiles` do this.

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

calls = 0
seconds = interleave({"A": same_work, "B": same_work}, rounds=20, warm_up=0)
found = ratios(seconds["B"], seconds["A"])
q = quartiles(found)
print(f"in rounds: median {q.median:.3f}, quartiles {q.lower:.3f} and {q.upper:.3f}")

disturbed = [*sorted(found)[:-1], 10.0]  # as if one round had been interrupted
mean, median = np.mean(disturbed), np.median(disturbed)
print(f"with one disturbed round: mean {mean:.3f}, median {median:.3f}")

# %% tags=["claim"]
by_hand = np.array(seconds["B"]) / np.array(seconds["A"])
assert np.array_equal(found, by_hand)
assert np.allclose([q.lower, q.median, q.upper], np.percentile(by_hand, [25, 50, 75]))
if not FAST:  # times: in fast mode other lessons run at the same time
    assert one_after_the_other > 1.15
    assert abs(q.median - 1) < 0.1
    assert abs(median - 1) < 0.1 < mean - 1

# %% [markdown]
# ## Convolutions take most of a step
#
# MXNet has a *profiler*: it notes when each operator begins and ends, and `aggregate_stats` adds
# the times up by operator. The network must not be hybridized here, or several operators appear as
# one. We profile some steps of ResNet-18, after a warm-up.

# %%
files = tempfile.TemporaryDirectory()  # all that this notebook writes
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
conv_share = sum(t for name, t in times.items() if "Convolution" in name) / sum(times.values())
print(f"{len(times)} kinds of operators; convolutions take {conv_share:.0%} of their time")

# %% tags=["plot"] alt="Bars: convolutions, backward and forward, take far more time than all else"
largest = sorted(times, key=times.get, reverse=True)[:7][::-1]
percent = [100 * times[name] / sum(times.values()) for name in largest]
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
bars = axes.barh(largest, percent, color="0.7", edgecolor="black")
axes.bar_label(bars, fmt="%.1f", padding=3)
axes.set(xlabel="share of the time of all operators (%)", xlim=(0, 1.1 * max(percent)))
axes.set_title("A step of ResNet-18 is convolutions above all: the seven largest shares")
plt.show()

# %% [markdown]
# Operators that begin with `_backward_` belong to the backward pass. MXNet calls a ReLU
# `Activation` and a dense layer `FullyConnected`. `broadcast_add` is the sum at the end of a
# residual block.

# %% tags=["claim"]
if not FAST:  # times: in fast mode other lessons run at the same time
    assert conv_share > 0.5

# %% [markdown]
# ## What is not accelerated limits the gain
#
# Suppose that only the convolutions become $k$ times as fast, and take the share $p$ of the time.
# If a step took the time 1, the part $1 - p$ stays, and the part $p$ becomes $p / k$. So the step
# becomes faster by the factor
#
# $$\frac{1}{1 - p + p / k}.$$
#
# This is Amdahl's law. Even if $k$ is infinite, the gain ends at $1 / (1 - p)$. If convolutions
# take half of the time, faster convolutions alone cannot double the speed.


# %%
def gain(share, factor):
    return 1 / (1 - share + share / factor)


rows = [(str(k), *(f"{gain(p, k):.2f}" for p in (0.5, conv_share))) for k in (2, 4, 8, 1000)]
print(Table(("convolutions faster by", "if they take half", "with the share above"), rows))

# %% tags=["claim"]
new_times = {name: t / (2 if "Convolution" in name else 1) for name, t in times.items()}
assert np.isclose(gain(conv_share, 2), sum(times.values()) / sum(new_times.values()))
assert gain(0.5, 1000) < 2

# %% [markdown]
# ## On a CPU, BF16 is fast where there are instructions for it; FP16 costs what FP32 does
#
# Some processors multiply BF16 numbers directly. `check_machine`, the *doctor*, reads from the
# operating system whether this processor does.
#
# For FP16 this is different: MXNet has no FP16 matrix products for CPUs. So `mpgluon` computes in
# FP32, with exact products, and rounds each result to FP16 once (lesson 04). You get the arithmetic
# of a GPU, to study it, to debug it, or to run the same script, in about the time of FP32. For that
# time, two things are needed:
#
# - **Hybridize**, `net.hybridize(static_alloc=True, static_shape=True)`. A network that is not
#   hybridized (*imperative*) casts numbers before and after each operator, which takes time.
# - **Have a compiler**, `g++` or `clang++`: `mpgluon` compiles operators of its own when they are
#   first needed. `python -m mpgluon.kernels` says whether they are there. Without them MXNet's own
#   operators give the same bits, more slowly.
#
# We time forward and backward through ResNet-50, in rounds.

# %%
doctor = {finding.topic: finding for finding in check_machine().findings}["bfloat16"]
has_bfloat16 = doctor.level == "ok"
print(f"BF16: {doctor.level}: {doctor.what}. {doctor.why}".strip())


def in_format(name):
    net = vision.get_model("resnet18_v1" if FAST else "resnet50_v1", classes=10)
    net.initialize(mx.init.Xavier())
    if name.startswith("FP16"):
        mpgluon.cast_block(net)
    elif name == "BF16":
        mpgluon.amp.autocast(net, "bfloat16")
    if "imperative" not in name:
        net.hybridize(static_alloc=True, static_shape=True)
    return net


formats = ("FP32", "FP16", "FP16, imperative", *(["BF16"] if has_bfloat16 else []))
size, rounds = (64, 3) if FAST else (112, 11)
steps = {name: make_step(in_format(name), size=size) for name in formats}
seconds = interleave(steps, rounds=rounds, warm_up=1)
to_fp32 = {name: quartiles(ratios(seconds[name], seconds["FP32"])) for name in formats}
rows = [
    (name, f"{np.median(seconds[name]):.3f}", *(f"{r:.2f}" for r in (q.lower, q.median, q.upper)))
    for name, q in to_fp32.items()
]
print(Table(("format", "s per step", "lower quartile", "ratio to FP32", "upper quartile"), rows))
print("operators in C++:", mpgluon.kernels.available())

# %% [markdown]
# A ratio below 1 means faster than FP32. Other networks gain or lose other amounts. Here is a
# record of 18 networks on one machine (`python study/scripts/benchmark.py zoo` makes one for
# yours):
#
# ![Training step of 18 networks in FP16, cast and autocast, over FP32: MobileNet v2, SE-ResNeXt,
# CIFAR ResNet v1 and MobileNet v3 large well below 1, the others at most
# 1.08](../study/results/cpu-amd-epyc-2-cores-zoo.png)

# %%
record = json.loads(Path("../study/results/cpu-amd-epyc-2-cores-zoo.json").read_text())
of_zoo = {}
for case in record["cases"]:
    for result in case["results"][1:]:
        of_zoo.setdefault(result["name"], []).append(result["relative"]["median"])
print(
    f"{record['machine']['processor']}, {record['machine']['cores']} cores, {record['date'][:10]}"
)
for name, of_networks in of_zoo.items():
    mean = np.exp(np.mean(np.log(of_networks)))
    print(f"{name}: geometric mean {mean:.2f}, worst {max(of_networks):.2f} of FP32's time")

# %% tags=["claim"]
fp16, imperative = to_fp32["FP16"].median, to_fp32["FP16, imperative"].median
assert len(record["cases"]) == 18
assert all(np.exp(np.mean(np.log(of_networks))) < 1.1 for of_networks in of_zoo.values())
if not FAST:  # times: in fast mode other lessons run at the same time
    assert fp16 < (2 if mpgluon.kernels.available() else 6)
    assert imperative > 1.3 * fp16 or not mpgluon.kernels.available()
    assert not has_bfloat16 or to_fp32["BF16"].median < min(1, fp16)

# %% [markdown]
# ## A copy from NumPy can slow down all steps after it
#
# MXNet computes with as many threads as `OMP_NUM_THREADS` says. Set it to the number of cores: if
# it is not set, MXNet may compute with one.
#
# There is another trap with threads, in every format. To copy a large array from or to NumPy, MXNet
# starts further threads for the main thread of your program. From the first such copy on there are
# more threads than cores. Then the threads sleep between two pieces of work instead of staying
# ready, and waking them takes time in every step.
#
# A loop that makes its batches with `mx.nd.array` does such a copy in each step. A single copy is
# enough to see the effect. `MXNET_CPU_PARALLEL_SIZE` is the number of elements from which on MXNet
# copies with threads. It must be set before MXNet is imported, so we measure in new processes.

# %%
BEFORE_AND_AFTER_A_COPY = """
import json, os, sys, time
import mpgluon, mxnet as mx, numpy as np
from mxnet.gluon.model_zoo import vision

def measure():
    seconds = []
    for _ in range(int(sys.argv[1])):
        began = time.perf_counter()
        with mx.autograd.record():
            loss = net(images).sum()
        loss.backward()
        mx.nd.waitall()
        seconds.append(time.perf_counter() - began)
    threads = len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0
    return np.median(seconds), threads

net = vision.mobilenet1_0(classes=10)
net.initialize()
net.hybridize(static_alloc=True, static_shape=True)
images = mx.nd.random.normal(shape=(8, 3, 96, 96))
measure()  # the warm-up
before = measure()
mx.nd.array(np.zeros((8, 3, 96, 96), "float32"))  # a copy of 221,184 numbers
print(json.dumps([before, measure()]))
"""
copies, count, threads = {}, 1 if FAST else 30, str(max(2, os.cpu_count()))
for setting in ("200000", "1000000000"):  # the first is MXNet's default
    variables = {"MXNET_CPU_PARALLEL_SIZE": setting, "OMP_NUM_THREADS": threads}
    copies[setting] = in_new_process(BEFORE_AND_AFTER_A_COPY, count, **variables)
rows = [
    (setting, f"{1000 * before:.1f}", f"{1000 * after:.1f}", f"{some} and {more}")
    for setting, ((before, some), (after, more)) in copies.items()
]
headings = "MXNET_CPU_PARALLEL_SIZE", "ms per step before the copy", "after it", "threads"
print(f"OMP_NUM_THREADS={threads}, {os.cpu_count()} cores")
print(Table(headings, rows))

# %% [markdown]
# With `MXNET_CPU_PARALLEL_SIZE=1000000000` the copy starts no thread, and steps stay as fast as
# before. `mpgluon`'s loader, checkpoints and scripts copy in small parts and need no setting.

# %% tags=["claim"]
(_, threads_before), (_, threads_after) = copies["1000000000"]
assert threads_after == threads_before
(_, threads_before), (_, threads_after) = copies["200000"]
assert threads_after > threads_before or not HAS_PROC

# %% [markdown]
# ## A layer with few operations per byte waits for memory
#
# We turn to GPUs. Any processor has two limits: how many operations it does in a second, and how
# many bytes it moves in a second. The *arithmetic intensity* of a layer is the number of its
# operations divided by the bytes that it reads and writes. Below are the published limits of
# NVIDIA's V100, the first GPU with Tensor Cores. A dense layer multiplies inputs of shape (batch,
# inputs) by a weight of shape (inputs, outputs). A product and an addition count as two operations.

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

# %% [markdown]
# With a batch of 1 the Tensor Cores have to wait: reading the weights takes longer than using them.

# %% tags=["claim"]
assert [round(dense_intensity(b, 1024, 4096)) for b in (1, 512)] == [1, 315]  # as NVIDIA's guide
assert dense_intensity(1, 1024, 4096) < needed["FP16"] < dense_intensity(512, 1024, 4096)

# %% [markdown]
# ## Tensor Cores help convolutions, not BatchNorm and ReLU
#
# Now we look at all layers of ResNet-50 with a batch of 32. `trace` lists the operators with their
# shapes, and computes nothing. For operators that are not products we count roughly, for each
# result: one operation for ReLU and sums, nine for pooling, eight for BatchNorm.

# %%
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


def least_seconds(operations, numbers, name):
    bytes_each = 2 if name == "FP16" else 4
    return max(operations / PEAK[name], bytes_each * numbers / BANDWIDTH)


least = {name: np.array([least_seconds(w, n, name) for _, w, n in layers]) for name in PEAK}
kinds, gains = np.array([kind for kind, *_ in layers]), least["FP32"] / least["FP16"]
for kind in ("Convolution", "FullyConnected", "BatchNorm", "Activation"):
    print(f"{kind}: {gains[kinds == kind].min():.2f} to {gains[kinds == kind].max():.2f} times")
whole = least["FP32"].sum() / least["FP16"].sum()
print(f"the whole forward pass: {whole:.2f} times as fast as in FP32, if both reach their limits")

# %% [markdown]
# A picture of these limits is called a *roofline*. The roof is the highest speed that is possible:
# on its slope memory sets the limit, on its flat part arithmetic does. Each mark is a layer, at the
# highest speed that it could have in FP16. Layers on the slope wait for memory. (Marks of equal
# layers lie on each other.) Below 17 operations per byte the roofs of FP32 and FP16 are one line:
# there Tensor Cores change nothing, and FP16 helps only because its numbers have half the bytes.

# %% tags=["plot"] alt="Roofs of FP32 and FP16; ReLU and BatchNorm below both, convolutions above"
figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
reach = np.geomspace(0.1, 2000, 200)  # operations per byte
for name, peak in PEAK.items():
    look = {**FORMAT_LOOKS["float32" if name == "FP32" else "float16"], "marker": ""}
    shown = reach[reach > (needed["FP32"] if name == "FP16" else 0)]
    axes.loglog(shown, np.minimum(peak, BANDWIDTH * shown) / 1e12, **look)
    axes.text(2000, 1.4 * peak / 1e12, f"roof of {name}", ha="right", color=look["color"])
axes.text(0.7, 1.1, "both roofs are one", ha="right")
words = {"Convolution": "convolutions", "FullyConnected": "dense layer", "Activation": "ReLUs"}
marks = {"Convolution": "o", "FullyConnected": "*", "BatchNorm": "D", "Activation": "^"}
places = {"Convolution": (430, 60), "FullyConnected": (36, 20), "Activation": (0.3, 0.16)}
for kind, mark in marks.items():
    intensity = np.array([work / (2 * n) for operator, work, n in layers if operator == kind])
    speed = np.minimum(PEAK["FP16"], BANDWIDTH * intensity) / 1e12
    color = FORMAT_LOOKS["float16"]["color"]
    axes.plot(intensity, speed, mark, color=color, mfc="none", ms=9)
    axes.text(*places.get(kind, (2.5, 1.4)), f"{len(intensity)} {words.get(kind, 'BatchNorms')}")
axes.set(xlabel="arithmetic intensity in FP16 (operations per byte)", ylim=(0.05, 300))
axes.set(ylabel="highest speed ($10^{12}$ operations / s)")
axes.set_title("ResNet-50, batch 32, on a V100: where the roofs part, Tensor Cores help (computed)")
plt.show()

# %% tags=["claim"]
by_hand = sum(operations for operator, operations, _ in layers if operator in PRODUCTS)
assert by_hand == 2 * alignment_report(resnet50, shape).multiply_adds  # mpgluon counts the same
assert np.allclose(gains[(kinds == "BatchNorm") | (kinds == "Activation")], 2)  # half the bytes
assert gains[kinds == "Convolution"].min() < 3 < 7 < gains.max() < 8
assert 2 < whole < gains.max()
assert 17 < needed["FP32"] < 18

# %% [markdown]
# ## Tensor Cores want multiples of 8
#
# Tensor Cores multiply small tiles of a matrix. In FP16, sides that are multiples of 8 fill these
# tiles. Other sides are padded with zeros, or the product is computed in a slower way.
# `alignment_report` looks at every product of a network, and computes nothing. It counts
# *multiply-adds*: one product and one addition each. We compare ResNet-50 for 101 classes with one
# for 104.

# %%
reports = {}
for classes in (101, 104):
    net = vision.resnet50_v1(classes=classes, prefix="net_")
    reports[classes] = alignment_report(net, (32, 3, 224, 224))
    print(f"{classes} classes: {reports[classes]}\n")

# %% [markdown]
# So give the network 104 classes, and never use the last three. One misfit is left: the first
# convolution, whose input has the three colours of an image. The advice is to leave it to cuDNN, or
# to add a fourth, empty channel and to store the channels last (an order called NHWC).

# %% tags=["claim"]
for classes in reports:
    net = vision.resnet50_v1(classes=classes)
    net.initialize()
    net(mx.nd.zeros((1, 3, 32, 32)))  # now all shapes are known
    weights = net.collect_params(".*weight").values()
    misfits = [one.name for one in weights if one.shape[0] % 8 or one.shape[1] % 8]
    assert len(misfits) == len(reports[classes].misaligned)
assert [len(report.misaligned) for report in reports.values()] == [2, 1]
assert reports[101].products[-1].advice == "classes 101 -> 104"

# %% [markdown]
# What does a misfit cost? This project has a record of an H100, made with PyTorch, since MXNet has
# no kernels for it (`study/scripts/record_tensor_core_times.py`). It has a dense layer of 4,096
# inputs and units, batch 4,096, in FP16, and the same layer with one side a little larger:

# %%
h100 = json.loads(Path("../study/results/gpu-nvidia-h100-80gb-hbm3-pytorch.json").read_text())
dense = {(row["dtype"], *row["shape"]): row["seconds"] for row in h100["dense"]}


def tflops(dtype, *sizes):  # the layer and its two gradients
    return 3 * 2 * np.prod(np.array(sizes, float)) / sum(dense[(dtype, *sizes)].values()) / 1e12


fits = tflops("float16", 4096, 4096, 4096)
print(f"{fits:.0f} TFLOP/s in FP16, {tflops('float32', 4096, 4096, 4096):.0f} in FP32; and with")
slower, rows = {}, []
for more in (1, 2, 4, 8):
    for i, side in enumerate(("batch", "inputs", "units")):
        sizes = [4096] * 3
        sizes[i] += more
        slower[side, more] = fits / tflops("float16", *sizes)
    rows.append(
        (str(4096 + more), *(f"{slower[s, more]:.1f}x" for s in ("batch", "inputs", "units")))
    )
print(Table(("instead of 4096", "batch: slower", "inputs: slower", "units: slower"), rows), "\n")
steps = {(r["dtype"], r["layout"], r["shape"][1]): r["seconds"] for r in h100["convolutions"]}
for few, fitting in ((63, 64), (3, 4)):
    for layout in ("NCHW", "NHWC"):
        before, after = (1000 * steps["float16", layout, channels] for channels in (few, fitting))
        print(f"{layout}, {few} -> {fitting} channels: {before:.2f} -> {after:.2f} ms")

# %% [markdown]
# One unit too many makes FP16 five to six times slower: even TF32, in which Tensor Cores compute
# FP32 products, is faster then. Multiples of 4 are as slow as multiples of 2. The size of the batch
# does not matter on this GPU, because in the matrices of this layer numbers along the batch are
# never neighbours in memory. And a fourth channel makes the first convolution faster, most of all
# with the channels last.

# %% tags=["claim"]
assert all(slower[side, 1] > 4 and slower[side, 4] > 2 for side in ("inputs", "units"))
assert all(slower[side, 8] < 1.2 for side in ("batch", "inputs", "units"))
assert all(slower["batch", more] < 1.2 for more in (1, 2, 4))
assert tflops("float16", 4096, 4096, 4097) < tflops("tf32", 4096, 4096, 4096)
assert steps["float16", "NHWC", 63] > 2 * steps["float16", "NHWC", 64]
assert all(
    steps["float16", layout, 4] < 0.9 * steps["float16", layout, 3] for layout in ("NCHW", "NHWC")
)

# %% [markdown]
# ## FP16 saves the memory that grows with the batch
#
# A step keeps *activations*: results of layers that the backward pass will need. They grow with the
# batch and with the area of the images, and a hybridized FP16 network keeps them in 16 bits, on a
# CPU too. Parameters and gradients do not grow, and FP32 masters come on top of the 16-bit weights.
# So how much does a whole process save? A formula is hard to find: there are also buffers of single
# operators, and memory that an allocator keeps. But it can be measured: we train in one new process
# for each format, and read its peak of memory from Linux (`VmHWM`).

# %%
PEAK_OF_TRAINING = """
import json, sys
import mpgluon, mxnet as mx
from mxnet.gluon.model_zoo import vision

def peak_mib():
    try:
        lines = open("/proc/self/status").read().splitlines()
    except FileNotFoundError:
        return float("nan")  # not Linux
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

dtype, (batch_size, size, steps) = sys.argv[1], map(int, sys.argv[2:])
imported = peak_mib()
net = vision.resnet50_v1(classes=1000)
net.initialize(mx.init.Xavier())
if dtype == "float16":
    mpgluon.cast_block(net)
net.hybridize(static_alloc=True, static_shape=True)
options = {"learning_rate": 1e-6, "momentum": 0.9, "multi_precision": dtype == "float16"}
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options)
mpgluon.amp.init_trainer(trainer, 2.0**4 if dtype == "float16" else "none")
images = mx.nd.random.normal(shape=(batch_size, 3, size, size))
for _ in range(steps):
    with mx.autograd.record():
        loss = net(images).square().mean()
        with mpgluon.amp.scale_loss(loss, trainer) as scaled_loss:
            scaled_loss.backward()
    trainer.step(1)
    mx.nd.waitall()
print(json.dumps([imported, peak_mib()]))
"""
batch_sizes, size = ((2, 32), 64) if FAST else ((2, 32), 224)
peaks, rows = {}, []
for batch_size in batch_sizes:
    for dtype in ("float32", "float16"):
        imported, peaks[batch_size, dtype] = in_new_process(
            PEAK_OF_TRAINING, dtype, batch_size, size, 1 if FAST else 2
        )
    fp32, fp16 = (peaks[batch_size, dtype] for dtype in ("float32", "float16"))
    rows.append((str(batch_size), f"{fp32:,.0f}", f"{fp16:,.0f}", f"{fp16 / fp32:.2f}"))
print(f"ResNet-50, images of {size} pixels; {imported:.0f} MiB are Python and libraries")
print(Table(("images in a batch", "FP32 MiB", "FP16 MiB", "ratio"), rows))

# %% [markdown]
# With large batches of large images FP16 takes clearly less. With few or small images nothing is
# saved: there, most of the memory belongs to the network and to the libraries.

# %% tags=["claim"]
few, many = ({d: peaks[size, d] for d in ("float32", "float16")} for size in batch_sizes)
if mpgluon.kernels.available() and HAS_PROC:
    each = {d: (many[d] - few[d]) / (batch_sizes[1] - batch_sizes[0]) for d in few}  # MiB per image
    assert each["float16"] < (0.9 if FAST else 0.7) * each["float32"]
    assert few["float16"] / few["float32"] > many["float16"] / many["float32"]

# %% [markdown]
# ## The images are the first suspect
#
# A fast step does not help if it has to wait for images. Reading and decoding files takes time, and
# 16 bits do not shorten it. So we split the time of the training loop in two: waiting for the
# batch, and the step. The same loader feeds a large network and a tiny one. The images are rendered
# shapes, stored as JPEG files.


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


folder = list_images(render_shapes(files.name, images_per_class=4 if FAST else 16))
tiny = gluon.nn.HybridSequential()
tiny.add(gluon.nn.AvgPool2D(16), gluon.nn.Dense(10))
tiny.initialize()
first_to_improve = {}
for name, net in {"ResNet-50": in_format("FP32"), "tiny": tiny}.items():
    loading, training = fetch_and_train(net)
    print(f"{name}: loader {8 / loading:.0f} images/s, step {8 / training:.0f} images/s,", end=" ")
    print(f"{loading / (loading + training):.0%} of the time spent waiting for images")
    first_to_improve[name] = "loader" if loading > training else "step"

# %% [markdown]
# If the loader is slower than the step, give it processes of its own (`num_workers=4`): they decode
# the next batches while the network computes. A GPU makes the step so much faster that the loader
# often becomes the slower of the two.

# %% tags=["claim"]
assert FAST or first_to_improve == {"ResNet-50": "step", "tiny": "loader"}
files.cleanup()
assert not Path(files.name).exists()

# %% [markdown]
# ## On GPUs, others measured gains between these limits, and no loss of accuracy
#
# First the record of the H100 again: a training step of ResNet-50 in PyTorch, 224 pixels, channels
# last, with images that are already loaded. FP16 and BF16 are PyTorch's autocast, FP16 with a loss
# scale.

# %%
training = {(row["dtype"], row["batch"]): row for row in h100["training"]}
names = {"float32": "FP32", "tf32": "TF32", "float16": "FP16", "bfloat16": "BF16"}
in_fp32, rows = training["float32", 256]["seconds"], []
for dtype, name in names.items():
    seconds, peak = training[dtype, 256]["seconds"], training[dtype, 256]["bytes"] / 1e9
    rows.append((name, f"{256 / seconds:.0f}", f"{in_fp32 / seconds:.1f}", f"{peak:.1f}"))
print(Table(("batch 256", "images/s", "times as fast", "GB at most"), rows))

# %% tags=["claim"]
assert training["float32", 256]["seconds"] > 4 * training["float16", 256]["seconds"]
assert 0.5 < training["float16", 256]["bytes"] / training["float32", 256]["bytes"] < 0.55

# %% [markdown]
# The next numbers are quoted. NVIDIA trained ResNet-50 v1.5 (v1 with one stride in another layer)
# with MXNet on V100 GPUs of 16 GB, and published images per second, loading included. The batches
# were not equal: 96 images per GPU in FP32, and 192 in *mixed precision*, that is, FP16 with FP32
# masters. Micikevicius et al. trained on ImageNet with and without the method of these lessons,
# with equal settings. Their figures are top-1 accuracies: the share of images whose most probable
# class is the right one.

# %%
published = {1: (384, 1376), 4: (1513, 5357), 8: (3005, 10723)}  # GPUs: FP32, mixed precision
rows = [
    (str(gpus), str(fp32), str(mixed), f"{mixed / fp32:.2f}")
    for gpus, (fp32, mixed) in published.items()
]
print(Table(("GPUs", "FP32 images/s", "mixed images/s", "times as fast"), rows), "\n")
accuracies = {  # percent: FP32, mixed precision
    "AlexNet": (56.77, 56.93), "VGG-D": (65.40, 65.43), "Inception v1": (68.33, 68.43),
    "Inception v2": (70.03, 70.02), "Inception v3": (73.85, 74.13), "ResNet-50": (75.92, 76.04),
}  # fmt: skip
rows = [(n, f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}") for n, (a, b) in accuracies.items()]
print(Table(("network", "FP32 %", "mixed precision %", "difference"), rows))

# %% [markdown]
# [Performance](../docs/performance.md) has the other measurements of this project, and the
# machines. [On an NVIDIA GPU](../docs/gpu.md) says what a GPU user can rely on.

# %% tags=["claim"]
assert all(2 < mixed / fp32 < PEAK["FP16"] / PEAK["FP32"] for fp32, mixed in published.values())
assert all(abs(mixed - fp32) < 0.3 for fp32, mixed in accuracies.values())

# %% [markdown]
# ## Summary
#
# - Wait before you read the clock, warm up, let cases take turns, and report the median of ratios
#   with quartiles.
# - The profiler says where a step's time goes. What is not accelerated limits the gain.
# - On a CPU, BF16 is fast where there are instructions for it; the doctor knows. FP16 on a CPU
#   gives you a GPU's arithmetic and takes less memory, in about the time of FP32: hybridize, and
#   have a compiler.
# - Set `OMP_NUM_THREADS` to the number of cores, and `MXNET_CPU_PARALLEL_SIZE=1000000000` if your
#   loop makes batches with `mx.nd.array`.
# - Tensor Cores help layers with many operations per byte, and with inputs and outputs that are
#   multiples of 8. For other layers FP16 only halves the bytes.
# - FP16 saves memory of activations, which counts with large batches of large images. Parameters
#   take as much as before. Measure the peak of a process for each format.
# - Before you accelerate a step, see that it does not wait for images.

# %% [markdown]
# ## Exercises

# %% [markdown]
# **07.1** (level 3) `a()` and `b()` ask a machine for work and return at once; `wait()` returns
# when all of it is done. The machine gets slower from call to call. Write a function of these
# three. It returns the time of the work of `b`, divided by the time of the work of `a`. Hand in the
# function.


# %%
def times_as_long(a, b, wait): ...  # your lines here


answer = ...  # times_as_long
check("07.1", answer)


# %% tags=["solution"]
def in_turns(a, b, wait):
    # One case is: ask, and wait. Cases take turns, so both meet the same machine in each round.
    cases = {"a": lambda: (a(), wait()), "b": lambda: (b(), wait())}
    seconds = interleave(cases, rounds=10)
    return quartiles(ratios(seconds["b"], seconds["a"])).median


assert check("07.1", in_turns)

# %% [markdown]
# **07.2** (level 2) From which batch size on does the last layer of ResNet-50 (2048 inputs, 1000
# outputs) do enough operations per byte to keep a V100 busy in FP16? Hand in the smallest such
# batch size, in images.

# %%
answer = ...
check("07.2", answer)

# %% tags=["solution"]
# Try one batch size after the other.
enough = (b for b in range(1, 10_000) if dense_intensity(b, 2048, 1000) >= needed["FP16"])
assert check("07.2", next(enough))

# %% [markdown]
# **07.3** (level 1) A process that trains ResNet-50 in FP16 on images of 224 pixels has a peak of
# 1,055 MiB with batches of 8 images, and of 2,409 MiB with 32 (docs/performance.md). How many
# images may a batch have if 8 GiB are left for the process? Hand in the largest batch size, in
# images.

# %%
answer = ...
check("07.3", answer)

# %% tags=["solution"]
# Memory grows in proportion to the batch, from what the process needs anyway.
each = (2409 - 1055) / (32 - 8)
assert check("07.3", (8 * 1024 - (1055 - 8 * each)) // each)

# %% [markdown]
# One more to try: MobileNet (`vision.mobilenet1_0`) has depthwise convolutions, which have a
# `num_group` above 1. Which share of its multiply-adds do they carry, and how many operations per
# byte do they do?
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

# %% [markdown]
# [← 06 Which layer breaks in sixteen bits?](06_reading_the_diagnostics.ipynb) ·
# [All lessons](README.md) ·
# [08 What changes with several devices? →](08_several_devices.ipynb)
