"""The export script: from a run, from a zoo's name and weights, and from what is neither."""

from __future__ import annotations

import sys
from pathlib import Path

from mpgluon.tools.onnx import ServingMetadata, read_metadata

import mxnet as mx
import numpy as np
import onnxruntime
import pytest
from helpers import module_from

from recipes.training.networks import build_network

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "export_onnx.py"
NAME, SIZE = "cifar_resnet20_v1", 32


@pytest.fixture(scope="module")
def script():
    return module_from(SCRIPT)


@pytest.fixture(scope="module")
def run_folder(train_small):
    """Return the folder and the results of a float16 run of four steps."""
    return train_small("float16")


@pytest.fixture
def weights(tmp_path):
    """Return a parameter file of a network of three classes, and the network."""
    net = build_network(NAME, classes=3, image_size=SIZE, devices=[mx.cpu()])
    path = tmp_path / "weights.params"
    net.save_parameters(str(path))
    return net, path


def served(path, images):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"data": images})[0]


def some_images():
    return np.random.RandomState(0).standard_normal((2, 3, SIZE, SIZE)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_run_becomes_a_file_that_knows_its_categories(
    script, run_folder, tmp_path, capsys, dtype
):
    folder, results = run_folder
    path = tmp_path / "net.onnx"
    assert script.main([str(folder), "--dtype", dtype, "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"{NAME} after step 4, " in printed
    assert f"net.onnx: {dtype}, " in printed
    assert "the same category for 8 of 8 images (100.00%)" in printed
    classes = tuple(results["dataset"]["classes"])
    assert read_metadata(path) == ServingMetadata(NAME, SIZE, classes)
    assert served(path, some_images()).shape == (2, 10)


def test_a_zoos_network_gets_the_parameters_and_names_that_are_given(
    script, weights, tmp_path, capsys
):
    net, parameters = weights
    path, names = tmp_path / "net.onnx", tmp_path / "names.txt"
    names.write_text("one\ntwo\nthree\n")
    arguments = [NAME, f"--parameters={parameters}", f"--class-names={names}"]
    assert script.main([*arguments, f"--image-size={SIZE}", f"--output={path}"]) == 0
    assert "with the parameters of" in capsys.readouterr().out
    assert read_metadata(path) == ServingMetadata(NAME, SIZE, ("one", "two", "three"))
    expected = net(mx.nd.array(some_images())).asnumpy()
    # FP32 on both sides; gamma of the longest sum, 576 terms, is 3.4e-5 in each of 20 layers.
    np.testing.assert_allclose(served(path, some_images()), expected, rtol=1e-3, atol=1e-3)


def test_without_onnxruntime_the_file_is_written_and_not_compared(
    script, weights, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    arguments = [NAME, f"--parameters={weights[1]}", "--classes=3", f"--image-size={SIZE}"]
    assert script.main([*arguments, f"--output={tmp_path / 'net.onnx'}"]) == 0
    assert "not compared with the network" in capsys.readouterr().out
    assert (tmp_path / "net.onnx").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([NAME], "needs --parameters FILE"),
        ([NAME, "--parameters=nowhere.params"], "there is no parameter file nowhere.params"),
        (
            [NAME, "--parameters={weights}", "--classes=4"],
            "would be random numbers; give --classes",
        ),
        ([NAME, "--parameters={weights}", "--class-names=nowhere.txt"], "nowhere.txt"),
        (["resnet18_v1", "--parameters={weights}", "--classes=3"], "does not fit this network"),
        (["no_such_network", "--parameters={weights}"], "no model zoo has a network called"),
        (["{folder}"], "holds no checkpoints"),
        (["{folder}/missing.npz"], "there is no checkpoint"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(
    script, weights, tmp_path, capsys, arguments, message
):
    filled = [a.format(weights=weights[1], folder=tmp_path) for a in arguments]
    sizes = [f"--image-size={SIZE}", f"--output={tmp_path / 'net.onnx'}"]
    assert script.main([*filled, *sizes]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "net.onnx").exists()
