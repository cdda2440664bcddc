"""Fixtures of this folder: a small data set, and runs that use all of it."""

import pytest
from training_helpers import Run, run

from recipes.data import render_shapes


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """Return a folder with the rendered data set that `quick_config` asks for."""
    folder = tmp_path_factory.mktemp("shapes")
    render_shapes(folder, classes=10, images_per_class=6, seed=0)
    return folder


@pytest.fixture(scope="session")
def float32_run(shapes, tmp_path_factory) -> Run:
    return run(shapes, tmp_path_factory.mktemp("float32"))


@pytest.fixture(scope="session")
def float16_run(shapes, tmp_path_factory) -> Run:
    return run(shapes, tmp_path_factory.mktemp("float16"), dtype="float16")
