# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # What happens to a network that is cast to sixteen bits?
#
# A number takes 32 bits in FP32, the usual format of neural networks, and 16 bits in FP16 and
# BF16. FP16 (`"float16"` in code) keeps 11 significant bits and ends at 65504. BF16 (`"bfloat16"`)
# keeps 8 significant bits and reaches as far as FP32. To *cast* a number is to round it to another
# format.
#
# ## What you will be able to do
#
# - cast a Gluon network with `mpgluon.cast_block` and read its report;
# - say which parts must stay in FP32, and show why: statistics, logits, loss, labels;
# - choose between a cast network and `autocast`, and read a policy;
# - keep one block in FP32, and take the cast off again.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %%
import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mpgluon
from mpgluon import amp
from mpgluon.diagnostics.doctor import check_machine, gather
from mpgluon.plots import FORMAT_LOOKS
from mpgluon.tables import Table

random = np.random.default_rng(0)
assert [mpgluon.FLOAT16.significand_bits, mpgluon.FLOAT16.max] == [11, 65504]
assert [mpgluon.BFLOAT16.significand_bits, mpgluon.FLOAT32.significand_bits] == [8, 24]
assert mpgluon.BFLOAT16.max_exponent == mpgluon.FLOAT32.max_exponent

# %% [markdown]
# ## Plain MXNet cannot multiply FP16 matrices on a CPU
#
# Gluon has a method for the job: `net.cast("float16")`. It turns the parameters (weights and
# biases) into FP16. We cast one dense layer, and give it an FP16 input. This cell fails **on
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
assert "float16 fully connected layer is currentlyonly supported by CuDNN" in message

# %% [markdown]
# The cast itself worked. The matrix product did not: MXNet's float16 products exist for GPUs only
# (CuDNN is NVIDIA's library for them). Note `wait_to_read`. MXNet computes in the background, so
# an error appears only when somebody waits for the result. That makes such errors hard to place.
#
# ## Multiply exactly, add in 32 bits, round once
#
# A GPU multiplies FP16 matrices in its *Tensor Cores*. A Tensor Core takes FP16 *operands* (the
# numbers that go in). It multiplies them exactly, and adds the products to a sum in FP32. In the
# end the sum is rounded to FP16. A CPU can do this: a product of two 11-bit numbers has at most 22
# bits, and FP32 has room for 24. First in NumPy.
#
# In one point the two differ. A CPU rounds after each addition, to the nearest number. A Tensor
# Core adds 4 to 16 products at a time, and cuts off what does not fit. So a few results in a
# hundred differ in their last bit. A policy with `accumulation="hopper"` adds as such a GPU does
# (docs/gpu.md).


# %%
def dense_with_fp32_sums(inputs, weight, bias):
    """Return inputs · weightᵀ + bias: FP16 operands, FP32 sums, one rounding at the end."""
    wide_inputs = inputs.astype("float16").astype("float32")
    wide_weight = weight.astype("float16").astype("float32")
    wide_bias = bias.astype("float16").astype("float32")
    return (wide_inputs @ wide_weight.T + wide_bias).astype("float16")


pairs = random.standard_normal((2, 100_000)).astype("float16")
products = pairs[0].astype("float32") * pairs[1].astype("float32")
exact_products = pairs[0].astype("float64") * pairs[1].astype("float64")
print(f"{np.sum(products == exact_products):,} of {products.size:,} products are exact in FP32")
assert np.array_equal(products, exact_products)

# %% [markdown]
# `mpgluon.cast_block` makes a layer compute like this. We compare the two. One thing is left open
# by our recipe: the *order* in which the products are added. An FP32 sum can depend on it in its
# last bit. So we compare twice: with multiples of 1/16, whose sums are exact in any order, and
# with random numbers.


# %%
def compare_dense(inputs, weight, bias):
    layer = nn.Dense(32, in_units=512)
    layer.initialize()
    layer.weight.set_data(mx.nd.array(weight))
    layer.bias.set_data(mx.nd.array(bias))
    mpgluon.cast_block(layer)
    return layer(mx.nd.array(inputs)).asnumpy(), dense_with_fp32_sums(inputs, weight, bias)


