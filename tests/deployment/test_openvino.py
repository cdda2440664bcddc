"""ONNX files of whole networks in OpenVINO, which has an environment of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from mpgluon import BFLOAT16, FLOAT16
from mpgluon.tools.onnx import export_onnx

import numpy as np
import pytest
from deployment_helpers import distance, every_network, fp32_bound, logits_of, sixteen_bit_bound
from interfaces import interface
from test_networks import build, inputs_of
from test_onnx_operators import CASES, NUMPY_CASES, made, model_of

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

COMPUTE = """
import pathlib, sys
import numpy, openvino

core, failures = openvino.Core(), []
for file in sorted(pathlib.Path(sys.argv[1]).glob("*.onnx")):
    try:
        network = core.compile_model(str(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        result = network([numpy.load(file.with_suffix(".npy"))])[0]
    except RuntimeError as error:
        failures.append(f"{file.stem}: {error}")
    else:
        numpy.save(file.with_suffix(".result.npy"), result)
sys.exit("\\n".join(failures) or 0)
"""


def test_every_operator_gives_mxnets_result_in_openvino(tmp_path):
    expected = {}
    for number, name in enumerate(CASES):
        with interface(name in NUMPY_CASES):
            net, images = made(name)
            model = model_of(net, (1, *images.shape[1:]))
            expected[name] = net(images).asnumpy()
        (tmp_path / f"{number}.onnx").write_bytes(model.SerializeToString())
        np.save(tmp_path / f"{number}.npy", images.asnumpy())
    subprocess.run([str(PYTHON), "-c", COMPUTE, str(tmp_path)], check=True, timeout=400)
    for number, name in enumerate(CASES):
        result = np.load(tmp_path / f"{number}.result.npy")
        # Twice the bound in onnxruntime: OpenVINO's functions are approximations.
        np.testing.assert_allclose(result, expected[name], rtol=1.2e-4, atol=1.2e-4, err_msg=name)


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
