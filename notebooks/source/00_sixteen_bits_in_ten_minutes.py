# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Sixteen bits in ten minutes
#
# You have a Gluon network that trains in FP32, in numbers of 32 bits. Three changes let it train in
# FP16 (`float16`): its numbers take half the memory, the Tensor Cores of a GPU multiply them much
# faster, and it learns as well. This page makes the changes one by one, on a ResNet-50 and
# photographs. It needs no GPU; on one, the lines are the same.
#
# ![A Gluon training loop in which four lines are marked as new. 1: cast_block, which makes the
# network FP16 and leaves BatchNorm in FP32. 2: multi_precision, which keeps FP32 masters of the
# weights. 3: init_trainer and scale_loss, which multiply the loss by a scale S that adapts. The
# unchanged trainer.step divides by S, or skips the step](figures/00_three_changes.svg)
#
# ## What you will be able to do
#
# - turn an FP32 loop of yours into an FP16 loop, and know what each change is for;
# - check that the network learns as well as before;
# - fine-tune a trained network on other photographs, from its checkpoint.

# %% tags=["parameters"]
FAST = False  # True: the same code with a smaller network, smaller images and fewer steps

# %% [markdown]
# ## You begin with an FP32 loop
#
# We take ten categories of Caltech 101: six to train on, and four for fine-tuning at the end. If
# there are no photographs on this machine (`scripts/download_caltech.py` fetches them), rendered
# shapes take their place.

# %% tags=["setup"]
import sys
import tempfile
from pathlib import Path

sys.path.append("..")  # recipes/ and benchmarks/ are beside this folder

import mpgluon
from mpgluon import amp
from mpgluon.tables import Table
from mpgluon.tools.plots import FORMAT_LOOKS

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon.model_zoo import vision

from recipes.data import find_tree, list_images, render_shapes, stratified_split
from recipes.data.augment import IMAGENET_MEAN, IMAGENET_STD
from recipes.data.loaders import eval_loader, train_loader

SHARED = "../../shared"  # photographs beside the checkout, on some machines
DATA_DIRS = "../data", f"{SHARED}/caltech101", f"{SHARED}/caltech101-mini"  # the first that exists
PHOTOGRAPHS = (
    *("airplanes", "bonsai", "butterfly", "grand_piano", "sunflower", "watch"),
    *("Leopards", "Motorbikes", "chandelier", "ketch"),
)
MODEL, IMAGE_SIZE = ("resnet18_v1", 32) if FAST else ("resnet50_v1", 48)  # pixels
BATCH_SIZE, EPOCHS, TUNING_EPOCHS = (8, 2, 2) if FAST else (20, 10, 6)
TRAIN, TEST = (8, 4) if FAST else (40, 20)  # images of each category

files = tempfile.TemporaryDirectory()  # all that this page writes
WORK = Path(files.name)
found = [Path(name) for name in DATA_DIRS if (Path(name) / "101_ObjectCategories").is_dir()]
source = find_tree(found[0]) if found else render_shapes(WORK, images_per_class=TRAIN + TEST)
chosen = PHOTOGRAPHS if found else list_images(source).classes[:10]


def batches_of(categories, train_count):
    """Return names, and batches for training and for the test: images, and labels as int32."""
    tree = WORK / categories[0]
    for category in categories:
        (tree / category).mkdir(parents=True)
        for path in sorted((source / category).iterdir())[: TRAIN + TEST]:
            (tree / category / path.name).write_bytes(path.read_bytes())
    folder = list_images(tree)
    train, test = stratified_split(folder.labels, train_count, seed=0)
    shape = {"batch_size": BATCH_SIZE, "image_size": IMAGE_SIZE}
    training = train_loader(folder, train, scale=(0.5, 1), **shape)
    return folder.classes, training, list(eval_loader(folder, test, **shape))


def adam(net, batches, epochs, **more):
    """Return a Trainer whose learning rate climbs for an epoch, then falls to zero."""
    steps, climb = epochs * len(batches), len(batches)
    schedule = mx.lr_scheduler.CosineScheduler(steps, base_lr=0.0005, warmup_steps=climb)
    options = {"learning_rate": 0.0005, "lr_scheduler": schedule, **more}
    return gluon.Trainer(net.collect_params(), "adam", options)