shapes = ((16, 512), (32, 512), (32,))
layer_result, our_result = compare_dense(*(random.integers(-32, 33, s) / 16 for s in shapes))
print("multiples of 1/16: all results equal:", np.array_equal(layer_result, our_result))
assert np.array_equal(layer_result, our_result)  # bit for bit

# %%
inputs, weight, bias = (random.standard_normal(s).astype("float16") for s in shapes)
layer_result, our_result = compare_dense(inputs, weight, bias)
print(f"random numbers: {np.mean(layer_result == our_result):.1%} of the results are equal")
sizes = np.abs(inputs).astype("float64") @ np.abs(weight).T.astype("float64") + np.abs(bias)
one_step = np.spacing(np.abs(our_result)).astype("float64")
fp32_order = 2 * 513 * 2.0**-24 * sizes  # what the order of 513 terms can change, at most
assert (np.abs(layer_result - our_result.astype("float64")) <= one_step + fp32_order).all()

# %% [markdown]
# Multiples of 1/16 agree bit for bit. Random numbers may differ in places: two sums that differ in
# FP32's last bit can fall on different sides of a border between two FP16 numbers. The assertion
# allows that one step, and what the order of FP32 additions can change. A GPU adds in yet another
# order. So it agrees with a CPU up to such steps, and not bit for bit.
#
# Why not add in FP16 as well? Because the sum stands still once it is large. The picture shows a
# running sum of numbers between 0 and 1, that is, the sum after each addition.

# %%
numbers = random.uniform(0, 1, 5_000 if FAST else 20_000).astype("float16")
fp16_sum = np.cumsum(numbers, dtype="float16")  # rounds after every addition
fp32_sum = np.cumsum(numbers, dtype="float32")
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
every = len(numbers) // 10
axes.plot(fp32_sum, label="added in FP32", markevery=every, **FORMAT_LOOKS["float32"])
axes.plot(fp16_sum, label="added in FP16", markevery=every, **FORMAT_LOOKS["float16"])
axes.set(xlabel="numbers added (count)", ylabel="running sum (no unit)")
axes.set_title("A sum in FP16 stands still at 2048")
axes.legend(frameon=False)
print(f"mean: FP32 {fp32_sum[-1] / len(numbers):.3f}, FP16 {fp16_sum[-1] / len(numbers):.3f}")
assert fp16_sum[-1] == 2048
assert fp32_sum[-1] > 2400
assert np.spacing(np.float16(2048)) == 2
plt.show()

# %% [markdown]
# Above 2048 the distance between FP16 numbers is 2. Adding less than 1 is rounded away, always.
#
# ## `cast_block` casts every layer, but no normalization
#
# Here is a small network for images. It has two normalization layers, of different kinds. Gluon
# calls each layer, and each network of layers, a *block*.


# %%
def make_net():
    """Return the same FP32 network each time: 3 x 8 x 8 images in, 10 classes out."""
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1, in_channels=3), nn.BatchNorm(in_channels=8))
        net.add(nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Flatten())
        net.add(nn.LayerNorm(in_channels=8), nn.Dense(10, in_units=8))
    net.initialize(mx.init.Xavier())
    return net


def formats_of(net):
    return {name: np.dtype(p.dtype).name for name, p in net.collect_params().items()}


# %%
images = mx.nd.array(random.standard_normal((16, 3, 8, 8)))
by_mxnet, by_mpgluon = make_net(), make_net()
by_mxnet.cast("float16")
report = mpgluon.cast_block(by_mpgluon)
print(report, end="\n\n")
pairs = zip(formats_of(by_mxnet).items(), formats_of(by_mpgluon).values())
print(Table(("parameter", "net.cast", "cast_block"), [(n, a, b) for (n, a), b in pairs]))
is_norm = {name: "norm" in name for name in formats_of(by_mpgluon)}
assert all((f == "float32") == is_norm[name] for name, f in formats_of(by_mpgluon).items())
assert report.parameters_kept == sum(is_norm.values())
assert formats_of(by_mxnet)["net_layernorm0_gamma"] == "float16"

