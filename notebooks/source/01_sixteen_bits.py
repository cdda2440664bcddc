# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Which numbers do sixteen bits hold?
#
# Networks are usually trained with 32-bit numbers. Numbers of 16 bits take half the memory, and
# many processors have faster arithmetic for them. But there are only 65,536 of them. This notebook
# looks at them closely, before any network is trained.
#
# ## What you will be able to do
#
# - Say which numbers the formats float16, bfloat16 and float32 can hold, and round to them by
#   hand.
# - Recognise the three accidents of 16-bit training: lost updates, lost gradients, overflow.
# - Foresee where a sum in float16 stops growing.
# - Explain why float32 is wide enough to compute float16 results without any error of its own.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %%
from fractions import Fraction

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet.gluon import nn

import mpgluon
from mpgluon import BFLOAT16, FLOAT16, FLOAT32, FloatFormat, round_to
from mpgluon.plots import FORMAT_LOOKS
from mpgluon.tables import Table

# %% [markdown]
# ## A floating-point number is a sign, a power of two and a fraction
#
# A float16 is written in 16 bits: 1 for the sign, 5 for the exponent and 10 for the fraction.
# Usually its value is
#
# $$\pm\,(1 + \text{fraction}) \cdot 2^{\text{exponent}}.$$
#
# The leading 1 is not stored. So a float16 has 11 *significant bits*, although only 10 are
# written. The exponent field is never negative: it holds the exponent plus 15 (in general, plus
# the largest exponent). Two values of the field are set aside. All zeros: there is no leading 1,
# and the number is *subnormal* (or zero); the others are *normal*. All ones: infinity, or NaN,
# "not a number". The function below reads a pattern of bits this way, for any widths of the two
# fields.


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
print(f"{np.isfinite(by_hand).sum()} of {len(by_hand)} patterns are finite numbers")
assert np.array_equal(by_hand, by_numpy, equal_nan=True)

# %% [markdown]
# All 65,536 patterns agree with NumPy's float16.
#
# ## Between two powers of two the numbers are evenly spaced
#
# A format with six bits (1 for the sign, 3 for the exponent, 2 for the fraction) has so few
# numbers that all of them can be drawn. `mpgluon.FloatFormat` describes such a format. It counts
# significant bits, the hidden 1 included: 3 here.

# %%
six_bits = FloatFormat("six bits", significand_bits=3, exponent_bits=3)
numbers = np.array([decode(pattern, 3, 2) for pattern in range(2**5)])
numbers = numbers[np.isfinite(numbers)]

heights = np.where(numbers < six_bits.smallest_normal, 0.5, 1.0)
figure, panels = plt.subplots(2, 1, figsize=(10, 2.6), layout="constrained")
for axes, end in zip(panels, (14, 1)):
    shown = numbers <= end
    axes.vlines(numbers[shown], 0, heights[shown], color="black", linewidth=1)
    axes.set(yticks=[], ylim=(0, 1.1))
panels[0].set(title="All numbers from 0 to 14 of a format with six bits (short: zero, subnormals)")
panels[1].set(title="Those from 0 to 1", xlabel="value (no unit)")
plt.show()

# %% [markdown]
# Each power of two begins a stretch of four numbers, and each stretch is twice as long as the one
# before. So the *spacing*, the distance to the next number, doubles at each power of two, and the
# relative spacing stays about the same. Only next to zero would this leave a gap. The subnormals
# fill it, evenly, with the spacing of the stretch above them.

# %%
spacing = np.diff(numbers)
for exponent in range(six_bits.min_exponent, six_bits.max_exponent):
    in_stretch = (numbers[:-1] >= 2.0**exponent) & (numbers[:-1] < 2.0 ** (exponent + 1))
    print(f"from {2.0**exponent:4} to {2.0 ** (exponent + 1):4}: spacing {spacing[in_stretch]}")
    # epsilon is the spacing above 1
    assert set(spacing[in_stretch]) == {2.0**exponent * six_bits.epsilon}
subnormal = numbers[:-1] < six_bits.smallest_normal
assert set(spacing[subnormal]) == {six_bits.smallest_subnormal}
assert numbers[-1] == six_bits.max == 14

# %% [markdown]
# ## float16 has fine steps and a short range; bfloat16 has a long range and coarse steps
#
# There are two common ways to spend 16 bits. bfloat16 takes the 8 exponent bits of float32 and is
# left with 8 significant bits. In fact it is the upper half of a float32.

