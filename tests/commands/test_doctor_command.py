"""``mpgluon doctor``: its exit status, findings about a network, and life without MXNet."""

from __future__ import annotations

from pathlib import Path

from mpgluon_tools import commands
from mpgluon_tools.diagnostics.doctor import machine
from mpgluon_tools.diagnostics.doctor.machine import MachineFacts, MxnetFacts

import pytest
from numerics_runs import Run

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
HEALTHY = MachineFacts(
    python=(3, 11),
    distributions={"mxnet": "1.9.1", "numpy": "1.23.5"},
    mxnet=MxnetFacts(features=frozenset({"MKLDNN"})),
)


@pytest.fixture
def _healthy(monkeypatch):
    monkeypatch.setattr(machine, "gather", lambda: HEALTHY)


@pytest.mark.usefixtures("_healthy")
def test_a_healthy_machine_gives_status_0(printed):
    assert "0 errors" in printed("doctor")


def test_a_machine_with_an_error_gives_status_1(printed, monkeypatch):
    facts = MachineFacts(python=(3, 11), import_error="ImportError: No module named 'mxnet'")
    monkeypatch.setattr(machine, "gather", lambda: facts)
    printed("doctor", status=1)
    for arguments in (["mine:good"], ["--network=mine:good"]):
        said = printed("doctor", *arguments, status=1)
        assert "mine:good was not looked at: that needs MXNet." in said


@pytest.mark.usefixtures("_healthy")
@pytest.mark.parametrize(
    ("function", "status", "said"),
    [
        ("good", 0, "parameters float16"),
        ("trained", 1, "Adam updates 2 float16 weights"),
        ("labelled", 1, "float16, the largest 0"),
    ],
)
def test_a_network_is_checked_as_far_as_it_is_given(printed, function, status, said):
    output = printed("doctor", f"mine:{function}", status=status)
    assert said in output
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.usefixtures("_healthy")
@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("", "like package.module:function"),
        ("mine", "received 'mine'; choose a function of this module: mine:small, mine:two, "),
        ("nowhere:good", "there is no module 'nowhere'"),
        ("mine:better", "has no function 'better'; write one that returns a network, or (net, tr"),
        ("mine:broken", "was called and failed: ZeroDivisionError: division by zero ("),
        ("mine:number", "must return a network, or (net, trainer), or"),
        ("mine:four", "must return a network, or (net, trainer), or"),
    ],
)
def test_a_wrong_command_line_gives_status_2_and_one_line(refused, network, message):
    assert message in refused("doctor", network)


@pytest.mark.multiprocess
def test_it_works_where_mxnet_cannot_be_imported(started, folder):
    (folder / "libmxnet.so").write_bytes(b"")  # found before the real one
    command = ("doctor", "mine:good")
    done = started(*command, module="mpgluon_command", LD_LIBRARY_PATH=str(folder))
    assert (done.returncode, done.stderr) == (1, "")
    assert "cannot be imported: OSError" in done.stdout
    assert "libmxnet.so: file too short" in " ".join(done.stdout.split())
    assert "mine:good was not looked at" in done.stdout
    done = started("bench", "mine:small", module="mpgluon_command", LD_LIBRARY_PATH=str(folder))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: MXNet cannot be imported: ")
    assert done.stderr.endswith("`mpgluon doctor` says what this machine lacks\n")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_it_looks_at_this_machine_and_at_a_network_in_the_current_folder(started):
    done = started("doctor", "mine:good")
    assert done.returncode in (0, 1), done.stderr
    assert "parameters float16, computation float16" in done.stdout
    assert done.stdout.startswith("This machine\n")


@pytest.mark.usefixtures("_healthy")
def test_what_a_recording_warns_of_is_a_finding(printed, tmp_path):
    said = printed("doctor", "--recording", Run().train(tmp_path / "healthy", steps=3))
    assert "3 recorded steps to step 3: nothing is about to fail" in " ".join(said.split())
    stuck = Run(cast=None, dropout=0.0)
    stuck.options["learning_rate"] = 1e-9
    said = " ".join(printed("doctor", "--recording", stuck.train(tmp_path / "stuck")).split())
    assert "lost updates since step 1: 100 % of the updates of 0.weight are lost" in said
    assert "why: a weight that no update changes does not learn" in said


@pytest.mark.usefixtures("_healthy")
def test_a_folder_without_a_recording_is_an_error_in_a_line(capsys):
    assert commands.main(["doctor", "--recording", "nothing"]) == 2
    assert "error: nothing has no recorded step" in capsys.readouterr().err
