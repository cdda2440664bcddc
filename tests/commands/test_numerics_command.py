"""``mpgluon numerics``: one recording, a comparison of two, and folders without one."""

from __future__ import annotations

import pytest
from helpers import run_python
from numerics_runs import Run


def test_a_recording_is_a_table_that_fits_80_columns(printed, tmp_path):
    folder = Run().train(tmp_path / "run" / "numerics", steps=20, every=1)
    output = printed("numerics", folder)
    assert output.startswith(f"20 recorded steps of 20, 0 skipped; {folder}\n")
    assert all(len(line) <= 80 for line in output.splitlines()[1:])
    assert "\nNothing is about to fail.\n" in output
    assert printed("numerics", tmp_path / "run") == output


def test_a_page_is_written(printed, tmp_path):
    folder = Run().train(tmp_path / "numerics", steps=3)
    output = printed("numerics", folder, "--html", tmp_path / "page.html")
    assert f"A map of all layers over time: {tmp_path / 'page.html'}" in output
    assert "<html" in (tmp_path / "page.html").read_text()


def test_a_recorded_overflow_of_the_run_is_named(printed, tmp_path):
    Run().train(tmp_path / "my run" / "numerics", steps=2)
    overflow = tmp_path / "my run" / "overflows" / "overflow-00000002.npz"
    overflow.parent.mkdir()
    overflow.touch()
    assert f"again: mpgluon replay '{overflow}'\n" in printed("numerics", tmp_path / "my run")


def test_warnings_are_printed_and_are_the_exit_status(printed, tmp_path):
    run = Run(dropout=0.0)
    run.options["learning_rate"] = 1e-9
    run.cast = None
    output = printed("numerics", run.train(tmp_path, steps=1), status=1)
    assert "\nstep 1: 100 % of the updates of 0.weight are lost" in output


def test_two_recordings_that_part_and_two_that_do_not(printed, tmp_path):
    first = Run().train(tmp_path / "first", steps=3)
    other = Run()
    other.images[1] += 1
    second = other.train(tmp_path / "second", steps=3)
    output = printed("numerics", first, second, status=1)
    assert output.startswith("Step 2, before the forward pass: input 0: 16 of the 16 values")
    assert "\ntensor " in output
    assert printed("numerics", first, first) == "No difference in 3 recorded steps, 1 to 3.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing has no recorded step"),
        (["nothing", "nothing", "--html=page.html"], "nothing has no recorded step"),
    ],
)
def test_bad_input(refused, arguments, message):
    assert message in refused("numerics", *arguments)


def test_a_reader_that_stops_reading_is_not_an_error(tmp_path):
    folder = Run().train(tmp_path / "numerics", steps=2)
    code = (
        "import subprocess, sys\n"
        f"command = [sys.executable, '-m', 'mpgluon', 'numerics', {str(folder)!r}]\n"
        "reader = subprocess.Popen(['true'], stdin=subprocess.PIPE)\n"
        "reader.wait()\n"
        "done = subprocess.run(command, stdout=reader.stdin, stderr=subprocess.PIPE)\n"
        "print(done.returncode, done.stderr.decode().count('error'))\n"
    )
    assert run_python(code).stdout.split() == ["0", "0"]
