"""Contestants that predict with an ONNX file of the network: onnxruntime and OpenVINO.

It imports nothing of this package, since OpenVINO has an interpreter of its own; the interpreter
``writer`` writes the file. The factory returns a function that predicts once, and facts about it;
see ``child.py``.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Callable

import numpy as np

__all__ = ["inference"]

Prepared = tuple[Callable[[], Any], dict[str, Any]]

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}  # OpenVINO's names


def inference(
    *,
    engine: str,
    writer: str,
    dtype: str,
    model: str,
    batch_size: int,
    image_size: int,
    calls: int = 1,
) -> Prepared:
    """Prepare a prediction; as ``workloads.inference``.

    Parameters
    ----------
    engine : {"onnxruntime", "openvino"}
    writer : str
        The interpreter that has mpgluon.
    dtype : {"float32", "bfloat16"}
        The format of the products; the file is in FP32. onnxruntime has the first alone.
    """
    threads = int(os.environ["OMP_NUM_THREADS"])
    shape = (batch_size, 3, image_size, image_size)
    images = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.onnx")
        script = Path(__file__).with_name("write_network.py")
        subprocess.run([writer, str(script), model, str(image_size), str(path)], check=True)
        predict = _ENGINES[engine](path, dtype, images, threads)
    version = importlib.import_module(engine).__version__
    return predict, {"images": batch_size, "calls": calls, "versions": {engine: version}}


def _onnxruntime(path: Path, dtype: str, images: Any, threads: int) -> Callable[[], Any]:
    import onnxruntime  # type: ignore[import-untyped]

    if dtype != "float32":
        raise ValueError(f"onnxruntime computes in float32 on a CPU, not in {dtype}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Between its turns it must not keep the others' cores busy.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"data": images})


def _openvino(path: Path, dtype: str, images: Any, threads: int) -> Callable[[], Any]:
    import openvino  # type: ignore[import-not-found]

    settings = {
        "INFERENCE_PRECISION_HINT": _PRECISIONS[dtype],
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    core = openvino.Core()
    model = core.read_model(str(path))
    model.reshape(images.shape)
    network = core.compile_model(model, "CPU", settings)
    used = network.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if used != _PRECISIONS[dtype]:
        raise ValueError(f"OpenVINO computes in {used} on this processor, not in {dtype}")
    request = network.create_infer_request()
    return lambda: request.infer([images])


_ENGINES = {"onnxruntime": _onnxruntime, "openvino": _openvino}
