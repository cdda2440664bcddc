"""The program that writes a network of a model zoo, with random weights, as an ONNX file.

Its arguments are the network's name, the side of its images in pixels, and the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # study/benchmarks/ is not installed

from mpgluon_tools.onnx import export_onnx
from mpgluon_tools.zoo import build_network

import mxnet as mx

_CLASSES = 1000  # as in workloads.py


def main() -> None:
    """Write the file."""
    model, size, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    net = build_network(model, classes=_CLASSES, image_size=size, devices=[mx.cpu()])
    export_onnx(net, path, input_shapes=[(1, 3, size, size)])


if __name__ == "__main__":
    main()
