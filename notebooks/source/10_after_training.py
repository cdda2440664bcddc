# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # What happens after training?
#
# A training in sixteen bits ends with two sets of weights: those of the network, in FP16
# (`float16`), and their FP32 masters in the optimizer. Which set is the result? What should be
# written to a file, and for whom? And how much do a network's answers change when it computes them
# in sixteen bits?
#
# ![A trained network has FP16 weights, FP32 masters, and BatchNorm in FP32. Four calls lead out of
# it: save_checkpoint, to continue the run; restore and save_parameters, to fine-tune;
# inference_network, to predict in MXNet; export_onnx and export_mxnet, to serve without
# mpgluon](figures/10_after.svg)
#
# The drawing shows four ways out of a training, and what each of them keeps. All of them begin at
# the FP32 masters, not at the 16-bit weights, so a weight is rounded at most once.
#
# ## What you will be able to do
#
# - take the FP32 masters out of a training, and put FP32 weights into a network in 16 bits;
# - choose between a checkpoint, a parameter file, an MXNet export and an ONNX file;
# - fold BatchNorm away, run inference in 16 bits, and measure what that changes;
# - check an exported network where there is no mpgluon, and serve it where there is no MXNet.
#
# You should know masters (lesson 02) and casting (lesson 04). Everything runs on a CPU.

# %% tags=["parameters"]
FAST = False  # the build's fast mode says True: the same code on less data

# %% tags=["setup"]
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append("..")  # recipes/ and study/ are beside this folder

import mpgluon
from mpgluon import amp
from mpgluon.checkpoint import read_parameters
from mpgluon.deployment import agreement, export_mxnet, inference_network
from mpgluon.tools.onnx import ServingMetadata, export_onnx
from mpgluon.tools.plots import FORMAT_LOOKS
from mpgluon_tools.tables import Table

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from PIL import Image

from recipes.data.shapes import class_names, render_image
from teaching import check

