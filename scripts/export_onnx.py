"""Write a network as an ONNX file that onnxruntime serves without MXNet.

    python scripts/export_onnx.py runs/latest --dtype float16 --output net.onnx
    python scripts/export_onnx.py resnet50_v1b --parameters resnet50.pth --classes 1000

The file's metadata names the categories and says how a photograph becomes the network's input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recipes/ is not installed

from mpgluon.deployment import agreement
from mpgluon.errors import MpgluonError
from mpgluon.tools.onnx import ServingMetadata, export_onnx

import mxnet as mx
import numpy as np
from mxnet import gluon

from recipes.training.networks import build_network, load_pretrained
from recipes.training.runs import open_run


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, write the file, and compare it with the network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "network",
        help="the folder of a run of train_caltech.py, one of its checkpoints (.npz), or a name of "
        "a model zoo",
    )
    zoo = parser.add_argument_group("for a name of a model zoo")
    zoo.add_argument(
        "--parameters", metavar="FILE", help=".params, or a state dict (.safetensors, .pth)"
    )
    zoo.add_argument("--classes", type=int, default=1000, help="default: 1000")
    zoo.add_argument("--class-names", metavar="FILE", help="a text file, one name in each line")
    zoo.add_argument("--image-size", type=int, default=224, help="pixels, default: 224")
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    parser.add_argument("--output", metavar="FILE", default="network.onnx")
    options = parser.parse_args(arguments)
    try:
        net, metadata, about = _what_to_export(options)
        path = export_onnx(net, options.output, metadata, dtype=options.dtype)
        print(f"{about}\n{path}: {options.dtype}, {path.stat().st_size / 2**20:.1f} MiB")
        _compare(net, path, metadata)
    except (ValueError, TypeError, ImportError, OSError, MpgluonError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _what_to_export(
    options: argparse.Namespace,
) -> tuple[gluon.HybridBlock, ServingMetadata, str]:
    path = Path(options.network)
    if path.is_dir() or path.suffix == ".npz":
        run = open_run(path, mx.cpu())
        metadata = ServingMetadata(run.config.model, run.config.image_size, run.classes)
        return run.net, metadata, f"{run.config.model} after step {run.step}, {run.checkpoint}"
    if not options.parameters:
        raise ValueError(
            f"{options.network} is not a run, and a network of a model zoo needs --parameters FILE"
        )
    classes, size = options.classes, options.image_size
    names = None
    if options.class_names:
        names = tuple(Path(options.class_names).read_text().splitlines())
        classes = len(names)
    net = build_network(options.network, classes=classes, image_size=size, devices=[mx.cpu()])
    fresh = load_pretrained(net, Path(options.parameters), classes=classes)
    if fresh:
        raise ValueError(
            f"{options.parameters} has another number of classes than {classes}, so that "
            f"{', '.join(fresh)} would be random numbers; give --classes or --class-names for it"
        )
    about = f"{options.network} with the parameters of {options.parameters}"
    return net, ServingMetadata(options.network, size, names), about


def _compare(net: gluon.HybridBlock, path: Path, metadata: ServingMetadata) -> None:
    """Compare the file with the network, if onnxruntime is installed, and print the result."""
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError:
        print("not compared with the network: onnxruntime is not installed")
        return
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def served(images: mx.nd.NDArray) -> Any:
        return session.run(None, {"data": images.asnumpy()})[0]

    size = metadata.image_size
    noise = np.random.default_rng(0).standard_normal((8, 3, size, size))
    images = [mx.nd.array(noise, dtype="float32")]
    print(f"onnxruntime against MXNet in FP32, on noise: {agreement(net, served, images)}")


if __name__ == "__main__":
    sys.exit(main())