names, training, test = batches_of(chosen[:6], TRAIN)
print("photographs of Caltech 101" if found else "rendered shapes (no photographs here)")
print(f"{len(training)} batches of {BATCH_SIZE} images in an epoch; categories: {', '.join(names)}")

# %% tags=["plot"] alt="Six small photographs in a row, one of each category."
pixels, labels = (np.concatenate([array.asnumpy() for array in arrays]) for arrays in zip(*test))
pixels = pixels.transpose(0, 2, 3, 1) * IMAGENET_STD + IMAGENET_MEAN

figure, panels = plt.subplots(1, 6, figsize=(9, 1.9), layout="constrained")
for label, axes in enumerate(panels):
    axes.imshow(pixels[labels == label][0].clip(0, 1))
    axes.set_title(names[label])
    axes.axis("off")
plt.show()

# %% [markdown]
# This is the loop that you know. `accuracy` is the share of the test images that a network
# classifies correctly. `adam` (in the set-up) returns a `gluon.Trainer` with Adam and a schedule of
# learning rates, and passes on further options of the optimizer.


# %%
def new_network(classes):
    mx.random.seed(0)
    np.random.seed(0)
    net = vision.get_model(MODEL, classes=classes)
    net.initialize(mx.init.MSRAPrelu("in", slope=0))
    net(mx.nd.zeros((1, 3, IMAGE_SIZE, IMAGE_SIZE)))  # now all shapes are known
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def accuracy(net, test):
    right = [net(images).asnumpy().argmax(axis=1) == labels.asnumpy() for images, labels in test]
    return np.concatenate(right).mean()


loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()


def train_fp32(net, trainer, training, test, epochs):
    history = []
    for _ in range(epochs):
        losses = []
        for images, labels in training:
            with autograd.record():
                loss = loss_fn(net(images), labels)
            loss.backward()
            trainer.step(len(labels))
            losses.append(loss.mean().asscalar())
        history.append((np.mean(losses), accuracy(net, test)))
    return history


# %%
fp32_net = new_network(classes=6)
trainer = adam(fp32_net, training, EPOCHS)
fp32_history = train_fp32(fp32_net, trainer, training, test, EPOCHS)
print(f"FP32: test accuracy {fp32_history[-1][1]:.2f}")

# %% [markdown]
# ## Change 1: cast the network, and leave BatchNorm in FP32
#
# `cast_block` turns weights and computation to FP16. It leaves BatchNorm in FP32, whose sums of
# squares would overflow in FP16, and the network's result, so that the loss is FP32 too. Labels
# stay `int32`: FP16 has no 2049.

# %%
net = new_network(classes=6)
print(mpgluon.cast_block(net))

# %% tags=["unseen"]
formats = {name: np.dtype(p.dtype).name for name, p in net.collect_params().items()}
assert all((f == "float32") == ("batchnorm" in name) for name, f in formats.items())
assert net(test[0][0]).dtype == np.float32

# %% [markdown]
# Why these layers, and what else can be kept: [lesson 04](04_casting_a_network.ipynb). What FP16
# can hold: [lesson 01](01_sixteen_bits.ipynb).
#
# ## Change 2: let the optimizer keep FP32 weights
#
# A small update of an FP16 weight is rounded away. With `multi_precision` the optimizer updates an
# FP32 copy of each weight, its *master*, and rounds it into the network:
# [lesson 02](02_lost_updates.ipynb).

# %%
trainer = adam(net, training, EPOCHS, multi_precision=True)

# %% [markdown]
# ## Change 3: scale the loss
#
# Small gradients become zero in FP16. So the loss is multiplied by a *loss scale* S before the
# backward pass, which makes all gradients S times larger, and `trainer.step` divides by S again.
# S begins at 65536 and adapts: a step whose gradients overflowed is skipped, and S is halved
# ([lesson 03](03_lost_gradients.ipynb)).

# %%
amp.init_trainer(trainer)


