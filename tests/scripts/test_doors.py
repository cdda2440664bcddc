"""Scripts that are doors to commands: they open runs, and state dicts of other frameworks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from mpgluon.tools.onnx import ServingMetadata, read_metadata
from mpgluon_tools.serving import page

import mxnet as mx
import pytest
from helpers import module_from

from recipes import opened_runs

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAME = "cifar_resnet20_v1"


@pytest.fixture(scope="module")
def run_folder(train_small):
    """Return the folder and the results of a float16 run of four steps."""
    return train_small("float16")


@pytest.fixture
def door(monkeypatch, tmp_path):
    """Return a function that runs a script in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda script, *arguments: module_from(SCRIPTS / f"{script}.py").main(
        list(map(str, arguments))
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_run_becomes_a_file_that_knows_its_categories(door, run_folder, capsys, dtype):
    folder, results = run_folder
    assert door("export_onnx", folder, "--dtype", dtype, "--output", "net.onnx") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{NAME} after step 4, {folder}")
    assert f"net.onnx: {dtype}, " in printed
    assert "the same category for 8 of 8 images (100.00%)" in printed
    classes = tuple(results["dataset"]["classes"])
    assert read_metadata("net.onnx") == ServingMetadata(NAME, 32, classes)


def test_a_run_that_took_whole_images_is_served_whole_ones(door, run_folder, capsys, monkeypatch):
    run = opened_runs.open_run(run_folder[0], mx.cpu())
    run = replace(run, config=replace(run.config, shifts=True))
    monkeypatch.setattr(opened_runs, "open_run", lambda *_: run)
    assert door("export_onnx", run_folder[0]) == 0
    assert "assumed" not in capsys.readouterr().out
    assert read_metadata("network.onnx").centre_crop == 1


def test_a_run_is_served_with_its_name_and_step(door, run_folder, capsys, monkeypatch):
    shown = []

    class NoServer:
        def run(self):
            pass

    def create_server(app, **_):
        shown.append(app.test_client().get("/", base_url="http://127.0.0.1").text)
        return NoServer()

    monkeypatch.setattr(page.waitress, "create_server", create_server)
    assert door("serve", run_folder[0], "--port", "0") == 0
    checkpoint = run_folder[0] / "checkpoints" / "step-00000004.npz"
    assert f"{NAME}: {NAME} after step 4, {checkpoint}\n" in capsys.readouterr().out
    assert f"<h1>{NAME} in 32 and 16 bits</h1>" in shown[0]
    assert "10 categories" in shown[0]


@pytest.mark.parametrize("script", ["export_onnx", "serve", "diagnose"])
@pytest.mark.parametrize(
    ("name", "message"), [(".", "holds no checkpoints"), ("missing.npz", "there is no checkpoint")]
)
def test_other_folders_than_runs_get_one_line_and_status_2(door, capsys, script, name, message):
    assert door(script, name) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("script", ["export_onnx", "serve", "diagnose"])
def test_a_run_is_not_given_what_belongs_to_other_networks(door, run_folder, capsys, script):
    options = ["--parameters=other.params", "--classes=7", "--image-size=16"]
    of_photographs = ["--mean", "--std", "--crop"] * (script != "diagnose")
    options += [f"{option}=none" for option in of_photographs]
    assert door(script, run_folder[0], *options) == 2
    said = capsys.readouterr().err
    assert "is a run, whose parameters, categories and images are its own" in said
    listed = ", ".join(["--parameters, --classes, --image-size", *of_photographs])
    assert said.endswith(f"; leave out {listed}\n")


@pytest.mark.parametrize("script", ["export_onnx", "serve"])
def test_a_name_of_a_zoo_needs_parameters_which_may_be_a_state_dict(door, capsys, script, tmp_path):
    assert door(script, NAME) == 2
    said = capsys.readouterr().err
    assert f"{NAME} is not a run, and a network of a model zoo needs --parameters FILE" in said
    (tmp_path / "net.pth").write_bytes(b"not a state dict")
    assert door(script, NAME, "--parameters=net.pth") == 2
    assert "net.pth" in capsys.readouterr().err


@pytest.mark.multiprocess
def test_the_doctor_is_a_script_that_needs_no_mxnet(tmp_path):
    (tmp_path / "mxnet.py").write_text("raise OSError('libmxnet.so: file too short')\n")
    done = subprocess.run(
        [sys.executable, SCRIPTS / "doctor.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{SCRIPTS.parent}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "cannot be imported: OSError" in done.stdout
