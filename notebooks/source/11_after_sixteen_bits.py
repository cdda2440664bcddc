# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # What comes after sixteen bits?
#
# Newer GPUs multiply numbers of eight bits, and networks are trained with weights of sixteen bits
# and no copy in 32. A format of eight bits has 256 codes. This lesson shows what makes training
# with so few numbers possible, and what breaks without it. On a CPU, mpgluon rounds to any format
# that you describe, so you can try all of it here.
#
# ![Nine formats from FP32 to four bits, one below the other, each with its largest number and its
# significant bits. FP32, TF32 and BF16 need nothing, FP16 a loss scale, FP8 a scale for each
# tensor, FP6 and FP4 a scale for each block of 32 values](figures/11_formats.svg)
#
# This lesson follows the drawing from top to bottom: with fewer bits the range gets shorter, and
# more scales are needed.
#
# ## What you will be able to do
#
# - write down the numbers of a format from the widths of its fields;
# - say when a format needs a scale, and which values should share one;
# - train a network with products in eight bits, and recognise the failure without scales;
# - train BF16 weights without a copy in FP32, with stochastic rounding or Kahan's compensation;
# - find out whether it matters to a network which GPU's Tensor Core adds its products.
#
# You should know lessons 01 to 03: formats, lost updates, lost gradients. In code, FP32 is
# `float32` and BF16 is `bfloat16`. FP8 has two formats, E4M3 (`float8_e4m3`) and E5M2
# (`float8_e5m2`).

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %% tags=["setup"]
import logging
import sys

sys.path.append("..")  # recipes/ and study/ are beside this folder

import mpgluon
from mpgluon import (
    BFLOAT16,
    FLOAT4_E2M1,
    FLOAT6_E2M3,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FloatFormat,
    Policy,
    amp,
    diagnostics,
    round_to,
)
from mpgluon.formats.scaling import round_scaled
from mpgluon.formats.tensor_core import ACCUMULATIONS
from mpgluon.tools.plots import FORMAT_LOOKS
from mpgluon_tools.tables import Table

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from recipes.data.shapes import render_image
from teaching import check

logging.getLogger("mpgluon").setLevel(logging.ERROR)  # it warns of what we do on purpose
FP32, BF16, FP8 = (FORMAT_LOOKS[name] for name in ("float32", "bfloat16", "mixed_float8"))
OTHERS = [
    {"color": "#CC79A7", "marker": "D", "linestyle": "--"},
    {"color": "#E69F00", "marker": "P", "linestyle": "-."},
    {"color": "0.45", "marker": "x", "linestyle": ":"},
]

# %% [markdown]
# ## A format is a few numbers: from six bits to eight
#
# Lesson 01 drew all numbers of a format with six bits: 1 for the sign, 3 for the exponent, 2 for
# the fraction. With eight bits, two more can go to the fraction or to the exponent. E4M3 has one
# more exponent bit, and E5M2 has two: the digits of a name are the widths of the two fields.
#
# E4M3 differs from the older formats in one more way. In those formats the largest exponent stands
# for infinity and NaN. E4M3 has no infinity: its largest exponent holds numbers, except for one
# code, which is NaN. The function below is the one of lesson 01, with this case (`finite_only`)
# added.


# %%
def decode(code, exponent_bits, fraction_bits, finite_only):
    sign = -1.0 if code >> (exponent_bits + fraction_bits) else 1.0
    field = (code >> fraction_bits) % 2**exponent_bits
    fraction = (code % 2**fraction_bits) / 2**fraction_bits
    ones = field == 2**exponent_bits - 1
    if ones and not finite_only:
        return sign * np.inf if fraction == 0 else np.nan
    if ones and fraction == 1 - 2**-fraction_bits:
        return np.nan
    bias = 2 ** (exponent_bits - 1) - 1
    leading, exponent = (0, 1 - bias) if field == 0 else (1, field - bias)
    return sign * (leading + fraction) * 2.0**exponent


SIX_BITS = FloatFormat("six bits", significand_bits=3, exponent_bits=3)
numbers = {}
for f in (SIX_BITS, FLOAT8_E4M3, FLOAT8_E5M2):
    fraction_bits = f.significand_bits - 1  # the hidden 1 is a significant bit, and not stored
    codes = range(2 ** (1 + f.exponent_bits + fraction_bits))
    values = np.array([decode(c, f.exponent_bits, fraction_bits, f.finite_only) for c in codes])
    numbers[f] = np.unique(values[np.isfinite(values)])
