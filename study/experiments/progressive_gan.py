"""Train a GAN whose images grow: 8 pixels first, then 16, 32 and 64, each new block faded in.

The loss and the layers are as in :mod:`study.experiments.gan`, not as in the paper.

References
----------
Karras, Aila, Laine, Lehtinen, "Progressive Growing of GANs for Improved Quality, Stability, and
Variation", ICLR 2018, sections 2 and A.1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional, Union

import mpgluon
from mpgluon import amp
from mpgluon_tools.diagnostics.exponents import EMPTY, ExponentHistogram, batch_exponents
from mpgluon_tools.diagnostics.observe import Batch

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from numpy.typing import NDArray

from study.experiments.experiment import Outcome
from study.experiments.players import (
    LOSS,
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
from study.experiments.series import means, rounded

__all__ = [
    "Discriminator",
    "Generator",
    "ProgressiveSettings",
    "fading_weight",
    "make_players",
    "shrunk",
    "train",
]

_FIRST = 8  # pixels of the first images
_SHOWN_SEED = 3


@dataclass(frozen=True)
class ProgressiveSettings(PlayerSettings):
    """The settings of a run.

    Attributes
    ----------
    static_scale : float or None
        The loss scale of both networks in float16; ``None`` is a dynamic one in each.
    resolutions : int
        How many: of 8 pixels and its doublings.
    steps_per_resolution, fading_steps : int
        Steps at each resolution, and how many of these fade in its new blocks.
    channels, most_channels : int
        At the last resolution, doubled from each resolution to the one before, and at most.
    samples : int
        Steps in the second half of each resolution in which gradients are counted.
    """

    batch_size: int = 16
    growth_interval: int = 25
    static_scale: Optional[float] = None
    resolutions: int = 4
    steps_per_resolution: int = 200
    fading_steps: int = 80
    channels: int = 8
    most_channels: int = 64
    samples: int = 5

    def __post_init__(self) -> None:
        half = self.steps_per_resolution // 2
        if not (0 < self.fading_steps <= half and 0 < self.samples <= half):
            raise ValueError(
                f"fading_steps and samples must be from 1 to {half}, half of the "
                f"{self.steps_per_resolution} steps at a resolution; received "
                f"{self.fading_steps} and {self.samples}"
            )

    @property
    def pixels(self) -> tuple[int, ...]:
        """The resolutions, in the order of training."""
        return tuple(_FIRST * 2**stage for stage in range(self.resolutions))

    @property
    def widths(self) -> tuple[int, ...]:
        """The channels at half of each resolution and, last, at the last resolution."""
        doublings = range(self.resolutions, -1, -1)
        return tuple(min(self.channels * 2**one, self.most_channels) for one in doublings)

    def make_loss_scale(self) -> Union[str, mpgluon.LossScale]:
        """Return the loss scale that a Trainer begins with."""
        if self.dtype == "float32" or self.static_scale is None:
            return super().make_loss_scale()
        return mpgluon.StaticLossScale(self.static_scale)


class _Growing(gluon.HybridBlock):
    """A network with the blocks of all resolutions, of which it uses some.

    Attributes
    ----------
    stage : int
        The position of the resolution, from 0. Blocks of later ones are not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stage = 0

    def hybridize_parts(self) -> None:
        """Hybridize each part alone, so that another stage needs no other graph of any."""
        for part in self._children.values():
            part.hybridize()


class Generator(_Growing):
    """A network from noise, (N, noise), to images in [-1, 1], (N, 3, H, H).

    After the first resolution its second input is the weight of the new block, (1, 1, 1, 1). The
    rest comes from the image of the resolution before, each pixel of which becomes four.
    """

    def __init__(self, settings: ProgressiveSettings) -> None:
        super().__init__()
        widths = settings.widths
        self.first = _sequence(from_noise(settings.noise, widths[0]))
        self.blocks = _sequence(_sequence(finer(*pair)) for pair in zip(widths, widths[1:]))
        self.to_rgb = _sequence(
            _sequence([nn.Conv2D(3, 1, in_channels=width), nn.Activation("tanh")])
            for width in widths[1:]
        )

    def hybrid_forward(self, F: Any, noise: Any, weight: Any = None) -> Any:  # noqa: N803 - Gluon's
        """Return images of the stage's resolution."""
        before = self.first(noise)
        for block in self.blocks[: self.stage]:
            before = block(before)
        image = self.to_rgb[self.stage](self.blocks[self.stage](before))
        if not self.stage:
            return image
        old = self.to_rgb[self.stage - 1](before)
        old = F.repeat(F.repeat(old, repeats=2, axis=2), repeats=2, axis=3)
        return _blended(F, old, image, weight)


