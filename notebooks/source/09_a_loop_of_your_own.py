# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # What changes in a training loop of your own?
#
# The loop of [lesson 03](03_lost_gradients.ipynb) has one loss, one Trainer and one step for each
# batch. Yours may clip its gradients, collect them over several batches, or train two networks
# against each other. Each of these needs a few more lines. This lesson shows which lines, and where
# they go. Between `amp.scale_loss` and the update, all gradients are multiplied by the loss scale
# $S$, so the place of each line matters.
#
# ![A training step as boxes and arrows: forward, one loss or two, scale_loss, backward, gradients
# times S; from there back to forward while parts of a batch accumulate, then clip_global_norm and
# trainer.step, which updates the masters if all gradients are finite, and otherwise skips and
# halves S.](figures/09_loop.svg)
#
# Follow the arrows. From `scale_loss` to the update, every gradient is $S$ times too large. Two
# losses are scaled together in `scale_loss`. The gradients of the parts of a batch are added up.
# Clipping comes last, before the step, which divides by $S$.
#
# ## What you will be able to do
#
# - read and log gradients in true units, while a loss scale is at work;
# - say why an FP16 gradient must not be divided, and what to do instead;
# - clip by the norm, and collect the gradients of several batches for one step, in the right order;
# - train with two losses, with two Trainers, and with both;
# - write NVIDIA's loop with masters and a scale by hand, and in three lines;
# - do all of this in MXNet's NumPy interface.
#
# You should know the loss scale (lesson 03) and master weights
# ([lesson 02](02_lost_updates.ipynb)). FP16 and FP32 stand for `float16` and `float32`. Everything
# runs on a CPU.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %% tags=["setup"]
import sys

sys.path.append("..")  # recipes/ and study/ are beside this folder

import mpgluon
from mpgluon import amp
from mpgluon.tools import plots

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from recipes.data.shapes import render_image
from teaching import check

EPOCHS, GAN_STEPS = (3, 150) if FAST else (10, 300)

