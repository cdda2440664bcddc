"""After training: inference in 16 bits, and files that outlive the framework.

These are the public names. ONNX files are in :mod:`mpgluon.tools.onnx`.
"""

from mpgluon.deployment.inference import InferenceNetwork, inference_network
from mpgluon.deployment.mxnet_export import export_mxnet, import_mxnet
from mpgluon.deployment.predictions import Agreement, agreement

__all__ = [
    "Agreement",
    "InferenceNetwork",
    "agreement",
    "export_mxnet",
    "import_mxnet",
    "inference_network",
]
