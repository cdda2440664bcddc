"""The names that ``mpgluon.diagnostics`` offers, each imported on first use."""

from __future__ import annotations

import subprocess
import sys

from mpgluon import diagnostics

import pytest


@pytest.mark.parametrize("name", diagnostics.__all__)
def test_every_name_is_found_where_it_is_defined(name):
    found = getattr(diagnostics, name)
    assert found.__name__ == name
    assert found.__module__.startswith("mpgluon_tools.")


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = diagnostics.no_such_name


@pytest.mark.multiprocess
def test_the_package_itself_imports_neither_matplotlib_nor_its_own_parts():
    code = (
        "import sys, mpgluon.diagnostics; "
        "others = 'matplotlib', 'mpgluon_tools.diagnostics.', 'mpgluon_tools.recorder'; "
        "print([m for m in sys.modules if m.startswith(others)])"
    )
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert finished.stdout.strip() == "[]"