class Discriminator(_Growing):
    """A network from images, and the same weight as in the generator, to logits, (N, 1)."""

    def __init__(self, settings: ProgressiveSettings) -> None:
        super().__init__()
        widths = settings.widths
        self.from_rgb = _sequence(
            _sequence([nn.Conv2D(width, 1, in_channels=3), nn.LeakyReLU(0.2)])
            for width in widths[1:]
        )
        self.blocks = _sequence(
            _sequence(coarser(inputs, outputs)) for outputs, inputs in zip(widths, widths[1:])
        )
        self.last = nn.Dense(1, in_units=16 * widths[0])

    def hybrid_forward(self, F: Any, images: Any, weight: Any = None) -> Any:  # noqa: N803 - Gluon's
        """Return logits, which are high for photographs."""
        found = self.blocks[self.stage](self.from_rgb[self.stage](images))
        if self.stage:
            half = F.Pooling(images, kernel=(2, 2), stride=(2, 2), pool_type="avg")
            found = _blended(F, self.from_rgb[self.stage - 1](half), found, weight)
        for stage in range(self.stage - 1, -1, -1):
            found = self.blocks[stage](found)
        return self.last(found)


def _sequence(blocks: Any) -> gluon.HybridBlock:
    net = nn.HybridSequential()
    net.add(*blocks)
    return net


def _blended(F: Any, old: Any, new: Any, weight: Any) -> Any:  # noqa: N803 - Gluon's name
    return F.broadcast_add(F.broadcast_mul(new, weight), F.broadcast_mul(old, 1 - weight))


def fading_weight(settings: ProgressiveSettings, step: int) -> float:
    """Return the weight of a resolution's new blocks in a step of it, from 1: at last 1."""
    return min(step / settings.fading_steps, 1.0)


def shrunk(crops: NDArray[np.uint8], pixels: int) -> NDArray[np.float32]:
    """Return crops, (N, H, H, 3), with so many pixels a side: means of squares of theirs."""
    count, size = len(crops), crops.shape[1] // pixels
    squares = crops.reshape(count, pixels, size, pixels, size, 3).astype(np.float32)
    means_of_squares: NDArray[np.float32] = squares.mean(axis=(2, 4))
    return means_of_squares


def make_players(settings: ProgressiveSettings) -> tuple[Player, Player]:
    """Return generator and discriminator with first weights that depend on the seed only."""
    mx.random.seed(settings.seed)
    generator = make_player(Generator(settings), settings)
    discriminator = make_player(Discriminator(settings), settings)
    for player in (generator, discriminator):
        player.net.hybridize_parts()
    return generator, discriminator


class _Counter:
    """Counts exponents of activation gradients, as FP32 networks of the same weights have them."""

    def __init__(self, settings: ProgressiveSettings, players: dict[str, Player]) -> None:
        self._players = players
        with_fp32 = replace(settings, dtype="float32")
        self._fp32 = dict(zip(NAMES, (one.net for one in make_players(with_fp32))))
        self.start()

    def start(self) -> None:
        """Begin a new resolution."""
        self.true = dict.fromkeys(NAMES, EMPTY)
        self.scaled = dict.fromkeys(NAMES, EMPTY)

    def count(self, crops: Any, noise: Any, *weight: Any) -> None:
        """Add the gradients of a batch, without the loss scale and times the current one."""
        for name, net in self._fp32.items():
            _copy_weights(self._players[name].net, net)
        generator, discriminator = self._fp32.values()
        real, made = mx.nd.ones(len(crops)), mx.nd.zeros(len(crops))
        with autograd.train_mode():
            images = generator(noise, *weight)
        judged = Batch(
            (noise, *weight), real, lambda out, of: LOSS(discriminator(out, *weight), of)
        )
        found = {
            "generator": _activation_gradients(generator, judged),
            "discriminator": _activation_gradients(
                discriminator, Batch((crops, *weight), real, LOSS)
            )
            + _activation_gradients(discriminator, Batch((images, *weight), made, LOSS)),
        }
        for name, histogram in found.items():
            self.true[name] += histogram
            self.scaled[name] += histogram.times(amp.loss_scale(self._players[name].trainer))

    def figures(self, name: str, pixels: int) -> dict[str, Any]:
        """Return a record's entries for a network's gradients, besides the histogram."""
        true, scaled = self.true[name], self.scaled[name].shares()
        return {
            f"{name}_{pixels}_median_exponent": _median(true),
            f"{name}_{pixels}_lost": rounded(true.shares()["lost"]),
            f"{name}_{pixels}_lost_at_scale": rounded(scaled["lost"]),
            f"{name}_{pixels}_too_large_at_scale": rounded(scaled["overflow"]),
        }


