# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Why does a network in 16 bits need a copy of its weights in 32?
#
# A step of training adds a small number to each weight. In float16 many of these sums come out as
# the old weight, and the network learns less, or nothing, without any error. The remedy is old and
# simple: keep a copy of each weight in float32 (FP32 for short), add to that, and round it to
# float16 for the forward pass. The copy is called the *master weight*.
#
# ## What you will be able to do
#
# - Say which updates a float16 weight loses, from the ratio of update to weight.
# - Train a float16 network with master weights, by hand, and see each copy.
# - Get the same weights, bit for bit, from `multi_precision=True` and from `mpgluon.amp`.
# - Look up what your optimizer does without masters.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %%
import warnings

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mpgluon
from mpgluon import FLOAT16, amp, fp16_utils, round_to
from mpgluon.diagnostics.optimizers import optimizer_names, report_on_optimizer
from mpgluon.plots import FORMAT_LOOKS
from mpgluon.tables import Table

# %% [markdown]
# ## A thousand updates that never happen
#
# The first float16 above 1 is $1 + 2^{-10}$, about 1.001. So $1 + 0.0001$ is rounded back to 1.
# The second update starts from 1 again and is lost in the same way, and so is the thousandth.

# %%
weight, master = np.float16(1), np.float32(1)
for _ in range(1000):
    weight += np.float16(0.0001)
    master += np.float32(0.0001)
print(f"after 1000 updates: float16 {float(weight)}, float32 {master:.4f}")
assert weight == 1
assert abs(master - 1.1) < 1e-4
assert weight == round_to(1 + 0.0001, FLOAT16)

# %% [markdown]
# ## An update below 1/4096 of its weight is always lost, one above 1/2048 never
#
# An update survives if it is more than half the spacing of the numbers around the weight. The
# spacing of float16 lies between 1/2048 and 1/1024 of the weight, depending on where between two
# powers of two the weight is. So half of it lies between 1/4096 and 1/2048. We try every normal
# float16, upwards and downwards. (Subnormal numbers, below $2^{-14}$, have wider spacing still.)

# %%
numbers = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
normal = numbers[np.isfinite(numbers) & (np.abs(numbers) >= FLOAT16.smallest_normal)]
normal = normal[np.abs(normal) < 2**15]  # so that no sum overflows
ratios = [2**-13, 2**-12, 0.75 * 2**-11, 1.001 * 2**-11, 2**-10]
lost = {}
for ratio in ratios:
    up, down = (round_to(normal + sign * normal * ratio, FLOAT16) == normal for sign in (1, -1))
    lost[ratio] = (up.mean() + down.mean()) / 2
    print(f"update = weight / {1 / ratio:6.1f}: {lost[ratio]:6.1%} are lost")
assert lost[2**-13] == lost[2**-12] == 1
assert 0 < lost[0.75 * 2**-11] < 1
assert lost[1.001 * 2**-11] == lost[2**-10] == 0

# %% [markdown]
# ## A master weight collects what float16 would lose
#
# Now a weight that learns. The loss is $(w - 1.25)^2 / 2$, its gradient is $w - 1.25$, the
# learning rate is 0.001, and we begin at 1. Once without a master: the float16 weight is updated
# in place. Once with one: the forward pass sees the float16 copy, the update goes to the float32
# master, and the copy is made anew after each step.

# %%
steps, rate, target = 8000, np.float32(0.001), np.float16(1.25)
alone, copy, master = np.float16(1), np.float16(1), np.float32(1)
history = []
for _ in range(steps):
    alone = alone - np.float16(rate) * (alone - target)
    gradient = copy - target  # a float16, as in a network
    master = master - rate * np.float32(gradient)
    copy = np.float16(master)
    history.append((alone, copy, master))
alone_at, copy_at, master_at = np.array(history, dtype=np.float64).T
print(f"after {steps} steps: alone {alone_at[-1]}, copy {copy_at[-1]}, master {master_at[-1]:.5f}")
assert np.all(alone_at == 1)
assert copy_at[-1] == 1.25
assert abs(master_at[-1] - 1.25) <= FLOAT16.epsilon / 2
assert np.array_equal(copy_at, round_to(master_at, FLOAT16))

