# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # What happens to a network that is cast to sixteen bits?
#
# Neural networks usually compute in FP32 (`float32`), with 32 bits for each number. FP16
# (`float16`) and BF16 (`bfloat16`) have 16 bits. FP16 keeps 11 significant bits and ends at 65504.
# BF16 keeps 8 significant bits and reaches as far as FP32. To *cast* a number is to round it to
# another format. To cast a network is to choose a format for each of its numbers. The picture shows
# a small network that computes in FP16; the diamonds are casts.
#
# ![A chain of boxes from images to loss. Images are FP32, and are rounded on their way into the
# convolution. Convolution, ReLU and dense layer compute in FP16, BatchNorm sums in FP32. The
# result is widened to FP32 for the loss; labels are int32. Above the chain, cast_block: weights
# are FP16. Below it, autocast: weights are FP32, and each is rounded on its way into the
# chain](figures/04_casts.svg)
#
# Images are rounded to FP16 on their way in, and results are widened to FP32 for the loss. A
# network can be cast in two ways. With `cast_block` (above the chain) the weights are FP16. With
# `autocast` (below it) they stay FP32, and are rounded each time they are used.
#
# ## What you will be able to do
#
# - turn an FP32 training script into an FP16 one with three changes, and read the cast's report;
# - say what must not be FP16 (sums, squares, labels), and show what happens otherwise;
# - choose between `cast_block` and `autocast`, and read a policy;
# - keep one block in FP32, and undo a cast;
# - say how a CPU computes in a format for which it has no instructions.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %% tags=["setup"]
import mpgluon
from mpgluon import amp
from mpgluon.tools.plots import FORMAT_LOOKS
from mpgluon_tools.diagnostics.doctor import check_machine, gather
from mpgluon_tools.tables import Table

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from teaching import check
from teaching.lesson_04 import make_images

random = np.random.default_rng(0)

# %% tags=["claim"]
assert [mpgluon.FLOAT16.significand_bits, mpgluon.FLOAT16.max] == [11, 65504]
assert [mpgluon.BFLOAT16.significand_bits, mpgluon.FLOAT32.significand_bits] == [8, 24]
assert mpgluon.BFLOAT16.max_exponent == mpgluon.FLOAT32.max_exponent

# %% [markdown]
# ## Gluon's own cast ends in an error on a CPU
#
# Gluon has a method for casting: `net.cast("float16")`. It rounds the *parameters* (weights and
# biases) to FP16. We cast one dense layer and give it an FP16 input. This cell fails **on
# purpose**.

# %%
plain_layer = nn.Dense(32, in_units=64)
plain_layer.initialize()
plain_layer.cast("float16")
message = ""
try:
    plain_layer(mx.nd.ones((16, 64), dtype="float16")).wait_to_read()
except mx.base.MXNetError as error:
    message = str(error).splitlines()[-1]
print(message)

# %% tags=["claim"]
assert "float16 fully connected layer is currentlyonly supported by CuDNN" in message

# %% [markdown]
# The parameters were cast, but the layer cannot compute: MXNet has FP16 matrix products for GPUs
# only (CuDNN is NVIDIA's library for them). `mpgluon.cast_block` works on GPUs and on CPUs.
#
# ## Three changes turn an FP32 script into an FP16 one
#
# Here is a small task. Pictures have 8 x 8 pixels in three colours. Pixels are whole numbers from
# 0 to 255, as image files store them. One quarter of each picture is brighter, and the network has
# to say which one. (Gluon calls each layer, and each network of layers, a *block*.)

# %%
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()


def make_net(norm=None):
    """Return the same FP32 network each time: 3 x 8 x 8 pixels in, 4 classes out."""
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1, in_channels=3))
        net.add(norm() if norm else nn.BatchNorm(in_channels=8))
        net.add(nn.Activation("relu"), nn.Dense(4, in_units=8 * 8 * 8))
    net.initialize(mx.init.Xavier())
    return net


def accuracy_of(net):
    """Return the share of right answers for 400 new pictures."""
    images, labels = make_images(400, seed=10_000)
    return np.mean(net(images).asnumpy().argmax(axis=1) == labels.asnumpy())


