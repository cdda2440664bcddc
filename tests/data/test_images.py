"""Listing a folder-per-class tree and decoding images of every kind."""

from __future__ import annotations

import locale
import os
import struct
import tracemalloc
import warnings
import zlib

from mpgluon.errors import DataError

import numpy as np
import pytest
from PIL import Image

from recipes.classify import read_photograph
from recipes.data import images
from recipes.data.augment import read_crop
from recipes.data.images import list_images, read_image


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


def found_in(tree, **options):
    folder = list_images(tree, **options)
    return [(folder.classes[label], path) for path, label in zip(folder.paths, folder.labels)]


def test_a_link_to_a_folder_above_it_lists_no_image_again(tmp_path, caplog):
    cat, ant = touch(tmp_path / "cat" / "deep" / "1.jpg"), touch(tmp_path / "ant" / "1.jpg")
    before = found_in(tmp_path, nested=True)
    assert before == [("ant", ant), ("cat", cat)]
    assert caplog.text == ""
    (tmp_path / "cat" / "self").symlink_to(tmp_path / "cat")
    (tmp_path / "cat" / "deep" / "up").symlink_to("..")
    (tmp_path / "ant" / "all").symlink_to(tmp_path)  # through which all cats are ants
    (tmp_path / "ant" / "there").symlink_to(tmp_path / "cat" / "deep" / "back")
    (tmp_path / "cat" / "deep" / "back").symlink_to(tmp_path / "ant")
    (tmp_path / "ant" / "itself.jpg").symlink_to(tmp_path / "ant" / "itself.jpg")
    assert found_in(tmp_path, nested=True) == before
    assert "reached again through symbolic links, are left out: " in caplog.text


def test_many_links_to_each_other_are_followed_once_each(tmp_path):
    # Following each way through them would take more than the age of the universe.
    names = [f"{number:02d}" for number in range(40)]
    for name in names:
        touch(tmp_path / "x" / name / "1.jpg")
        for other in names:
            (tmp_path / "x" / name / f"to {other}").symlink_to(tmp_path / "x" / other)
    assert len(list_images(tmp_path, nested=True)) == 40


@pytest.mark.parametrize("nested", [False, True])
def test_an_image_with_two_links_is_listed_once_under_the_first(tmp_path, nested, caplog):
    elsewhere = touch(tmp_path / "elsewhere" / "1.jpg")
    tree = tmp_path / "tree"
    own = touch(tree / "cat" / "z.jpg")
    for place in ("cat/b.jpg", "cat/a.jpg", "dog/c.jpg"):
        (tree / place).parent.mkdir(exist_ok=True)
        (tree / place).symlink_to(elsewhere)
    (tree / "ant").mkdir()
    (tree / "ant" / "own.jpg").symlink_to(own)  # the file itself precedes any link to it
    expected = [("cat", tree / "cat" / "a.jpg"), ("cat", own)]
    assert found_in(tree, nested=nested) == expected
    assert "reached again through symbolic links, are left out: 3, the first is" in caplog.text


def test_a_class_that_is_a_link_has_no_image_that_a_link_to_it_has_already(tmp_path, caplog):
    elsewhere = touch(tmp_path / "elsewhere" / "1.jpg")
    other = touch(tmp_path / "elsewhere" / "2.jpg")
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a" / "1.jpg").symlink_to(elsewhere)
    (tree / "b").symlink_to(tmp_path / "elsewhere")
    assert [path.name for _, path in found_in(tree)] == [elsewhere.name, other.name]
    assert "are left out: 1, the first is" in caplog.text


