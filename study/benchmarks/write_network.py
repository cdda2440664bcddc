"""The program that writes a network of a model zoo, with random weights, for other libraries.

Its arguments are the network's name, the side of its images in pixels, and an ONNX file or a
folder, which gets the files that PyTorch's contestant reads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # study/benchmarks/ is not installed

from mpgluon_tools.onnx import export_onnx
from mpgluon_tools.zoo import build_network

import mxnet as mx
from mxnet import gluon

__all__ = ["write_graph"]

_CLASSES = 1000  # as in workloads.py


def write_graph(net: gluon.HybridBlock, folder: Path) -> None:
    """Write the graph of a network of one input, and shapes and values of its parameters."""
    symbol = net(mx.sym.var("data"))
    (folder / "net.json").write_text(symbol.tojson())
    used = set(symbol.list_inputs())
    values = {
        one.name: one.data().asnumpy() for one in net.collect_params().values() if one.name in used
    }
    shapes = {name: value.shape for name, value in values.items()}
    (folder / "shapes.json").write_text(json.dumps(shapes))
    (folder / "values").write_bytes(b"".join(value.tobytes() for value in values.values()))


def main() -> None:
    """Write the file, or the folder."""
    model, size, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    net = build_network(model, classes=_CLASSES, image_size=size, devices=[mx.cpu()])
    if path.is_dir():
        write_graph(net, path)
    else:
        export_onnx(net, path, input_shapes=[(1, 3, size, size)])


if __name__ == "__main__":
    main()