def train_fp16(net, trainer, training, test, epochs):
    history = []
    for _ in range(epochs):
        losses = []
        for images, labels in training:
            with autograd.record():
                loss = loss_fn(net(images), labels)
                with amp.scale_loss(loss, trainer) as scaled_loss:  # new
                    autograd.backward(scaled_loss)
            trainer.step(len(labels))  # divides by S, or skips
            losses.append(loss.mean().asscalar())
        history.append((np.mean(losses), accuracy(net, test)))
    return history


# %%
training.set_epoch(0)  # the same images in the same order
fp16_history = train_fp16(net, trainer, training, test, EPOCHS)
print(f"FP16: test accuracy {fp16_history[-1][1]:.2f}")

# %% [markdown]
# That is all. Accumulation, clipping, two losses: [lesson 09](09_a_loop_of_your_own.ipynb).
#
# ## FP16 learns as well as FP32
#
# Both runs began with the same weights, and saw the same images in the same order.

# %% tags=["plot"] alt="Loss and test accuracy by epoch; FP16 stays close to FP32."
figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
looks = ("FP32", fp32_history, "float32"), ("FP16", fp16_history, "float16")
for name, history, dtype in looks:
    for axes, curve in zip(panels, zip(*history)):
        axes.plot(range(1, EPOCHS + 1), curve, mfc="w", label=name, **FORMAT_LOOKS[dtype])
for axes in panels:
    axes.set(xlabel="epoch", ylim=(0, None), xticks=range(1, EPOCHS + 1))
panels[0].set(ylabel="training loss", title="Both formats learn ...")
panels[1].set(ylabel="test accuracy (share)", title="... and are right about as often")
panels[0].legend(loc="lower left")
plt.show()


# %% tags=["setup"]
def mebibytes(net):
    parameters = net.collect_params().values()
    return sum(p.data().size * np.dtype(p.dtype).itemsize for p in parameters) / 2**20


rows = []
fp16_skipped = amp.skipped_steps(trainer)
runs = ("FP32", fp32_history, fp32_net, 0), ("FP16", fp16_history, net, fp16_skipped)
for name, history, network, skipped in runs:
    loss, share = history[-1]
    rows.append((name, f"{loss:.3f}", f"{share:.2f}", f"{skipped}", f"{mebibytes(network):.0f}"))
print(Table(("", "training loss", "test accuracy", "skipped steps", "network (MiB)"), rows))

tested = sum(len(labels) for _, labels in test)
share = np.mean([fp32_history[-1][1], fp16_history[-1][1]])
chance = np.sqrt(2 * share * (1 - share) / tested)
print(f"with {tested} test images, chance alone makes accuracies differ by about {chance:.2f}")

# %% tags=["unseen"]
assert abs(fp32_history[-1][1] - fp16_history[-1][1]) <= 4 * chance
assert FAST or fp16_history[-1][0] < fp16_history[0][0] / 2
assert fp16_skipped < EPOCHS * len(training) / (1 if FAST else 5)
assert mebibytes(net) < 0.52 * mebibytes(fp32_net)

# %% [markdown]
# The lines need not coincide: rounding changes a loss a little, and from then on each run goes its
# own way. FP16 also begins late: S is too large at first, on purpose, and each skipped step halves
# it. The formats on all of Caltech 101, with several seeds:
# [lesson 05](05_resnet50_on_caltech101.ipynb).
#
# The FP16 network takes half the memory; its masters are with the optimizer. Time is saved where
# the hardware multiplies FP16 numbers. A CPU computes the same in FP32 and rounds, and saves none:
# [lesson 07](07_speed_and_memory.ipynb). What to do if a run does not learn in FP16:
# [lesson 06](06_reading_the_diagnostics.ipynb).
#
# ## Fine-tune from a checkpoint, with a new head
#
# A checkpoint holds the FP32 masters, the optimizer's state and S. It is loaded into a network and
# a Trainer made as above, perhaps on another day.

# %%
mpgluon.save_checkpoint(WORK / "six.npz", net, trainer)

trained = new_network(classes=6)
mpgluon.cast_block(trained)
trainer = adam(trained, training, EPOCHS, multi_precision=True)
amp.init_trainer(trainer)
mpgluon.load_checkpoint(WORK / "six.npz", trained, trainer)
print(f"test accuracy {accuracy(trained, test):.2f}, loss scale {amp.loss_scale(trainer):g}")

