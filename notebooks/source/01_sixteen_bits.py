# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Which numbers do sixteen bits hold?
#
# Networks are usually trained with numbers of 32 bits. Numbers of 16 bits take half the memory, and
# many processors compute faster with them. But there are only 65,536 different ones. This lesson
# shows three accidents that happen in such a small set of numbers. Then it looks at the numbers
# themselves, which explain all three accidents. No network is trained yet.
#
# Three formats appear in all lessons. FP32 (`float32`) is the default format. FP16 (`float16`) and
# BF16 (`bfloat16`) are two formats of 16 bits. The drawing shows how they divide their bits into a
# sign, an exponent and a fraction.
#
# ![The bits of FP16, BF16, FP32 and the two FP8 formats, E4M3 and E5M2: one bit for the sign, then
# the bits of the exponent, then those of the fraction](figures/01_bits.svg)
#
# On the right are the largest number of each format and the number after 1. The two formats of 8
# bits, FP8 (E5M2 and E4M3), are used in [lesson 11](11_after_sixteen_bits.ipynb).
#
# ## What you will be able to do
#
# - Recognise the three accidents of 16-bit training: lost updates, lost gradients, overflow.
# - Say which numbers FP16, BF16 and FP32 can hold, and round to them by hand.
# - Predict where a sum in FP16 stops growing.
# - Explain why FP32 is wide enough to compute FP16 results without an error of its own.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %% tags=["setup"]
from fractions import Fraction

import mpgluon
from mpgluon import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    TFLOAT32,
    FloatFormat,
    round_to,
)
from mpgluon.tools.plots import FORMAT_LOOKS
from mpgluon_tools.tables import Table

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from teaching import check, widget

formats = {"FP16": FLOAT16, "BF16": BFLOAT16, "FP32": FLOAT32}
_ = np.seterr(over="ignore", invalid="ignore")  # this lesson is about overflow and NaN

# %% [markdown]
# ## First accident: a small update of a weight is lost
#
# Training adds small numbers to weights. Here a weight of 1 receives the update 0.0004, a thousand
# times. The result should be 1.4.

# %%
weight = np.float16(1)
for _ in range(1000):
    weight += np.float16(0.0004)
print(f"the weight after 1000 updates: {weight}")

# %% [markdown]
# The weight never changes. The next FP16 number after 1 is $1 + 2^{-10}$, about 1.001. The sum
# 1.0004 is nearer to 1 than to 1.001, so it is rounded to 1. The second update starts from 1 again,
# and is lost in the same way.
#
# The remedy is a copy of each weight in FP32, which receives the updates. [Lesson
# 02](02_lost_updates.ipynb) trains a network with and without it.

# %% tags=["claim"]
assert weight == 1
assert round_to(1.0004, FLOAT16) == 1 < round_to(1.0004, FLOAT32)
assert np.nextafter(np.float16(1), np.float16(2)) == 1 + 2**-10

# %% [markdown]
# ## Second accident: a small gradient becomes zero
#
# Gradients can be tiny. The smallest positive FP16 number is $2^{-24}$, about 0.00000006. Half of
# it, and any smaller number, becomes zero. A gradient of zero changes no weight.

# %%
gradient = 1e-8
print("the gradient in FP16:", np.float16(gradient))
scaled = np.float16(gradient * 4096)
print(f"scaled, stored in FP16, and divided in FP32: {np.float32(scaled) / 4096:.3g}")

# %% [markdown]
# The second line shows the remedy, a *loss scale*: multiply the loss by a power of two. This
# multiplies every gradient by the same number. Divide the gradients by it later, in FP32.
# [Lesson 03](03_lost_gradients.ipynb) shows how to choose the scale.

# %% tags=["claim"]
assert np.float16(gradient) == 0
assert abs(float(scaled) / 4096 / gradient - 1) < 1e-3
assert FLOAT16.smallest_subnormal == 2**-24
assert round_to(2**-25, FLOAT16) == 0 < round_to(1.001 * 2**-25, FLOAT16)

# %% [markdown]
# ## Third accident: a large number becomes infinite
#
# The largest FP16 number is 65504. The square of 256 is 65536, which is too large.

# %%
square = np.float16(256) * np.float16(256)
print(f"256 * 256 = {square}, and its difference from itself: {square - square}")

# %% [markdown]
# The result is infinite. Infinity minus infinity is NaN, "not a number", and NaN spreads to the
# results that are computed from it. The remedy is to do some computations in FP32: sums, for
# example. [Lesson 04](04_casting_a_network.ipynb) shows which.

