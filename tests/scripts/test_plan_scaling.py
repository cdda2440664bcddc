"""The planning script: a user's cluster, what it refuses, and a real measurement over MPI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import module_from

from benchmarks.measured_link import fit_link

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "plan_scaling.py"


@pytest.fixture(scope="module")
def script():
    return module_from(SCRIPT)


SMALL = ["--model", "resnet18_v1", "--image-size", "32", "--gpus", "8", "64"]


def test_a_users_cluster_is_in_the_tables(script, capsys):
    # 11.7 million parameters; 8 GPUs in 8 machines at 1 Gbit/s: 2 * 7 / 8 * 46.8 MB, 0.65 s.
    options = ["--link-gbit-per-s", "1", "--gpus-per-machine", "1", "--latency-us", "0"]
    speeds = ["--images-per-second", "float16=1000", "float32=500"]
    assert script.main([*SMALL, *options, *speeds]) == 0
    output = capsys.readouterr().out
    assert "resnet18_v1: 11.7 million parameters" in output
    assert "your GPU" in output
    (row,) = re.findall(r"^ *8  1 Gbit/s, 1 per machine +([\d.]+) +([\d.]+) +0.00$", output, re.M)
    assert float(row[0]) == pytest.approx(2 * 7 / 8 * 46.8 * 8, rel=2e-3)  # three digits of 46.8
    assert float(row[1]) == pytest.approx(float(row[0]) / 2, abs=0.1)


def test_without_a_link_there_are_networks_by_name_and_tables_for_a_document(script, capsys):
    assert script.main([*SMALL, "--markdown", "--inside-gbit-per-s", "1000"]) == 0
    output = capsys.readouterr().out
    for name in ("25 GbE", "100 GbE", "HDR InfiniBand", "1000 Gbit/s in one machine"):
        assert f"| {name}" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "12"], "12 GPUs do not fill machines of 8"),
        (["--link-gbit-per-s", "0"], "gbit_per_s must be positive"),
        (["--images-per-second", "float16"], "takes FORMAT=N, as in float16=2180; received"),
        (["--images-per-second", "float16=10"], "the speed of your GPU in float32 is not known"),
        (["--images-per-second", "int8=10"], "received 10 for 'int8'"),
        (["--model", "resnet1000"], "resnet1000"),
        (["--document", "nowhere.md"], "nowhere.md"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(script, capsys, options, message):
    assert script.main([*SMALL, *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--gpus", "--batch-size", "--rounds", "--image-size"])
def test_numbers_below_one_are_refused(script, capsys, option):
    with pytest.raises(SystemExit) as stop:
        script.main([option, "0"])
    assert stop.value.code == 2
    assert f"argument {option}: must be at least 1, received 0" in capsys.readouterr().err


def test_a_document_gets_its_tables_and_figure(script, tmp_path):
    source = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    emptied = re.sub(r"(<!-- table: \w+ -->\n).*?(<!-- end)", r"\1\2", source, flags=re.S)
    assert emptied != source
    (tmp_path / "scaling.md").write_text(emptied, encoding="utf-8")
    assert script.main(["--document", str(tmp_path / "scaling.md")]) == 0
    assert (tmp_path / "scaling.md").read_text(encoding="utf-8") == source
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.multiprocess
def test_a_measurement_over_mpi_prints_times_and_the_link_that_fits_them(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "distributed"))
    from distributed_helpers import mpirun, succeeded

    output = succeeded(mpirun(2, SCRIPT, "--measure", "--rounds", "3")).output
    rows = re.findall(r"^ *([\d.]+) +([\d.]+)$", output, re.M)
    seconds = {round(1e6 * float(size)): float(ms) / 1e3 for size, ms in rows}
    assert len(seconds) == 7
    (found,) = re.findall(r"--link-gbit-per-s (\S+) --latency-us (\S+)", output)
    # The times are printed with three digits behind the point of a millisecond, the link with three
    # in all; the smallest sum may take 10 us, of which that is a twentieth.
    assert float(found[0]) == pytest.approx(fit_link(2, seconds).gbit_per_s, rel=0.1)


@pytest.mark.multiprocess
def test_one_process_has_nothing_to_measure(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "distributed"))
    from distributed_helpers import mpirun

    job = mpirun(1, SCRIPT, "--measure")
    assert job.status == 2
    assert "error: one process sums nothing" in job.output
