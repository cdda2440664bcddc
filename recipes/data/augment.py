"""Turn an image file into a square crop: random for training, the centre for testing.

The same (seed, epoch, image) give the same crop. No batches are made here, and MXNet is not needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from mpgluon.tools.onnx.metadata import IMAGENET_MEAN, IMAGENET_STD

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recipes.data.draws import Purpose, generator
from recipes.data.images import open_image, to_rgb
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
# The usual protocol: the shorter side is resized to 256, then the central 224 x 224 are taken.
_CENTRE_SHARE = 224 / 256
# A first, cheap reduction leaves an image at least this many times larger; Pillow's default.
_REDUCING_GAP = 2.0

Box = tuple[float, float, float, float]


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
        crop = _resized(image, _random_box(*image.size, augmentation.scale, rng), size)
        if rng.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(crop)


def centre_crop(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """Return the central square of an image as an array (size, size, 3), uint8.

    The image may have any mode. If its pixels are not decoded yet, a large JPEG is decoded at a
    reduced size.
    """
    return np.asarray(_resized(image, _centre_box(*image.size), size))


def normalized_levels() -> NDArray[np.float32]:
    """Return the normalized value of each channel's 256 levels, shape (3, 256).

    A look-up in this table rounds exactly as normalizing each pixel does, and is faster.
    """
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    mean = np.array(IMAGENET_MEAN, dtype=np.float32)[:, None]
    std = np.array(IMAGENET_STD, dtype=np.float32)[:, None]
    normalized: NDArray[np.float32] = (levels - mean) / std
    return normalized


def _centre_box(width: int, height: int) -> Box:
    side = min(width, height) * _CENTRE_SHARE
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


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


def _resized(image: Image.Image, box: Box, size: int) -> Image.Image:
    """Return ``box`` of ``image`` as a square of ``size`` pixels in RGB."""
    full_width, full_height = image.size
    # A large JPEG is decoded at 1/2, 1/4 or 1/8 where that leaves the crop large enough.
    spare = min(box[2] - box[0], box[3] - box[1]) / (size * _REDUCING_GAP)
    if spare >= 2:
        image.draft(None, (int(full_width / spare), int(full_height / spare)))
    if image.mode != "L":  # grayscale is cheaper to convert after the reduction
        image = to_rgb(image)
    across, down = image.width / full_width, image.height / full_height
    box = (
        box[0] * across,
        box[1] * down,
        min(box[2] * across, image.width),
        min(box[3] * down, image.height),
    )
    resized = image.resize(
        (size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=_REDUCING_GAP
    )
    return to_rgb(resized)
