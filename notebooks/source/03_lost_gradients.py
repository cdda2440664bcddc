# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Where do small gradients go?
#
# A network that learns well in FP32 (`float32`) can stop learning in FP16 (`float16`). Nothing
# fails and no message appears: its smallest gradients have become zero on the way. In this lesson
# you find them, and bring them back with one multiplication.
#
# ![Two histograms of gradients over powers of two, with the range of FP16 behind them. Above, the
# gradients as they are: most lie in front of the range and become zero. Below, the gradients of the
# loss times S: the same histogram, moved to the right, lies within the range. They are divided by S
# in FP32, inside the update.](figures/03_loss_scale.svg)
#
# The drawing, a sketch, shows the whole lesson. At the top, most gradients are too small for FP16:
# they lie to the left of its range. Multiply the loss by a **loss scale** $S$, and all gradients
# move into the range together. The backward pass computes them there. Then the optimizer divides
# them by $S$ in FP32, which can hold the small numbers.
#
# ## What you will be able to do
#
# - read a histogram of gradients, and say which of them FP16 would lose;
# - scale a loss by hand, and undo the scaling in the one place where nothing is lost;
# - let the scale adapt by itself, and recognise a healthy run by its skipped steps.
#
# You should have written a training loop with `autograd.record`, `backward` and `trainer.step`.
# Everything runs on a CPU.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %% tags=["setup"]
import sys

sys.path.append("..")  # recipes/ and study/ are beside this folder

import mpgluon
from mpgluon import amp
from mpgluon.diagnostics import Batch, batch_exponents, range_report
from mpgluon.tools import plots

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from recipes.data.shapes import class_names, render_image
from recipes.training.networks import build_network
from teaching import check, widget

IMAGES_PER_CLASS, EPOCHS = (8, 8) if FAST else (16, 10)

# %% [markdown]
# ## FP16 rounds small numbers to zero
#
# A floating-point number is $m \times 2^e$ with $1 \le m < 2$. The **exponent** $e$ tells how large
# it is, and FP16 has only 5 bits for it. From small to large, there are four ranges:
#
# | magnitude | name | what FP16 does |
# |---|---|---|
# | below $2^{-24}$ | lost | makes it 0 (or $2^{-24}$, if that is nearer) |
# | $2^{-24}$ to $2^{-14}$ | subnormal | keeps it, with fewer digits the smaller it is |
# | $2^{-14}$ to 65520 | normal | keeps it with 11 binary digits |
# | from 65520 | too large | makes it infinite: it **overflows** (65504 is the last number) |
#
# We take one number in each power of two, $1.3 \times 2^e$, and let FP16 round it.

# %%
exponents = np.arange(-30, 18)
exact = 1.3 * 2.0**exponents
with np.errstate(over="ignore"):  # the largest become infinite
    in_fp16 = exact.astype(np.float16).astype(float)
errors = np.abs(in_fp16 - exact) / exact

print("exact value   in FP16    relative error")
for e in (-10, -14, -20, -24, -26):
    print(f"1.3 x 2^{e}{in_fp16[e + 30]:12.3g} {errors[e + 30]:14.2%}")

# %% tags=["plot"] alt="FP16's relative error at each exponent: tiny, then doubling, then 100 %"
figure, axes = plt.subplots(figsize=(6.2, 3.6), layout="constrained")
finite = np.isfinite(in_fp16)
axes.semilogy(
    exponents[finite], 100 * errors[finite], **{**plots.FORMAT_LOOKS["float16"], "linestyle": ""}
)
for edge in (-24, -14, 16):
    axes.axvline(edge - 0.5, color="black", linewidth=1)
for middle, name in ((-27.5, "lost"), (-19.5, "subnormal"), (0.5, "normal"), (18.5, "too large")):
    axes.text(middle, 300, name, ha="center")
