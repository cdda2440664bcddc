"""The run of planted faults: one that a test notices, one that none does, and a lost text."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mutants.__main__ import FAULTS, ROOT, read_faults

FAULTS_OF_TEST = """# a comment
E4M3 has no NaN
in mpgluon/formats/float_format.py
by {test}
-steps_below = 1 + (self.finite_only and self.has_nan)
+steps_below = 1

interval of growth
in mpgluon/formats/loss_scale.py
by {test}
-growth_interval: int = 2000
+growth_interval: int = 1000

known gap
in mpgluon/formats/loss_scale.py
by {test}
not noticed
-no such text
"""
TEST = """
from mpgluon.formats.float_format import FLOAT8_E4M3

def test_largest_number():
    assert FLOAT8_E4M3.max == 448
"""


@pytest.mark.slow
def test_a_fault_is_found_by_a_failing_test_and_otherwise_named(tmp_path):
    test, faults = tmp_path / "test_tiny.py", tmp_path / "faults.txt"
    test.write_text(TEST)
    faults.write_text(FAULTS_OF_TEST.format(test=test))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mutants", "--list", faults, "--jobs", "2"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = dict(line.split(": ", 1) for line in run.stdout.splitlines() if ": " in line)
    assert run.returncode == 1, run.stdout + run.stderr
    assert outcomes["E4M3 has no NaN"].startswith("found, ")
    assert outcomes["E4M3 has no NaN"].endswith("::test_largest_number")
    assert outcomes["interval of growth"].startswith("not noticed, 1 passed")
    assert outcomes["known gap"] == "broken, mpgluon/formats/loss_scale.py has the text 0 times"
    assert run.stdout.splitlines()[-3:] == [
        "1 of 3 found",
        "not noticed: interval of growth, and the list says that it is found",
        "broken: known gap",
    ]


def test_the_names_in_the_list_are_unique_and_its_texts_and_tests_exist():
    faults = read_faults(FAULTS)
    names = [fault.name.split()[0] for fault in faults]
    assert len(names) == len(set(names)) > 100
    for fault in faults:
        paths = [fault.file, *fault.tests]
        assert [path for path in paths if not (ROOT / path).exists()] == [], fault.name
        assert fault.source(), fault.name  # raises where the file has its text not once
