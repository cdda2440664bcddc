"""The photographs of the experiments: Caltech 101, and caltech101-mini.

caltech101-mini is the first 60 photographs of ten categories of Caltech 101.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Union

from mpgluon.errors import DataError

from recipes.data import CALTECH101, ImageFolder, caltech101, find_tree
from study.experiments.experiment import Place

__all__ = [
    "CATEGORIES",
    "IMAGES_PER_CATEGORY",
    "count_categories",
    "link_categories",
    "mini_tree",
    "whole_tree",
]

CATEGORIES = (
    "Leopards", "Motorbikes", "airplanes", "bonsai", "butterfly", "chandelier", "grand_piano",
    "ketch", "sunflower", "watch",
)  # fmt: skip
IMAGES_PER_CATEGORY = 60


def count_categories(data_dir: Union[str, Path]) -> int:
    """Return how many categories of photographs a folder has; 0 if there are none."""
    try:
        return len(caltech101.list_images(find_tree(data_dir)).classes)
    except DataError:
        return 0


def mini_tree(place: Place) -> Path:
    """Return a folder with exactly the photographs of caltech101-mini.

    Where ``place.data_dir`` has all of Caltech 101, the folder is in ``place.work_dir`` and has
    links, or copies where the system has no links.

    Raises
    ------
    DataError
        If a category is missing or has too few images; the message names it.
    """
    tree = find_tree(place.data_dir)
    folder = caltech101.list_images(tree)
    by_category = _paths(folder, CATEGORIES)
    short = [n for n, paths in by_category.items() if len(paths) < IMAGES_PER_CATEGORY]
    if short:
        raise DataError(
            f"{tree} has fewer than {IMAGES_PER_CATEGORY} images of {', '.join(short)}; give the "
            "folder of Caltech 101 or of caltech101-mini"
        )
    if len(folder) == len(CATEGORIES) * IMAGES_PER_CATEGORY:
        return tree
    first = {name: paths[:IMAGES_PER_CATEGORY] for name, paths in by_category.items()}
    return _link_tree(first, place.work_dir / "caltech101-mini")


def whole_tree(place: Place) -> Path:
    """Return the folder of all of Caltech 101 in ``place.data_dir``.

    Raises
    ------
    DataError
        If categories or images are missing, or there are others.
    """
    tree = find_tree(place.data_dir)
    folder, expected = caltech101.list_images(tree), CALTECH101.contents
    found = (len(folder.classes), len(folder))
    if found != (expected.categories, expected.category_images):
        raise DataError(
            f"{tree} has {found[1]:,} images in {found[0]} categories, and Caltech 101 has "
            f"{expected.category_images:,} in {expected.categories}; get it with `python "
            "scripts/download_caltech.py`"
        )
    return tree


def link_categories(tree: Path, categories: Sequence[str], folder: Path) -> Path:
    """Return a tree in ``folder`` with some of a tree's categories, as links or copies."""
    return _link_tree(_paths(caltech101.list_images(tree), categories), folder)


def _paths(folder: ImageFolder, categories: Sequence[str]) -> dict[str, list[Path]]:
    """Return the images of some categories, in the folder's order."""
    return {n: [path for path in folder.paths if path.parent.name == n] for n in categories}


def _link_tree(by_category: Mapping[str, Sequence[Path]], folder: Path) -> Path:
    tree = folder / caltech101.TREE_NAME
    for name, paths in by_category.items():
        (tree / name).mkdir(parents=True, exist_ok=True)
        for path in paths:
            with suppress(FileExistsError):  # from an interrupted run
                _link(path.resolve(), tree / name / path.name)
    return tree


def _link(source: Path, target: Path) -> None:
    try:
        os.symlink(source, target)
    except FileExistsError:
        raise
    except OSError:  # no permission, or a file system without links
        shutil.copyfile(source, target)
