"""A network as an ONNX file, which outlives the framework and has all that is needed to serve it.

It is translated from a recording, operator by operator: some 150 operators, including all in
the model zoos' classifiers. MXNet's own exporter cannot be imported with an ``onnx`` from after
2023, and does not know float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, Union

from mpgluon.base.files import atomic_write, disk_error
from mpgluon.errors import DataError
from mpgluon.formats.float_format import FLOAT16, FLOAT32
from mpgluon_tools.deployment.folding import fold
from mpgluon_tools.deployment.recording import record
from mpgluon_tools.extras import extra
from mpgluon_tools.onnx.metadata import ServingMetadata

from mxnet import gluon

__all__ = ["export_onnx", "read_metadata"]

_FORMATS = {"float32": FLOAT32, "float16": FLOAT16}


def export_onnx(
    net: gluon.HybridBlock,
    path: Union[str, Path],
    metadata: Optional[ServingMetadata] = None,
    *,
    dtype: str = "float32",
    input_shapes: Optional[Sequence[tuple[int, ...]]] = None,
) -> Path:
    """Write a network as an ONNX file; an image classifier with all that is needed to serve it.

    The model takes ``data``, FP32 of shape (batch, 3, image_size, image_size) with a batch of any
    size, and returns ``logits`` in FP32 (of several inputs, ``data0`` and so on; of several
    results, ``logits0``). BatchNorms that follow a convolution or dense layer are
    folded into it. Weights are the FP32 masters, if there are any, rounded to ``dtype`` once. A
    float16 file is half as large. A runtime without float16 kernels, such as onnxruntime on an x86
    CPU, computes it in FP32 and rounds less often than the graph. The network is not changed.
    Waits for the devices.

    Parameters
    ----------
    net : gluon.HybridBlock
        Plain, cast or autocast, with values.
    path : str or Path
        Usually ends in ``.onnx``. An incomplete file never has this name.
    metadata : ServingMetadata, optional
        Written to the file; also gives the size of the input.
    dtype : {"float32", "float16"}
    input_shapes : sequence of tuple of int, optional
        Shape of each input, the batch included, of a network that takes other input than images.
        The file of a network that works on one size of the batch alone has this size.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    ImportError
        If onnx is not installed.
    ValueError
        If ``dtype`` is another, a parameter has no values, the network does not work at that image
        size or shape, or does not return one logit per class; or unless one of ``metadata`` and
        ``input_shapes`` is given.
    PrecisionError
        If an operator cannot be written as ONNX, or a weight is too large for float16. The message
        names the operator, and those that can be written.
    DataError
        If the file cannot be written.
    """
    if dtype not in _FORMATS:
        raise ValueError(f'dtype must be "float32" or "float16"; received {dtype!r}')
    if (metadata is None) == (input_shapes is None):
        raise ValueError("export_onnx takes metadata of an image classifier, or input_shapes")
    with extra("onnx"):
        import onnx
    from mpgluon_tools.onnx.writer import onnx_model

    fmt = _FORMATS[dtype]
    shapes = [tuple(shape) for shape in input_shapes or ()]
    if metadata is not None:
        shapes = [(1, 3, metadata.image_size, metadata.image_size)]
    one = len(shapes) == 1
    names = ["data"] if one else [f"data{place}" for place in range(len(shapes))]
    recording = fold(record(net, names), fmt)
    recording.check_range(fmt)
    model: Any = onnx_model(recording, shapes, dtype, may_fix_batch=metadata is None)
    strings = {"dtype": f'"{dtype}"'}
    if metadata is not None:
        _check_classes(model, metadata)
        strings.update(metadata.to_strings())
    onnx.helper.set_metadata_props(model, strings)
    path = Path(path)
    try:
        with atomic_write(path) as file:
            file.write(model.SerializeToString())
    except OSError as error:
        raise disk_error(error, path, "export again") from error
    return path


def read_metadata(path: Union[str, Path]) -> ServingMetadata:
    """Return the metadata in a file of :func:`export_onnx`.

    Raises
    ------
    ImportError
        If onnx is not installed.
    DataError
        If the file is missing, is not an ONNX file, or was not written by ``export_onnx``.
    """
    with extra("onnx"):
        import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = onnx.load_model(str(path), load_external_data=False)
    except (OSError, DecodeError) as error:
        raise DataError(f"{path} cannot be read as an ONNX file: {error}") from error
    return ServingMetadata.from_strings({entry.key: entry.value for entry in model.metadata_props})


def _check_classes(model: Any, metadata: ServingMetadata) -> None:
    shapes = [
        [size.dim_value for size in output.type.tensor_type.shape.dim]
        for output in model.graph.output
    ]
    if metadata.classes is not None and shapes != [[0, len(metadata.classes)]]:
        raise ValueError(
            f"metadata names {len(metadata.classes)} classes, and the network returns "
            f"{len(shapes)} outputs with {', '.join(str(shape[1:]) for shape in shapes)} numbers "
            "for each image"
        )
