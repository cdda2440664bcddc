# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Which layer breaks in sixteen bits?
#
# A network learns in FP32 (32-bit numbers) and does not in FP16 (16-bit numbers, `"float16"` in
# code). FP16 ends at 65504. Somewhere a number was larger: it *overflowed* and became infinite. We
# plant such a fault, find it with `mpgluon.diagnostics`, and repair it.
#
# ## What you will be able to do
#
# - tell an overflow of the forward pass, which no loss scale cures, from one of the gradients;
# - find the block and the operator where the first infinite number appeared;
# - find out which blocks to keep in FP32, and check that it helps;
# - read the tables of alignment and memory.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %%
import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

import mpgluon
from mpgluon import amp, plots
from mpgluon.diagnostics import alignment, compare, exponents, memory, overflow, ranges
from mpgluon.diagnostics.observe import Batch

# %% [markdown]
# ## In FP32 the network learns
#
# Our data are short sounds with one of four pitches. As in most audio files, each number is a
# whole one between -32768 and 32767. Some sounds are quiet, some are loud.


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


sounds, pitches = make_sounds(32, seed=0)
print(f"largest number: {np.abs(sounds.asnumpy()).max():.0f}")
assert np.isfinite(sounds.asnumpy().astype("float16")).all()

# %% [markdown]
# FP16 can hold every sound. The network has four parts: 16 filters (a convolution), the *energy*
# that passes each filter (the mean of squares; the logarithm makes loud and quiet comparable), a
# hidden layer and an output layer.


# %%
class Energy(nn.HybridBlock):
    """The logarithm of the mean of squares over time."""

    def hybrid_forward(self, F, x):
        return F.log(F.mean(F.broadcast_mul(x, x), axis=2) + 1)


# %%
def make_net():
    """Return the same FP32 network each time."""
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="")
    net.add(nn.Conv1D(16, 16, strides=4, in_channels=1, use_bias=False, prefix="filters_"))
    net.add(Energy(prefix="energy_"))
    net.add(nn.Dense(32, in_units=16, activation="tanh", prefix="hidden_"))
    net.add(nn.Dense(4, in_units=32, prefix="output_"))
    net.initialize(mx.init.Xavier())
    return net


# %%
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()


def make_trainer(net, loss_scale, **options):
    settings = {"learning_rate": 0.01, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "adam", settings)
    amp.init_trainer(trainer, loss_scale, **options)
    return trainer


def accuracy_of(net):
    test_sounds, test_pitches = make_sounds(400, seed=10_000)
    found = net(test_sounds).asnumpy().argmax(axis=1)
    return np.mean(found == test_pitches.asnumpy())


# %%
def train(net, trainer, steps, history):
    """Train, and append what each step did to ``history``."""
    for step in range(steps):
        sounds, pitches = make_sounds(32, seed=step)
        scale = amp.loss_scale(trainer)
        with autograd.record():
            loss = loss_fn(net(sounds), pitches)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        event = {"step": step + 1, "loss": float(loss.mean().asscalar()), "loss_scale": scale}
        history.append({**event, "skipped": True})
        trainer.step(len(pitches))
        history[-1]["skipped"] = amp.step_was_skipped(trainer)


# %% [markdown]
# `multi_precision` and the two lines with `amp` belong to FP16 training (lessons 2 and 3): FP32
# copies of the weights, and a *loss scale*, a factor for the loss that keeps small gradients from
# becoming zero. With FP32 numbers and the loss scale `"none"` they change nothing.

# %%
steps = 60 if FAST else 150
fp32_net, fp32_history = make_net(), []
train(fp32_net, make_trainer(fp32_net, "none"), steps, fp32_history)
first, last = fp32_history[0]["loss"], fp32_history[-1]["loss"]
print(f"loss: {first:.3f} -> {last:.3f}, accuracy on new sounds: {accuracy_of(fp32_net):.1%}")
assert accuracy_of(fp32_net) > 0.9

# %% [markdown]
# ## In FP16 every step is skipped, and the loss scale collapses
#
# The same with the network cast to FP16. A dynamic loss scale starts at 65536. A step whose
# gradients are not all finite is *skipped*: the weights stay, and the scale is halved. It cannot
# fall below 1. When a number of further steps is skipped, mpgluon gives up; we ask it to do so
# after 5. This cell fails **on purpose**.

# %%
broken_net, broken_history = make_net(), []
mpgluon.cast_block(broken_net)
trainer = make_trainer(broken_net, "dynamic", max_consecutive_skips=5)
locator = overflow.OverflowLocator(broken_net, trainer)  # for later
message = ""
try:
    train(broken_net, trainer, steps, broken_history)
except mpgluon.LossScaleCollapseError as error:
    message = str(error)
