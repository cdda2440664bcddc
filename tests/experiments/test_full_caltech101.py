"""Caltech 101 and fine-tuning: the protocol, the data that is used, and what the pages say."""

from __future__ import annotations

import json
import os
import re
import zlib
from dataclasses import replace
from pathlib import Path

from mpgluon.errors import DataError

import pytest
from matplotlib.figure import Figure
from PIL import Image

from experiments import caltech101, fine_tuning
from experiments.experiment import Outcome, Place
from experiments.photographs import link_categories, whole_tree
from experiments.training_runs import PER_CLASS
from recipes.data import CALTECH101
from recipes.training.loop import _Run

FINE_TUNING, CALTECH = fine_tuning.GROUP, caltech101.GROUP
TITLES = {"caltech101": "ResNet-50 on Caltech 101",
          "fine_tuning": "Fine-tuning in float16 from FP32 weights"}  # fmt: skip


def outcome(points: float, skipped: int = 0) -> Outcome:
    """Return a run that ends with an accuracy in points, and one point less for the mean."""
    share = points / 100
    figures = {
        "test_accuracy": share, PER_CLASS: share - 0.01, "train_loss": 1.5, "steps": 24,
        "skipped_steps": skipped, "final_loss_scale": 4096.0, "steps_per_point": 1,
    }  # fmt: skip
    scales = [[1, 65536.0], [5, 4096.0]]
    curves = {"loss": [2.0] * 24, "test_accuracy": [0, share], PER_CLASS: [0, share - 0.01],
              "loss_scale": scales}  # fmt: skip
    return Outcome(figures, curves, {"training_seconds": 90.0})


def varied(name: str, points: float) -> Outcome:
    """Return a run whose accuracy varies with its seed, and differently between some rows."""
    seed = int(name[-1]) if "seed" in name else 0
    wobble = zlib.crc32(name.encode()) % 100 / 100
    return outcome(points + seed - 1 + wobble)


@pytest.fixture
def records(record_of):
    """Return a function that makes all records; accuracies by a part of their names."""

    def make(group, **points):
        def of(name):
            return next((value for part, value in points.items() if f"/{part}/" in name), 40)

        return {one.name: record_of(one, varied(one.name, of(one.name)))
                for one in group.experiments}  # fmt: skip

    return make


def test_runs_follow_the_protocol_of_the_literature():
    runs = [one for one in CALTECH.experiments if "trial" not in one.name]
    assert len(runs) == 9
    for one in (*runs, *FINE_TUNING.experiments):
        assert (one.needs_photographs, one.categories) == (True, 101)
        assert (one.config["train_per_class"], one.config["test_per_class"]) == (30, 50)
    # Between formats of a seed, the format is the only difference.
    for seed in caltech101.SEEDS:
        of_seed = [one.config for one in runs if one.config["seed"] == seed]
        assert len({str({**config, "dtype": ""}) for config in of_seed}) == 1
        assert [config["dtype"] for config in of_seed] == list(caltech101.FORMATS)


def test_starts_of_fine_tuning_differ_in_their_weights_only():
    rows = [one.config for one in FINE_TUNING.experiments[1:]]
    assert len(rows) == 2 * 2 * 3
    assert len({str({**one, "dtype": "", "pretrained": "", "seed": 0}) for one in rows}) == 1
    assert {one["pretrained"] for one in rows} == {None, "fine_tuning/weights"}
    assert len(fine_tuning.NEW_CATEGORIES) == len(set(fine_tuning.NEW_CATEGORIES)) == 20


@pytest.fixture
def small_tree(tmp_path, monkeypatch):
    """A tree of 22 categories of 5 images each, which passes for all of Caltech 101."""
    tree = tmp_path / "data" / "101_ObjectCategories"
    for label, name in enumerate((*fine_tuning.NEW_CATEGORIES, "Faces", "Faces_easy")):
        (tree / name).mkdir(parents=True)
        for number in range(1, 6):
            colour = (11 * label, 40 * number, 99)
            Image.new("RGB", (40, 30), colour).save(tree / name / f"image_{number:04}.jpg")
    contents = replace(CALTECH101.contents, categories=22, category_images=110)
    archive = replace(CALTECH101, contents=contents)
    monkeypatch.setattr("experiments.photographs.CALTECH101", archive)
    return tree


def test_missing_photographs_are_refused_with_their_numbers(small_tree, tmp_path):
    place = Place(small_tree.parent, tmp_path / "work")
    assert whole_tree(place) == small_tree
    (small_tree / "wrench" / "image_0005.jpg").unlink()
    with pytest.raises(DataError, match="109 images in 22 categories, and Caltech 101 has 110"):
        whole_tree(place)


def test_links_lead_to_the_photographs_of_the_categories_and_can_be_made_twice(
    small_tree, tmp_path
):
    for _ in range(2):  # an interrupted run makes them again
        tree = link_categories(small_tree, ["Faces", "wrench"], tmp_path / "few")
    found = sorted(path.relative_to(tree) for path in tree.rglob("*.jpg"))
    assert found == [Path(name, f"image_{k:04}.jpg") for name in ("Faces", "wrench")
                     for k in range(1, 6)]  # fmt: skip
    one = "wrench/image_0001.jpg"
    assert os.path.samefile(tree / one, small_tree / one)


