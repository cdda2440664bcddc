"""``mpgluon export``: from a function, from a zoo's name and weights, and from neither."""

from __future__ import annotations

import sys

from mpgluon.tools.onnx import ServingMetadata, read_metadata
from mpgluon.tools.zoo import build_network
from mpgluon_tools import commands

import mxnet as mx
import numpy as np
import onnxruntime
import pytest
from helpers import initialized
from mxnet.gluon import nn

NAME, SIZE = "cifar_resnet20_v1", 32


@pytest.fixture
def weights():
    """Return a network of three classes, which is in the file ``weights.params``."""
    net = build_network(NAME, classes=3, image_size=SIZE, devices=[mx.cpu()])
    net.save_parameters("weights.params")
    return net


def served(path, *inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip((one.name for one in session.get_inputs()), inputs)))


def noise(*shape):
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_function_becomes_a_file_that_knows_its_categories(printed, folder, dtype):
    (folder / "names.txt").write_text("cat\ndog\nkoala\n", "utf-8-sig")  # as Windows does
    options = ("--image-size=8", "--class-names=names.txt", f"--dtype={dtype}")
    output = printed("export", "mine:small", *options, "--output=net.onnx")
    assert output.startswith("HybridSequential from mine:small.\n")
    assert f"\nnet.onnx: {dtype}, " in output
    assert "the same category for 8 of 8 images (100.00%)" in output
    expected = ServingMetadata("mine:small", 8, ("cat", "dog", "koala"))
    assert read_metadata("net.onnx") == expected
    (logits,) = served("net.onnx", noise(5, 3, 8, 8))
    assert logits.shape == (5, 3)


@pytest.mark.parametrize(
    ("options", "expected", "assumed"),
    [
        ([], {}, "--mean, --std, --crop"),
        (["--std=1,1,1"], {"std": (1, 1, 1)}, "--mean, --crop"),
        (["--mean=0.45,0,0.5", "--std=0.25,0.25,0.2", "--crop=0.5"],
            {"mean": (0.45, 0, 0.5), "std": (0.25, 0.25, 0.2), "centre_crop": 0.5}, None),
        (["--mean=none", "--std=none", "--crop=none"],
            {"mean": (0, 0, 0), "std": (1 / 255, 1 / 255, 1 / 255), "centre_crop": 1}, None),
    ],
)  # fmt: skip
def test_how_photographs_are_prepared_is_in_the_file_and_said(printed, options, expected, assumed):
    output = printed("export", "mine:small", "--image-size=8", *options)
    metadata = ServingMetadata("mine:small", 8, **expected)
    assert read_metadata("network.onnx") == metadata
    assert metadata.preprocessing in output
    words = f"assumed as for ImageNet: {assumed}."
    assert (words in output) == ("assumed" in output) == bool(assumed)


@pytest.mark.parametrize("command", ["export", "serve"])
@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--mean", ["0.5", "0.5,0.5", "123.7,116.3,103.5", "0,0,nan", "-0.1,0,0", "grey", ""]),
        ("--std", ["1,1", "1,0,1", "58.4,57.1,57.4", "nan,1,1", "1,1,inf", "1,1,none"]),
        ("--crop", ["0", "1.01", "-0.5", "nan", "1,1", "whole"]),
    ],
)
def test_numbers_that_no_photograph_has_are_refused(capsys, command, option, values):
    for value in values:
        with pytest.raises(SystemExit, match="2"):
            commands.main([command, "mine:small", f"{option}={value}"])
        said = capsys.readouterr().err
        assert f"argument {option}: must be " in said
        assert f"or none; received {value!r}" in said


def test_a_zoos_network_gets_the_parameters_and_names_that_are_given(printed, folder, weights):
    (folder / "names.txt").write_text("one\ntwo\nthree\n")
    arguments = (NAME, "--parameters=weights.params", "--class-names=names.txt")
    output = printed("export", *arguments, f"--image-size={SIZE}")
    assert "Parameters from weights.params." in output
    assert read_metadata("network.onnx").classes == ("one", "two", "three")
    images = noise(2, 3, SIZE, SIZE)
    expected = weights(mx.nd.array(images)).asnumpy()
    # FP32 on both sides; gamma of the longest sum, 576 terms, is 3.4e-5 in each of 20 layers.
    np.testing.assert_allclose(served("network.onnx", images)[0], expected, rtol=1e-3, atol=1e-3)