# %% [markdown]
# The first lines are the report: what was cast, and what was kept. Below it, format by format.
# `net.cast` keeps BatchNorm in FP32 but not LayerNorm. `cast_block` keeps both (and GroupNorm and
# InstanceNorm). The next section shows why.
#
# ## Statistics must be FP32
#
# A normalization layer subtracts the mean of its input and divides by the root of its *variance*:
# the mean of squared distances from the mean. Squares grow fast. We take *activations* (results of
# layers) of a size of about 300. FP16 holds each of them.

# %%
activations = (300 * random.standard_normal((64, 8, 8, 8))).astype("float16")
with np.errstate(over="ignore"):  # the overflow is what we want to see
    fp16_squares = np.square(activations - activations.mean(dtype="float32").astype("float16"))
true_variance = activations.astype("float64").var()
print(f"largest activation {np.abs(activations).max():.0f}, true variance {true_variance:.0f}")
print(f"{np.isinf(fp16_squares).mean():.0%} of the FP16 squares are infinite, so is their mean")
assert float(np.float16(256)) ** 2 > np.finfo("float16").max  # so squares overflow from 256 on
assert np.isfinite(activations).all()
assert np.isinf(fp16_squares).any()
assert true_variance > np.finfo("float16").max  # the variance itself does not fit either

# %% [markdown]
# (`np.errstate` says that we expect the overflow; NumPy would warn otherwise.) One infinite square
# makes the variance infinite, and whatever is divided by it zero. In a cast network, BatchNorm
# takes FP16 numbers, computes in FP32, and rounds only its result. So it must agree, bit for bit,
# with an FP32 BatchNorm whose result we round ourselves. BatchNorm also remembers statistics for
# later use; with `momentum=0` those of the latest batch.

# %%
inputs = mx.nd.array(activations)  # FP32 copies of FP16 numbers
plain_norm, cast_norm = (nn.BatchNorm(in_channels=8, momentum=0) for _ in range(2))
plain_norm.initialize()
cast_norm.initialize()
mpgluon.cast_block(cast_norm)
with autograd.record():  # statistics are computed in training only
    from_plain, from_cast = plain_norm(inputs), cast_norm(inputs)
from_cast.backward()  # now it has noted the variance of the latest batch
variances = cast_norm.running_var.data().asnumpy()
true_variances = activations.astype("float64").var(axis=(0, 2, 3))
print(f"variance of the first channel: {variances[0]:.0f} in {variances.dtype}")
assert np.array_equal(from_plain.asnumpy().astype("float16"), from_cast.asnumpy())
assert variances.dtype == np.float32
assert np.allclose(variances, true_variances, rtol=1e-3)

# %% [markdown]
# ## Logits and loss must be FP32
#
# *Logits* are what a classifier returns, before the softmax: one number per class. Softmax divides
# each exponential by the sum of all. With 10,000 equal logits each class has a probability of
# 0.0001. Let us add the exponentials in FP16, one by one, and then ask MXNet for an FP16 softmax.

# %%
classes = 10_000
exponentials = np.exp(np.zeros(classes, "float16"))
fp16_probability = float(exponentials[0] / np.cumsum(exponentials, dtype="float16")[-1])
mxnet_probability = mx.nd.softmax(mx.nd.zeros((1, classes), dtype="float16"))[0, 0].asscalar()
softmax = nn.HybridLambda(lambda F, x: F.softmax(x))
mpgluon.cast_block(softmax)
cast_probability = softmax(mx.nd.zeros((1, classes), dtype="float16"))[0, 0].asscalar()
ways = ("FP16 sum by hand", "MXNet's softmax", "cast block", "truth")
found = (fp16_probability, mxnet_probability, cast_probability, 1 / classes)
rows = [(way, f"{p:.6f}", f"{-np.log(float(p)):.4f}") for way, p in zip(ways, found)]
print(Table(("softmax of 10,000 zeros", "p", "loss = -log p"), rows))
assert fp16_probability == 1 / 2048
assert abs(cast_probability - 1 / classes) < 1e-9

