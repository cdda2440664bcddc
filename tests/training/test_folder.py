"""Training on a folder of a user's own photographs."""

import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

from mpgluon.errors import DataError

import mxnet as mx
import pytest
from PIL import Image
from training_helpers import quick_config, run

from recipes.data import list_images
from recipes.training import train
from recipes.training.dataset import open_dataset
from recipes.training.runs import open_run

FORMATS = (".JPG", ".png", ".webp", ".jpeg")


@pytest.fixture(scope="module")
def photographs(shapes, tmp_path_factory):
    """Copies of rendered images under names and in formats that people have."""
    tree = tmp_path_factory.mktemp("photographs")
    (rendered,) = (path for path in shapes.iterdir() if path.is_dir())
    for number, path in enumerate(list_images(rendered).paths):
        folder = tree / f"My {path.parent.name}" / ("album 1" if number % 3 else "")
        folder.mkdir(parents=True, exist_ok=True)
        Image.open(path).save(folder / f"IMG {number}{FORMATS[number % len(FORMATS)]}")
    return tree


def test_a_folder_of_photographs_is_trained_on_and_opened_again(photographs, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        trained = run(photographs, tmp_path, dataset="folder", dtype="float16")
    dataset = trained.results["dataset"]
    assert dataset["name"] == "folder"
    assert all(name.startswith("My ") for name in dataset["classes"])
    assert f"{len(dataset['classes'])} categories, " in caplog.text
    opened = open_run(tmp_path, mx.cpu())
    assert list(opened.classes) == dataset["classes"]


def test_a_folder_named_train_is_trained_on_as_a_whole(photographs, tmp_path):
    for kind, parts in (("train", slice(1, None)), ("val", slice(0, 1))):
        for category in photographs.iterdir():
            for path in sorted(path for path in category.rglob("*") if path.is_file())[parts]:
                (tmp_path / kind / category.name).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, tmp_path / kind / category.name)
    config = quick_config(tmp_path, tmp_path / "run", dataset="folder", train_per_class=1)
    found = open_dataset(config)
    assert {found.folder.paths[number].parts[-3] for number in found.train_indices} == {"train"}
    assert {found.folder.paths[number].parts[-3] for number in found.test_indices} == {"val"}
    assert len(found.train_indices) + len(found.test_indices) == len(found.folder)


def put(folder, names, side=8):
    """Save an image under some names, the folders of which are made; return their paths."""
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side, side)).save(path)
    return [str(path) for path in paths]


def test_test_images_may_be_fewer_than_a_folder_named_test_has(tmp_path):
    for kind, count in (("train", 2), ("test", 5)):
        put(tmp_path / kind, [f"{category}/{n}.png" for category in "ab" for n in range(count)])
    options = {"dataset": "folder", "test_per_class": 3}
    chosen = [
        open_dataset(quick_config(tmp_path, tmp_path / "run", seed=seed, **options))
        for seed in (0, 0, 1)
    ]
    for one in chosen:
        paths = [one.folder.paths[number].parts[-3:-1] for number in one.test_indices]
        assert sorted(paths) == [("test", "a")] * 3 + [("test", "b")] * 3
        assert len(one.train_indices) == 4
    assert chosen[0].test_indices == chosen[1].test_indices != chosen[2].test_indices


@pytest.mark.parametrize("data_dir", ["{}", "{}/101_ObjectCategories", "."])
def test_a_folder_next_to_caltech_101_is_its_test_set(tmp_path, monkeypatch, caplog, data_dir):
    def opened(**options):
        config = quick_config(data_dir.format(tmp_path), tmp_path / "run", dataset="caltech101")
        found = open_dataset(replace(config, **options))
        paths = [os.path.realpath(path) for path in found.folder.paths]
        parts = found.train_indices, found.test_indices
        return found, *([paths[number] for number in part] for part in parts)

    def put_photographs(tree, count):
        put(tree, ["BACKGROUND_Google/0.jpg"])
        return put(tree, [f"{kind}/{n}.jpg" for kind in ("Zebra", "ant") for n in range(count)])

    train = put_photographs(tmp_path / "101_ObjectCategories", 3)
    monkeypatch.chdir(tmp_path / "101_ObjectCategories")
    split, _, split_test = opened(train_per_class=1)
    assert set(split_test) < set(train)

    test = put_photographs(tmp_path / "101_ObjectCategories_test", 2)
    with caplog.at_level(logging.INFO):
        found, *parts = opened(train_per_class=1)
    assert parts == [train, test]
    assert found.folder.classes == split.folder.classes == ("Zebra", "ant")
    assert re.search(r"Categories_test has .* testing \(4\), and all 6 images in", caplog.text)
    assert "train_per_class=1 has no effect" in caplog.text
    assert "test_share" not in caplog.text
    opened(test_share=0.5)
    assert "test_share=0.5 has no effect" in caplog.text
    assert len(opened(test_per_class=1)[2]) == 2
    assert found.differences(split.identity())
    assert split.differences(found.identity())

    shutil.rmtree(tmp_path / "101_ObjectCategories_test" / "ant")
    with pytest.raises(DataError, match="101_ObjectCategories_test: ant;"):
        opened()


def test_too_few_photographs_are_refused_by_the_category(photographs, tmp_path):
    config = quick_config(photographs, tmp_path, dataset="folder", train_per_class=1000)
    with pytest.raises(ValueError, match=r"leaves nothing to test on in .* My "):
        train(config)


def test_an_unreadable_photograph_is_named_or_left_out(photographs, tmp_path):
    tree = tmp_path / "photographs"
    shutil.copytree(photographs, tree)
    damaged = next(path for path in sorted(tree.rglob("*.png")))
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(DataError, match=damaged.name):
        run(tree, tmp_path / "ends", dataset="folder")
    results = run(tree, tmp_path / "skips", dataset="folder", skip_unreadable=True).results
    assert results["unreadable_images"] == [str(damaged)]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["removed", "renamed", "another category"])
def test_a_run_does_not_continue_on_other_images(change, photographs, tmp_path):
    tree, output = tmp_path / "photographs", tmp_path / "run"
    shutil.copytree(photographs, tree)
    options = {"dataset": "folder", "epochs": 1, "warmup_epochs": 0}
    run(tree, output, **options)
    moved = tree.rename(tmp_path / "moved")
    run(moved, output, resume=True, **options)
    first = sorted(path for path in moved.rglob("*") if path.is_file())[0]
    if change == "removed":
        first.unlink()
    elif change == "renamed":
        first.rename(first.with_name(f"Z{first.name}"))
    else:
        sorted(moved.iterdir())[0].rename(moved / "ZZ")
    message = "images were added, removed or renamed"
    if change == "another category":
        message = "the 10 classes were My .*, are 10: My"
    with pytest.raises(ValueError, match=message):
        run(moved, output, resume=True, **options)


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_part_of_which_no_image_can_be_read_is_refused(part, tmp_path):
    names = [f"{category}/{number}.png" for category in "ab" for number in range(6)]
    for folder in ("train", "test"):
        for path in put(tmp_path / folder, names, 32):
            if folder == part:
                Path(path).write_bytes(b"x")
    options = {"dataset": "folder", "skip_unreadable": True, "epochs": 1, "warmup_epochs": 0}
    with pytest.raises(DataError, match=f"no image for {part}ing can be read"):
        run(tmp_path, tmp_path / "run", **options)
