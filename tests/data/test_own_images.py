"""Folders of a user's own photographs: the classes and images found, and errors."""

from __future__ import annotations

from mpgluon.errors import DataError

import pytest
from PIL import Image

from recipes.data.own_images import TEST_FOLDERS, list_own_images, summary


def draw(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)
    return path


def test_images_are_found_in_any_letter_case_format_and_depth(tmp_path):
    wanted = [
        draw(tmp_path / "Old cats" / "1.JPEG"),
        draw(tmp_path / "Old cats" / "2019" / "holiday" / "b.webp"),
        draw(tmp_path / "Old cats" / "z.Png"),
        draw(tmp_path / "été" / "3.jpg"),
    ]
    for stray in (tmp_path / "été" / "notes.txt", tmp_path / "4.jpg"):
        stray.write_bytes(b"")
    draw(tmp_path / "été" / ".thumbnails" / "3.jpg")
    folder, is_test = list_own_images(tmp_path)
    assert folder.classes == ("Old cats", "été")
    assert list(folder.paths) == wanted
    assert folder.labels.tolist() == [0, 0, 0, 1]
    assert is_test is None
    assert summary(folder) == (
        f"2 categories, 4 images in {tmp_path}; the smallest category is été (1)"
    )


@pytest.mark.parametrize(
    ("name", "place", "data_dir"),
    [*((name, "train", "") for name in TEST_FOLDERS), ("mine_test", "mine", "mine")],
)
def test_a_folder_for_testing_says_which_images_are_tested(tmp_path, name, place, data_dir):
    for kind, count in ((place, 3), (name, 2)):
        for category in ("a", "b"):
            for number in range(count):
                draw(tmp_path / kind / category / f"{number}.png")
    folder, is_test = list_own_images(tmp_path / data_dir)
    assert folder.classes == ("a", "b")
    assert is_test.tolist() == [False] * 6 + [True] * 4
    assert folder.labels.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert {path.parts[-3] for path in folder.paths[6:]} == {name}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no images: expected one folder per class"),
        (["1.jpg", "2.jpg"], "has no images: expected one folder per class"),
        (["cats/1.jpg", "cats/2.jpg"], r"in one folder only \(cats\), and a classifier needs two"),
        (["train/a/1.jpg", "train/b/1.jpg"], r"in one folder only \(train\)"),
        (["train/a/1.jpg", "test/a/1.jpg"], r"train has images in one folder only \(a\)"),
        (["train/a/1.jpg", "train/b/1.jpg", "test/a/1.jpg"],
            "train has a category without an image in .*test: b"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/b/1.jpg", "val/c/1.jpg"],
            "val has a category without an image in .*train: c"),
        (["mine/a/1.jpg", "mine/b/1.jpg", "mine_test/a/1.jpg"], "give .*/mine to train on it"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_refused(tmp_path, files, message):
    for file in files:
        draw(tmp_path / file)
    with pytest.raises(DataError, match=message):
        list_own_images(tmp_path)