# %%
formats = (FLOAT16, BFLOAT16, FLOAT32)
headings = ["format", "significant bits", "exponent bits", "spacing above 1"]
headings += ["largest", "smallest normal", "smallest subnormal"]
rows = [
    [f.name, *map(str, (f.significand_bits, f.exponent_bits)), *map("{:.6g}".format, numbers)]
    for f in formats
    for numbers in [(f.epsilon, f.max, f.smallest_normal, f.smallest_subnormal)]
]
print(Table(headings, rows))
upper_half = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
bfloat16 = [decode(pattern, 8, 7) for pattern in range(2**16)]
assert np.array_equal(bfloat16, upper_half, equal_nan=True)
assert FLOAT16.max == np.finfo(np.float16).max == 65504
assert BFLOAT16.epsilon == 8 * FLOAT16.epsilon
assert BFLOAT16.smallest_normal == FLOAT32.smallest_normal

# %% [markdown]
# The picture shows range and spacing on one axis of values, from tiny to huge. The lower a line in
# the lower panel, the finer the steps. float16 has eight times finer steps than bfloat16, on a
# short stretch. Below $2^{-14}$ its numbers are subnormal: the spacing no longer shrinks with the
# value. So relative to the value it grows, until at the smallest number it is as large as the
# number.

# %%
figure, (ranges, steps) = plt.subplots(2, 1, figsize=(10, 5), sharex=True, layout="constrained")
for row, f in enumerate(formats):
    look = FORMAT_LOOKS[f.name]  # the colour, mark and line of a format in all lessons
    low, normal, high = np.log2([f.smallest_subnormal, f.smallest_normal, f.max])
    ranges.barh(row, high - normal, left=normal, color=look["color"])
    ranges.barh(row, normal - low, left=low, color="white", edgecolor=look["color"], hatch="////")
    exponents = np.arange(low, high)
    relative = f.epsilon * 2 ** np.maximum(normal - exponents, 0)
    steps.step(exponents, relative, where="post", label=f.name, markevery=(8, 16), **look)
ranges.set(title="Range (hatched: subnormal numbers)", yticks=range(3), yticklabels=formats)
ranges.invert_yaxis()
steps.set(title="Spacing at a power of two, relative to it", ylabel="spacing / value")
steps.set_yscale("log", base=2)
steps.set(xlabel="exponent e of a value of magnitude $2^e$", xlim=(-155, 135))
steps.legend(loc="center right", bbox_to_anchor=(1, 0.33))  # beside no line
plt.show()

# %% [markdown]
# ## Rounding takes the nearest number, and of two equally near ones the even one
#
# A result that is no float16 is replaced by the nearest one. Halfway between two, it is the one
# whose last bit is 0, called *even*. Rounding up always would push sums upwards.
#
# From scratch, with exact fractions: find the spacing where the value lies, divide by it, round to
# an integer (Python's `round` also goes to the even one), and multiply again.


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
assert [nearest(Fraction(value)) for value in (2049, 2051)] == [2048, 2052]

# %% [markdown]
# Above 2048 the spacing is 2, so 2049 and 2051 are both halfway; one goes down and one up.
# `mpgluon.round_to` does the same to whole arrays. We compare it with our function, with NumPy and
# with MXNet: on numbers of float16, on points halfway between two of them, and just beside those.

# %%
positive = np.unique(by_numpy[np.isfinite(by_numpy) & (by_numpy >= 0)])
halfway = (positive[:-1] + positive[1:]) / 2
beside = np.concatenate([np.nextafter(halfway, 0), np.nextafter(halfway, np.inf)])
values = np.concatenate([positive, halfway, beside])
rounded = round_to(values, FLOAT16)
assert np.array_equal(rounded, values.astype(np.float16))
for value, result in list(zip(values, rounded))[:: 100 if FAST else 5]:
    assert nearest(Fraction(value)) == result
in_float32 = np.concatenate([positive, halfway]).astype(np.float32)
by_mxnet = mx.nd.array(in_float32).astype("float16").asnumpy()
assert np.array_equal(by_mxnet, round_to(in_float32, FLOAT16))
print(f"{len(values)} values, one way of rounding")

