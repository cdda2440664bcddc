"""Fixtures of all tests: the place of the photographs, fresh random states, Ctrl-C."""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import mpgluon  # noqa: F401 - before any test module imports MXNet, which newer NumPy breaks

import numpy as np
import pytest

with suppress(ImportError):  # the environments of other libraries lack it
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)  # a busy machine is not a fault
    settings.load_profile("untimed")

os.environ["COLUMNS"] = "80"  # whatever the terminal is

SHARED = Path(__file__).resolve().parents[1] / "shared"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run be limited to some variants of each test."""
    parser.addoption("--cases", type=int, metavar="N", help="of each test at most N variants")


@pytest.hookimpl(tryfirst=True)  # before those of `-m` are chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the variants of a test with ``sampled(n)`` as left out, except every n-th.

    Which ones follows from their names alone, in no pattern; so do those of ``--cases N``.
    """
    variants = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            variants[item.function].append(item)
    for found in variants.values():
        (share,) = found[0].get_closest_marker("sampled").args
        found.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in found[math.ceil(len(found) / share) :]:
            item.add_marker(pytest.mark.left_out)
    if config.option.cases is not None:
        kept = _first_variants(items, config.option.cases)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def _first_variants(items: list[pytest.Item], number: int) -> set[pytest.Item]:
    """Return at most so many variants of each test."""
    chosen = defaultdict(list)
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        chosen[item.function].append(item)
    return {item for found in chosen.values() for item in found[:number]}


def pytest_collection_finish() -> None:
    """Hide the modules and tests, which live to the end, from the garbage collector.

    Tests that free networks with ``gc.collect()`` take 0.01 s instead of 0.2 s for it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def caltech101_mini() -> Path:
    """Return the folder of caltech101-mini, which lies next to the checkout on some machines."""
    folder = SHARED / "caltech101-mini"
    if not (folder / "101_ObjectCategories").is_dir():
        pytest.skip("caltech101-mini (600 photographs) is not next to this checkout")
    return folder


@pytest.fixture(scope="session")
def native_operators() -> None:
    """Skip without a C++ compiler or a prebuilt library; fail if they are there and do not serve.

    For tests that need native operators: ``@pytest.mark.usefixtures("native_operators")``.
    """
    from mpgluon import kernels

    result = kernels.build(again=True)
    if result.state in ("no compiler", "switched off"):
        pytest.skip(result.sentence)
    assert kernels.load(), f"{result.sentence}\n{result.words}"


@pytest.fixture(scope="session")
def native_bfloat16() -> None:
    """Skip where oneDNN has no bfloat16 of its own: for tests of MXNet's, or of the native path."""
    from mpgluon.kernels.bfloat16 import has_native_bfloat16

    if not has_native_bfloat16():
        pytest.skip("oneDNN has no bfloat16 of its own on this processor")


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Let the processes of tests be interrupted, where a shell has put the tests behind a prompt.

    A process that a shell starts in the background ignores Ctrl-C, and so do its children.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import mxnet as mx

    random.seed(0)
    np.random.seed(0)
    mx.random.seed(0)


@pytest.fixture
def numpy_interface() -> Iterator[None]:
    """Switch MXNet's NumPy interface on for one test."""
    from interfaces import interface

    with interface(in_numpy=True):
        yield
