"""A user's own photographs: one folder per category, or such folders for training and testing."""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Union

from mpgluon.errors import DataError

import numpy as np
from numpy.typing import NDArray

from recipes.data.images import ImageFolder, list_images

__all__ = ["TEST_FOLDERS", "list_own_images", "summary"]

TEST_FOLDERS = ("test", "val", "valid", "validation")


def list_own_images(data_dir: Union[str, Path]) -> tuple[ImageFolder, Optional[NDArray[np.bool_]]]:
    """List the images below one folder per category, at any depth.

    Parameters
    ----------
    data_dir : str or Path
        With a folder per category; or with a folder ``train`` of such folders and another one whose
        name is the first in ``TEST_FOLDERS`` that exists.

    Returns
    -------
    folder : ImageFolder
    is_test : ndarray of bool, shape (len(folder),), or None
        The images of the second folder; None without it.

    Raises
    ------
    DataError
        If there is no image, or one category only, or the two folders have not the same categories.
    """
    data_dir = Path(data_dir)
    names = [name for name in TEST_FOLDERS if (data_dir / name).is_dir()]
    if not (data_dir / "train").is_dir() or not names:
        folder = list_images(data_dir, nested=True)
        _refuse_one_category(folder)
        return folder, None
    train = list_images(data_dir / "train", nested=True)
    _refuse_one_category(train)
    test = list_images(data_dir / names[0], nested=True)
    for one, other in ((test, train), (train, test)):
        only = [name for name in one.classes if name not in other.classes]
        if only:
            raise DataError(
                f"{one.root} has {'a category' if len(only) == 1 else f'{len(only)} categories'} "
                f"without an image in {other.root}: {', '.join(only[:5])}; both folders need the "
                "same categories"
            )
    labels = np.concatenate([train.labels, test.labels])
    folder = ImageFolder(data_dir, train.classes, (*train.paths, *test.paths), labels)
    return folder, np.arange(len(folder)) >= len(train)


def _refuse_one_category(folder: ImageFolder) -> None:
    if len(folder.classes) < 2:
        raise DataError(
            f"{folder.root} has images in one folder only ({folder.classes[0]}), and a classifier "
            f"needs two categories: expected {folder.root}/CATEGORY/IMAGE, or train/ and "
            f"{'/ or '.join(TEST_FOLDERS)}/ with such folders in them"
        )


def summary(folder: ImageFolder) -> str:
    """Return in words how many categories and images a folder has."""
    counts = np.bincount(folder.labels, minlength=len(folder.classes))
    smallest = int(counts.argmin())
    return (
        f"{len(folder.classes)} categories, {len(folder)} images in {folder.root}; the smallest "
        f"category is {folder.classes[smallest]} ({counts[smallest]})"
    )
