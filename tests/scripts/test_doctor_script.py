"""The doctor's script: its exit status, what it says of a network, and life without MXNet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mpgluon.diagnostics.doctor import machine
from mpgluon.diagnostics.doctor.machine import MachineFacts, MxnetFacts

import pytest
from helpers import module_from

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "doctor.py"

HEALTHY = MachineFacts(
    python=(3, 11),
    distributions={"mxnet": "1.9.1", "numpy": "1.23.5"},
    mxnet=MxnetFacts(features=frozenset({"MKLDNN"})),
)

NETWORKS = """
import mpgluon
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn


def good():
    net = nn.Dense(2, in_units=3)
    net.initialize()
    mpgluon.cast_block(net)
    return net


def trained():
    net = good()
    return net, gluon.Trainer(net.collect_params(), "adam")


def labelled():
    return (*trained(), np.zeros(2, np.float16))


def with_argument(size):
    return good()


def four():
    return 1, 2, 3, 4


def number():
    return 5


value = 5
"""


@pytest.fixture(scope="module")
def script():
    return module_from(SCRIPT)


@pytest.fixture
def _folder(tmp_path, monkeypatch):
    """Stand in a folder with networks, on a machine that is known to be healthy."""
    (tmp_path / "networks_to_check.py").write_text(NETWORKS)
    (tmp_path / "unimportable.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(machine, "gather", lambda: HEALTHY)
    yield
    for name in ("networks_to_check", "unimportable"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_folder")
def test_a_healthy_machine_gives_status_0(script, capsys):
    assert script.main([]) == 0
    assert "0 errors" in capsys.readouterr().out


@pytest.mark.usefixtures("_folder")
def test_a_machine_with_an_error_gives_status_1(script, capsys, monkeypatch):
    facts = MachineFacts(python=(3, 11), import_error="ImportError: No module named 'mxnet'")
    monkeypatch.setattr(machine, "gather", lambda: facts)
    assert script.main([]) == 1
    assert script.main(["--network", "networks_to_check:good"]) == 1
    assert "networks_to_check:good was not looked at" in capsys.readouterr().out


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize(
    ("function", "status", "said"),
    [
        ("good", 0, "parameters float16"),
        ("trained", 1, "Adam updates 2 float16 weights"),
        ("labelled", 1, "float16, the largest 0"),
    ],
)
def test_a_network_is_checked_as_far_as_it_is_given(script, capsys, function, status, said):
    assert script.main(["--network", f"networks_to_check:{function}"]) == status
    assert said in capsys.readouterr().out


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize(
    ("network", "said"),
    [
        ("networks_to_check", "is like package.module:function; received 'networks_to_check'"),
        (":good", "is like package.module:function"),
        ("", "is like package.module:function"),
        ("nowhere:good", "there is no module 'nowhere'"),
        ("networks_to_check.py:good", "there is no module 'networks_to_check.py'"),
        ("unimportable:good", "importing unimportable failed: No module named 'nothing_of_that"),
        ("networks_to_check:better", "has no function 'better'"),
        ("networks_to_check:value", "has no function 'value'"),
        ("networks_to_check:with_argument", "must take no arguments: missing a required"),
        ("networks_to_check:number", "must return a network, (net, trainer) or"),
        ("networks_to_check:four", "must return a network, (net, trainer) or"),
    ],
)
def test_a_wrong_command_line_gives_status_2_and_one_line(script, capsys, network, said):
    assert script.main(["--network", network]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def run(*arguments, cwd, **variables):
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=cwd,
        env={**os.environ, **variables},
    )


@pytest.mark.multiprocess
def test_it_works_where_mxnet_cannot_be_imported(tmp_path):
    (tmp_path / "libmxnet.so").write_bytes(b"")  # found before the real one
    done = run("--network", "train:build", cwd=tmp_path, LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert "cannot be imported: OSError" in done.stdout
    assert "libmxnet.so: file too short" in " ".join(done.stdout.split())
    assert "train:build was not looked at" in done.stdout


@pytest.mark.multiprocess
def test_it_looks_at_this_machine_and_at_a_network_in_the_current_folder(tmp_path):
    (tmp_path / "train.py").write_text(NETWORKS)
    done = run("--network", "train:good", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert "parameters float16, computation float16" in done.stdout
    assert done.stdout.startswith("This machine\n")