# %% [markdown]
# ## First accident: a small update of a weight is lost
#
# Training adds small numbers to weights. Near 1 the next float16 is $1 + 2^{-10}$. An update of
# less than half that distance is rounded away, however often it comes. In bfloat16 the limit is
# eight times higher.

# %%
update = 0.0004
after = {f.name: float(round_to(1 + update, f)) for f in formats}
print(f"1 + {update} is", after)
assert update < FLOAT16.epsilon / 2
assert after["float16"] == after["bfloat16"] == 1
assert np.float16(1) + np.float16(update) == after["float16"]
assert after["float32"] > 1

# %% [markdown]
# The next notebook is about this accident and its remedy: a copy of each weight in float32.
#
# ## Second accident: a small gradient becomes zero
#
# Gradients can be tiny. Below $2^{-25}$, half the smallest float16, they round to zero. Larger ones
# survive as subnormal numbers, with the fewer digits the smaller they are. A gradient that is zero
# teaches nothing. The remedy is to multiply the loss, and with it every gradient, by a power of
# two: the *loss scale*. That changes only the exponent. The gradient is divided by it later, in
# float32.

# %%
gradients = np.array([3e-3, 3e-5, 3e-7, 3e-8, 1e-8])
loss_scale = 2.0**12
plain = gradients.astype(np.float16).astype(np.float64)
scaled = (gradients * loss_scale).astype(np.float16).astype(np.float64) / loss_scale
errors = [np.abs(found / gradients - 1) for found in (plain, scaled)]
rows = [
    (f"{g:.0e}", f"{alone:.3%}", f"{helped:.3%}") for g, alone, helped in zip(gradients, *errors)
]
print(Table(("gradient", "relative error in float16", "the same, with a loss scale"), rows))
assert plain[-1] == 0
assert errors[0][-2] > 0.01
# unit_roundoff is half the spacing above 1: the largest relative error of one rounding
assert errors[1].max() <= FLOAT16.unit_roundoff
assert np.array_equal(plain, round_to(gradients, FLOAT16))

# %% [markdown]
# In bfloat16 these gradients are safe without any scale: its range is float32's.
#
# ## Third accident: a large number becomes infinite
#
# The largest float16 is 65504. The next would be 65536 if there were room for one more exponent.
# What lies at least halfway, from 65520 on, becomes infinite. The square of 256 is enough. And
# infinity minus infinity is NaN, which then spreads to everything it touches.
#
# One trap when you look at such numbers: NumPy prints a float16 with as few digits as tell it from
# its neighbours. Convert it to `float` to see its value.

# %%
edge = np.array([65504, 65519.99, 65520, 256.0**2])
with np.errstate(over="ignore"):  # newer versions of NumPy warn of the overflow that we provoke
    with_float16 = edge.astype(np.float16)
print([f"{value} -> {result:.0f}" for value, result in zip(edge, with_float16.astype(float))])
assert with_float16.astype(float).tolist() == [65504, 65504, np.inf, np.inf]
assert np.array_equal(round_to(edge, FLOAT16), with_float16)
assert np.isfinite(round_to(edge, BFLOAT16)).all()
print("what NumPy prints as", np.float16(65504), "is", float(np.float16(65504)))
assert np.isnan(float(with_float16[-1]) - float(with_float16[-1]))

# %% [markdown]
# ## A sum of ones stops at 2048
#
# Count in float16: add 1, again and again. From 2048 on the spacing is 2, so adding 1 lands
# halfway and is rounded back to 2048, which is even. A sum in bfloat16 stops at 256 already.


# %%
def running_sum(f, count):
    total, totals = 0.0, []
    for _ in range(count):
        total = float(round_to(total + 1.0, f))
        totals.append(total)
    return np.array(totals)


sums = {f.name: running_sum(f, 3000) for f in formats}
in_numpy = np.cumsum(np.ones(3000, dtype=np.float16))[-1]
print({name: totals[-1] for name, totals in sums.items()}, "NumPy's float16:", float(in_numpy))
assert in_numpy == 2048
assert [totals[-1] for totals in sums.values()] == [2048, 256, 3000]
assert np.float32(2**24) + np.float32(1) == 2**24

# %%
figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
for first, (name, totals) in zip((0, 100, 200), sums.items()):  # marks that do not coincide
    look = {**FORMAT_LOOKS[name], "markevery": (first, 300)}
    axes.plot(np.arange(1, 3001), totals, label=name, **look)
