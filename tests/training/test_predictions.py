"""The pictures and tables of a network's predictions."""

import csv
import json
import os
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image
from training_helpers import quick_config, run, run_interrupted

from recipes.data import list_images
from recipes.data.augment import read_crop
from recipes.data.reader import normalized, normalized_levels
from recipes.training import TrainingConfig, train
from recipes.training.dataset import Dataset
from recipes.training.predictions import Prediction, confusions, save_predictions
from recipes.training.runs import open_run
from recipes.training.steps import evaluate


def dataset_of(root, classes, images=2):
    """Return images of brightness k / classes for class k; all but the first of each are tested."""
    for label in range(classes):
        folder = root / f"a_class_of_number_{label:02}"
        folder.mkdir(parents=True)
        for number in range(images):
            level = round(255 * label / classes)
            Image.new("RGB", (40, 30), (level,) * 3).save(folder / f"{number}.png")
    folder = list_images(root)
    places = np.flatnonzero(np.arange(len(folder)) % images)
    return Dataset("folder", folder, (0,), tuple(places.tolist()))


def right_but_for_class_1(dataset):
    labels = dataset.folder.labels.tolist()
    return [
        Prediction(image, labels[image], 1.0, 1.0)
        if labels[image] != 1
        else Prediction(image, 2, 0.9 - image / 100, 0.1)
        for image in dataset.test_indices
    ]


CONFIG = TrainingConfig(dataset="folder", image_size=16, test_image_size=20)


@pytest.fixture
def drawn(monkeypatch):
    """The words over the images, and the brightness of these."""
    words, levels = [], []
    write, imshow = Axes.text, Axes.imshow

    def with_words(axes, x, y, text, **more):
        words.append(text)
        return write(axes, x, y, text, **more)

    def with_pixels(axes, pixels, **more):
        levels.append(int(pixels[0, 0, 0]))
        return imshow(axes, pixels, **more)

    monkeypatch.setattr(Axes, "text", with_words)
    monkeypatch.setattr(Axes, "imshow", with_pixels)
    return words, levels


@pytest.mark.parametrize(
    ("classes", "shown"), [(3, [0, 1, 2]), (8, [*range(8)]), (20, [1, 3, 6, 8, 11, 13, 16, 18])]
)
def test_each_image_has_its_answer_and_its_class_if_that_differs(tmp_path, drawn, classes, shown):
    dataset = dataset_of(tmp_path / "images", classes)
    save_predictions(tmp_path, CONFIG, dataset, right_but_for_class_1(dataset))
    right = "\N{CHECK MARK} a class of number {:02}, 1.00"
    wrong = "\N{BALLOT X} a class of number 02, 0.87\n(a class of number 01)"
    words, levels = drawn
    assert words == [*(wrong if label == 1 else right.format(label) for label in shown), wrong]
    assert levels == [round(255 * label / classes) for label in (*shown, 1)]
    for name in ("predictions.jpg", "mistakes.jpg"):
        with Image.open(tmp_path / name) as picture:
            assert (picture.format, picture.width) == ("JPEG", 960)


def test_the_worst_mistakes_come_first_and_eight_are_shown(tmp_path, drawn):
    dataset = dataset_of(tmp_path / "images", 2, images=11)
    chances = [0.5, 0.81, 0.6, 0.99, 0.52, 0.7, 0.95, 0.9, 0.65, 0.55]
    images = dataset.test_indices[:10]
    wrong = [Prediction(image, 1, chance, 1 - chance) for image, chance in zip(images, chances)]
    save_predictions(tmp_path, CONFIG, dataset, wrong)
    worst = ["0.99", "0.95", "0.90", "0.81", "0.70", "0.65", "0.60", "0.55"]
    assert [words.splitlines()[0].split()[-1] for words in drawn[0][1:]] == worst


def test_without_a_mistake_there_is_no_picture_of_one_also_after_a_run_with_some(tmp_path):
    dataset = dataset_of(tmp_path / "images", 2)
    predictions = right_but_for_class_1(dataset)
    save_predictions(tmp_path, CONFIG, dataset_of(tmp_path / "three", 3), [Prediction(1, 1, 1, 0)])
    assert (tmp_path / "mistakes.jpg").exists()
    save_predictions(tmp_path, CONFIG, dataset, predictions[:1])
    assert not (tmp_path / "mistakes.jpg").exists()
    assert confusions(dataset, predictions[:1]) == []


def table_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_tables_have_every_answer_and_how_often_each_class_is_taken_for_each(tmp_path):
    dataset = dataset_of(tmp_path / "images", 3, images=3)
    predictions = right_but_for_class_1(dataset)
    predictions[0] = Prediction(dataset.test_indices[0], 2, 0.75, 0.125)
    save_predictions(tmp_path, CONFIG, dataset, predictions)
    heading, *rows = table_of(tmp_path / "predictions.csv")
    assert heading[1:3] == ["right category", "answer"]
    names = dataset.folder.classes
    assert len(rows) == 6
    first = str(dataset.folder.paths[dataset.test_indices[0]])
    assert rows[0] == [first, names[0], names[2], "0.7500", "0.1250"]
    assert [row[1] for row in rows] == [name for name in names for _ in range(2)]
    counts = [[names[0], "1", "0", "1"], [names[1], "0", "0", "2"], [names[2], "0", "0", "2"]]
    assert table_of(tmp_path / "confusion.csv") == [["right category", *names], *counts]
    assert confusions(dataset, predictions) == [[names[1], names[2], 2], [names[0], names[2], 1]]


