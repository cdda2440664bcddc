"""Photographs in one folder per category, or in such folders for training and for testing."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Optional, Union

from mpgluon.errors import DataError

import numpy as np
from numpy.typing import NDArray

from recipes.data.images import ImageFolder, list_images, what_is_left_out

__all__ = ["TEST_FOLDERS", "list_own_images", "summary"]

_logger = logging.getLogger(__name__)

TEST_FOLDERS = ("test", "val", "valid", "validation")


def list_own_images(
    data_dir: Union[str, Path], *, exclude: Collection[str] = (), nested: bool = True
) -> tuple[ImageFolder, Optional[NDArray[np.bool_]]]:
    """List the images below one folder per category, and say which are for testing.

    Parameters
    ----------
    data_dir : str or Path
        With a folder per category, and perhaps a folder next to it of the same name and ``_test``;
        or with a folder ``train`` of such folders and another one whose name is the first in
        ``TEST_FOLDERS`` that exists.
    exclude, nested
        As for `recipes.data.images.list_images`.

    Returns
    -------
    folder : ImageFolder
    is_test : ndarray of bool, shape (len(folder),), or None
        The images of the second folder; None without it.

    Raises
    ------
    DataError
        If there is no image, or one category only, or the two folders differ in their categories,
        or two categories look like such folders.
    """
    train_dir, test_dir = _parts(Path(data_dir))
    train = list_images(train_dir, exclude=exclude, nested=nested)
    _refuse_one_category(train)
    if test_dir is None:
        _refuse_a_test_set_as_category(train)
        return train, None
    test = list_images(test_dir, exclude=exclude, nested=nested)
    for one, other in ((test, train), (train, test)):
        only = [name for name in one.classes if name not in other.classes]
        if only:
            raise DataError(
                f"{one.root} has {'a category' if len(only) == 1 else f'{len(only)} categories'} "
                f"without an image in {other.root}: {', '.join(only[:5])}; both folders need the "
                f"same categories (rename {test_dir} if it is not for testing)"
            )
    _logger.info(
        "%s has the images for testing (%d), and all %d images in %s are for training",
        test_dir,
        len(test),
        len(train),
        train_dir,
    )
    labels = np.concatenate([train.labels, test.labels])
    paths, left_out = (*train.paths, *test.paths), train.left_out + test.left_out
    folder = ImageFolder(test_dir.parent, train.classes, paths, labels, left_out)
    return folder, np.arange(len(folder)) >= len(train)


def _parts(data_dir: Path) -> tuple[Path, Optional[Path]]:
    """Return the folder for training, and the one for testing if there is one."""
    whole = Path(os.path.abspath(data_dir))  # which has a name, unlike "."
    pairs = [(data_dir / "train", data_dir / name) for name in TEST_FOLDERS]
    pairs.append((data_dir, whole.parent / f"{whole.name}_test"))
    there = [pair for pair in pairs if all(folder.is_dir() for folder in pair)]
    return there[0] if there else (data_dir, None)


def _refuse_one_category(folder: ImageFolder) -> None:
    if len(folder.classes) < 2:
        raise DataError(
            f"{folder.root} has images in one folder only ({folder.classes[0]}), and a classifier "
            f"needs two categories: expected {folder.root}/CATEGORY/IMAGE, or train/ and "
            f"{'/ or '.join(TEST_FOLDERS)}/ with such folders in them"
            f"{what_is_left_out(folder.left_out, '; ')}"
        )


def _refuse_a_test_set_as_category(folder: ImageFolder) -> None:
    for name in folder.classes:
        test = folder.root / f"{name}_test"
        if test.name in folder.classes and all(test != path.parent for path in folder.paths):
            raise DataError(
                f"{folder.root} has {name} and {test.name} with folders of images in them, which "
                f"looks like images for training and for testing: give {folder.root / name} to "
                f"train on it, or rename {test.name} if it is a category"
            )


def summary(folder: ImageFolder) -> str:
    """Return in words how many categories, images and unused files a folder has."""
    counts = np.bincount(folder.labels, minlength=len(folder.classes))
    smallest = int(counts.argmin())
    return (
        f"{len(folder.classes)} categories, {len(folder)} images in {folder.root}; the smallest "
        f"category is {folder.classes[smallest]} ({counts[smallest]})"
        f"{what_is_left_out(folder.left_out, '; ')}"
    )