axes.set(title="A running sum of ones", xlabel="number of ones added", ylabel="sum (no unit)")
axes.legend()
plt.show()

# %% [markdown]
# Even float32 stops, at $2^{24}$, which the last assert has shown. In general a sum stops once one
# term is no more than half the spacing at the sum.
#
# ## A dot product of 4,094 fours with fours is the largest float16, and one more is infinite
#
# Every layer of a network computes dot products: multiply in pairs, and add up. Here each product
# is 16, and 4,094 times 16 is 65504. If the running sum is a float16, it stops at 32768, for the
# same reason as the ones at 2048. If it is a float32, and only the final result is rounded, the
# answer is right. With one more pair the result is 65520, which rounds to infinity.
#
# A *Tensor Core*, the part of a GPU made for this, works in the second way: it multiplies float16
# numbers exactly and keeps the running sum in float32. `mpgluon.cast_block` turns a Gluon layer
# into one that computes with float16 numbers, and on a CPU it works in this way too. (A Tensor Core
# adds several products at a time, and cuts off where a CPU rounds: some last bits differ.)

# %%
in_float16 = np.float16(0)
for _ in range(4094):
    in_float16 += np.float16(4) * np.float16(4)
print("running sum in float16:", float(in_float16))
assert in_float16 == 32768 == 2048 * 16
for count in (4094, 4095):
    with np.errstate(over="ignore"):  # NumPy warns of the overflow that we want to see
        in_float32 = np.float16(np.sum(np.full(count, 16, dtype=np.float32)))
    layer = nn.Dense(1, in_units=count, use_bias=False)
    layer.initialize(mx.init.Constant(4))
    mpgluon.cast_block(layer)
    by_layer = float(layer(mx.nd.full((1, count), 4)).asscalar())
    print(f"{count} pairs, summed in float32, then rounded: {float(in_float32)}, {by_layer}")
    assert by_layer == float(in_float32) == (65504 if count == 4094 else np.inf)

# %% [markdown]
# ## MXNet on a CPU refuses
#
# Without `mpgluon`, MXNet's own `net.cast("float16")` makes a layer that a CPU cannot run. This is
# the one failure in this notebook that we provoke. MXNet computes in the background, so the error
# appears only when the result is asked for.

# %%
layer = nn.Dense(1, in_units=8, use_bias=False)
layer.initialize(mx.init.One())
layer.cast("float16")
message = ""
try:
    layer(mx.nd.ones((1, 8), dtype="float16")).asnumpy()
except mx.MXNetError as error:
    message = str(error).splitlines()[-1]
print(message)
assert "float16 fully connected layer" in message

# %% [markdown]
# ## float32 is enough to compute float16 without an error of its own
#
# So `mpgluon` widens float16 numbers to float32, computes there, and rounds the result back. Now
# there are two roundings: to float32, then to float16. Rounding twice may be wrong. If the first
# rounding lands exactly halfway between two float16 numbers, the second one cannot know on which
# side the true result was.
#
# For float16 and float32 this never happens. Two numbers with 11 significant bits have a product
# of at most 22 bits, which float32 with its 24 holds exactly. For sums, quotients and square roots
# a theorem says that $2 \cdot 11 + 2 = 24$ bits are enough. float32 has exactly that.
#
# First a test on random pairs of float16 numbers, subnormals among them, against exact fractions.

# %%
drawn = np.random.default_rng(0)
finite = by_numpy[np.isfinite(by_numpy) & (by_numpy != 0)]
pairs = drawn.choice(finite, (500 if FAST else 5000, 2)).astype(np.float32)
operations = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}
for symbol, operation in operations.items():
    results = round_to(operation(pairs[:, 0], pairs[:, 1]), FLOAT16)
    inside = np.isfinite(results)
    for (a, b), result in zip(pairs[inside].tolist(), results[inside]):
        exact = operation(Fraction(a), Fraction(b))
        assert nearest(exact) == result
    print(f"{inside.sum()} results of {symbol} are the exact ones, rounded once")
products = pairs[:, 0] * pairs[:, 1]
assert np.array_equal(products, pairs[:, 0].astype(np.float64) * pairs[:, 1])  # exact in float32

# %% [markdown]
# The square root of a fraction is rarely a fraction. But it lies between two points halfway to the
# neighbours of the right result, and their squares are exact in float64. So all float16 numbers
# can be tested.

