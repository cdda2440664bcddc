# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Which layer breaks in sixteen bits?
#
# A network learns in FP32 (`float32`). In FP16 (`float16`) the same network learns nothing at all.
# One of its four layers is to blame. This lesson is a detective story: we follow the trail from the
# symptom to the culprit, and to the cure.
#
# ![A trail. The symptom, every step is skipped and the scale falls to 1, leads to the tool
# locate_overflow, which runs the batch again and looks inside. It names the place: block, operator,
# format, and the largest number before. Then range_report shows what is too large, what is lost,
# and the best scale. If the forward pass is too large, keep it in FP32; if only gradients are,
# change the scale. Then train again](figures/06_trail.svg)
#
# The sketch is our trail: symptom, place, reason, cure. (S is the loss scale. `locate_overflow` and
# `range_report` are functions of mpgluon.)
#
# ## What you will be able to do
#
# - read the symptoms: a loss that is NaN, skipped steps, a loss scale that falls to 1;
# - ask the layers' status flags which layer overflowed;
# - find the block and the operator in which the first infinite number appeared;
# - say why no loss scale helps against it;
# - find out which blocks to keep in FP32, and check that this helps;
# - find the step and the layer in which two runs begin to differ, and say whether rounding can
#   explain it.
#
# You should know casting (lesson 04) and loss scaling (lesson 03).

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %% tags=["setup"]
import inspect
import tempfile
from pathlib import Path

import mpgluon
from mpgluon import amp, diagnostics, kernels
from mpgluon.diagnostics import Batch
from mpgluon.tools import plots
from mpgluon_tools.tables import Table

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

from teaching import check
from teaching.lesson_06 import (
    ColleaguesEnergy,
    accuracy_of,
    loss_fn,
    make_net,
    make_sounds,
    make_trainer,
    record_with_a_fault,
    train,
)

steps = 60 if FAST else 150

# %% [markdown]
# ## In FP32 the network learns
#
# Our data are short sounds, each with one of four pitches. As in most audio files, a sound is a row
# of whole numbers between -32768 and 32767. Some sounds are quiet, some are loud. FP16 ends at
# 65504, so all of these numbers are in its range.

# %%
sounds, pitches = make_sounds(32, seed=0)
print(f"shape {sounds.shape}, largest number {np.abs(sounds.asnumpy()).max():.0f}")

# %% [markdown]
# The network listens with 16 filters (a convolution over time). Then it takes the *energy* that
# passes each filter: the mean of the squared results. The logarithm of this mean makes loud and
# quiet sounds comparable. A hidden layer and an output layer follow. Here are all four suspects.


# %%
class Energy(nn.HybridBlock):
    """The logarithm of the mean of squares over time."""

    def hybrid_forward(self, F, x):
        return F.log(F.mean(F.broadcast_mul(x, x), axis=2) + 1)


rows = []
for layer in make_net(Energy):
    weights = sum(parameter.data().size for parameter in layer.collect_params().values())
    rows.append((layer.name, type(layer).__name__, str(weights)))
print(Table(("layer", "kind", "weights and biases"), rows))

# %% [markdown]
# We train it in FP32. (`train` is a loop as in lesson 04. It also notes the loss and the loss scale
# of each step. In FP32 the loss scale is `"none"`.)

# %%
fp32_net, fp32_history = make_net(Energy), []
train(fp32_net, make_trainer(fp32_net, "none"), steps, fp32_history)
first, last = fp32_history[0]["loss"], fp32_history[-1]["loss"]
print(f"loss {first:.3f} -> {last:.3f}, accuracy for new sounds {accuracy_of(fp32_net):.1%}")

# %% tags=["claim"]
assert np.isfinite(sounds.asnumpy().astype("float16")).all()
assert accuracy_of(fp32_net) > 0.9

# %% [markdown]
# ## The symptom: in FP16 the loss is NaN, and every step is skipped
#
# Now the same in FP16. A step whose gradients are not all finite is *skipped*: the weights stay as
# they are, and the loss scale is halved, down to 1. mpgluon gives up when several more steps in a
# row are skipped at that scale; here we choose 5. This cell fails **on purpose**.

