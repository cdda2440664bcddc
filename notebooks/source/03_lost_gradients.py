# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Where do small gradients go?
#
# A network that trains well in 32 bits may stop learning in 16. Nothing fails and no message
# appears: its smallest gradients have become zero on the way. This notebook finds them, and brings
# them back with one multiplication.
#
# ## What you will be able to do
#
# - read a histogram of exponents, and say which gradients FP16 would lose;
# - scale a loss by hand, and undo it in the one place where nothing is lost;
# - let the scale find itself, and recognise a healthy run by its skipped steps;
# - clip and accumulate gradients, and train with two losses, in the right order.
#
# You should have written a training loop with `autograd.record`, `backward` and `trainer.step`.
# FP32 and FP16 stand for the formats that code calls `float32` and `float16`. Everything runs on a
# CPU.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %%
import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import mpgluon
from mpgluon import amp, plots
from mpgluon.data.shapes import class_names, render_image
from mpgluon.diagnostics.exponents import batch_exponents
from mpgluon.diagnostics.observe import Batch
from mpgluon.diagnostics.ranges import range_report
from mpgluon.training.networks import build_network

IMAGES_PER_CLASS, EPOCHS = (8, 8) if FAST else (16, 12)

# %% [markdown]
# ## Too small for FP16 means zero
#
# A floating-point number is $m \times 2^e$ with $1 \le m < 2$. The **exponent** $e$ tells how large
# it is, and FP16 keeps only 5 bits for it. From small to large, FP16 knows four ranges:
#
# | magnitude | name | what FP16 does |
# |---|---|---|
# | below $2^{-24}$ | lost | makes it 0 (or $2^{-24}$, if that is nearer) |
# | $2^{-24}$ to $2^{-14}$ | subnormal | keeps it, with fewer digits the smaller it is |
# | $2^{-14}$ to $2^{16}$ | normal | keeps it with 11 binary digits |
# | from $2^{16}$ | too large | makes it infinite: it **overflows** (65504 is the last number) |

# %%
print("exact value    in FP16   relative error")
errors = {}
for exponent in (-10, -14, -20, -24, -26):
    exact = 1.3 * 2.0**exponent
    errors[exponent] = abs(float(np.float16(exact)) - exact) / exact
    print(f"1.3 x 2^{exponent} {np.float16(exact):11.3g} {errors[exponent]:16.2%}")
assert max(errors[-10], errors[-14]) < 2.0**-11  # normal: at most half a unit of the last digit
assert 2.0**-11 < errors[-20] < errors[-24] < errors[-26] == 1  # subnormal, and lost
assert np.isinf(np.float16([65504, 2.0**16])).tolist() == [False, True]  # too large

# %% [markdown]
# The step from normal to lost is not a cliff: between them lie ten powers of two in which a number
# loses about one binary digit for each. The last row is gone altogether.
#
# ## Something to train
#
# Ten shapes, drawn on a noisy background and shrunk to 32 x 32 pixels, and a ResNet with 20 layers
# for images of that size. `build_network` takes it from GluonCV's collection and initialises it.

