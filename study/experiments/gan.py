"""Train a small DCGAN on crops of photographs: two networks, two Trainers, two loss scales.

References
----------
Radford, Metz, Chintala, "Unsupervised Representation Learning with Deep Convolutional Generative
Adversarial Networks", ICLR 2016, sections 3 and 4.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpgluon import amp

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from numpy.typing import NDArray

from study.experiments.experiment import Outcome
from study.experiments.players import (
    NAMES,
    Player,
    PlayerSettings,
    as_images,
    as_pixels,
    coarser,
    draw_batch,
    finer,
    from_noise,
    make_player,
    pack,
    play,
)
from study.experiments.series import means

__all__ = ["CROP", "GanSettings", "make_players", "train"]

CROP = 32  # pixels
_LAST = 100  # steps of which the final loss is the mean
_SHOWN_SEED = 3


@dataclass(frozen=True)
class GanSettings(PlayerSettings):
    """The settings of a run.

    Attributes
    ----------
    channels : int
        At 16 pixels; twice and four times as many at 8 and 4.
    watched_step : int
        From 1; the state of both networks around it goes into the outcome.
    overflow : float
        The factor on the generator's loss in the watched step.
    """

    steps: int = 800
    channels: int = 24
    watched_step: int = 500
    overflow: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.watched_step <= self.steps:
            raise ValueError(
                f"watched_step must be one of the {self.steps} steps, received {self.watched_step}"
            )


def make_players(settings: GanSettings) -> tuple[Player, Player]:
    """Return generator and discriminator with first weights that depend on the seed only."""
    mx.random.seed(settings.seed)
    generator, discriminator = (
        make_player(net, settings)
        for net in (_make_generator(settings), _make_discriminator(settings))
    )
    for player in (generator, discriminator):
        player.net.hybridize(static_alloc=True, static_shape=True)
    return generator, discriminator


def _make_generator(settings: GanSettings) -> gluon.HybridBlock:
    """Return a network from noise, (N, noise), to images in [-1, 1], (N, 3, 32, 32)."""
    width, net = settings.channels, nn.HybridSequential()
    net.add(*from_noise(settings.noise, 4 * width))
    net.add(*finer(4 * width, 2 * width), *finer(2 * width, width))
    net.add(nn.Conv2DTranspose(3, 4, 2, 1, in_channels=width), nn.Activation("tanh"))
    return net


def _make_discriminator(settings: GanSettings) -> gluon.HybridBlock:
    """Return a network from images to logits, (N, 1), that are high for photographs."""
    width, net = settings.channels, nn.HybridSequential()
    net.add(nn.Conv2D(width, 4, 2, 1, in_channels=3), nn.LeakyReLU(0.2))
    net.add(*coarser(width, 2 * width), *coarser(2 * width, 4 * width))
    net.add(nn.Dense(1, in_units=16 * 4 * width))
    return net


def train(settings: GanSettings, crops: NDArray[np.uint8]) -> Outcome:
    """Train both networks on crops, shape (N, 32, 32, 3)."""
    generator, discriminator = make_players(settings)
    players = dict(zip(NAMES, (generator, discriminator)))
    real = as_images(crops)
    rng = settings.order()
    figures: dict[str, Any] = {}
    began = time.perf_counter()
    for number in range(1, settings.steps + 1):
        chosen, noise = draw_batch(rng, len(crops), settings)
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
        curves.update(player.curves(name))
    shown = np.random.default_rng(_SHOWN_SEED)
    noise = mx.nd.array(shown.standard_normal((settings.shown, settings.noise)))
    with autograd.train_mode():  # batch statistics, as in the discriminator's training
        made = generator.net(noise)
    figures["steps"] = settings.steps
    figures["crops"] = pack(crops[shown.permutation(len(crops))[: settings.shown]])
    figures["made"] = pack(as_pixels(made))
    return Outcome(figures, curves, {"seconds_per_step": seconds / settings.steps})
