"""The two networks of a GAN, a Trainer for each, a step of both, and crops of photographs.

Architectures and schedules are in :mod:`study.experiments.gan` and
:mod:`study.experiments.progressive_gan`.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import mpgluon
from mpgluon import amp
from mpgluon.checkpoint.saved import Run
from mpgluon.checkpoint.trainer import export_optimizer

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from numpy.typing import NDArray
from PIL import Image

from recipes.data import caltech101, read_image
from study.experiments.series import changes, means

__all__ = [
    "LOSS",
    "NAMES",
    "WINDOW",
    "Player",
    "PlayerSettings",
    "as_images",
    "as_pixels",
    "coarser",
    "cut_crops",
    "draw_batch",
    "finer",
    "from_noise",
    "make_player",
    "pack",
    "play",
    "unpack",
]  # fmt: skip

NAMES = ("generator", "discriminator")
WINDOW = 10  # steps of which a curve has the mean
LOSS = gluon.loss.SigmoidBinaryCrossEntropyLoss()
_MARGIN = 5 / 4  # the shorter side of a photograph before it is cut, as a multiple of the crop's
_CROPS_SEED, _ORDER_SEED = 1, 2  # keep draws of different purposes apart
_JPEG_QUALITY = 80  # eight images of 32 pixels in 8 kB


@dataclass(frozen=True)
class PlayerSettings:
    """The settings that decide how two networks are trained, without the photographs.

    Attributes
    ----------
    dtype : {"float32", "float16"}
        float16 is the cast network with FP32 masters, and a loss scale in each Trainer.
    category : str
        Category of the photographs.
    noise : int
        Numbers from which the generator makes an image.
    shown : int
        Crops and generated images in the outcome.
    """

    dtype: str = "float32"
    category: str = "sunflower"
    crops_per_photograph: int = 8
    batch_size: int = 32
    noise: int = 64
    learning_rate: float = 0.0003
    beta1: float = 0.5
    seed: int = 0
    init_scale: float = 2.0**16
    growth_interval: int = 50
    shown: int = 6

    def make_loss_scale(self) -> Union[str, mpgluon.LossScale]:
        """Return the loss scale that a Trainer begins with."""
        if self.dtype == "float32":
            return "none"
        return mpgluon.DynamicLossScale(self.init_scale, growth_interval=self.growth_interval)

    def order(self) -> np.random.Generator:
        """Return the generator of random numbers for `draw_batch`."""
        return np.random.default_rng([_ORDER_SEED, self.seed])


@dataclass
class Player:
    """One of the two networks, its Trainer, and the history of its steps.

    Attributes
    ----------
    losses : list of float
        Mean of the batch, not scaled.
    scales : list of float
        The loss scale of each step.
    skipped : list of int
        Steps, from 1.
    """

    net: gluon.HybridBlock
    trainer: gluon.Trainer
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def step(self, loss: Any) -> None:
        """Do the Trainer's step after the backward pass of ``loss``, shape (N,).

        Parameters that the loss does not depend on stay as they are.
        """
        self.scales.append(amp.loss_scale(self.trainer))
        self.trainer.step(len(loss), ignore_stale_grad=True)
        self.losses.append(float(loss.mean().asscalar()))
        if amp.step_was_skipped(self.trainer):
            self.skipped.append(len(self.losses))

    def curves(self, name: str) -> dict[str, Sequence[Any]]:
        """Return the history as the curves of an outcome, under names that begin with ``name``."""
        return {
            f"{name}_loss": means(self.losses, WINDOW),
            f"{name}_scale": changes(self.scales),
            f"{name}_skipped": self.skipped,
        }

    def fingerprint(self) -> str:
        """Return a hash of the bits of weights, FP32 masters and momenta.

        BatchNorm's running statistics are left out: a forward pass changes them even if the step
        is skipped.
        """
        parameters = self.net._collect_params_with_prefix()
        trained = {name: one for name, one in parameters.items() if one.grad_req != "null"}
        saved = export_optimizer(Run(self.net, self.trainer)).arrays
        arrays = {
            name if kind == "state" else f"{name}/{kind}": array
            for kind, by_name in saved.items()
            for name, array in by_name.items()
        }
        found = hashlib.sha256()
        for name in sorted(trained):
            found.update(trained[name].data().asnumpy().tobytes())
        for name in sorted(arrays):
            found.update(arrays[name].tobytes())
        return found.hexdigest()[:16]


def make_player(net: gluon.HybridBlock, settings: PlayerSettings) -> Player:
    """Return a network with its first weights, cast if the settings say so, and its Trainer."""
    net.initialize(mx.init.Normal(0.02))
    if settings.dtype == "float16":
        mpgluon.cast_block(net)
    options = {
        "learning_rate": settings.learning_rate,
        "beta1": settings.beta1,
        "multi_precision": True,
    }
    trainer = gluon.Trainer(net.collect_params(), "adam", options)
    amp.init_trainer(trainer, settings.make_loss_scale())
    return Player(net, trainer)


def finer(inputs: int, outputs: int) -> list[gluon.HybridBlock]:
    """Return the layers that double a generator's resolution; arguments are channels."""
    return [
        nn.Conv2DTranspose(outputs, 4, 2, 1, in_channels=inputs, use_bias=False),
        nn.BatchNorm(in_channels=outputs),
        nn.Activation("relu"),
    ]