axes.set(xlim=(-30.5, 21.5), ylim=(0.005, 800), xlabel="exponent e", ylabel="relative error (%)")
axes.yaxis.set_major_formatter("{x:g}")
axes.set_title("FP16 loses a small number digit by digit,\nand then altogether")
plt.show()

# %% tags=["claim"]
error_of = dict(zip(exponents.tolist(), errors))
assert max(error_of[-10], error_of[-14]) < 2.0**-11  # normal: at most half of the last digit
assert 2.0**-11 < error_of[-20] < error_of[-24] < error_of[-26] == 1  # subnormal, and lost
assert np.isfinite(in_fp16).tolist() == (exponents < 16).tolist()

# %% [markdown]
# From normal to lost the change is gradual. Between them lie ten powers of two, and in each a
# number has one binary digit less. At the other end the change is sudden: 65504 is followed by
# infinity.
#
# ## Gradients are much smaller than weights
#
# We need data and a network: pictures of ten shapes on noisy backgrounds, shrunk to 32 x 32 pixels,
# and a ResNet with 20 layers for images of that size.

# %% tags=["setup"]
pixels, labels = [], []
for number in range(IMAGES_PER_CLASS * 10):
    drawing = render_image(number % 10, number // 10).convert("RGB").resize((32, 32))
    pixels.append(np.asarray(drawing).transpose(2, 0, 1) / 127.5 - 1)  # from -1 to 1
    labels.append(number % 10)
images, labels = mx.nd.array(pixels), mx.nd.array(labels, dtype="int32")
batches = [(images[i : i + 40], labels[i : i + 40]) for i in range(0, len(images), 40)]

# %% tags=["plot"] alt="One picture of each class, from disc and square to arrow and heart"
figure, axes = plt.subplots(2, 5, figsize=(6.2, 3.2), layout="constrained")
for place, name, picture in zip(axes.flat, class_names(), pixels):
    place.imshow((picture.transpose(1, 2, 0) + 1) / 2)
    place.set_title(name, fontsize="medium")
    place.axis("off")
figure.suptitle("The first image of each class")
plt.show()

# %%
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def mean_loss(logits, labels):
    return cross_entropy(logits, labels).mean()


def make_network():
    mx.random.seed(0)  # the same initial weights every time
    return build_network("cifar_resnet20_v1", classes=10, image_size=32, devices=[mx.cpu()])


net = make_network()
print(f"{sum(p.data().size for p in net.collect_params().values()):,} parameters")

# %% [markdown]
# `cross_entropy` gives one loss for each image. We take their mean ourselves. So gradients are
# already divided by the number of images, and each step will be `trainer.step(1)`.
#
# First we use NumPy: we run one batch in FP32, take the gradient of every weight, and count how
# many lie in each of FP16's ranges.

# %%
with autograd.record():
    loss = mean_loss(net(batches[0][0]), batches[0][1])
loss.backward()
trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
values = np.concatenate([np.abs(p.grad().asnumpy()).ravel() for p in trained])
values = values[values != 0]  # a zero has no exponent
by_hand = {
    "lost": np.mean(values < 2.0**-24),
    "subnormal": np.mean((values >= 2.0**-24) & (values < 2.0**-14)),
    "normal": np.mean((values >= 2.0**-14) & (values < 2.0**16)),
    "overflow": np.mean(values >= 2.0**16),
}
print({name: f"{share:.2%}" for name, share in by_hand.items()})

# %% [markdown]
# Then we do the same with mpgluon, which also finds numbers that NumPy code cannot reach: the
# **activation gradients**. These are the gradients of the loss with respect to the results
# (*activations*) of the layers. The backward pass computes them layer by layer, and the weights'
# gradients from them. A `Batch` is what mpgluon needs to run the network: images, labels and the
# loss function.

# %%
first_batch = Batch(*batches[0], mean_loss)
untrained = batch_exponents(net, first_batch)
print(untrained)

# %% tags=["claim"]
of_weights = untrained.overall()["weights"].shares()
of_gradients = untrained.overall()["gradients"].shares()
before = untrained.overall()["activation gradients"]
assert of_gradients == by_hand
assert before.shares()["normal"] < of_gradients["normal"] < of_weights["normal"]

# %% [markdown]
# Compare the rows. Weights and activations fit FP16 well. Activation gradients do not: a large part
# of them is subnormal even before training. (The column *zero* is the share of true zeros among all
# numbers; the other columns are shares of the rest. ReLU makes zeros, and FP16 holds them exactly.)
#
# ## The better a network gets, the smaller its gradients
#
# At the minimum of the loss, the gradient is zero. On the way there gradients shrink, and more and
# more of them become too small for FP16. We train in FP32 and look again. (Leave the argument
# `weight` at 1 for now; a later section needs it.)


# %%
def train_fp32(net, weight=1.0):
    """Train on ``weight`` times the loss; return the mean loss of each epoch."""
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": 0.01 / weight, "momentum": 0.9}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    curve = np.zeros(EPOCHS)
    for epoch in range(EPOCHS):
        for batch_images, batch_labels in batches:
            with autograd.record():
                loss = mean_loss(net(batch_images), batch_labels)
                weighted_loss = loss * weight
            weighted_loss.backward()
            trainer.step(1)
            curve[epoch] += loss.asscalar() / len(batches)
    mx.nd.waitall()  # MXNet works in the background; wait before you look into a network
    return curve


# %%
net = make_network()
fp32_curve = train_fp32(net)
print(f"loss: {fp32_curve[0]:.2f} in the first epoch, {fp32_curve[-1]:.2f} in the last")

before = untrained.overall()["activation gradients"]
after = batch_exponents(net, first_batch).overall()["activation gradients"]
lost_before, lost_after = before.shares()["lost"], after.shares()["lost"]
print(f"lost in FP16: {lost_before:.2%} before training, {lost_after:.2%} after")
for histogram in (before, after):
    shares = np.cumsum(histogram.counts) / histogram.counts.sum()
    first, last = histogram.exponents[np.searchsorted(shares, (0.01, 0.99))]
    print(f"98 % of them have an exponent from {first} to {last}")

# %% tags=["plot"] alt="Histograms before and after training: the second lies further left"
figure, axes = plt.subplots(figsize=(6.2, 4.2), layout="constrained")
plots.draw_exponents(axes, {"before training": before, "after training": after})
figure.suptitle("Training moves the activation gradients to the left")
plt.show()

# %% tags=["claim"]
assert fp32_curve[-1] < fp32_curve[0]
assert lost_after > 2 * lost_before
assert after.counts[after.exponents >= -4].sum() < 0.01 * after.counts.sum()
widths = []
for histogram in (before, after):
    shares = np.cumsum(histogram.counts) / histogram.counts.sum()
    widths.append(np.diff(np.searchsorted(shares, (0.01, 0.99))))
assert abs(widths[0] - widths[1]) <= 3

# %% [markdown]
# Notice two things. The histogram has moved to the left and is about as wide as before. And there
# is hardly a number from $2^{-4}$ up to $2^{16}$, which is half of the forty powers of two that
# FP16 has. That is the idea of this lesson: the gradients are not too *different* for FP16, they
# are in the wrong *place*.
#
# ## One multiplication moves all gradients
#
# The gradient of $S \cdot \text{loss}$ is $S$ times the gradient of the loss. This holds for
# activation gradients too, because the backward pass of each layer is linear in the gradient that
# it receives. So one multiplication, before `backward`, moves every gradient. We take a power of
# two for $S$: then only exponents change, and nothing is rounded.
#
# Find a good $S$ yourself. These are the activation gradients of the trained network. How far can
# you move them before the first one overflows?

# %% tags=["plot"]
widget("loss_scale", counts={int(e): int(n) for e, n in zip(after.exponents, after.counts) if n})

# %% [markdown]
# (In this figure *zero* begins below $2^{-25}$: a number between $2^{-25}$ and $2^{-24}$ is rounded
# up to $2^{-24}$. The histograms of mpgluon count such a number as lost too, since no digit of the
# result is right.)
#
# Another [figure to play with](../docs/play.md#gradients-under-a-loss-scale) shows the same with a
# ResNet-50 and with formats of 16, 8 and 4 bits.
#
# mpgluon finds the largest power of two at which no gradient of this batch overflows, and leaves a
# factor of two for other batches. We run the backward pass once more, this time with
# $S \cdot \text{loss}$.

# %%
S = range_report(net, first_batch).recommended_loss_scale()
scaled_batch = Batch(*batches[0], lambda logits, labels: S * mean_loss(logits, labels))
scaled = batch_exponents(net, scaled_batch).overall()["activation gradients"]
print(f"S = 2^{np.log2(S):.0f}: {scaled.shares()['lost']:.3%} lost, without it {lost_after:.1%}")

# %% tags=["plot"] alt="The same histogram twice; times S it lies in the normal numbers"
figure, axes = plt.subplots(figsize=(6.2, 4.2), layout="constrained")
plots.draw_exponents(axes, {"activation gradients": after}, loss_scale=S)
figure.suptitle(
    f"Multiplying the loss by $2^{{{np.log2(S):.0f}}}$ moves all of them into the range"
)
plt.show()

# %% tags=["claim"]
assert (scaled.counts == after.times(S).counts).all()
assert scaled.shares()["lost"] < lost_after / 10
assert scaled.shares()["overflow"] == 0

# %% [markdown]
# The real backward pass of $S \cdot \text{loss}$ gives the old histogram, moved along the axis:
# each count is the same.
#
# ## The division belongs in the optimizer
#
# Updates must not be $S$ times too large, so the gradients have to be divided by $S$ again.
# Dividing the FP16 gradient itself is tempting, but wrong: the quotient has to fit into FP16 again,
# and that was the problem.

# %%
scale = 2.0**16
true_gradient = 1.5 * 2.0**-26  # too small for FP16
fp16_gradient = np.float16(true_gradient * scale)  # what the backward pass leaves
# FP16 cannot hold 2^16, so we divide by 2^8 twice.
divided_in_fp16 = fp16_gradient / np.float16(2.0**8) / np.float16(2.0**8)
divided_in_fp32 = np.float32(fp16_gradient) / np.float32(scale)
print(f"divided in FP16: {divided_in_fp16}")
print(f"divided in FP32: {divided_in_fp32}")

# %% [markdown]
# MXNet's optimizers can already divide in FP32. With `multi_precision=True` they keep an FP32 copy
# of each weight, its **master weight** ([lesson 02](02_lost_updates.ipynb)). They convert the
# gradient to FP32, multiply it by their argument `rescale_grad`, and update the master. So
# `rescale_grad` is the right place for $1/S$.

# %%
weight, gradient = mx.nd.zeros(1, dtype="float16"), mx.nd.array([fp16_gradient], dtype="float16")
sgd = mx.optimizer.SGD(learning_rate=1.0, rescale_grad=1 / scale, multi_precision=True)
state = sgd.create_state_multi_precision(0, weight)
sgd.update_multi_precision(0, weight, gradient, state)
master = state[1].asscalar()
print(f"master weight after one step from 0: {master}")

# %% tags=["claim"]
assert divided_in_fp16 == 0
assert master == -true_gradient == -divided_in_fp32

# %% [markdown]
# You know `rescale_grad` already: `trainer.step(n)` sets it to $1/n$. So **loss scaling by hand**
# needs one new line and two changed ones. The product is computed inside `autograd.record`, as the
# loss is:
#
# ```diff
#  with autograd.record():
#      loss = mean_loss(net(images), labels)
# +    scaled_loss = S * loss
# -loss.backward()
# -trainer.step(1)
# +scaled_loss.backward()
# +trainer.step(S)
# ```
#
# With a fixed $S$ this is *static* loss scaling. Scales from 8 to 32768 have worked, and you have
# to try which one works for you. If $S$ is too small, gradients are lost; if it is too large, they
# overflow.
#
# ## The scale can find its own level
#
# An overflow is easy to detect: an infinity in the backward pass spreads to what is computed from
# it, and ends in the gradients as infinity or NaN. So we can try a large scale and see. *Dynamic*
# loss scaling keeps $S$ as large as possible:
#
# - If the gradients are not all finite, **skip** this step, and halve $S$ for the next one.
# - If they were finite for `growth_interval` steps in a row, double $S$.
#
# This rule needs only plain numbers. Here it is in Python. Below it, we compare it with mpgluon's
# rule: both must agree.


# %%
def next_scale(scale, good_steps, finite, growth_interval):
    if not finite:
        return max(scale / 2, 1.0), 0
    if good_steps + 1 == growth_interval:
        return min(scale * 2, 2.0**24), 0  # mpgluon goes no further by default
    return scale, good_steps + 1


# %%
dynamic = mpgluon.DynamicLossScale(init_scale=2.0**16, growth_interval=5)
by_hand, with_mpgluon = [(2.0**16, 0)], [(2.0**16, 0)]
for finite in np.random.default_rng(0).random(200) < 0.9:  # one step in ten overflows
    by_hand.append(next_scale(*by_hand[-1], finite, growth_interval=5))
    dynamic.update(grads_finite=bool(finite))
    with_mpgluon.append((dynamic.scale, dynamic.growth_tracker))
print(f"in 200 steps S was between {min(by_hand)[0]:.0f} and {max(by_hand)[0]:.0f}")
print("by hand and with mpgluon the same:", by_hand == with_mpgluon)

# %% tags=["claim"]
assert by_hand == with_mpgluon

# %% [markdown]
# ## Three lines of `amp` do the same, bit for bit
#
# In a training loop mpgluon needs three lines: `amp.init_trainer` gives the Trainer a loss scale,
# and `amp.scale_loss`, with `backward` inside it, multiplies the loss by that scale. `trainer.step`
# then divides by the scale, or skips the step:
#
# ```diff
#  trainer = gluon.Trainer(net.collect_params(), "sgd", options)
# +amp.init_trainer(trainer)
#
#  for images, labels in batches:
#      with autograd.record():
#          loss = mean_loss(net(images), labels)
# -    loss.backward()
# +        with amp.scale_loss(loss, trainer) as scaled_loss:
# +            autograd.backward(scaled_loss)
#      trainer.step(1)
# ```
#
# A common mistake is to leave out the first line. Let us make this mistake on purpose.

# %%
trainer = gluon.Trainer(make_network().collect_params(), "sgd", {"learning_rate": 0.01})
message = ""
try:
    with amp.scale_loss(loss, trainer):
        pass
except mpgluon.TrainerStateError as error:
    message = str(error)
print(f"TrainerStateError: {message}")

# %% [markdown]
# Now we run both loops, by hand and with `amp`, on the network in FP16. `mpgluon.cast_block` casts
# its weights, except those of BatchNorm. The network still returns FP32 results, so the loss is
# FP32. In the loop by hand, `init_trainer` with `"none"` asks for no scaling. It is there so that
# both loops begin with the same master weights, those from before the cast.


# %%
def make_fp16(loss_scale, weight=1.0):
    """Return the network in FP16 and its Trainer."""
    net = make_network()
    mpgluon.cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": 0.01 / weight, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, loss_scale)
    return net, trainer


def all_finite(net):
    gradients = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
    return all(np.isfinite(gradient.asnumpy()).all() for gradient in gradients)


# %%
hand_net, hand_trainer = make_fp16("none")
scale, good_steps, skipped = 2.0**19, 0, 0
for step in range(8):
    batch_images, batch_labels = batches[step % len(batches)]
    with autograd.record():
        scaled_loss = mean_loss(hand_net(batch_images), batch_labels) * scale
    scaled_loss.backward()
    finite = all_finite(hand_net)
    if finite:
        hand_trainer.step(scale)
    scale, good_steps = next_scale(scale, good_steps, finite, growth_interval=2)
    skipped += not finite
print(f"by hand:  skipped {skipped} of 8 steps, S = {scale:.0f}")

# %%
amp_net, amp_trainer = make_fp16(mpgluon.DynamicLossScale(init_scale=2.0**19, growth_interval=2))
for step in range(8):
    batch_images, batch_labels = batches[step % len(batches)]
    with autograd.record():
        loss = mean_loss(amp_net(batch_images), batch_labels)
        with amp.scale_loss(loss, amp_trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    amp_trainer.step(1)
skipped_by_amp, amp_scale = amp.skipped_steps(amp_trainer), amp.loss_scale(amp_trainer)
print(f"with amp: skipped {skipped_by_amp} of 8 steps, S = {amp_scale:.0f}")

pairs = list(zip(hand_net.collect_params().values(), amp_net.collect_params().values()))
equal = sum((a.data().asnumpy() == b.data().asnumpy()).all() for a, b in pairs)
print(f"{equal} of {len(pairs)} arrays of parameters are equal, bit for bit")

# %% tags=["claim"]
assert "call amp.init_trainer(trainer)" in message
assert 0 < skipped_by_amp == skipped < 8
assert amp_scale == scale
assert equal == len(pairs)

# %% [markdown]
# ## The learning rate stays as it was
#
# Some losses are small from the start: a mean over all pixels of an image, or one term of many with
# a small weight. We imitate such a loss. We multiply our loss by $2^{-12}$, as a mean over 64 x 64
# pixels would, and the learning rate by $2^{12}$ in return. In FP32 that changes nothing at all:
# scaling by a power of two is exact, and every weight is the same as before, bit for bit.

# %%
small_net = make_network()
small_curve = train_fp32(small_net, weight=2.0**-12)
pairs = list(zip(net.collect_params().values(), small_net.collect_params().values()))
identical = all((a.data().asnumpy() == b.data().asnumpy()).all() for a, b in pairs)
print(f"{len(pairs)} arrays of parameters, all bit-identical: {identical}")

# %% [markdown]
# Now we train in FP16: on the loss itself without a loss scale, then on the small loss without and
# with one. Learning rate, momentum and number of epochs are those of the FP32 runs.


# %%
def train_fp16(net, trainer, weight=1.0):
    """Return the mean loss of each epoch, and what happened to the scale in each step."""
    curve, events = np.zeros(EPOCHS), []
    for epoch in range(EPOCHS):
        for batch_images, batch_labels in batches:
            events.append({"step": len(events) + 1, "loss_scale": amp.loss_scale(trainer)})
            with autograd.record():
                loss = mean_loss(net(batch_images), batch_labels)
                with amp.scale_loss(loss * weight, trainer) as scaled_loss:
                    autograd.backward(scaled_loss)
            trainer.step(1)
            events[-1]["skipped"] = amp.step_was_skipped(trainer)
            curve[epoch] += loss.asscalar() / len(batches)
    return curve, events


# %%
own_curve, _ = train_fp16(*make_fp16("none"))
without_scale, _ = train_fp16(*make_fp16("none", weight=2.0**-12), weight=2.0**-12)
with_scale, _ = train_fp16(*make_fp16("dynamic", weight=2.0**-12), weight=2.0**-12)
print("loss in the last epoch")
print(f"FP32                                {fp32_curve[-1]:6.3f}")
print(f"FP16, no scale                      {own_curve[-1]:6.3f}")
print(f"FP16, no scale, the small loss      {without_scale[-1]:6.3f}")
print(f"FP16, loss scale, the small loss    {with_scale[-1]:6.3f}")

# %% tags=["plot"] alt="Loss curves: FP16 with a loss scale falls like FP32, without one less"
figure, axes = plt.subplots(figsize=(6.2, 4.2), layout="constrained")
epochs, fp16 = range(1, EPOCHS + 1), plots.FORMAT_LOOKS["float16"]
axes.plot(epochs, fp32_curve, **plots.FORMAT_LOOKS["float32"])
axes.plot(epochs, with_scale, **{**fp16, "markersize": 10, "markerfacecolor": "none"})
axes.plot(epochs, without_scale, **{**fp16, "linestyle": ":", "marker": "x"})
middle = EPOCHS // 2
axes.annotate("FP16 without a loss scale", (middle + 0.5, without_scale[middle] + 0.15))
axes.annotate(
    "FP32 (black) and FP16 with a\nloss scale (squares) coincide",
    (middle + 0.5, fp32_curve[middle] + 0.2),
)
axes.set(xlabel="epoch", ylabel="training loss (mean of the epoch)", ylim=(0, None))
axes.set_title("The small loss: FP16 needs a loss scale,\nand no new learning rate")
plt.show()

# %% tags=["claim"]
assert identical
assert (small_curve == fp32_curve).all()
assert np.abs(with_scale - fp32_curve).max() < 0.1 * fp32_curve[0]
assert without_scale[-1] > 1.5 * fp32_curve[-1]
assert abs(own_curve[-1] - fp32_curve[-1]) < 0.1 * abs(without_scale[-1] - fp32_curve[-1])

# %% [markdown]
# The squares lie on the FP32 line. After the division the gradients are the true ones, so nothing
# that was tuned in FP32 has to be tuned again. The dotted run got the same images and the same
# learning rate, but some of its gradients were zero.
#
# Look at the second row of the numbers too: on the loss itself, this network learns in FP16 without
# a scale. For a network of yours you cannot know that beforehand. So use a loss scale in any case:
# it costs little.
#
# ## A skipped step now and then is a healthy sign
#
# Let us watch the scale of a run on the loss itself (not the small one). It begins at $2^{24}$, far
# too large on purpose. It may grow after 4 good steps, so that we see it happen. For real runs
# `growth_interval` is 2000.

# %%
growing = mpgluon.DynamicLossScale(init_scale=2.0**24, growth_interval=4)
_, events = train_fp16(*make_fp16(growing))
print(f"{sum(event['skipped'] for event in events)} of {len(events)} steps were skipped")

# %% tags=["plot"] alt="The loss scale of each step; it falls, climbs, and is halved at skips"
figure, axes = plt.subplots(figsize=(6.2, 3.6), layout="constrained")
plots.draw_loss_scale(axes, events)
axes.set_xlabel("step")
axes.set_title("S falls until it fits,\nthen grows until it meets the ceiling again")
plt.show()

# %% tags=["claim"]
scales = [event["loss_scale"] for event in events]
falls = [later < earlier for earlier, later in zip(scales, scales[1:])]
assert falls == [event["skipped"] for event in events[:-1]]  # S falls where a step was skipped
assert events[0]["skipped"]  # it was too large ...
assert max(np.diff(scales)) > 0  # ... and it grew later

# %% [markdown]
# At first each step is skipped, until $S$ is small enough: no weight changes, and each try costs
# one batch. Then $S$ grows until it meets its ceiling, where the largest gradient times $S$
# overflows. As gradients shrink in training, the ceiling rises. A skip now and then shows that $S$
# has reached it.
#
# If skips never end, the run is not healthy. Then something is infinite at every scale, and
# [lesson 06](06_reading_the_diagnostics.ipynb) finds it.

# %% [markdown]
# ## Summary
#
# - Numbers below $2^{-25}$, half of the smallest FP16 number, become zero in FP16. Activation
#   gradients become so small first, and the better the network, the more of them.
# - Multiply the loss by a power of two $S$ before `backward`: all gradients move together, exactly.
# - Divide by $S$ in FP32, inside the optimizer (`rescale_grad`). Never divide the FP16 gradient.
# - Dynamic scaling halves $S$ and skips the step when a gradient overflows, and doubles $S$ after
#   many steps without an overflow. With `amp` that is `init_trainer`, `scale_loss` and your old
#   `step`.
# - The optimizer gets the same gradients as in FP32: keep your hyperparameters.
#
# [Lesson 09](09_a_loop_of_your_own.ipynb) adds clipping, accumulation and several losses to this
# loop.

# %% [markdown]
# ## Exercises

# %% [markdown]
# **03.1** (level 1) A loss scale is as large as it can be: multiplied by it, the largest gradient
# is 60000. Now you take the sum of the 40 losses of a batch instead of their mean. By which number
# do you have to divide $S$? Hand in the smallest one that works with mpgluon.

# %%
answer = ...
check("03.1", answer)

# %% tags=["solution"]
# The sum is 40 times the mean, and so is each gradient. S must stay a power of two, so it is
# divided by one. 32 is not enough: 60000 x 40 / 32 is 75000, which FP16 cannot hold.
largest = 60000
divisor = 1
while largest * 40 / divisor > 65504:
    divisor *= 2
assert check("03.1", divisor)

# %% [markdown]
# **03.2** (level 2) A run of 3,000 steps begins with $S = 2^{16}$. Its gradients would not overflow
# with $S = 2^{20}$ either. With the default `growth_interval=2000`, $S$ does not get there. Hand in
# the largest `growth_interval` with which $S$ gets there in the first 1,000 steps.

# %%
answer = ...
check("03.2", answer)

# %% tags=["solution"]
# From 2^16 to 2^20 the scale doubles four times, each time after one interval of good steps.
# Short runs need a short interval: `recipes.training.train` takes a tenth of the run by default.
doublings = 20 - 16
assert check("03.2", 1000 // doublings)

# %% [markdown]
# **03.3** (level 3) Write one step of loss scaling by hand, without `amp`. The function below is a
# step without loss scaling. It receives a network in FP16, a function `loss_of(net)` that returns
# its (very small) loss, a Trainer with `multi_precision=True`, and $S$. It returns the $S$ of the
# next step. Change it so that small gradients survive, the weights move as far as in FP32, and a
# step that overflows is skipped and halves $S$. ($S$ need not grow.) Then hand in the function.


# %%
def one_step(net, loss_of, trainer, S):
    with autograd.record():
        loss = loss_of(net)
    loss.backward()
    trainer.step(1)
    return S


answer = ...
check("03.3", answer)


# %% tags=["solution"]
def one_scaled_step(net, loss_of, trainer, S):
    with autograd.record():
        scaled_loss = loss_of(net) * S  # all gradients become S times as large
    scaled_loss.backward()
    if not all_finite(net):
        return S / 2  # the step is skipped: no weight is touched
    trainer.step(S)  # the optimizer divides by S in FP32
    return S


assert check("03.3", one_scaled_step)

# %% [markdown]
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2 (loss scaling, with
#   scales from 8 to 32768, and a histogram of activation gradients).
# - NVIDIA, "Training With Mixed Precision" user guide, section "Choosing A Scaling Factor".
# - IEEE 754-2019, "Standard for Floating-Point Arithmetic", section 3.6 (binary16), 4.3 (rounding)
#   and 7.4 (overflow).

# %% [markdown]
# [← 02 Why does a network in 16 bits need a copy of its weights in 32?](02_lost_updates.ipynb) ·
# [All lessons](README.md) ·
# [04 What happens to a network that is cast to sixteen bits? →](04_casting_a_network.ipynb)