# %% tags=["claim"]
assert np.isinf(square)
assert np.isnan(square - square)
assert FLOAT16.max == 65504

# %% [markdown]
# ## FP16 has all three accidents, BF16 has only the first
#
# `mpgluon.round_to` rounds to any format. We round the results of the three examples to each of the
# three formats. The exact results are 1.0004, 0.00000001 and 65536.

# %%
results = [1.0004, 1e-8, 256.0**2]
rounded = {name: round_to(results, f) for name, f in formats.items()}
headings = ("format", "weight + update", "gradient", "square")
print(Table(headings, [(name, *map("{:.6g}".format, row)) for name, row in rounded.items()]))

# %% [markdown]
# BF16 loses the update, but the gradient and the square are safe. The rest of this lesson explains
# why.

# %% tags=["claim"]
assert rounded["FP16"].tolist() == [1, 0, np.inf]
assert rounded["BF16"][0] == 1
assert all(np.allclose(rounded[name][1:], results[1:], rtol=2**-8) for name in ("BF16", "FP32"))
assert rounded["FP32"][0] > 1

# %% [markdown]
# ## A floating-point number is a sign, a power of two and a fraction
#
# An FP16 number has 1 bit for the sign, 5 for the exponent and 10 for the fraction, as the drawing
# at the top shows. Usually its value is
#
# $$\pm\,(1 + \text{fraction}) \cdot 2^{\text{exponent}}.$$
#
# The leading 1 is not stored. So an FP16 number has 11 *significant bits*, although only 10 of them
# are stored. The exponent field holds the exponent plus 15, so that it is never negative. (In
# general the field holds the exponent plus the largest exponent of the format.) Two values of the
# field are special:
#
# - All zeros: there is no leading 1. The number is *subnormal*, or zero.
# - All ones: the value is infinity, or NaN.
#
# All other numbers are *normal*. This function reads a pattern of bits by these rules, for any
# widths of the two fields:


# %%
def decode(pattern, exponent_bits, fraction_bits):
    sign = -1.0 if pattern >> (exponent_bits + fraction_bits) else 1.0
    field = (pattern >> fraction_bits) % 2**exponent_bits
    fraction = (pattern % 2**fraction_bits) / 2**fraction_bits
    largest = 2 ** (exponent_bits - 1) - 1
    if field == 2**exponent_bits - 1:
        return sign * np.inf if fraction == 0 else np.nan
    leading, exponent = (0, 1 - largest) if field == 0 else (1, field - largest)
    return sign * (leading + fraction) * 2.0**exponent


by_hand = np.array([decode(pattern, 5, 10) for pattern in range(2**16)])
by_numpy = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
print("equal to NumPy's:", np.array_equal(by_hand, by_numpy, equal_nan=True))
finite = by_numpy[np.isfinite(by_numpy)]
subnormal = (np.abs(finite) < FLOAT16.smallest_normal) & (finite != 0)
print(f"{len(finite):,} of 65,536 patterns are finite numbers, {subnormal.sum():,} are subnormal")

# %% [markdown]
# All patterns agree with NumPy's `float16`.
#
# Now change a number and its format yourself. **Try this:** the drawing below begins with 0.1 in
# FP16. Make it BF16 (8 exponent bits, 8 significant bits, which the slider calls "significand
# bits"), and watch the rounding error. Then type 70000 and go back to 5 exponent bits.

# %% tags=["plot"]
widget("rounding")

# %% tags=["claim"]
assert np.array_equal(by_hand, by_numpy, equal_nan=True)
assert subnormal.sum() == 2 * (2**10 - 1)  # two signs; ten bits that are not all zero
tenth = {name: abs(float(round_to(0.1, f)) - 0.1) for name, f in formats.items()}
assert tenth["BF16"] > tenth["FP16"] > tenth["FP32"] > 0
assert np.isinf(round_to(70000, FLOAT16))
assert np.isfinite(round_to(70000, BFLOAT16))

# %% [markdown]
# ## Between two powers of two the numbers are evenly spaced
#
# A format with six bits (1 for the sign, 3 for the exponent, 2 for the fraction) has so few
# numbers that all of them can be drawn. `mpgluon.FloatFormat` describes such a format. It counts
# significant bits, which are 3 here with the leading 1.

# %%
six_bits = FloatFormat("six bits", significand_bits=3, exponent_bits=3)
numbers = np.array([decode(pattern, 3, 2) for pattern in range(2**5)])
numbers = numbers[np.isfinite(numbers)]
print(numbers)