def _activation_gradients(net: gluon.HybridBlock, batch: Batch) -> ExponentHistogram:
    return batch_exponents(net, batch).overall()["activation gradients"]


def _copy_weights(source: _Growing, target: _Growing) -> None:
    """Give a network in FP32 the weights, running statistics and stage of another."""
    ours = target._collect_params_with_prefix()
    for name, parameter in source._collect_params_with_prefix().items():
        ours[name].set_data(parameter.data().astype("float32"))
    target.stage = source.stage


def train(settings: ProgressiveSettings, crops: NDArray[np.uint8]) -> Outcome:
    """Train both networks on crops, which have the last resolution's size, (N, H, H, 3).

    The Trainers, with their masters, momenta and loss scales, stay the same at all resolutions.
    """
    generator, discriminator = make_players(settings)
    players = dict(zip(NAMES, (generator, discriminator)))
    counter = _Counter(settings, players)
    sampled = _sampled_steps(settings)
    rng = settings.order()
    figures: dict[str, Any] = {"steps": settings.resolutions * settings.steps_per_resolution}
    curves: dict[str, Sequence[Any]] = {}
    began = time.perf_counter()
    for stage, pixels in enumerate(settings.pixels):
        real = as_images(shrunk(crops, pixels))
        for player in players.values():
            player.net.stage = stage
        counter.start()
        for step in range(1, settings.steps_per_resolution + 1):
            chosen, noise = draw_batch(rng, len(crops), settings)
            batch, more = real.take(chosen), []
            if stage:
                more = [mx.nd.full((1, 1, 1, 1), fading_weight(settings, step))]
                batch = _faded(batch, *more)
            if step in sampled:
                counter.count(batch, noise, *more)
            play(generator, discriminator, batch, noise, *more)
        for name, player in players.items():
            figures |= _figures(f"{name}_{pixels}", player, settings.steps_per_resolution)
            figures |= counter.figures(name, pixels)
            curves[f"{name}_{pixels}_exponents"] = _pairs(counter.true[name])
    seconds = time.perf_counter() - began
    for name, player in players.items():
        curves.update(player.curves(name))
        figures[f"{name}_is_finite"] = _is_finite(player.net)
    shown = np.random.default_rng(_SHOWN_SEED)
    noise = mx.nd.array(shown.standard_normal((settings.shown, settings.noise)))
    with autograd.train_mode():  # batch statistics, as in the discriminator's training
        made = generator.net(noise, mx.nd.ones((1, 1, 1, 1)))
    figures["crops"] = pack(crops[shown.permutation(len(crops))[: settings.shown]])
    figures["made"] = pack(as_pixels(made)) if figures["generator_is_finite"] else None
    return Outcome(figures, curves, {"seconds_per_step": seconds / figures["steps"]})


def _sampled_steps(settings: ProgressiveSettings) -> set[int]:
    """Return the steps of a resolution in which gradients are counted; the last is one of them."""
    steps = settings.steps_per_resolution
    return {round(one) for one in np.linspace(steps, steps / 2, settings.samples, endpoint=False)}


def _faded(images: Any, weight: Any) -> Any:
    """Return photographs blended with themselves at half the resolution, as the generator's are."""
    half = mx.nd.Pooling(images, kernel=(2, 2), stride=(2, 2), pool_type="avg")
    return _blended(mx.nd, half.repeat(2, axis=2).repeat(2, axis=3), images, weight)


def _figures(name: str, player: Player, steps: int) -> dict[str, Any]:
    """Return a record's entries for the latest steps; their names begin with ``name``."""
    before = len(player.losses) - steps
    return {
        f"{name}_usual_scale": float(np.median(player.scales[before:])),
        f"{name}_skipped_steps": sum(step > before for step in player.skipped),
        f"{name}_loss": means(player.losses[before:], steps)[0],
    }


def _median(histogram: ExponentHistogram) -> Optional[int]:
    """Return the median exponent of the finite values that are not zero; None without one."""
    below = np.cumsum(histogram.counts)
    if not below[-1]:
        return None
    return int(histogram.exponents[np.searchsorted(below, below[-1] / 2)])


def _pairs(histogram: ExponentHistogram) -> list[tuple[int, int]]:
    """Return the exponents that occur, each with its count."""
    found = zip(histogram.exponents.tolist(), histogram.counts.tolist())
    return [(exponent, count) for exponent, count in found if count]


def _is_finite(net: gluon.HybridBlock) -> bool:
    """Return whether all weights and running statistics are finite."""
    arrays = (one.data().asnumpy() for one in net.collect_params().values())
    return all(bool(np.isfinite(array).all()) for array in arrays)
