"""Listing a folder-per-class tree and decoding images of every kind."""

from __future__ import annotations

import struct
import warnings
import zlib

from mpgluon.errors import DataError
from mpgluon_tools.serving.photographs import read_photograph

import numpy as np
import pytest
from PIL import Image

from recipes.data import images
from recipes.data.augment import Augmentation, read_crop
from recipes.data.images import list_images, read_image


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def test_only_image_files_in_class_folders_count(tmp_path):
    images = ("Zebra/a.PNG", "ant/b.JPEG", "ant/image_0001.jpg", "ant/image_0002.JPG")
    others = ("stray.jpg", "ant/tmp", "ant/notes.txt", "ant/._image_0001.jpg", "ant/.hidden.jpg")
    others += ("ant/image.jpg.part", "ant/deeper/image.jpg", ".hidden/image.jpg")
    for name in (*images, *others, "nothing/readme.txt", "BACKGROUND_Google/image_0001.jpg"):
        touch(tmp_path / name)
    (tmp_path / "ant" / "folder.jpg").mkdir()
    folder = list_images(tmp_path, exclude=("BACKGROUND_Google",))
    assert (folder.root, folder.classes) == (tmp_path, ("Zebra", "ant"))
    assert list(folder.paths) == [tmp_path / name for name in images]
    assert (folder.labels.tolist(), folder.labels.dtype) == ([0, 1, 1, 1], np.int32)
    assert len(folder) == 4


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
    assert found_in(tree, nested=nested) == [("cat", tree / "cat" / "a.jpg"), ("cat", own)]
    assert "reached again through symbolic links, are left out: 3, the first is" in caplog.text


def save(path, image, **options):
    image.save(path, **options)
    return path


def test_a_lossless_image_is_read_as_it_is(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    read = read_image(save(tmp_path / "a.png", Image.fromarray(pixels)))
    assert read.dtype == np.uint8
    assert (read == pixels).all()
    assert read.flags.writeable


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


# Where the first row and the first column of a file are to be shown: Exif 2.32, table 6.
ORIENTATIONS = {
    1: ("top", "left"), 2: ("top", "right"), 3: ("bottom", "right"), 4: ("bottom", "left"),
    5: ("left", "top"), 6: ("right", "top"), 7: ("right", "bottom"), 8: ("left", "bottom"),
}  # fmt: skip


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "16 bits", "XMP", "TIFF", "odd tags"])
def test_every_reader_shows_a_photograph_as_its_exif_orientation_says(tmp_path, orientation, kind):
    pixels = np.random.default_rng(orientation).integers(0, 256, (48, 72, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"exif": exif, "format": kind}
    if kind == "WEBP":
        options["lossless"] = True
    elif kind == "16 bits":
        image, options["format"] = Image.fromarray(pixels[..., 0].astype(np.uint16) << 8), "PNG"
    elif kind == "XMP":
        options = {"xmp": f'<x tiff:Orientation="{orientation}"/>'.encode(), "format": "JPEG"}
    elif (
        kind == "odd tags"
    ):  # Pillow reads a resolution that is said to be text, and cannot write it
        exif[0x011A] = 72.0
        as_text = exif.tobytes().replace(b"\x01\x1a\0\5", b"\x01\x1a\0\2")
        options = {"exif": as_text, "format": "PNG"}
    image.save(tmp_path / "stored", **options)
    stored = pixels
    if options["format"] == "JPEG":  # lossy
        image.save(tmp_path / "plain", format="JPEG")
        stored = np.asarray(Image.open(tmp_path / "plain"))
    elif kind == "16 bits":
        stored = pixels[..., [0, 0, 0]]
    rows, columns = ORIENTATIONS[orientation]
    turned = stored.swapaxes(0, 1) if rows in ("left", "right") else stored
    turned = turned[:, ::-1] if "right" in (rows, columns) else turned
    turned = turned[::-1] if "bottom" in (rows, columns) else turned
    assert (read_image(tmp_path / "stored") == turned).all()
    Image.fromarray(turned).save(tmp_path / "upright", format="PNG")
    for shown in (
        lambda path: read_crop(path, 28, None, epoch=0, index=0),
        lambda path: read_crop(path, 28, None, epoch=0, index=0, whole=True),
        lambda path: read_crop(path, 28, Augmentation(0), epoch=0, index=0),
        lambda path: read_crop(path, 28, Augmentation(0, shifts=True), epoch=0, index=0),
        *([lambda path: read_photograph(path.read_bytes(), 28)] * (kind != "TIFF")),
    ):
        assert (shown(tmp_path / "stored") == shown(tmp_path / "upright")).all()


@pytest.mark.parametrize(("orientation", "size"), [(1, (320, 240)), (6, (240, 320))])
def test_a_large_photograph_can_be_decoded_at_a_reduced_size(tmp_path, orientation, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / "large.jpg", Image.new("RGB", (640, 480)), exif=exif)
    with images.open_image(path, 40) as image:
        assert image.size == ((640, 480) if orientation == 1 else size)
        image.draft(None, (320, 240))
        assert image.size == size


@pytest.mark.parametrize("tags", [b"no tags", b"MM", b"MM\0*\0\0", b"II*\0\xff\xff\xff\xff"])
def test_an_image_with_damaged_exif_data_is_read_as_it_is_stored(tmp_path, tags):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    path = save(tmp_path / "a.png", Image.fromarray(pixels), exif=tags)
    assert (read_image(path) == pixels).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
@pytest.mark.parametrize("read", [read_image, lambda p: read_crop(p, 8, None, epoch=0, index=0)])
def test_deep_levels_of_an_unknown_range_are_refused_with_the_file(tmp_path, dtype, read):
    path = save(tmp_path / "deep.tiff", Image.fromarray(np.full((8, 8), 300, dtype)))
    with pytest.raises(DataError, match=r"deep\.tiff: its mode is [IF]"):
        read(path)


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


@pytest.mark.parametrize("name", ["cut.jpg", "cut.png", "text.jpg", "empty.jpg", "missing.jpg"])
def test_an_unreadable_image_is_reported_by_name(tmp_path, name):
    path, reason = tmp_path / name, ""
    if name.startswith("cut"):
        pixels = np.random.default_rng(0).integers(0, 256, (100, 100, 3), dtype=np.uint8)
        save(path, Image.fromarray(pixels))
        path.write_bytes(path.read_bytes()[:-5000])
        reason = ".*truncated"
    elif name != "missing.jpg":
        path.write_text("words" if name == "text.jpg" else "")
    with pytest.raises(DataError, match=f"cannot read the image .*{name}: {reason}"):
        read_image(path)