# %%
fp16_net, fp16_history = make_net(Energy), []
mpgluon.cast_block(fp16_net)
trainer = make_trainer(fp16_net, "dynamic", max_consecutive_skips=5)
locator = diagnostics.OverflowLocator(fp16_net, trainer)  # our detective: it will be needed soon
message = ""
try:
    train(fp16_net, trainer, steps, fp16_history)
except mpgluon.LossScaleCollapseError as error:
    message = str(error)
for event in fp16_history[:3]:
    print(f"step {event['step']}: loss {event['loss']}, loss scale {event['loss_scale']:.0f}")
print(f"… after {len(fp16_history)} steps:\n{message}")

# %% tags=["plot"] alt="The loss scale of 21 steps: it begins at 2 to the 16, is halved by each step down to 1, and stays there. Each step has a cross: it was skipped."
figure, axes = plt.subplots(figsize=(6.2, 3.2), layout="constrained")
plots.draw_loss_scale(axes, fp16_history)
axes.get_legend().remove()
skipped = sum(event["skipped"] for event in fp16_history)
axes.text(9, 2**13, f"crosses: {skipped} of {len(fp16_history)} steps are skipped")
axes.set(xlabel="step", title="Every step is skipped,\nuntil the loss scale can fall no further")
axes.xaxis.get_major_locator().set_params(integer=True)
axes.set_yticks([2**exponent for exponent in (0, 4, 8, 12, 16)])
plt.show()

# %% tags=["claim"]
assert "5 steps in a row had gradients that are not finite" in message
assert "nothing is being trained" in message
assert ("overflowed first in energy" in message) == kernels.available()
assert all(event["skipped"] and np.isnan(event["loss"]) for event in fp16_history)
assert [fp16_history[place]["loss_scale"] for place in (0, -1)] == [65536, 1]

# %% [markdown]
# A few skipped steps at the beginning are normal: the loss scale is still too large, and each
# skipped step halves it. Here it falls to its minimum, 1. And the loss itself is NaN ("not a
# number", such as infinity minus infinity). The loss is computed before any gradient. So the
# gradients are not merely too large: something breaks in the forward pass.
#
# The message names a first suspect, `energy`, and the first *parameter* whose gradient is not
# finite, `filters_weight`. The damage shows there, but it need not have begun there.
#
# That was the symptom. The next point on our trail is the place.
#
# ## The first clue: `energy` has raised a flag
#
# A processor has *status flags*: after a computation they say whether a result was too large
# (`overflow`), or whether a NaN came out although no NaN went in (`invalid`). In a cast network on
# a CPU each layer has such flags. A rounding to FP16 that overflows raises the flag of its layer,
# and the step collects the flags. So after any step we can ask which layer overflowed, without
# running anything again.

# %%
flags = amp.step_flags(trainer)  # of the latest step
suspect = flags.first("forward")
print(flags)

# %% tags=["claim"]
assert (suspect is not None) == kernels.available()  # native operators raise the flags
assert suspect is None or (suspect.layer == "energy" and suspect.forward.overflow)

# %% [markdown]
# A flag records the rounding itself, whatever later layers do with its result. That matters,
# because later layers can hide an overflow. MXNet's ReLU on a CPU turns NaN into 0: after it all
# numbers look well, and the layers learn from zeros. In a cast network ReLU keeps the NaN, the loss
# becomes NaN, and the step is skipped. But ReLU turns minus infinity into 0 there too, and then
# only the flag is left. (The [overflow hunt](../docs/play.md#an-overflow-hunt), a figure to play
# with, has such a case.)

# %%
relu = nn.Activation("relu")
numbers = mx.nd.array([np.nan, -1, 2])
plain = relu(numbers).asnumpy()
amp.autocast(relu, "float16")
print(f"ReLU of nan, -1 and 2: {plain} in plain MXNet, {relu(numbers).asnumpy()} in a cast network")

# %% tags=["claim"]
assert np.isfinite(plain).all()
assert np.isnan(relu(numbers).asnumpy()[0])

# %% [markdown]
# ## The place: the first number that is not finite is in `energy`
#
# A flag names the layer. To find the operator, and the numbers that came in, we look inside. We do
# it by hand first: we send the batch of the first step through the network, layer by layer, and
# look at what each layer returns.