# %% [markdown]
# Comments in the code below mark the three changes. `multi_precision` asks the optimizer for
# *master weights*: FP32 copies of the weights, which it updates (lesson 02). The two lines of `amp`
# multiply the loss by a *loss scale*, so that small gradients do not become zero (lesson 03).


# %%
def train(net, loss_scale="dynamic", steps=40):
    """Train a network; return the loss of each step, and how many steps were skipped."""
    options = {"learning_rate": 0.02, "momentum": 0.9}
    options["multi_precision"] = True  # change 2: master weights
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, loss_scale)  # change 3: a loss scale
    losses = []
    for step in range(steps):
        images, labels = make_images(32, seed=step)
        with autograd.record():
            loss = loss_fn(net(images), labels)
            with amp.scale_loss(loss, trainer) as scaled_loss:  # change 3, too
                autograd.backward(scaled_loss)
        trainer.step(len(labels))
        losses.append(float(loss.mean().asscalar()))
    return losses, amp.skipped_steps(trainer)


# %%
fp16_net = make_net()
report = mpgluon.cast_block(fp16_net)  # change 1: the network is cast
fp16_losses, skipped = train(fp16_net)

fp32_net = make_net()
fp32_losses, _ = train(fp32_net, loss_scale="none")  # in FP32, changes 2 and 3 change nothing

for name, net, losses in (("FP32", fp32_net, fp32_losses), ("FP16", fp16_net, fp16_losses)):
    print(f"{name}: loss {losses[0]:.2f} -> {losses[-1]:.4f}, accuracy {accuracy_of(net):.1%}")
print(f"FP16 skipped {skipped} of {len(fp16_losses)} steps until the loss scale was small enough")

# %% tags=["claim"]
assert min(accuracy_of(fp32_net), accuracy_of(fp16_net)) > 0.95
assert skipped < 10

# %% [markdown]
# Both networks have learned the task. Now let us see what the first change did.
#
# ## The report says what was cast and what was kept
#
# `cast_block` returns a report. We print it, and the format of each parameter.


# %%
def formats_of(net):
    return {name: np.dtype(p.dtype).name for name, p in net.collect_params().items()}


print(report, end="\n\n")
print(Table(("parameter", "format"), list(formats_of(fp16_net).items())))

# %% tags=["claim"]
is_norm = {name: "norm" in name for name in formats_of(fp16_net)}
assert all((f == "float32") == is_norm[name] for name, f in formats_of(fp16_net).items())
assert report.parameters_kept == sum(is_norm.values())
kept_by_gluon = make_net(nn.LayerNorm)
kept_by_gluon(make_images(1, seed=0)[0])  # now all shapes are known
kept_by_gluon.cast("float16")
assert set(formats_of(kept_by_gluon).values()) == {"float16"}

# %% [markdown]
# The report says, line by line:
#
# 1. which formats the parameters, the computation and the result have;
# 2. how many blocks compute in FP16, and how: on a CPU *emulated* (a section below explains it), on
#    a GPU *natively*;
# 3. which blocks were kept in FP32. `cast_block` keeps all normalization layers: BatchNorm,
#    LayerNorm, GroupNorm and InstanceNorm (Gluon's `net.cast` keeps BatchNorm only);
# 4. how many parameters were cast.
#
# If a block passes its values to code that cannot be cast, such as NumPy, the report has a fifth
# line, *beyond reach*, with file and line number.
#
# In the picture at the top, BatchNorm takes FP16 numbers, computes in FP32, and rounds its result.
# The lower row is for later.
#
# BatchNorm and the loss must stay FP32, and labels must not be cast. The next three sections show
# why. Each begins with a failure.
#
# ## Sums must be FP32: in FP16 they stand still
#
# We add 20,000 random numbers between 0 and 1, once in FP32 and once in FP16. The picture shows
# the sum after each addition.

# %%
numbers = random.uniform(0, 1, 5_000 if FAST else 20_000).astype("float16")
fp16_sum = np.cumsum(numbers, dtype="float16")  # rounds after every addition
fp32_sum = np.cumsum(numbers, dtype="float32")
print(f"mean: FP32 {fp32_sum[-1] / len(numbers):.3f}, FP16 {fp16_sum[-1] / len(numbers):.3f}")

