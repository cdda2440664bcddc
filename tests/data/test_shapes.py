"""The rendered stand-in: reproducible, in the layout of the photographs, and learnable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from mpgluon.errors import DataError

import numpy as np
import pytest
from PIL import Image

import recipes.data.shapes as shapes
from recipes.data.images import list_images
from recipes.data.shapes import class_names, render_image, render_shapes


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    return render_shapes(tmp_path_factory.mktemp("data"), images_per_class=40)


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def test_the_layout_is_one_folder_per_class_of_numbered_jpegs(rendered):
    assert rendered.name == "shapes-10x40-seed0"
    folder = list_images(rendered)
    assert folder.classes == tuple(sorted(class_names(10)))
    assert np.bincount(folder.labels).tolist() == [40] * 10
    assert [path.name for path in folder.paths[:2]] == ["image_0001.jpg", "image_0002.jpg"]
    for path in folder.paths[:20]:
        with Image.open(path) as image:
            assert image.format == "JPEG"
    assert set(os.listdir(rendered.parent)) == {".shapes.lock", rendered.name}


def test_sizes_vary_around_300_by_200_and_about_one_in_twenty_is_grayscale(rendered):
    images = []
    for path in list_images(rendered).paths:
        with Image.open(path) as image:
            images.append(image.copy())
    sizes = np.array([image.size for image in images])
    assert len({image.size for image in images}) > 300
    assert sizes.min() >= 160
    assert sizes.max() <= 240 * 1.8
    assert 250 < sizes.max(axis=1).mean() < 320
    assert 180 < sizes.min(axis=1).mean() < 220
    assert 0.1 < (sizes[:, 1] > sizes[:, 0]).mean() < 0.4
    assert 0.02 < np.mean([image.mode == "L" for image in images]) < 0.09


def test_the_same_parameters_give_the_same_bytes(rendered, tmp_path):
    again = render_shapes(tmp_path, images_per_class=40)
    assert contents(again) == contents(rendered)


def test_an_image_does_not_depend_on_how_many_others_are_rendered(rendered, tmp_path):
    few = contents(render_shapes(tmp_path, classes=11, images_per_class=2))
    many = contents(rendered)
    shared = [name for name in few if name in many and name.endswith(".jpg")]
    assert len(shared) == 20
    assert all(few[name] == many[name] for name in shared)


def test_other_parameters_go_to_another_folder_with_other_images(rendered, tmp_path):
    other = render_shapes(tmp_path, images_per_class=2, seed=1)
    assert other.name == "shapes-10x2-seed1"
    name = "disc/image_0001.jpg"
    assert contents(other)[name] != contents(rendered)[name]


def test_what_is_there_is_not_rendered_again(rendered, monkeypatch):
    monkeypatch.setattr(shapes, "render_image", None)
    assert render_shapes(rendered.parent, images_per_class=40) == rendered


def test_the_stamp_says_what_was_rendered(rendered):
    stamp = json.loads((rendered / "shapes.json").read_text())
    assert stamp == {
        "dataset": "shapes",
        "renderer_version": 1,
        "classes": 10,
        "images_per_class": 40,
        "seed": 0,
    }


@pytest.mark.parametrize("stamp", [None, "{}", "no json"])
def test_a_folder_that_holds_something_else_is_refused(tmp_path, stamp):
    folder = tmp_path / "shapes-10x1-seed0"
    folder.mkdir()
    if stamp is not None:
        (folder / "shapes.json").write_text(stamp)
    with pytest.raises(DataError, match="does not hold the expected shapes"):
        render_shapes(tmp_path, images_per_class=1)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot write"):
        render_shapes(tmp_path / "file", images_per_class=1)


@pytest.mark.parametrize("classes", [9, 102])
def test_a_number_of_classes_out_of_range_is_refused(tmp_path, classes):
    with pytest.raises(ValueError, match=f"classes must be from 10 to 101, received {classes}"):
        render_shapes(tmp_path, classes=classes)


def test_no_images_or_a_negative_seed_are_refused(tmp_path):
    with pytest.raises(ValueError, match="images_per_class must be at least 1, received 0"):
        render_shapes(tmp_path, images_per_class=0)
    with pytest.raises(ValueError, match="seed must be at least 0, received -1"):
        render_shapes(tmp_path, images_per_class=1, seed=-1)


def test_there_are_101_classes_with_different_names():
    names = class_names(101)
    assert len(set(names)) == 101
    assert names[:10] == class_names(10)


def test_every_pattern_shows_on_every_shape():
    # Measured on the rendered mask and pattern: both colours cover a good part of the shape.
    size, centre, scale, turn = (200, 200), (100.0, 100.0), 80.0, 0.2
    x, y = shapes._shape_coordinates(size, centre, scale, turn)
    for name, shape, pattern in shapes._CLASSES:
        inside = shapes._coverage(shapes._OUTLINES[shape], size, centre, scale, turn) > 0.5
        share = shapes._PATTERNS[pattern](x, y)[inside].mean()
        assert 0.2 < share < 0.9 if pattern else share == 0, name


def test_the_shape_stands_out_from_the_background_also_without_colour():
    for class_index in range(10):
        for index in range(5):
            gray = np.asarray(render_image(class_index, index).convert("L"), dtype=np.float64)
            # Two brightness groups, Otsu's split, lie far apart compared with their spread.
            thresholds = np.percentile(gray, np.arange(2, 99))
            between = [
                (gray > t).mean()
                * (gray <= t).mean()
                * (gray[gray > t].mean() - gray[gray <= t].mean()) ** 2
                for t in thresholds
                if (gray > t).any()
            ]
            assert max(between) > 0.55 * gray.var(), (class_index, index)


def test_ten_classes_are_easy_for_a_nearest_neighbour_on_small_colour_crops(rendered):
    # A floor for any network: no learning at all beyond memory.
    folder = list_images(rendered)
    small = np.stack(
        [np.asarray(Image.open(p).convert("HSV").resize((48, 48))) for p in folder.paths]
    )
    weights = (small[..., 1] > 120)[..., None]
    hue = small[..., :1] // 8
    histograms = np.stack(
        [np.bincount(h[w], minlength=32) / max(w.sum(), 1) for h, w in zip(hue, weights)]
    )
    is_train = np.arange(len(folder)) % 4 != 0
    distances = np.abs(histograms[~is_train][:, None] - histograms[is_train][None]).sum(-1)
    predicted = folder.labels[is_train][distances.argmin(1)]
    accuracy = (predicted == folder.labels[~is_train]).mean()
    assert accuracy > 0.7


KILLED = """
import sys
from recipes.data import shapes
real = shapes.render_image
def noisy(*arguments, **options):
    print("one more", flush=True)
    return real(*arguments, **options)
shapes.render_image = noisy
shapes.render_shapes(sys.argv[1], images_per_class=200)
"""


@pytest.mark.multiprocess
def test_a_killed_rendering_is_never_taken_for_complete(tmp_path):
    root = str(Path(shapes.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    for _ in range(5):
        assert process.stdout.readline() == b"one more\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "shapes-10x200-seed0").exists()
    assert (tmp_path / ".shapes-10x200-seed0.rendering").is_dir()
    # The next call, made small here, clears what it finds under its own temporary name.
    (tmp_path / ".shapes-10x200-seed0.rendering").rename(tmp_path / ".shapes-10x1-seed0.rendering")
    folder = render_shapes(tmp_path, images_per_class=1)
    assert len(contents(folder)) == 11
    assert set(os.listdir(tmp_path)) == {".shapes.lock", "shapes-10x1-seed0"}
