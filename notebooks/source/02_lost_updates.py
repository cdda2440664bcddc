# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Why does a network in 16 bits need a copy of its weights in 32?
#
# A step of training adds a small number to each weight. In FP16 (`float16`) many of these sums are
# rounded back to the old weight. The network then learns less, or nothing at all, and no error is
# raised. The remedy is to keep each weight in FP32 (`float32`) as well. This *master weight*
# receives the updates, and is rounded to FP16 for the forward pass.
#
# ![One step of training with master weights: the FP32 master is rounded to an FP16 copy, forward
# and backward pass use the copy, the FP16 gradient is converted to FP32, and the update is added to
# the master](figures/02_step.svg)
#
# The drawing follows one step. The FP32 master is rounded to an FP16 copy. The forward and the
# backward pass use the copy. Their gradient is converted to FP32, where the update is computed and
# added to the master. The next step begins with a new copy. In the example the copy is still 1, but
# the master is already 1.00012.
#
# ## What you will be able to do
#
# - Say which updates an FP16 weight loses, from the ratio of update to weight.
# - Train an FP16 network with master weights by hand, and know where each copy is.
# - Get the same weights, bit for bit, from `multi_precision=True` and from `mpgluon.amp`.
# - Look up what your optimizer does without masters.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %% tags=["setup"]
import warnings

import mpgluon
from mpgluon import BFLOAT16, FLOAT16, amp, fp16_utils, round_to
from mpgluon.tools.plots import FORMAT_LOOKS
from mpgluon_tools.tables import Table

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from teaching import check

STEPS = 600 if FAST else 2000
FP32, FP16 = FORMAT_LOOKS["float32"], FORMAT_LOOKS["float16"]  # as in all lessons
WITHOUT = {**FP16, "linestyle": ":", "marker": "x"}

# 128 points: half of them in a disc (label 0), half in a ring around it (label 1).
drawn = np.random.default_rng(0)
radius = np.concatenate([drawn.uniform(0, 0.5, 64), drawn.uniform(0.7, 1, 64)])
angle = drawn.uniform(0, 2 * np.pi, 128)
points = np.stack([radius * np.cos(angle), radius * np.sin(angle), np.ones(128)], axis=1)
inputs, labels = mx.nd.array(points), mx.nd.array(np.arange(128) >= 64, dtype="int32")
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

# The start: 128 pairs of hidden units. Both units of a pair have the same input weights, of a size
# from 1/2 to 3/2, and the opposite output weights: 1 and -1, or -1 and 1.
one_of_each_pair = drawn.choice([-1, 1], (128, 3)) * drawn.uniform(0.5, 1.5, (128, 3))
hidden_start = mx.nd.array(np.concatenate([one_of_each_pair, one_of_each_pair]))
output_start = mx.nd.array([[1] * 128 + [-1] * 128, [-1] * 128 + [1] * 128])


def make_net(cast=True, ordinary=False):
    """Return the network at its start, cast to FP16 or not."""
    net = nn.HybridSequential()
    net.add(nn.Dense(256, in_units=3, use_bias=False, activation="relu"))
    net.add(nn.Dense(2, in_units=256, use_bias=False))
    mx.random.seed(0)
    net.initialize(mx.init.Uniform(1.5))
    if not ordinary:
        net[0].weight.set_data(hidden_start)
        net[1].weight.set_data(output_start)
    if cast:
        mpgluon.cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def weights_of(net):
    """Return all weights of a network in one array."""
    parameters = net.collect_params().values()
    return np.concatenate([parameter.data().asnumpy().ravel() for parameter in parameters])


def accuracy(net):
    """Return the share of points with the right label."""
    return float((net(inputs).argmax(axis=1) == labels.astype("float32")).mean().asscalar())


# %% [markdown]
# ## Of two equal networks one learns, and the other learns nothing
#
# The task is small: 128 points in a plane, half of them in a disc, half in a ring around it. The
# network has 256 hidden units and two outputs, one for the disc and one for the ring. (Its inputs
# are the two coordinates of a point, and a 1 in place of a bias.)
#
# `mpgluon.cast_block` casts the network to FP16, also on a CPU. This is the training loop, as in
# plain Gluon:

# %%
SGD = {"learning_rate": 0.0005}


def train(net, options, steps=STEPS):
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    losses = []
    for _ in range(steps):
        with autograd.record():
            loss = loss_fn(net(inputs), labels)
        loss.backward()
        trainer.step(len(inputs))
        losses.append(loss.mean())
    return [loss.asscalar() for loss in losses]


# %% [markdown]
# We train the network three times, with the same start, data, learning rate and number of steps: in
# FP32, in FP16 with master weights (`multi_precision=True`), and in FP16 without them. The last one
# is the default of MXNet's optimizers. MXNet prints a warning for it, which we catch and show.

# %%
fp32_net, with_masters, without = make_net(cast=False), make_net(), make_net()
fp32_losses = train(fp32_net, SGD)
with_losses = train(with_masters, {**SGD, "multi_precision": True})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    without_losses = train(without, {**SGD, "multi_precision": False})
message = next((str(one.message) for one in caught if "float16" in str(one.message)), "none")
print(f"UserWarning: {message}\n")

start = weights_of(make_net())
runs = {"FP32": (fp32_net, fp32_losses), "FP16, masters": (with_masters, with_losses)}
runs["FP16, no masters"] = (without, without_losses)
rows = [
    (name, f"{losses[-1]:.4f}", f"{accuracy(net):.0%}", str((weights_of(net) != start).sum()))
    for name, (net, losses) in list(runs.items())[1:]
]
rows.insert(0, ("FP32", f"{fp32_losses[-1]:.4f}", f"{accuracy(fp32_net):.0%}", "-"))
print(Table(("training", "loss", "accuracy", f"weights of {len(start)} that moved"), rows))