# %% tags=["plot"] alt="Two sums of the same random numbers. The one in FP32 grows along a straight line to the end; the one in FP16 follows it to 2048 and stays there."
figure, axes = plt.subplots(figsize=(6.2, 3.4), layout="constrained")
every = len(numbers) // 10
for name, sums in (("float32", fp32_sum), ("float16", fp16_sum)):
    axes.plot(sums, markevery=every, **FORMAT_LOOKS[name])
middle = len(numbers) * 6 // 10
axes.annotate(
    "added in FP32 ",
    (middle, fp32_sum[middle]),
    (0, 8),
    textcoords="offset points",
    ha="right",
)
axes.annotate(
    "added in FP16",
    (middle, fp16_sum[middle]),
    (0, -16),
    textcoords="offset points",
    color=FORMAT_LOOKS["float16"]["color"],
)
axes.set(xlabel="numbers added", ylabel="sum so far", ylim=(0, None))
axes.set_title("A sum in FP16 stands still at 2048")
plt.show()

# %% tags=["claim"]
assert fp16_sum[-1] == 2048
assert fp32_sum[-1] > 2400
assert np.spacing(np.float16(2048)) == 2

# %% [markdown]
# Above 2048 the distance between neighbouring FP16 numbers is 2. A number below 1 is less than half
# of this distance. So adding it changes nothing, however often.
#
# The *softmax* contains such a sum. It turns the results of a classifier (*logits*) into
# probabilities: it divides each exponential by the sum of all exponentials. With 10,000 equal
# logits, each class has the probability 0.0001. We compute it with an FP16 sum by hand, then with
# MXNet's FP16 softmax, and last with a softmax in a cast network.

# %%
classes = 10_000
exponentials = np.exp(np.zeros(classes, "float16"))
fp16_probability = float(exponentials[0] / np.cumsum(exponentials, dtype="float16")[-1])
mxnet_probability = mx.nd.softmax(mx.nd.zeros((1, classes), dtype="float16"))[0, 0].asscalar()
softmax = nn.HybridLambda(lambda F, x: F.softmax(x))
mpgluon.cast_block(softmax)
cast_probability = softmax(mx.nd.zeros((1, classes), dtype="float16"))[0, 0].asscalar()

ways = ("FP16 sum by hand", "MXNet's FP16 softmax", "softmax in a cast network", "exact")
found = (fp16_probability, mxnet_probability, cast_probability, 1 / classes)
rows = [(way, f"{p:.6f}", f"{-np.log(float(p)):.4f}") for way, p in zip(ways, found)]
print(Table(("softmax of 10,000 zeros", "probability", "loss"), rows))

# %% tags=["claim"]
assert fp16_probability == 1 / 2048
assert abs(cast_probability - 1 / classes) < 1e-9
images, labels = make_images(16, seed=0)
logits = fp16_net(images)
loss = loss_fn(logits, labels)
wide = logits.asnumpy().astype("float64")
loss_by_hand = np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(16), labels.asnumpy()]
assert logits.dtype == loss.dtype == np.float32
assert np.allclose(loss.asnumpy(), loss_by_hand, atol=1e-5)

# %% [markdown]
# The FP16 sum stands still at 2048 again, so the loss is wrong. But it is still an ordinary number,
# and no warning appears. (MXNet adds in FP16 on a CPU, unless the environment variable
# `MXNET_SAFE_ACCUMULATION` is 1.)
#
# In a cast network, softmax, means and sums of many numbers are computed in FP32. The network also
# returns FP32, so a loss function after it computes in FP32 too.
#
# ## Squares must be FP32: in FP16 they overflow from 256 on
#
# $256^2 = 65536$ is more than FP16's largest number, 65504, and becomes infinite: it *overflows*.
# How large are the results of our convolution?

# %%
images, labels = make_images(400, seed=10_000)
filtered = fp16_net[0](images).asnumpy()  # FP32 here, outside of the network, of FP16's numbers
filtered = filtered.astype("float16")
with np.errstate(over="ignore"):  # NumPy would warn of the overflow that we expect
    squares = np.square(filtered)