# %%
result, culprit = sounds, None
for layer in fp16_net:
    result = layer(result)
    largest = np.abs(result.asnumpy()).max()
    print(f"{layer.name:8} largest result {largest:.4g}")
    if culprit is None and not np.isfinite(largest):
        culprit = layer

# %% [markdown]
# `filters` returned ordinary numbers, and `energy` made infinity of them. The layers after it only
# pass the damage on.
#
# That was easy, because this network is a plain chain, and because we knew which batch to take. The
# `OverflowLocator` does the same for any network and any training loop. We attached one before the
# training. It costs nothing until a step is skipped. At the first skipped step it ran the batch
# once more and looked at every operator of every block.

# %%
report = locator.report
print(report)
filtered = fp16_net[0](sounds).asnumpy().astype("float16")  # what the filters returned, exactly
with np.errstate(over="ignore"):  # NumPy would warn of the overflow that we expect
    squares = np.square(filtered)
print(f"by hand: {np.isinf(squares).mean():.0%} of the squares are infinite")

# %% tags=["claim"]
assert culprit is fp16_net[1]
assert report.block == culprit.name
assert report.direction == "forward"
assert report.what == "what broadcast_mul returned"
assert report.largest_before == np.abs(filtered).max()
assert np.isfinite(filtered).all()
assert np.isinf(squares).any()

# %% [markdown]
# The report says where it happened: in the *forward* pass, in the block `energy`, in its operator
# `broadcast_mul`, the product of `x` with itself. It also says how large the numbers were that came
# in. They fit into FP16. Their squares do not.
#
# ## The reason: what layers return fits, the squares inside `energy` do not
#
# Could a smaller loss scale have saved us? The loss scale multiplies the loss, so it changes the
# gradients. It cannot change the forward pass. `locate_overflow` does the locator's work for one
# batch. We call it with three very different scales.

# %%
batch = Batch(sounds, pitches, loss_fn)  # what all diagnostics take
places = set()
for exponent in (-20, 0, 20):
    if found := diagnostics.locate_overflow(fp16_net, batch, loss_scale=2.0**exponent):
        print(f"loss scale 2^{exponent}: {found.direction}, {found.what} in {found.block}")
        places.add((found.direction, found.block))

# %% tags=["claim"]
assert places == {("forward", "energy")}

# %% [markdown]
# The place is the same each time. Is anything else wrong with this network? `range_report` runs the
# batch in FP32, where nothing is broken, and says for each array what FP16 would make of it: how
# much overflows, how much becomes zero (*underflow*), and how much is *subnormal* (below $2^{-14}$,
# where FP16 has fewer bits).

# %%
net = make_net(Energy)
scale = diagnostics.range_report(net, batch).recommended_loss_scale()
range_report = diagnostics.range_report(net, batch, loss_scale=scale)
print(range_report)

# %% tags=["claim"]
with autograd.record():
    loss = loss_fn(net(sounds), pitches)
loss.backward()
largest = max(float(np.abs(p.grad().asnumpy()).max()) for p in net.collect_params().values())
assert scale == 2.0 ** np.floor(np.log2(65504 / 2 / largest))
assert not any(array.overflow_fraction for array in range_report.arrays)

# %% [markdown]
# No array overflows. (We used the recommended loss scale: with it, even twice the largest gradient
# stays below 65504. An array *handed on* goes from a block to a block inside it, here from `hidden`
# to its activation.) So all four layers return numbers that fit, and all gradients fit too.
#
# The report sees only what layers return, and the squares never leave `energy`. The picture adds
# them: it shows how often each power of two occurs.

# %% tags=["plot"] alt="How often each power of two occurs. What layers return lies inside the range of FP16. The squares inside energy spread twice as wide, and many lie beyond 2 to the 16, where numbers are too large."
returned = diagnostics.batch_exponents(net, batch).overall()["activations"]
squared = diagnostics.exponent_histogram([net[0](sounds).asnumpy() ** 2])
too_large = squared.shares()["overflow"]
figure, axes = plt.subplots(figsize=(6.2, 4), layout="constrained")
plots.draw_exponents(axes, {"returned": returned, "squared": squared})
axes.get_legend().remove()
axes.text(2, 8.5, "what layers return", ha="right")
words = f"squares inside\nenergy: {too_large:.0%}\nare too large"
axes.text(17, 7, words, bbox={"color": "white", "pad": 2})
axes.set_title("What layers return fits into FP16,\nthe squares inside energy do not", pad=10)
plt.show()