# %%
pixels, labels = [], []
for number in range(IMAGES_PER_CLASS * 10):
    drawing = render_image(number % 10, number // 10).convert("RGB").resize((32, 32))
    pixels.append(np.asarray(drawing).transpose(2, 0, 1) / 127.5 - 1)  # from -1 to 1
    labels.append(number % 10)
images, labels = mx.nd.array(pixels), mx.nd.array(labels, dtype="int32")
batches = [(images[i : i + 40], labels[i : i + 40]) for i in range(0, len(images), 40)]

figure, axes = plt.subplots(1, 10, figsize=(10, 1.5), layout="constrained")
for place, name, picture in zip(axes, class_names(), pixels):
    place.imshow((picture.transpose(1, 2, 0) + 1) / 2)
    place.set_title(name, fontsize="small")
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
assert images.shape == (IMAGES_PER_CLASS * 10, 3, 32, 32)

# %% [markdown]
# `cross_entropy` gives one loss for each image. We take their mean ourselves, so gradients arrive
# already divided by the number of images, and each step will be `trainer.step(1)`.
#
# ## Gradients use another part of the range than weights
#
# First with NumPy: run one batch in FP32, take the gradient of every weight, and count. Then the
# same with mpgluon, which also looks at numbers that NumPy cannot reach: the **activation
# gradients**. These are the gradients of the loss with respect to what each layer returned. The
# backward pass hands them from layer to layer, and computes the weights' gradients from them. A
# `Batch` is what mpgluon needs to run the network: images, labels and the loss function.

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

# %%
first_batch = Batch(*batches[0], mean_loss)
untrained = batch_exponents(net, first_batch)
print(untrained)

of_weights = untrained.overall()["weights"].shares()
of_gradients = untrained.overall()["gradients"].shares()
before = untrained.overall()["activation gradients"]
assert of_gradients == by_hand
assert before.shares()["normal"] < of_gradients["normal"] < of_weights["normal"]

# %% [markdown]
# Look at the rows. Weights and activations are at home in FP16. Activation gradients are not: a
# large part of them is subnormal already. (The column *zero* is the share of true zeros among all
# numbers; the other columns are shares of the rest. ReLU makes zeros, and they cost nothing.)
#
# ## The better a network gets, the smaller its gradients
#
# Where the loss is smallest the gradient is zero. On the way there it shrinks, and more and more of
# it falls below what FP16 can hold. We train in FP32 and look again.


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
                autograd.backward(loss * weight)
            trainer.step(1)
            curve[epoch] += loss.asscalar() / len(batches)
    mx.nd.waitall()  # MXNet works in the background; who looks into a network waits for it first
    return curve


# %%
net = make_network()
fp32_curve = train_fp32(net)
print(f"loss: {fp32_curve[0]:.2f} in the first epoch, {fp32_curve[-1]:.2f} in the last")
after = batch_exponents(net, first_batch).overall()["activation gradients"]
spread = {"before": before, "after": after}
spread = {f"{name} training": (h.exponents, h.counts, h.zeros) for name, h in spread.items()}
figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
plots.draw_exponents(axes, spread)
figure.suptitle("Activation gradients: training moves them to the left")
plt.show()
lost_before, lost_after = before.shares()["lost"], after.shares()["lost"]
print(f"lost in FP16: {lost_before:.2%} before training, {lost_after:.2%} after")
assert fp32_curve[-1] < fp32_curve[0]
assert lost_after > 2 * lost_before
assert after.counts[after.exponents >= -4].sum() < 0.01 * after.counts.sum()

# %%
widths = []
for histogram in (before, after):
    shares = np.cumsum(histogram.counts) / histogram.counts.sum()
    first, last = histogram.exponents[np.searchsorted(shares, (0.01, 0.99))]
    widths.append(int(last - first))
    print(f"98 % of them have an exponent from {first} to {last}")
assert abs(widths[0] - widths[1]) <= 3

# %% [markdown]
# Two things to notice. The histogram has moved to the left and is about as wide as before. And from
# $2^{-4}$ up to $2^{16}$, half of the forty powers of two that FP16 has, there is hardly a number.
# That is the idea of this notebook: the gradients are not too *different* for FP16, they are in the
# wrong *place*.
#
# ## Multiplying the loss moves the whole histogram
#
# The gradient of $S \cdot \text{loss}$ is $S$ times the gradient of the loss. This holds for
# activation gradients too, because each layer's backward pass is linear in the gradient that it is
# given. So one multiplication, before `backward`, moves every gradient. $S$ is the **loss scale**.
# We take a power of two: then only exponents change, and nothing is rounded. mpgluon can tell the
# largest one at which no gradient of this batch overflows; it leaves a factor of two for others.

# %%
S = range_report(net, first_batch).recommended_loss_scale()
scaled_batch = Batch(*batches[0], lambda logits, labels: S * mean_loss(logits, labels))
scaled = batch_exponents(net, scaled_batch).overall()["activation gradients"]

figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
histogram = (after.exponents, after.counts, after.zeros)
plots.draw_exponents(axes, {"activation gradients": histogram}, loss_scale=S)
figure.suptitle(f"The same gradients times S = {S:.0f}")
plt.show()
assert (scaled.counts == after.times(S).counts).all()
assert scaled.shares()["lost"] < lost_after / 10
assert scaled.shares()["overflow"] == 0

# %% [markdown]
# The assertion compares a real backward pass of $S \cdot \text{loss}$ with the old histogram moved
# along the axis: each count is the same.
#
# ## Never divide an FP16 gradient
#
# The optimizer must not see gradients that are $S$ times too large, so somebody has to divide
# by $S$. Dividing the FP16 gradient itself is tempting and wrong. The quotient has to fit into FP16
# again, and that was the problem.

# %%
scale = 2.0**16
true_gradient = 1.5 * 2.0**-26  # too small for FP16
fp16_gradient = np.float16(true_gradient * scale)  # what the backward pass leaves
print(f"divided in FP16: {fp16_gradient / np.float16(2.0**8) / np.float16(2.0**8)}")
print(f"divided in FP32: {np.float32(fp16_gradient) / np.float32(scale)}")

weight, gradient = mx.nd.ones(1, dtype="float16"), mx.nd.array([fp16_gradient], dtype="float16")
sgd = mx.optimizer.SGD(learning_rate=1.0, rescale_grad=1 / scale, multi_precision=True)
momentum_and_master = sgd.create_state_multi_precision(0, weight)
momentum_and_master[1][:] = 0  # the FP32 master weight; 0, so that the update can be seen
sgd.update_multi_precision(0, weight, gradient, momentum_and_master)
print(f"master weight after one step: {momentum_and_master[1].asscalar()}")
assert np.float16(fp16_gradient / np.float16(2.0**8)) / np.float16(2.0**8) == 0
assert momentum_and_master[1].asscalar() == -true_gradient

# %% [markdown]
# (FP16 cannot hold $2^{16}$, so the first line divides by $2^8$ twice.)
#
# With `multi_precision=True` the optimizer keeps an FP32 copy of each weight, its **master
# weight**. It widens the gradient to FP32, multiplies it by `rescale_grad` and updates the master.
# So `rescale_grad` is the right place for $1/S$. You know it already: `trainer.step(n)` sets it to
# $1/n$. **Loss scaling by hand** is therefore two changes to a loop:
#
# ```python
# (S * loss).backward()
# trainer.step(n * S)
# ```
#
# With a fixed $S$ this is *static* loss scaling. It has worked with scales from 8 to 32768, and you
# have to try which. Too small, and gradients are lost; too large, and they overflow.
#
# ## The scale can find itself
#
# An overflow is easy to see: infinities and NaN go through everything that follows and end in
# the gradients. So one can be bold. *Dynamic* loss scaling keeps $S$ as large as it fits:
#
# - Gradients are not all finite: **skip** this step, and halve $S$ for the next one.
# - They were finite for `growth_interval` steps in a row: double $S$.
#
# That is a rule on plain numbers. Here it is in Python, beside mpgluon's.


# %%
def next_scale(scale, good_steps, finite, growth_interval):
    if not finite:
        return max(scale / 2, 1.0), 0
    if good_steps + 1 == growth_interval:
        return min(scale * 2, 2.0**24), 0  # mpgluon goes no further by default
    return scale, good_steps + 1


dynamic = mpgluon.DynamicLossScale(init_scale=2.0**16, growth_interval=5)
by_hand = [(2.0**16, 0)]
for finite in np.random.default_rng(0).random(200) < 0.9:  # one step in ten overflows
    by_hand.append(next_scale(*by_hand[-1], finite, growth_interval=5))
    dynamic.update(grads_finite=bool(finite))
    assert (dynamic.scale, dynamic.growth_tracker) == by_hand[-1]
print(f"S went from {min(by_hand)[0]:.0f} to {max(by_hand)[0]:.0f}")

# %% [markdown]
# ## By hand and with `amp`, bit for bit the same
#
# In a training loop mpgluon needs three lines: `amp.init_trainer` gives the Trainer a loss scale,
# `amp.scale_loss` multiplies the loss by it, and `trainer.step` divides and skips by itself.
# Forgetting the first one is the usual mistake. The next cell makes it on purpose.
#
# After that come both loops, on the network in FP16. `mpgluon.cast_block` casts its weights, except
# those of BatchNorm, and returns the results of the last layer in FP32, so that the loss is FP32.
# In the loop by hand, `init_trainer` with `"none"` asks for no scaling: it only lets both loops
# begin with the same master weights, those from before the cast.

# %%
trainer = gluon.Trainer(make_network().collect_params(), "sgd", {"learning_rate": 0.01})
message = ""
try:
    with amp.scale_loss(loss, trainer):
        pass
except mpgluon.TrainerStateError as error:
    message = str(error)
print(f"TrainerStateError: {message}")
assert "call amp.init_trainer(trainer)" in message


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
amp_net, amp_trainer = make_fp16(mpgluon.DynamicLossScale(init_scale=2.0**19, growth_interval=2))
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

# %%
for step in range(8):
    batch_images, batch_labels = batches[step % len(batches)]
    with autograd.record():
        loss = mean_loss(amp_net(batch_images), batch_labels)
        with amp.scale_loss(loss, amp_trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    amp_trainer.step(1)
print(f"skipped {amp.skipped_steps(amp_trainer)} of 8, S = {amp.loss_scale(amp_trainer):.0f}")
assert 0 < amp.skipped_steps(amp_trainer) == skipped < 8
assert amp.loss_scale(amp_trainer) == scale
pairs = list(zip(hand_net.collect_params().values(), amp_net.collect_params().values()))
assert all((a.data().asnumpy() == b.data().asnumpy()).all() for a, b in pairs)

# %% [markdown]
# ## The learning rate needs no retuning
#
# Some losses are small from the start: a mean over all pixels of an image, or one term of many with
# a small weight. We imitate one by multiplying our loss by $2^{-12}$, as a mean over 64 x 64 pixels
# would, and the learning rate by $2^{12}$ in return. In FP32 that changes nothing at all: scaling
# by a power of two is exact, so every weight stays the same, bit for bit.
#
# The cells after that train FP16 on the small loss, once without and once with a loss scale. No
# learning rate, momentum or number of epochs is changed.

# %%
small_net = make_network()
small_curve = train_fp32(small_net, weight=2.0**-12)
pairs = list(zip(net.collect_params().values(), small_net.collect_params().values()))
identical = all((a.data().asnumpy() == b.data().asnumpy()).all() for a, b in pairs)
print(f"{len(pairs)} arrays of parameters, all bit-identical: {identical}")
assert identical
assert (small_curve == fp32_curve).all()


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
curves = {"FP32": fp32_curve}
for name, loss_scale in {"FP16 without scale": "none", "FP16 with scale": "dynamic"}.items():
    curves[name], _ = train_fp16(*make_fp16(loss_scale, weight=2.0**-12), weight=2.0**-12)
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
fp32, fp16 = (plots.FORMAT_LOOKS[name] for name in ("float32", "float16"))
looks = (fp32, {**fp16, "linestyle": ":", "marker": "x"}, fp16)
for (name, curve), look in zip(curves.items(), looks):
    axes.plot(range(1, EPOCHS + 1), curve, label=name, markerfacecolor="none", **look)
axes.set(xlabel="epoch", ylabel="training loss (mean of the epoch)", ylim=(0, None))
axes.set_title("The same hyperparameters, with and without a loss scale")
axes.legend()
plt.show()
print("last epoch:", {name: round(float(curve[-1]), 3) for name, curve in curves.items()})
distance = np.abs(curves["FP16 with scale"] - fp32_curve).max()
print(f"largest distance between FP16 with scale and FP32: {distance:.3f}")
assert distance < 0.1 * fp32_curve[0]
assert curves["FP16 without scale"][-1] > 1.5 * fp32_curve[-1]

# %% [markdown]
# The circles lie on the FP32 line. After the division the gradients are the true ones, so nothing
# that was tuned in FP32 has to be tuned again. The dotted run got the same images and the same
# learning rate, but parts of its gradients were zero.
#
# ## A skipped step now and then is a healthy sign
#
# Let us watch a scale. It begins at $2^{24}$, far too large on purpose, with the loss itself
# (not the small one). It may grow after 4 good steps, so that we see it happen. For real runs
# `growth_interval` is 2000.

# %%
growing = mpgluon.DynamicLossScale(init_scale=2.0**24, growth_interval=4)
_, events = train_fp16(*make_fp16(growing))

figure, axes = plt.subplots(figsize=(9, 3.5), layout="constrained")
plots.draw_loss_scale(axes, events)
axes.set_xlabel("step")
axes.set_title("The life of a loss scale")
plt.show()
scales = [event["loss_scale"] for event in events]
falls = [later < earlier for earlier, later in zip(scales, scales[1:])]
assert falls == [event["skipped"] for event in events[:-1]]  # S falls where a step was skipped
assert events[0]["skipped"]  # it was too large ...
assert max(np.diff(scales)) > 0  # ... and it grew later

# %% [markdown]
# At first each step is skipped, until $S$ fits: no weight is touched, and each try costs one batch.
# Then $S$ climbs until it meets its ceiling, where the largest gradient times $S$ overflows.
# As gradients shrink in training, the ceiling rises. A skip now and then is the scale touching it.
# Skips without end are not healthy: then something is infinite whatever the scale.
#
# ## Accumulate first, clip by the true norm, step last
#
# A batch that is too large for memory can be cut into parts whose gradients **accumulate**: with
# `grad_req="add"`, `backward` adds to a gradient instead of replacing it. **Clipping** shrinks all
# gradients together, so that their common norm is at most `max_norm`. The norm that counts is that
# of the sum, in true units. So the order is: all backward passes with the same $S$, one clip, one
# step. (Then set the gradients to zero. Here each step begins with a new layer instead.)
#
# Gluon's own `gluon.utils.clip_global_norm` knows nothing of $S$. It sees a norm that is $S$ times
# too large and clips far too much. We take one layer with eight weights, for which NumPy tells the
# true gradient, and a static scale: `amp.init_trainer` takes a number for that.

# %%
generator = np.random.default_rng(0)
x = generator.normal(size=(16, 8)).astype(np.float32)
y = generator.normal(size=(16, 1)).astype(np.float32)
x_nd, y_nd, squared_error = mx.nd.array(x), mx.nd.array(y), gluon.loss.L2Loss()
start = np.ones((1, 8), dtype=np.float32)
true_gradient = (x @ start.T - y).T @ x / 16  # of half the squared error, mean of 16 rows
true_norm = float(np.linalg.norm(true_gradient))


# %%
def clipped_step(clip, parts):
    layer = gluon.nn.Dense(1, in_units=8, use_bias=False, weight_initializer="ones")
    layer.initialize()
    layer.weight.grad_req = "add"
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 1.0})
    amp.init_trainer(trainer, 2.0**10)
    pieces = (gluon.utils.split_data(array, parts) for array in (x_nd, y_nd))
    for part_x, part_y in zip(*pieces):
        with autograd.record():
            loss = squared_error(layer(part_x), part_y)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
    norm = clip(layer, trainer)
    trainer.step(16)
    return norm, np.linalg.norm(layer.weight.data().asnumpy() - start)


