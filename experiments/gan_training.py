"""Crops of photographs for the small GAN, and a whole run of it with what becomes of each step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd
from numpy.typing import NDArray
from PIL import Image

from experiments.experiment import Outcome
from experiments.gan import CROP, NAMES, Settings, make_players, play
from experiments.series import changes, means
from experiments.thumbnails import pack
from mpgluon import amp
from mpgluon.data import caltech101, read_image

__all__ = ["WINDOW", "cut_crops", "train"]

WINDOW = 10  # steps of which a curve has the mean
_LAST = 100  # steps of which the final loss is the mean
_SHORT_SIDE = 40  # pixels of a photograph before it is cut
_CROPS_SEED, _ORDER_SEED, _SHOWN_SEED = 1, 2, 3  # keep draws of different purposes apart


def cut_crops(tree: Path, settings: Settings) -> NDArray[np.uint8]:
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


def train(settings: Settings, crops: NDArray[np.uint8]) -> Outcome:
    """Train both networks on crops, shape (N, 32, 32, 3)."""
    players = make_players(settings)
    real = mx.nd.array(crops.transpose(0, 3, 1, 2) / 127.5 - 1)
    rng = np.random.default_rng([_ORDER_SEED, settings.seed])
    figures: dict[str, Any] = {}
    began = time.perf_counter()
    for number in range(1, settings.steps + 1):
        chosen = mx.nd.array(rng.integers(len(crops), size=settings.batch_size), dtype="int32")
        noise = mx.nd.array(rng.standard_normal((settings.batch_size, settings.noise)))
        is_watched = number == settings.watched_step
        if is_watched:
            for name, player in zip(NAMES, players):
                figures[f"{name}_bits_before"] = player.fingerprint()
        play(*players, real.take(chosen), noise, overflow=settings.overflow if is_watched else 1.0)
        if is_watched:
            for name, player in zip(NAMES, players):
                figures[f"{name}_bits_after"] = player.fingerprint()
                figures[f"{name}_scale_before"] = player.scales[-1]
                figures[f"{name}_scale_after"] = amp.loss_scale(player.trainer)
                figures[f"{name}_skips_until_then"] = amp.skipped_steps(player.trainer)
    seconds = time.perf_counter() - began
    curves: dict[str, Sequence[Any]] = {}
    for name, player in zip(NAMES, players):
        figures[f"{name}_skipped_steps"] = amp.skipped_steps(player.trainer)
        figures[f"{name}_final_loss"] = means(player.losses[-_LAST:], _LAST)[0]
        figures[f"{name}_usual_scale"] = float(np.median(player.scales[settings.steps // 2 :]))
        curves[f"{name}_loss"] = means(player.losses, WINDOW)
        curves[f"{name}_scale"] = changes(player.scales)
        curves[f"{name}_skipped"] = player.skipped
    shown = np.random.default_rng(_SHOWN_SEED)
    noise = mx.nd.array(shown.standard_normal((settings.shown, settings.noise)))
    with autograd.train_mode():  # batch statistics, as the discriminator saw them
        made = players[0].net(noise).asnumpy().transpose(0, 2, 3, 1)
    figures["steps"] = settings.steps
    figures["crops"] = pack(crops[shown.permutation(len(crops))[: settings.shown]])
    figures["made"] = pack(np.rint((made + 1) * 127.5).astype(np.uint8))
    return Outcome(figures, curves, {"seconds_per_step": seconds / settings.steps})