def test_a_function_may_leave_shapes_to_the_parameter_file(printed, folder):
    (folder / "deferred.py").write_text(
        "from mxnet.gluon import nn\n\n\ndef dense():\n    net = nn.Dense(5)\n"
        "    net.initialize()\n    return net\n"
    )
    trained = initialized(nn.Dense(5, in_units=4), mx.init.Xavier())
    trained.save_parameters("dense.params")
    options = ("--parameters=dense.params", "--input-shape=1,4", "--output=dense.onnx")
    assert "Parameters from dense.params." in printed("export", "deferred:dense", *options)
    inputs = noise(2, 4)
    expected = trained(mx.nd.array(inputs)).asnumpy()
    np.testing.assert_allclose(served("dense.onnx", inputs)[0], expected, rtol=1e-5, atol=1e-6)


def test_a_network_of_other_input_is_compared_by_its_numbers(printed):
    output = printed("export", "mine:dense", "--input-shape=1,5", "--output=dense.onnx")
    assert "in FP32, on noise: largest relative error of a result " in output
    (logits,) = served("dense.onnx", noise(4, 5))
    assert logits.shape == (4, 3)


def test_a_program_for_pytorch_is_a_folder_with_its_check(printed, refused, folder):
    options = ("--image-size=8", "--to=torch", "--output=my network")
    output = printed("export", "mine:small", *options)
    assert "assumed" not in output
    assert output.splitlines()[-1].startswith("python 'my network/check.py' compares it")
    assert "class Network(nn.Module):" in (folder / "my network" / "model.py").read_text()
    names = {path.name for path in (folder / "my network").iterdir()}
    assert names == {"model.py", "model.safetensors", "check.py", "check.npz"}
    wrong = ("export", "mine:small", "--to=torch", "--dtype=float16", "--crop=0.5")
    assert "no preprocessing and no names; leave out --crop, --dtype" in refused(*wrong)
    (folder / "names.txt").write_text("a\nb\nc\n")
    assert "leave out --class-names" in refused(*wrong[:3], "--class-names=names.txt")
    both = (*wrong[:3], "--image-size=8", "--input-shape=1,3,8,8")
    assert "--input-shape is not of images; leave out --image-size" in refused(*both)


def test_without_onnxruntime_the_file_is_written_and_not_compared(printed, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    output = printed("export", "mine:small", "--image-size=8")
    assert 'not compared with the network: onnxruntime is not installed; pip install "mp' in output
    assert (folder / "network.onnx").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([NAME], "is neither module:function nor a run, and a network of a model zoo needs --par"),
        ([NAME, "--parameters=nowhere.params"], "there is no parameter file nowhere.params"),
        ([NAME, "--parameters=weights.params", "--classes=4"], "give --classes or --class-names"),
        ([NAME, "--parameters=weights.params", "--class-names=nowhere.txt"], "nowhere.txt"),
        (["resnet18_v1", "--parameters=weights.params", "--classes=3"], "does not fit this netw"),
        (["no_such_network", "--parameters=weights.params"], "no model zoo has a network called"),
        (
            ["runs/latest"],
            "there is no run runs/latest (a folder with checkpoints); a network is named as",
        ),
        (["mine:dense", "--input-shape=1,5"], "--input-shape is not of images; leave out --image"),
        (["mine:dense", "--input-shape=1,5", "--crop=1"], "leave out --image-size, --crop"),
        (["mine:small", "--classes=7"], "mine:small has its own number of classes; leave out --cl"),
        (["mine:small", "--output=no/folder/net.onnx"], "no/folder/net.onnx"),
    ],
)
@pytest.mark.usefixtures("weights")
def test_bad_input_gets_one_line_and_status_2(refused, folder, arguments, message):
    assert message in refused("export", f"--image-size={SIZE}", *arguments)
    assert not (folder / "network.onnx").exists()


def test_an_operator_that_onnx_lacks_is_named_with_its_layer(refused, folder):
    (folder / "lacking.py").write_text(
        "from mxnet.gluon import nn\n\n"
        "def make():\n    return nn.HybridLambda('gamma', prefix='mine_')\n"
    )
    said = refused("export", "lacking:make", "--input-shape=1,4")
    assert "cannot express mine_gamma0 (gamma)" in said
    assert not (folder / "network.onnx").exists()


def test_the_number_of_names_is_that_of_the_categories(refused, folder):
    (folder / "names.txt").write_text("cat\ndog\n")
    said = refused("export", NAME, "--class-names=names.txt", "--classes=3")
    assert "names.txt has 2 names; leave out --classes" in said
