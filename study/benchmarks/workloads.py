"""MXNet's contestants: a layer, a training step, a prediction, in each library and format.

The training from files is for the log of tuning, whose rows differ in more than the format.

Each factory returns a function that does it once, waits for it and returns the result; and facts
about it, for :mod:`study.benchmarks.child`. ``library`` is ``"gluon"`` (plain MXNet, float32),
``"mpgluon"`` or ``"contrib.amp"`` (``mxnet.contrib.amp``, bfloat16). mpgluon's float16 is the cast
network unless ``autocast`` is set, its bfloat16 autocast. ``model`` is a network of MXNet's or
gluoncv's model zoo, with 1000 classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any, Callable, Optional

from mpgluon import amp, kernels
from mpgluon.base.devices import parse_devices
from mpgluon.cast.block import apply_policy, cast_block
from mpgluon.cast.plain_graph import use_own_operators
from mpgluon.formats.loss_scale import as_loss_scale
from mpgluon.formats.policy import Policy
from mpgluon_tools.deployment import inference_network
from mpgluon_tools.diagnostics import alignment_report

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp as contrib_amp
from mxnet.gluon import nn

from recipes.training.networks import build_network
from study.benchmarks.loading import file_loader
from study.benchmarks.sequences import TOKENS, build_sequence_network

__all__ = ["inference", "layer", "sequence_training", "training", "training_from_files"]

Prepared = tuple[Callable[[], mx.nd.NDArray], dict[str, Any]]

_CLASSES = 1000
# So small that all rounds see nearly the same network: one that has memorized its batch has
# subnormal gradients, which slow some processors down.
_LEARNING_RATE = 2.0**-20
_MOST_SKIPS = 24  # until a loss scale of 2**24 is down to 1
_STATIC: Mapping[str, bool] = {"static_alloc": True, "static_shape": True}
_MARGIN = 2  # halvings more, because dropout makes some steps' gradients larger than others'


def layer(
    *, library: str, dtype: str, kind: str, batch_size: int, size: int, device: str = "cpu"
) -> Prepared:
    """Prepare one layer, forward and backward, with gradients of its input and its parameters.

    ``kind`` is ``"dense"``, with ``size`` inputs and outputs; or ``"convolution"``, 3 x 3, on
    images of ``size`` x ``size`` with 128 channels.
    """
    (ctx,) = _begin(library, device)
    if kind == "dense":
        net, sides = nn.Dense(size, in_units=size), [size]
    else:
        net = nn.Conv2D(128, kernel_size=3, padding=1, in_channels=128)
        sides = [128, size, size]
    net.initialize(mx.init.Xavier(), ctx=ctx)
    _prepare(net, library, dtype)
    data = mx.nd.random.normal(shape=(batch_size, *sides), ctx=ctx)
    data.attach_grad()

    def run() -> mx.nd.NDArray:
        with autograd.record():
            result = net(data)
        result.backward()
        mx.nd.waitall()
        return data.grad

    return run, _facts(library, dtype)


def training(
    *,
    library: str,
    dtype: str,
    loss_scale: Optional[str],
    model: str,
    batch_size: int,
    image_size: int,
    device: str = "cpu",
    autocast: bool = False,
    emulate: bool = False,
    counted: bool = False,
    in_numpy: bool = False,
    policy: Optional[str] = None,
) -> Prepared:
    """Prepare a training step with SGD and momentum.

    Parameters
    ----------
    loss_scale : {"dynamic", "none"} or None
        ``None`` is a stock Trainer. A dynamic scale shrinks until no step is skipped, and then to a
        quarter.
    autocast : bool
        Whether float16 is autocast too: FP32 parameters.
    emulate : bool
        Whether bfloat16 is emulated even where the processor has it.
    counted : bool
        Whether ``multiply_adds`` of a forward pass are among the facts.
    in_numpy : bool
        Whether network and arrays are of MXNet's NumPy interface, which this process then keeps.
    policy : str, optional
        The text of a policy, for formats that ``dtype`` does not name.
    """
    (ctx,) = _begin(library, device)
    if in_numpy:
        mx.npx.set_np()
    net = build_network(model, classes=_CLASSES, image_size=image_size, devices=[ctx])
    images, labels = _batch(batch_size, image_size, ctx)
    if in_numpy:
        images, labels = images.as_np_ndarray(), labels.as_np_ndarray()
    facts = {"images": batch_size, **_facts(library, dtype, net)}
    if counted:
        facts["multiply_adds"] = alignment_report(net, images.shape).multiply_adds
    if policy is not None:
        apply_policy(net, Policy.parse(policy))
    _prepare(net, library, dtype, autocast=autocast, emulate=emulate)
    return _training(net, lambda: [(images, labels)], library, loss_scale), facts


def training_from_files(
    *,
    images: Optional[str],
    model: str,
    batch_size: int,
    image_size: int,
    batches: int,
    workers: int,
    hybridize: Optional[dict[str, bool]],
    dtype: str,
    loss_scale: Optional[str],
) -> Prepared:
    """Prepare a pass of training over JPEG files, from the files to updated weights, on the CPU.

    Parameters
    ----------
    images : str or None
        A folder with one folder of images per class; ``None``: rendered images in ``data``.
    batches : int
        Batches of a pass. A pass starts without a decoded batch, and leaves none.
    workers : int
        Processes that decode; with 0 the training process does.
    hybridize : dict or None
        Options of ``hybridize``; ``None``: every operator is called from Python.
    """
    library = "mpgluon"
    devices = _begin(library, "cpu")
    net = build_network(model, classes=_CLASSES, image_size=image_size, devices=devices)
    loader = file_loader(
        images, batch_size=batch_size, image_size=image_size, workers=workers, batches=batches
    )
    _prepare(net, library, dtype, hybridize=hybridize)
    facts = {"images": batches * batch_size, **_facts(library, dtype, net)}
    return _training(net, lambda: loader, library, loss_scale), facts


def sequence_training(
    *,
    library: str,
    dtype: str,
    loss_scale: Optional[str],
    kind: str,
    layers: int,
    width: int,
    length: int,
    batch_size: int,
    device: str = "cpu",
    autocast: bool = False,
    calls: int = 1,
) -> Prepared:
    """Prepare a training step of :func:`study.benchmarks.sequences.build_sequence_network`.

    ``length`` is the sequences' length in tokens; the others are as there and in `training`. A
    run is ``calls`` steps, one after the other.
    """
    (ctx,) = _begin(library, device)
    net = build_sequence_network(kind, layers=layers, width=width, ctx=ctx)
    tokens = mx.nd.random.randint(0, TOKENS, shape=(length + 1, batch_size), ctx=ctx)
    facts = {"calls": calls, **_facts(library, dtype, net)}
    _prepare(net, library, dtype, autocast=autocast)
    return _training(net, lambda: [(tokens[:-1], tokens[1:])], library, loss_scale), facts


def _training(
    net: gluon.HybridBlock,
    batches: Callable[[], Iterable[tuple[mx.nd.NDArray, mx.nd.NDArray]]],
    library: str,
    loss_scale: Optional[str],
) -> Callable[[], mx.nd.NDArray]:
    """Return a function that takes a step of SGD on each batch of inputs and labels.

    It returns the last loss, and raises RuntimeError if the loss scale skips a step.
    """
    parameters = net.collect_params()
    options = {"learning_rate": _LEARNING_RATE, "momentum": 0.9}
    if any(np.dtype(parameter.dtype) == np.float16 for parameter in parameters.values()):
        options["multi_precision"] = True
    trainer = gluon.Trainer(parameters, "sgd", options)
    scaled: Callable[[Any], Any] = nullcontext
    if loss_scale is not None and library == "contrib.amp":
        contrib_amp.init_trainer(trainer)
        scaled = partial(contrib_amp.scale_loss, optimizer_or_trainer=trainer)
    elif loss_scale is not None:
        scale = as_loss_scale(loss_scale)
        amp.init_trainer(trainer, scale)
        scaled = partial(amp.scale_loss, trainer=trainer)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

    def train() -> tuple[mx.nd.NDArray, bool]:
        skipped = False
        for inputs, labels in batches():
            with autograd.record():
                loss = loss_fn(net(inputs), labels)
                with scaled(loss) as scaled_loss:
                    autograd.backward(scaled_loss)
            trainer.step(len(labels))
            if library == "mpgluon" and loss_scale is not None:
                skipped |= amp.step_was_skipped(trainer)
        mx.nd.waitall()
        return loss, skipped

    def step() -> mx.nd.NDArray:
        loss, skipped = train()
        if skipped:
            raise RuntimeError("a step was skipped, which takes less time than one that is not")
        return loss

    for _ in range(_MOST_SKIPS):
        _, skipped = train()
        if not skipped:
            break
    if library == "mpgluon" and loss_scale == "dynamic":
        for _ in range(_MARGIN):
            scale.update(grads_finite=False)
    return step


def inference(
    *,
    library: str,
    dtype: str,
    folded: bool = False,
    calls: int = 1,
    model: str,
    batch_size: int,
    image_size: int,
    device: str = "cpu",
) -> Prepared:
    """Prepare a prediction.

    ``folded`` makes mpgluon's network for inference: without BatchNorm, and fused by oneDNN where
    that is right. A run is ``calls`` predictions, one after the other.
    """
    (ctx,) = _begin(library, device)
    net = build_network(model, classes=_CLASSES, image_size=image_size, devices=[ctx])
    images, _ = _batch(batch_size, image_size, ctx)
    facts = {"images": batch_size, "calls": calls, **_facts(library, dtype, net)}
    if folded:
        net = inference_network(net, dtype, fuse_for=images)
        if not net.fused:
            facts["note"] = "not fused"
    elif library == "contrib.amp":
        net.hybridize()
        net(images)
        net = contrib_amp.convert_hybrid_block(net, target_dtype=dtype, ctx=ctx)
        net.hybridize(static_alloc=True, static_shape=True)
    else:
        _prepare(net, library, dtype)

    def predict() -> mx.nd.NDArray:
        logits = net(images)
        logits.wait_to_read()
        return logits

    return predict, facts


def _begin(library: str, device: str) -> list[mx.Context]:
    """Return the device in a list; ``contrib.amp`` changes MXNet here, for good."""
    devices = parse_devices(device)
    mx.random.seed(0)
    np.random.seed(0)
    if library == "contrib.amp":
        contrib_amp.init(target_dtype="bfloat16")
    return devices


def _prepare(
    net: gluon.HybridBlock,
    library: str,
    dtype: str,
    *,
    autocast: bool = False,
    emulate: bool = False,
    hybridize: Optional[Mapping[str, bool]] = _STATIC,
) -> None:
    """Cast the network as the library does, and hybridize it unless ``hybridize`` is None."""
    if library == "mpgluon" and (dtype == "bfloat16" or autocast):
        amp.autocast(net, Policy("float32", dtype, "float32", emulate=emulate))
    elif library == "mpgluon" and dtype == "float16":
        cast_block(net)
    elif library == "mpgluon":
        use_own_operators(net)  # as mpgluon.prepare does
    if hybridize is not None:
        net.hybridize(**hybridize)


def _batch(
    batch_size: int, image_size: int, ctx: mx.Context
) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    images = mx.nd.random.normal(shape=(batch_size, 3, image_size, image_size), ctx=ctx)
    return images, mx.nd.arange(batch_size, ctx=ctx, dtype="int32") % _CLASSES


def _facts(library: str, dtype: str, net: Optional[gluon.Block] = None) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if net is not None:
        facts["parameters"] = sum(
            prod(parameter.shape)
            for parameter in net.collect_params().values()
            if parameter.grad_req != "null"
        )
    if library == "mpgluon" and dtype == "float16" and not kernels.load():
        facts["note"] = "without native operators"
    return facts
