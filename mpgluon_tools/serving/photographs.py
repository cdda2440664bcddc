"""A photograph as bytes to the square of pixels that a classifier takes; MXNet is not needed.

The bytes may be untrusted: the size of the image is checked before it is decoded.
"""

from __future__ import annotations

import io
import math
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Optional, Union

from mpgluon.errors import DataError
from mpgluon_tools.extras import extra
from mpgluon_tools.onnx.metadata import IMAGENET_MEAN, IMAGENET_STD, ServingMetadata

import numpy as np
import numpy.typing as npt

with extra("serve"):
    from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

if find_spec("pillow_heif") is not None:  # photographs of telephones; uploads stay _FORMATS
    import pillow_heif

    pillow_heif.register_heif_opener()

__all__ = [
    "MAX_IMAGE_PIXELS",
    "Box",
    "NotAPhotographError",
    "centre_crop",
    "normalized_levels",
    "opened",
    "read_photograph",
    "resized",
    "to_rgb",
]

# A small file can decode to at most 96 MB: this limit times three bytes.
MAX_IMAGE_PIXELS = 32_000_000
_EIGHT_BIT_MODES = frozenset(
    ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV", "LAB")
)
# Few formats, since untrusted bytes reach each decoder; one of Pillow's others (EPS) starts a
# program.
_FORMATS = ("JPEG", "PNG", "WEBP")
_REDUCIBLE = ("JPEG", "MPO")  # can be decoded at a reduced size, if they are not yet
# The usual protocol: the shorter side is resized to 256, then the central 224 x 224 are taken.
_CENTRE_SHARE = ServingMetadata.centre_crop
# A first, cheap reduction leaves an image at least this many times larger; Pillow's default.
_REDUCING_GAP = 2.0

Box = tuple[float, float, float, float]


class NotAPhotographError(DataError):
    """Bytes are not an image in one of the known formats."""


def read_photograph(
    data: bytes, size: int, share: float = _CENTRE_SHARE, *, any_format: bool = False
) -> npt.NDArray[np.uint8]:
    """Return the central square of a JPEG, PNG or WebP file, rotated by its EXIF orientation.

    Not thread-safe, since it temporarily silences warnings.

    Parameters
    ----------
    data : bytes
        The whole file.
    size : int
        The square's side in pixels.
    share : float
        The square's side as a share of the photograph's shorter side, in (0, 1].
    any_format : bool
        Whether the file may have any format that Pillow reads: of one that is trusted.

    Returns
    -------
    ndarray, shape (size, size, 3), uint8
        As an evaluation takes it.

    Raises
    ------
    NotAPhotographError
        If the bytes are not such a file.
    DataError
        If the file is damaged or truncated, or its header names more than ``MAX_IMAGE_PIXELS``
        (32 million) pixels; then nothing is decoded.
    """
    try:
        # opened() leaves enough pixels for squares of at least 0.43 of the shorter side.
        least = math.ceil(size / min(1, 2 * share))
        formats = None if any_format else _FORMATS
        with opened(io.BytesIO(data), formats, size=least) as image:
            return centre_crop(image, size, share)
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        known = "" if any_format else f": formats are {', '.join(_FORMATS)}"
        raise NotAPhotographError(f"cannot read this image{known}") from error
    except Image.DecompressionBombError as error:
        raise DataError(
            f"the image has more than {MAX_IMAGE_PIXELS // 10**6} million pixels; give a smaller "
            "copy of it"
        ) from error
    # From a damaged file Pillow's decoders raise nearly anything: OSError, SyntaxError, ValueError,
    # struct.error, IndexError, ...
    except Exception as error:
        raise DataError(f"the image is damaged or cut short: {error}") from error


@contextmanager
def opened(
    source: Union[str, Path, IO[bytes]],
    formats: Optional[tuple[str, ...]] = None,
    *,
    size: Optional[int] = None,
) -> Iterator[Image.Image]:
    """Open an image for the block, rotated by its EXIF orientation; all photographs are read so.

    The pixels of a JPEG that is stored upright are not decoded until the block needs them. One that
    is rotated may be decoded at a reduced size, if ``size`` says how large a crop will be. Errors
    are Pillow's, among them a ``DecompressionBombError`` above ``MAX_IMAGE_PIXELS``. Not
    thread-safe.
    """
    with warnings.catch_warnings():
        # Warnings tell of many pixels, which are refused here, and of damaged tags.
        warnings.simplefilter("ignore")
        with Image.open(source, formats=formats) as image:
            pixels = image.width * image.height
            if pixels > MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError(
                    f"{pixels:,} pixels, over the limit of {MAX_IMAGE_PIXELS:,}"
                )
            ImageFile.LOAD_TRUNCATED_IMAGES = False  # importing gluoncv sets it
            _turn_upright(image, size)
            yield image


def _turn_upright(image: Image.Image, size: Optional[int]) -> None:
    if image.format not in _REDUCIBLE:
        image.load()  # the orientation may come after the pixels
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except (SyntaxError, ValueError, struct.error):  # damaged tags say nothing of the pixels
        return
    if orientation != 1:
        if size is not None:  # a random crop is at least 0.43 of the shorter side: sqrt(3 / 16)
            least = math.ceil(_REDUCING_GAP * size / 0.43)
            image.draft(None, (least, least))
        image.load()
        image.info.clear()  # else Pillow writes the other tags again, and fails at unusual ones
        ImageOps.exif_transpose(image, in_place=True)


def centre_crop(
    image: Image.Image, size: int, share: float = _CENTRE_SHARE
) -> npt.NDArray[np.uint8]:
    """Return the central square of an image as an array (size, size, 3), uint8.

    The image may have any mode. If its pixels are not decoded yet, a large JPEG is decoded at a
    reduced size.
    """
    return np.asarray(resized(image, _centre_box(*image.size, share), size))


def normalized_levels(
    mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD
) -> npt.NDArray[np.float32]:
    """Return the normalized value of each channel's 256 levels, shape (3, 256).

    A look-up in this table rounds exactly as normalizing each pixel does, and is faster.
    """
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    means, stds = (np.array(three, dtype=np.float32)[:, None] for three in (mean, std))
    normalized: npt.NDArray[np.float32] = (levels - means) / stds
    return normalized


def _centre_box(width: int, height: int, share: float) -> Box:
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def resized(image: Image.Image, box: Box, size: int) -> Image.Image:
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
    square = image.resize(
        (size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=_REDUCING_GAP
    )
    return to_rgb(square)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return ``image`` decoded and in mode RGB.

    Of 16 bits of a greyscale PNG the upper eight are kept, as Pillow does with 16-bit colours.

    Raises
    ------
    ValueError
        If the image has another mode without levels from 0 to 255.
    """
    if image.mode == "RGB":
        image.load()
        return image
    if image.mode.startswith("I") and image.format == "PNG":  # "I" in older versions of Pillow
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode not in _EIGHT_BIT_MODES:  # Pillow would cut off levels above 255
        raise ValueError(
            f"its mode is {image.mode}, and only images of 8 bits per channel and greyscale PNG "
            "files of 16 bits can be converted; save it with 8 bits per channel"
        )
    if image.mode == "P":
        # Pillow warns when it drops the transparency of a palette, but not of RGBA.
        image = image.convert("RGBA")
    return image.convert("RGB")
