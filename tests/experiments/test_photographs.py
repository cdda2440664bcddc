"""caltech101-mini, found as it is or linked out of all of Caltech 101."""

from __future__ import annotations

import os
import shutil

from mpgluon.errors import DataError

import pytest

from experiments import photographs
from experiments.experiment import Place
from experiments.photographs import CATEGORIES, count_categories, mini_tree
from recipes.data import caltech101, list_images, render_shapes


@pytest.fixture
def full(tmp_path, monkeypatch):
    """Return a folder with a small Caltech 101: the ten categories, two others and clutter."""
    monkeypatch.setattr(photographs, "IMAGES_PER_CATEGORY", 2)
    tree = render_shapes(tmp_path, classes=10, images_per_class=3)
    data = tmp_path / "data" / caltech101.TREE_NAME
    data.parent.mkdir()
    tree.rename(data)
    for folder, name in zip(sorted(path for path in data.iterdir() if path.is_dir()), CATEGORIES):
        folder.rename(data / name)
    for name in ("accordion", "yin_yang", caltech101.BACKGROUND):
        shutil.copytree(data / "watch", data / name)
    return data.parent


def names_and_bytes(tree):
    folder = caltech101.list_images(tree)
    return [(path.parent.name, path.name, path.read_bytes()) for path in folder.paths]


def expected(full):
    everything = names_and_bytes(full / caltech101.TREE_NAME)
    return [one for one in everything if one[0] in CATEGORIES and one[1] != "image_0003.jpg"]


def test_the_first_images_of_the_ten_categories_are_linked_out_of_the_full_tree(full, tmp_path):
    assert count_categories(full) == 12
    place = Place(full, tmp_path / "work")
    tree = mini_tree(place)
    assert names_and_bytes(tree) == expected(full)
    assert len(expected(full)) == 20
    assert all(path.is_symlink() for path in list_images(tree).paths)
    assert mini_tree(place) == tree  # again
    next(iter(list_images(tree).paths)).unlink()  # a run that was interrupted meanwhile
    assert names_and_bytes(mini_tree(place)) == expected(full)
    assert mini_tree(Place(tree.parent, tmp_path / "other")) == tree  # which is the mini tree


def test_copies_do_where_there_are_no_links(full, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    tree = mini_tree(Place(full, tmp_path / "work"))
    assert names_and_bytes(tree) == expected(full)
    assert not any(path.is_symlink() for path in list_images(tree).paths)


def test_a_category_with_too_few_images_is_named(full, tmp_path):
    (full / caltech101.TREE_NAME / "bonsai" / "image_0001.jpg").unlink()
    (full / caltech101.TREE_NAME / "bonsai" / "image_0002.jpg").unlink()
    with pytest.raises(DataError, match=r"fewer than 2 images of bonsai; give the folder"):
        mini_tree(Place(full, tmp_path / "work"))


def test_where_no_photographs_are_there_are_no_categories(tmp_path):
    assert count_categories(tmp_path) == 0
    with pytest.raises(DataError, match="Caltech 101 is not in"):
        mini_tree(Place(tmp_path, tmp_path / "work"))


def test_the_real_mini_tree_is_used_as_it_is(caltech101_mini, tmp_path):
    assert count_categories(caltech101_mini) == 10
    place = Place(caltech101_mini, tmp_path / "work")
    assert mini_tree(place) == caltech101_mini / caltech101.TREE_NAME
    assert not place.work_dir.exists()