@pytest.fixture
def fine_tune(small_tree, tmp_path, monkeypatch):
    """Return a function that fine-tunes a small network in a format, in a folder, from weights."""
    tiny = {"model": "cifar_resnet20_v1", "image_size": 32, "epochs": 2, "warmup_epochs": 1,
            "train_per_class": 3, "test_per_class": 1, "batch_size": 6}  # fmt: skip
    weights = replace(caltech101.RECIPE, **tiny)
    monkeypatch.setattr(fine_tuning, "_WEIGHTS_CONFIG", weights)

    def run(dtype, folder):
        place = Place(small_tree.parent, tmp_path / folder / dtype / "pretrained" / "seed-0")
        config = replace(weights, dtype=dtype, pretrained="fine_tuning/weights")
        return fine_tuning._train(config, place), place.work_dir

    return run


def test_fine_tuning_starts_from_weights_of_the_other_categories(fine_tune, tmp_path):
    for dtype in fine_tuning.FORMATS:
        outcome, work = fine_tune(dtype, "work")
        assert (outcome.figures["train_images"], outcome.figures["test_images"]) == (60, 20)
        results = json.loads((work / "results.json").read_text())
        assert results["dataset"]["classes"] == list(fine_tuning.NEW_CATEGORIES)
        assert all("output" in name for name in results["fresh_parameters"])  # the head
        assert results["fresh_parameters"]
    weights = json.loads((tmp_path / "work" / "weights" / "results.json").read_text())
    assert weights["dataset"]["classes"] == ["Faces", "Faces_easy"]
    assert weights["steps"] == 2  # trained once


@pytest.mark.parametrize("interrupted", ["weights", pytest.param("seed-0", marks=pytest.mark.slow)])
def test_fine_tuning_that_was_interrupted_goes_on(interrupted, fine_tune, monkeypatch):
    end_epoch = _Run._end_epoch

    def interrupt(run, epoch):
        if epoch == 1 and run.config.output_path.name == interrupted:
            raise KeyboardInterrupt
        end_epoch(run, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(_Run, "_end_epoch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fine_tune("float16", "stopped")
    resumed, _ = fine_tune("float16", "stopped")
    whole, _ = fine_tune("float16", "whole")
    assert (resumed.figures, resumed.curves) == (whole.figures, whole.curves)


def test_a_damaged_photograph_ends_an_experiment_with_its_name(small_tree, fine_tune):
    damaged = small_tree / "wrench" / "image_0003.jpg"
    damaged.write_bytes(damaged.read_bytes()[:200])
    with pytest.raises(DataError, match=r"cannot read the image .*wrench/image_0003\.jpg"):
        fine_tune("float32", "work")


def test_a_category_with_too_few_photographs_is_named(small_tree, fine_tune, monkeypatch):
    for number in (3, 4, 5):
        (small_tree / "wrench" / f"image_000{number}.jpg").unlink()
    contents = replace(CALTECH101.contents, categories=22, category_images=107)
    monkeypatch.setattr(
        "experiments.photographs.CALTECH101", replace(CALTECH101, contents=contents)
    )
    with pytest.raises(ValueError, match=r"leaves nothing to test on .*wrench \(2\)"):
        fine_tune("float32", "work")


@pytest.mark.parametrize("group", [CALTECH, FINE_TUNING], ids=lambda group: group.name)
def test_without_records_the_pages_say_what_is_missing(group, page_of):
    text = page_of({}, TITLES[group.name], template="results")
    assert f"Not run yet: {group.name}." in text
    assert "**" not in text


def test_no_difference_is_said_only_of_runs_without_one(records, page_of):
    title = TITLES["caltech101"]
    claim = "**ResNet-50 learns Caltech 101 in float16 and bfloat16 as in float32"
    alike = page_of(records(CALTECH), title, template="results")
    assert claim in alike
    assert "| float16  | 39." in alike
    assert "`python scripts/evidence.py run caltech101/float16`" in alike
    worse = page_of(records(CALTECH, float16=30), title, template="results")
    assert claim not in worse
    assert "no longer support" in worse


def test_fine_tuning_is_praised_only_if_it_helps_and_the_formats_agree(records, page_of):
    title = TITLES["fine_tuning"]
    claim = "**A cast network that starts from FP32 weights fine-tunes as in float32"
    for points, holds in (
        ({"scratch": 20, "pretrained": 60}, True),
        ({"scratch": 60, "pretrained": 60}, False),
        ({"float16/pretrained": 50, "scratch": 20, "pretrained": 60}, False),
    ):
        text = page_of(records(FINE_TUNING, **points), title, template="results")
        assert (claim in text) == holds
        assert ("no longer support" in text) != holds


@pytest.mark.parametrize("group", [CALTECH, FINE_TUNING], ids=lambda group: group.name)
def test_pictures_show_every_row(group, records):
    for draw in group.pictures.values():
        figure = Figure(layout="constrained")
        draw(figure, records(group))
        assert all(axes.lines and axes.get_ylabel() for axes in figure.axes)
        figure.draw_without_rendering()


def test_the_readme_has_the_accuracies_of_all_formats(records, page_of):
    text = page_of(records(CALTECH), template="readme")
    assert text.startswith("**ResNet-50 learns Caltech 101 in 16 bits as in 32")
    (accuracies,) = re.findall(
        r"is ([0-9.]+) points in FP32, ([0-9.]+) in FP16 and ([0-9.]+) in BF16", text
    )
    assert all(39 <= float(one) <= 41 for one in accuracies)
    assert "600 photographs" not in text  # which were not classified
    worse = page_of(records(CALTECH, float16=30), template="readme")
    assert worse.startswith("**The records no longer support the conclusion")
