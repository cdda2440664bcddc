"""TensorFlow's contestants: the network is Gluon's, and both factories run in every format."""

from __future__ import annotations

import subprocess
from math import prod
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from recipes.training.networks import build_network
from study.benchmarks import cases
from study.benchmarks.contestant import Contestant, Process

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-tensorflow" / "bin" / "python"
PEER = Path(cases.__file__).with_name("tensorflow_peer.py")

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="TensorFlow's own environment, .venv-tensorflow, is not there"
)

# Fills a network with the values in a file, in Gluon's order and layout, and computes.
PREDICT = """
import importlib.util, sys
from pathlib import Path
import numpy as np

peer, model, folder, size = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
spec = importlib.util.spec_from_file_location("peer", peer)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

def read(name):
    return np.frombuffer((folder / name).read_bytes(), np.float32)

net, layers = module.resnet_v1(model)
values, begin = read("values"), 0
for layer in layers:
    filled = []
    for shape in (one.shape for one in layer.weights):
        part = values[begin : begin + int(np.prod(shape))]
        begin += len(part)
        # Gluon: (output, input, height, width) for convolutions, (output, input) for dense layers.
        if len(shape) == 4:
            part = part.reshape(shape[3], shape[2], *shape[:2]).transpose(2, 3, 1, 0)
        elif len(shape) == 2:
            part = part.reshape(shape[::-1]).T
        filled.append(part)
    layer.set_weights(filled)
assert begin == len(values), (begin, len(values))
images = read("images").reshape(2, 3, size, size).transpose(0, 2, 3, 1)
(folder / "logits").write_bytes(np.asarray(net(images, training=False)).tobytes())
"""


@pytest.mark.parametrize("model", ["resnet18_v1", "resnet50_v1"])
def test_the_network_is_gluons_parameter_by_parameter_and_in_its_logits(model, tmp_path):
    size = 64
    net = build_network(model, classes=1000, image_size=size, devices=[mx.cpu()])
    for parameter in net.collect_params().values():
        if not parameter.name.endswith("weight"):  # gamma, beta, statistics, biases
            parameter.set_data(mx.nd.random.uniform(0.5, 1.5, shape=parameter.shape))
    images = mx.nd.random.normal(shape=(2, 3, size, size))
    arrays = [parameter.data().asnumpy() for parameter in net.collect_params().values()]
    (tmp_path / "values").write_bytes(np.concatenate([a.ravel() for a in arrays]).tobytes())
    (tmp_path / "images").write_bytes(images.asnumpy().tobytes())
    command = [str(PYTHON), "-c", PREDICT, str(PEER), model, str(tmp_path), str(size)]
    subprocess.run(command, check=True, timeout=200)
    found = np.frombuffer((tmp_path / "logits").read_bytes(), np.float32).reshape(2, 1000)
    expected = net(images).asnumpy()
    # As for PyTorch: the order of sums changes 1e-6, a wrong stride or padding the first digits.
    assert np.linalg.norm(found - expected) < 2.0**-16 * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("factory", ["training", "inference"])
def test_a_run_has_as_many_images_and_parameters_as_gluons(factory, dtype):
    network = {"model": "resnet18_v1", "batch_size": 2, "image_size": 32}
    options = {"dtype": dtype, **network}
    one = Contestant("TensorFlow", f"{PEER}:{factory}", options, str(PYTHON))
    with Process(one, threads=2, limit_s=200) as process:
        process.wait_until_ready()
        assert process.run()["seconds"] > 0
        facts = process.facts
    net = build_network("resnet18_v1", classes=1000, image_size=32, devices=[mx.cpu()])
    learning = [p for p in net.collect_params().values() if p.grad_req != "null"]
    assert facts["parameters"] == sum(prod(parameter.shape) for parameter in learning)
    assert facts["images"] == 2
    assert facts["versions"]["tensorflow"][0].isdigit()