def coarser(inputs: int, outputs: int) -> list[gluon.HybridBlock]:
    """Return the layers that halve a discriminator's resolution; arguments are channels."""
    return [
        nn.Conv2D(outputs, 4, 2, 1, in_channels=inputs, use_bias=False),
        nn.BatchNorm(in_channels=outputs),
        nn.LeakyReLU(0.2),
    ]


def from_noise(noise: int, channels: int) -> list[gluon.HybridBlock]:
    """Return the first layers of a generator, up to 4 pixels."""
    return [
        nn.Dense(16 * channels, in_units=noise, use_bias=False),
        nn.HybridLambda(lambda F, x: F.reshape(x, (0, -1, 4, 4))),  # noqa: N803 - Gluon's name
        nn.BatchNorm(in_channels=channels),
        nn.Activation("relu"),
    ]


def play(
    generator: Player,
    discriminator: Player,
    crops: Any,
    noise: Any,
    *more: Any,
    overflow: float = 1.0,
) -> None:
    """Train both networks on one batch.

    The generator's loss goes backward through the discriminator and leaves gradients there, with
    the generator's loss scale on them and perhaps infinite. The discriminator's own backward pass
    replaces them (``grad_req="write"``) before its Trainer reads any. Both losses are of the images
    that the generator makes before its step, so a skipped step of the generator does not change
    the discriminator's update in the same call.

    Parameters
    ----------
    crops : NDArray, shape (N, 3, H, W)
        In [-1, 1].
    noise : NDArray, shape (N, settings.noise)
    more : NDArray
        Further inputs of both networks.
    overflow : float
        The factor on the generator's loss.
    """
    is_real, is_made = mx.nd.ones(len(crops)), mx.nd.zeros(len(crops))
    with autograd.record():
        made = generator.net(noise, *more)
        loss = LOSS(discriminator.net(made, *more), is_real)
        with amp.scale_loss(loss * overflow, generator.trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    generator.step(loss)
    with autograd.record():
        loss = LOSS(discriminator.net(crops, *more), is_real)
        loss = loss + LOSS(discriminator.net(made.detach(), *more), is_made)
        with amp.scale_loss(loss, discriminator.trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    discriminator.step(loss)


def draw_batch(rng: np.random.Generator, crops: int, settings: PlayerSettings) -> tuple[Any, Any]:
    """Return which of so many crops are in a batch, and the noise for as many images."""
    chosen = mx.nd.array(rng.integers(crops, size=settings.batch_size), dtype="int32")
    noise = mx.nd.array(rng.standard_normal((settings.batch_size, settings.noise)))
    return chosen, noise


def cut_crops(tree: Path, settings: PlayerSettings, size: int) -> NDArray[np.uint8]:
    """Return crops of one category's photographs, shape (N, size, size, 3); half are mirrored."""
    folder = caltech101.list_images(tree)
    paths = [path for path in folder.paths if path.parent.name == settings.category]
    rng = np.random.default_rng(_CROPS_SEED)
    crops = []
    for path in paths:
        image = Image.fromarray(read_image(path))
        factor = _MARGIN * size / min(image.size)
        shape = (round(factor * image.width), round(factor * image.height))
        pixels = np.asarray(image.resize(shape, Image.Resampling.BILINEAR))
        for _ in range(settings.crops_per_photograph):
            top, left = (int(rng.integers(side - size + 1)) for side in pixels.shape[:2])
            crop = pixels[top : top + size, left : left + size]
            crops.append(crop[:, ::-1] if rng.random() < 0.5 else crop)
    return np.stack(crops)


def as_images(crops: NDArray[Any]) -> Any:
    """Return crops, shape (N, H, W, 3), from 0 to 255, as an NDArray (N, 3, H, W) in [-1, 1]."""
    return mx.nd.array(crops.transpose(0, 3, 1, 2) / 127.5 - 1)


def as_pixels(images: Any) -> NDArray[np.uint8]:
    """Return an NDArray of images, shape (N, 3, H, W), in [-1, 1] as pixels (N, H, W, 3)."""
    levels: NDArray[np.float32] = (images.asnumpy().transpose(0, 2, 3, 1) + 1) * 127.5
    return np.rint(levels).astype(np.uint8)


def pack(images: NDArray[np.uint8]) -> str:
    """Return images, shape (N, height, width, 3), side by side: a JPEG file in base64."""
    file = io.BytesIO()
    strip = Image.fromarray(np.concatenate(list(images), axis=1))
    strip.save(file, "JPEG", quality=_JPEG_QUALITY)
    return base64.b64encode(file.getvalue()).decode("ascii")


def unpack(text: str) -> NDArray[np.uint8]:
    """Return the pixels of a packed strip, shape (height, N * width, 3)."""
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return np.asarray(image)
