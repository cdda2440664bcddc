"""Turn an image file into a square: a random crop for training, the centre for testing.

Or, as is usual with CIFAR-10, the whole image: shifted for training, as it is for testing.

The same (seed, epoch, image) give the same crop. No batches are made here, and MXNet is not needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mpgluon_tools.onnx.metadata import IMAGENET_MEAN, IMAGENET_STD
from mpgluon_tools.serving.photographs import (
    Box,
    centre_crop,
    normalized_levels,
    resized,
    to_rgb,
)

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recipes.data.draws import Purpose, generator
from recipes.data.images import open_image
from recipes.options import at_least

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Augmentation",
    "centre_crop",
    "normalized_levels",
    "read_crop",
]

_RATIO = (3 / 4, 4 / 3)
_FARTHEST = 1 / 8  # shift, of a side
_MEAN_COLOUR = tuple(round(255 * level) for level in IMAGENET_MEAN)


@dataclass(frozen=True)
class Augmentation:
    """The random part of training images: crops, or shifts; and reflections.

    ``scale`` holds the least and the greatest share of the image's area that a crop covers. With
    ``shifts`` the whole image is shifted instead, by up to an eighth of its sides, 4 pixels of 32
    (He et al., "Deep Residual Learning for Image Recognition", 2016, 4.2).
    """

    seed: int
    scale: tuple[float, float] = (0.25, 1.0)
    shifts: bool = False

    def __post_init__(self) -> None:
        at_least(0, seed=self.seed)
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(
                f"scale must be two shares with 0 < least <= greatest <= 1, received {self.scale}"
            )


def read_crop(
    path: Path,
    size: int,
    augmentation: Optional[Augmentation],
    *,
    epoch: int,
    index: int,
    whole: bool = False,
) -> NDArray[np.uint8]:
    """Decode an image and return a square of ``size`` pixels, as an array (size, size, 3), uint8.

    The square depends on ``augmentation.seed``, ``epoch`` and ``index``. Without an augmentation
    it is the central one, as if the shorter side had been resized to ``size * 256 / 224``, or with
    ``whole`` the whole image.

    Raises
    ------
    DataError
        If the file cannot be decoded.
    """
    with open_image(path, size) as image:
        if augmentation is None and whole:
            return np.asarray(resized(image, (0, 0, *image.size), size))
        if augmentation is None:
            return centre_crop(image, size)
        rng = generator(Purpose.CROPS, augmentation.seed, epoch, index)
        if augmentation.shifts:
            crop = resized(_shifted(image, rng), (0, 0, *image.size), size)
        else:
            crop = resized(image, _random_box(*image.size, augmentation.scale, rng), size)
        if rng.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(crop)


def _shifted(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Return an image shifted by whole pixels; what comes in is of the mean colour."""
    farthest = [round(_FARTHEST * side) for side in image.size]
    by_x, by_y = (int(rng.integers(-one, one, endpoint=True)) for one in farthest)
    shifted = Image.new("RGB", image.size, _MEAN_COLOUR)
    shifted.paste(to_rgb(image), (by_x, by_y))
    return shifted


def _random_box(
    width: int, height: int, scale: tuple[float, float], rng: np.random.Generator
) -> Box:
    """Return a box of a random area and ratio, chosen as torchvision and MXNet do."""
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        ratio = math.exp(rng.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        box_width, box_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if 1 <= box_width <= width and 1 <= box_height <= height:
            left = rng.uniform(0, width - box_width)
            top = rng.uniform(0, height - box_height)
            return left, top, left + box_width, top + box_height
    # The image is too narrow: the largest central box whose ratio is allowed.
    box_width = min(width, height * _RATIO[1])
    box_height = min(height, width / _RATIO[0])
    left, top = (width - box_width) / 2, (height - box_height) / 2
    return left, top, left + box_width, top + box_height
