"""The picture of test images with a network's predictions."""

import os
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from matplotlib.axes import Axes
from mxnet import gluon
from PIL import Image

from recipes.data import list_images
from recipes.training import TrainingConfig
from recipes.training.dataset import Dataset
from recipes.training.predictions import save_predictions


class SaysClassOfBrightness(gluon.HybridBlock):
    """Images of class k of ``classes`` have the brightness k / classes; class 1 is taken for 2."""

    def __init__(self, classes):
        super().__init__()
        self.classes = classes

    def hybrid_forward(self, F, x):
        brightness = F.mean(x.slice_axis(axis=1, begin=0, end=1), axis=(1, 2, 3)) * 0.229 + 0.485
        found = F.round(brightness * self.classes)
        found = F.where(found == 1, F.ones_like(found) * 2, found)
        return F.one_hot(found, depth=self.classes) * 50


def dataset_of(root, classes):
    for label in range(classes):
        folder = root / f"a_class_of_number_{label:02}"
        folder.mkdir()
        for number in range(2):
            level = round(255 * label / classes)
            Image.new("RGB", (40, 30), (level,) * 3).save(folder / f"{number}.png")
    folder = list_images(root)
    places = np.flatnonzero(np.arange(len(folder)) % 2)
    return Dataset("folder", folder, (0,), tuple(places.tolist()))


@pytest.fixture
def words(monkeypatch):
    """The words below the images."""
    found = []
    found, plain = [], Axes.set_xlabel

    def set_xlabel(axes, text, **more):
        found.append(text)
        return plain(axes, text, **more)

    monkeypatch.setattr(Axes, "set_xlabel", set_xlabel)
    return found


@pytest.mark.parametrize(
    ("classes", "shown"), [(3, [0, 1, 2]), (8, [*range(8)]), (20, [1, 3, 6, 8, 11, 13, 16, 18])]
)
def test_each_image_has_its_answer_and_its_class_if_that_differs(tmp_path, words, classes, shown):
    (tmp_path / "images").mkdir()
    dataset = dataset_of(tmp_path / "images", classes)
    config = TrainingConfig(dataset="folder", image_size=16, test_image_size=20)
    net = SaysClassOfBrightness(classes)
    save_predictions(tmp_path / "predictions.jpg", net, config, dataset, mx.cpu())
    right = "\N{CHECK MARK} a class of number {:02}, 1.00"
    wrong = "\N{BALLOT X} a class of number 02, 1.00\n(a class of number 01)"
    assert words == [wrong if label == 1 else right.format(label) for label in shown]
    with Image.open(tmp_path / "predictions.jpg") as picture:
        assert picture.width == 960


def test_images_that_cannot_be_read_are_left_out(tmp_path, words):
    dataset = dataset_of(tmp_path, 3)
    unreadable = dataset.folder.paths[dataset.test_indices[0]]
    Path(unreadable).write_bytes(b"no image")
    config = TrainingConfig(dataset="folder", image_size=16)
    net = SaysClassOfBrightness(3)
    save_predictions(tmp_path / "out.jpg", net, config, dataset, mx.cpu(), unreadable=[unreadable])
    assert len(words) == 2


@pytest.mark.parametrize("name", [r"$\frac{$", "a$b$", os.fsdecode(b"\xff\xfe"), "\u732b"])
@pytest.mark.filterwarnings("ignore:Glyph")
def test_any_name_of_a_folder_can_be_drawn(tmp_path, name):
    folder = tmp_path / "images" / name
    folder.mkdir(parents=True)
    for number in range(2):
        Image.new("RGB", (40, 30)).save(folder / f"{number}.png")
    net = SaysClassOfBrightness(1)
    found = Dataset("folder", list_images(tmp_path / "images"), (0,), (1,))
    config = TrainingConfig(image_size=32, dataset="folder")
    save_predictions(tmp_path / "p.jpg", net, config, found, mx.cpu())
    assert (tmp_path / "p.jpg").stat().st_size > 0


def test_without_a_readable_image_there_is_no_picture(tmp_path):
    dataset = dataset_of(tmp_path, 2)
    unreadable = [dataset.folder.paths[index] for index in dataset.test_indices]
    config = TrainingConfig(image_size=32, dataset="folder")
    net = SaysClassOfBrightness(2)
    save_predictions(tmp_path / "p.jpg", net, config, dataset, mx.cpu(), unreadable=unreadable)
    assert not (tmp_path / "p.jpg").exists()
