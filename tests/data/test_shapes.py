"""The rendered stand-in: reproducible, in the layout of the photographs, and learnable."""

from __future__ import annotations

import os
from pathlib import Path

from mpgluon.errors import DataError

import numpy as np
import pytest
from PIL import Image

import recipes.data.shapes as shapes
from recipes.data.images import list_images
from recipes.data.shapes import class_names, render_shapes


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


def test_the_same_parameters_give_the_same_bytes_once(tmp_path, monkeypatch):
    one, other = (render_shapes(tmp_path / name, images_per_class=4) for name in "ab")
    assert contents(one) == contents(other)
    monkeypatch.setattr(shapes, "render_image", None)  # not called for a folder that is there
    assert render_shapes(one.parent, images_per_class=4) == one


@pytest.mark.parametrize("stamp", [None, "{}", "no json"])
def test_a_folder_that_holds_something_else_is_refused(tmp_path, stamp):
    folder = tmp_path / "shapes-10x1-seed0"
    folder.mkdir()
    if stamp is not None:
        (folder / "shapes.json").write_text(stamp)
    with pytest.raises(DataError, match="does not hold the expected shapes"):
        render_shapes(tmp_path, images_per_class=1)


@pytest.mark.parametrize("classes", [9, 102])
def test_a_number_of_classes_out_of_range_is_refused(tmp_path, classes):
    with pytest.raises(ValueError, match=f"classes must be from 10 to 101, received {classes}"):
        render_shapes(tmp_path, classes=classes)


def test_ten_classes_are_easy_for_a_nearest_neighbour_of_hues(rendered):
    # A floor for any network: no learning at all beyond memory.
    folder = list_images(rendered)
    hues = []
    for path in folder.paths:
        hue, saturation, _ = np.asarray(Image.open(path).convert("HSV").resize((48, 48))).T
        counts = np.bincount(hue[saturation > 120] // 8, minlength=32)
        hues.append(counts / max(counts.sum(), 1))
    histograms, is_train = np.stack(hues), np.arange(len(folder)) % 4 != 0
    distances = np.abs(histograms[~is_train][:, None] - histograms[is_train][None]).sum(-1)
    assert (folder.labels[is_train][distances.argmin(1)] == folder.labels[~is_train]).mean() > 0.7


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_rendering_is_never_taken_for_complete(tmp_path, end_abruptly):
    end_abruptly(
        "from recipes.data import shapes\n"
        "shapes.render_image = ending(shapes.render_image, 5)\n"
        "shapes.render_shapes(sys.argv[1], images_per_class=1)",
        tmp_path,
    )
    assert not (tmp_path / "shapes-10x1-seed0").exists()
    assert len(contents(tmp_path / ".shapes-10x1-seed0.rendering")) == 5
    assert len(contents(render_shapes(tmp_path, images_per_class=1))) == 11
    assert set(os.listdir(tmp_path)) == {".shapes.lock", "shapes-10x1-seed0"}