# %% tags=["plot"] alt="All numbers of a six-bit format on a line: steps double at powers of two."
figure, panels = plt.subplots(2, 1, figsize=(6.2, 3.2), layout="constrained")
heights = np.where(numbers < six_bits.smallest_normal, 0.5, 1.0)
for axes, end in zip(panels, (14, 1)):
    shown = numbers <= end
    axes.vlines(numbers[shown], 0, heights[shown], color="black", linewidth=1.5)
    axes.set(yticks=[], ylim=(0, 1.1))
    axes.spines[["left", "right", "top"]].set_visible(False)
panels[0].set(title="All numbers of a six-bit format: the steps double")
panels[0].set_xticks(range(0, 15, 2))
panels[1].set(title="Those from 0 to 1 (short: zero and subnormal numbers)")
panels[1].set(xlabel="value (no unit)", xticks=[0, 0.25, 0.5, 0.75, 1])
plt.show()

# %% [markdown]
# What to notice: between a power of two and the next one there are always four steps of equal
# length. This length, the distance between neighbouring numbers, is called the *spacing*. It
# doubles at each power of two. The spacing relative to the number stays about the same.
#
# Near zero this rule alone would leave a gap. The subnormal numbers fill the gap evenly, with the
# spacing of the numbers just above them.

# %% tags=["claim"]
spacing = np.diff(numbers)
for exponent in range(six_bits.min_exponent, six_bits.max_exponent):
    in_stretch = (numbers[:-1] >= 2.0**exponent) & (numbers[:-1] < 2.0 ** (exponent + 1))
    assert in_stretch.sum() == 4
    assert set(spacing[in_stretch]) == {2.0**exponent * six_bits.epsilon}
assert set(spacing[numbers[:-1] < six_bits.smallest_normal]) == {six_bits.smallest_subnormal}
assert numbers[-1] == six_bits.max == 14

# %% [markdown]
# ## FP16 has fine steps and a short range; BF16 has a long range and coarse steps
#
# There are two common ways to divide 16 bits, FP16 and BF16. BF16 has 8 exponent bits, as many as
# FP32, so 8 significant bits remain. In fact a BF16 number is the first half of the bits of an FP32
# number.

# %%
headings = ["format", "significant bits", "exponent bits", "spacing above 1"]
headings += ["largest", "smallest normal", "smallest subnormal"]
eight_bits = {"FP8 E4M3": FLOAT8_E4M3, "FP8 E5M2": FLOAT8_E5M2}
rows = [
    [name, *map(str, (f.significand_bits, f.exponent_bits)), *map("{:.6g}".format, numbers)]
    for name, f in {**formats, **eight_bits}.items()
    for numbers in [(f.epsilon, f.max, f.smallest_normal, f.smallest_subnormal)]
]
print(Table(headings, rows))

# %% [markdown]
# The table explains the three accidents. Above 1 the spacing of FP16 is about 0.001, and an update
# of less than half of that is lost. The last column shows where small gradients end, and the column
# "largest" where overflow begins. The steps of BF16 are eight times as coarse as those of FP16, so
# it loses more updates. Its range is almost as long as FP32's.
#
# In this [figure to play with](../docs/play.md#a-number-in-nine-formats) you can switch the bits of
# a number in nine formats.
#
# (E4M3 breaks one of the rules above: it has no infinity, and uses those patterns for larger
# numbers. This is why its largest number is 448.)
#
# The next drawing shows range and spacing together. **Try this:** move the sliders to FP16 (5
# exponent bits, 11 significant bits), until the black line covers the blue one. Then take one
# exponent bit more and one significant bit less. How much longer does the black line become, and
# how much does it rise?

# %% tags=["plot"]
widget("spacing")

# %% [markdown]
# The next picture has range and spacing of the three formats, on an axis that is long enough for
# all of them. The lower a line in the lower panel, the finer the steps.

# %% tags=["plot"] alt="Ranges of three formats as bars; below, their relative spacing as lines."
figure, (ranges, steps) = plt.subplots(2, 1, figsize=(6.2, 6), sharex=True, layout="constrained")
for row, (name, f) in enumerate(formats.items()):
    look = FORMAT_LOOKS[f.name]  # the colour, mark and line of a format in all lessons
    low, normal, high = np.log2([f.smallest_subnormal, f.smallest_normal, f.max])
    ranges.barh(row, high - normal, left=normal, color=look["color"])
    ranges.barh(row, normal - low, left=low, color="white", edgecolor=look["color"], hatch="////")
    exponents = np.arange(low, high)
    relative = f.epsilon * 2 ** np.maximum(normal - exponents, 0)
    steps.step(exponents, relative, where="post", markevery=(8, 16), **look)
    steps.text(50 if name != "FP16" else 17, f.epsilon * 1.7, name, color=look["color"])
