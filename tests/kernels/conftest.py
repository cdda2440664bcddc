"""Libraries that are compiled and checked once for all tests, and an empty cache."""

import platform

from mpgluon import kernels
from mpgluon.kernels import compiling, library, processor

import pytest


@pytest.fixture(scope="session")
def built_for(tmp_path_factory):
    """Return a function that compiles the library for a level as `make wheel` does, once."""
    folder = tmp_path_factory.mktemp("libraries")

    def build(level):
        if platform.machine() != "x86_64":
            pytest.skip(f"levels are x86-64's; this processor is {platform.machine()}")
        if not compiling.compiler():
            pytest.skip("there is no C++ compiler")
        path = folder / f"native-{level}.so"
        if not path.exists():
            assert compiling.compile_library(path, level, for_older_systems=True) == ""
        return path

    return build


@pytest.fixture(scope="session")
def good_library(native_operators):  # noqa: ARG001
    """Return the library that is used here."""
    if "x86-64-v3" not in processor.levels():
        pytest.skip(f"this processor cannot run x86-64-v3: it is {processor.level()}")
    return kernels.status().path


_GOOD = set()


def check_once(path, check=library.check_library):
    """Check a library unless one with the same bytes has passed: it takes a process and seconds."""
    content = path.read_bytes()
    if content not in _GOOD:
        check(path)
        _GOOD.add(content)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty cache and no prebuilt library; the folder where prebuilt ones may be put."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MPGLUON_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    monkeypatch.setattr(library, "_PREBUILT", folder)
    monkeypatch.setattr(library, "check_library", check_once)
    return folder
