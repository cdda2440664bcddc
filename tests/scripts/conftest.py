"""Fixtures of the tests of scripts: the smallest runs of ``train_caltech.py``."""

from pathlib import Path

import pytest

from recipes.data import render_shapes
from recipes.training import TrainingConfig, train


@pytest.fixture(scope="session")
def rendered(tmp_path_factory) -> Path:
    """Return a folder with 30 rendered images of ten shapes."""
    folder = tmp_path_factory.mktemp("rendered")
    render_shapes(folder, classes=10, images_per_class=3, seed=0)
    return folder


@pytest.fixture(scope="session")
def train_small(rendered, tmp_path_factory):
    """Return a function that does a run of four steps, and returns its folder and results."""

    def train_in(dtype):
        folder = tmp_path_factory.mktemp("small_run")
        config = TrainingConfig(
            **{"dtype": dtype, "model": "cifar_resnet20_v1", "dataset": "shapes"},
            **{"images_per_class": 3, "train_per_class": 2, "image_size": 32, "batch_size": 10},
            **{"epochs": 2, "warmup_epochs": 0, "workers": 0},
            **{"data_dir": str(rendered), "output_dir": str(folder)},
        )
        return folder, train(config)

    return train_in


@pytest.fixture(scope="session")
def small_run(train_small) -> Path:
    """Return the folder of a run in float32."""
    return train_small("float32")[0]