ranges.set(title="Range: BF16 reaches as far as FP32, FP16 does not\n(hatched: subnormal numbers)")
ranges.set(yticks=range(3), yticklabels=formats)
ranges.invert_yaxis()
steps.set(title="Spacing: FP16 has finer steps than BF16,\nwhere it has numbers at all")
steps.set_yscale("log", base=2)
steps.set(ylabel="spacing / value", xlim=(-155, 135))
steps.set(xlabel="exponent e of a value of magnitude $2^e$")
plt.show()

# %% [markdown]
# What to notice: each line is flat over the normal numbers, and rises at its left end, in the
# subnormal numbers. There the spacing no longer shrinks with the value. So the relative spacing
# grows, until at the smallest number the spacing is as large as the number.

# %% tags=["claim"]
upper_half = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
bfloat16 = [decode(pattern, 8, 7) for pattern in range(2**16)]
assert np.array_equal(bfloat16, upper_half, equal_nan=True)
assert FLOAT16.max == np.finfo(np.float16).max
assert BFLOAT16.epsilon == 8 * FLOAT16.epsilon
assert BFLOAT16.smallest_normal == FLOAT32.smallest_normal
assert 0.99 < BFLOAT16.max / FLOAT32.max < 1
assert FLOAT8_E4M3.max == 448
assert np.isnan(round_to(1e6, FLOAT8_E4M3))

# %% [markdown]
# ## TF32 has the steps of FP16 and the range of FP32
#
# On NVIDIA GPUs since Ampere, FP32 products may be computed in TF32: 8 exponent bits as in FP32,
# and 11 significant bits as in FP16 (10 of them stored), 19 bits with the sign. Only the operands
# of products are rounded to TF32. They are stored in 32 bits, so TF32 saves no memory. It has
# FP32's exponents, so it needs no loss scale. We round a thousand random numbers of each magnitude
# to the three formats, and draw the largest relative error.

# %% tags=["plot"] alt="Largest error by magnitude: FP16 equals TF32 from 2^-14 to 2^15"
exponents = np.arange(-32, 24)
significands = np.random.default_rng(0).uniform(1, 2, 1000)
largest_error = {}
figure, axes = plt.subplots(figsize=(6.2, 4), layout="constrained")
for name, f in {"TF32": TFLOAT32, "FP16": FLOAT16, "BF16": BFLOAT16}.items():
    values = significands * 2.0 ** exponents[:, None]
    errors = np.abs(round_to(values, f) / values - 1)
    largest_error[name] = errors.max(axis=1)
    look = FORMAT_LOOKS.get(f.name, {"color": "#CC79A7", "marker": "v", "linestyle": "-"})
    width = 5 if name == "TF32" else 1.5  # the wide line below shows where FP16 covers it
    axes.plot(exponents, np.minimum(largest_error[name], 1), markevery=6, linewidth=width, **look)
    place = {"TF32": (19.5, 2.0**-12), "FP16": (17, 0.35), "BF16": (19.5, 2.0**-7.5)}[name]
    axes.text(*place, name, color=look["color"], weight="bold")
axes.set_yscale("log", base=2)
axes.set(xlabel="exponent e of a value of magnitude $2^e$", ylabel="largest relative error")
axes.set(title="Where FP16 has normal numbers, TF32 rounds as FP16 does", ylim=(2.0**-14, 2))
plt.show()

# %% [markdown]
# What to notice: from $2^{-14}$ to $2^{15}$ the lines of FP16 and TF32 coincide. To the left FP16
# loses bits and then everything. To the right its numbers become infinite, which is an error of 1
# here. TF32 keeps its small error everywhere. So does BF16, with an error that is eight times as
# large.

# %% tags=["claim"]
normal = (exponents >= -14) & (exponents <= 14)
assert np.array_equal(largest_error["TF32"][normal], largest_error["FP16"][normal])
assert largest_error["TF32"].max() <= 2.0**-11 < largest_error["BF16"].max() <= 2.0**-8
assert largest_error["FP16"][exponents < -25].min() == 1

# %% [markdown]
# ## Rounding takes the nearest number, and of two equally near ones the even one
#
# A result that FP16 cannot hold is replaced by the nearest FP16 number. A result halfway between
# two numbers is rounded to the number whose last bit is 0, which is called *even*. If it was always
# rounded up, sums would drift upwards.
#
# Here is this rounding from scratch, with exact fractions: find the spacing at the value, divide
# the value by it, round to an integer (Python's `round` also rounds halves to even), and multiply
# by the spacing again.


