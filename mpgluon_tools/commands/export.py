"""Write a network as an ONNX file, or as a PyTorch program: both need no MXNet.

    mpgluon export mymodule:make_net --image-size 64 --class-names names.txt --output net.onnx
    mpgluon export resnet50_v1b --parameters resnet50.params --dtype float16
    mpgluon export mymodule:make_regression --input-shape 1,35
    mpgluon export runs/latest --dtype float16 --output net.onnx
    mpgluon export runs/latest --to torch --output net

The metadata of an image classifier's ONNX file names the categories and says how a photograph
becomes the network's input: --mean, --std and --crop, else a run's own, else ImageNet's. A PyTorch
program is a folder: model.py, model.safetensors, and check.py, which compares it with MXNet's
numbers. The batch may have any size.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpgluon_tools.commands.arguments import (
    add_input_shape,
    add_network,
    add_preprocessing,
    add_zoo_network,
    refuse_given,
)
from mpgluon_tools.progress import progress_line

if TYPE_CHECKING:
    from mpgluon_tools.commands.networks import OpenedNetwork

    import mxnet as mx

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_network(parser)
    add_zoo_network(parser)
    add_preprocessing(parser)
    add_input_shape(parser, "the file has no metadata of images then")
    parser.add_argument(
        "--to", choices=["onnx", "torch"], default="onnx", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=["float32", "float16"], default="float32",
        help="of an ONNX file (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="PATH", help="(default: network.onnx; of a PyTorch program, network)"
    )


def run(options: argparse.Namespace, import_all_of_mpgluon: Callable[[], None]) -> int:
    """Write the file, and compare it with the network."""
    import_all_of_mpgluon()
    if options.to == "torch":
        return _to_torch(options)
    from mpgluon_tools.commands.networks import open_network
    from mpgluon_tools.onnx import ServingMetadata, export_onnx

    import mxnet as mx

    options.output = options.output or "network.onnx"
    shapes = options.input_shape
    if shapes:
        of_images = ("image_size", "class_names", "mean", "std", "crop")
        refuse_given(options, of_images, "--input-shape is not of images")
    with progress_line(3) as show:
        show("the network")
        opened = open_network(options, mx.cpu(), all_values=True)
        size = opened.image_size or options.image_size
        metadata = ServingMetadata(opened.name, size, opened.classes, **opened.preprocessing)
        _, arguments = _example(opened, options)
        show("writing the file")
        if shapes:
            path = export_onnx(opened.net, options.output, input_shapes=shapes, dtype=options.dtype)
        else:
            path = export_onnx(opened.net, options.output, metadata, dtype=options.dtype)
        show("comparing it with the network")
        compared = _compared(opened, path, arguments, of_images=not shapes)
    print("\n".join(opened.about if shapes else [*opened.about, metadata.preprocessing]))
    print(f"{path}: {options.dtype}, {path.stat().st_size / 2**20:.1f} MiB")
    print(compared)
    return 0


def _to_torch(options: argparse.Namespace) -> int:
    """Write a PyTorch program."""
    from mpgluon_tools.commands.networks import open_network
    from mpgluon_tools.deployment import export_torch

    import mxnet as mx

    of_onnx = ("mean", "std", "crop", "dtype", "class_names")
    refuse_given(options, of_onnx, "--to torch writes FP32 values, no preprocessing and no names")
    if options.input_shape:
        refuse_given(options, ("image_size",), "--input-shape is not of images")
    with progress_line(2) as show:
        show("the network")
        opened = open_network(options, mx.cpu(), all_values=True)
        shapes, _ = _example(opened, options)
        show("writing the program")
        title = f"{opened.name}, which was trained in MXNet Gluon."
        folder = export_torch(opened.net, options.output or "network", shapes, title=title)
    print("\n".join(opened.about))
    print(f"{folder}: model.py, model.safetensors, check.py, check.npz")
    check = shlex.quote(str(folder / "check.py"))
    print(f"python {check} compares it with MXNet's numbers, where PyTorch and safetensors are "
          "installed")  # fmt: skip
    return 0


def _example(
    opened: OpenedNetwork, options: argparse.Namespace
) -> tuple[Sequence[tuple[int, ...]], Sequence[mx.nd.NDArray]]:
    """Return the shapes of the network's inputs, and noise of them that it has computed."""
    from mpgluon_tools.commands.networks import example_batch

    import mxnet as mx

    size = opened.image_size or options.image_size
    shapes = options.input_shape or [(8, 3, size, size)]
    mx.random.seed(0)
    advice = "Give --input-shape, once for each input"
    batch, _ = example_batch(opened.net, shapes, mx.cpu(), advice=advice)
    return shapes, batch.arguments


def _compared(
    opened: OpenedNetwork, path: Path, inputs: Sequence[mx.nd.NDArray], *, of_images: bool
) -> str:
    """Compare the file with the network, if onnxruntime is installed; return the result."""
    from mpgluon.cast.arrays import arrays_in
    from mpgluon_tools.deployment import agreement

    import numpy as np

    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError:
        return (
            "not compared with the network: onnxruntime is not installed; "
            'pip install "mpgluon[onnx]"'
        )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    expected = [one.asnumpy() for one in arrays_in(opened.net(*inputs))]
    results: list[Any] = session.run(None, dict(zip(names, (one.asnumpy() for one in inputs))))
    said = "onnxruntime against MXNet in FP32, on noise: "
    if of_images and len(results) == 1 and results[0].ndim == 2 and results[0].shape[1] > 1:
        return said + str(agreement(lambda _: expected[0], lambda _: results[0], [inputs[0]]))
    errors = [
        float(np.abs(one - other).max() / max(np.abs(other).max(), np.finfo(np.float32).tiny))
        for one, other in zip(results, expected)
    ]
    return said + f"largest relative error of a result {max(errors):.2g}"
