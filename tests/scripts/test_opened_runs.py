"""Commands open runs, and state dicts of other frameworks."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mpgluon
from mpgluon.tools.onnx import ServingMetadata, read_metadata
from mpgluon_tools import commands
from mpgluon_tools.commands import checkout
from mpgluon_tools.serving import page

import mxnet as mx
import pytest

from recipes import opened_runs

ROOT = Path(__file__).resolve().parents[2]
NAME = "cifar_resnet20_v1"
QUICK = {
    "export": [],
    "serve": ["--port=0"],
    "predict": ["cat.jpg"],
    "diagnose": [],
    "bench": ["--no-memory"],
}


@pytest.fixture(scope="module")
def run_folder(train_small):
    """Return the folder and the results of a float16 run of four steps."""
    return train_small("float16")


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Return a function that runs a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: commands.main(list(map(str, arguments)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_run_becomes_a_file_that_knows_its_categories(command, run_folder, capsys, dtype):
    folder, results = run_folder
    assert command("export", folder, "--dtype", dtype, "--output", "net.onnx") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{NAME} after step 4, {folder}")
    assert f"net.onnx: {dtype}, " in printed
    assert "the same category for 8 of 8 images (100.00%)" in printed
    classes = tuple(results["dataset"]["classes"])
    assert read_metadata("net.onnx") == ServingMetadata(NAME, 32, classes)


def test_a_run_that_took_whole_images_is_served_those(command, run_folder, capsys, monkeypatch):
    run = opened_runs.open_run(run_folder[0], mx.cpu())
    run = replace(run, config=replace(run.config, shifts=True))
    monkeypatch.setattr(opened_runs, "open_run", lambda *_: run)
    assert command("export", run_folder[0]) == 0
    assert "assumed" not in capsys.readouterr().out
    assert read_metadata("network.onnx").centre_crop == 1


def test_a_run_is_served_with_its_name_and_step(command, run_folder, capsys, monkeypatch):
    shown = []

    class NoServer:
        def run(self):
            pass

    def create_server(app, **_):
        shown.append(app.test_client().get("/", base_url="http://127.0.0.1").text)
        return NoServer()

    monkeypatch.setattr(page.waitress, "create_server", create_server)
    assert command("serve", run_folder[0], "--port", "0") == 0
    checkpoint = run_folder[0] / "checkpoints" / "step-00000004.npz"
    assert f"{NAME}: {NAME} after step 4, {checkpoint}\n" in capsys.readouterr().out
    assert f"<h1>{NAME} in 32 and 16 bits</h1>" in shown[0]
    assert "10 categories" in shown[0]


RUN_TAKING = pytest.mark.parametrize("name", [*QUICK])


@RUN_TAKING
def test_a_run_without_its_checkpoint_gets_one_line_and_status_2(command, capsys, tmp_path, name):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for run, message in [
        ("run", "run holds no checkpoints/step-*.npz of a run"),
        ("missing.npz", "there is no checkpoint missing.npz"),
    ]:
        assert command(name, run, *QUICK[name]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"


@RUN_TAKING
def test_a_run_is_not_given_what_belongs_to_other_networks(command, run_folder, capsys, name):
    options = ["--classes=7", "--image-size=16"]
    if name != "bench":
        options = ["--parameters=other.params", *options]
    of_photographs = ["--mean", "--std", "--crop"] * (name in ("export", "predict", "serve"))
    options += [f"{option}=none" for option in of_photographs]
    assert command(name, run_folder[0], *options, *QUICK[name]) == 2
    said = capsys.readouterr().err
    assert "is a run, whose parameters, categories and images are its own" in said
    listed = ", ".join(option.partition("=")[0] for option in options)
    assert said.endswith(f"; leave out {listed}\n")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_run_names_photographs_in_another_program(command, run_folder, capsys, dtype):
    folder, results = run_folder
    photographs = sorted(Path(results["config"]["data_dir"]).glob("shapes*/*/*.jpg"))[::40]
    assert command("predict", folder, *photographs, "--dtype", dtype, "--top", 10) == 0
    said = capsys.readouterr().out.splitlines()
    classify = mpgluon.load_classifier(folder, dtype)
    assert classify.classes == tuple(results["dataset"]["classes"])
    for photograph, line in zip(photographs, said, strict=True):
        answers = ", ".join(f"{name} {share:.3f}" for name, share in classify(photograph))
        assert line == f"{photograph}: {answers}"


def test_a_step_of_a_run_is_timed_on_its_images(command, run_folder, capsys):
    options = ("--batch-size=6", "--rounds=1", "--no-memory")
    assert command("bench", run_folder[0], *options) == 0
    assert "a training step with a batch of 6, 1 round in turn" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["export", "predict", "serve"])
def test_a_file_of_parameters_may_be_a_state_dict(command, capsys, name, tmp_path):
    (tmp_path / "net.pth").write_bytes(b"not a state dict")
    assert command(name, NAME, "--parameters=net.pth", *QUICK[name]) == 2
    assert "net.pth cannot be read as a state dict" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["run.npz"], "run.npz is a run of train_caltech.py"),
        ([NAME, "--parameters=net.pth"], "net.pth is named as a state dict"),
    ],
)
def test_without_recipes_advice_comes(command, capsys, monkeypatch, tmp_path, arguments, what):
    monkeypatch.setattr(checkout, "_FOLDER", tmp_path)  # without recipes/
    assert command("export", *arguments) == 2
    advice = "run pip install 'mpgluon[recipes]', then this command again"
    expected = f"error: {what}, which needs the extra recipes: {advice}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_command_that_is_called_elsewhere_finds_its_own_recipes(run_folder, tmp_path):
    installed = tmp_path / "installed"  # as by pip install -e, which adds no folder to the path
    metadata = installed / "mpgluon-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mpgluon\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[mpgluon.networks]\nruns = recipes.opened_runs\n")
    for name in ("mpgluon", "mpgluon_tools", "mpgluon_command.py"):
        (installed / name).symlink_to(ROOT / name)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text("raise SystemExit('other recipes')\n")
    options = {"capture_output": True, "text": True, "timeout": 180, "check": False}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mpgluon_command", "export", run_folder[0]],
        **{"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(installed)}, **options},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert read_metadata(tmp_path / "network.onnx").image_size == 32