pixels = [
    np.asarray(render_image(number % 10, number // 10).convert("RGB").resize((32, 32)))
    for number in range(160)
]
all_images = mx.nd.array(np.stack(pixels).transpose(0, 3, 1, 2) / 127.5 - 1)
all_labels = mx.nd.array(np.arange(160) % 10, dtype="int32")


def cut(size):
    """Return all images and labels in batches of a size."""
    starts = range(0, len(all_images), size)
    return [(all_images[i : i + size], all_labels[i : i + size]) for i in starts]


def make_network():
    mx.random.seed(0)  # the same initial weights every time
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():  # the same names every time
        net.add(gluon.nn.Conv2D(16, 3, strides=2, in_channels=3, activation="relu"))
        net.add(gluon.nn.Conv2D(32, 3, strides=2, in_channels=16, activation="relu"))
        net.add(gluon.nn.Dense(10, in_units=32 * 7 * 7))
    net.initialize(mx.init.Xavier())
    return net


def norm_of(arrays):
    return float(np.sqrt(sum((array.asnumpy().astype(float) ** 2).sum() for array in arrays)))


# %% [markdown]
# ## The loop of lesson 03 is the frame
#
# The images are the ten shapes of lesson 03, and the network is a small one: two convolutions and a
# dense layer. `new_run` casts it and makes its Trainer. The loss scale begins at $2^{10}$, where
# nothing overflows, because we look at single steps.

# %%
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
batches = cut(40)


def new_run(loss_scale=2.0**10, cast=mpgluon.cast_block):
    net = make_network()
    cast(net)
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": 0.05, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, mpgluon.DynamicLossScale(init_scale=loss_scale))
    return net, trainer


# %%
net, trainer = new_run()
losses, norms = [], []
for images, labels in batches * EPOCHS:
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(len(labels))
    losses.append(loss.mean().asscalar())
    norms.append(amp.gradient_norm(trainer))
print(f"{len(losses)} steps, {amp.skipped_steps(trainer)} of them skipped")
print(f"loss of the first batch {losses[0]:.2f}, of the last {losses[-1]:.2f}")

# %% tags=["claim"]
assert np.mean(losses[-4:]) < np.mean(losses[:4])

# %% [markdown]
# One thing differs from lesson 03, though not because of 16 bits. `loss_fn` returns one loss for
# each image. `backward` adds up their gradients, and `trainer.step(len(labels))` divides by their
# number. This is usual in Gluon, and below it will make it easy to cut a batch into parts.
#
# (The docs have this loop with all its choices: [Your own loop](../docs/how-to/own-loop.md).)
#
# ## Until the step, gradients are $S$ times too large
#
# Suppose that you want to log the largest gradient of each layer. `parameter.grad()` would give
# numbers that are $S$ times too large, and that jump whenever $S$ changes. `amp.unscaled_gradients`
# returns copies in FP32, divided by $S$:
#
# ```diff
#          with amp.scale_loss(loss, trainer) as scaled_loss:
#              autograd.backward(scaled_loss)
# +    gradients = amp.unscaled_gradients(trainer)
#      trainer.step(len(labels))
# ```

# %%
net, trainer = new_run()
for images, labels in batches[:1]:
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    gradients = amp.unscaled_gradients(trainer)
    trainer.step(len(labels))

print(f"{'':18} largest in grad()   largest true one")
by_hand = {}
for parameter in net.collect_params().values():
    raw, true = parameter.grad().asnumpy(), gradients[parameter.name].asnumpy()
    by_hand[parameter.name] = raw.astype("float32") / 2**10  # first widened, then divided
    print(f"{parameter.name:18} {np.abs(raw).max():17.2f} {np.abs(true).max():18.5f}")

# %% tags=["claim"]
assert {p.grad().dtype for p in net.collect_params().values()} == {np.float16}
assert all((gradients[name].asnumpy() == by_hand[name]).all() for name in by_hand)

# %% [markdown]
# Two things to notice. The copies are FP32, so they can hold what FP16 cannot. And they are divided
# by $S$ only, not by the batch size, because only `trainer.step` knows the batch size: these are
# sums over 40 images. (If you only want the norm, `amp.gradient_norm(trainer)` returns it after the
# step, divided by both, without further computation. The first loop has used it.)
#
# ## An FP16 gradient is never divided in place
#
# Why copies? Suppose that a loop divides the gradients themselves, to change them before the step.
# Lesson 03 had a small loss; we take a still smaller one, because this network is small too. Most
# of its true gradients are too small for FP16, and $S$ has saved them. How many gradients become
# zero if FP16 has to hold them after the division?

# %%
net, trainer = new_run(loss_scale=2.0**24)
for images, labels in batches[:1]:
    with autograd.record():
        loss = loss_fn(net(images), labels) * 2.0**-24  # a very small loss
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)

lost = {}
for parameter in net.collect_params().values():
    scaled = parameter.grad().asnumpy()
    quotients = (scaled.astype("float32") / 2**24).astype("float16")
    lost[parameter.name] = np.mean(quotients[scaled != 0] == 0)
    print(f"{parameter.name:18} {lost[parameter.name]:6.1%} would become zero")

# %% [markdown]
# The loss scale was there to prevent this. So `amp.unscale`, which divides in place, refuses FP16
# gradients:

# %%
message = ""
try:
    amp.unscale(trainer)
except mpgluon.PrecisionError as error:
    message = str(error)
print(f"PrecisionError: {message}")

# %% tags=["claim"]
assert max(lost.values()) > 0.5
assert "use amp.clip_global_norm to clip, amp.unscaled_gradients for FP32 copies" in message

# %% [markdown]
# The message names three ways out. The copies were in the section before, and clipping is in the
# next one. The third way is `amp.autocast`: it leaves parameters and their gradients in FP32, and
# still computes in FP16 ([cast or autocast?](../docs/how-to/cast-or-autocast.md)). There you may
# divide, and then change a gradient as you like. Here each element is cut off at 1 and -1:
#
# ```diff
#          with amp.scale_loss(loss, trainer) as scaled_loss:
#              autograd.backward(scaled_loss)
# +    amp.unscale(trainer)
# +    for parameter in net.collect_params().values():
# +        parameter.grad()[:] = parameter.grad().clip(-1, 1)
#      trainer.step(len(labels))
# ```

# %%
net, trainer = new_run(cast=amp.autocast)
for images, labels in batches[:1]:
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    true = amp.unscaled_gradients(trainer)
    amp.unscale(trainer)
    for parameter in net.collect_params().values():
        parameter.grad()[:] = parameter.grad().clip(-1, 1)
    changed = {p.name: p.grad().asnumpy() for p in net.collect_params().values()}
    trainer.step(len(labels))
before = max(abs(array.asnumpy()).max() for array in true.values())
after = max(abs(array).max() for array in changed.values())
print(f"largest true gradient {before:.2f}, cut off {after:.2f}")

# %% tags=["claim"]
assert before > after == 1
assert all((changed[name] == np.clip(true[name].asnumpy(), -1, 1)).all() for name in true)

# %% [markdown]
# `trainer.step` knows that you have divided, and divides by the batch size only. If you divide by
# hand, without `amp.unscale`, the step divides by $S$ a second time.
#
# ## Clipping needs the true norm
#
# **Clipping** shrinks all gradients together, so that their common norm is at most `max_norm`. It
# goes between `backward` and the step:
#
# ```diff
#          with amp.scale_loss(loss, trainer) as scaled_loss:
#              autograd.backward(scaled_loss)
# +    norm = amp.clip_global_norm(trainer, max_norm, batch_size=len(labels))
#      trainer.step(len(labels))
# ```
#
# The function takes the batch size too, because it needs the norm of the gradient that the
# optimizer will use. It returns that norm, and changes no gradient: the step multiplies by the
# factor when it divides by $S$. We repeat the run from above, and clip at a norm of 1.5.

# %%
max_norm = 1.5
net, trainer = new_run()
clipped_norms = []
for images, labels in batches * EPOCHS:
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    norm = amp.clip_global_norm(trainer, max_norm, batch_size=len(labels))
    trainer.step(len(labels))
    clipped_norms.append(norm)
clipped = sum(norm > max_norm for norm in clipped_norms)
print(f"{clipped} of {len(clipped_norms)} steps had a norm above {max_norm}")

# %% tags=["plot"] alt="The norm of each step's gradient; where it is above a line, it is clipped"
figure, axes = plt.subplots(figsize=(6.2, 3.6), layout="constrained")
steps = np.arange(1, len(clipped_norms) + 1)
axes.plot(steps, clipped_norms, color="0.6", linewidth=1)
above = np.array(clipped_norms) > max_norm
look = {**plots.FORMAT_LOOKS["float16"], "linestyle": ""}
axes.plot(steps[above], np.array(clipped_norms)[above], **look)
axes.plot(steps[~above], np.array(clipped_norms)[~above], markerfacecolor="white", **look)
axes.axhline(max_norm, color="black")
axes.text(1.01, max_norm, "max_norm", va="center", transform=axes.get_yaxis_transform())
axes.set(xlabel="step", ylabel="true norm of the gradient", ylim=(0, None))
axes.set_title("Steps above the line (full squares) are clipped to it")
plt.show()

# %% [markdown]
# Gluon's own `gluon.utils.clip_global_norm` does not know $S$. It finds a norm that is too large by
# the factor $S$ and by the batch size, and clips far too much. We clip the first step at 0.5 with
# each function, and compare the lengths of the two steps, divided by the learning rate. (On a CPU
# Gluon's function does not take FP16 gradients, so both get the FP32 gradients of `amp.autocast`.)


# %%
def with_amp():
    amp.clip_global_norm(trainer, max_norm, batch_size=len(labels))


def with_gluon():
    gluon.utils.clip_global_norm([p.grad() for p in net.collect_params().values()], max_norm)


max_norm, lengths = 0.5, {}
for clip in (with_amp, with_gluon):
    net, trainer = new_run(cast=amp.autocast)
    start = [p.data().asnumpy() for p in net.collect_params().values()]
    images, labels = batches[0]
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    clip()
    trainer.step(len(labels))
    moved = [p.data() - mx.nd.array(w) for p, w in zip(net.collect_params().values(), start)]
    lengths[clip.__name__] = norm_of(moved) / 0.05
    print(f"{clip.__name__:10} {lengths[clip.__name__]:.7f}; asked for {max_norm:.7f}")

# %% tags=["claim"]
assert clipped > 0
# The norm before clipping, as amp.gradient_norm tells it; the two may add squares in another order.
assert np.isclose(clipped_norms[0], norms[0], rtol=1e-5)
assert np.isclose(lengths["with_amp"], max_norm, rtol=1e-3)
assert np.isclose(lengths["with_gluon"], max_norm / (2**10 * 40), rtol=1e-1)

# %% [markdown]
# With Gluon's function the network would hardly learn, and nothing would say why.
#
# ## Accumulate first, then clip, then step
#
# A batch that is too large for the memory can be cut into parts whose gradients **accumulate**:
# with `grad_req="add"`, `backward` adds to a gradient instead of replacing it. Only their sum
# matters. So all parts go backward with the same $S$, then comes one clip, then one step; both
# receive the number of all images. Afterwards the gradients are set to zero. Here two parts make a
# batch:
#
# ```diff
# +for parameter in net.collect_params().values():
# +    parameter.grad_req = "add"
# -for images, labels in batches:
# +for number, (images, labels) in enumerate(parts, start=1):
#      with autograd.record():
#          loss = loss_fn(net(images), labels)
#          with amp.scale_loss(loss, trainer) as scaled_loss:
#              autograd.backward(scaled_loss)
# -    norm = amp.clip_global_norm(trainer, max_norm, batch_size=len(labels))
# -    trainer.step(len(labels))
# +    if number % 2 == 0:
# +        norm = amp.clip_global_norm(trainer, max_norm, batch_size=40)
# +        trainer.step(40)
# +        net.collect_params().zero_grad()
# ```

# %%
parts = cut(20)
net, trainer = new_run()
start = [p.data().asnumpy() for p in net.collect_params().values()]
for parameter in net.collect_params().values():
    parameter.grad_req = "add"
for number, (images, labels) in enumerate(parts, start=1):
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    if number % 2 == 0:
        norm = amp.clip_global_norm(trainer, max_norm, batch_size=40)
        trainer.step(40)
        net.collect_params().zero_grad()
in_parts = [p.data().asnumpy() for p in net.collect_params().values()]

# %% [markdown]
# Now the same images in whole batches, with the loop of the section before:

# %%
net, trainer = new_run()
for images, labels in batches:
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    norm = amp.clip_global_norm(trainer, max_norm, batch_size=len(labels))
    trainer.step(len(labels))
whole = [p.data().asnumpy() for p in net.collect_params().values()]


def distance(one, other):
    return norm_of(mx.nd.array(a.astype("f") - b.astype("f")) for a, b in zip(one, other))


print(f"in {len(batches)} steps the weights have moved by {distance(whole, start):.4f}")
print(f"whole batches and parts differ by {distance(whole, in_parts):.4f}")

# %% tags=["claim"]
assert distance(whole, in_parts) < 0.02 * distance(whole, start)

# %% [markdown]
# This difference is rounding: a sum of two halves is rounded once more than the whole. The sum
# itself is kept in FP32, even where the gradients are FP16. Three more things are taken care of:
#
# - $S$ changes only in `trainer.step`. All parts of a step have the same one.
# - If a part overflows, the sum is infinite, and the whole step is skipped.
# - A second clip before the step is refused: it would clip each part, not the sum.
#
# One thing cannot be taken care of: BatchNorm normalises each part by itself, in FP32 too.
# ([Accumulate, clip, average](../docs/how-to/accumulate-clip-average.md) has this loop for a
# network with frozen parameters, and an average of the weights. [What 16 bits cost in the
# sum](../docs/scaling.md#what-16-bits-cost-in-the-sum) says what changes when many processes add up
# their gradients.)
#
# ## Two losses of one Trainer go backward together
#
# A second loss may keep the logits small, or belong to a second task of the same network. There is
# one set of weights, one Trainer and one $S$. `amp.scale_loss` takes both losses as a list:
#
# ```diff
#      with autograd.record():
# -        loss = loss_fn(net(images), labels)
# -        with amp.scale_loss(loss, trainer) as scaled_loss:
# -            autograd.backward(scaled_loss)
# +        logits = net(images)
# +        both = [loss_fn(logits, labels), 0.5 * (logits**2).mean(axis=1)]
# +        with amp.scale_loss(both, trainer) as scaled_losses:
# +            autograd.backward(scaled_losses)
#      trainer.step(len(labels))
# ```

# %%
net, trainer = new_run()
for images, labels in batches[:1]:
    with autograd.record():
        logits = net(images)
        both = [loss_fn(logits, labels), 0.5 * (logits**2).mean(axis=1)]
        with amp.scale_loss(both, trainer) as scaled_losses:
            autograd.backward(scaled_losses)
    together = amp.unscaled_gradients(trainer)
    trainer.step(len(labels))

# %% [markdown]
# Does this give the gradient of the sum? We compare it with the gradients of each loss alone, added
# up. We also try a common mistake: two backward passes, one after the other.


# %%
def gradients_of(*passes):
    """Return the true gradients after a backward pass of each of the losses named."""
    net, trainer = new_run()
    images, labels = batches[0]
    with autograd.record():
        logits = net(images)
        losses = {"first": loss_fn(logits, labels), "second": 0.5 * (logits**2).mean(axis=1)}
        for name in passes:
            with amp.scale_loss(losses[name], trainer) as scaled_loss:
                autograd.backward(scaled_loss, retain_graph=True)
    return amp.unscaled_gradients(trainer)


first, second = gradients_of("first"), gradients_of("second")
expected = [a + b for a, b in zip(first.values(), second.values())]
errors = {}
for name, gradients in {
    "both together": together,
    "one after the other": gradients_of("first", "second"),
    "the second alone": second,
}.items():
    difference = [a - b for a, b in zip(gradients.values(), expected)]
    errors[name] = norm_of(difference) / norm_of(expected)
    print(f"{name:20} differs from the sum of both gradients by {errors[name]:.3%}")

# %% tags=["claim"]
assert errors["both together"] < 2.0**-8
assert errors["one after the other"] == errors["the second alone"] > 0.5

# %% [markdown]
# The last two rows are equal: the second `backward` has replaced the gradients of the first. This
# is Gluon's rule and has nothing to do with precision, but loops from other libraries go wrong
# here. (Both losses have one number for each image here, so adding them before `scale_loss` does
# the same as the list.)
#
# ## One loss of two Trainers needs one scale
#
# The convolutions of a network may be trained already and need a small learning rate, while the
# last layer is new. This takes two Trainers and one loss. The loss is multiplied once, so both
# Trainers must divide by the same $S$. Give both to `scale_loss`:
#
# ```diff
#          loss = loss_fn(net(images), labels)
# -        with amp.scale_loss(loss, trainer) as scaled_loss:
# +        with amp.scale_loss(loss, trainers) as scaled_loss:
#              autograd.backward(scaled_loss)
# -    trainer.step(len(labels))
# +    for trainer in trainers:
# +        trainer.step(len(labels))
# ```
#
# We begin with a scale that is too large, so that some steps overflow.

# %%
net = make_network()
mpgluon.cast_block(net)
trainers = []
for part, learning_rate in ((net[:2], 0.01), (net[2], 0.05)):
    options = {"learning_rate": learning_rate, "momentum": 0.9, "multi_precision": True}
    trainers.append(gluon.Trainer(part.collect_params(), "sgd", options))
    amp.init_trainer(trainers[-1], mpgluon.DynamicLossScale(init_scale=2.0**20))

for images, labels in batches * 3:
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainers) as scaled_loss:
            autograd.backward(scaled_loss)
    for trainer in trainers:
        trainer.step(len(labels))