# %% tags=["plot"] alt="Without masters: a level loss, a plain grey plane. With: both learn."
figure, panels = plt.subplot_mosaic("CC;AB", figsize=(6.2, 6.4), layout="constrained")
curves, planes = panels["C"], [panels["A"], panels["B"]]
every = STEPS // 10
curves.plot(fp32_losses, markevery=every, **FP32)
curves.plot(with_losses, markevery=(every // 2, every), **FP16)
curves.plot(without_losses, markevery=every, **WITHOUT)
curves.text(0.5 * STEPS, 0.655, "FP16 without masters", ha="center", va="top", color=FP16["color"])
curves.text(
    0.35 * STEPS, 0.42, "FP32, and FP16 with masters:\none line covers the other", va="bottom"
)
curves.set(title="Without masters the loss is a level line", ylim=(0, 0.75))
curves.set(xlabel="step", ylabel="training loss")
side = np.linspace(-1.15, 1.15, 81)
grid = np.stack([*(axis.ravel() for axis in np.meshgrid(side, side)), np.ones(81**2)], axis=1)
for plane, net, name in zip(planes, (without, with_masters), ("without masters", "with masters")):
    share = mx.nd.softmax(net(mx.nd.array(grid)))[:, 1].asnumpy().reshape(81, 81)
    image = plane.pcolormesh(side, side, share, cmap="PuOr", vmin=0, vmax=1, shading="nearest")
    for marker, some in (("o", points[:64]), ("X", points[64:])):
        plane.plot(*some[:, :2].T, marker, markersize=6, color="white", markeredgecolor="black")
    plane.set(title=f"FP16 {name}:\naccuracy {accuracy(net):.0%}", aspect="equal")
    plane.set(xticks=[], yticks=[])
figure.colorbar(image, ax=planes, label="probability of ring (x)", location="bottom", shrink=0.8)
plt.show()

# %% [markdown]
# What to notice: without masters the loss is a level line. It stays at $\ln 2$, about 0.693, the
# loss of guessing: the network gives both answers the probability 0.5 everywhere. Not one weight
# has changed. With masters, and everything else equal, the network learns the task as well as in
# FP32.
#
# The failure is so complete because of two properties of the start. The hidden units come in pairs
# that cancel in the output, so the network knows nothing at first. And no weight begins near zero.
# A section below shows what happens from an ordinary start.
#
# In a [figure to play with](../docs/play.md#a-training-that-you-can-break) you can watch this
# failure, and its repair, while a network learns.

# %% tags=["claim"]
assert not mx.optimizer.create("sgd").multi_precision
assert "Accumulating with float16" in message
assert np.array_equal(weights_of(without), start)
assert len(set(without_losses)) == 1
assert abs(without_losses[0] - np.log(2)) < 1e-4
assert 0.4 < accuracy(without) < 0.6
assert accuracy(with_masters) == accuracy(fp32_net) > 0.95
assert max(abs(a - b) for a, b in zip(with_losses, fp32_losses)) < 0.005
assert with_losses[-1] < without_losses[-1] / 2

# %% [markdown]
# ## An update below 1/4096 of its weight is always lost, one above 1/2048 never
#
# An update survives if it is more than half the spacing of the numbers around the weight. The
# spacing of FP16 lies between 1/2048 and 1/1024 of the weight: it depends on where the weight lies
# between two powers of two. So half of the spacing lies between 1/4096 and 1/2048. We try every
# normal FP16 number as the weight, with updates upwards and downwards. (Subnormal numbers have an
# even wider spacing, relative to their size. [Lesson 01](01_sixteen_bits.ipynb) shows them.)

# %%
numbers = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
normal = numbers[np.isfinite(numbers) & (np.abs(numbers) >= FLOAT16.smallest_normal)]
normal = normal[np.abs(normal) < 2**15]  # so that no sum overflows
lost = {}
for ratio in (1 / 8192, 1 / 4096, 1 / 3000, 1 / 2047, 1 / 1024):
    up, down = (round_to(normal + sign * normal * ratio, FLOAT16) == normal for sign in (1, -1))
    lost[ratio] = (up.mean() + down.mean()) / 2
    print(f"update = weight / {1 / ratio:.0f}: {lost[ratio]:6.1%} are lost")

# %% tags=["claim"]
assert lost[1 / 8192] == lost[1 / 4096] == 1
assert 0 < lost[1 / 3000] < 1
assert lost[1 / 2047] == lost[1 / 1024] == 0

# %% [markdown]
# ## All updates of the network that learns nothing are that small
#
# Here are the ratios of update to weight, for all weights of the network without masters.


# %%
def update_ratios(net):
    parameters = net.collect_params().values()
    gradients = np.concatenate([p.grad().asnumpy().ravel() for p in parameters]).astype(np.float64)
    return np.abs(SGD["learning_rate"] * gradients / len(inputs) / weights_of(net))


ratios = update_ratios(without)
print(f"the largest update is 1/{1 / ratios.max():.0f} of its weight")

# %% tags=["plot"] alt="Histogram of |update / weight|: every bar lies left of 1/4096."
figure, axes = plt.subplots(figsize=(6.2, 3.6), layout="constrained")
bins = np.arange(-26, -8, 0.5)
axes.hist(np.log2(ratios[ratios > 0]), bins=bins, color="0.75", edgecolor="black")
for place, style, text, side in (
    (-12, "--", "lost for certain ", "right"),
    (-11, ":", " never lost", "left"),
):
    axes.axvline(place, color="black", linestyle=style)
    axes.text(place, 1.02, text, ha=side, transform=axes.get_xaxis_transform())
axes.set_title("Without masters every update is lost", pad=22)
axes.set(xlim=(-26, -8), ylabel="number of weights", xlabel="log2 of |update / weight|")
plt.show()

# %% [markdown]
# What to notice: every bar lies to the left of the dashed line, which is 1/4096. So the first step
# changes no weight. The second step computes the same gradients and loses the same updates again,
# and so does each step after it. More steps do not help.

# %% tags=["claim"]
assert 0 < ratios.max() < 2**-12

# %% [markdown]
# ## An ordinary start hides the failure
#
# Initializers draw weights around zero. Some weights are tiny. The spacing of FP16 is fine there,
# so these weights keep their updates. We draw the start from `mx.init.Uniform(1.5)` and train
# again.

# %%
ordinary = {"with masters": make_net(ordinary=True), "without": make_net(ordinary=True)}
first_loss = float(loss_fn(ordinary["without"](inputs), labels).mean().asscalar())
ordinary_losses = {
    name: train(net, {**SGD, "multi_precision": name == "with masters"})
    for name, net in ordinary.items()
}
lost_share = (update_ratios(ordinary["without"]) < 2**-12).mean()
print(f"loss at the start: {first_loss:.2f}")
for name, losses in ordinary_losses.items():
    print(f"loss after {STEPS} steps, {name}: {losses[-1]:.3f}")
print(f"without masters, {lost_share:.0%} of the updates in the last step were lost for certain")

# %% tags=["plot"] alt="From an ordinary start the loss falls quickly with masters, slowly without."
figure, axes = plt.subplots(figsize=(6.2, 3.6), layout="constrained")
for (name, losses), look in zip(ordinary_losses.items(), (FP16, WITHOUT)):
    axes.plot(losses, markevery=every, **look)
    axes.text(1.01 * STEPS, losses[-1], name, va="center", color=FP16["color"])
axes.set(title="From an ordinary start both learn, but one learns slowly", xlabel="step")
axes.set(ylabel="loss", xlim=(0, STEPS))
axes.set_ylim(bottom=0)
axes.spines[["right", "top"]].set_visible(False)
plt.show()

# %% [markdown]
# What to notice: this is the dangerous case. The loss falls, so nothing seems wrong. But most
# updates are lost, and the network learns much more slowly than it could. A larger learning rate
# would help for a while. But later in every training, updates become small again.

# %% tags=["claim"]
end_with, end_without = (losses[-1] for losses in ordinary_losses.values())
assert 1.5 * end_with < end_without < 0.9 * first_loss
assert lost_share > 0.8

# %% [markdown]
# ## A master weight collects what FP16 loses
#
# Here are the steps of the drawing at the top from scratch, with a single weight. The loss is
# $(w - 1.25)^2 / 2$, its gradient is $w - 1.25$, the learning rate is 0.001, and the weight begins
# at 1.

# %%
rate, target = np.float32(0.001), np.float16(1.25)
alone, copy, master = np.float16(1), np.float16(1), np.float32(1)
history = []
for _ in range(8000):
    # without a master: the FP16 weight itself is updated
    alone = alone - np.float16(rate) * (alone - target)
    # with a master: the forward pass sees the copy, the update goes to the master
    gradient = copy - target
    master = master - rate * np.float32(gradient)
    copy = np.float16(master)
    history.append((alone, copy, master))
print(f"after {len(history)} steps: alone {alone}, copy {copy}, master {master:.5f}")

# %% tags=["plot"] alt="A master and its copy rise to 1.25; a weight without a master stays at 1."
alone_at, copy_at, master_at = np.array(history, dtype=np.float64).T
figure, (whole, part) = plt.subplots(2, 1, figsize=(6.2, 6.4), layout="constrained")
for axes, end in ((whole, len(history)), (part, 40)):
    marks = end // 10
    axes.plot(master_at[:end], markevery=marks, **FP32)
    look = {**FP16, "markevery": (marks // 2, marks)}
    axes.step(np.arange(end), copy_at[:end], where="post", **look)
    axes.plot(alone_at[:end], markevery=marks, **WITHOUT)
    axes.set(xlabel="step", ylabel="weight (no unit)")
whole.set(title="Without a master the weight never moves", ylim=(0.98, 1.28))
whole.text(2600, 1.17, "master and copy\n(one covers the other)")
whole.text(4000, 1.01, "FP16 without a master", color=FP16["color"])
part.set(title="The first 40 steps: the copy climbs in stairs")
part.text(18, master_at[21], "FP32 master  ", ha="right")
part.text(30, copy_at[27], "its FP16 copy", color=FP16["color"], va="top")
part.text(20, 1.0004, "FP16 without a master", color=FP16["color"])
plt.show()

# %% [markdown]
# What to notice: the copy stands still for several steps while the master collects updates. Then
# the copy jumps by one spacing. No update is lost; it only arrives later. At the end the copy is
# exactly 1.25, so its gradient is zero, and the master stays within half a spacing of it.

# %% tags=["claim"]
assert np.all(alone_at == 1)
assert copy_at[-1] == 1.25
assert abs(master_at[-1] - 1.25) <= FLOAT16.epsilon / 2
assert np.array_equal(copy_at, round_to(master_at, FLOAT16))

# %% [markdown]
# ## Master weights by hand need three extra lines
#
# `mpgluon.fp16_utils` has the functions for this. `prep_param_lists` returns the parameters of the
# network (the *model*) and an FP32 master of each. The Trainer receives the masters, so the
# optimizer updates those. Before the step, the FP16 gradients are copied to the masters. After the
# step, the masters are rounded and copied into the model.


# %%
def train_by_hand(net, steps=STEPS):
    model_params, master_params = fp16_utils.prep_param_lists(net)  # 1
    trainer = gluon.Trainer(master_params, "sgd", SGD)
    losses = []
    for _ in range(steps):
        with autograd.record():
            loss = loss_fn(net(inputs), labels)
        loss.backward()
        fp16_utils.model_grads_to_master_grads(model_params, master_params)  # 2
        trainer.step(len(inputs))
        fp16_utils.master_params_to_model_params(model_params, master_params)  # 3
        losses.append(loss.mean())
    return [loss.asscalar() for loss in losses], master_params


hand_net = make_net()
hand_losses, masters = train_by_hand(hand_net)
print(f"loss after {STEPS} steps: {hand_losses[-1]:.4f}, in FP32: {fp32_losses[-1]:.4f}")

# %% tags=["claim"]
for parameter, master in zip(hand_net.collect_params().values(), masters):
    weight, wide = parameter.data().asnumpy(), master.data().asnumpy()
    assert (weight.dtype, wide.dtype) == (np.float16, np.float32)
    assert np.array_equal(weight, wide.astype(np.float16))
assert abs(hand_losses[-1] / fp32_losses[-1] - 1) < 0.02

# %% [markdown]
# ## Masters begin with the weights from before the cast
#
# The cast rounds 0.1 to 0.09997559. A master made from the rounded weight would begin with the
# rounding error. So `cast_block` keeps the FP32 weights, and masters begin with them.

# %%
model_params, master_params = fp16_utils.prep_param_lists(make_net())
before_cast = make_net(cast=False)[0].weight.data()
copy, master = model_params[0].data().astype("float32"), master_params[0].data()
for name, array in (("copies", copy), ("masters", master)):
    difference = (array - before_cast).abs().max().asscalar()
    print(f"largest difference of the {name} from the weights before the cast: {difference:.2g}")

# %% tags=["claim"]
assert (copy != before_cast).sum() > 0
assert (master != before_cast).sum() == 0
assert np.array_equal(copy.asnumpy(), before_cast.asnumpy().astype(np.float16))
assert round_to(0.1, FLOAT16) == np.float64(0.0999755859375)

# %% [markdown]
# ## `multi_precision=True` gives the same weights, bit for bit
#
# In daily work you do not write those three lines. Give the Trainer the parameters of the cast
# network and `"multi_precision": True`, as in the first section of this lesson, and it keeps the
# masters.
#
# The module `amp` (automatic mixed precision) does more: `amp.init_trainer` adds a *loss scale*, a
# number that keeps small gradients from becoming zero. It is the subject of the [next
# lesson](03_lost_gradients.ipynb), so here it is switched off with `"none"`.


# %%
def train_with_amp(net, steps=STEPS):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {**SGD, "multi_precision": True})
    amp.init_trainer(trainer, "none")
    for _ in range(steps):
        with autograd.record():
            loss = loss_fn(net(inputs), labels)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                scaled_loss.backward()
        trainer.step(len(inputs))


amp_net = make_net()
train_with_amp(amp_net)
ways = {"by hand": hand_net, "multi_precision=True": with_masters, "amp": amp_net}
by_hand = weights_of(hand_net)
for name, net in ways.items():
    print(f"{name}: {(weights_of(net) != by_hand).sum()} of {len(by_hand)} weights differ")

# %% [markdown]
# The masters are equal too. To see them, we undo the casts: `mpgluon.restore` makes a network FP32
# again, with the masters as its weights.

# %%
hand_masters = np.concatenate([master.data().asnumpy().ravel() for master in masters])
for name in ("multi_precision=True", "amp"):
    mpgluon.restore(ways[name])
    print(f"{name}: {(weights_of(ways[name]) != hand_masters).sum()} masters differ")

# %% tags=["claim"]
assert by_hand.dtype == np.float16
assert hand_masters.dtype == np.float32
for name in ("multi_precision=True", "amp"):
    assert weights_of(ways[name]).tobytes() == hand_masters.tobytes()
assert np.array_equal(hand_masters.astype(np.float16), by_hand)
assert hand_losses == with_losses
assert not np.array_equal(by_hand, start)

# %% [markdown]
# ## With masters an optimizer takes the steps of FP32
#
# Three optimizers update the same weights fifty times, with the same gradients: in FP32, in FP16
# without masters, and in FP16 with the masters of `mpgluon`. FP16 holds these gradients exactly, so
# every difference comes from the weights.

# %%
first = mx.nd.array(drawn.normal(0, 1 / 8, (16, 8)))
gradients = drawn.normal(1 / 64, 1 / 16, (50, 16, 8)).astype(np.float16)


def without_masters(name, dtype):
    update = mx.optimizer.get_updater(mx.optimizer.create(name))
    weight = first.astype(dtype)
    for gradient in gradients:
        update([0], [mx.nd.array(gradient, dtype=dtype)], [weight])
    return weight.asnumpy()


def with_amp(name):
    layer = nn.Dense(16, in_units=8, use_bias=False)
    layer.initialize()
    layer.weight.set_data(first)
    mpgluon.cast_block(layer)
    trainer = gluon.Trainer(layer.collect_params(), name, {"multi_precision": True})
    amp.init_trainer(trainer, "none")
    for gradient in gradients:
        with autograd.record():
            loss = layer.weight.data().astype("float32") * mx.nd.array(gradient)
        loss.backward()
        trainer.step(1)
    mpgluon.restore(layer)  # leaves the masters as the weights
    return layer.weight.data().asnumpy()


outcomes, differences, rows = {}, {}, []
for name in ("adam", "rmsprop", "sgd"):
    in_fp32 = without_masters(name, "float32")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MXNet recommends multi_precision=True, too
            difference = np.abs(without_masters(name, "float16") - in_fp32).max()
        outcomes[name] = f"{difference:.5f}"
    except mx.base.MXNetError:
        outcomes[name] = "raises"
    differences[name] = np.abs(with_amp(name) - in_fp32).max()
    rows.append((name, outcomes[name], f"{differences[name]:g}"))
print(Table(("largest difference from FP32", "without masters", "with masters"), rows))

# %% [markdown]
# With masters the difference is 0: the optimizer receives FP32 masters and FP32 copies of the
# gradients, and never a 16-bit number. Without masters RMSprop raises an error, SGD loses updates,
# and Adam returns NaN ("not a number"). Adam adds $10^{-8}$ to a divisor so that it is never zero.
# In FP16, $10^{-8}$ is zero:

# %%
print("1e-8 in FP16:", np.float16(1e-8))

# %% [markdown]
# [This table](../docs/optimizers.md) has the same results for all 19 optimizers of MXNet. Look
# there before you train FP16 weights with another optimizer. `amp.init_trainer` refuses FP16
# weights without masters where the optimizer would raise an error or return NaN.

# %% tags=["claim"]
assert set(differences.values()) == {0}
assert (outcomes["adam"], outcomes["rmsprop"]) == ("nan", "raises")
assert float(outcomes["sgd"]) > FLOAT16.epsilon / 4  # two roundings of a weight below 1/2
assert np.float16(1e-8) == 0

# %% [markdown]
# ## Summary
#
# - An FP16 weight loses every update below 1/4096 of itself, in every step. So a network can learn
#   nothing at all, and no error is raised.
# - A master weight in FP32 collects the updates. The network sees its rounded copy.
# - `cast_block` and `multi_precision=True` do this. By hand it takes three lines, and gives the
#   same bits.
# - `multi_precision=False` is MXNet's default. Do not use it with FP16 weights.
#
# There is another remedy, which needs no copy: *stochastic rounding* rounds up or down at random,
# so that small updates survive on average. [Lesson 11](11_after_sixteen_bits.ipynb) repeats the
# experiment of this lesson with BF16 (`bfloat16`), which loses even more updates, and with
# stochastic rounding.
#
# ## Exercises
#
# Replace `...` by your answer and run the cell.

# %% [markdown]
# **02.1** (level 1) Adam keeps two running averages for each weight. How many bytes per weight does
# FP16 training with masters take, for the weight, its gradient, its master and the averages
# together? (The answer is a number of bytes.)

# %%
answer = ...
check("02.1", answer)


# %% tags=["solution"]
# Ask the arrays themselves, in FP32 and in FP16 with masters. Both need the same: 16 bits save
# memory elsewhere, in the arrays between the layers.
def bytes_of(arrays):
    if isinstance(arrays, (list, tuple)):
        return sum(map(bytes_of, arrays))
    return np.dtype(arrays.dtype).itemsize  # of one element


total = {}
for dtype in ("float32", "float16"):
    weight = mx.nd.ones(8, dtype=dtype)
    weight.attach_grad()
    adam = mx.optimizer.create("adam", multi_precision=dtype == "float16")
    state = adam.create_state_multi_precision(0, weight)  # with the master, if there is one
    total[dtype] = bytes_of([weight, weight.grad, state])
print(total)
assert check("02.1", total["float16"])

# %% [markdown]
# **02.2** (level 2) The single weight above begins at 1, and its target is 1.25. What is the
# smallest learning rate with which the weight moves without a master? (The answer is a learning
# rate, to within five percent.)

# %%
answer = ...
check("02.2", answer)

# %% tags=["solution"]
# The first update is rate * 0.25. It must be more than half the spacing above 1, which is 2**-11.
smallest_rate = FLOAT16.epsilon / 2 / 0.25
print(f"more than {smallest_rate:.6f}")
assert check("02.2", smallest_rate)

# %% [markdown]
# **02.3** (level 2) BF16 has 8 significant bits. Below which ratio of update to weight does a BF16
# weight lose every update? (The answer is a ratio, to within five percent; for FP16 it would be
# 1/4096.)

# %%
answer = ...
check("02.3", answer)

# %% tags=["solution"]
# Three significant bits less than FP16: the spacing and the limit are eight times as large.
limit = 8 / 4096
every_bf16 = 1 + np.arange(2**7) / 2**7  # from 1 up to 2
lost = [round_to(every_bf16 * (1 + sign * limit), BFLOAT16) == every_bf16 for sign in (1, -1)]
print(f"update = weight / {1 / limit:.0f}: {np.mean(lost):.0%} are lost")
assert check("02.3", limit)

# %% [markdown]
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1, "FP32 master copy of
#   weights".
# - NVIDIA, "Training With Mixed Precision" user guide, on master weights.
# - IEEE 754-2019, 4.3.1 (rounding to nearest, ties to even).
# - Chizat, Oyallon, Bach, "On Lazy Training in Differentiable Programming", NeurIPS 2019, for the
#   start with pairs that cancel.
#
# [← 01 Which numbers do sixteen bits hold?](01_sixteen_bits.ipynb) · [All lessons](README.md) ·
# [03 Where do small gradients go? →](03_lost_gradients.ipynb)
