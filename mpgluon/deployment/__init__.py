"""After training: inference in 16 bits, and files that outlive the framework.

These are the public names. onnx is imported only when it is needed.
"""

from mpgluon.deployment.inference import InferenceNetwork, inference_network
from mpgluon.deployment.mxnet_export import export_mxnet, import_mxnet
from mpgluon.deployment.onnx_export import export_onnx, read_metadata
from mpgluon.deployment.predictions import Agreement, agreement
from mpgluon.deployment.serving import ServingMetadata

__all__ = [
    "Agreement",
    "InferenceNetwork",
    "ServingMetadata",
    "agreement",
    "export_mxnet",
    "export_onnx",
    "import_mxnet",
    "inference_network",
    "read_metadata",
]
