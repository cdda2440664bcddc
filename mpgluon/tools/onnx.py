"""ONNX files of trained networks."""

import mpgluon_tools.onnx as _home
from mpgluon_tools.onnx import *  # noqa: F403

__all__ = _home.__all__