print(f"the convolution's {filtered.dtype} numbers are at most {np.abs(filtered).max():.0f}")
print(f"infinite FP16 squares: {np.isinf(squares).mean():.0%}")
print(f"pictures with at least one: {np.isinf(squares).any(axis=(1, 2, 3)).mean():.0%}")

# %% tags=["claim"]
assert np.array_equal(filtered, fp16_net[0](images).asnumpy())
assert float(np.float16(256)) ** 2 > np.finfo("float16").max
assert np.isfinite(filtered).all()
assert np.isinf(squares).any(axis=(1, 2, 3)).mean() > 0.99

# %% [markdown]
# A normalization layer needs such squares: it divides by the root of their mean. One infinite
# square makes the mean infinite, and every number divided by its root becomes zero.
#
# `cast_block` knows Gluon's normalization layers and computes them in FP32. But it cannot know a
# layer that you wrote yourself, such as this one. We train a network with this layer in FP32, and
# then cast it.


# %%
class RootMeanSquare(nn.HybridBlock):
    """Divide the numbers of each image by the root of the mean of their squares."""

    def hybrid_forward(self, F, x):
        mean = F.mean(F.broadcast_mul(x, x), axis=(1, 2, 3), keepdims=True)
        return F.broadcast_div(x, F.sqrt(mean))


def show_answers(title, net):
    print(f"{title}: accuracy {accuracy_of(net):.0%}. Logits of two pictures:")
    print(net(images[:2]).asnumpy().round(2))


own_net = make_net(RootMeanSquare)
train(own_net, loss_scale="none")
fp32_accuracy = accuracy_of(own_net)
show_answers("FP32", own_net)
mpgluon.cast_block(own_net)
show_answers("FP16", own_net)

# %% tags=["claim"]
assert fp32_accuracy > 0.95
assert accuracy_of(own_net) < 0.4
same = own_net(images).asnumpy()
assert np.isfinite(same).all()
assert (same == same[0]).all()
inputs = mx.nd.array(filtered)  # FP32 copies of FP16 numbers
plain_norm, cast_norm = (nn.BatchNorm(in_channels=8) for _ in range(2))
for norm in (plain_norm, cast_norm):
    norm.initialize()
mpgluon.cast_block(cast_norm)
with autograd.record():  # statistics are computed in training only
    from_plain, from_cast = plain_norm(inputs), cast_norm(inputs)
assert np.array_equal(from_plain.asnumpy().astype("float16"), from_cast.asnumpy())

# %% [markdown]
# In FP16 the network gives the same answer to all pictures: its last layer receives only zeros, and
# returns its bias. No number is infinite at the end, none is NaN ("not a number", such as 0/0), and
# there is no warning. A section below repairs this network.
#
# ## Labels must not be cast: FP16 has no 2049
#
# Above 2048 the distance between FP16 numbers is 2, so odd whole numbers are lost too. Some recipes
# cast labels together with the images.

# %%
whole_numbers = np.array([2047, 2048, 2049, 2051])
as_fp16 = whole_numbers.astype("float16").astype(int)
print(Table(("label", "as FP16"), [(str(a), str(b)) for a, b in zip(whole_numbers, as_fp16)]))

# %% tags=["claim"]
assert list(as_fp16) == [2047, 2048, 2048, 2052]
table = nn.Embedding(3000, 1)
table.initialize()
mpgluon.cast_block(table)
rows = table.weight.data().asnumpy()
assert rows.dtype == np.float16
assert np.array_equal(table(mx.nd.array([2047, 2049], dtype="int32")).asnumpy(), rows[[2047, 2049]])
from_fp32, from_fp16 = (fp16_net(x).asnumpy() for x in (images, images.astype("float16")))
assert np.array_equal(from_fp32, from_fp16)

# %% [markdown]
# With more than 2048 classes, such a recipe trains the wrong classes. The same holds for the word
# numbers that go into an `Embedding`. `cast_block` casts the table of an `Embedding`, but not the
# numbers that choose its rows. Keep your labels in `int32`: Gluon's `SoftmaxCrossEntropyLoss` takes
# them with logits of any format.
#
# Images may be FP16 or FP32. The first layer rounds them to FP16 anyway.
#
# ## `autocast` gives the same numbers from FP32 parameters
#
# Now to the lower row of the picture at the top. `amp.autocast` leaves the parameters in FP32, and
# rounds each of them every time it is used. The layers compute with the same numbers as with
# `cast_block`. Only the format of the parameters and of their *gradients* is different.


