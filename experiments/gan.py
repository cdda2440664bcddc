"""Train a small DCGAN on crops of photographs: two networks, two Trainers, two loss scales.

References
----------
Radford, Metz, Chintala, "Unsupervised Representation Learning with Deep Convolutional Generative
Adversarial Networks", ICLR 2016, sections 3 and 4.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mpgluon
from mpgluon import amp
from mpgluon.trainer.snapshot import export_trainer

__all__ = ["CROP", "NAMES", "Player", "Settings", "make_players", "play"]

NAMES = ("generator", "discriminator")
CROP = 32  # pixels
_LOSS = gluon.loss.SigmoidBinaryCrossEntropyLoss()


@dataclass(frozen=True)
class Settings:
    """What a run depends on, beside the photographs.

    Attributes
    ----------
    dtype : {"float32", "float16"}
        float16 is the cast network with FP32 masters, and a dynamic loss scale in each Trainer.
    category : str
        Of the photographs.
    channels : int
        At 16 pixels; twice and four times as many at 8 and 4.
    noise : int
        Numbers from which an image is made.
    watched_step : int
        From 1; what both networks are after it goes into the outcome.
    overflow : float
        With which the generator's loss is multiplied in the watched step.
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
    """One of the two networks, its Trainer, and what became of each step.

    Attributes
    ----------
    losses : list of float
        Mean of the batch, not scaled.
    scales : list of float
        By which they were multiplied.
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

        Not of BatchNorm's running statistics: a forward pass moves them, whatever becomes of the
        step.
        """
        parameters = self.net._collect_params_with_prefix()
        trained = {name: one for name, one in parameters.items() if one.grad_req != "null"}
        _, arrays = export_trainer(self.trainer, parameters)
        found = hashlib.sha256()
        for name in sorted(trained):
            found.update(trained[name].data().asnumpy().tobytes())
        for name in sorted(arrays):
            found.update(arrays[name].tobytes())
        return found.hexdigest()[:16]


def make_players(settings: Settings) -> tuple[Player, Player]:
    """Return generator and discriminator with their first weights, which the seed decides."""
    mx.random.seed(settings.seed)
    nets = (_make_generator(settings), _make_discriminator(settings))
    players = []
    for net in nets:
        net.initialize(mx.init.Normal(0.02))
        if settings.dtype == "float16":
            mpgluon.cast_block(net)
        net.hybridize(static_alloc=True, static_shape=True)
        options = {
            "learning_rate": settings.learning_rate,
            "beta1": settings.beta1,
            "multi_precision": True,
        }
        trainer = gluon.Trainer(net.collect_params(), "adam", options)
        if settings.dtype == "float16":
            scale = mpgluon.DynamicLossScale(
                settings.init_scale, growth_interval=settings.growth_interval
            )
            amp.init_trainer(trainer, scale)
        else:
            amp.init_trainer(trainer, "none")
        players.append(Player(net, trainer))
    generator, discriminator = players
    return generator, discriminator


def _make_generator(settings: Settings) -> gluon.HybridBlock:
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


def _make_discriminator(settings: Settings) -> gluon.HybridBlock:
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
    replaces them (``grad_req="write"``) before its Trainer looks at any. Both judge the images
    that the generator makes before its step, so what becomes of that step is of no concern to the
    discriminator in this one.

    Parameters
    ----------
    crops : NDArray, shape (N, 3, 32, 32)
        In [-1, 1].
    noise : NDArray, shape (N, settings.noise)
    overflow : float
        The generator's loss is multiplied by it.
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