# %% tags=["claim"]
filtered = net[0](sounds).asnumpy()
assert abs(too_large - np.mean(filtered[filtered != 0] ** 2 >= 2.0**16)) < 1e-6
assert too_large > 0.2
assert returned.shares()["overflow"] == 0

# %% [markdown]
# Squaring doubles every exponent, and that moves many of the numbers beyond the end of FP16.
#
# ## The other layers are innocent
#
# An infinity is easy to notice, but other layers may make smaller errors. Before we accuse `energy`
# alone, we compare each layer with itself in FP32. We measure *relative* errors: the norm of the
# difference, divided by the norm of the FP32 result. First by hand, for the filters:


# %%
def relative_error(result, reference):
    difference = result.astype("float64") - reference
    return np.linalg.norm(difference) / np.linalg.norm(reference.astype("float64"))


by_hand = relative_error(fp16_net[0](sounds).asnumpy(), filtered)
print(f"filters: {by_hand:.2g}, one rounding to FP16 at most {mpgluon.FLOAT16.unit_roundoff:.2g}")

# %% [markdown]
# `compare_with_fp32` does the same for all layers. *Introduced* is the error that a layer makes
# alone, while all others compute in FP32. The other columns have the errors with the whole network
# in FP16: of the layer's output, of the gradient that arrives at it, and of its parameters'
# gradients.

# %%
comparison = diagnostics.compare_with_fp32(net, batch)
print(comparison)

# %% tags=["claim"]
introduced = {error.block.name: error.introduced for error in comparison.layers}
assert np.isclose(introduced["filters"], by_hand, rtol=1e-4)
assert comparison.ranked()[0].block is net[1]
others = [error for name, error in introduced.items() if name != "energy"]
assert max(others) < 2 * mpgluon.FLOAT16.unit_roundoff

# %% [markdown]
# Look at the column *introduced*. Every layer but one makes an error of about one rounding. A
# healthy layer looks like this. (`hidden_tanh` is the activation of `hidden`.) Only `energy` stands
# out. It also causes the `inf` in the other columns: an infinite number spoils everything after it,
# and in the backward pass everything before it.
#
# ## The cure: keep `energy` in FP32
#
# A block that breaks in FP16 can stay in FP32 (lesson 04). Which blocks should stay? We try each of
# the four by hand. `suggest_keep_fp32` does it step by step: it keeps the worst block in FP32, runs
# the batch again, and goes on until the error is small. At last it drops the blocks that are not
# needed.

# %%
is_cured = {}
for place, layer in enumerate(net):
    trial = make_net(Energy)
    mpgluon.cast_block(trial, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, trial[place]))
    is_cured[layer.name] = diagnostics.locate_overflow(trial, batch) is None
    print(f"{layer.name:7} in FP32: {'all finite' if is_cured[layer.name] else 'still broken'}")
suggestion = diagnostics.suggest_keep_fp32(net, batch)
print(suggestion)

# %% tags=["claim"]
assert [name for name, cured in is_cured.items() if cured] == ["filters", "energy"]
assert list(suggestion.blocks) == [net[1]]
assert suggestion.error_before == np.inf
assert suggestion.error_after < 32 * mpgluon.FLOAT16.unit_roundoff

# %% [markdown]
# Two of the four trials are finite. Why does it help to keep `filters` in FP32? Because then they
# return FP32, and the product `x · x` takes the format of its operands: in a cast network too, the
# product of FP32 numbers is FP32. But most of the work is in the filters, and little in `energy`.
# So the suggestion is the better cure.
#
# ## Cured, the network trains like FP32
#
# We begin with the recommended loss scale, so that no step is lost in the search for it.