# %%
max_norm = true_norm / 2  # clipping should halve the step
print(f"true norm {true_norm:.4f}, clipped to {max_norm:.4f}")
for parts in (1, 2):
    norm, size = clipped_step(lambda _, trainer: amp.clip_global_norm(trainer, max_norm, 16), parts)
    print(f"amp, parts: {parts}     norm {norm:.4f}, the weights moved by {size:.4f}")
    assert np.allclose((norm, size), (true_norm, max_norm), rtol=1e-5)

norm, size = clipped_step(
    lambda layer, _: gluon.utils.clip_global_norm([layer.weight.grad()], max_norm), parts=2
)
print(f"gluon.utils       norm {norm:.1f}, the weights moved by {size:.7f}")
assert np.isclose(norm, true_norm * 2**10 * 16, rtol=1e-5)
assert np.isclose(size, max_norm / (2**10 * 16), rtol=1e-2)

# %% [markdown]
# Gluon's function is wrong by $S$, and by the batch size too, since `trainer.step` divides by both
# afterwards. `amp.clip_global_norm` returns the true norm and changes no gradient: it puts the
# clipping factor where $1/S$ goes, into `rescale_grad`.
#
# ## Two losses, two scales
#
# Some tasks have two losses, for example a network that draws pictures and one that judges them,
# and often a Trainer for each. Then each Trainer has its own scale, and an overflow in one leaves
# the other alone. We make the second loss a million times too large. For comparison, both layers
# then share one Trainer: it has one scale, and both layers stand still.