for name, trainer in zip(("convolutions", "last layer"), trainers):
    scale = amp.loss_scale(trainer)
    print(f"{name}: {amp.skipped_steps(trainer)} of 12 steps skipped, S = 2^{np.log2(scale):.0f}")

# %% tags=["claim"]
assert 0 < amp.skipped_steps(trainers[0]) == amp.skipped_steps(trainers[1]) < 12
assert amp.loss_scale(trainers[0]) == amp.loss_scale(trainers[1]) < 2.0**20

# %% [markdown]
# An overflow anywhere skips the steps of both Trainers, and halves their common scale once.
# Otherwise one half of the network would go on without the other.
#
# ## Two networks with a loss each have a scale each
#
# A generator makes points, and a discriminator judges whether a point is real. That is a GAN: two
# networks, two Trainers, two losses. Its loop is the loop of lesson 03, twice:
#
# ```diff
# -for images, labels in batches:
# +for real in samples:
# +    fake = generator(noise())
#      with autograd.record():
# -        loss = loss_fn(net(images), labels)
# -        with amp.scale_loss(loss, trainer) as scaled_loss:
# +        loss = judge(discriminator(real), ones) + judge(discriminator(fake), zeros)
# +        with amp.scale_loss(loss, d_trainer) as scaled_loss:
#              autograd.backward(scaled_loss)
# -    trainer.step(len(labels))
# +    d_trainer.step(64)
# +    with autograd.record():
# +        loss = judge(discriminator(generator(noise())), ones)
# +        with amp.scale_loss(loss, g_trainer) as scaled_loss:
# +            autograd.backward(scaled_loss)
# +    g_trainer.step(64)
# ```
#
# Each Trainer has its own $S$, which finds its own level. To see this, we begin with an $S$ of the
# generator that is far too large. The real points are drawn from a normal distribution in the
# plane.

