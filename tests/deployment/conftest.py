"""Fixtures: the networks of the tests of precision."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cast"))


@pytest.fixture(autouse=True)
def _free_the_network():
    """Blocks that are cast refer to each other: Python frees their gigabytes when it looks."""
    yield
    gc.collect()