def test_links_to_images_and_folders_elsewhere_are_followed(tmp_path, caplog):
    touch(tmp_path / "elsewhere" / "deep" / "1.jpg")
    other = touch(tmp_path / "other.jpg")
    tree = tmp_path / "tree"
    (tree / "b").mkdir(parents=True)
    (tree / "a").symlink_to(tmp_path / "elsewhere")
    (tree / "b" / "2.jpg").symlink_to(other)
    (tree / "b" / "broken.jpg").symlink_to(tmp_path / "missing.jpg")
    expected = [("a", tree / "a" / "deep" / "1.jpg"), ("b", tree / "b" / "2.jpg")]
    assert found_in(tree, nested=True) == expected
    assert caplog.text == ""


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


# A pixel of each mode of Pillow, whose colour is known, or None where its levels have no known
# range. LAB: 54.2, 38.2, 46.2 of white point D50, by the formulas of CIE 15.
COLOUR = (200, 100, 50)
PIXELS = {
    "1": (255, (255, 255, 255)),
    "L": (102, (102, 102, 102)),
    "LA": ((102, 7), (102, 102, 102)),
    "RGB": (COLOUR, COLOUR),
    "RGBA": ((*COLOUR, 7), COLOUR),
    "RGBX": ((*COLOUR, 7), COLOUR),
    "RGBa": ((40, 20, 10, 51), COLOUR),  # multiplied by alpha, a fifth
    "CMYK": ((55, 155, 205, 0), COLOUR),
    "YCbCr": ((124, 86, 182), COLOUR),
    "HSV": ((14, 191, 200), COLOUR),
    "LAB": ((138, 166, 174), COLOUR),
    "P": (0, COLOUR),
    "PA": ((0, 7), COLOUR),
    **dict.fromkeys(("I", "F", "I;16", "I;16B", "I;16L", "I;16N"), (102, None)),
    "La": ((102, 7), None),
}


def test_every_mode_of_pillow_is_among_the_pixels():
    assert set(Image.MODES) <= set(PIXELS)


@pytest.mark.parametrize("mode", PIXELS)
def test_a_pixel_of_any_mode_keeps_its_colour_or_its_mode_is_refused_by_name(mode):
    value, colour = PIXELS[mode]
    image = Image.new(mode, (4, 3), value)
    if mode in ("P", "PA"):
        image.putpalette(COLOUR)
    if colour is None:
        with pytest.raises(ValueError, match=rf"its mode is {mode}, .*save it with 8 bits"):
            images.to_rgb(image)
    else:
        found = np.asarray(images.to_rgb(image))
        assert found.shape == (3, 4, 3)
        assert np.abs(found.astype(int) - colour).max() <= 2  # other colour spaces round, too


def png_of_16_bits(levels: np.ndarray) -> bytes:
    """Return a PNG file; ``levels`` has shape (height, width) for greyscale, or 2 to 4 channels."""
    height, width, channels = (*levels.shape, 1)[:3]
    colour_type = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = levels.astype(">u2").reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    chunks = [(b"IHDR", header), (b"IDAT", body), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_a_png_of_16_bits_keeps_its_upper_eight(tmp_path, channels):
    levels = np.random.default_rng(0).integers(0, 65536, (64, 64, channels))
    path = tmp_path / "deep.png"
    path.write_bytes(png_of_16_bits(levels[..., 0] if channels == 1 else levels))
    colours = levels[..., :3] if channels > 2 else levels[..., :1]
    assert (read_image(path) == colours >> 8).all()
    crop = read_crop(path, 56, None, epoch=0, index=0)  # the central 56 pixels
    assert (crop == colours[4:60, 4:60] >> 8).all()
    assert (read_photograph(path.read_bytes(), 56) == crop).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_deep_levels_of_an_unknown_range_are_refused_with_the_file(tmp_path, dtype):
    path = save(tmp_path / "deep.tiff", Image.fromarray(np.full((8, 8), 300, dtype)))
    with pytest.raises(DataError, match=r"deep\.tiff: its mode is [IF]"):
        read_image(path)
    with pytest.raises(DataError, match=r"deep\.tiff: its mode is [IF]"):
        read_crop(path, 8, None, epoch=0, index=0)


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
