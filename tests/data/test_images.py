"""Listing a folder-per-class tree and decoding images of every kind."""

from __future__ import annotations

import locale
import os
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from mpgluon.data import images
from mpgluon.data.images import list_images, read_image
from mpgluon.errors import DataError


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def test_only_image_files_in_class_folders_count(tmp_path):
    wanted = [
        touch(tmp_path / "Zebra" / "a.PNG"),
        touch(tmp_path / "ant" / "b.JPEG"),
        touch(tmp_path / "ant" / "image_0001.jpg"),
        touch(tmp_path / "ant" / "image_0002.JPG"),
    ]
    for stray in (
        "stray.jpg",
        "ant/tmp",
        "ant/notes.txt",
        "ant/._image_0001.jpg",
        "ant/.hidden.jpg",
        "ant/image.jpg.part",
        "ant/deeper/image.jpg",
        ".hidden/image.jpg",
        "nothing/readme.txt",
        "BACKGROUND_Google/image_0001.jpg",
    ):
        touch(tmp_path / stray)
    (tmp_path / "ant" / "folder.jpg").mkdir()
    folder = list_images(tmp_path, exclude=("BACKGROUND_Google",))
    assert folder.root == tmp_path
    assert folder.classes == ("Zebra", "ant")
    assert list(folder.paths) == wanted
    assert folder.labels.tolist() == [0, 1, 1, 1]
    assert folder.labels.dtype == np.int32
    assert len(folder) == 4


def test_the_order_does_not_follow_the_locale(tmp_path):
    for name in ("éclair", "Zebra", "ant", "Ant", "_x"):
        touch(tmp_path / name / "1.jpg")
    before = locale.setlocale(locale.LC_COLLATE)
    try:
        for name in ("C", "C.UTF-8"):
            locale.setlocale(locale.LC_COLLATE, name)
            assert list_images(tmp_path).classes == ("Ant", "Zebra", "_x", "ant", "éclair")
    finally:
        locale.setlocale(locale.LC_COLLATE, before)


def test_a_tree_that_is_missing_or_empty_is_reported(tmp_path):
    with pytest.raises(DataError, match="No such file or directory"):
        list_images(tmp_path / "missing")
    with pytest.raises(DataError, match=r"has no images: expected .* \.jpg, \.jpeg, \.png"):
        list_images(tmp_path)


def save(path, image, **options):
    image.save(path, **options)
    return path


def test_a_lossless_image_is_read_as_it_is(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    read = read_image(save(tmp_path / "a.png", Image.fromarray(pixels)))
    assert read.dtype == np.uint8
    assert (read == pixels).all()
    assert read.flags.writeable


def test_grayscale_becomes_three_equal_channels(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)
    read = read_image(save(tmp_path / "a.png", Image.fromarray(pixels)))
    assert (read == pixels[..., None]).all()
    assert read_image(save(tmp_path / "a.jpg", Image.fromarray(pixels))).shape == (5, 7, 3)


def test_palette_transparent_and_cmyk_images_become_rgb(tmp_path):
    red = Image.new("RGB", (4, 3), (255, 0, 0))
    palette = red.convert("P")
    paths = [
        save(tmp_path / "p.png", palette),
        save(tmp_path / "t.png", palette, transparency=bytes([0, 128])),
        save(tmp_path / "a.png", red.convert("RGBA")),
        save(tmp_path / "one.png", red.convert("1", dither=Image.Dither.NONE)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [read_image(path) for path in paths]
    assert all((result == [255, 0, 0]).all() for result in results[:3])
    assert results[3].shape == (3, 4, 3)
    cmyk = read_image(save(tmp_path / "c.jpg", red.convert("CMYK"), quality=100))
    assert np.abs(cmyk.astype(int) - [255, 0, 0]).max() <= 4


def test_an_exif_orientation_is_left_alone(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = save(tmp_path / "a.jpg", Image.new("RGB", (8, 4)), exif=exif)
    assert read_image(path).shape == (4, 8, 3)


def test_a_side_of_4000_pixels_is_read(tmp_path):
    path = save(tmp_path / "a.jpg", Image.new("L", (4000, 4000)))
    assert read_image(path).shape == (4000, 4000, 3)


@pytest.mark.parametrize("size", [(8000, 4001), (30_000, 30_000)])
def test_a_decompression_bomb_is_refused_from_its_header(tmp_path, size):
    # A PNG whose header declares the size and whose body is missing: decoding it would also fail,
    # but with another message.
    path = save(tmp_path / "bomb.png", Image.new("1", (8, 8)))
    content = bytearray(path.read_bytes())
    content[16:24] = size[0].to_bytes(4, "big") + size[1].to_bytes(4, "big")
    content[29:33] = zlib.crc32(bytes(content[12:29])).to_bytes(4, "big")
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError, match=r"bomb\.png: .*(over the limit|exceeds limit)"):
            read_image(path)


def test_the_limit_is_two_images_of_4000_by_4000():
    assert images.MAX_IMAGE_PIXELS == 2 * 4000 * 4000


def test_a_truncated_image_is_reported_by_name(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (100, 100, 3), dtype=np.uint8)
    for name in ("cut.jpg", "cut.png"):
        path = save(tmp_path / name, Image.fromarray(pixels))
        path.write_bytes(path.read_bytes()[:-5000])
        with pytest.raises(DataError, match=f"cannot read the image .*{name}: .*truncated"):
            read_image(path)


def test_what_is_no_image_or_missing_is_reported_by_name(tmp_path):
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.jpg").write_bytes(b"")
    for name in ("text.jpg", "empty.jpg", "missing.jpg"):
        with pytest.raises(DataError, match=name):
            read_image(tmp_path / name)


def test_the_photographs_are_read(caltech101_mini):
    folder = list_images(caltech101_mini / "101_ObjectCategories")
    assert len(folder) == 600
    assert len(folder.classes) == 10
    assert folder.classes[:3] == ("Leopards", "Motorbikes", "airplanes")
    for path in folder.paths[::40]:
        with Image.open(path) as image:
            expected = np.asarray(image.convert("RGB"))
        assert (read_image(path) == expected).all()


def test_the_list_of_a_large_tree_takes_less_than_a_kilobyte_per_image(tmp_path):
    image = tmp_path / "one.jpg"
    Image.new("RGB", (8, 8)).save(image)
    for number in range(20):
        folder = tmp_path / "tree" / f"class {number:02d}"
        folder.mkdir(parents=True)
        for name in range(100):
            os.link(image, folder / f"image_{name:04d}.jpg")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        folder = list_images(tmp_path / "tree")
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(folder) == 2000
    # A path, its text and its parts; nothing of the picture.
    assert after - before < 1024 * len(folder)
