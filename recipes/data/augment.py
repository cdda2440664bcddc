"""Turn an image file into a square crop: random for training, the centre for testing.

The same (seed, epoch, image) give the same crop. No batches are made here, and MXNet is not needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mpgluon.tools.onnx.metadata import IMAGENET_MEAN, IMAGENET_STD
from mpgluon.tools.serving.photographs import Box, centre_crop, normalized_levels, resized

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


@dataclass(frozen=True)
class Augmentation:
    """The random part of training crops.

    ``scale`` holds the least and the greatest share of the image's area that a crop covers.
    """

    seed: int
    scale: tuple[float, float] = (0.25, 1.0)

    def __post_init__(self) -> None:
        at_least(0, seed=self.seed)
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(
                f"scale must be two shares with 0 < least <= greatest <= 1, received {self.scale}"
            )


def read_crop(
    path: Path, size: int, augmentation: Optional[Augmentation], *, epoch: int, index: int
) -> NDArray[np.uint8]:
    """Decode an image and return a square of ``size`` pixels, as an array (size, size, 3), uint8.

    The square depends on ``augmentation.seed``, ``epoch`` and ``index``. Without an augmentation
    it is the central one, as if the shorter side had been resized to ``size * 256 / 224``.

    Raises
    ------
    DataError
        If the file cannot be decoded.
    """
    with open_image(path) as image:
        if augmentation is None:
            return centre_crop(image, size)
        rng = generator(Purpose.CROPS, augmentation.seed, epoch, index)
        crop = resized(image, _random_box(*image.size, augmentation.scale, rng), size)
        if rng.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(crop)


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