# %%
cured_net, cured_history = make_net(Energy), []
keep = (*mpgluon.NORMALIZATION_LAYERS, cured_net[1])
print(mpgluon.cast_block(cured_net, keep_fp32=keep))
trainer = make_trainer(cured_net, mpgluon.DynamicLossScale(init_scale=scale))
train(cured_net, trainer, steps, cured_history)
print(f"accuracy: FP32 {accuracy_of(fp32_net):.1%}, cured FP16 {accuracy_of(cured_net):.1%}")
print(f"skipped steps: {amp.skipped_steps(trainer)} of {steps}")

# %% tags=["plot"] alt="Training loss over steps, in FP32 and in FP16 with energy in FP32: both fall from 1.5 to below 0.01, and the two curves lie on each other."
figure, axes = plt.subplots(figsize=(6.2, 3.6), layout="constrained")
for start, (dtype, history) in enumerate((("float32", fp32_history), ("float16", cured_history))):
    look = {**plots.FORMAT_LOOKS[dtype], "markevery": (5 * start, 10)}
    axes.plot(*zip(*((event["step"], event["loss"]) for event in history)), **look)
for name, dtype, at, place in (  # each at a mark of its own
    ("FP32", "float32", steps // 30 * 10, (40, 30)),
    ("FP16, energy in FP32", "float16", steps // 20 * 10 + 5, (40, 34)),
):
    axes.annotate(
        name,
        (fp32_history[at]["step"], fp32_history[at]["loss"]),
        place,
        textcoords="offset points",
        color=plots.FORMAT_LOOKS[dtype]["color"],
        arrowprops={"arrowstyle": "-", "color": "0.5"},
    )
axes.set(xlabel="step", ylabel="training loss", yscale="log")
axes.set_title("The two curves lie on each other:\ncured, FP16 trains like FP32")
plt.show()

# %% tags=["claim"]
assert abs(accuracy_of(cured_net) - accuracy_of(fp32_net)) < 0.05
assert amp.skipped_steps(trainer) <= 3
losses = np.array([[event["loss"] for event in run] for run in (fp32_history, cured_history)])
assert np.abs(losses[1] - losses[0]).max() < 0.1

# %% [markdown]
# The case is closed. One operator of one layer was to blame, and one line cures it. The other three
# layers compute in FP16.
#
# ## Two runs that should agree, and do not
#
# An overflow is easy to notice. The next fault is not. A colleague trains the cured network too,
# with the same sounds and the same seed. Her code has a class `ColleaguesEnergy` in place of
# `Energy`. Her losses differ a little from ours. Is the reason her code, or only her processor?
# Another processor may add the same numbers in another order, and each order rounds differently. So
# some difference is normal.
#
# A `NumericsRecorder` around each step writes down its numbers, layer by layer: weights, results,
# gradients, updates. It keeps a checksum of each array and 16 of its values, and for the first step
# all values (`arrays=(1, 1)`).

# %%
files = tempfile.TemporaryDirectory()  # all that this page writes


def record(energy, name):
    """Train the cured network for 20 steps, and record each step."""
    net = make_net(energy)
    mpgluon.cast_block(net, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, net[1]))
    trainer = make_trainer(net, 1024)
    folder = Path(files.name) / name
    recorder = diagnostics.NumericsRecorder(net, trainer, folder, every=1, arrays=(1, 1))
    for step in range(20):
        sounds, pitches = make_sounds(32, seed=step)
        with recorder.step(sounds, pitches) as recorded:
            with autograd.record():
                recorded.loss = loss_fn(net(sounds), pitches)
                with amp.scale_loss(recorded.loss, trainer) as scaled_loss:
                    autograd.backward(scaled_loss)
            trainer.step(len(pitches))
    return diagnostics.read_numerics(folder)


def losses_of(recording):
    return np.array([line["loss"] for line in recording.lines])


ours, hers = record(Energy, "ours"), record(ColleaguesEnergy, "hers")
rows = []
for step, pair in enumerate(zip(losses_of(ours), losses_of(hers)), start=1):
    if step in (1, 2, 3, 4, 6, 8, 13, 16, 19, 20):
        rows.append((str(step), *(f"{loss:.4f}" for loss in (*pair, pair[1] - pair[0]))))
print(Table(("step", "our loss", "her loss", "difference"), rows))

# %% tags=["claim"]
difference = np.abs(losses_of(hers) - losses_of(ours))
assert 0 < difference[0] < 0.001
assert difference[:5].max() < 0.002
assert difference[12:].max() > 0.01

# %% [markdown]
# The first losses agree to three digits. Some steps later not even two digits agree. The losses
# cannot say why: training enlarges any small difference, even one that comes from rounding alone.
#
# We can compare the layers by hand. In step 1 both runs have the same weights, and the same code
# for `filters`. So we give the same numbers to both versions of `energy`, and count the difference
# in roundings of FP32, the format in which this layer computes.

# %%
results = [energy()(mx.nd.array(filtered)).asnumpy() for energy in (ColleaguesEnergy, Energy)]
by_hand = relative_error(*results)
print(f"energy: {by_hand:.2g} is {by_hand / 2**-24:.0f} roundings of FP32")

# %% [markdown]
# `compare_numerics` compares two recordings. It looks for the first step in which any bit differs.
# In this step it looks for the first array that differs, in the order of the computation. (`1` is
# the place of a layer: `net[1]` is `energy`.)

# %%
comparison = diagnostics.compare_numerics(ours, hers)
print(comparison.sentence)
print(comparison.table(5))

# %% tags=["claim"]
assert comparison.step == 1
assert comparison.difference.id[:2] == ("activation", "1")
assert comparison.difference.is_rounding is False
assert np.isclose(comparison.difference.relative, by_hand, rtol=0.1)
assert by_hand > 1000 * 2**-24

# %% [markdown]
# The sentence above the table names step 1, the forward pass, and the result of layer `1`, which is
# `energy`. Everything that went into it was equal. Sums in another order change such a result by a
# few roundings. Here the difference is thousands of roundings, so rounding does not explain it. The
# other rows come later in the step: they were computed from numbers that differ already.
#
# We look at her code:

# %%
print(inspect.getsource(ColleaguesEnergy.hybrid_forward).splitlines()[-1].strip())

# %% [markdown]
# We add 1 before the logarithm, she adds $10^{-5}$. For loud sounds this makes no difference. For
# the quietest ones it does. BatchNorm's epsilon is such a constant too, and libraries choose it
# differently.
#
# And what if only her processor were different? A processor with vector instructions adds the same
# numbers in parts, and then adds the parts. We do that too.


# %%
class EnergyInParts(nn.HybridBlock):
    """The same numbers, added in another order."""

    def hybrid_forward(self, F, x):
        squares = F.broadcast_mul(x, x)
        parts = [F.slice_axis(squares, axis=2, begin=at, end=at + 16) for at in (0, 16, 32)]
        parts.append(F.slice_axis(squares, axis=2, begin=48, end=None))
        return F.log(sum(F.sum(part, axis=2) for part in parts) / 61 + 1)  # 61 times


in_parts = record(EnergyInParts, "in parts")
of_rounding = diagnostics.compare_numerics(ours, in_parts)
print(of_rounding.sentence)
print(f"losses that differ: {np.sum(losses_of(in_parts) != losses_of(ours))} of 20")

# %% tags=["claim"]
assert (of_rounding.step, of_rounding.difference.id[:2]) == (1, ("activation", "1"))
assert of_rounding.difference.is_rounding
assert of_rounding.difference.relative < 8 * 2**-24
assert np.abs(losses_of(in_parts) - losses_of(ours)).max() < difference.max() / 10

# %% [markdown]
# The step and the layer are the same, but the answer is the other one: rounding can explain the
# difference, so there need not be a fault. Here the layers in FP16 round most of the difference
# away. In a larger network and a longer training it can grow until the losses differ by more than
# hers and ours do ([an example](../docs/how-to/training-got-worse.md)). So look at the first
# difference, not at the losses.
#
# ## Summary
#
# - A loss scale that falls to 1 says that no scale helps. A loss that is NaN says why: something
#   breaks in the forward pass, which the scale cannot change.
# - `OverflowLocator` (in a training run) and `locate_overflow` (for one batch) name the block and
#   the operator of the first number that is not finite.
# - `range_report` says what fits into FP16, and recommends a loss scale. It does not see numbers
#   that stay inside a layer.
# - `compare_with_fp32` ranks the layers by the error that each introduces.
# - `suggest_keep_fp32` finds by trial which blocks to keep in FP32, and `keep_fp32` keeps them
#   there.
# - When two runs begin to differ, their losses do not say why. `NumericsRecorder` and
#   `compare_numerics` name the first step and array that differ, and say whether rounding can
#   explain it.
#
# There are more tools, for memory, for shapes and for steps that went wrong on another machine:
# [see the numbers](../docs/diagnostics.md).
#
# ## Exercises
#
# Each answer is checked by running it. A solution is folded below each exercise.

# %% [markdown]
# **06.1** (level 3) Cure the layer itself. Write `energy(F, x)`, which computes the same as
# `Energy.hybrid_forward` and does not overflow in a cast network, without `keep_fp32`. (Which
# operators compute in FP32 in a cast network? [This table](../docs/reference/operators.md) says.)
# Hand in the function. The check casts a network with your function, and trains it.


# %%
def energy(F, x):
    return F.log(F.mean(F.broadcast_mul(x, x), axis=2) + 1)  # change this


answer = ...
check("06.1", answer)


# %% tags=["solution"]
def energy_of_square(F, x):
    return F.log(F.mean(F.square(x), axis=2) + 1)  # square is computed in FP32


def energy_of_small_numbers(F, x):
    small = x / 256  # fits when squared; the mean is FP32, where 256 · 256 fits
    return F.log(256 * 256 * F.mean(F.broadcast_mul(small, small), axis=2) + 1)


check("06.1", energy_of_small_numbers)
assert check("06.1", energy_of_square)

# %% [markdown]
# **06.2** (level 2) Cure the data instead: divide the sounds by a power of two before they go into
# the FP16 network, which stays as it was. Which is the smallest power of two with which no step of
# the first 60 is skipped, if the loss scale begins at 256? Hand in the number.

# %%
answer = ...
check("06.2", answer)

# %% tags=["solution"]
# The squares must stay below 65504, so the filters' results must stay below 256.
largest = np.abs(fp16_net[0](sounds).asnumpy()).max()
at_least = 2.0 ** np.ceil(np.log2(largest / 256))
print(f"the first batch needs {at_least:.0f}; other sounds are louder, and the filters grow")
divisor = at_least
while not check("06.2", divisor):
    divisor *= 2
assert check("06.2", divisor)

# %% [markdown]
# **06.3** (level 2) The recommended loss scale leaves a factor of 2 for gradients that are larger
# than those of this batch. Which power of two is the largest loss scale at which **this** batch
# (`sounds`, as above) does not overflow in the cured network before its training? Hand in the
# number.

# %%
answer = ...
check("06.3", answer)

# %% tags=["solution"]
trial = make_net(Energy)
mpgluon.cast_block(trial, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, trial[1]))
largest_scale = 1.0
while diagnostics.locate_overflow(trial, batch, loss_scale=2 * largest_scale) is None:
    largest_scale *= 2
