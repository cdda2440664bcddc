"""The contestants that predict with an ONNX file."""

from __future__ import annotations

import sys
from pathlib import Path

from mpgluon.base.processor import processor

import pytest

from study.benchmarks import cases
from study.benchmarks.contestant import Contestant, ContestantError, Process

PEER = Path(cases.__file__).with_name("onnx_peer.py")
OPENVINO = PEER.parents[2] / ".venv-peers" / "bin" / "python"
NETWORK = {"model": "cifar_resnet20_v1", "batch_size": 2, "image_size": 32}


def started(engine, dtype, python):
    options = {"engine": engine, "writer": sys.executable, "dtype": dtype, **NETWORK}
    one = Contestant(engine, f"{PEER}:inference", options, str(python))
    return Process(one, threads=1, limit_s=200)


def skip_unless(condition, reason):
    return pytest.mark.skipif(not condition, reason=reason)


THERE = skip_unless(OPENVINO.exists(), "OpenVINO's own environment, .venv-peers, is not there")
BFLOAT16 = skip_unless("avx512_bf16" in processor()[1], "the processor has no BF16 instructions")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("engine", "dtype", "python"),
    [
        ("onnxruntime", "float32", sys.executable),
        pytest.param("openvino", "float32", OPENVINO, marks=THERE),
        pytest.param("openvino", "bfloat16", OPENVINO, marks=[THERE, BFLOAT16]),
    ],
)
def test_an_engine_predicts_with_the_file_of_a_network(engine, dtype, python):
    with started(engine, dtype, python) as process:
        process.wait_until_ready()
        assert process.run()["seconds"] > 0
        assert (process.facts["images"], process.facts["calls"]) == (2, 1)
        assert process.facts["versions"][engine][0].isdigit()


@pytest.mark.multiprocess
def test_a_format_that_an_engine_lacks_is_refused():
    with (
        started("onnxruntime", "bfloat16", sys.executable) as process,
        pytest.raises(ContestantError) as caught,
    ):
        process.wait_until_ready()
    assert "onnxruntime computes in float32 on a CPU, not in bfloat16" in caught.value.output