print(f"after {len(broken_history)} steps: {message}")
assert "5 steps in a row had gradients that are not finite" in message
assert "nothing is being trained" in message
assert all(event["skipped"] for event in broken_history)
assert [broken_history[place]["loss_scale"] for place in (0, -1)] == [65536, 1]

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
plots.draw_loss_scale(axes, broken_history)
axes.set(xlabel="step", title="Every step is skipped; the scale falls to its smallest value")
axes.xaxis.get_major_locator().set_params(integer=True)
plt.show()

# %% [markdown]
# A loss scale that falls all the way is a sign: the gradients are not too large, they are broken.
# The message names the first *parameter* whose gradient is not finite. The cause may be elsewhere.
#
# ## The first array that is not finite shows the place
#
# By hand: we send a batch through the network layer by layer, and look at what each returns.

# %%
result, culprit = sounds, None
for layer in broken_net:
    result = layer(result)
    largest = np.abs(result.asnumpy()).max()
    print(f"{layer.name:8} {np.dtype(result.dtype).name:8} largest result {largest:.4g}")
    if culprit is None and not np.isfinite(largest):
        culprit = layer
assert culprit is broken_net[1]

# %% [markdown]
# It is `energy`. (It returns FP32, because mpgluon computes `log` in FP32. The product before it
# was FP16.) But this network is a plain chain, and a block may call many operators.
# `OverflowLocator` looks at every operator of every block. We attached one before training. It
# costs nothing while all is well. At the first skipped step it ran the network once more,
# watching.

# %%
report = locator.report
print(report)
filtered = broken_net[0](sounds).asnumpy()  # of the first step
with np.errstate(over="ignore"):  # NumPy would warn of the overflow that we expect
    squares = np.square(filtered)
print(f"by hand: {np.isinf(squares).mean():.1%} of the squares are infinite")
assert report.block == culprit.name
assert report.what == "what broadcast_mul returned"
assert report.largest_before == np.abs(filtered).max()
assert np.isfinite(filtered).all()
assert np.isinf(squares).any()

# %% [markdown]
# The report says all we need: direction (forward), operator (`broadcast_mul`, the product `x ·
# x`), block, and how large its input was. The square of that does not fit.
#
# ## No loss scale helps a forward overflow
#
# The loss scale multiplies the loss, so it moves the gradients. It does not touch the forward
# pass. Which scale would the gradients like? Look at them where nothing is broken: in the FP32
# network. From scratch: the largest gradient times $S$ has to stay below 65504, with a factor 2 to
# spare.

# %%
batch = Batch(sounds, pitches, loss_fn)  # what all diagnostics take
net = make_net()
with autograd.record():
    loss = loss_fn(net(sounds), pitches)
loss.backward()
parameter_gradients = [p.grad().asnumpy() for p in net.collect_params().values()]
largest = max(float(np.abs(gradient).max()) for gradient in parameter_gradients)
scale_by_hand = 2.0 ** np.floor(np.log2(65504 / 2 / largest))
range_report = ranges.range_report(net, batch, loss_scale=scale_by_hand)
print(range_report, "\n")
print(f"by hand {scale_by_hand:g}, recommended {range_report.recommended_loss_scale():g}")
assert range_report.recommended_loss_scale() == scale_by_hand
for scale in (2.0**-20, 1, 2.0**20):
    where = overflow.locate_overflow(broken_net, batch, loss_scale=scale)
    assert (where.direction, where.block) == ("forward", "energy")

# %% [markdown]
# Each row tells what FP16 would do to an array at that loss scale: which share of it overflows,
# which becomes zero (*underflow*), and which is *subnormal* (smaller than $2^{-14}$, with fewer
# bits). (*Largest* is the true value, without the scale. *Handed on* is what a block gives to one
# inside it, here `hidden` to its activation.) Parameters' gradients are judged, and so are the
# gradients of what layers return. With the recommended scale no gradient overflows.
#
# In the FP16 network the overflow stays in `energy` at any scale, as the last lines of the cell
# check. (`locate_overflow` is the locator for one batch, on demand.) But what every layer *returns*
# fits! The report cannot see the squares, which live inside a block. The picture shows how often
# each power of two occurs: in what layers return, in the parameters' gradients, and in those
# squares.