# %% tags=["setup"]
random = np.random.default_rng(0)
ones, zeros = mx.nd.ones((64, 1)), mx.nd.zeros((64, 1))
judge = gluon.loss.SigmoidBinaryCrossEntropyLoss()
samples = [mx.nd.array(random.normal((2, -1), (0.5, 0.3), (64, 2))) for _ in range(GAN_STEPS)]


def noise():
    return mx.nd.array(random.normal(size=(64, 2)))


def make_player(outputs, init_scale, weight_decay=0.0):
    """Return a network of two layers in FP16, and its Trainer."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(16, in_units=2, activation="relu"))
    net.add(gluon.nn.Dense(outputs, in_units=16))
    net.initialize(mx.init.Xavier())
    mpgluon.cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": 0.01, "beta1": 0.5, "wd": weight_decay, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "adam", options)
    amp.init_trainer(trainer, mpgluon.DynamicLossScale(init_scale=init_scale))
    return net, trainer


# %%
mx.random.seed(0)
generator, g_trainer = make_player(outputs=2, init_scale=2.0**24)
# Weight decay in the discriminator keeps the two from running in circles.
discriminator, d_trainer = make_player(outputs=1, init_scale=2.0**10, weight_decay=0.1)
first_points = generator(noise()).asnumpy()

scales, skips = [], []
for real in samples:
    scales.append([amp.loss_scale(d_trainer), amp.loss_scale(g_trainer)])
    fake = generator(noise())
    with autograd.record():
        loss = judge(discriminator(real), ones) + judge(discriminator(fake), zeros)
        with amp.scale_loss(loss, d_trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    d_trainer.step(64)
    with autograd.record():
        loss = judge(discriminator(generator(noise())), ones)
        with amp.scale_loss(loss, g_trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    g_trainer.step(64)
    skips.append([amp.step_was_skipped(d_trainer), amp.step_was_skipped(g_trainer)])
last_points = generator(noise()).asnumpy()
print(
    f"steps skipped: discriminator {amp.skipped_steps(d_trainer)}, "
    f"generator {amp.skipped_steps(g_trainer)}"
)

# %% tags=["plot"] alt="Above: scales of both over the first steps. Below: real and generated points"
figure, (above, below) = plt.subplots(2, 1, figsize=(6.2, 7), layout="constrained")
shown = np.arange(1, 21)
for column, (name, look) in enumerate(
    {"discriminator": {"color": "black"}, "generator": {"color": "#0072B2"}}.items()
):
    values = np.array(scales)[:20, column]
    above.step(shown, values, where="mid", **look)
    skipped = np.array(skips)[:20, column]
    above.plot(shown[skipped], values[skipped], "x", **look)
    at = 9 if name == "generator" else 0  # where the other line is far away
    above.annotate(f"{name}'s S", (shown[at], values[at]), (8, 5), textcoords="offset points")
above.set_yscale("log", base=2)
above.set(xlabel="iteration", ylabel="loss scale S", ylim=(2.0**9, 2.0**25))
above.set_xticks(range(0, 21, 5))
above.set_title("Skips (crosses) of one leave the other alone")
for points, name, look in (
    (samples[-1].asnumpy(), "real", {"color": "black", "marker": "o"}),
    (first_points, "generated before", {"color": "0.6", "marker": "+"}),
    (last_points, "generated after", {"color": "#0072B2", "marker": "x"}),
):
    below.plot(*points.T, linestyle="", markersize=4, label=name, **look)
below.legend(loc="lower left")
below.set_title("The generator finds the real points")
plt.show()

# %% tags=["claim"]
assert 0 == amp.skipped_steps(d_trainer) < amp.skipped_steps(g_trainer) < 15
assert {scale for scale, _ in scales} == {2.0**10}
centre = samples[-1].asnumpy().mean(0)
far, near = (np.linalg.norm(p.mean(0) - centre) for p in (first_points, last_points))
assert near < far / 2

# %% [markdown]
# While the generator's steps were skipped, the discriminator went on. In the other direction there
# is one thing to know. The generator's loss goes backward *through* the discriminator and leaves
# gradients there. Here the discriminator's next `backward` replaces them. If the discriminator's
# gradients accumulate, set them to zero first; a step with the wrong gradients is refused.
#
# If you want one common scale, as other libraries have it, give both Trainers the same
# `mpgluon.DynamicLossScale` object. ([From torch.amp](../docs/migration.md#from-torchamp) says how
# it is updated.)

# %% [markdown]
# ## The loop of the talks, and the three lines that replace it
#
# NVIDIA's talks write mixed precision out by hand, with one dense layer: $N$, $D_{in}$, $D_{out}$ =
# 64, 1024, 512, the mean squared error, a constant scale of 128, and FP32 masters. Here is that
# loop, line by line. `fp16_utils` has the talks' functions under their names.

# %%
from mpgluon import fp16_utils

N, D_IN, D_OUT, SCALE = 64, 1024, 512, 128
draw = np.random.default_rng(0)
x, y = (mx.nd.array(draw.normal(size=(N, size))) for size in (D_IN, D_OUT))


def dense_layer():
    mx.random.seed(0)
    net = gluon.nn.Dense(D_OUT, in_units=D_IN)
    net.initialize(mx.init.Xavier())
    mpgluon.cast_block(net)  # model.half()
    return net


by_hand, losses = dense_layer(), []
model_params, master_params = fp16_utils.prep_param_lists(by_hand)
optimizer = gluon.Trainer(master_params, "sgd", {"learning_rate": 1.0})
for _ in range(20):
    with autograd.record():
        y_pred = by_hand(x)
        loss = (y_pred - y).square().mean()  # in FP32: the network returns FP32
        scaled_loss = SCALE * loss
    scaled_loss.backward()
    fp16_utils.model_grads_to_master_grads(model_params, master_params)
    for param in master_params:
        param.grad()[:] = param.grad() * (1 / SCALE)  # FP32 gradients may be divided
    optimizer.step(1)
    fp16_utils.master_params_to_model_params(model_params, master_params)
    losses.append(loss.asscalar())
print(f"loss {losses[0]:.3f}, after 20 steps {losses[-1]:.3f}")

# %% [markdown]
# In mpgluon the optimizer keeps the masters, the Trainer keeps the scale, and the step divides.
# Only three lines differ from a loop in FP32:

# %%
in_three_lines = dense_layer()
options = {"learning_rate": 1.0, "multi_precision": True}  # 1: masters
trainer = gluon.Trainer(in_three_lines.collect_params(), "sgd", options)
amp.init_trainer(trainer, SCALE)  # 2: the scale
for _ in range(20):
    with autograd.record():
        loss = (in_three_lines(x) - y).square().mean()
        with amp.scale_loss(loss, trainer) as scaled_loss:  # 3
            scaled_loss.backward()
    trainer.step(1)
same = by_hand.weight.data().asnumpy() == in_three_lines.weight.data().asnumpy()
print(f"{same.sum()} of {same.size} weights have the same bits")

# %% tags=["claim"]
assert losses[-1] < losses[0]
assert same.all()

# %% [markdown]
# ## The same loop in MXNet's NumPy interface
#
# MXNet has two interfaces: `mx.nd`, used so far, and since 1.6 `mx.np`, whose functions are named
# as in NumPy. *Dive into Deep Learning* uses the second. A cast covers both. Here is one network,
# written once as a plain `Block` that calls `mx.nd`, and once with `mx.np`, and one loop for both.


# %%
class WithNd(gluon.nn.Block):
    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.hidden = gluon.nn.Dense(32, in_units=3 * 32 * 32)
            self.out = gluon.nn.Dense(10, in_units=32)

    def forward(self, x):
        h = self.hidden(x)
        return self.out(mx.nd.tanh(h) * mx.nd.sigmoid(h))


class WithNp(WithNd):
    def forward(self, x):
        h = self.hidden(x)
        return self.out(mx.np.tanh(h) * mx.npx.sigmoid(h))


def weights_after_an_epoch(network, array):
    net = network()
    net.initialize()
    draw = np.random.default_rng(0)  # MXNet's initializers draw other numbers in each interface
    for parameter in net.collect_params().values():
        parameter.set_data(array(draw.normal(0, 0.03, parameter.shape), dtype="float32"))
    mpgluon.cast_block(net)
    options = {"learning_rate": 0.05, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer)
    for images, labels in batches:
        images, labels = array(images.asnumpy()), array(labels.asnumpy(), dtype="int32")
        with autograd.record():
            loss = loss_fn(net(images), labels)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(len(labels))
    return net.hidden.weight.data().asnumpy()


in_nd = weights_after_an_epoch(WithNd, mx.nd.array)
mx.npx.set_np()  # before a network is made
in_np = weights_after_an_epoch(WithNp, mx.np.array)
mx.npx.reset_np()
print(f"weights are {in_nd.dtype} and {in_np.dtype}")
print(f"{(in_nd == in_np).sum()} of {in_nd.size} have the same bits")

# %% tags=["claim"]
assert in_nd.tobytes() == in_np.tobytes()

# %% [markdown]
# Functions that are called by name, such as `mx.nd.tanh`, follow the cast as `F.tanh` in a
# `hybrid_forward` does: in FP16, with the result rounded once. (The docs have the book's own loop:
# [If you learned Gluon from d2l](../docs/how-to/d2l.md).)

# %% [markdown]
# ## Summary
#
# | to do | write | where |
# |---|---|---|
# | read gradients | `amp.unscaled_gradients(trainer)` | after `backward` |
# | change gradients | `amp.unscale(trainer)`, with `amp.autocast` only | before the step |
# | clip by the norm | `amp.clip_global_norm(trainer, max_norm, batch_size)` | before the step |
# | accumulate | `grad_req="add"`, one step for all parts, `zero_grad()` | around the step |
# | two losses, one Trainer | `amp.scale_loss([loss_a, loss_b], trainer)` | one `backward` |
# | one loss, two Trainers | `amp.scale_loss(loss, [trainer_a, trainer_b])` | one $S$ for both |
# | a loss for each of two Trainers | `amp.scale_loss(loss, its_trainer)`, twice | an $S$ for each |
#
# From `scale_loss` up to the update all gradients are $S$ times too large. Code that reads or
# changes them there must take this into account.

# %% [markdown]
# ## Exercises

# %% [markdown]
# **09.1** (level 1) A batch of 64 images is cut into 4 parts of 16. Each part goes backward with
# one loss for each image, and the gradients accumulate. Which number do `amp.clip_global_norm` and
# `trainer.step` receive as batch size?

# %%
answer = ...
check("09.1", answer)

# %% tags=["solution"]
# backward adds the gradients of single images, within a part and from part to part. The step
# divides the sum by the number of all of them.
assert check("09.1", 4 * 16)

# %% [markdown]
# **09.2** (level 2) A function for your log returns the largest gradient, without its sign, of the
# *mean* loss. It is called after `backward`, before the step. The function below looks right. Hand
# it in, read what `check` says about it, and repair it.


# %%
def largest_gradient(net, trainer, batch_size):
    factor = amp.loss_scale(trainer) * batch_size
    gradients = [parameter.grad() / factor for parameter in net.collect_params().values()]
    return max(float(abs(gradient).max().asscalar()) for gradient in gradients)


answer = ...
check("09.2", answer)


# %% tags=["solution"]
def largest_true_gradient(_, trainer, batch_size):
    gradients = amp.unscaled_gradients(trainer).values()  # FP32 copies, divided by S
    return max(float(abs(gradient).max().asscalar()) for gradient in gradients) / batch_size


assert check("09.2", largest_true_gradient)

# %% [markdown]
# **09.3** (level 3) This step of two losses came from another library, where gradients always add
# up. Hand it in, read what `check` says about it, and repair it. `losses_of(net)` returns two
# losses of the batch, each with one number for each image.


# %%
def step_of_two_losses(net, trainer, losses_of, batch_size):
    with autograd.record():
        first, second = losses_of(net)
        with amp.scale_loss(first, trainer) as scaled_loss:
            autograd.backward(scaled_loss, retain_graph=True)
        with amp.scale_loss(second, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(batch_size)


answer = ...
check("09.3", answer)


# %% tags=["solution"]
def step_of_both_losses(net, trainer, losses_of, batch_size):
    with autograd.record(), amp.scale_loss(losses_of(net), trainer) as scaled_losses:
        autograd.backward(scaled_losses)  # one backward pass for both
    trainer.step(batch_size)


assert check("09.3", step_of_both_losses)

# %% [markdown]
# ## References
#
# - Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013,
#   section 3.2 (clipping by the norm).
# - PyTorch, "Automatic Mixed Precision examples", sections on clipping, accumulation, and several
#   models, losses and optimizers: the same tasks in `torch.amp`.
# - NVIDIA, "Mixed Precision Training", talks on PyTorch of 2018 and 2019: the loop by hand.
# - Goodfellow et al., "Generative Adversarial Nets", 2014, section 3.

# %% [markdown]
# [← 08 What changes with several devices?](08_several_devices.ipynb) ·
# [All lessons](README.md) ·
# [10 What happens after training? →](10_after_training.ipynb)