# %%
def logits_and_gradients(net):
    """Return the logits of one batch, and the gradient of each parameter."""
    images, labels = make_images(32, seed=0)
    with autograd.record():
        logits = net(images)
        loss = loss_fn(logits, labels)
    loss.backward()
    parameters = net.collect_params().items()  # running statistics have no gradient: "null"
    return logits.asnumpy(), {name: p.grad() for name, p in parameters if p.grad_req != "null"}


cast_net, auto_net = make_net(), make_net()
mpgluon.cast_block(cast_net)
amp.autocast(auto_net, "float16")
cast_logits, cast_gradients = logits_and_gradients(cast_net)
auto_logits, auto_gradients = logits_and_gradients(auto_net)

rows = []
for name, gradient in cast_gradients.items():
    other = auto_gradients[name]
    is_equal = np.array_equal(gradient.asnumpy(), other.asnumpy())
    rows.append((name, np.dtype(gradient.dtype).name, np.dtype(other.dtype).name, str(is_equal)))
print("logits equal:", np.array_equal(cast_logits, auto_logits))
print(Table(("gradient of", "cast_block", "autocast", "equal"), rows))

# %% tags=["claim"]
assert np.array_equal(cast_logits, auto_logits)
assert set(formats_of(auto_net).values()) == {"float32"}
assert all(is_equal == "True" for *_, is_equal in rows)

# %% [markdown]
# All logits and all gradients are equal, bit for bit. Which of the two should you use?
#
# | | `cast_block` | `autocast` |
# |---|---|---|
# | parameters | FP16, and an FP32 master of each in the optimizer | FP32 |
# | `multi_precision=True` | needed | has no effect |
# | loss scale for FP16 | needed | needed |
# | a network for inference | half the memory | the memory of FP32 |
# | BF16 on a CPU | possible | the usual way |
#
# For FP16, `autocast` needs a loss scale too: its gradients are computed as FP16 numbers, and only
# then widened to FP32.
#
# ## A policy is three formats
#
# A *policy* says which format is used where. It names three formats: for the parameters, for the
# computation and for the result. `Policy.parse` knows the usual policies by name, and reads others.

# %%
named = ("float32", "float16", "mixed_float16", "mixed_bfloat16")
custom = "params=float32,compute=float16,output=float16"
policies = {text: mpgluon.Policy.parse(text) for text in (*named, custom)}
rows = [(n, p.param_dtype, p.compute_dtype, p.output_dtype) for n, p in policies.items()]
print(Table(("policy", "parameters", "computation", "result"), rows))

# %% tags=["claim"]
other_net = make_net()
amp.autocast(other_net, policies[custom])
other_logits = other_net(make_images(32, seed=0)[0])
assert other_logits.dtype == np.float16
assert policies["float16"] == report.policy
assert policies["mixed_float16"] == amp.autocast(make_net(), "float16").policy

# %% [markdown]
# `"float16"` is the policy of `cast_block`. `"mixed_float16"` and `"mixed_bfloat16"` are the
# policies of `autocast` in the two formats. Both functions take a policy in place of a format. The
# last policy makes a network return FP16: use it only where no softmax and no loss follows.
#
# ## `restore` takes the cast off
#
# Rounding loses bits, and widening FP16 weights does not bring them back. So `cast_block` keeps the
# FP32 values, and `restore` puts them back. We try it with a new network, and with the network that
# failed.

# %%
before = make_net()[0].weight.data().asnumpy()
net = make_net()
mpgluon.cast_block(net)
widened = net[0].weight.data().asnumpy().astype("float32")
mpgluon.restore(net)
restored = net[0].weight.data().asnumpy()
print(f"weights that widening leaves changed: {np.mean(widened != before):.0%}")
print(f"weights that restore leaves changed: {np.mean(restored != before):.0%}")

mpgluon.restore(own_net)
show_answers("The network that failed, in FP32 again", own_net)