# %%
def step_of_both(layers, trainers):
    """Return which of the two layers moved."""
    with autograd.record():
        for number, (layer, size) in enumerate(zip(layers, (1.0, 2.0**20))):
            loss = squared_error(layer(x_nd), y_nd) * size
            with amp.scale_loss(loss, trainers[number % len(trainers)]) as scaled_loss:
                autograd.backward(scaled_loss)
    for trainer in trainers:
        trainer.step(16)
    return [bool((layer.weight.data() != 1).max().asscalar()) for layer in layers]


# %%
for share in (False, True):
    layers = [gluon.nn.Dense(1, in_units=8, weight_initializer="ones") for _ in range(2)]
    for layer in layers:
        layer.initialize()
        mpgluon.cast_block(layer)
    groups = [list(layer.collect_params().values()) for layer in layers]
    groups = [groups[0] + groups[1]] if share else groups
    options = {"learning_rate": 0.1, "multi_precision": True}
    trainers = [gluon.Trainer(group, "sgd", options) for group in groups]
    for trainer in trainers:
        amp.init_trainer(trainer, mpgluon.DynamicLossScale(init_scale=2.0**10))
    moved, scales = step_of_both(layers, trainers), [amp.loss_scale(t) for t in trainers]
    print(f"{len(trainers)} Trainer(s): layers that moved {moved}, scales {scales}")
    assert moved == [not share, False]
    assert scales == ([2.0**9] if share else [2.0**10, 2.0**9])

