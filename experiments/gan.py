"""Train a small DCGAN on crops of photographs: two networks, two Trainers, two loss scales.

References
----------
Radford, Metz, Chintala, "Unsupervised Representation Learning with Deep Convolutional Generative
Adversarial Networks", ICLR 2016, sections 3 and 4.
"""

from __future__ import annotations

import base64
import hashlib
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

from experiments.experiment import Outcome
from experiments.series import changes, means
from recipes.data import caltech101, read_image

__all__ = [
    "CROP",
    "NAMES",
    "WINDOW",
    "GanSettings",
    "Player",
    "cut_crops",
    "make_players",
    "pack",
    "play",
    "train",
    "unpack",
]  # fmt: skip

NAMES = ("generator", "discriminator")
CROP = 32  # pixels
WINDOW = 10  # steps of which a curve has the mean
_LAST = 100  # steps of which the final loss is the mean
_SHORT_SIDE = 40  # pixels of a photograph before it is cut
_CROPS_SEED, _ORDER_SEED, _SHOWN_SEED = 1, 2, 3  # keep draws of different purposes apart
_JPEG_QUALITY = 80  # eight images of 32 pixels in 8 kB
_LOSS = gluon.loss.SigmoidBinaryCrossEntropyLoss()


@dataclass(frozen=True)
class GanSettings:
    """The settings of a run, without the photographs.

    Attributes
    ----------
    dtype : {"float32", "float16"}
        float16 is the cast network with FP32 masters, and a dynamic loss scale in each Trainer.
    category : str
        Category of the photographs.
    channels : int
        At 16 pixels; twice and four times as many at 8 and 4.
    noise : int
        Numbers from which the generator makes an image.
    watched_step : int
        From 1; the state of both networks around it goes into the outcome.
    overflow : float
        The factor on the generator's loss in the watched step.
    shown : int
        Crops and generated images in the outcome.
    """

    dtype: str = "float32"
    category: str = "sunflower"
    crops_per_photograph: int = 8
    steps: int = 800
    batch_size: int = 32
    channels: int = 24
    noise: int = 64
    learning_rate: float = 0.0003
    beta1: float = 0.5
    seed: int = 0
    init_scale: float = 2.0**16
    growth_interval: int = 50
    watched_step: int = 500
    overflow: float = 1.0
    shown: int = 6

    def __post_init__(self) -> None:
        if not 1 <= self.watched_step <= self.steps:
            raise ValueError(
                f"watched_step must be one of the {self.steps} steps, received {self.watched_step}"
            )


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
        """Do the Trainer's step after the backward pass of ``loss``, shape (N,)."""
        self.scales.append(amp.loss_scale(self.trainer))
        self.trainer.step(len(loss))
        self.losses.append(float(loss.mean().asscalar()))
        if amp.step_was_skipped(self.trainer):
            self.skipped.append(len(self.losses))

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


def make_players(settings: GanSettings) -> tuple[Player, Player]:
    """Return generator and discriminator with first weights that depend on the seed only."""
    mx.random.seed(settings.seed)
    generator, discriminator = (
        _make_player(net, settings)
        for net in (_make_generator(settings), _make_discriminator(settings))
    )
    return generator, discriminator


def _make_player(net: gluon.HybridBlock, settings: GanSettings) -> Player:
    net.initialize(mx.init.Normal(0.02))
    loss_scale: Any = "none"
    if settings.dtype == "float16":
        mpgluon.cast_block(net)
        loss_scale = mpgluon.DynamicLossScale(
            settings.init_scale, growth_interval=settings.growth_interval
        )
    net.hybridize(static_alloc=True, static_shape=True)
    options = {
        "learning_rate": settings.learning_rate,
        "beta1": settings.beta1,
        "multi_precision": True,
    }
    trainer = gluon.Trainer(net.collect_params(), "adam", options)
    amp.init_trainer(trainer, loss_scale)
    return Player(net, trainer)


def _make_generator(settings: GanSettings) -> gluon.HybridBlock:
    """Return a network from noise, (N, noise), to images in [-1, 1], (N, 3, 32, 32)."""
    width, net = settings.channels, nn.HybridSequential()
    net.add(
        nn.Dense(16 * 4 * width, in_units=settings.noise, use_bias=False),
        nn.HybridLambda(lambda F, x: F.reshape(x, (0, -1, 4, 4))),  # noqa: N803 - Gluon's name
        nn.BatchNorm(in_channels=4 * width),
        nn.Activation("relu"),
    )
    for inputs, outputs in ((4 * width, 2 * width), (2 * width, width)):
        net.add(
            nn.Conv2DTranspose(outputs, 4, 2, 1, in_channels=inputs, use_bias=False),
            nn.BatchNorm(in_channels=outputs),
            nn.Activation("relu"),
        )
    net.add(nn.Conv2DTranspose(3, 4, 2, 1, in_channels=width), nn.Activation("tanh"))
    return net