# %% tags=["claim"]
assert np.array_equal(restored, before)
assert not np.array_equal(widened, before)
assert accuracy_of(own_net) == fp32_accuracy

# %% [markdown]
# ## One block can stay in FP32
#
# `keep_fp32` names the blocks that a cast leaves alone: kinds of blocks, or single blocks of this
# network. These blocks keep FP32 parameters **and** compute in FP32. The default is
# `mpgluon.NORMALIZATION_LAYERS`; we add our own kind of normalization to it.

# %%
print(mpgluon.cast_block(own_net, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, RootMeanSquare)))
show_answers("FP16, with RootMeanSquare in FP32", own_net)

# %% tags=["claim"]
assert abs(accuracy_of(own_net) - fp32_accuracy) < 0.02
assert set(formats_of(own_net).values()) == {"float16"}

# %% [markdown]
# The network gives its FP32 answers again, and its weights are FP16.
#
# A block is kept **with all blocks in it**. Below, a network has two parts, and the first is itself
# a network. We keep the first part, so only the layer after it is cast. A part of a cast network
# cannot be cast once more; the last lines try it, and fail **on purpose**.

# %%
whole = nn.HybridSequential(prefix="whole_")
whole.add(make_net(), nn.Dense(2, in_units=4, prefix="last_"))
whole[1].initialize()
mpgluon.cast_block(whole, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, whole[0]))
print(Table(("parameter", "format"), list(formats_of(whole).items())), end="\n\n")

message = ""
try:
    amp.autocast(whole[1])
except mpgluon.PrecisionError as error:
    message = str(error)
print(message)

# %% tags=["claim"]
assert all((f == "float32") == name.startswith("net_") for name, f in formats_of(whole).items())
assert "last is already cast as a part of whole" in message

# %% [markdown]
# `keep_fp32` also takes the name of a single *operator* as text, such as `"Convolution"`. Operators
# are the functions that a block calls as `F.…`. Exercise 04.3 is about that.
#
# ## A CPU multiplies exactly, adds in FP32 and rounds once
#
# Most CPUs have no instructions for FP16 products. So how does a CPU compute what a GPU would? A
# GPU multiplies FP16 matrices in its *Tensor Cores*. They multiply exactly, add in FP32, and round
# the sum to FP16 at the end. A CPU can do the same in FP32: a product of two numbers of 11 bits has
# at most 22 bits, and FP32 has room for 24. Here is a dense layer computed in this way, in NumPy.


# %%
def dense_with_fp32_sums(inputs, weight, bias):
    """Return inputs · weightᵀ + bias: FP16 numbers in, FP32 sums, one rounding at the end."""
    inputs, weight, bias = (x.astype("float16").astype("float32") for x in (inputs, weight, bias))
    return (inputs @ weight.T + bias).astype("float16")


def dense_of_mpgluon(inputs, weight, bias):
    """Return the same from a cast layer."""
    layer = nn.Dense(len(weight), in_units=weight.shape[1])
    layer.initialize()
    layer.weight.set_data(mx.nd.array(weight))
    layer.bias.set_data(mx.nd.array(bias))
    mpgluon.cast_block(layer)
    return layer(mx.nd.array(inputs)).asnumpy()


shapes = ((16, 512), (32, 512), (32,))  # of inputs, weight and bias
sixteenths = [random.integers(-32, 33, shape) / 16 for shape in shapes]
any_numbers = [random.standard_normal(shape).astype("float16") for shape in shapes]
for name, operands in (("multiples of 1/16", sixteenths), ("random numbers", any_numbers)):
    by_hand, by_mpgluon = dense_with_fp32_sums(*operands), dense_of_mpgluon(*operands)
    print(f"{name}: {np.mean(by_hand == by_mpgluon):.1%} of the results are equal")