def test_the_five_commonest_confusions_come_by_number_and_then_by_name(tmp_path):
    dataset = dataset_of(tmp_path / "images", 7)
    predictions = [Prediction(image, 6, 1.0, 0.0) for image in dataset.test_indices]
    found = confusions(dataset, [*predictions, predictions[5]])
    assert [one[0][-2:] for one in found] == ["05", "00", "01", "02", "03"]
    assert [one[2] for one in found] == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("name", [r"$\frac{$", "a$b$", os.fsdecode(b"\xff\xfe"), "\u732b, 'x\""])
@pytest.mark.filterwarnings("ignore:Glyph")
def test_any_name_of_a_folder_can_be_drawn_and_written(tmp_path, name):
    for folder in (name, "z"):
        path = tmp_path / "images" / folder / "1.png"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (40, 30)).save(path)
    found = Dataset("folder", list_images(tmp_path / "images"), (0,), (0, 1))
    (place,) = (place for place, one in enumerate(found.folder.classes) if one == name)
    wrong = Prediction(place, 1 - place, 1.0, 0.0)
    save_predictions(tmp_path, CONFIG, found, [wrong])
    assert (tmp_path / "mistakes.jpg").stat().st_size > 0
    with open(tmp_path / "predictions.csv", newline="", errors="surrogateescape") as file:
        assert list(csv.reader(file))[1][1] == name
    assert str(confusions(found, [wrong])).encode()  # a terminal can show it


def by_hand(folder):
    """Return each test image's path, class and softmax from the saved network, one by one."""
    opened = open_run(folder, mx.cpu())
    softmax = {}
    for path, right, *_ in table_of(folder / "predictions.csv")[1:]:
        pixels = read_crop(Path(path), opened.config.size_in_use, None, epoch=0, index=0)
        image = mx.nd.array(normalized([pixels], normalized_levels()))
        softmax[path] = right, opened.net(image).softmax()[0].asnumpy(), opened.classes
    return softmax


def assert_answers_of_the_saved_network(folder):
    _, *rows = table_of(folder / "predictions.csv")
    expected = by_hand(folder)
    for path, right, answer, probability, of_right in rows:
        assert Path(path).parent.name == right
        _, softmax, classes = expected[path]
        assert answer == classes[softmax.argmax()]
        # In FP32, 20 layers, other sums; the file has four decimals.
        assert float(probability) == pytest.approx(softmax.max(), abs=2e-4)
        assert float(of_right) == pytest.approx(softmax[classes.index(right)], abs=2e-4)
    results = json.loads((folder / "results.json").read_text())
    share = np.mean([right == answer for _, right, answer, *_ in rows])
    assert results["test_accuracy"] == pytest.approx(share)
    assert len(rows) == results["dataset"]["test_images"] - len(results["unreadable_images"])
    return results


def test_a_run_leaves_the_answers_of_its_network(float32_run):
    results = assert_answers_of_the_saved_network(float32_run.folder)
    counts = table_of(float32_run.folder / "confusion.csv")[1:]
    off_diagonal = {
        (row[0], counts[place][0]): int(count)
        for row in counts
        for place, count in enumerate(row[1:])
        if int(count) and counts[place][0] != row[0]
    }
    for right, answer, count in results["confusions"]:
        assert off_diagonal[right, answer] == count == max(off_diagonal.values())
        del off_diagonal[right, answer]


def test_the_answers_of_a_run_with_an_average_are_the_averages(shapes, tmp_path):
    run(shapes, tmp_path, ema=0.9)
    assert_answers_of_the_saved_network(tmp_path)


def test_unreadable_images_have_no_answer_and_shift_no_other(shapes, tmp_path):
    for path in list_images(shapes / "shapes-10x6-seed0").paths:
        copy = tmp_path / "images" / path.parent.name / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    options = {"dataset": "folder", "skip_unreadable": True}
    tested = run(tmp_path / "images", tmp_path / "whole", epochs=1, warmup_epochs=0, **options)
    path = Path(table_of(tested.folder / "predictions.csv")[3][0])
    path.write_bytes(b"no image")
    results = run(tmp_path / "images", tmp_path / "run", **options).results
    assert results["unreadable_images"] == [str(path)]
    assert_answers_of_the_saved_network(tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_ended_after_its_last_test_tests_again(shapes, tmp_path, monkeypatch):
    stopped = run(shapes, tmp_path)
    files = ("predictions.csv", "confusion.csv", "results.json")
    before = [(tmp_path / name).read_text() for name in files[:2]]
    for name in files:
        (tmp_path / name).unlink()
    tests = []
    monkeypatch.setattr(
        "recipes.training.loop.evaluate", lambda *given: tests.append(1) or evaluate(*given)
    )
    train(stopped.config, resume=True)
    assert [(tmp_path / name).read_text() for name in files[:2]] == before
    assert tests == [1]


@pytest.mark.slow
def test_the_last_test_of_an_uninterrupted_or_resumed_run_is_used(shapes, tmp_path, monkeypatch):
    tests = []
    monkeypatch.setattr(
        "recipes.training.loop.evaluate", lambda *given: tests.append(1) or evaluate(*given)
    )
    run(shapes, tmp_path / "whole")
    assert len(tests) == quick_config(shapes, tmp_path).epochs
    run_interrupted(shapes, tmp_path / "resumed", after_step=6)
    written = [(tmp_path / name / "predictions.csv").read_text() for name in ("whole", "resumed")]
    assert written[0] == written[1]