# %%
logits = by_mpgluon(images)
labels = mx.nd.array(random.integers(0, 10, 16), dtype="int32")
loss = gluon.loss.SoftmaxCrossEntropyLoss()(logits, labels)
wide = logits.asnumpy().astype("float64")
log_sums = np.log(np.exp(wide).sum(axis=1))
loss_by_hand = log_sums - wide[np.arange(16), labels.asnumpy()]
print(f"logits {np.dtype(logits.dtype).name}, loss {np.dtype(loss.dtype).name}")
error = np.abs(loss.asnumpy() - loss_by_hand).max()
print(f"largest difference from the loss in float64: {error:.1e}")
assert logits.dtype == loss.dtype == np.float32
assert np.allclose(loss.asnumpy(), loss_by_hand, atol=1e-5)

# %% [markdown]
# In FP16 the sum stands still at 2048 again. MXNet's own FP16 softmax does the same on a CPU
# (unless the environment variable `MXNET_SAFE_ACCUMULATION` is 1). A loss that is wrong by so much
# is still a number: nothing warns you. Inside a cast network, softmax is computed in FP32. And a
# cast network returns FP32, so the loss function outside of it works in FP32 without further ado.
#
# ## Inputs may be FP16, labels and indices may not
#
# The first layer rounds its input to FP16. So it does not matter who rounds: rounding twice to the
# same format changes nothing.
#
# Labels are another matter: FP16 has no 2049. Some recipes cast labels together with the images.
# With more than 2048 classes they train the wrong ones. The same holds for word numbers that go
# into an `Embedding`, a table with one row for each word.

# %%
from_fp32 = by_mpgluon(images).asnumpy()
from_fp16 = by_mpgluon(images.astype("float16")).asnumpy()
cast_labels = np.array([2047, 2048, 2049, 2051]).astype("float16")
print("labels 2047, 2048, 2049 and 2051 as FP16:", cast_labels.astype(int))
table = nn.Embedding(3000, 1)
table.initialize()
mpgluon.cast_block(table)
rows = table.weight.data().asnumpy()
found = table(mx.nd.array([2047, 2049], dtype="int32")).asnumpy()
assert np.array_equal(from_fp32, from_fp16)
assert not np.array_equal(from_fp32, make_net()(images).asnumpy())  # it did round
assert list(cast_labels) == [2047, 2048, 2048, 2052]
assert rows.dtype == np.float16
assert np.array_equal(found, rows[[2047, 2049]])

# %% [markdown]
# `cast_block` casts the table, and leaves the indices alone. Keep your labels in `int32`. Gluon's
# `SoftmaxCrossEntropyLoss` takes them with logits of any format.
#
# ## Autocast: the same numbers from FP32 parameters
#
# There is a second way. `amp.autocast` leaves the parameters in FP32, and rounds each of them when
# it is used. Forward, that is the same arithmetic. What differs is the format of parameters and
# *gradients* (by how much the loss changes with each parameter). We compare both.


# %%
def run(net):
    """Return logits and gradients of one batch."""
    with autograd.record():
        logits = net(images)
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(logits, labels)
    loss.backward()
    parameters = net.collect_params().items()  # running statistics have no gradient: "null"
    return logits.asnumpy(), {name: p.grad() for name, p in parameters if p.grad_req != "null"}


cast_net, auto_net = make_net(), make_net()
mpgluon.cast_block(cast_net)
print(amp.autocast(auto_net, "float16"))
(cast_logits, cast_grads), (auto_logits, auto_grads) = run(cast_net), run(auto_net)

# %%
rows = [
    (name, *(np.dtype(grads[name].dtype).name for grads in (cast_grads, auto_grads)))
    for name in cast_grads
]
print(Table(("gradient of", "cast_block", "autocast"), rows))
assert np.array_equal(cast_logits, auto_logits)
assert set(formats_of(auto_net).values()) == {"float32"}
for name, gradient in cast_grads.items():
    assert np.array_equal(gradient.asnumpy(), auto_grads[name].asnumpy()), name

# %% [markdown]
# All logits and all gradients are equal bit for bit. Autocast's FP32 gradients hold FP16 numbers:
# the rounded weight had an FP16 gradient, which was then widened. So autocast needs loss scaling
# (lesson 3) like a cast network. (Its report counts LayerNorm among the blocks that compute in
# float16. Autocast decides operator by operator, and that operator it computes in FP32. All
# parameters stay FP32.) It does not need *master weights*, the FP32 copies of lesson 2: its
# parameters are FP32 already. The price is memory for them.
#
# ## A policy is three formats
#
# Which format is used where is called a *policy*. It has three parts: the format of the
# parameters, that of the computation, and that of the result. `Policy.parse` knows four by name,
# and reads others.