# %% tags=["claim"]
assert np.array_equal(dense_with_fp32_sums(*sixteenths), dense_of_mpgluon(*sixteenths))
pairs = random.standard_normal((2, 100_000)).astype("float16")
exact_products = pairs[0].astype("float64") * pairs[1].astype("float64")
assert np.array_equal(pairs[0].astype("float32") * pairs[1].astype("float32"), exact_products)
inputs, weight, bias = (x.astype("float64") for x in any_numbers)
sizes = np.abs(inputs) @ np.abs(weight).T + np.abs(bias)
one_step = np.spacing(np.abs(by_hand)).astype("float64")
fp32_order = 2 * 513 * 2.0**-24 * sizes  # what the order of 513 terms can change, at most
assert (np.abs(by_mpgluon - by_hand.astype("float64")) <= one_step + fp32_order).all()

# %% [markdown]
# Multiples of 1/16 agree bit for bit. With random numbers a few results may differ, by one step of
# FP16: the last bit of an FP32 sum depends on the *order* in which its terms are added, and this
# bit may decide how the sum is rounded to FP16.
#
# For the same reason a GPU and a CPU agree up to such steps, and not bit for bit. (A Tensor Core
# also adds several products at a time and cuts off what does not fit. `accumulation="hopper"` in a
# policy makes a CPU add like that:
# [what a Tensor Core computes](../docs/gpu.md#what-a-tensor-core-computes).)
#
# So FP16 on a CPU is for learning, testing and debugging: it gives the numbers of a GPU, but not
# its speed (lesson 07 measures it).
#
# ## BF16 is native where the processor has it
#
# Some CPUs have instructions for BF16. They compute products with these, and BF16 is faster than
# FP32. On other CPUs, BF16 is emulated like FP16. `check_machine` says which of the two you have,
# and so does the report of a cast. We compare FP16 and BF16 with FP32.

# %%
machine = check_machine()
for finding in machine.findings:
    if finding.topic == "bfloat16":
        print(f"{finding.topic}: {finding.what}. {finding.why}".strip())
        is_native = finding.level == "ok"

images = make_images(400, seed=10_000)[0]
fp32_logits = make_net()(images).asnumpy()
errors = {}
for dtype in ("float16", "bfloat16"):
    net = make_net()
    report = amp.autocast(net, dtype)
    difference = np.abs(net(images).asnumpy() - fp32_logits)
    errors[dtype] = difference.mean() / np.abs(fp32_logits).max()
    print(f"{dtype}, {report.arithmetic}: mean error {errors[dtype]:.1e} of the largest logit")
print(f"BF16's error is {errors['bfloat16'] / errors['float16']:.1f} times as large")

# %% tags=["claim"]
instructions = gather().cpu_flags & {"avx512_bf16", "amx_bf16"}  # as the processor lists them
assert instructions or not is_native
assert is_native == (report.arithmetic == "native")
assert 2 < errors["bfloat16"] / errors["float16"] < 32
assert errors["float16"] < 4 * 2.0**-11

# %% [markdown]
# BF16 has three significant bits less than FP16, so each of its roundings is $2^3 = 8$ times as
# coarse. (Native BF16 rounds less often here, because the results between products stay FP32.) In
# return it has FP32's range: nothing overflows at 65504, and no loss scale is needed.
#
# ## You may debug imperatively what you train hybridized
#
# Gluon runs a network *imperatively*, operator by operator, or *hybridized*, as one graph that may
# be rearranged. A hybridized network is faster (lesson 07). In FP16 both give the same results, bit
# for bit.

# %%
imperative_net, graph_net = make_net(), make_net()
for net in (imperative_net, graph_net):
    mpgluon.cast_block(net)
graph_net.hybridize(static_alloc=True, static_shape=True)
logits_1, gradients_1 = logits_and_gradients(imperative_net)
logits_2, gradients_2 = logits_and_gradients(graph_net)
pairs = [(g.asnumpy(), gradients_2[name].asnumpy()) for name, g in gradients_1.items()]
equal = [np.array_equal(*pair) for pair in [(logits_1, logits_2), *pairs]]
print(f"{sum(equal)} of {len(equal)} arrays are equal: the logits, and {len(pairs)} gradients")

# %% tags=["claim"]
assert all(equal)
emulated = []
for hybridized in (False, True):
    net = make_net()
    amp.autocast(net, mpgluon.Policy.parse("emulated_bfloat16"))
    if hybridized:
        net.hybridize(static_alloc=True, static_shape=True)
    logits, gradients = logits_and_gradients(net)
    emulated.append([logits, *(g.asnumpy() for g in gradients.values())])