# %%
def nearest(value, f=FLOAT16):
    """Round a Fraction that is not too large for the format; exact at every step."""
    exponent = f.min_exponent
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    spacing = Fraction(2) ** (exponent - f.significand_bits + 1)
    return round(value / spacing) * spacing


for value in (2048, 2049, 2050, 2051, 2052):
    print(value, "->", nearest(Fraction(value)))

# %% [markdown]
# Above 2048 the spacing is 2, so 2049 and 2051 both lie halfway between two numbers. One is rounded
# down and one up.
#
# `mpgluon.round_to` does the same to whole arrays. We compare it with our function, with NumPy and
# with MXNet: on all positive FP16 numbers, on all points halfway between two neighbours, and just
# before and after those points.

# %%
positive = np.unique(finite[finite >= 0])
halfway = (positive[:-1] + positive[1:]) / 2
beside = np.concatenate([np.nextafter(halfway, 0), np.nextafter(halfway, np.inf)])
values = np.concatenate([positive, halfway, beside])
rounded = round_to(values, FLOAT16)
print(f"{len(values):,} values; equal to NumPy's:", np.array_equal(rounded, np.float16(values)))

in_fp32 = np.concatenate([positive, halfway]).astype(np.float32)
by_mxnet = mx.nd.array(in_fp32).astype("float16").asnumpy()
print("equal to MXNet's:", np.array_equal(by_mxnet, round_to(in_fp32, FLOAT16)))

# %% [markdown]
# Overflow follows the same rule. With one exponent more, the number after 65504 would be 65536.
# Halfway between them lies 65520. From 65520 on a result is rounded up, to infinity.
# 65520. From there on a result is rounded up, to infinity.

# %%
edge = np.array([65504, 65519.99, 65520, 65536])
print(*(f"{value:.2f} -> {result:.0f};" for value, result in zip(edge, edge.astype(np.float16))))

# %% tags=["claim"]
assert [nearest(Fraction(value)) for value in (2049, 2051)] == [2048, 2052]
assert np.array_equal(rounded, values.astype(np.float16))
for value, result in list(zip(values, rounded))[:: 100 if FAST else 5]:
    assert nearest(Fraction(value)) == result
assert np.array_equal(by_mxnet, round_to(in_fp32, FLOAT16))
assert edge.astype(np.float16).astype(float).tolist() == [65504, 65504, np.inf, np.inf]
assert np.array_equal(round_to(edge, FLOAT16), edge.astype(np.float16))

# %% [markdown]
# NumPy can mislead you here: it prints only as many digits of an FP16 number as are needed to
# distinguish it from its neighbours. Convert the number to `float` to see its value.

# %%
print("printed as", np.float16(65504), "but is", float(np.float16(65504)))

# %% tags=["claim"]
assert str(np.float16(65504)) == "65500.0"

# %% [markdown]
# ## A sum of ones stops at 2048
#
# Count in FP16: add 1, again and again. From 2048 on the spacing is 2. So 2048 + 1 lies halfway and
# is rounded back to 2048, which is even. In BF16 the sum already stops at 256.


# %%
def running_sum(f, count):
    total, totals = 0.0, []
    for _ in range(count):
        total = float(round_to(total + 1.0, f))
        totals.append(total)
    return np.array(totals)


sums = {name: running_sum(f, 3000) for name, f in formats.items()}
print({name: totals[-1] for name, totals in sums.items()})

# %% tags=["plot"] alt="Running sums of ones: FP32 reaches 3000, FP16 stays at 2048, BF16 at 256."
figure, axes = plt.subplots(figsize=(6.2, 3.6), layout="constrained")
for first, (name, totals) in zip((0, 100, 200), sums.items()):  # marks that do not coincide
    look = {**FORMAT_LOOKS[formats[name].name], "markevery": (first, 300)}
    axes.plot(np.arange(1, 3001), totals, **look)
    axes.text(3040, totals[-1], f"{name}: {totals[-1]:.0f}", va="center", color=look["color"])
axes.set(title="3000 ones, added one by one: two sums stop", xlim=(0, 3000))
axes.set(xlabel="number of ones added", ylabel="sum (no unit)")
axes.spines[["right", "top"]].set_visible(False)
axes.text(1050, 850, "The lines coincide until a sum stops.")
plt.show()

# %% [markdown]
# FP32 stops too, at $2^{24}$. In general a sum stops when one term is at most half the spacing at
# the sum.