# %%
named = ("float32", "float16", "mixed_float16", "mixed_bfloat16")
custom = "params=float32,compute=float16,output=float16"
policies = {text: mpgluon.Policy.parse(text) for text in (*named, custom)}
rows = [(n, p.param_dtype, p.compute_dtype, p.output_dtype) for n, p in policies.items()]
print(Table(("policy", "parameters", "computation", "result"), rows))

other_net = make_net()
amp.autocast(other_net, policies[custom])
other_logits = other_net(images)
print(f"the last one returns {np.dtype(other_logits.dtype).name}")
assert other_logits.dtype == np.float16
assert np.array_equal(other_logits.asnumpy(), from_fp32)

# %% [markdown]
# `"float16"` is `cast_block`. `"mixed_float16"` and `"mixed_bfloat16"` are `autocast` in either
# format. The custom policy returns FP16. Do that only where no softmax or loss follows.
#
# ## `check_machine` says what this machine computes by itself
#
# On a CPU, mpgluon computes FP16 as in the second section: products and sums in FP32, and results
# rounded to FP16 numbers. That needs no special processor. BF16 is computed in the same way, unless
# the processor has instructions for it: then oneDNN, the library behind MXNet's CPU operators, uses
# them, and BF16 is faster than FP32. `check_machine` looks.

# %%
machine = check_machine()
shown = [finding for finding in machine.findings if finding.topic in ("GPU", "bfloat16")]
for finding in shown:
    print(f"{finding.topic}: {finding.what}. {finding.why}".strip())
bfloat16 = next(finding for finding in shown if finding.topic == "bfloat16")
is_native = bfloat16.level == "ok"
instructions = gather().cpu_flags & {"avx512_bf16", "amx_bf16"}  # as the processor lists them
assert instructions or not is_native

# %% [markdown]
# `print(machine)` shows everything that it looked at.
#
# ## BF16 rounds more coarsely than FP16
#
# Now autocast in both formats, against FP32.

# %%
fp32_logits = make_net()(images).asnumpy().astype("float64")
errors = {}
for dtype in ("float16", "bfloat16"):
    net = make_net()
    report = amp.autocast(net, dtype)
    difference = np.abs(net(images).asnumpy() - fp32_logits)
    errors[dtype] = difference.mean() / np.abs(fp32_logits).max()
    print(f"{dtype}: mean error {errors[dtype]:.1e} of the largest logit")
coarser = errors["bfloat16"] / errors["float16"]
print(f"bfloat16, {report.arithmetic}, is {coarser:.1f} times as far away")
assert 2 < coarser < 32  # three bits less are a factor of 8
results = [net[:count](images).asnumpy() for count in (1, 2)]  # behind layers 1 and 2
rounded = [mpgluon.round_to(result, mpgluon.BFLOAT16) for result in results]
is_bfloat16 = [np.array_equal(*pair) for pair in zip(results, rounded)]
assert is_bfloat16 == [True, report.arithmetic == "emulated"]
assert errors["float16"] < 4 * 2.0**-11

# %% [markdown]
# BF16 has three significant bits less than FP16, so each of its roundings is $2^3$ times as
# coarse. Native BF16 makes up for some of that by fewer roundings. In FP16, and in emulated BF16,
# every layer rounds its result. In native BF16, run as here, the convolution and the dense layer
# do, and what is between stays FP32: the convolution's results are BF16 numbers, those of the
# BatchNorm behind it are not. What BF16 has instead of digits is FP32's range. So it needs no loss
# scaling.
#
# ## One block can stay in FP32
#
# `keep_fp32` names what to leave alone: types of layers, or layers of this very network. What is
# named keeps FP32 parameters **and** computes in FP32. Normalization layers are the default, so
# name them too. With its last layer in FP32, our network returns logits that are not rounded to
# FP16.

# %%
net = make_net()
last = net[-1]
report = mpgluon.cast_block(net, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, last))
print(report)
kept_logits = net(images).asnumpy()
for title, values in (("all cast", from_fp32), ("last layer in FP32", kept_logits)):
    print(f"{title}: {np.mean(values == values.astype('float16')):.0%} of logits are FP16 numbers")