assert all(map(np.array_equal, *emulated))

# %% [markdown]
# For BF16 this holds where BF16 is emulated. `Policy.parse("emulated_bfloat16")` asks for emulation
# on any processor, and gives the same results on all of them. A graph in native BF16 may keep BF16
# where an imperative run has FP32.
#
# ## Summary
#
# - Three changes turn an FP32 script into an FP16 one: `cast_block`, `multi_precision=True`, and a
#   loss scale.
# - Sums, squares and labels must not be FP16: sums stand still at 2048, squares overflow from 256
#   on, and there is no 2049. `cast_block` keeps Gluon's normalization layers, all sums, and the
#   result in FP32. If a layer of your own squares its input, keep it in FP32 yourself.
# - `cast_block` makes FP16 parameters, `autocast` keeps them FP32. They compute the same numbers.
# - `keep_fp32` keeps a block in FP32 with all blocks in it. `restore` undoes the whole cast.
# - A CPU multiplies FP16 numbers exactly, adds in FP32 and rounds once, as a Tensor Core does,
#   except for the order of adding.
#
# ## Exercises
#
# Each answer is checked by running it. A solution is folded below each.

# %% [markdown]
# **04.1** (level 1) Exponentials overflow too. Which is the smallest FP16 number $x$ for which
# $e^x$ is infinite in FP16? Hand in a number.

# %%
answer = ...
check("04.1", answer)

# %% tags=["solution"]
every_fp16 = np.arange(0x7C00, dtype="uint16").view("float16")  # from 0 to 65504
with np.errstate(over="ignore"):  # the overflow is what we look for
    smallest = every_fp16[np.isinf(np.exp(every_fp16))].min()
# What is at least 65520 is rounded to infinity, so the answer is just above ln 65520.
print(f"{smallest}; ln 65520 is {np.log(65520):.4f}")
assert check("04.1", smallest)

# %% [markdown]
# **04.2** (level 3) What if the sums of a dense layer were FP16 too? Write
# `dense_with_fp16_sums(inputs, weight, bias)`: like `dense_with_fp32_sums` above, but every product
# and the sum after every addition is rounded to FP16. Hand in the function. The check compares its
# error with that of FP32 sums, for 64 inputs and for 4,096.


# %%
def dense_with_fp16_sums(inputs, weight, bias):
    return dense_with_fp32_sums(inputs, weight, bias)  # change this


answer = ...
check("04.2", answer)


# %% tags=["solution"]
def with_fp16_sums(inputs, weight, bias):
    products = inputs[:, None, :] * weight[None, :, :]  # each rounded to FP16
    sums = np.cumsum(products, axis=-1, dtype="float16")[..., -1]  # rounds after each addition
    return sums + bias


# Not `products.sum(dtype="float16")`, nor `@`: NumPy adds FP16 numbers in FP32 there.
assert check("04.2", with_fp16_sums)

# %% [markdown]
# **04.3** (level 2) We kept the whole block `RootMeanSquare` in FP32: four operators. Only one of
# them overflows. Cast the network with this one operator in FP32, and all the rest in FP16: which
# text do you add to `keep_fp32`? Hand in the text.

# %%
answer = ...
check("04.3", answer)

# %% tags=["solution"]
# A mean is FP32 in any case, and the root of an FP32 number stays FP32. The product overflows.
assert check("04.3", "broadcast_mul")

# %% [markdown]
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018: section 3.1 (FP32 master copy of
#   weights) and 3.3 (arithmetic precision: products in FP16, sums in FP32).
# - NVIDIA, "Training With Mixed Precision" user guide: the chapter on mixed precision training.
# - IEEE 754-2019, section 3.6 (interchange formats) and 4.3 (rounding).
# - In these pages: [cast or autocast?](../docs/how-to/cast-or-autocast.md) in short, and how
#   [each operator](../docs/reference/operators.md) computes.
#
# [← 03 Where do small gradients go?](03_lost_gradients.ipynb) · [All lessons](README.md) ·
# [05 Does ResNet-50 learn as well in sixteen bits? →](05_resnet50_on_caltech101.ipynb)