# %% tags=["unseen"]
assert accuracy(trained, test) == fp16_history[-1][1]
assert amp.loss_scale(trainer) == 2.0 ** (16 - fp16_skipped)

# %% [markdown]
# Now the four other categories, with half as many images. `restore` makes the network FP32 again,
# with the values of the masters, and a new network takes all of it but the last layer. It is cast
# after that, so that its masters begin unrounded. S begins where it was.

# %%
mpgluon.restore(trained)
tuned = new_network(classes=4)
tuned.features = trained.features  # the last layer, tuned.output, keeps its random weights

# %% tags=["unseen"]
masters = mpgluon.checkpoint.read_parameters(WORK / "six.npz")
taken = {name: p.data().asnumpy() for name, p in tuned._collect_params_with_prefix().items()}
features = [name for name in masters if name.startswith("features.")]
assert len(features) == len(masters) - 2
assert all(np.array_equal(taken[name], masters[name]) for name in features)
assert any((masters[name] != masters[name].astype("float16")).any() for name in features)

# %%
new_names, new_training, new_test = batches_of(chosen[6:], TRAIN // 2)
loss_scale = amp.loss_scale(trainer)


def tune(net):
    mpgluon.cast_block(net)
    trainer = adam(net, new_training, TUNING_EPOCHS, multi_precision=True)
    amp.init_trainer(trainer, mpgluon.DynamicLossScale(init_scale=loss_scale))
    new_training.set_epoch(0)
    return train_fp16(net, trainer, new_training, new_test, TUNING_EPOCHS)


tuned_history = tune(tuned)
fresh_history = tune(new_network(classes=4))
print(f"categories: {', '.join(new_names)}; test accuracy after each epoch,")
for beginning, history in (("six categories", tuned_history), ("random weights", fresh_history)):
    print(f"begun with {beginning}:", *(f"{share:.2f}" for _, share in history))

# %% tags=["unseen"]
assert FAST or tuned_history[-1][0] < fresh_history[-1][0]
files.cleanup()

# %% [markdown]
# With the features of the first six categories, the network is ahead of one that begins anew. What
# else a trained network can become, from a parameter file to ONNX:
# [lesson 10](10_after_training.ipynb).
#
# ## Where to go from here
#
# - What do sixteen bits hold, and what do they lose? Lessons [01](01_sixteen_bits.ipynb),
#   [02](02_lost_updates.ipynb) and [03](03_lost_gradients.ipynb).
# - BF16 (`bfloat16`) needs one change only, `amp.autocast(net, "bfloat16")`:
#   [lesson 04](04_casting_a_network.ipynb).
# - Three formats side by side, and a run that is stopped and continues to the same bits:
#   [lesson 05](05_resnet50_on_caltech101.ipynb).
# - A network that does not learn in FP16: [lesson 06](06_reading_the_diagnostics.ipynb).
# - Time and memory: [lesson 07](07_speed_and_memory.ipynb).
# - Several devices: [lesson 08](08_several_devices.ipynb).
# - Accumulated gradients, clipping, two losses: [lesson 09](09_a_loop_of_your_own.ipynb).
# - Files for other programs: [lesson 10](10_after_training.ipynb).
# - Eight bits, and six: [lesson 11](11_after_sixteen_bits.ipynb).
#
# ## References
#
# - Micikevicius et al., "Mixed Precision Training", ICLR 2018.
# - NVIDIA, "Training With Mixed Precision" user guide.
# - Li, Andreeto, Ranzato, Perona, "Caltech 101 (1.0)", CaltechDATA, 2022.
#
# ## The whole job is one command
#
# ResNet-50 v2 on all of Caltech 101, at 224 pixels, with a log, checkpoints and curves. It is meant
# for a GPU; on a CPU, try `make demo` first.
#
# ```
# python scripts/download_caltech.py --data-dir data
# python scripts/train_caltech.py --dtype float16
# ```

# %% [markdown]
# [All lessons](README.md) · [01 Which numbers do sixteen bits hold? →](01_sixteen_bits.ipynb)