# %% tags=["claim"]
assert [totals[-1] for totals in sums.values()] == [2048, 256, 3000]
assert np.cumsum(np.ones(3000, dtype=np.float16))[-1] == 2048  # NumPy's
assert np.float32(2**24) + np.float32(1) == 2**24
assert np.float32(2**24 - 1) + np.float32(1) == 2**24

# %% [markdown]
# ## A sum in FP32, rounded once, is right where a sum in FP16 is half as large
#
# Dense layers and convolutions compute dot products: multiply numbers in pairs, and add the
# products. Take 4,094 pairs of 4 and 4. Each product is 16, and the result should be 65504, the
# largest FP16 number.
#
# In FP16 the sum stops at 32768, for the same reason as the sum of ones at 2048. The other way is
# to sum in FP32, and to round only the result to FP16. That gives the right answer. With one pair
# more the result is 65520, which overflows.

# %%
in_fp16 = np.float16(0)
for _ in range(4094):
    in_fp16 += np.float16(4) * np.float16(4)
print("4094 pairs, summed in FP16:", float(in_fp16))
for pairs in (4094, 4095):
    in_fp32 = np.sum(np.full(pairs, 16, dtype=np.float32))
    print(f"{pairs} pairs, summed in FP32 and rounded:", float(np.float16(in_fp32)))

# %% [markdown]
# A *Tensor Core*, the part of an NVIDIA GPU made for dot products, works in the second way: it
# multiplies FP16 numbers exactly and sums in FP32. `mpgluon.cast_block` makes a Gluon layer compute
# with FP16 numbers, and on a CPU such a layer also works in this way. (A Tensor Core adds several
# products at a time, and cuts off digits where a CPU rounds. So some last bits differ.)

# %%
for pairs in (4094, 4095):
    layer = nn.Dense(1, in_units=pairs, use_bias=False)
    layer.initialize(mx.init.Constant(4))
    mpgluon.cast_block(layer)
    print(f"{pairs} pairs, by a layer:", float(layer(mx.nd.full((1, pairs), 4)).asscalar()))

# %% tags=["claim"]
assert in_fp16 == 32768 == 2048 * 16
for pairs, expected in ((4094, 65504), (4095, np.inf)):
    assert np.float16(np.sum(np.full(pairs, 16, dtype=np.float32))) == expected
    layer = nn.Dense(1, in_units=pairs, use_bias=False)
    layer.initialize(mx.init.Constant(4))
    mpgluon.cast_block(layer)
    assert layer(mx.nd.full((1, pairs), 4)).asscalar() == expected

# %% [markdown]
# ## MXNet on a CPU refuses
#
# Without `mpgluon`, MXNet's own `net.cast("float16")` makes a layer that a CPU cannot run. We let
# it fail once, to see the message. MXNet computes in the background, so the error appears only when
# the result is read.

# %%
layer = nn.Dense(1, in_units=8, use_bias=False)
layer.initialize(mx.init.One())
layer.cast("float16")
try:
    layer(mx.nd.ones((1, 8), dtype="float16")).asnumpy()
except mx.MXNetError as error:
    message = str(error).splitlines()[-1]
    print(message)

# %% tags=["claim"]
assert "float16 fully connected layer" in message

# %% [markdown]
# ## FP32 is enough to compute FP16 without an error of its own
#
# So `mpgluon` converts FP16 numbers to FP32, computes there, and rounds the result back. This
# rounds twice: first to FP32, then to FP16. In general, rounding twice can give a wrong result. For
# FP16 and FP32 it never does. A product of two numbers with 11 significant bits has at most 22
# bits, which FP32 with its 24 holds exactly. For sums, quotients and square roots a theorem says
# that $2 \cdot 11 + 2 = 24$ bits are enough. FP32 has exactly that many.
#
# We test this on random pairs of FP16 numbers, some of them subnormal, against exact fractions.

# %%
drawn = np.random.default_rng(0)
pairs = drawn.choice(finite[finite != 0], (500 if FAST else 5000, 2)).astype(np.float32)
operations = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}
right = {}
for symbol, operation in operations.items():
    results = round_to(operation(pairs[:, 0], pairs[:, 1]), FLOAT16)
    tested = np.isfinite(results)
    exact = [operation(Fraction(a), Fraction(b)) for a, b in pairs[tested].tolist()]
    right[symbol] = [nearest(value) == result for value, result in zip(exact, results[tested])]
    print(f"{symbol}: {sum(right[symbol])} of {tested.sum()} are the exact result, rounded once")

