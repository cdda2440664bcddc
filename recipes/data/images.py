"""List the images of a tree with one folder per class, and decode one image."""

from __future__ import annotations

import heapq
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional, Union

from mpgluon.errors import DataError
from mpgluon_tools.serving.photographs import opened, to_rgb
from mpgluon_tools.tables import counted

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
HEIF_SUFFIXES = (".heic", ".heif")  # which Pillow reads with pillow-heif


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """The images of a tree with one folder per class.

    Attributes
    ----------
    root : Path
        The tree's folder.
    classes : tuple of str
        The class names, sorted by code point, independently of the locale.
    paths : tuple of Path
        The images, by class and then by file name.
    labels : ndarray, shape (len(paths),), int32
        The position in ``classes`` of each image's class.
    left_out : Counter of str
        How many files of each other suffix the class folders have, and other things of the tree
        that are not used.
    """

    root: Path
    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: NDArray[np.int32]
    left_out: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)


def list_images(
    tree: Union[str, Path], *, exclude: Collection[str] = (), nested: bool = False
) -> ImageFolder:
    """List the images in the class folders of ``tree``, in an order that depends on names only.

    An image is a file in a class folder whose name ends in ``.jpg``, ``.jpeg``, ``.png`` or
    ``.webp`` in upper or lower case, or, where pillow-heif is installed, in ``.heic`` or ``.heif``.
    Other files, and folders without an image, are counted; hidden ones are ignored. Symbolic links
    are followed, and each real file is listed once: where it lies, or under the first name that
    links to it. No file is opened.

    Parameters
    ----------
    tree : str or Path
        The folder with one folder per class.
    exclude : collection of str, optional
        Names of folders that are not a class.
    nested : bool
        Include images in folders inside a class folder; otherwise only those directly in it.

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
    left_out: Counter[str] = Counter()
    try:
        entries = list(tree.iterdir())
        folders = [
            entry
            for entry in entries
            if entry.is_dir() and not entry.name.startswith(".") and entry.name not in exclude
        ]
        loose = [entry for entry in entries if is_image_name(entry.name) and entry.is_file()]
        left_out["image in no category's folder"] = len(loose)
        for name, files in sorted(_real_images(folders, left_out, nested=nested).items()):
            left_out["folder without an image"] += not files
            if files:
                labels += [len(classes)] * len(files)
                paths += sorted(files, key=lambda path: path.parts)
                classes.append(name)
    except OSError as error:
        raise DataError(
            f"cannot read the images in {tree}: {error.strerror}; choose a folder with one folder "
            "of images per class"
        ) from error
    if not paths:
        raise DataError(
            f"{tree} has no images: expected one folder per class with "
            f"{', '.join(_suffixes())} files in it{what_is_left_out(left_out, '; ')}"
        )
    labelled = np.array(labels, dtype=np.int32)
    return ImageFolder(tree, tuple(classes), tuple(paths), labelled, left_out)


def what_is_left_out(left_out: Counter[str], before: str = "") -> str:
    """Return in words what a listing left out, the most first, after ``before``; or nothing."""
    words = []
    for what, count in sorted(left_out.items(), key=lambda item: (-item[1], item[0])):
        noun, _, rest = what.partition(" ")
        if count:
            is_suffix = what.startswith(".")
            words.append(f"{count:,} {what}" if is_suffix else f"{counted(count, noun)} {rest}")
    advice = "; pip install pillow-heif to read .heic" * any(map(left_out.get, HEIF_SUFFIXES))
    return f"{before}left out: {', '.join(words)}{advice}" if words else ""


def _real_images(
    folders: Sequence[Path], left_out: Counter[str], *, nested: bool
) -> dict[str, list[Path]]:
    """Return the images in each folder by its name, every real file once; count other files.

    If several paths lead to a file, the one with the fewest links counts, and then the first by
    name: an image belongs to the class that it lies in.
    """
    images: dict[str, list[Path]] = {folder.name: [] for folder in folders}
    waiting = [(int(one.is_symlink()), one, os.path.realpath(one), one.name) for one in folders]
    heapq.heapify(waiting)
    seen: set[str] = set()
    repeated: list[Path] = []
    while waiting:
        links, path, real, name = heapq.heappop(waiting)
        if real in seen:
            repeated.append(path)
            continue
        seen.add(real)
        if path.is_file():  # a link to an image
            images[name].append(path)
            continue
        for child in path.iterdir():
            is_image = is_image_name(child.name) and child.is_file()
            if not is_image and (not nested or child.name.startswith(".") or not child.is_dir()):
                if not child.name.startswith(".") and child.is_file():
                    left_out[child.suffix.lower() or "file without a suffix"] += 1
                continue
            if child.is_symlink():
                heapq.heappush(waiting, (links + 1, child, os.path.realpath(child), name))
            elif not is_image:
                heapq.heappush(waiting, (links, child, f"{real}/{child.name}", name))
            elif f"{real}/{child.name}" in seen:
                repeated.append(child)
            else:
                seen.add(f"{real}/{child.name}")
                images[name].append(child)
    if repeated:
        _logger.warning(
            "images and folders that are listed already, and reached again through symbolic links, "
            "are left out: %d, the first is %s",
            len(repeated),
            repeated[0],
        )
    return images


def is_image_name(name: str) -> bool:
    """Return whether a file has the name of an image, and is not hidden."""
    return not name.startswith(".") and name.lower().endswith(_suffixes())


def _suffixes() -> tuple[str, ...]:
    readable = Image.registered_extensions()
    return IMAGE_SUFFIXES + tuple(suffix for suffix in HEIF_SUFFIXES if suffix in readable)


def read_image(path: Union[str, Path]) -> NDArray[np.uint8]:
    """Decode one image to RGB.

    Grayscale, palette, CMYK and 16-bit PNG images are converted; transparency is dropped; the
    image is rotated by its EXIF orientation.

    Parameters
    ----------
    path : str or Path
        A file in any format that Pillow reads, such as JPEG and PNG.

    Returns
    -------
    ndarray, shape (height, width, 3), uint8

    Raises
    ------
    DataError
        If the file is missing, truncated, not an image, has more than ``MAX_IMAGE_PIXELS``
        (32 million) pixels, or has levels of an unknown range, such as a floating-point TIFF file.
    """
    with open_image(path) as image:
        return np.array(to_rgb(image))


@contextmanager
def open_image(path: Union[str, Path], size: Optional[int] = None) -> Iterator[Image.Image]:
    """Open an image for the block, whose exceptions become a `DataError` that names the file.

    It is rotated by its EXIF orientation, see `mpgluon_tools.serving.photographs.opened`, also
    for ``size``. The block should contain calls of Pillow only.
    """
    try:
        with opened(path, size=size) as image:
            yield image
    except MemoryError:
        raise
    # On a damaged file, Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error,
    # IndexError and others.
    except Exception as error:
        raise DataError(f"cannot read the image {path}: {error}") from error
