"""The Caltech 101 photographs: download the official archive, find its tree, list its images.

A missing tree is an error; no other images are used in its place.

References
----------
Li, Andreeto, Ranzato, Perona, "Caltech 101 (1.0)", CaltechDATA, 2022,
https://doi.org/10.22002/D1.20086
"""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from mpgluon.base.files import disk_error, exclusive
from mpgluon.errors import DataError

from recipes.data import images
from recipes.data.download import download
from recipes.data.images import ImageFolder, is_image_name
from recipes.data.shapes import STAMP_NAME
from recipes.data.unpack import unpack_folder

__all__ = [
    "CALTECH101",
    "TREE_NAME",
    "Archive",
    "ArchiveFile",
    "Contents",
    "download_caltech101",
    "find_tree",
    "list_images",
]

_logger = logging.getLogger(__name__)

TREE_NAME = "101_ObjectCategories"
BACKGROUND = "BACKGROUND_Google"
# The tree itself is about as large as its archive: photographs do not compress.
_MAX_UNPACKED_BYTES = 2**30
_MAX_UNPACKED_MEMBERS = 20_000


@dataclass(frozen=True)
class ArchiveFile:
    """A published file: name, length in bytes, and hashes in hexadecimal."""

    name: str
    size: int
    md5: str
    sha256: str


@dataclass(frozen=True)
class Contents:
    """Numbers of folders, categories and ``.jpg`` files in the full tree; sides in pixels."""

    folders: int
    categories: int
    images: int
    category_images: int
    grayscale_images: int
    smallest_category: int
    largest_category: int
    shortest_side: int
    longest_side: int


@dataclass(frozen=True)
class Archive:
    """A data set published as a zip file at ``url`` that contains a tar.gz of the tree.

    Attributes
    ----------
    outer, inner : ArchiveFile
        The zip file, and the tar.gz under its full name in the zip file.
    """

    url: str
    outer: ArchiveFile
    inner: ArchiveFile
    contents: Contents
    licence: str = "CC BY 4.0"
    doi: str = "10.22002/D1.20086"


CALTECH101 = Archive(
    url="https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip",
    outer=ArchiveFile(
        name="caltech-101.zip",
        size=137_414_764,
        md5="3138e1922a9193bfa496528edbbc45d0",
        sha256="331234750fc7f77520e50d9565e8b6907b03565e30320da1401130db08c61f91",
    ),
    inner=ArchiveFile(
        name="caltech-101/101_ObjectCategories.tar.gz",
        size=131_740_031,
        md5="b224c7392d521a49829488ab0f1120d9",
        sha256="af6ece2f339791ca20f855943d8b55dd60892c0a25105fcd631ee3d6430f9926",
    ),
    contents=Contents(
        folders=102,
        categories=101,
        images=9_144,
        category_images=8_677,
        grayscale_images=411,
        smallest_category=31,
        largest_category=800,
        shortest_side=80,
        longest_side=3_999,
    ),
)


def download_caltech101(
    data_dir: Union[str, Path],
    *,
    archive: Archive = CALTECH101,
    progress: bool = False,
    keep_archives: bool = False,
) -> Path:
    """Download, verify and unpack the data set, unless it is there already.

    The tree is renamed when it is complete, so a folder of that name is not unpacked again. The
    next call repeats the unfinished part of a killed one; simultaneous calls take turns. Needs
    about 290 MB of disk while it runs and 150 MB afterwards.

    Parameters
    ----------
    data_dir : str or Path
        The folder for the tree; made if missing.
    archive : Archive, optional
        Default: the official archive.
    progress : bool, optional
        Whether to show progress bars on the standard error stream.
    keep_archives : bool, optional
        Whether to keep the zip file.

    Returns
    -------
    Path
        ``data_dir/101_ObjectCategories``.

    Raises
    ------
    DataError
        If the archive cannot be downloaded, is not the expected one, would write outside
        ``data_dir``, or does not fit on the disk.
    """
    data_dir = Path(data_dir)
    tree = data_dir / TREE_NAME
    if _is_filled(tree):
        return tree
    try:
        with exclusive(data_dir / ".caltech101.lock"):
            # The process that held the lock before may have finished the tree.
            if not _is_filled(tree):
                _fetch_and_unpack(archive, tree, progress=progress, keep_archives=keep_archives)
    except OSError as error:
        raise disk_error(error, data_dir, "run the same command again") from error
    _logger.info("Caltech 101 is complete in %s", tree)
    return tree


def _fetch_and_unpack(archive: Archive, tree: Path, *, progress: bool, keep_archives: bool) -> None:
    outer = archive.outer
    zipped = tree.with_name(outer.name)
    download(archive.url, zipped, size=outer.size, sha256=outer.sha256, progress=progress)
    unpack_folder(
        zipped,
        archive.inner.name,
        tree,
        folder=TREE_NAME,
        max_bytes=_MAX_UNPACKED_BYTES,
        max_members=_MAX_UNPACKED_MEMBERS,
        progress=progress,
    )
    if not keep_archives:
        zipped.unlink(missing_ok=True)


def find_tree(data_dir: Union[str, Path]) -> Path:
    """Return the tree of categories in ``data_dir``.

    It is ``data_dir`` itself, or in it ``101_ObjectCategories`` or
    ``caltech-101/101_ObjectCategories``.

    Raises
    ------
    DataError
        If there is none, or the folder holds rendered shapes; the message says how to get one.
    """
    data_dir = Path(data_dir)
    for tree in (data_dir / TREE_NAME, data_dir / "caltech-101" / TREE_NAME):
        if _is_filled(tree):
            return tree
    if (data_dir / STAMP_NAME).exists():
        raise DataError(
            f"{data_dir} holds rendered shapes, not Caltech 101: use --dataset shapes, or "
            "another --data-dir"
        )
    if _has_class_folders(data_dir):
        return data_dir
    raise DataError(
        f"Caltech 101 is not in {data_dir}: get it with `python scripts/download_caltech.py "
        f"--data-dir {shlex.quote(str(data_dir))}`, or train on rendered images with "
        "--dataset shapes"
    )


def list_images(tree: Union[str, Path]) -> ImageFolder:
    """List the images of the categories in ``tree``, without the clutter in ``BACKGROUND_Google``.

    See `recipes.data.images.list_images`.
    """
    return images.list_images(tree, exclude=(BACKGROUND,))


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _has_class_folders(folder: Path) -> bool:
    """Return whether an image lies directly in a folder in ``folder``."""
    if not folder.is_dir():
        return False
    children = [entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."]
    return any(is_image_name(path.name) for child in children for path in child.iterdir())
