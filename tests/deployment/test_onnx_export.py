"""ONNX files of whole networks, served by onnxruntime, and their metadata."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mpgluon
from mpgluon import FLOAT16, DataError, PrecisionError
from mpgluon.deployment import inference_network
from mpgluon.tools.onnx import ServingMetadata, export_onnx, read_metadata

import mxnet as mx
import numpy as np
import onnx
import onnxruntime
import pytest
from deployment_helpers import (
    distance,
    every_network,
    fp32_bound,
    logits_of,
    served,
    sixteen_bit_bound,
    small_network,
    some_images,
    with_random_values,
)
from helpers import assert_same_bits, in_sequence, initialized, parameters_of
from mxnet.gluon import nn
from PIL import Image
from test_networks import CLASSES, build, inputs_of

from recipes.data import render_shapes
from recipes.data.augment import normalized_levels, read_crop

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "deployment.md"
NAMES = tuple(f"class {number}" for number in range(CLASSES))


def check(name, folder):
    images, _ = inputs_of(name)
    net = build(name, images)
    before = parameters_of(net)
    reference = logits_of(net, images)
    metadata = ServingMetadata(name, images.shape[2], NAMES)
    single, half = (
        export_onnx(net, folder / f"{dtype}.onnx", metadata, dtype=dtype)
        for dtype in ("float32", "float16")
    )
    assert_same_bits(parameters_of(net), before)
    assert read_metadata(single) == read_metadata(half) == metadata

    bound = fp32_bound(net, images)
    assert distance(served(str(single), images), reference) <= bound
    in_float16 = served(str(half), images)
    assert in_float16.dtype == np.float32
    bound16 = sixteen_bit_bound(net, images, FLOAT16)
    assert bound < distance(in_float16, reference) <= bound16
    # MXNet's own float16 is as far from FP32 at most, so the two are twice as far apart at most.
    assert distance(in_float16, logits_of(inference_network(net, "float16"), images)) <= 2 * bound16

    constants = onnx.load(half).graph.initializer
    assert {c.data_type for c in constants if len(c.dims) > 1} == {onnx.TensorProto.FLOAT16}
    # Nodes and names take less than 0.3 MiB; BatchNorms that are left are as large as before.
    left = sum(len(c.raw_data) for c in constants if c.data_type == onnx.TensorProto.FLOAT)
    assert half.stat().st_size < (single.stat().st_size + left) / 2 + 0.3 * 2**20


@pytest.mark.sampled(3)
@every_network
def test_a_network_gives_mxnets_outputs_in_onnxruntime_in_both_formats(name, tmp_path):
    check(name, tmp_path)


METADATA = ServingMetadata(
    "small", 6, ("a", "b", "ça", "d", "\u5927"), 0.5, (0.1, 0.2, 0.3), (1, 2, 3)
)


def test_the_file_says_what_it_is_and_takes_any_batch(tmp_path):
    path = export_onnx(small_network(), tmp_path / "net.onnx", METADATA, dtype="float16")
    assert read_metadata(path) == METADATA
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (data,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (data.name, data.shape, data.type) == ("data", ["batch", 3, 6, 6], "tensor(float)")
    assert (logits.name, logits.shape, logits.type) == ("logits", ["batch", 5], "tensor(float)")
    strings = session.get_modelmeta().custom_metadata_map
    assert {key: json.loads(text) for key, text in strings.items()} == {
        "network": "small",
        "image_size": 6,
        "classes": ["a", "b", "ça", "d", "\u5927"],
        "centre_crop": 0.5,
        "mean": [0.1, 0.2, 0.3],
        "std": [1, 2, 3],
        "layout": "NCHW",
        "channels": "RGB",
        "pixel_range": [0, 1],
        "output": "logits",
        "dtype": "float16",
    }
    for batch in (1, 3):
        assert served(str(path), some_images(batch, 3, 6, 6)).shape == (batch, 5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_cast_networks_file_is_that_of_the_plain_one(tmp_path, dtype):
    contents = []
    for prepare in (lambda net: net, mpgluon.cast_block, mpgluon.amp.autocast):
        net = small_network()
        prepare(net)
        model = onnx.load(export_onnx(net, tmp_path / "net.onnx", METADATA, dtype=dtype))
        contents.append(
            [(c.data_type, list(c.dims), c.raw_data) for c in model.graph.initializer]
            + [node.op_type for node in model.graph.node]
        )
    assert contents[0] == contents[1] == contents[2]


def with_large_weight():
    net = small_network()
    net[5].weight.set_data(net[5].weight.data() * 1e7)
    return net


def with_operator(operator):
    net = initialized(in_sequence(nn.HybridLambda(operator), nn.Dense(5)))
    net(some_images(1, 3, 6, 6))
    return net


UNKNOWN = r"cannot express \S+ \({}\); .*operators that it knows: Activation,"


@pytest.mark.parametrize(
    ("make", "classes", "error", "message"),
    [
        (small_network, "abcd", ValueError, r"names 4 classes, .* 1 outputs with \[5\] numbers"),
        (with_large_weight, METADATA.classes, PrecisionError, "beyond 65504"),
        (lambda: with_operator("gamma"), METADATA.classes, PrecisionError, UNKNOWN.format("gamma")),
        (lambda: with_operator("rint"), METADATA.classes, PrecisionError, UNKNOWN.format("rint")),
    ],
)
def test_a_refused_export_leaves_an_earlier_file_as_it_was(tmp_path, make, classes, error, message):
    path = export_onnx(small_network(), tmp_path / "net.onnx", METADATA)
    before = path.read_bytes()
    with pytest.raises(error, match=message):
        export_onnx(make(), path, replace(METADATA, classes=tuple(classes)), dtype="float16")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_without_onnx_the_advice_is_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"onnx is not installed.*pip install 'mpgluon\[onnx\]'"):
        export_onnx(small_network(), tmp_path / "net.onnx", METADATA)
    with pytest.raises(ImportError, match="onnx is not installed"):
        read_metadata(tmp_path / "net.onnx")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read as an ONNX file"),
        (b"a line of text\n", "cannot be read as an ONNX file"),
        # To protobuf, a model without content.
        (b"", "was it written by mpgluon's export_onnx"),
    ],
)
def test_another_file_is_refused(tmp_path, content, message):
    path = tmp_path / "net.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_metadata(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 0}, "image_size must be at least 1"),
        ({"image_size": 16.5}, "image_size must be at least 1 pixel, an int, received 16.5"),
        ({"image_size": "16"}, "image_size must be at least 1 pixel, an int, received '16'"),
        ({"centre_crop": 0.0}, r"centre_crop must be in \(0, 1\]"),
        ({"centre_crop": 1.5}, r"centre_crop must be in \(0, 1\]"),
        ({"std": (1.0, 0.0, 1.0)}, "all positive in std"),
        ({"mean": (0.5, 0.5, float("nan"))}, r"received \(0.5, 0.5, nan\)"),
        ({"std": (1.0, 1.0, float("inf"))}, r"and \(1.0, 1.0, inf\)"),
        ({"mean": (1.0,)}, "a number for each of red, green and blue"),
    ],
)
def test_metadata_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ServingMetadata(**{"network": "n", "image_size": 8, **options})


def test_the_documents_lines_serve_the_file_without_mxnet_and_mpgluon(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (lines,) = (block for block in blocks if "import onnxruntime" in block)
    render_shapes(tmp_path / "shapes", classes=10, images_per_class=2, seed=0)
    photograph = max((tmp_path / "shapes").rglob("*.jpg"))
    Image.open(photograph).resize((90, 60)).save(tmp_path / "photograph.jpg", quality=95)

    metadata = ServingMetadata("small", 32, METADATA.classes)
    net = in_sequence(nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8))
    net.add(nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Dense(5, in_units=8))
    with_random_values(net)
    export_onnx(net, tmp_path / "net.onnx", metadata)
    code = lines + "import sys\nassert not {'mxnet', 'mpgluon', 'onnx'} & set(sys.modules)\n"
    finished = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr

    # As the test images of a training run.
    levels = normalized_levels()
    crop = read_crop(tmp_path / "photograph.jpg", 32, None, epoch=0, index=0)
    image = np.stack([levels[channel][crop[:, :, channel]] for channel in range(3)])
    logits = logits_of(net, mx.nd.array(image[np.newaxis]))[0].astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    expected = [
        f"{probabilities[k]:.1%} {metadata.classes[k]}" for k in probabilities.argsort()[::-1]
    ]
    assert finished.stdout.splitlines() == expected