# %%
figure, (whole, part) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
FP32, FP16 = FORMAT_LOOKS["float32"], FORMAT_LOOKS["float16"]  # as in all lessons
WITHOUT = {**FP16, "linestyle": ":", "marker": "x"}
for axes, end in ((whole, steps), (part, 40)):
    every = end // 10
    axes.plot(master_at[:end], label="float32 master", markevery=every, **FP32)
    look = {**FP16, "markevery": (every // 2, every)}
    axes.step(np.arange(end), copy_at[:end], where="post", label="its float16 copy", **look)
    axes.plot(alone_at[:end], label="float16 without a master", markevery=every, **WITHOUT)
    axes.set(xlabel="step", ylabel="weight (no unit)")
whole.set(title="The weight without a master never moves")
part.set(title="The first 40 steps: the copy climbs in stairs")
whole.legend()
plt.show()

# %% [markdown]
# What to notice: the copy stands still for several steps while the master collects, and then it
# jumps by one spacing. Nothing is lost, it only arrives later. At the end the copy is 1.25
# exactly, so its gradient is zero, and the master rests within half a spacing of it.
#
# ## Most updates of a network are that small
#
# A small network is to learn a sine from 128 points. `mpgluon.cast_block` casts it to float16,
# also on a CPU. First we train it in FP32 and look at the updates: what share of them is below
# 1/2048 of its weight? Those are in danger, and all below 1/4096 would be lost for certain.

# %%
inputs = mx.nd.array(np.linspace(-1, 1, 128)[:, None])
targets = mx.nd.sin(4 * inputs)
loss_fn = gluon.loss.L2Loss()
SGD = {"learning_rate": 0.05}
STEPS = 800 if FAST else 2000


# %%
def make_net(cast=True):
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Dense(32, in_units=1, activation="tanh"))
    net.add(nn.Dense(32, in_units=32, activation="tanh"), nn.Dense(1, in_units=32))
    net.initialize(mx.init.Xavier(magnitude=3))
    if cast:
        mpgluon.cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


# %%
def train(net, trainer, steps):
    losses = []
    for _ in range(steps):
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
        loss.backward()
        trainer.step(len(inputs))
        losses.append(loss.mean())
    return [loss.asscalar() for loss in losses]


# %%
fp32_net = make_net(cast=False)
fp32_trainer = gluon.Trainer(fp32_net.collect_params(), "sgd", SGD)
fp32_losses = train(fp32_net, fp32_trainer, STEPS)
print(f"loss at the beginning {fp32_losses[0]:.4f}, after {STEPS} steps {fp32_losses[-1]:.4f}")
assert fp32_losses[-1] < fp32_losses[0]

# %%
matrix = fp32_net[1].weight
update = SGD["learning_rate"] * matrix.grad().asnumpy().astype(np.float64) / len(inputs)
ratio = np.abs(update / matrix.data().asnumpy()).ravel()
in_danger, certain = (ratio < 2**-11).mean(), (ratio < 2**-12).mean()
assert in_danger > certain > 0.5
print(f"{len(ratio)} weights: {in_danger:.1%} in danger, {certain:.1%} certainly lost")

figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
axes.hist(np.log2(ratio), bins=np.arange(-30, 1), color="0.7", edgecolor="black")
axes.axvline(-12, color="black", linestyle="--", label="below: lost for certain")
axes.axvline(-11, color="black", linestyle=":", label="above: never lost")
axes.set(title=f"Updates of one layer after {STEPS} steps", ylabel="number of weights")
axes.set_xlabel("log2 of |update / weight|")
axes.legend()
plt.show()

# %% [markdown]
# What to notice: most updates lie to the left of the dashed line. A float16 weight would not feel
# them at all. A smaller learning rate moves the whole heap further to the left.
#
# ## Pure float16 training learns less, and MXNet warns of it
#
# `multi_precision=False` is the default of MXNet's optimizers: they then update the float16
# weights themselves. This is the one failure that we provoke in this notebook. MXNet goes on, but
# it warns, so we catch the warning and print it. The network still learns something: from the few
# updates that are large enough.

# %%
assert not mx.optimizer.create("sgd").multi_precision
pure_net = make_net()
pure_trainer = gluon.Trainer(pure_net.collect_params(), "sgd", {**SGD, "multi_precision": False})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    pure_losses = train(pure_net, pure_trainer, STEPS)
messages = {str(one.message) for one in caught if one.category is UserWarning}
print(*messages)
print(f"loss after {STEPS} steps: {pure_losses[-1]:.4f}, in FP32: {fp32_losses[-1]:.4f}")
assert any("Accumulating with float16" in message for message in messages)
assert pure_losses[-1] > 1.1 * fp32_losses[-1]

# %% [markdown]
# ## Master weights by hand: three extra lines per training loop
#
# `mpgluon.fp16_utils` has the parts. `prep_param_lists` returns the parameters of the network (the
# *model*) and an FP32 master of each. The Trainer is given the masters, so they are what the
# optimizer updates. Before the step, the float16 gradients are copied to the masters'. After it,
# the masters are rounded into the model.


# %%
def train_by_hand(net, steps):
    model_params, master_params = fp16_utils.prep_param_lists(net)
    trainer = gluon.Trainer(master_params, "sgd", SGD)
    losses = []
    for _ in range(steps):
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
        loss.backward()
        fp16_utils.model_grads_to_master_grads(model_params, master_params)
        trainer.step(len(inputs))
        fp16_utils.master_params_to_model_params(model_params, master_params)
        losses.append(loss.mean())
    return [loss.asscalar() for loss in losses], master_params


# %%
hand_net = make_net()
hand_losses, masters = train_by_hand(hand_net, STEPS)
print(f"loss after {STEPS} steps: {hand_losses[-1]:.4f}, in FP32: {fp32_losses[-1]:.4f}")
for parameter, master in zip(hand_net.collect_params().values(), masters):
    weight, wide = parameter.data().asnumpy(), master.data().asnumpy()
    assert (weight.dtype, wide.dtype) == (np.float16, np.float32)
    assert np.array_equal(weight, wide.astype(np.float16))
assert abs(hand_losses[-1] / fp32_losses[-1] - 1) < 0.02

# %%
figure, (curves, fits) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
every = STEPS // 10
curves.plot(fp32_losses, label="FP32", markevery=every, **FP32)
curves.plot(hand_losses, label="float16 with masters", markevery=(every // 2, every), **FP16)
curves.plot(pure_losses, label="float16 without", markevery=every, **WITHOUT)
curves.set(title="Training loss", xlabel="step", ylabel="loss (half the squared error)")
curves.legend()
fits.plot(inputs.asnumpy(), targets.asnumpy(), color="0.7", linewidth=4, label="target")
for net, label, look in (
    (hand_net, "float16 with masters", FP16),
    (pure_net, "float16 without", WITHOUT),
):
    fits.plot(inputs.asnumpy(), net(inputs).asnumpy(), label=label, markevery=16, **look)
fits.set(title=f"What was learnt after {STEPS} steps", xlabel="input", ylabel="output")
fits.set_ylim(top=2)
fits.legend()
plt.show()

# %% [markdown]
# Float16 with masters follows FP32 so closely that the two curves cover each other, although every
# forward and backward pass is in float16.
#
# ## Masters begin with the weights from before the cast
#
# The cast rounds 0.1 to 0.09997559. A master made from that would begin with the rounding error.
# `cast_block` remembers the FP32 weights, and masters begin with them.

# %%
before = [
    parameter.data().asnumpy() for parameter in make_net(cast=False).collect_params().values()
]
model_params, master_params = fp16_utils.prep_param_lists(make_net())
for value, parameter, master in zip(before, model_params, master_params):
    assert np.array_equal(master.data().asnumpy(), value)
    assert np.array_equal(parameter.data().asnumpy(), value.astype(np.float16))
first, rounded = master_params[2].data(), model_params[2].data().astype("float32")
print("largest rounding error of the cast:", (first - rounded).abs().max().asscalar())
assert (first != rounded).sum() > 0
assert round_to(0.1, FLOAT16) == np.float64(0.0999755859375)

# %% [markdown]
# ## `multi_precision=True` gives the same weights, bit for bit
#
# In daily work nobody writes those three lines. Give the Trainer the parameters of the cast
# network and `"multi_precision": True`, and it keeps the masters. Then the training loop is that
# of FP32.
#
# The module `amp` (automatic mixed precision) has more: `amp.init_trainer` adds a *loss scale*, a
# number that keeps small gradients from becoming zero. It is the subject of the next notebook, so
# here it is switched off with `"none"`.


# %%
def train_with_amp(net, trainer, steps):
    amp.init_trainer(trainer, "none")
    for _ in range(steps):
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                scaled_loss.backward()
        trainer.step(len(inputs))


def bits(net):
    return [parameter.data().asnumpy().tobytes() for parameter in net.collect_params().values()]


# %%
plain_net, amp_net = make_net(), make_net()
options = {**SGD, "multi_precision": True}
plain_losses = train(plain_net, gluon.Trainer(plain_net.collect_params(), "sgd", options), STEPS)
train_with_amp(amp_net, gluon.Trainer(amp_net.collect_params(), "sgd", options), STEPS)
assert bits(hand_net) == bits(plain_net) == bits(amp_net)
assert plain_losses == hand_losses
assert bits(pure_net) != bits(hand_net)
print("the float16 weights of all three ways are equal")

for net in (plain_net, amp_net):
    mpgluon.restore(net)  # takes the cast off: the network gets its masters as FP32 weights
    assert bits(net) == [master.data().asnumpy().tobytes() for master in masters]
print("and so are the masters")

# %% [markdown]
# ## With masters every optimizer of MXNet takes the steps of FP32
#
# `report_on_optimizer` runs an optimizer for 50 steps in several ways, on the same gradients, and
# compares the weights with FP32 training. Errors are in *units of the last place*: 1 is the
# spacing of the numbers around the weight. The errors without masters are in the units of float16,
# those of the masters in the much smaller units of FP32. (The last one in the list, `test`, is one
# that MXNet uses in its own tests.)

# %%
names = ("adam", "lars", "rmsprop", "sgd") if FAST else optimizer_names()
reports = [report_on_optimizer(name) for name in names]
rows = []
for report in reports:
    without = report.without_masters
    without = without if isinstance(without, str) else f"error {without:,.1f}"
    advice = report.advice.split(";")[0]  # behind the semicolon: what happens without masters
    rows.append((report.name, without, f"{report.masters:g}", advice))
print(Table(("optimizer", "without masters", "error of masters", "what to use"), rows))
assert all(report.masters == 0 for report in reports)
# report.mxnet: the error of MXNet's own masters, in FP32's units
assert [report.name for report in reports if report.mxnet > 1.5] == ["lars"]
outcomes = {report.name: report.without_masters for report in reports}
assert (outcomes["adam"], outcomes["rmsprop"]) == ("NaN", "raises")
assert outcomes["sgd"] > 1

# %% [markdown]
# With the masters of `mpgluon` the error is 0 everywhere: the optimizer is given FP32 masters and
# FP32 copies of the gradients, and never meets a 16-bit number. LARS is the reason for doing it
# that way. MXNet's own `multi_precision`, for networks that were not cast by `mpgluon`, leaves it
# to each optimizer to be careful, and LARS is not.
#
# Without masters some raise an error, some lose updates, and Adam returns NaN (not a number). Adam
# divides by a number to which it adds $10^{-8}$ so that it is never zero. In float16, $10^{-8}$ is
# zero.

# %%
print("1e-8 in float16:", np.float16(1e-8))
assert np.float16(1e-8) == 0

# %% [markdown]
# ## Summary
#
# - A float16 weight loses every update below 1/4096 of itself, for ever.
# - A master weight in FP32 collects them. The network sees its rounded copy.
# - `cast_block` and `multi_precision=True` do this; by hand it is three lines and the same bits.
# - `multi_precision=False` is MXNet's default. With float16 weights it is never what you want.
#
# ## Exercises
#
# 1. Count the bytes per weight for weights, gradients and masters: FP32 training, and float16
#    training with `multi_precision=True`. (Equal, and below 10. What 16 bits save is elsewhere: in
#    the arrays between the layers.)
# 2. How large must the learning rate be at least for the weight of the third section to move
#    without a master? (About two thousandths.)
# 3. bfloat16 has 8 significant bits. Below which ratio of update to weight does a bfloat16 weight
#    lose every update? (About two thousandths.)
#
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1, "FP32 master copy of
#   weights".
# - NVIDIA, "Training With Mixed Precision" user guide, on master weights.
# - IEEE 754-2019, 4.3.1 (rounding to nearest, ties to even).
