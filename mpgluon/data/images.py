"""Find the images of a folder-per-class tree, and decode one of them.

It downloads nothing, splits nothing and changes no pixel: crops and normalization are in
`mpgluon.data.loaders`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Union

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from mpgluon.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
# Two images of 4,000 x 4,000: what a small file can unfold to in memory stays below 100 MB.
MAX_IMAGE_PIXELS = 32_000_000


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """The images of a tree with one folder per class.

    Attributes
    ----------
    root : Path
        The tree's folder.
    classes : tuple of str
        The class names, sorted by code point, so the same under every locale.
    paths : tuple of Path
        The images, by class and then by file name.
    labels : ndarray, shape (len(paths),), int32
        The position in ``classes`` of each image's class.
    """

    root: Path
    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)


def list_images(tree: Union[str, Path], *, exclude: Collection[str] = ()) -> ImageFolder:
    """List the images in the class folders of ``tree``, in an order that depends on names only.

    An image is a file directly in a class folder that ends in ``.jpg``, ``.jpeg`` or ``.png`` in
    any case. All else is ignored: hidden files and folders, files without such an ending, files
    beside the class folders, and folders without an image. No file is opened.

    Parameters
    ----------
    tree : str or Path
        The folder that holds one folder per class.
    exclude : collection of str, optional
        Names of folders that are no class.

    Returns
    -------
    ImageFolder

    Raises
    ------
    DataError
        If ``tree`` is not a folder, cannot be read, or has no image in any class folder.
    """
    tree = Path(tree)
    classes: list[str] = []
    paths: list[Path] = []
    labels: list[int] = []
    try:
        folders = {entry.name: entry for entry in tree.iterdir() if entry.is_dir()}
        for name in sorted(folders):
            if name.startswith(".") or name in exclude:
                continue
            found = sorted(filter(is_image_name, (path.name for path in folders[name].iterdir())))
            files = [path for path in map(folders[name].joinpath, found) if path.is_file()]
            if files:
                labels += [len(classes)] * len(files)
                paths += files
                classes.append(name)
    except OSError as error:
        raise DataError(
            f"cannot read the images in {tree}: {error.strerror}; give a folder that holds one "
            "folder of images per class"
        ) from error
    if not paths:
        raise DataError(
            f"{tree} has no images: expected one folder per class with "
            f"{', '.join(IMAGE_SUFFIXES)} files in it"
        )
    return ImageFolder(tree, tuple(classes), tuple(paths), np.array(labels, dtype=np.int32))


def is_image_name(name: str) -> bool:
    """Return whether a file of this name counts as an image: by its ending, unless hidden."""
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


def read_image(path: Union[str, Path]) -> NDArray[np.uint8]:
    """Decode one image to RGB.

    Grayscale, palette and CMYK images are converted; transparency is dropped; an EXIF
    orientation is left alone, so the pixels are those stored.

    Parameters
    ----------
    path : str or Path
        A JPEG or PNG file (any format that Pillow reads will do).

    Returns
    -------
    ndarray, shape (height, width, 3), uint8

    Raises
    ------
    DataError
        If the file is missing, truncated, no image, or has more than ``MAX_IMAGE_PIXELS``
        (32 million) pixels; the message names the file.
    """
    with open_image(path) as image:
        return np.array(to_rgb(image))


@contextmanager
def open_image(path: Union[str, Path]) -> Iterator[Image.Image]:
    """Open an image for the block; what fails in opening or in the block names the file.

    Only the header is read at first: pixels are decoded when the block asks for them. Keep the
    block to Pillow's calls, because every exception in it is taken for a damaged file.

    Raises
    ------
    DataError
        As `read_image` does.
    """
    try:
        with warnings.catch_warnings():
            # Our own limit is lower and comes with a file name.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(path)
        with image:
            pixels = image.width * image.height
            ImageFile.LOAD_TRUNCATED_IMAGES = False  # importing gluoncv sets it
            if pixels > MAX_IMAGE_PIXELS:
                raise ValueError(f"{pixels:,} pixels, over the limit of {MAX_IMAGE_PIXELS:,}")
            yield image
    except MemoryError:
        raise
    # Pillow's decoders let nearly anything out of a damaged file: OSError, SyntaxError,
    # ValueError, struct.error, IndexError, ...
    except Exception as error:
        raise DataError(f"cannot read the image {path}: {error}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Return ``image`` decoded and in mode RGB."""
    if image.mode == "RGB":
        image.load()
        return image
    if image.mode == "P":
        # A palette may be transparent, which Pillow drops with a warning unless asked for it.
        image = image.convert("RGBA")
    return image.convert("RGB")
