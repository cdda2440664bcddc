"""What all tests share: the place of the photographs, and fresh random states."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import mpgluon  # noqa: F401 - before any test module imports MXNet, which newer NumPy breaks

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def caltech101_mini() -> Path:
    """Return the folder of caltech101-mini, which lies beside the checkout on some machines."""
    folder = SHARED / "caltech101-mini"
    if not (folder / "101_ObjectCategories").is_dir():
        pytest.skip("caltech101-mini (600 photographs) is not beside this checkout")
    return folder


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import mxnet as mx

    random.seed(0)
    np.random.seed(0)
    mx.random.seed(0)
