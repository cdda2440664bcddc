"""After training: inference in 16 bits, and files that outlive the framework.

These are the public names. ONNX files are in :mod:`mpgluon_tools.onnx`, whose names can be imported
from here too.
"""

from importlib import import_module
from typing import Any

from mpgluon_tools.deployment.inference import InferenceNetwork, inference_network
from mpgluon_tools.deployment.layers import record_layers
from mpgluon_tools.deployment.mxnet_export import export_mxnet, import_mxnet
from mpgluon_tools.deployment.predictions import Agreement, agreement
from mpgluon_tools.deployment.runs import load_classifier
from mpgluon_tools.deployment.torch_export import export_torch

__all__ = [
    "Agreement",
    "InferenceNetwork",
    "agreement",
    "export_mxnet",
    "export_torch",
    "import_mxnet",
    "inference_network",
    "load_classifier",
    "record_layers",
]

_OF_TOOLS = ("ServingMetadata", "export_onnx", "read_metadata")


def __getattr__(name: str) -> Any:
    if name not in _OF_TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("mpgluon_tools.onnx"), name)
