"""A network as an ONNX file, with all that is needed to serve it. The extra is ``onnx``."""

from mpgluon_tools.onnx.export import export_onnx, read_metadata
from mpgluon_tools.onnx.metadata import ServingMetadata

__all__ = ["ServingMetadata", "export_onnx", "read_metadata"]
