"""Folders of a user's own photographs: the classes and images found, and errors."""

from __future__ import annotations

import io
import os
from pathlib import Path

from mpgluon.errors import DataError

import pytest
from helpers import run_python
from PIL import Image

from recipes.data.own_images import TEST_FOLDERS, list_own_images, summary

ROOT = Path(__file__).resolve().parents[2]


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
        f"2 categories, 4 images in {tmp_path}; the smallest category is été (1); left out: "
        "1 .txt, 1 image in no category's folder"
    )


def test_what_is_left_out_is_counted_by_kind_the_most_first(tmp_path, monkeypatch):
    monkeypatch.delitem(Image.EXTENSION, ".heic", raising=False)  # as without pillow-heif
    for number in range(3):
        draw(tmp_path / "a" / f"{number}.jpg")
        draw(tmp_path / "b" / "deeper" / f"{number}.jpg")
        (tmp_path / "a" / f"{number}.HEIC").write_bytes(b"")
        (tmp_path / "b" / "deeper" / f"{number}.heic").write_bytes(b"")
    for name in ("b/x.gif", "a/y.gif", "a/README", "a/.DS_Store", ".trash/1.heic", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for name in ("c", "d/empty"):
        (tmp_path / name).mkdir(parents=True)
    folder, _ = list_own_images(tmp_path)
    assert len(folder) == 6
    assert summary(folder).endswith(
        "; left out: 6 .heic, 2 .gif, 2 folders without an image, 1 file without a suffix; "
        "pip install pillow-heif to read .heic"
    )


def test_of_a_folder_for_testing_too_it_is_said_what_is_left_out(tmp_path):
    for kind in ("train", "test"):
        for category in "ab":
            draw(tmp_path / kind / category / "1.jpg")
        (tmp_path / kind / "a" / "2.gif").write_bytes(b"")
    folder, _ = list_own_images(tmp_path)
    assert summary(folder).endswith("left out: 2 .gif")


def test_errors_say_what_is_left_out(tmp_path, monkeypatch):
    monkeypatch.delitem(Image.EXTENSION, ".heic", raising=False)  # as without pillow-heif
    for category in "ab":
        (tmp_path / category).mkdir()
        (tmp_path / category / "1.heic").write_bytes(b"")
    advice = "left out: 2 .heic, 2 folders without an image; pip install pillow-heif to read .heic"
    with pytest.raises(DataError, match=f"has no images: .*; {advice}"):
        list_own_images(tmp_path)
    draw(tmp_path / "a" / "1.jpg")
    with pytest.raises(DataError, match=r"in one folder only \(a\).*; left out: 2 .heic, 1 folder"):
        list_own_images(tmp_path)


# A decoder of HEIC in place of pillow-heif's: the files hold PNG behind their mark.
STAND_IN = """
import io
from PIL import Image, PngImagePlugin

def opened(file, name):
    file.seek(12)
    image = PngImagePlugin.PngImageFile(io.BytesIO(file.read()))
    image.format = "HEIF"
    return image

def register_heif_opener():
    Image.register_open("HEIF", opened, lambda start: start[4:12] == b"ftypheic")
    Image.register_extensions("HEIF", [".heic", ".heif"])
"""
LISTS_AND_READS = """
from pathlib import Path
from mpgluon_tools.serving.photographs import NotAPhotographError, read_photograph
from recipes.data.images import list_images, read_image

folder = list_images("tree")
assert [path.name for path in folder.paths] == ["1.HEIC", "2.heif"], folder.paths
assert not +folder.left_out, folder.left_out
assert read_image(folder.paths[1])[0, 0].tolist() == [200, 100, 50]
try:
    read_photograph(Path("tree/a/1.HEIC").read_bytes(), 8)
except NotAPhotographError as error:
    print(error)
"""


@pytest.mark.multiprocess
def test_heic_is_read_where_its_decoder_is_installed_and_never_uploaded(tmp_path):
    (tmp_path / "pillow_heif.py").write_text(STAND_IN)
    png = io.BytesIO()
    Image.new("RGB", (8, 6), (200, 100, 50)).save(png, "PNG")
    for name in ("1.HEIC", "2.heif"):
        (tmp_path / "tree" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / "a" / name).write_bytes(b"\0\0\0\x0cftypheic" + png.getvalue())
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run_python(LISTS_AND_READS, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "cannot read this image: formats are JPEG, PNG, WEBP\n"


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