# %%
arguments = positive[1:]
roots = round_to(np.sqrt(arguments.astype(np.float32)), FLOAT16)
place = np.searchsorted(positive, roots)
below = (positive[place - 1] + positive[place]) / 2
above = (positive[place] + positive[place + 1]) / 2
print(f"{len(arguments)} square roots tested")
assert np.all((below**2 < arguments) & (arguments < above**2))

# %% [markdown]
# ## With one bit less it would go wrong
#
# Is 24 really needed? We invent formats with fewer significant bits, take the detour through them,
# and count wrong results. A power of two more or less changes nothing about the digits. So it is
# enough to take all numbers from 1 up to 2 (up to 4 for roots), and for sums to move one of them
# down by each power of two. The results that we start from are float64's, whose 53 bits are more
# than twice float32's.


# %%
def wrong(results, bits):
    """Count results that come out differently after a detour through a format of some bits."""
    detour = round_to(results, FloatFormat("wide", significand_bits=bits, exponent_bits=8))
    return np.count_nonzero(round_to(detour, FLOAT16) != round_to(results, FLOAT16))


# %%
digits = 1 + np.arange(1024) / 1024  # every float16 from 1 up to 2
a, b = digits[:, None], digits[None, :]
shifts = range(10, 13) if FAST else range(25)
table = []
for bits in (21, 22, 23, 24):
    wrong_sums = sum(wrong(a + sign * b / 2**k, bits) for k in shifts for sign in (1, -1))
    roots = wrong(np.sqrt(np.concatenate([digits, 2 * digits])), bits)
    table.append((bits, wrong(a * b, bits), wrong(a / b, bits), wrong_sums, roots))
headings = ("bits", "wrong products", "wrong quotients", "wrong sums", "wrong roots")
print(Table(headings, [[str(cell) for cell in row] for row in table]))
needed = [21 + sum(count > 0 for count in column) for column in list(zip(*table))[1:]]
assert needed == [2 * 11, 2 * 11, 2 * 11 + 1, 2 * 11 + 2]
assert table[-2][-1] == 1

# %% [markdown]
# Products and quotients need $2 \cdot 11$ bits, sums one more, and square roots one more again.
# With 23 bits a single root is wrong. With the 24 bits of float32 nothing is.
#
# ## A layer differs from the exact result only by its additions in float32
#
# The products in a dot product are exact. Each of the $n$ additions in float32 rounds, by at most
# $2^{-24}$ of what it adds up to. So all together they err by at most $n \cdot 2^{-24}$ times the
# sum of the terms' magnitudes, in whatever order they are done. Then the result is rounded to
# float16, by at most half a spacing there.

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
print(f"layer {by_layer}, exact {exact}, error {abs(by_layer - exact):.2e}")
print(f"half a spacing of float16 {half_spacing:.2e}, additions at most {additions:.2e}")
assert abs(by_layer - exact) <= half_spacing + additions
assert additions < half_spacing / 4

# %% [markdown]
# ## Summary
#
# - A floating-point format is a number of significant bits and a number of exponent bits. float16
#   has 11 and 5, bfloat16 8 and 8, float32 24 and 8.
# - float16 ends at 65504 above and at $2^{-24}$ below. bfloat16 has the range of float32 and steps
#   eight times coarser than float16.
# - Small updates are lost, small gradients become zero, large numbers become infinite. The
#   remedies are float32 copies of weights, a loss scale, and float32 for sums.
# - float32 has just enough bits that a float16 operation computed in it and rounded is exact but
#   for that one rounding.
#
# ## Exercises
#
# 1. At which value does a sum of 0.001s stop in float16? (About 4. Half the spacing at the sum
#    must reach 0.001.)
# 2. How many of the finite float16 numbers are subnormal? (A few percent of them.)
# 3. Which float16 from 1 up to 4 has a wrong square root after a detour through 23 bits? (A little
#    below 4.)
#
# ## References
#
# - IEEE 754-2019, "IEEE Standard for Floating-Point Arithmetic", 3.3 (formats), 4.3.1 (rounding),
#   7.4 (overflow).
# - Figueroa, "When is double rounding innocuous?", 1995, for the rule of $2p + 2$ bits, where $p$
#   is 11 here.
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.
# - NVIDIA, "Training With Mixed Precision" user guide, on Tensor Cores and loss scaling.
