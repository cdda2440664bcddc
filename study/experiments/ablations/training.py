"""The images, the preparation of a network and the training loop that the ablations share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable, Optional

from mpgluon import amp, cast_block

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

from recipes.data.shapes import class_names, render_image

__all__ = ["batches", "cross_entropy", "first_weights", "sgd", "shapes", "train"]

_losses_of = gluon.loss.SoftmaxCrossEntropyLoss()


def cross_entropy(logits: NDArray, labels: NDArray) -> NDArray:
    """Return the mean loss of a batch, in the format of ``logits``."""
    return _losses_of(logits, labels).mean()


def shapes(images_per_class: int, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Render images of the ten plain shapes.

    Parameters
    ----------
    images_per_class : int
    size : int
        Height and width in pixels.

    Returns
    -------
    images : array of float32, shape (10 * images_per_class, 3, size, size), from 0 to 255
    labels : array of int32, shape (10 * images_per_class,)
    """
    classes = len(class_names())
    images = np.empty((classes * images_per_class, 3, size, size), np.float32)
    for place in range(len(images)):
        image = render_image(place % classes, place // classes).convert("RGB")
        images[place] = np.asarray(image.resize((size, size))).transpose(2, 0, 1)
    return images, (np.arange(len(images)) % classes).astype(np.int32)


def batches(
    inputs: npt.NDArray[Any], targets: npt.NDArray[Any], batch_size: int
) -> Iterator[tuple[NDArray, NDArray]]:
    """Yield batches without end, each epoch in another order, without an incomplete last batch."""
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(inputs))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield (
                mx.nd.array(inputs[chosen], dtype=inputs.dtype),
                mx.nd.array(targets[chosen], dtype=targets.dtype),
            )


def first_weights(
    net: gluon.HybridBlock, sample: Optional[NDArray] = None, *, cast: bool = True
) -> gluon.HybridBlock:
    """Give a network the same first weights in every run, cast it to float16 and hybridize it.

    Parameters
    ----------
    net : gluon.HybridBlock
        Changed in place, and returned.
    sample : NDArray, optional
        An input from which the shapes are inferred that the layers do not state.
    cast : bool
        Whether to cast; otherwise the network stays in FP32.
    """
    mx.random.seed(0)
    net.initialize(mx.init.Xavier())
    if sample is not None:
        net(sample)
    if cast:
        cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def sgd(net: gluon.Block, loss_scale: Any = "dynamic", **options: Any) -> gluon.Trainer:
    """Return a Trainer with SGD, FP32 masters unless ``options`` differ, and a loss scale.

    A ``loss_scale`` of ``None`` leaves the Trainer as Gluon makes it.
    """
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True, **options})
    if loss_scale is not None:
        amp.init_trainer(trainer, loss_scale)
    return trainer


def train(
    net: gluon.Block,
    loss_fn: Callable[[NDArray, NDArray], NDArray],
    data: Iterator[tuple[NDArray, NDArray]],
    trainer: gluon.Trainer,
    steps: int,
    *,
    library: Any = amp,
    step_size: int = 1,
    after_step: Optional[Callable[[int], None]] = None,
) -> list[float]:
    """Train, and return the mean loss of each step.

    Parameters
    ----------
    net : gluon.Block
    loss_fn : callable
        Takes the network's output and the targets, and returns losses, whose sum is differentiated.
    data : iterator of (inputs, targets)
    trainer : gluon.Trainer
        With a loss scale of ``library``.
    steps : int
    library : module
        Whose ``scale_loss`` is used.
    step_size : int
        What ``trainer.step`` divides by: the size of the batch if ``loss_fn`` returns no mean.
    after_step : callable
        Called with the number of each step, from 1.
    """
    losses = []
    for step in range(1, steps + 1):
        inputs, targets = next(data)
        with autograd.record():
            loss = loss_fn(net(inputs), targets)
            with library.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(step_size)
        losses.append(float(loss.mean().asscalar()))
        if after_step is not None:
            after_step(step)
    return losses