def _make_discriminator(settings: GanSettings) -> gluon.HybridBlock:
    """Return a network from images to logits, (N, 1), that are high for photographs."""
    width, net = settings.channels, nn.HybridSequential()
    net.add(nn.Conv2D(width, 4, 2, 1, in_channels=3), nn.LeakyReLU(0.2))
    for inputs, outputs in ((width, 2 * width), (2 * width, 4 * width)):
        net.add(
            nn.Conv2D(outputs, 4, 2, 1, in_channels=inputs, use_bias=False),
            nn.BatchNorm(in_channels=outputs),
            nn.LeakyReLU(0.2),
        )
    net.add(nn.Dense(1, in_units=16 * 4 * width))
    return net


def play(
    generator: Player, discriminator: Player, crops: Any, noise: Any, *, overflow: float = 1.0
) -> None:
    """Let both learn from one batch.

    The generator's loss goes backward through the discriminator and leaves gradients there, with
    the generator's loss scale on them and perhaps infinite. The discriminator's own backward pass
    replaces them (``grad_req="write"``) before its Trainer reads any. Both losses are of the images
    that the generator makes before its step, so a skipped step of the generator does not change
    the discriminator's update in the same call.

    Parameters
    ----------
    crops : NDArray, shape (N, 3, 32, 32)
        In [-1, 1].
    noise : NDArray, shape (N, settings.noise)
    overflow : float
        The factor on the generator's loss.
    """
    is_real, is_made = mx.nd.ones(len(crops)), mx.nd.zeros(len(crops))
    with autograd.record():
        made = generator.net(noise)
        loss = _LOSS(discriminator.net(made), is_real)
        with amp.scale_loss(loss * overflow, generator.trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    generator.step(loss)
    with autograd.record():
        loss = _LOSS(discriminator.net(crops), is_real)
        loss = loss + _LOSS(discriminator.net(made.detach()), is_made)
        with amp.scale_loss(loss, discriminator.trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    discriminator.step(loss)


def cut_crops(tree: Path, settings: GanSettings) -> NDArray[np.uint8]:
    """Return crops of one category's photographs, shape (N, 32, 32, 3); half of them mirrored."""
    folder = caltech101.list_images(tree)
    paths = [path for path in folder.paths if path.parent.name == settings.category]
    rng = np.random.default_rng(_CROPS_SEED)
    crops = []
    for path in paths:
        image = Image.fromarray(read_image(path))
        factor = _SHORT_SIDE / min(image.size)
        size = (round(factor * image.width), round(factor * image.height))
        pixels = np.asarray(image.resize(size, Image.Resampling.BILINEAR))
        for _ in range(settings.crops_per_photograph):
            top, left = (int(rng.integers(side - CROP + 1)) for side in pixels.shape[:2])
            crop = pixels[top : top + CROP, left : left + CROP]
            crops.append(crop[:, ::-1] if rng.random() < 0.5 else crop)
    return np.stack(crops)


def train(settings: GanSettings, crops: NDArray[np.uint8]) -> Outcome:
    """Train both networks on crops, shape (N, 32, 32, 3)."""
    generator, discriminator = make_players(settings)
    players = dict(zip(NAMES, (generator, discriminator)))
    real = mx.nd.array(crops.transpose(0, 3, 1, 2) / 127.5 - 1)
    rng = np.random.default_rng([_ORDER_SEED, settings.seed])
    figures: dict[str, Any] = {}
    began = time.perf_counter()
    for number in range(1, settings.steps + 1):
        chosen = mx.nd.array(rng.integers(len(crops), size=settings.batch_size), dtype="int32")
        noise = mx.nd.array(rng.standard_normal((settings.batch_size, settings.noise)))
        if number != settings.watched_step:
            play(generator, discriminator, real.take(chosen), noise)
            continue
        for name, player in players.items():
            figures[f"{name}_bits_before"] = player.fingerprint()
        overflow = settings.overflow
        play(generator, discriminator, real.take(chosen), noise, overflow=overflow)
        for name, player in players.items():
            figures[f"{name}_bits_after"] = player.fingerprint()
            figures[f"{name}_scale_before"] = player.scales[-1]
            figures[f"{name}_scale_after"] = amp.loss_scale(player.trainer)
            figures[f"{name}_skips_until_then"] = amp.skipped_steps(player.trainer)
    seconds = time.perf_counter() - began
    curves: dict[str, Sequence[Any]] = {}
    for name, player in players.items():
        figures[f"{name}_skipped_steps"] = amp.skipped_steps(player.trainer)
        figures[f"{name}_final_loss"] = means(player.losses[-_LAST:], _LAST)[0]
        figures[f"{name}_usual_scale"] = float(np.median(player.scales[settings.steps // 2 :]))
        curves[f"{name}_loss"] = means(player.losses, WINDOW)
        curves[f"{name}_scale"] = changes(player.scales)
        curves[f"{name}_skipped"] = player.skipped
    shown = np.random.default_rng(_SHOWN_SEED)
    noise = mx.nd.array(shown.standard_normal((settings.shown, settings.noise)))
    with autograd.train_mode():  # batch statistics, as in the discriminator's training
        made = generator.net(noise).asnumpy().transpose(0, 2, 3, 1)
    figures["steps"] = settings.steps
    figures["crops"] = pack(crops[shown.permutation(len(crops))[: settings.shown]])
    figures["made"] = pack(np.rint((made + 1) * 127.5).astype(np.uint8))
    return Outcome(figures, curves, {"seconds_per_step": seconds / settings.steps})


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