# %%
found, filtered = exponents.batch_exponents(net, batch).overall(), net[0](sounds).asnumpy()
histograms = {
    "results of layers": found["activations"],
    "gradients": found["gradients"],
    "squares in energy": exponents.exponent_histogram([filtered**2]),
}
figure, axes = plt.subplots(figsize=(9, 4.6), layout="constrained")
data = {name: (h.exponents, h.counts, h.zeros) for name, h in histograms.items()}
plots.draw_exponents(axes, data)
figure.suptitle("What layers return fits into FP16, the squares inside energy do not")
squares_too_large = histograms["squares in energy"].shares()["overflow"]
assert abs(squares_too_large - np.mean(filtered[filtered != 0] ** 2 >= 2.0**16)) < 1e-6
assert squares_too_large > 0.2
assert histograms["results of layers"].shares()["overflow"] == 0
plt.show()

# %% [markdown]
# Squaring doubles every exponent. That moves nearly half of the results beyond FP16's end. A loss
# scale would only move the gradients' curve.
#
# ## `compare_with_fp32` ranks the layers
#
# Overflow is the loudest error, not the only one. How far is each layer from itself in FP32?
# Errors are *relative*: the length of the difference divided by the length of the FP32 result. By
# hand for the filters: all numbers that go in are rounded to FP16, and so is the result.


# %%
def relative_error(result, reference):
    difference = result.astype("float64") - reference
    return np.linalg.norm(difference) / np.linalg.norm(reference.astype("float64"))


comparison = compare.compare_with_fp32(net, batch)
fp16_net = make_net()
mpgluon.cast_block(fp16_net)
fp16_filtered = fp16_net[0](sounds.astype("float16")).asnumpy()
by_hand = relative_error(fp16_filtered, filtered)
introduced = comparison.layers[0].introduced
print(f"{comparison}\nthe filters by hand: {by_hand:.2g}")
assert np.isclose(introduced, by_hand, rtol=1e-4)
assert introduced < mpgluon.FLOAT16.unit_roundoff
assert comparison.ranked()[0].block is net[1]

# %% [markdown]
# *Introduced* is the error that a layer makes alone, with all others in FP32: this column ranks
# them. *Output* includes what earlier layers have done; after `energy` all is infinite. The
# filters introduce less than one rounding of FP16, at most a relative error of $2^{-11}$. That is
# what a healthy layer looks like. The last two columns are errors of gradients: of what the layer
# returned, and of its parameters (0 if it has none). Every `inf` comes from `energy`, also in the
# rows of healthy layers.
#
# ## `suggest_keep_fp32` tries, and does not guess
#
# It keeps the worst block in FP32, runs the batch again, and goes on until the error is small.
# Then it drops blocks without which it is as good.

# %%
suggestion = compare.suggest_keep_fp32(net, batch)
print(suggestion)
finite = {}
for place in range(4):  # from scratch: keep one block after the other
    trial = make_net()
    mpgluon.cast_block(trial, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, trial[place]))
    found_overflow = overflow.locate_overflow(trial, batch)
    finite[trial[place].name] = found_overflow is None
print("with one block in FP32, everything is finite:", finite)
assert finite == {"filters": True, "energy": True, "hidden": False, "output": False}
assert list(suggestion.blocks) == [net[1]]
assert suggestion.error_before == np.inf
assert suggestion.error_after < 32 * mpgluon.FLOAT16.unit_roundoff

# %% [markdown]
# Two blocks are candidates, and the one that was not chosen is instructive. If the filters are kept
# in FP32, they return FP32. A product of two numbers *follows* its operands: `x · x` of FP32
# numbers is FP32, even in a cast block. The suggestion is the better choice. It leaves the
# convolution, which is most of the work, in FP16.
#
# ## Kept in FP32, it trains like FP32
#
# We begin with the recommended loss scale, so that no step is wasted on finding it.

# %%
repaired_net, repaired_history = make_net(), []
keep = (*mpgluon.NORMALIZATION_LAYERS, repaired_net[1])
print(mpgluon.cast_block(repaired_net, keep_fp32=keep))
start = mpgluon.DynamicLossScale(init_scale=range_report.recommended_loss_scale())
trainer = make_trainer(repaired_net, start)
train(repaired_net, trainer, steps, repaired_history)
print(f"accuracy: FP32 {accuracy_of(fp32_net):.1%}, repaired {accuracy_of(repaired_net):.1%}")
print(f"skipped steps: {amp.skipped_steps(trainer)} of {steps}")
assert abs(accuracy_of(repaired_net) - accuracy_of(fp32_net)) < 0.05
assert amp.skipped_steps(trainer) <= 3

# %%
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
runs = {"FP32": ("float32", fp32_history), "FP16, energy in FP32": ("float16", repaired_history)}
for first, (name, (dtype, history)) in zip((0, 5), runs.items()):
    look = {**plots.FORMAT_LOOKS[dtype], "markevery": (first, 10)}
    axes.plot(*zip(*((event["step"], event["loss"]) for event in history)), label=name, **look)
