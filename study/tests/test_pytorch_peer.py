"""PyTorch's contestants: the network is Gluon's, and each factory runs in each format."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path

from mpgluon.base.processor import processor

import mxnet as mx
import numpy as np
import pytest

from recipes.training.networks import build_network
from study.benchmarks import cases
from study.benchmarks.contestant import Contestant, Process
from study.benchmarks.sequences import build_sequence_network
from study.benchmarks.write_network import write_graph

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PEER = Path(cases.__file__).with_name("pytorch_peer.py")

needs_pytorch = pytest.mark.skipif(
    not PYTHON.exists(), reason="PyTorch's own environment, .venv-peers, is not there"
)

PREDICT = """
import importlib.util, sys
from pathlib import Path
import torch

peer, folder = sys.argv[1], Path(sys.argv[2])
spec = importlib.util.spec_from_file_location("peer", peer)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
net = module.GraphNetwork(folder).eval()
size = int(sys.argv[3])
images = torch.frombuffer(bytearray((folder / "images").read_bytes()), dtype=torch.float32)
with torch.inference_mode():
    logits = net(images.reshape(2, 3, size, size))
(folder / "logits").write_bytes(bytes(logits.contiguous().untyped_storage()))
"""


@needs_pytorch
@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("resnet50_v1", 64),
        ("cifar_resnet20_v2", 32),
        ("mobilenetv3_small", 64),
        ("mobilenetv2_1.0", 64),
        ("squeezenet1.0", 224),
        ("efficientnet_lite0", 64),
    ],
)
def test_the_network_is_gluons_in_its_logits(model, size, tmp_path):
    net = build_network(model, classes=1000, image_size=size, devices=[mx.cpu()])
    for parameter in net.collect_params().values():
        if not parameter.name.endswith("weight"):  # gamma, beta, statistics, biases
            shape = parameter.shape
            parameter.set_data(mx.nd.random.uniform(0.5, 1.5, shape=shape))
    images = mx.nd.random.normal(shape=(2, 3, size, size))
    expected = net(images).asnumpy()
    write_graph(net, tmp_path)
    (tmp_path / "images").write_bytes(images.asnumpy().tobytes())
    command = [str(PYTHON), "-c", PREDICT, str(PEER), str(tmp_path), str(size)]
    subprocess.run(command, check=True, timeout=120)
    found = np.frombuffer((tmp_path / "logits").read_bytes(), np.float32).reshape(2, 1000)
    # Two computations in float32 differ by the order of their sums: 3e-6 here. A bias that is left
    # out or a stride on another convolution changes the first digits.
    assert np.linalg.norm(found - expected) < 2.0**-16 * np.linalg.norm(expected)


NETWORK = {"model": "resnet18_v1", "batch_size": 2, "image_size": 32, "writer": sys.executable}


def run_in(factory: str, dtype: str, **options) -> dict:
    one = Contestant("PyTorch", f"{PEER}:{factory}", {"dtype": dtype, **options}, str(PYTHON))
    with Process(one, threads=2, limit_s=300) as process:
        process.wait_until_ready()
        assert process.run()["seconds"] > 0
        return process.facts


@needs_pytorch
@pytest.mark.parametrize(
    ("dtype", "compiled"), [*((dtype, False) for dtype in cases.DTYPES), ("float32", True)]
)
def test_a_training_step_runs_in_every_format_and_has_as_many_parameters_as_gluons(dtype, compiled):
    facts = run_in("training", dtype, compiled=compiled, **NETWORK)
    net = build_network("resnet18_v1", classes=1000, image_size=32, devices=[mx.cpu()])
    assert facts["parameters"] == learning(net)
    assert facts["images"] == 2
    assert facts["versions"]["torch"][0].isdigit()


def learning(net) -> int:
    """Return the number of a network's values that are trained."""
    parameters = net.collect_params().values()
    return sum(prod(parameter.shape) for parameter in parameters if parameter.grad_req != "null")


@needs_pytorch
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_networks_train_in_every_format_and_have_as_many_parameters_as_gluons(
    kind, dtype
):
    if (kind, dtype) == ("lstm", "bfloat16") and "avx512bw" not in processor()[1]:
        pytest.skip("PyTorch has no LSTM in bfloat16 for a processor without AVX-512")
    sizes = {"layers": 2, "width": 8}
    facts = run_in("sequence_training", dtype, kind=kind, length=3, batch_size=2, calls=5, **sizes)
    net = build_sequence_network(kind, ctx=mx.cpu(), **sizes)
    net(mx.nd.zeros((3, 2)))
    assert (facts["parameters"], facts["calls"]) == (learning(net), 5)


@needs_pytorch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_predictions_and_layers_run_too(dtype):
    assert run_in("inference", dtype, calls=2, **NETWORK)["calls"] == 2
    kind = "dense" if dtype == "float16" else "convolution"
    assert "images" not in run_in("layer", dtype, kind=kind, batch_size=2, size=4)


@needs_pytorch
def test_a_compiled_network_predicts():
    assert run_in("inference", "float32", compiled=True, **NETWORK)["images"] == 2