headings = ["format", "numbers", "largest", "smallest", "spacing above 1", "too large becomes"]
rows = []
for f, n in numbers.items():
    sizes = (f.max, f.smallest_subnormal, f.epsilon, f.overflow)
    rows.append([f.name, str(len(n)), *(f"{size:g}" for size in sizes)])
print(Table(headings, rows))

# %% tags=["claim"]
for f, all_numbers in numbers.items():
    assert all_numbers.max() == f.max
    assert all_numbers[all_numbers > 0].min() == f.smallest_subnormal
    assert np.array_equal(round_to(all_numbers, f), all_numbers)
    between = (all_numbers[:-1] + all_numbers[1:]) / 2
    assert np.isin(round_to(between, f), all_numbers).all()
assert [len(n) for n in numbers.values()] == [55, 253, 247]

# %% tags=["plot"] alt="Three rows of marks on a logarithmic axis, one mark for each positive number: the six-bit format from 1/16 to 14, E4M3 from 2 to the power -9 to 448, E5M2 from 2 to the power -16 to 57344; E4M3's marks are the densest"
figure, axes = plt.subplots(figsize=(6.2, 3.2), layout="constrained")
for row, ((f, all_numbers), look) in enumerate(zip(numbers.items(), (OTHERS[1], FP8, OTHERS[0]))):
    positive = all_numbers[all_numbers > 0]
    axes.vlines(positive, row - 0.28, row + 0.28, color=look["color"], linewidth=1)
    steps = 2 ** (f.significand_bits - 1)
    words = f"{steps} steps\nper power of two"
    axes.text(positive[-1] * 1.4, row, words, va="center", color="0.25")
axes.set_xscale("log", base=2)
axes.set(yticks=range(3), yticklabels=[f.name for f in numbers], xlim=(2**-17, 2**27))
axes.invert_yaxis()
axes.set(title="E5M2 has the range, E4M3 the digits\n(a line for each positive number)")
axes.set(xlabel="value")
plt.show()

# %% [markdown]
# What to notice: all of E4M3 lies within 18 powers of two, and the gradients of one network may
# spread over more. So the question is where on this axis the numbers of a network are.
#
# ## Without a scale, layers with small gradients learn nothing in eight bits
#
# A network of four dense layers turns images of ten shapes into 32 numbers each, and draws the
# images again from these. The loss is a mean over all pixels of all images, so its gradients are
# small.
#
# We use FP8 as a GPU does. Only the operands of products have eight bits: E4M3 in the forward pass,
# E5M2 for the gradient that arrives in the backward pass. Products are added in FP32. Values
# between the layers are BF16, parameters FP32, and the first and the last layer compute in BF16. A
# `Policy` says all this in one line.

# %% tags=["setup"]
IMAGES, SIDE, STEPS = 160, 24, 100 if FAST else 300
pixels = [render_image(n % 10, n // 10).convert("L").resize((SIDE, SIDE)) for n in range(IMAGES)]
images = mx.nd.array(np.stack([np.asarray(image).ravel() / 255 for image in pixels]))


def mean_loss(outputs, wanted):
    return ((outputs - wanted) ** 2).mean()


def make_network():
    mx.random.seed(0)  # the same initial weights every time
    net = nn.HybridSequential()
    net.add(nn.Dense(256, activation="relu", in_units=SIDE**2), nn.Dense(32, in_units=256))
    net.add(nn.Dense(256, activation="relu", in_units=32))
    net.add(nn.Dense(SIDE**2, activation="sigmoid", in_units=256))
    net.initialize(mx.init.Xavier())
    return net


# %%
def train(policy=None):
    """Train in FP32, or under a policy; return the network and the loss of each step."""
    net = make_network()
    if policy is not None:
        amp.autocast(net, Policy.parse(policy))
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.002})
    losses = []
    for _ in range(STEPS):
        with autograd.record():
            loss = mean_loss(net(images), images)
        loss.backward()
        trainer.step(1)
        losses.append(loss)
    return net, np.array([loss.asscalar() for loss in losses])


def at_the_end(curve):
    """Return the median of the last 50 losses: single steps go up and down."""
    return np.median(curve[-50:])


UNSCALED = "compute=float8_e4m3,gradient=float8_e5m2,between=bfloat16,scaling=none"
nets, curves = {}, {}
for name, policy in {"FP32": None, "FP8 without scales": UNSCALED}.items():
    nets[name], curves[name] = train(policy)
    print(f"{name}: loss {curves[name][0]:.3f} at first, {at_the_end(curves[name]):.4f} at the end")