# %% [markdown]
# The appendix below shows what goes wrong with fewer bits than 24.

# %% tags=["claim"]
assert all(all(answers) for answers in right.values())
assert all(len(answers) > 0.5 * len(pairs) for answers in right.values())
products = pairs[:, 0] * pairs[:, 1]
assert np.array_equal(products, pairs[:, 0].astype(np.float64) * pairs[:, 1])  # exact in FP32

# %% [markdown]
# ## A layer differs from the exact result only by its additions in FP32
#
# The products in a dot product are exact. Each of the $n$ additions in FP32 rounds its result, by
# at most $2^{-24}$ of that result. So all additions together change the result by at most about
# $n \cdot 2^{-24}$ times the sum of the terms' magnitudes, whatever their order. Then the result is
# rounded to FP16, which changes it by at most half a spacing.

# %%
inputs, weights = drawn.standard_normal((2, 64)).astype(np.float16)
layer = nn.Dense(1, in_units=64, use_bias=False)
layer.initialize()
layer.weight.set_data(mx.nd.array(weights[None].astype(np.float32)))
mpgluon.cast_block(layer)
by_layer = float(layer(mx.nd.array(inputs[None], dtype="float16")).asscalar())
terms = inputs.astype(np.float64) * weights.astype(np.float64)
exact = float(sum(Fraction(term) for term in terms))
additions = 64 * 2.0**-24 * np.abs(terms).sum()
half_spacing = abs(float(np.spacing(np.float16(by_layer)))) / 2
print(f"layer {by_layer}, exact {exact:.9f}, error {abs(by_layer - exact):.1e}")
print(f"bounds: half a spacing of FP16 {half_spacing:.1e}, the additions {additions:.1e}")

# %% [markdown]
# What to notice: the bound of the additions is small compared with half a spacing, the bound of the
# one rounding to FP16. Every FP16 result needs that rounding in any case.

# %% tags=["claim"]
assert abs(by_layer - exact) <= half_spacing + additions
assert additions < half_spacing / 4

# %% [markdown]
# ## Summary
#
# - In 16 bits small updates are lost, small gradients become zero, and large numbers become
#   infinite. The remedies are FP32 copies of the weights, a loss scale, and sums in FP32.
# - A floating-point format is a number of significant bits and a number of exponent bits. FP16 has
#   11 and 5, BF16 has 8 and 8, FP32 has 24 and 8.
# - FP16 ends at 65504 above and at $2^{-24}$ below. BF16 has the range of FP32, and its steps are
#   eight times as coarse as those of FP16.
# - A sum stops when its terms are no more than half the spacing at the sum.
# - FP32 has just enough bits: an FP16 operation computed in FP32 and rounded to FP16 is the exact
#   result, rounded once.
#
# ## Appendix: with one bit less than FP32 has, rounding twice goes wrong
#
# This section is for the curious. No later lesson needs it.
#
# When is rounding twice wrong? If the first rounding ends exactly halfway between two FP16 numbers,
# the second rounding cannot know on which side the exact result was. It takes the even number,
# which may be the wrong one.
#
# Are 24 bits really needed to exclude this? We invent formats with fewer significant bits, round
# first to such a format and then to FP16, and count wrong results. A factor that is a power of two
# does not change the digits. So it is enough to take all numbers from 1 up to 2 (up to 4 for
# roots). For sums, one of the two numbers is also divided by each power of two. The exact results
# come from `float64`, whose 53 bits are more than twice those of FP32.


# %%
def wrong(results, bits):
    """Count the results that differ when a format with so many bits comes in between."""
    between = round_to(results, FloatFormat("between", significand_bits=bits, exponent_bits=8))
    return np.count_nonzero(round_to(between, FLOAT16) != round_to(results, FLOAT16))


digits = 1 + np.arange(1024) / 1024  # every FP16 number from 1 up to 2
a, b = digits[:, None], digits[None, :]
shifts = range(10, 13) if FAST else range(25)
table = []
for bits in (21, 22, 23, 24):
    wrong_sums = sum(wrong(a + sign * b / 2**k, bits) for k in shifts for sign in (1, -1))
    wrong_roots = wrong(np.sqrt(np.concatenate([digits, 2 * digits])), bits)
    table.append((bits, wrong(a * b, bits), wrong(a / b, bits), wrong_sums, wrong_roots))
headings = ("bits", "wrong products", "wrong quotients", "wrong sums", "wrong roots")
print(Table(headings, [[str(cell) for cell in row] for row in table]))

