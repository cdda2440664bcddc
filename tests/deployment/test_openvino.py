"""ONNX files of whole networks in OpenVINO, which has an environment of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from mpgluon import BFLOAT16, FLOAT16
from mpgluon.tools.onnx import export_onnx

import numpy as np
import pytest
from deployment_helpers import distance, every_network, fp32_bound, logits_of, sixteen_bit_bound
from test_networks import build, inputs_of

PYTHON = Path(__file__).resolve().parents[2] / ".venv-peers" / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="OpenVINO's own environment, .venv-peers, is not there"
)

PREDICT = """
import sys
import numpy, openvino

folder, core = sys.argv[1], openvino.Core()
images = numpy.load(f"{folder}/images.npy")
for file, precision in (("float32", "f32"), ("float16", "f32"), ("float32", "bf16")):
    network = core.compile_model(
        f"{folder}/{file}.onnx", "CPU", {"INFERENCE_PRECISION_HINT": precision}
    )
    numpy.save(f"{folder}/{file}-{precision}.npy", network([images])[0])
"""


@every_network
def test_a_network_gives_mxnets_outputs_in_openvino_in_every_format(name, tmp_path):
    images, _ = inputs_of(name)
    net = build(name, images)
    for dtype in ("float32", "float16"):
        export_onnx(net, tmp_path / f"{dtype}.onnx", dtype=dtype, input_shapes=[images.shape])
    np.save(tmp_path / "images.npy", images.asnumpy())
    subprocess.run([str(PYTHON), "-c", PREDICT, str(tmp_path)], check=True, timeout=200)
    reference = logits_of(net, images)

    def distance_of(kind: str) -> float:
        return distance(np.load(tmp_path / f"{kind}.npy"), reference)

    assert distance_of("float32-f32") <= fp32_bound(net, images)
    assert distance_of("float16-f32") <= sixteen_bit_bound(net, images, FLOAT16)
    # On a processor without its instructions OpenVINO computes in FP32.
    assert distance_of("float32-bf16") <= sixteen_bit_bound(net, images, BFLOAT16)