# %% tags=["claim"]
assert at_the_end(curves["FP8 without scales"]) > 1.5 * at_the_end(curves["FP32"])

# %% [markdown]
# There was no error and no message. `range_report` says what happened: it runs one batch in FP32
# and counts what a format would make of each array. (An *output gradient* is the gradient of the
# loss with respect to the result of a layer. It arrives at the layer's product in the backward
# pass.)

# %%
batch = diagnostics.Batch(images, images, mean_loss)
report = diagnostics.range_report(nets["FP32"], batch, fmt=FLOAT8_E5M2)
arrays = [array for array in report.arrays if array.kind == "output gradient"]
rows = [(a.name, f"{a.largest:.1e}", f"{a.underflow_fraction:.1%}") for a in arrays]
print(Table(("output gradient of", "largest", "becomes zero in E5M2"), rows))

# %% tags=["claim"]
assert np.mean([array.underflow_fraction for array in arrays]) > 0.8

# %% [markdown]
# Nearly all output gradients become zero in E5M2. It has as many exponent bits as FP16, but its
# smallest number is $2^{-16}$, and FP16's $2^{-24}$. If the gradient is zero, a layer and all
# layers before it learn nothing. Here it is mostly the last layer that learns, from the BF16
# gradient that it receives. One loss scale would help this network, as in lesson 03. But E4M3 has
# to hold weights and data too, and no loss scale moves those.
#
# ## A scale for each tensor moves its values to where the format has its numbers
#
# So each operand gets a scale of its own, in each step: the largest power of two that keeps the
# largest value within the format. Values are multiplied by it, rounded, and divided by it again. A
# power of two changes exponents only, so the rounding is the only loss. We try it on one gradient
# of our network, the gradient of the 32 numbers in its middle.


# %%
def round_with_a_scale(values, f):
    largest = np.abs(values).max()
    scale = 2.0 ** np.floor(np.log2(f.max / largest))
    return round_to(values * scale, f) / scale


def relative_error(rounded, values):
    return np.linalg.norm(rounded - values) / np.linalg.norm(values)


middle = nets["FP32"][:2](images)
middle.attach_grad()
with autograd.record():
    loss = mean_loss(nets["FP32"][2:](middle), images)
loss.backward()
gradient = middle.grad.asnumpy().astype(np.float64)
alone, scaled = round_to(gradient, FLOAT8_E5M2), round_with_a_scale(gradient, FLOAT8_E5M2)
for name, rounded in (("as it is", alone), ("with a scale", scaled)):
    zeros = np.mean((rounded == 0) & (gradient != 0))
    print(f"{name:12}: {zeros:6.1%} become zero, error {relative_error(rounded, gradient):.1%}")

# %% tags=["claim"]
assert np.mean(alone == 0) > 0.5
assert relative_error(scaled, gradient) < FLOAT8_E5M2.unit_roundoff
assert np.array_equal(scaled, round_scaled(gradient, FLOAT8_E5M2))  # mpgluon's own function

# %% tags=["plot"] alt="Histogram of the exponents of the gradient, twice. As it is, most of it lies to the left of the numbers of E5M2. Multiplied by its scale, all of it lies within the normal numbers of E5M2."
largest = np.abs(gradient).max()
shift = int(np.floor(np.log2(FLOAT8_E5M2.max / largest)))
exponents = np.floor(np.log2(np.abs(gradient[gradient != 0])))
bins = np.arange(-45, 18)
figure, axes = plt.subplots(figsize=(6.2, 3.8), layout="constrained")
normal = (FLOAT8_E5M2.min_exponent, FLOAT8_E5M2.max_exponent + 1)
axes.axvspan(*normal, color="0.92", linewidth=0)
axes.axvspan(
    normal[0] - 2, normal[0], facecolor="white", edgecolor="0.8", hatch="////", linewidth=0
)
for place, look in ((0, OTHERS[2]), (shift, FP8)):
    weights_of_bars = np.full(len(exponents), 100 / len(exponents))
    axes.hist(
        exponents + place, bins, weights=weights_of_bars, histtype="step", color=look["color"], lw=2
    )
    words = "as it is" if place == 0 else f"times its scale, $2^{{{shift}}}$"
    axes.text(np.median(exponents) + place - 2, 24, words, ha="right", color=look["color"])
axes.text(-5, 34, "normal numbers of E5M2", ha="center", color="0.35")
axes.text(-41.5, 31, "left of the hatched\npart: becomes zero", color="0.35")
axes.set(xlim=(-42, 17), ylim=(0, 38), ylabel="share of values (%)")
axes.set(xlabel="exponent e of values from $2^e$ to $2^{e+1}$\n(hatched: subnormal numbers)")
axes.set(title="One power of two moves a gradient into the range of E5M2")
plt.show()

