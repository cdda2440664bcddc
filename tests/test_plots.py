"""Figures show what they were given."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from mpgluon.plots import plot_training, save_training_curves

STEPS = [
    {"step": 1, "loss": 4.0, "loss_scale": 65536.0, "skipped": True},
    {"step": 2, "loss": 3.0, "loss_scale": 32768.0, "skipped": True},
    {"step": 3, "loss": 2.5, "loss_scale": 16384.0, "skipped": False},
    {"step": 4, "loss": 1.25, "loss_scale": 16384.0, "skipped": False},
]
EPOCHS = [
    {"step": 2, "train_loss": 3.5, "test_accuracy": 0.25},
    {"step": 4, "train_loss": 1.875, "test_accuracy": 0.75},
]


@pytest.fixture
def axes():
    axes = Figure().subplots(3, 1, sharex=True)
    plot_training(axes, STEPS, EPOCHS)
    return axes


def points(line) -> list[tuple[float, float]]:
    return list(zip(*np.array(line.get_data()).tolist()))


def test_the_losses_of_steps_and_epochs_are_drawn_from_0(axes):
    each_step, mean = axes[0].get_lines()
    assert points(each_step) == [(1, 4.0), (2, 3.0), (3, 2.5), (4, 1.25)]
    assert points(mean) == [(2, 3.5), (4, 1.875)]
    assert [each_step.get_label(), mean.get_label()] == ["each step", "epoch mean"]
    assert axes[0].get_ylabel() == "training loss"
    assert axes[0].get_yscale() == "linear"
    assert axes[0].get_ylim()[0] == 0
    assert axes[0].get_ylim()[1] > 4


def test_the_test_accuracy_is_drawn_from_0_to_1(axes):
    (accuracy,) = axes[1].get_lines()
    assert points(accuracy) == [(2, 0.25), (4, 0.75)]
    assert axes[1].get_ylabel() == "test accuracy"
    assert axes[1].get_ylim() == (0, 1)


def test_the_loss_scale_is_drawn_with_a_mark_and_a_count_of_skipped_steps(axes):
    scale, skipped = axes[2].get_lines()
    assert points(scale) == [(1, 65536), (2, 32768), (3, 16384), (4, 16384)]
    assert points(skipped) == [(1, 65536), (2, 32768)]
    assert skipped.get_marker() == "x"
    assert skipped.get_linestyle() == "None"
    legend = [text.get_text() for text in axes[2].get_legend().get_texts()]
    assert legend == ["scale", "skipped steps (2)"]
    assert axes[2].get_ylabel() == "loss scale"
    assert axes[2].get_yscale() == "log"
    assert axes[2].get_xlabel() == "step"


def test_a_run_without_skipped_steps_has_no_marks():
    axes = Figure().subplots(3, 1)
    plot_training(axes, STEPS[2:], EPOCHS[1:])
    _, skipped = axes[2].get_lines()
    assert points(skipped) == []
    assert skipped.get_label() == "skipped steps (0)"


def test_the_curves_are_saved_as_a_picture_that_depends_on_the_data(tmp_path):
    pictures = []
    for name, steps in (("a", STEPS), ("b", STEPS), ("c", STEPS[:2])):
        path = tmp_path / f"{name}.png"
        save_training_curves(path, steps, EPOCHS, title="resnet50_v2, float16, shapes")
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert picture.size == (840, 840)  # 7 inches at 120 dots
            pictures.append(np.array(picture.convert("RGB")))
    assert (pictures[0] == pictures[1]).all()
    assert (pictures[0] != pictures[2]).any()