# %% [markdown]
# Products and quotients need $2 \cdot 11$ bits, sums one more, and square roots one more again.
# With 23 bits one root is wrong. With the 24 bits of FP32 none is.
#
# The table covers only the roots of numbers from 1 up to 4. We can test the roots of all FP16
# numbers without trusting `float64`: the exact root must lie between the two points halfway to the
# neighbours of the result. So its square, which is the argument, must lie between the squares of
# these two points. These squares are exact in `float64`.

# %%
arguments = positive[1:]
roots = round_to(np.sqrt(arguments.astype(np.float32)), FLOAT16)
place = np.searchsorted(positive, roots)
below = (positive[place - 1] + positive[place]) / 2
above = (positive[place] + positive[place + 1]) / 2
correct = (below**2 < arguments) & (arguments < above**2)
print(f"{correct.sum():,} of {len(arguments):,} square roots are right")

# %% tags=["claim"]
needed = [21 + sum(count > 0 for count in column) for column in list(zip(*table))[1:]]
assert needed == [2 * 11, 2 * 11, 2 * 11 + 1, 2 * 11 + 2]
assert table[-2][-1] == 1
assert correct.all()

# %% [markdown]
# ## Exercises
#
# Replace `...` by your answer and run the cell. It says whether the answer is right, and what a
# wrong answer would mean.

# %% [markdown]
# **01.1** (level 1) Start from 0 and add 0.001 again and again, in FP16. At which value does the
# sum stop? (The answer is a number without a unit.)

# %%
answer = ...
check("01.1", answer)

# %% tags=["solution"]
# A term must be more than half the spacing at the sum. The spacing doubles at each power of two, so
# the sum stops at a power of two: the first one where half the spacing is more than 0.001.
total, before = np.float16(0), None
while total != before:
    total, before = total + np.float16(0.001), total
half_below, half_above = np.spacing(np.float16([3.99, 4])).astype(float) / 2
print(f"half the spacing below {float(total)} is {half_below:.6f}, above it {half_above:.6f}")
assert check("01.1", float(total))

# %% [markdown]
# **01.2** (level 2) Design a format of 16 bits without the weaknesses of the other two: it holds
# 100,000 (which overflows in FP16), and an update of 0.002 changes a weight of 1 (in BF16 it does
# not). The answer is a `FloatFormat`. Its 16 bits are the sign, the exponent bits, and the
# significant bits without the leading 1. The drawing of the spacing above helps.

# %%
answer = ...  # FloatFormat("mine", significand_bits=11, exponent_bits=5) would be FP16
check("01.2", answer)

# %% tags=["solution"]
# One exponent bit more than FP16 is enough for 100,000. It costs one significant bit, so the
# spacing above 1 becomes 2**-9, and half of it is a little less than 0.001.
between_both = FloatFormat("1-6-9", significand_bits=10, exponent_bits=6)
print(f"largest {between_both.max:.4g}, 1 + 0.002 is {float(round_to(1.002, between_both))}")
assert check("01.2", between_both)

# %% [markdown]
# **01.3** (level 3) (From the appendix.) One FP16 number from 1 up to 4 has a wrong square root
# when the root is first rounded to 23 significant bits and then to FP16. Which number is it?

# %%
answer = ...
check("01.3", answer)

# %% tags=["solution"]
# Round each root to 23 significant bits and then to FP16, and compare with rounding once.
candidates = np.concatenate([digits, 2 * digits])  # all FP16 numbers from 1 up to 4
roots = np.sqrt(candidates)
with_23_bits = FloatFormat("23 bits", significand_bits=23, exponent_bits=8)
twice = round_to(round_to(roots, with_23_bits), FLOAT16)
(number,) = candidates[twice != round_to(roots, FLOAT16)]
print(f"{number} is the last FP16 number below 4")
assert check("01.3", float(number))

# %% [markdown]
# ## References
#
# - IEEE 754-2019, "IEEE Standard for Floating-Point Arithmetic", 3.3 (formats), 4.3.1 (rounding),
#   7.4 (overflow).
# - Open Compute Project, "8-bit Floating Point Specification", 1.0, 2023, for E4M3 and E5M2.
# - Figueroa, "When is double rounding innocuous?", 1995, for the rule of $2p + 2$ bits, where $p$
#   is 11 here.
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.
# - NVIDIA, "Training With Mixed Precision" user guide, on Tensor Cores and loss scaling.
#
# [← 00 Sixteen bits in ten minutes](00_sixteen_bits_in_ten_minutes.ipynb) ·
# [All lessons](README.md) · [02 Why does a network in 16 bits need a copy of its weights in 32?
# →](02_lost_updates.ipynb)