# %% [markdown]
# `mixed_float8` is the name of the policy with such scales. It needs no loss scale.

# %%
nets["FP8, mixed_float8"], curves["FP8, mixed_float8"] = train("mixed_float8")
for name, curve in curves.items():
    print(f"{name:18} loss {at_the_end(curve):.4f} at the end")

# %% tags=["claim"]
assert abs(at_the_end(curves["FP8, mixed_float8"]) / at_the_end(curves["FP32"]) - 1) < 0.25

# %% tags=["plot"] alt="Above: loss against step. FP32 and mixed_float8 fall together; FP8 without scales stays far above them. Below: five shapes as they are, and as the three networks draw them: FP32 and mixed_float8 draw them alike, the network without scales draws blurred ones."
figure, (axes, pictures) = plt.subplots(2, 1, figsize=(6.2, 8), layout="constrained")
looks = {"FP32": FP32, "FP8 without scales": OTHERS[2], "FP8, mixed_float8": FP8}
for place, (name, curve) in enumerate(curves.items()):
    look = {**looks[name], "markerfacecolor": "none"}
    axes.plot(curve, label=name, markevery=(place * STEPS // 30, STEPS // 10), **look)
axes.set(yscale="log", xlabel="step", ylabel="loss", title="With scales, FP8 follows FP32")
axes.legend()
drawn = {"image": images, **{name: net(images) for name, net in nets.items()}}
rows = [
    np.concatenate(list(d[:5].asnumpy().reshape(5, SIDE, SIDE)), axis=1) for d in drawn.values()
]
pictures.imshow(np.concatenate(rows), cmap="gray", vmin=0, vmax=1)
pictures.set_yticks(SIDE * (np.arange(4) + 0.5), ["image", "FP32", "no scales", "mixed_float8"])
pictures.set(xticks=[], title="What the networks draw")
plt.show()

# %% [markdown]
# One small network and one seed show that it can work. [The results](../docs/results.md) have three
# networks with five seeds each, on photographs.
#
# ## One outlier takes the digits of all values that share its scale
#
# The largest value decides the scale. If it is far larger than the others, these land among the
# format's smallest numbers, or at zero. Then fewer values should share a scale. The *MX* formats
# have one power of two for each block of 32 values along the dimension that a product sums over, so
# an outlier harms its own block only.

# %%
rng = np.random.default_rng(0)
values = rng.normal(size=(64, 256))
values[rng.random(values.shape) < 0.001] *= 200  # one value in a thousand
usual = np.abs(values) < 5
headings = ["format", "error, one scale", "error, blocks of 32", "zero, one scale", "zero, blocks"]
rows, errors = [], {}
for f in (FLOAT8_E5M2, FLOAT8_E4M3, FLOAT6_E2M3, FLOAT4_E2M1):
    both = round_scaled(values, f), round_scaled(values, f, block=32)
    errors[f] = [np.median(np.abs(rounded / values - 1)[usual]) for rounded in both]
    zeros = [np.mean(rounded[usual] == 0) for rounded in both]
    rows.append([f.name, *(f"{share:.1%}" for share in (*errors[f], *zeros))])
print(Table(headings, rows))

# %% tags=["claim"]
for f in (FLOAT8_E4M3, FLOAT8_E5M2):
    assert errors[f][0] < f.unit_roundoff
    assert errors[f][1] <= errors[f][0]
for f in (FLOAT6_E2M3, FLOAT4_E2M1):
    assert errors[f][0] == 1 > 4 * errors[f][1]

# %% [markdown]
# The errors are medians of the relative errors of all values but the outliers. E4M3 and E5M2 have
# enough range for outliers of this size, so one scale is as good as many. The formats of six and
# four bits do not: with one scale, nearly all values become zero. So these formats are used with
# blocks, and formats of eight bits in both ways.
#
# ## E4M3 is finer, E5M2 forgives a scale that does not fit
#
# Why are there two formats of eight bits? We round the gradient from above with many scales, not
# only with the best one.

# %%
shifts = np.arange(-30, 45)
by_shift = {
    f: np.array([relative_error(round_to(gradient * 2.0**s, f) / 2.0**s, gradient) for s in shifts])
    for f in (FLOAT8_E4M3, FLOAT8_E5M2)
}
for f, error in by_shift.items():
    fits = error < 0.1
    print(f"{f.name}: least error {np.nanmin(error):.1%}; below 10 % with {fits.sum()} scales")

# %% tags=["claim"]
finer, wider = by_shift[FLOAT8_E4M3], by_shift[FLOAT8_E5M2]
assert 1.8 < np.nanmin(wider) / np.nanmin(finer) < 2.2
assert (wider < 0.1).sum() >= (finer < 0.1).sum() + 10

# %% tags=["plot"] alt="Relative error of a gradient against the exponent of the scale, for E4M3 and E5M2. Both fall from 100 percent to a level floor and end where values overflow. The floor of E4M3 is half as high, that of E5M2 is wider on both sides."
figure, axes = plt.subplots(figsize=(6.2, 3.8), layout="constrained")
for (f, error), look in zip(by_shift.items(), (FP8, OTHERS[0])):
    finite = np.isfinite(error)
    axes.plot(shifts[finite], 100 * error[finite], **{**look, "markersize": 4})
    end = np.flatnonzero(finite)[-1]
    words = f"{f.name}:\nlarger scales overflow"
    axes.text(shifts[end] + 0.8, 100 * error[end], words, va="center", color=look["color"])
axes.set(yscale="log", xlabel="s, when the gradient is multiplied by $2^s$ and rounded")
axes.set(ylabel="relative error (%)", xlim=(shifts[0], 65), ylim=(1.5, 130))
axes.set(title="Half the error with E4M3,\ntwice the choice of scales with E5M2")
plt.show()

# %% [markdown]
# With the right scale, E4M3 is the better format, for gradients too. E5M2 has twice the error, and
# works with many more scales. That matters if a scale is old (NVIDIA's *delayed* scaling takes it
# from earlier steps; `amax_history=16` in a policy), or if values of very different sizes share a
# scale. So recipes with a scale per tensor use E5M2 for gradients, and Mishra et al., with blocks
# of 32, use E4M3 for everything.
#
# ## With scales, even lesson 01's six bits train
#
# mpgluon accepts any format of up to eight bits, also by the widths of its fields: `e3m2` is lesson
# 01's format. Only the name in the policy changes. On a GPU this format would need new hardware.

# %%
smaller = {
    "six bits, a scale per tensor": "compute=e3m2,between=bfloat16,scaling=tensor",
    "six bits, blocks of 32": "compute=e3m2,between=bfloat16,scaling=mx",
    "four bits, a scale per tensor": "compute=float4_e2m1,between=bfloat16,scaling=tensor",
    "four bits, blocks of 32": "compute=float4_e2m1,between=bfloat16,scaling=mx",
}
for name, policy in smaller.items():
    _, curves[name] = train(policy)
ends = {name: at_the_end(curve) for name, curve in curves.items()}
rows = [(name, f"{loss:.4f}") for name, loss in ends.items()]
print(Table(("products in", "loss at the end"), rows))

# %% tags=["claim"]
assert max(ends[name] for name in smaller) < ends["FP8 without scales"]
assert abs(ends["six bits, blocks of 32"] / ends["FP32"] - 1) < 0.35

# %% [markdown]
# Six bits with scales do better than eight without. (First and last layer are BF16 in all rows.)
#
# ## Stochastic rounding lets lost updates arrive, on average
#
# Lesson 02 kept a copy of each weight in FP32, since a weight of 16 bits loses every small update.
# There are two ways to do without that copy. Both are for BF16, which has the range of FP32.
#
# *Stochastic rounding* takes one of the two neighbours by chance, the nearer one more often, so
# that the result is right on average. *Kahan's compensation* keeps what rounding cut off in a
# second BF16 number, and adds it to the next update. Here are a thousand updates of 0.0004 to a
# weight of 1. Rounded to nearest, each update is lost, as in lesson 01. The random bits come from a
# key, here a seed and the number of the step, so every run gives the same numbers.

# %%
UPDATE, UPDATES = 0.0004, 1000
weights = {name: [1.0] for name in ("nearest", "stochastic", "Kahan")}
missing = 0.0
for step in range(UPDATES):
    weights["nearest"].append(float(round_to(weights["nearest"][-1] + UPDATE, BFLOAT16)))
    moved = weights["stochastic"][-1] + UPDATE
    weights["stochastic"].append(float(round_to(moved, BFLOAT16, "stochastic", key=(0, step))))
    moved = weights["Kahan"][-1] + (UPDATE + missing)
    weights["Kahan"].append(float(round_to(moved, BFLOAT16)))
    missing = float(round_to(moved - weights["Kahan"][-1], BFLOAT16))
print({name: values[-1] for name, values in weights.items()}, f"exact: {1 + UPDATES * UPDATE:g}")

# %% tags=["claim"]
assert weights["nearest"][-1] == 1
assert abs(weights["stochastic"][-1] - 1.4) < 0.2
assert abs(weights["Kahan"][-1] - 1.4) < BFLOAT16.epsilon
with_many_keys = round_to(np.full(100_000, 1 + UPDATE), BFLOAT16, "stochastic", key=(0, 0))
assert abs(with_many_keys.mean() - (1 + UPDATE)) < 1e-4

# %% tags=["plot"] alt="A weight over a thousand steps: rounded to nearest it stays at 1; with Kahan's compensation it follows the straight line to 1.4 in small stairs; stochastically rounded it wanders around that line"
LOOKS = {"nearest": OTHERS[2], "stochastic": OTHERS[0], "Kahan": OTHERS[1]}
figure, axes = plt.subplots(figsize=(6.2, 3.8), layout="constrained")
axes.plot([0, UPDATES], [1, 1 + UPDATES * UPDATE], color="0.8", linewidth=5)
for (name, values), at in zip(weights.items(), ((700, 1.015), (480, 1.13), (90, 1.19))):
    axes.step(range(UPDATES + 1), values, where="post", color=LOOKS[name]["color"])
    words = {"Kahan": "Kahan's compensation", "nearest": "rounded to nearest"}
    axes.text(*at, words.get(name, "rounded stochastically"), color=LOOKS[name]["color"])
axes.text(560, 1.27, "exact: the wide line", color="0.4", ha="right")
axes.set(xlabel="step", ylabel="BF16 weight", title="A thousand updates of 0.0004")
plt.show()

# %% [markdown]
# ## Lesson 02's network learns with BF16 weights alone
#
# Lesson 02 had a network that learns nothing without masters. It has 256 hidden units, tells the
# points of a disc from the points of a ring, and starts where every update is too small. Here it is
# again, in BF16, where even updates that are eight times larger are lost. `multi_precision=True`
# keeps masters in FP32. Without it, `update_rounding` says how the updated weight is rounded.

# %% tags=["setup"]
DISC_STEPS = 800 if FAST else 3000
drawn = np.random.default_rng(0)  # points and start are those of lesson 02
radius = np.concatenate([drawn.uniform(0, 0.5, 64), drawn.uniform(0.7, 1, 64)])
angle = drawn.uniform(0, 2 * np.pi, 128)
points = np.stack([radius * np.cos(angle), radius * np.sin(angle), np.ones(128)], axis=1)
inputs, is_ring = mx.nd.array(points), mx.nd.array(np.arange(128) >= 64)
loss_fn = gluon.loss.SigmoidBinaryCrossEntropyLoss()
one_of_each_pair = drawn.choice([-1, 1], (128, 3)) * drawn.uniform(0.5, 1.5, (128, 3))


def make_disc_network():
    net = nn.HybridSequential()
    net.add(nn.Dense(256, in_units=3, use_bias=False, activation="relu"))
    net.add(nn.Dense(1, in_units=256, use_bias=False))
    net.initialize()
    net[0].weight.set_data(mx.nd.array(np.concatenate([one_of_each_pair, one_of_each_pair])))
    net[1].weight.set_data(mx.nd.array([[1] * 128 + [-1] * 128]))
    return net


# %%
def train_bfloat16(masters=False, **rounding):
    """Return the loss of each step, and the share of points with the right label."""
    net = make_disc_network()
    mpgluon.cast_block(net, "bfloat16")
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": 0.0005, "multi_precision": masters}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, "none", **rounding)
    losses = []
    for _ in range(DISC_STEPS):
        with autograd.record():
            loss = loss_fn(net(inputs), is_ring)
        loss.backward()
        trainer.step(len(inputs))
        losses.append(loss.mean())
    accuracy = float(((net(inputs) > 0)[:, 0] == is_ring).mean().asscalar())
    return np.array([loss.asscalar() for loss in losses]), accuracy


disc = {
    "FP32 masters": train_bfloat16(masters=True),
    "nearest": train_bfloat16(update_rounding="nearest"),
    "stochastic": train_bfloat16(update_rounding="stochastic"),
    "Kahan": train_bfloat16(update_rounding="kahan"),
}
rows = [
    (name, f"{losses[0]:.3f}", f"{losses[-1]:.3f}", f"{accuracy:.0%}")
    for name, (losses, accuracy) in disc.items()
]
print(Table(("updates", "loss, first step", "loss, last step", "accuracy"), rows))

# %% tags=["claim"]
last = {name: losses[-1] for name, (losses, _) in disc.items()}
assert len(set(disc["nearest"][0])) == 1
assert disc["nearest"][1] == 0.5
for name in ("stochastic", "Kahan"):
    assert abs(last[name] / last["FP32 masters"] - 1) < 0.15
assert min(disc[name][1] for name in ("FP32 masters", "stochastic", "Kahan")) > 0.95

# %% tags=["plot"] alt="Loss against step. With updates rounded to nearest it is a level line at 0.69. With FP32 masters, with Kahan's compensation and with stochastic rounding it falls to about 0.15, nearly on one line."
figure, axes = plt.subplots(figsize=(6.2, 4), layout="constrained")
every = DISC_STEPS // 10
for place, (name, (losses, _)) in enumerate(disc.items()):
    look = {**(BF16 if name == "FP32 masters" else LOOKS[name]), "markerfacecolor": "none"}
    axes.plot(losses, label=name, markevery=(place * every // 4, every), **look)
axes.set(xlabel="step", ylabel="loss", ylim=(0, 0.75), title="BF16 weights, updated in four ways")
axes.legend(loc="lower left")
plt.show()

# %% [markdown]
# What to notice: rounded to nearest, not one weight moves, as in lesson 02. With the other two the
# network learns as with masters, and three of the four curves nearly cover each other. Stochastic
# rounding stores nothing but the weight. Kahan's compensation stores a second number of 16 bits,
# half as many as an FP32 master has, and loses only updates that are too small even for this
# number. [bfloat16 weights](../docs/optimizers.md#bfloat16-weights) has the details, and [the
# results](../docs/results.md#bfloat16-weights-without-masters) have real networks.
#
# ## Whose Tensor Core? The sums differ, and our network does not care
#
# A Tensor Core adds a few products and the sum so far at a time. It shifts them to the largest
# exponent among them, cuts off what does not fit, and adds the rest. How many products it adds at a
# time, and how many bits it keeps, depends on the generation of the GPU.
#
# In a [figure to play with](../docs/play.md#a-sum) you can change the terms of such a sum, and
# their order.

# %%
print("generation: (products at a time, fraction bits):", ACCUMULATIONS)


def tensor_core_sum(a, b, terms, fraction_bits):
    exponent_of = lambda x: np.frexp(x)[1] - 1  # noqa: E731
    total = 0.0
    for start in range(0, len(a), terms):
        part = slice(start, start + terms)
        values = np.append(a[part] * b[part], total)
        top = np.append(exponent_of(a[part]) + exponent_of(b[part]), exponent_of(total)).max()
        unit = 2.0 ** (top - fraction_bits)
        total = float(round_to(np.trunc(values / unit).sum() * unit, FLOAT32, "toward_zero"))
    return total


a, b = (round_to(rng.random(4096), FLOAT16) for _ in range(2))
exact = float(a @ b)
layer = nn.Dense(1, in_units=4096, use_bias=False)
layer.initialize()
layer.weight.set_data(mx.nd.array(b[None]))
rows, by_hand, by_layer = [], {}, {}
for name, numbers_of in ACCUMULATIONS.items():
    by_hand[name] = tensor_core_sum(a, b, *numbers_of)
    amp.autocast(layer, Policy.parse(f"compute=float16,accumulation={name}"))
    by_layer[name] = layer(mx.nd.array(a[None])).asnumpy().item()
    amp.restore(layer)
    error = by_hand[name] / exact - 1
    rows.append((name, f"{by_hand[name]:.4f}", f"{error:+.1e}", f"{by_layer[name]}"))
print(Table(("sum as on", "by hand", "relative error", "by a layer, rounded to FP16"), rows))

# %% tags=["claim"]
for name, total in by_hand.items():
    assert total < exact
    assert by_layer[name] == round_to(total, FLOAT16)

# %% [markdown]
# All sums are too small, since cutting off can only make them smaller. The more bits a generation
# keeps, the closer it comes. `accumulation=` in a policy makes a layer on a CPU add in this way;
# with `hopper` the result has the bits that an H100 computed ([compared with an
# H100](../docs/gpu.md#compared-with-an-h100)). In sums of FP8 products an H100 keeps only 13
# fraction bits. A ResNet-20 on CIFAR-10 lost no accuracy by this when it was [trained so on an
# H200](../docs/gpu.md#sums-of-fp8-on-an-h100). A sum that no GPU computes is refused. We try one
# **on purpose**.

# %%
message = ""
try:
    Policy.parse("compute=bfloat16,accumulation=volta")
except ValueError as error:
    message = str(error)
print(f"ValueError: {message}")

# %% tags=["claim"]
assert "sums products of float16 numbers" in message

# %% [markdown]
# Do these differences matter to our network? `compare_with_fp32` runs one batch with each kind of
# sum. It compares the differences with the error that FP16 (`float16`) makes in any case. (FP16
# needs the loss scale.)

# %%
comparison = diagnostics.compare_with_fp32(
    nets["FP32"], batch, loss_scale=2.0**12, accumulation=tuple(ACCUMULATIONS)
)
print(comparison.sums.table(worst=3))
for name in ACCUMULATIONS:
    ratio, layer, array = comparison.sums.largest(name)
    print(f"{name}: at most {ratio:.2f} times FP16's own error, the {array} of {layer.name}")

# %% tags=["claim"]
assert all(comparison.sums.largest(name)[0] < 1.5 for name in ACCUMULATIONS)

# %% [markdown]
# If two runs in FP16 round independently, they differ by 1.4 times the error of each. These sums
# change far less, so they do not matter to this network. With larger images and batches sums are
# longer, so measure again for your network ([whose Tensor
# Core?](../docs/diagnostics.md#whose-tensor-core)).
#
# ## Summary
#
# - A few numbers describe a format. E4M3 has more digits, E5M2 more range, and both need scales.
# - A scale per tensor is a power of two that follows from the largest value. A scale per block of
#   32 keeps outliers apart; formats of four and six bits need it.
# - `mixed_float8` trains like FP32 here. Without scales the same formats lose nearly all gradients.
# - With a scale that fits, E4M3 is finer; E5M2 also works with many that do not.
# - BF16 weights need no FP32 copy if updates are rounded stochastically or with Kahan's
#   compensation.
# - Tensor Cores of different generations add differently; the differences are smaller than FP16's
#   rounding.
#
# ## Exercises

# %% [markdown]
# **11.1** (level 1) The largest absolute value of a gradient is 0.003. By which scale does
# `mixed_float8` multiply it, before it rounds to E5M2? Hand in a number.

# %%
answer = ...
check("11.1", answer)

# %% tags=["solution"]
# The largest power of two with which the largest value stays within the format.
scale = 2.0 ** np.floor(np.log2(FLOAT8_E5M2.max / 0.003))
assert check("11.1", scale)

# %% [markdown]
# **11.2** (level 3) A tensor's values spread evenly over 12 powers of two, and share one scale.
# Which format of six bits makes the largest relative error smallest? Hand in a `FloatFormat`. (The
# sign takes one bit; significant bits include one that is not stored.)

# %%
answer = ...  # such as FloatFormat("mine", significand_bits=3, exponent_bits=3)
check("11.2", answer)

# %% tags=["solution"]
# All ways to spend six bits; a format needs at least two bits of each kind.
values = 2.0 ** np.linspace(-12, 0, 1201)
candidates = [FloatFormat(f"e{e}m{5 - e}", 6 - e, e) for e in (2, 3, 4)]
largest_errors = [np.abs(round_scaled(values, f) / values - 1).max() for f in candidates]
assert check("11.2", candidates[np.argmin(largest_errors)])

# %% [markdown]
# **11.3** (level 2) A BF16 weight stands at 1, and each step adds $2^{-12}$, rounded
# stochastically. After how many steps does it move for the first time, on average? Hand in a number
# of steps.

# %%
answer = ...
check("11.3", answer)

# %% tags=["solution"]
# It moves by one spacing, with the probability that makes the mean right: update / spacing. So it
# waits for the inverse of that, on average.
assert check("11.3", BFLOAT16.epsilon / 2.0**-12)

# %% [markdown]
# ## References
#
# - Open Compute Project, "OCP 8-bit Floating Point Specification (OFP8)", 1.0, 2023, and "OCP
#   Microscaling Formats (MX) Specification", 1.0, 2023.
# - Micikevicius et al., "FP8 Formats for Deep Learning", 2022, on E4M3, E5M2 and scales.
# - Mishra et al., "Recipes for Pre-training LLMs with MXFP8", 2025, on scales of blocks.
# - Croci et al., "Stochastic rounding: implementation, error analysis and applications", 2022.
# - Zamirai et al., "Revisiting BFloat16 Training", 2020, on stochastic rounding and Kahan's
#   compensation of weights.
# - Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores", 2025.

# %% [markdown]
# [← 10 What happens after training?](10_after_training.ipynb) · [All lessons](README.md)