axes.set(xlabel="step", ylabel="training loss, mean of -log(p)", yscale="log")
axes.set_title("The repaired network follows the FP32 run")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Tensor Cores like multiples of 8
#
# Two more tables concern speed and memory on a GPU. Its *Tensor Cores* multiply small tiles of
# FP16 matrices at a time, with sides of 8 or a multiple. A matrix side that is no multiple of 8
# has to be padded (filled up with zeros), or a slower way is taken. `alignment_report` finds all
# matrix products of a network, and computes nothing. As an example, ResNet-18 with 101 classes.

# %%
resnet = vision.resnet18_v1(classes=101)
shape = (32, 3, 64, 64)  # images, channels, height, width
alignment_report = alignment.alignment_report(resnet, shape)
print(alignment_report)
classifier = alignment_report.products[-1]
padded_by_hand = -(-101 // 8) * 8  # rounded up
assert classifier.advice == f"classes 101 -> {padded_by_hand}"
assert classifier.multiply_adds == 32 * 512 * 101
first = alignment_report.products[0]  # 3 channels are padded to 8, in the last layer 101 to 104
assert alignment_report.padding_cost == first.multiply_adds * 5 // 3 + 32 * 512 * 3

# %% [markdown]
# A *multiply-add* is one product and one addition. *Padded* says how much work is added. For the
# classes it is little: give the last layer 104 classes, three of which never occur. The first
# layer has three channels, red, green and blue. The advice is to leave that to cuDNN, NVIDIA's
# library, or to store a fourth, empty channel, and the channels last (that order is called NHWC).
# *Depthwise* convolutions, which filter each channel by itself, are not padded; ResNet has none.
#
# ## FP16 halves what waits, not everything
#
# `memory_estimate` counts bytes of one training step from shapes alone. `ctx=mx.gpu()` asks for a
# GPU's arithmetic; no GPU is needed. We check some columns by hand. With the policy `float16`,
# which is `cast_block`, parameters of normalization layers still take four bytes each, all others
# two. Each of those has a *master*, an FP32 copy that the optimizer updates (lesson 2).

# %%
estimate = memory.memory_estimate(resnet, shape, ctx=mx.gpu())
print(estimate)
resnet.initialize()
resnet(mx.nd.zeros((1, 3, 64, 64)))  # now all shapes are known
sizes = {name: p.data().size for name, p in resnet.collect_params().items()}
norms = sum(size for name, size in sizes.items() if "batchnorm" in name)
others = sum(sizes.values()) - norms
by_policy = {one.name: one for one in estimate.policies}
fp32, fp16 = (by_policy[n] for n in ("float32", "float16"))
assert fp32.parameters == 4 * norms + 4 * others
assert fp16.parameters == 4 * norms + 2 * others
assert fp16.masters == 4 * others
assert fp16.gradients + fp16.masters == fp32.gradients + fp32.parameters - fp16.parameters
assert fp16.activations < 0.6 * fp32.activations

# %% [markdown]
# *Activations* are the results that wait for the backward pass. They are about halved, and grow
# with the batch. Parameters, gradients and masters together take exactly as much as in FP32. So
# FP16 saves most with large batches. `"mixed_float16"` is `amp.autocast`: FP32 parameters,
# computation in FP16. Its activations include FP16 copies of the weights. For BF16, the other
# 16-bit format, there is a line with the reason why MXNet cannot do it on a GPU.
#
# ## Summary
#
# - A loss scale that falls to its smallest value means broken numbers, here of the forward pass,
#   and not merely large gradients.
# - `OverflowLocator` names block and operator of the first array that is not finite.
# - `range_report` recommends a loss scale; it judges what layers return, not what is inside them.
# - `compare_with_fp32` ranks the layers by the error that each introduces.
# - `suggest_keep_fp32` finds what to keep in FP32; `keep_fp32` does it.
# - `alignment_report` and `memory_estimate` tell what FP16 wants on a GPU, without one.
#
# ## Exercises
#
# 1. Write `F.square(x)` instead of `F.broadcast_mul(x, x)`, and cast everything. mpgluon computes
#    `square` in FP32. How many steps are skipped? (Expected: fewer than ten at the beginning,
#    until the scale fits; then none.)
# 2. Repair the network without `keep_fp32`: divide the sounds by a power of two before they go in.
#    Which power do you need? (Expected: some hundreds.)
# 3. How much memory does the float16 policy save, in percent, with a batch of 8? And with 256?
#    (Expected: a few percent; then tens of percent.)
#
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018: section 3.2 (loss scaling) and 3.3
#   (arithmetic precision).
# - NVIDIA, "Training With Mixed Precision" user guide: choosing a scaling factor, and the rules
#   for sizes that are multiples of 8.
# - IEEE 754-2019, section 7.4 (overflow).