IMAGES_PER_CLASS, EPOCHS = (12, 6) if FAST else (32, 10)
work = tempfile.TemporaryDirectory()
folder = Path(work.name)
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def draw(first, count):
    """Return drawings of ten shapes, their central squares at 32 x 32 pixels, and labels."""
    pixels = []
    for number in range(10 * count):
        image = render_image(number % 10, first + number // 10).convert("RGB")
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
        small = image.resize((32, 32), Image.Resampling.BILINEAR, box)
        pixels.append((np.asarray(small) / 255 - 0.5).transpose(2, 0, 1) / 0.5)  # from -1 to 1
    return mx.nd.array(pixels), mx.nd.array(np.arange(10 * count) % 10, dtype="int32")


images, labels = draw(0, IMAGES_PER_CLASS)
test_images, test_labels = draw(1000, 20)  # other drawings of the same shapes

# %% [markdown]
# ## A network to work with
#
# Our network has three convolutions with BatchNorm, and a dense layer. It learns to tell ten drawn
# shapes apart, in images of 32 x 32 pixels. It is cast to FP16 and trained with a loss scale, as in
# lessons 03 and 04.


# %%
def make_network():
    mx.random.seed(0)  # the same initial weights every time
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for before, after in ((3, 16), (16, 32), (32, 64)):
            net.add(nn.Conv2D(after, 3, padding=1, in_channels=before))
            net.add(nn.BatchNorm(in_channels=after), nn.Activation("relu"), nn.MaxPool2D())
        net.add(nn.Flatten(), nn.Dense(10, in_units=1024))
    net.initialize(mx.init.Xavier())
    return net


def make_trainer(net, optimizer="adam"):
    trainer = gluon.Trainer(net.collect_params(), optimizer, {"multi_precision": True})
    amp.init_trainer(trainer)
    return trainer


def train_step(net, trainer, batch_images, batch_labels):
    with autograd.record():
        loss = cross_entropy(net(batch_images), batch_labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(len(batch_labels))
    return loss.mean().asscalar()


net = make_network()
mpgluon.cast_block(net)
net.hybridize(static_alloc=True, static_shape=True)
trainer = make_trainer(net)
for start in list(range(0, len(images), 40)) * EPOCHS:
    loss = train_step(net, trainer, images[start : start + 40], labels[start : start + 40])
print(f"last loss {loss:.3f}, skipped steps: {amp.skipped_steps(trainer)}")

# %% [markdown]
# ## The masters are the result
#
# In every step the optimizer updates the masters, and copies them, rounded, into the network. So
# the result of the training is in the masters. We write a checkpoint and the FP16 weights to files.
# Then `mpgluon.restore` takes the cast off and puts the masters into the network, and we write them
# to a file, too.


# %%
def parameters_of(net):
    found = net._collect_params_with_prefix().items()
    return {name: parameter.data().asnumpy() for name, parameter in found}


mpgluon.save_checkpoint(folder / "checkpoint.npz", net, trainer, epochs=EPOCHS)
net.save_parameters(str(folder / "float16.params"))
in_fp16 = parameters_of(net)

mpgluon.restore(net)
net.save_parameters(str(folder / "float32.params"))
masters = parameters_of(net)

rounded = [name for name, weight in in_fp16.items() if weight.dtype == np.float16]
differ = np.mean(np.concatenate([(masters[name] != in_fp16[name]).ravel() for name in rounded]))
print(f"{len(rounded)} of {len(in_fp16)} arrays were FP16 (BatchNorm's were FP32 all the time)")
print(f"{differ:.1%} of their masters are not FP16 numbers")

# %% tags=["claim"]
from_file = read_parameters(folder / "checkpoint.npz")
assert {weight.dtype.name for weight in masters.values()} == {"float32"}
assert masters.keys() == from_file.keys()
assert all(np.array_equal(masters[name], from_file[name]) for name in masters)
assert all(np.array_equal(masters[name].astype("float16"), in_fp16[name]) for name in rounded)
assert differ > 0.9

# %% [markdown]
# Almost no master is an FP16 number, and every FP16 weight is its master, rounded. The rounding can
# be done again at any time, but the digits that it removed cannot be brought back. So keep the
# masters. A checkpoint has them too: `mpgluon.checkpoint.read_parameters` reads them from the file.
#
# After `restore` the network is an FP32 network like any other. To train it further, make a new
# Trainer: the old one was made for FP16 weights.
#
# ## A checkpoint goes on with a training, a parameter file only holds weights
#
# A **checkpoint** holds what a training needs: FP16 weights, masters, the optimizer's state (two
# averages for each weight, with Adam), the loss scale and the random states. If it is loaded into a
# network that is *not* cast, the masters become the FP32 weights, and the training goes on in FP32.
# In everything else a checkpoint is strict. If the Trainer has SGD in place of Adam, loading fails
# and changes nothing. We try this **on purpose**:

# %%
uncast = make_network()
mpgluon.load_checkpoint(folder / "checkpoint.npz", uncast, make_trainer(uncast))
loaded = parameters_of(uncast)

other = make_network()
message = ""
try:
    mpgluon.load_checkpoint(folder / "checkpoint.npz", other, make_trainer(other, "sgd"))
except mpgluon.CheckpointError as error:
    message = str(error).replace(str(folder), "runs")
print(f"CheckpointError: {message}")

# %% tags=["claim"]
assert all(np.array_equal(loaded[name], masters[name]) for name in masters)
assert "Adam" in message
assert all(  # nothing was changed
    np.array_equal(one, same)
    for one, same in zip(parameters_of(other).values(), parameters_of(make_network()).values())
)

# %% [markdown]
# A **parameter file** is Gluon's own, and less strict. With `cast_dtype=True` a network loads
# weights of another format than its own. If an FP32 network loads the FP16 file, its weights are
# FP16 numbers in FP32 arrays. If a cast network loads the FP32 file, the numbers are rounded, and
# the digits of the file are lost. So **load first, then cast**: `cast_block` remembers the FP32
# weights, and the Trainer takes them as its masters. We try both orders, and compare the FP32
# weights that `restore` then puts into the network with those in the file.

# %%
file = str(folder / "float32.params")
lost = {}
for order in ("load, then cast", "cast, then load"):
    fine_tuned = make_network()
    if order == "load, then cast":
        fine_tuned.load_parameters(file)
        mpgluon.cast_block(fine_tuned)
    else:
        mpgluon.cast_block(fine_tuned)
        fine_tuned.load_parameters(file, cast_dtype=True)
    mpgluon.restore(fine_tuned)
    found = parameters_of(fine_tuned)
    changed = [(found[name] != masters[name]).ravel() for name in rounded]
    lost[order] = np.mean(np.concatenate(changed))
    print(f"{order}: {lost[order]:.1%} of the weights have lost digits")

# %% tags=["claim"]
assert lost["load, then cast"] == 0
assert lost["cast, then load"] == differ
assert all(np.array_equal(found[name].astype("float16"), in_fp16[name]) for name in rounded)

# %% [markdown]
# The same holds in the middle of a training. A Trainer with `amp.init_trainer` notices if a program
# has replaced the weights, and takes the new ones as masters, with only the digits that FP16 has
# kept. (MXNet's own `multi_precision` writes the old masters back over them, without a message.) A
# checkpoint replaces the masters themselves, and loses nothing in any order.
#
# ## BatchNorm disappears into the convolution before it
#
# *Inference* is running a trained network. There are no gradients, so there is no loss scale. And
# BatchNorm no longer uses statistics of the batch. With the running mean $\mu$ and the running
# variance $\sigma^2$ of a channel it computes
#
# $$y = \gamma\,\frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta.$$
#
# That is one factor and one summand for each channel. The convolution before it can do the same
# with other weights and another bias. Here is the first convolution of the network, by hand:

# %%
convolution, norm = net[0], net[1]
gamma, beta = norm.gamma.data(), norm.beta.data()
mean, variance = norm.running_mean.data(), norm.running_var.data()

factor = gamma / mx.nd.sqrt(variance + 1e-5)  # Gluon's epsilon
weight = convolution.weight.data() * factor.reshape((-1, 1, 1, 1))  # one factor for each channel
bias = (convolution.bias.data() - mean) * factor + beta

folded = mx.nd.Convolution(test_images, weight, bias, kernel=(3, 3), pad=(1, 1), num_filter=16)
expected = norm(convolution(test_images))
error_by_hand = (folded - expected).abs().max().asscalar() / expected.abs().max().asscalar()
print(f"largest difference {error_by_hand:.1e} of the largest output")

# %% [markdown]
# `mpgluon.deployment.inference_network` does that for a whole network, from the FP32 masters, and
# rounds the folded weights **once**. `agreement` compares two networks: for how many images do they
# choose the same class, and by how much do the *logits* (the ten numbers that the network returns)
# differ? Here are networks in FP32, FP16 and BF16 (`bfloat16`).

# %%
in_inference, agreements = {}, {}
for dtype in ("float32", "float16", "bfloat16"):
    in_inference[dtype] = inference_network(net, dtype)
    agreements[dtype] = agreement(net, in_inference[dtype], [test_images])
    print(f"{dtype:8}: {len(in_inference[dtype].collect_params().keys())} arrays of", end=" ")
    print(f"{len(masters)}; {agreements[dtype]}")

# %% tags=["claim"]
assert error_by_hand < 1e-5
assert all(len(block.collect_params().keys()) == 8 for block in in_inference.values())
assert agreements["float32"].same_category == agreements["float32"].images
errors_by_format = [agreements[dtype].largest_relative_error for dtype in in_inference]
assert errors_by_format[0] < 1e-5 < errors_by_format[1] < errors_by_format[2]

# %% [markdown]
# Eight arrays are left, a weight and a bias for each layer. In FP32 the folded network gives the
# same results, except for FP32's last digits. BF16 has three binary digits fewer than FP16, so its
# errors are larger.
#
# ## In 16 bits logits change a little, and decisions only where they were close
#
# The largest logit decides. Its *lead* is the distance to the second largest. For a decision to
# change, some logit must be wrong by at least half of the lead. So we draw a mark for each test
# image: the horizontal axis has its lead in FP32, the vertical axis the largest error of its ten
# logits.

# %%
logits = {dtype: block(test_images).asnumpy() for dtype, block in in_inference.items()}
logits["float32"] = net(test_images).asnumpy()  # of the masters, not folded
second, best = np.sort(logits["float32"])[:, -2:].T
lead = best - second
error = {dtype: np.abs(found - logits["float32"]).max(axis=1) for dtype, found in logits.items()}
for dtype, found in logits.items():
    right = np.mean(found.argmax(axis=1) == test_labels.asnumpy())
    close = np.sum(2 * error[dtype] >= lead)
    print(f"{dtype:8}: {right:.1%} of the test images are recognised,", end=" ")
    print(f"{close} of {len(lead)} decisions could have changed")

# %% tags=["plot"] alt="Error against lead for each image: nearly all lie far below half the lead."
figure, axes = plt.subplots(figsize=(6.2, 4.4), layout="constrained")
for dtype, name in (("float16", "FP16"), ("bfloat16", "BF16")):
    look = {**FORMAT_LOOKS[dtype], "linestyle": "none", "markersize": 4}
    axes.loglog(lead, error[dtype], mfc="w", **look)
    axes.annotate(
        name,
        (lead.max(), np.median(error[dtype])),
        xytext=(12, 0),
        textcoords="offset points",
        va="center",
        color=look["color"],
    )
ends = np.array([max(lead.min(), 2 * error["float16"].min()), lead.max()])
axes.plot(ends, ends / 2, color="0.5", linewidth=1)
axes.annotate(
    "half the lead:\na decision can change above it",
    (np.sqrt(ends.prod()), np.sqrt(ends.prod()) / 2),  # the middle of the line
    xytext=(-12, 0),
    textcoords="offset points",
    ha="right",
    color="0.35",
)
axes.set_xlim(None, lead.max() * 2.2)
axes.set(xlabel="lead of the largest logit (FP32)", ylabel="largest error of a logit")
axes.set_title("16 bits can change only the decisions that were close\n(one mark for each image)")
plt.show()

# %% tags=["claim"]
for dtype in ("float16", "bfloat16"):
    same = logits[dtype].argmax(axis=1) == logits["float32"].argmax(axis=1)
    assert same[2 * error[dtype] < lead].all()
    assert np.mean(2 * error[dtype] < lead) > 0.8
    assert np.mean(logits[dtype].argmax(axis=1) == test_labels.asnumpy()) > 0.3  # chance: 0.1
assert 0 < error["float16"].mean() < error["bfloat16"].mean()

# %% [markdown]
# Nearly all images are far below the line. So if the accuracy changes at all, it is by images that
# were nearly undecided anyway. Measure this with your own network and images; `agreement` takes one
# line.
#
# ## An MXNet export computes the same bits where there is no mpgluon
#
# A parameter file is useful only to somebody who has the code of the network. An **export** is two
# files: the weights, and the *graph*, which is the list of operators. MXNet alone can run it.
# `export_mxnet` writes the folded network; its casts are operators of the graph. We start a second
# Python, which imports MXNet but not mpgluon. It loads the graph, runs it on the test images, and
# writes the logits to a file.

# %%
ELSEWHERE = """
import sys
import numpy
numpy.bool = bool  # MXNet 1.9.1 asks for it, and NumPy 1.24 has dropped it
import mxnet as mx
graph, parameters, images, result = sys.argv[1:]
block = mx.gluon.SymbolBlock.imports(graph, ["data"], parameters)
mx.nd.save(result, block(mx.nd.load(images)[0]))
print("in another Python: was mpgluon imported?", "mpgluon" in sys.modules)
"""
mx.nd.save(str(folder / "images.nd"), test_images)


def logits_elsewhere(name):
    """Return the logits that a fresh Python computes from an export."""
    names = (f"{name}-symbol.json", f"{name}-0000.params", "images.nd", "logits.nd")
    command = [sys.executable, "-c", ELSEWHERE, *(str(folder / name) for name in names)]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")
    return mx.nd.load(str(folder / "logits.nd"))[0].asnumpy()


export_mxnet(net, folder / "exported", dtype="float16")
there = logits_elsewhere("exported")
print(f"largest difference of a logit: {np.abs(there - logits['float16']).max()}")

# %% tags=["claim"]
assert np.array_equal(there, logits["float16"])

# %% [markdown]
# The logits agree bit for bit. On a CPU, where MXNet has no products in FP16, the casts of the
# graph surround operators that compute in FP32. A graph for a GPU computes in FP16 itself: export
# it with `device="gpu"`. (The export needs no GPU. On a CPU `import_mxnet` refuses such a graph,
# with advice.)
#
# ## Gluon's own export drops the casts, and says nothing
#
# `HybridBlock.export` has an argument `remove_amp_cast`, which is `True` by default: it removes
# casts from the graph. Then the file holds the FP32 network. For a network that mpgluon has cast or
# put under autocast, the default is `False`, so the casts stay. Here we export such a network with
# each of the two values.

# %%
amp.autocast(net, "float16")
net.hybridize()
here = net(test_images).asnumpy()  # an export writes the graph of the latest run
differences = {}
for name, options in (("kept", {}), ("removed", {"remove_amp_cast": True})):
    net.export(str(folder / name), **options)
    there = logits_elsewhere(name)
    differences[name] = [float(np.abs(there - found).max()) for found in (here, logits["float32"])]
    print(
        f"casts {name}: {differences[name][0]:.5f} from FP16, {differences[name][1]:.5f} from FP32"
    )
mpgluon.restore(net)

# %% tags=["claim"]
assert differences["kept"][0] == 0 < differences["kept"][1]
assert differences["removed"][1] == 0 < differences["removed"][0]

# %% [markdown]
# Without its casts the exported network differs from the FP32 network by exactly 0: it *is* the
# FP32 network. The accuracies of both hardly differ, so the accuracy would not show the mistake.
# **After every export compare the outputs, number by number.**
#
# ## An ONNX file is served without MXNet
#
# ONNX is a file format for networks that many programs read; `onnxruntime` runs it. `export_onnx`
# writes the folded network, and into the same file what a server must know: the names of the
# classes, and how a photograph becomes an input. In FP16 the file has half the size.

# %%
metadata = ServingMetadata(
    "ten shapes",
    image_size=32,
    classes=class_names(),
    centre_crop=1.0,  # the central square, whole
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
for dtype in ("float32", "float16"):
    path = export_onnx(net, folder / f"{dtype}.onnx", metadata, dtype=dtype)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")

# %% [markdown]
# Here is the program that serves it. It reads a photograph of any size, and imports neither MXNet
# nor mpgluon.

# %%
SERVER = """
import json, sys
import numpy as np
import onnxruntime
from PIL import Image, ImageOps

model, photograph = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
strings = session.get_modelmeta().custom_metadata_map
about = {key: json.loads(text) for key, text in strings.items()}

image = ImageOps.exif_transpose(Image.open(photograph)).convert("RGB")
side = min(image.size) * about["centre_crop"]
left, top = (image.width - side) / 2, (image.height - side) / 2
size = (about["image_size"], about["image_size"])
box = (left, top, left + side, top + side)
pixels = np.asarray(image.resize(size, Image.Resampling.BILINEAR, box)) / 255
data = ((pixels - about["mean"]) / about["std"]).transpose(2, 0, 1)[np.newaxis]

(logits,) = session.run(["logits"], {"data": data.astype(np.float32)})
probabilities = np.exp(logits[0] - logits[0].max())
probabilities /= probabilities.sum()
answers = {about["classes"][k]: float(probabilities[k]) for k in probabilities.argsort()[:-4:-1]}
print(json.dumps({"answers": answers, "logits": logits[0].tolist(),
                  "imported": [name for name in ("mxnet", "mpgluon") if name in sys.modules]}))
"""
photograph = render_image(0, 1000)  # the first test image, before it was made small
photograph.save(folder / "photograph.png")
served = {}
for dtype in ("float32", "float16"):
    command = [sys.executable, "-c", SERVER, f"{folder}/{dtype}.onnx", f"{folder}/photograph.png"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    served[dtype] = json.loads(run.stdout)
    best_three = ", ".join(f"{name} {p:.1%}" for name, p in served[dtype]["answers"].items())
    print(
        f"{dtype}.onnx: {best_three}; of MXNet and mpgluon it imported {served[dtype]['imported']}"
    )

# %% tags=["plot"] alt="The photograph that was served: a drawn shape on a grey ground."
figure, axes = plt.subplots(figsize=(3.6, 2.6), layout="constrained")
axes.imshow(photograph)
axes.set_title(f"Served: {next(iter(served['float16']['answers']))}. Drawn: {class_names()[0]}")
axes.axis("off")
plt.show()

# %% tags=["claim"]
scale = np.abs(logits["float32"][0]).max()
for dtype, answer in served.items():
    assert answer["imported"] == []
    assert next(iter(answer["answers"])) in class_names()
    served_error = np.abs(answer["logits"] - logits["float32"][0]).max() / scale
    assert served_error < {"float32": 1e-5, "float16": 0.02}[dtype]
assert (folder / "float16.onnx").stat().st_size < 0.55 * (folder / "float32.onnx").stat().st_size

# %% [markdown]
# onnxruntime has no FP16 kernels for x86 processors: there it computes an FP16 file in FP32. So on
# such a processor the FP16 file saves space, but no time.
#
# ## Each file serves another purpose

# %%
purposes = {
    "checkpoint.npz": ("masters, FP16 weights, optimizer, S", "goes on training; needs mpgluon"),
    "float32.params": ("masters", "Gluon code, in any format"),
    "float16.params": ("FP16 weights", "Gluon code, for inference in FP16"),
    "exported-0000.params": ("folded FP16 weights (+ graph)", "MXNet without code"),
    "float32.onnx": ("folded FP32 weights, graph, metadata", "anything that reads ONNX"),
    "float16.onnx": ("folded FP16 weights, graph, metadata", "anything that reads ONNX"),
}
kib = {name: (folder / name).stat().st_size / 1024 for name in purposes}
rows = [(name, *texts, f"{kib[name]:.0f}") for name, texts in purposes.items()]
print(Table(("file", "holds", "for", "KiB"), rows))

# %% tags=["claim"]
assert kib["float16.params"] < 0.55 * kib["float32.params"]
assert kib["checkpoint.npz"] > 3 * kib["float32.params"]
assert kib["exported-0000.params"] < 0.55 * kib["float32.params"]

# %% tags=["unseen"]
work.cleanup()

# %% [markdown]
# `mpgluon serve runs/latest` serves a page that compares formats on your own photographs. [After
# training](../docs/deployment.md) has the speed of each way to run a network, weights from PyTorch,
# and the ONNX file in detail; [Checkpoints](../docs/checkpoints.md) says what a checkpoint holds.
#
# ## Summary
#
# - The FP32 masters are the result of a training in FP16. `mpgluon.restore` puts them into the
#   network.
# - A checkpoint continues a training. A parameter file holds weights; load it before the cast.
# - `inference_network` folds BatchNorm into the layer before it, in FP32, and rounds once.
# - In 16 bits a decision changes only where it was close. Measure it with `agreement`.
# - An export needs MXNet only, an ONNX file not even that. After each export compare outputs.

# %% [markdown]
# ## Exercises
#
# Each exercise checks your answer by running it. A solution is folded below it.

# %% [markdown]
# **10.1** (level 2) In this network BatchNorm comes *before* a dense layer:
# $y = W\,\mathrm{norm}(x) + b$, where $x$ has 8 features, $W$ has the shape (4, 8), and
# $\gamma, \beta, \mu, \sigma^2$ have a number for each feature. Write a function `fold(weight,
# bias, gamma, beta, mean, variance, epsilon)` in NumPy. It returns the weight and the bias of *one*
# dense layer that computes the same. Hand in the function.

# %%
answer = ...
check("10.1", answer)


# %% tags=["solution"]
def fold_into_the_next(weight, bias, gamma, beta, mean, variance, epsilon):
    """Multiply the columns of W, which belong to the features; the summand goes through W."""
    factor = gamma / np.sqrt(variance + epsilon)
    return weight * factor, bias + weight @ (beta - mean * factor)


assert check("10.1", fold_into_the_next)

# %% [markdown]
# **10.2** (level 1) In inference in FP16 you measured that no logit of any image was wrong by more
# than 0.25. How large must the lead of the largest logit be (no unit), so that FP16 cannot change
# the decision? Hand in the smallest number for which this is sure: with any larger lead the
# decision stays.

# %%
answer = ...
check("10.2", answer)

# %% tags=["solution"]
# The largest logit may fall by 0.25, and the second may rise by 0.25.
assert check("10.2", 2 * 0.25)

# %% [markdown]
# **10.3** (level 3) Autocast in BF16 rounds the weights of convolutions and dense layers, and
# rounds again between the layers. How large is the share of the weights alone in the error, in
# percent? The error of a test image is the largest error of its logits. Measure the mean error
# twice: with autocast to BF16, and in FP32 with weights that were rounded by
# `mpgluon.round_to(master, mpgluon.BFLOAT16)`, except BatchNorm's. Hand in 100 times the second
# mean, divided by the first.

# %%
answer = ...
check("10.3", answer)


# %% tags=["solution"]
def mean_error(net):
    return np.abs(net(test_images).asnumpy() - logits["float32"]).max(axis=1).mean()


everything = make_network()
for name, parameter in everything._collect_params_with_prefix().items():
    parameter.set_data(mx.nd.array(masters[name]))
amp.autocast(everything, "bfloat16")

weights_alone = make_network()
for name, parameter in weights_alone._collect_params_with_prefix().items():
    value = masters[name]
    if name in rounded:  # not BatchNorm's
        value = mpgluon.round_to(value, mpgluon.BFLOAT16)
    parameter.set_data(mx.nd.array(value))

share = 100 * mean_error(weights_alone) / mean_error(everything)
print(f"{share:.0f} %")
assert check("10.3", share)

# %% [markdown]
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1: master weights.
# - Ioffe and Szegedy, "Batch Normalization", ICML 2015, section 3.1: inference.
# - Jacob et al., "Quantization and Training of Neural Networks for Efficient
#   Integer-Arithmetic-Only Inference", CVPR 2018, section 3.2: folding BatchNorm.
# - The ONNX operator specification, opset 17.

# %% [markdown]
# [← 09 What changes in a training loop of your own?](09_a_loop_of_your_own.ipynb) ·
# [All lessons](README.md) ·
# [11 What comes after sixteen bits? →](11_after_sixteen_bits.ipynb)
