"""Take networks of both zoos out of MXNet, and record how far their numbers are from MXNet's.

    python study/scripts/record_ports.py --torch-python .venv-peers/bin/python --output ports.json

The Python of --torch-python has PyTorch, safetensors and OpenVINO, and no MXNet. A network that has
a line in the file is not computed again.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # study/ is not installed

from mpgluon.deployment import export_torch, record_layers
from mpgluon.errors import PrecisionError
from mpgluon.tools.onnx import export_onnx
from mpgluon.tools.zoo import build_network

import mxnet as mx
import numpy as np
from mxnet import gluon

from study.experiments.ports import NETWORKS

ROOT = Path(__file__).resolve().parents[2]
_MEASURE = """
import importlib.util, json, sys
from pathlib import Path

import numpy as np
import openvino
import torch
from mpgluon_tools.leaving.parity import compare_port

folder = Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("model", folder / "model.py")
model = importlib.util.module_from_spec(spec)
spec.loader.exec_module(model)
port = model.load(folder / "model.safetensors")
recorded = np.load(folder / "check.npz")
inputs = [recorded[name] for name in recorded.files if name.startswith("input")]
expected = [recorded[name] for name in recorded.files if name.startswith("result")]


def error(results):
    return max(float(np.abs(one - other).max() / (np.abs(other).max() or 1))
               for one, other in zip(results, expected, strict=True))


with torch.no_grad():
    results = port(*map(torch.from_numpy, inputs))
results = [one.numpy() for one in (results if isinstance(results, tuple) else [results])]
compared = compare_port(port, folder / "layers.npz", dtype=None)
found = {"torch": error(results), "layers": len({part.name for part in compared.parts}),
         "part": max((part.units * 2**-24 for part in compared.parts), default=0),
         "verdict": compared.verdict}
if (folder / "network.onnx").exists():
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    engine = openvino.Core().compile_model(folder / "network.onnx", "CPU", settings)
    found["openvino"] = error(list(engine(inputs).values()))
print(json.dumps(found))
"""


class _OfMatrices(mx.init.Xavier):
    """Xavier's initialization, and ones for vectors, which it does not take."""

    def _init_weight(self, name: str, arr: mx.nd.NDArray) -> None:
        if arr.ndim > 1:
            super()._init_weight(name, arr)
        else:
            arr[:] = 1


def main() -> int:
    """Record each network that has no line yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", type=Path, required=True, help="with PyTorch")
    parser.add_argument("--output", type=Path, required=True, help="the record")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    done = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name, shape in NETWORKS.items():
        if name in done:
            continue
        mx.random.seed(0)
        np.random.seed(0)
        with tempfile.TemporaryDirectory() as folder:
            batch = 1 if "rcnn" in name else 2  # gluoncv's take one image
            net = _network(name, shape)
            done[name] = _measured(net, (batch, *shape), Path(folder), options.torch_python)
        print(name, done[name], flush=True)
        options.output.write_text(json.dumps(done, indent=1) + "\n")
    return 0


def _network(name: str, shape: tuple[int, ...]) -> gluon.HybridBlock:
    """Build a network; statistics and scales of its BatchNorms differ from the first ones."""
    if name.startswith("custom"):
        net = _of_gluoncv(name, shape)
    else:
        try:
            net = build_network(name, classes=10, image_size=shape[-1], devices=[mx.cpu()])
        except ValueError:  # is not a classifier of images
            net = _of_gluoncv(name, shape)
    for parameter, one in net.collect_params().items():
        if parameter.endswith(("running_var", "gamma")):
            one.set_data(mx.nd.random.uniform(0.5, 1.5, shape=one.shape))
        elif parameter.endswith(("running_mean", "beta")):
            one.set_data(mx.nd.random.normal(scale=0.2, shape=one.shape))
    return net


def _of_gluoncv(name: str, shape: tuple[int, ...]) -> gluon.HybridBlock:
    from gluoncv.model_zoo import get_model

    more: dict[str, Any] = {}
    if name.startswith(("fcn", "psp", "deeplab")):
        more["crop_size"] = shape[-1]
    elif name.startswith("custom"):
        more |= {"classes": ["a", "b", "c"], "rpn_test_post_nms": 50}
    try:
        net = get_model(name, pretrained=False, pretrained_base=False, **more)
    except TypeError:
        net = get_model(name, pretrained=False)
    net.initialize(_OfMatrices(), force_reinit=True)
    net(mx.nd.zeros((1, *shape)))
    return net


def _measured(
    net: gluon.HybridBlock, shape: tuple[int, ...], folder: Path, python: Path
) -> Mapping[str, Any]:
    """Return the errors of a network's ports on random input of a shape."""
    import onnxruntime  # type: ignore[import-untyped]

    export_torch(net, folder, [shape])
    with np.load(folder / "check.npz") as file:
        recorded = dict(file)
    record_layers(net, folder / "layers.npz", mx.nd.array(recorded["input0"]))
    found: dict[str, Any] = {}
    try:
        path = export_onnx(net, folder / "network.onnx", input_shapes=[shape])
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        results = session.run(None, {session.get_inputs()[0].name: recorded["input0"]})
        expected = [recorded[name] for name in recorded if name.startswith("result")]
        found["onnxruntime"] = max(
            float(np.abs(one - other).max() / (np.abs(other).max() or 1))
            for one, other in zip(results, expected)
        )
    except PrecisionError as error:
        found["refused"] = str(error)
    done = subprocess.run(
        [str(python), "-c", _MEASURE, str(folder)], capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {done.stderr}")
    return {**json.loads(done.stdout.strip().splitlines()[-1]), **found}


if __name__ == "__main__":
    sys.exit(main())
