"""A few small images as text in a record, and back."""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = ["pack", "unpack"]

_QUALITY = 80  # of JPEG: eight images of 32 pixels in 8 kB


def pack(images: NDArray[np.uint8]) -> str:
    """Return images, shape (N, height, width, 3), side by side: a JPEG file in base64."""
    file = io.BytesIO()
    Image.fromarray(np.concatenate(list(images), axis=1)).save(file, "JPEG", quality=_QUALITY)
    return base64.b64encode(file.getvalue()).decode("ascii")


def unpack(text: str) -> NDArray[np.uint8]:
    """Return the pixels of a packed strip, shape (height, N * width, 3)."""
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return np.asarray(image)