# %% [markdown]
# ## Summary
#
# - What is below $2^{-25}$, half the smallest number, becomes zero in FP16. Activation gradients
#   are the first to get there, and the better the network, the more of them.
# - Multiply the loss by a power of two $S$ before `backward`: all gradients move together, exactly.
# - Divide in FP32 inside the optimizer (`rescale_grad`), never the FP16 gradient.
# - Dynamic scaling halves $S$ and skips the step when something overflows, and doubles it when
#   nothing has for a while. With `amp` that is `init_trainer`, `scale_loss` and your old `step`.
# - The optimizer gets the same gradients as in FP32: keep your hyperparameters.
# - Accumulate, then clip with `amp.clip_global_norm`, then step. One scale for each Trainer.
#
# ## Exercises
#
# 1. Use the sum of the losses (`.sum()`) instead of their mean in `mean_loss`, without training
#    anew. By how many bins does the histogram move, and what is the recommended $S$ now?
#    *(Five to six bins to the right: a factor of 40. $S$ is 32 or 64 times smaller.)*
# 2. A run begins at $2^{16}$, could stand $2^{20}$, and has `growth_interval=2000`. How many steps
#    pass before it gets there? *(Thousands.)* What does that say about short
#    runs?
# 3. Train FP16 without a loss scale on the loss itself (`weight=1.0`). How much worse is the last
#    epoch than FP32's? *(Far less than with the small loss, perhaps not at all: even at the end
#    about one activation gradient in ten is lost. Loss scaling is an insurance, and a cheap one.)*
#
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2 (loss scaling, with
#   scales from 8 to 32768, and a histogram of activation gradients).
# - NVIDIA, "Training With Mixed Precision" user guide, section "Choosing A Scaling Factor".
# - IEEE 754-2019, "Standard for Floating-Point Arithmetic", section 3.6 (binary16), 4.3 (rounding)
#   and 7.4 (overflow).
# - Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013,
#   section 3.2 (clipping by the norm).