assert last.name in report.kept_fp32
assert formats_of(net)[last.weight.name] == "float32"
assert np.array_equal(from_fp32, from_fp32.astype("float16"))
assert not np.array_equal(kept_logits, kept_logits.astype("float16"))

# %% [markdown]
# ## Hybridized or not: equal bit for bit
#
# Gluon runs a network *imperatively*, operator by operator as Python reaches them. `hybridize`
# turns a network into one graph, which may be rearranged. On a CPU, mpgluon rearranges FP16 graphs
# itself, to spare casts between layers. (Lesson 7 measures what that gains.) Every rounding stays
# where it was. So you may debug imperatively what you train hybridized. We compare logits and
# gradients of one batch, in BF16 too.

# %%
equal = {}
for dtype in errors:
    nets = imperative_net, graph_net = make_net(), make_net()
    for net in nets:
        mpgluon.cast_block(net) if dtype == "float16" else amp.autocast(net, dtype)
    graph_net.hybridize(static_alloc=True, static_shape=True)
    (logits_1, grads_1), (logits_2, grads_2) = map(run, nets)
    pairs = [(grads_1[name].asnumpy(), grads_2[name].asnumpy()) for name in grads_1]
    equal[dtype] = [np.array_equal(*pair) for pair in [(logits_1, logits_2), *pairs]]
    print(f"{dtype}: {sum(equal[dtype])} of {len(equal[dtype])} arrays are equal")
assert all(equal["float16"])
assert all(equal["bfloat16"]) == (not is_native)

# %% [markdown]
# In native BF16 it is not so: a graph may keep BF16 between layers, where an imperative run hands
# on FP32. Emulated, BF16 is as equal as FP16. `Policy.parse("emulated_bfloat16")` asks for that on
# any processor, and gives the same roundings on all of them.
#
# ## `restore` brings the FP32 network back
#
# Rounding loses bits. Widening the FP16 weights would not bring them back. `cast_block` therefore
# keeps the FP32 values, and `restore` puts them in place again.

# %%
net, original = make_net(), make_net()
mpgluon.cast_block(net)
widened = net[0].weight.data().asnumpy().astype("float32")
mpgluon.restore(net)
restored, before = (n[0].weight.data().asnumpy() for n in (net, original))
print(f"changed by widening: {np.mean(widened != before):.0%} of the weights")
print(f"changed by restore: {np.mean(restored != before):.0%}")
assert np.array_equal(restored, before)
assert not np.array_equal(widened, before)
assert np.array_equal(net(images).asnumpy(), original(images).asnumpy())

# %% [markdown]
# ## Summary
#
# - A cast layer multiplies FP16 numbers, adds in FP32 and rounds once. A CPU can do that with a
#   GPU's arithmetic, up to the order of adding.
# - Statistics, softmax, logits and loss need FP32: sums stand still at 2048, squares overflow from
#   256 on.
# - Labels and indices are never cast: FP16 has no 2049.
# - `cast_block` has FP16 parameters, `autocast` FP32 parameters; forward and backward give equal
#   numbers.
# - `keep_fp32` leaves a block in FP32, `restore` undoes the whole cast.
#
# ## Exercises
#
# 1. From which $x$ on does $e^x$ overflow in FP16? Find the smallest by trying all positive FP16
#    numbers. (Expected: about ten.)
# 2. Give the dense layer of the second section `float16` sums: use `np.cumsum(...,
#    dtype="float16")` over the products. How much larger does the mean error become with 64
#    inputs? And with 4,096? (Expected: a few times; then tens of times.)
# 3. Keep the convolution in FP32 instead of the last layer. Which of the two brings the logits
#    closer to FP32? (Expected: neither; mean errors of some $10^{-4}$ of the largest logit in
#    either case.)
#
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018: section 3.1 (FP32 master copy of
#   weights) and 3.3 (arithmetic precision: products in FP16, sums in FP32).
# - NVIDIA, "Training With Mixed Precision" user guide: the chapter on mixed precision training.
# - IEEE 754-2019, section 3.6 (interchange formats) and 4.3 (rounding).