assert check("06.3", largest_scale)

# %% [markdown]
# **06.4** (level 1) `record_with_a_fault(Energy, folder)` trains and records the cured network once
# more, with our `Energy`. But something happens to one of its layers. The losses of the first 13
# steps are the same as ours to the last bit; the later losses are not. Which layer is it? Hand in
# its name.

# %%
faulty = record_with_a_fault(Energy, Path(files.name) / "faulty")
other = np.flatnonzero(losses_of(faulty) != losses_of(ours))
print(f"the first step with another loss: {other[0] + 1}")

answer = ...
check("06.4", answer)

# %% tags=["solution"]
found = diagnostics.compare_numerics(ours, faulty)
print(found.sentence)
place = int(found.difference.id.name.partition(".")[0])
assert check("06.4", net[place].name)

# %% [markdown]
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018: section 3.2 (loss scaling) and 3.3
#   (arithmetic precision).
# - NVIDIA, "Training With Mixed Precision" user guide: choosing a scaling factor.
# - IEEE 754-2019, section 7 (invalid operation, overflow).
# - In these pages: [troubleshooting by symptom](../docs/troubleshooting.md).
#
# [← 05 Does ResNet-50 learn as well in sixteen bits?](05_resnet50_on_caltech101.ipynb) ·
# [All lessons](README.md) ·
# [07 Where does the time go, and the memory? →](07_speed_and_memory.ipynb)
