"""Symbol and parameter files of a network in a chosen format, for MXNet without mpgluon.

Gluon's own export omits casts by default: the graph of a network converted by
``mxnet.contrib.amp`` then silently computes in FP32, and the graph of a float16 network cannot be
computed at all. Here casts are part of the graph.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Optional, Union

from mpgluon.base.blocks import arrays_of, put_into_numpy
from mpgluon.base.files import atomic_write, disk_error
from mpgluon.errors import CheckpointError, PrecisionError
from mpgluon.graph.description import symbol_of
from mpgluon.graph.nodes import Graph
from mpgluon.kernels import bfloat16
from mpgluon_tools.deployment.inference import inference_network

import mxnet as mx
from mxnet import gluon
from mxnet.base import MXNetError

__all__ = ["export_mxnet", "import_mxnet", "operators_for_gpu_only"]

# Which of MXNet's CPU kernels raise on float16 (asynchronously, at the next wait).
_PRODUCTS = frozenset({"Convolution", "Deconvolution", "FullyConnected", "dot", "batch_dot"})
# The attribute of an input that names all of them in the order of the network's arguments: a graph
# has them in the order of their first use, and not those without a use.
_INPUTS = "__mpgluon_inputs__"
# The attribute of a graph with the CRC-32 of its parameter file. MXNet ignores it, and does not
# write it again: an imported network may have other parameters by then.
_CHECKSUM = "mpgluon_parameters"
_LIST_OF_ARRAYS = 0x112  # the first number in a parameter file of MXNet


def export_mxnet(
    net: gluon.HybridBlock,
    path: Union[str, Path],
    *,
    dtype: str = "float16",
    device: str = "cpu",
    inputs: Sequence[str] = ("data",),
) -> tuple[Path, Path]:
    """Write a network for inference as files that MXNet runs without mpgluon.

    BatchNorms are folded as in :func:`mpgluon.deployment.inference_network`. The graph takes and
    returns FP32, and computes in ``dtype``. Each file is complete or as it was before; of a new one
    and an old one, :func:`import_mxnet` says that they do not belong together.

    Parameters
    ----------
    net : gluon.HybridBlock
        Plain, cast or autocast, with values. It is not changed.
    path : str or Path
        ``"net"`` gives ``net-symbol.json`` and ``net-0000.params``.
    dtype : {"float16", "bfloat16", "float32"}
        Format of the parameters in the file; bfloat16 only for weights and biases of convolutions
        and dense layers. On a processor with bfloat16 the graph computes in it, and needs such a
        processor; elsewhere it rounds to bfloat16 in FP32 arithmetic, and runs anywhere.
    device : {"cpu", "gpu"}
        The device of the graph. MXNet's CPU has no float16 products, so a float16 graph for
        ``"cpu"`` widens their operands, computes in FP32 and rounds; it runs on a GPU too, slowly.
        One for ``"gpu"`` computes in float16 and cannot run on a CPU. The export needs no GPU.
    inputs : sequence of str
        A name for each argument of the network. Their order is in the file, for
        :func:`import_mxnet`; ``gluon.SymbolBlock.imports`` takes the names in any order.

    Returns
    -------
    (Path, Path)
        The symbol file and the parameter file.

    Raises
    ------
    ValueError, TypeError, PrecisionError
        As for :func:`mpgluon.deployment.inference_network`; a PrecisionError for bfloat16 on a GPU.
    DataError
        If a file cannot be written.
    """
    if device not in ("cpu", "gpu"):
        raise ValueError(f'device must be "cpu" or "gpu"; received {device!r}')
    result = inference_network(net, dtype, inputs=inputs, ctx=mx.cpu())
    if dtype != "float32":
        result.keep_weights_in(dtype)
    with mx.Context(device):
        symbol = symbol_of(result, inputs)
    variables = symbol.get_internals()
    for name in set(inputs) & set(symbol.list_inputs()):
        variables[name]._set_attr(**{_INPUTS: "\n".join(inputs)})
    parameters = result.collect_params()
    values = {
        f"arg:{name}": arrays_of(parameters[name])[0]
        for name in symbol.list_arguments()
        if name not in inputs
    }
    values |= {
        f"aux:{name}": arrays_of(parameters[name])[0] for name in symbol.list_auxiliary_states()
    }
    symbol_path, parameter_path = _paths(path)
    checksum = _write(parameter_path, _parameter_file(values))
    graph = json.loads(symbol.tojson(remove_amp_cast=False))
    graph["attrs"][_CHECKSUM] = ["str", f"{checksum:08x}"]
    # MXNet cannot read the \u of JSON.
    _write(symbol_path, [json.dumps(graph, indent=2, ensure_ascii=False).encode()])
    return symbol_path, parameter_path


def _parameter_file(values: Mapping[str, mx.nd.NDArray]) -> Iterator[bytes]:
    """Yield the parts of the file that ``mx.nd.save`` writes, which does not notice a full disk."""
    yield struct.pack("<QQQ", _LIST_OF_ARRAYS, 0, len(values))
    for value in values.values():
        yield bytes(value.__getstate__()["handle"])
    yield struct.pack("<Q", len(values))
    for name in map(str.encode, values):
        yield struct.pack("<Q", len(name)) + name


def _write(path: Path, parts: Iterable[bytes]) -> int:
    """Write a file, or leave it as it is and raise DataError; return the CRC-32."""
    checksum = 0
    try:
        with atomic_write(path) as file:
            for part in parts:
                file.write(part)
                checksum = zlib.crc32(part, checksum)
    except OSError as error:
        raise disk_error(error, path, "export again") from error
    return checksum


def import_mxnet(
    path: Union[str, Path],
    *,
    ctx: Union[mx.Context, None] = None,
    inputs: Optional[Sequence[str]] = None,
) -> gluon.SymbolBlock:
    """Load the files of :func:`export_mxnet`, or of Gluon's ``export``.

    The block takes its inputs in the order of the arguments of the network that was exported.

    Parameters
    ----------
    path : str or Path
        The ``path`` of the export.
    ctx : Context, optional
        By default the current one.
    inputs : sequence of str, optional
        The names of the inputs in the order of the network's arguments. Needed for a graph of
        several inputs only if it is neither from :func:`export_mxnet` nor has Gluon's names
        (``data0``, ``data1``, …).

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, a parameter is missing, the files are of two exports, or
        the order of the inputs is unknown.
    PrecisionError
        If ``ctx`` is a CPU, and the graph has operators in float16 or bfloat16 that it lacks.
    """
    ctx = ctx or mx.current_context()
    symbol_path, parameter_path = _paths(path)
    for one in (symbol_path, parameter_path):
        if not one.is_file():
            raise CheckpointError(f"there is no file {one}")
    try:
        symbol = mx.sym.load(str(symbol_path))
        values = mx.nd.load(str(parameter_path))
        names = {name.partition(":")[2] for name in values}
        free = [name for name in symbol.list_inputs() if name not in names]
        inputs = _recorded_inputs(symbol, free) if inputs is None else list(inputs)
        missing = [name for name in free if name not in inputs]
        if missing:
            raise CheckpointError(
                f"{parameter_path} has no values of {', '.join(missing)}, and the inputs are "
                f"{', '.join(inputs)}; the files are not of one export, or inputs is wrong"
            )
        of_graph = json.loads(symbol_path.read_text("utf-8")).get("attrs", {}).get(_CHECKSUM)
        if of_graph not in (None, ["str", f"{zlib.crc32(parameter_path.read_bytes()):08x}"]):
            raise CheckpointError(
                f"{symbol_path} and {parameter_path} are not of one export; the latest may have "
                "been stopped between the two: export again"
            )
        if ctx.device_type == "cpu":
            _refuse_products_without_kernels(symbol, inputs, symbol_path)
        if not mx.util.is_np_array():
            return gluon.SymbolBlock.imports(str(symbol_path), inputs, str(parameter_path), ctx=ctx)
        variables = [mx.sym.var(name).as_np_ndarray() for name in inputs]
        block = gluon.SymbolBlock(symbol.as_np_ndarray(), variables)
        parameters = block.collect_params()
        with mx.util.np_array(active=False):  # mx.np makes no bfloat16 arrays
            parameters.load(str(parameter_path), ctx, cast_dtype=True, dtype_source="saved")
        for parameter in parameters.values():
            put_into_numpy(parameter)
        return block
    except (
        *(MXNetError, AttributeError, AssertionError),
        *(UnicodeDecodeError, json.JSONDecodeError),
    ) as error:
        reason = str(error).strip().splitlines()[-1]
        if "np shape semantics" in reason:
            reason = (
                "they are of a network of MXNet's NumPy interface; call mx.npx.set_np() first, "
                "and give the network mx.np arrays"
            )
        raise CheckpointError(
            f"{symbol_path} and {parameter_path} cannot be loaded: {reason}"
        ) from error


def _refuse_products_without_kernels(
    symbol: mx.sym.Symbol, inputs: Sequence[str], path: Path
) -> None:
    """Raise PrecisionError if a graph has products in a format that this CPU lacks."""
    advice = {
        "float16": "MXNet's CPU has no kernels. On a CPU a float16 graph needs FP32 fallbacks: "
        'export it with export_mxnet(…, device="cpu"), or run it on a GPU'
    }
    if bfloat16.bfloat16_products() == "none":
        advice["bfloat16"] = (
            "this processor has no instructions. Export it on a processor like this one, which "
            "gives a graph that runs on any, or in float32"
        )
    for dtype, text in advice.items():
        names = _products_in(symbol, inputs, dtype)
        if names:
            raise PrecisionError(
                f"{path} computes {len(names)} operators in {dtype} ({names[0]} among them), for "
                f"which {text}"
            )


def _recorded_inputs(symbol: mx.sym.Symbol, free: Sequence[str]) -> list[str]:
    """Return the inputs of a graph in the order of the network's arguments.

    ``free`` are the variables without values, in the order of their first use.
    """
    for attributes in symbol.attr_dict().values():
        if _INPUTS in attributes:
            return str(attributes[_INPUTS]).split("\n")
    if all(re.fullmatch(r"data\d+", name) for name in free):  # of Gluon's own export
        return sorted(free, key=lambda name: int(name.removeprefix("data")))
    if len(free) > 1:
        raise CheckpointError(
            f"the files have no values of {', '.join(free)} and do not say their order; if these "
            "are the inputs, pass their names as inputs=(…) in the order of the network's arguments"
        )
    return list(free)


def operators_for_gpu_only(symbol: mx.sym.Symbol, inputs: Sequence[str] = ("data",)) -> list[str]:
    """Return the names of the products that a graph of FP32 inputs computes in float16."""
    return _products_in(symbol, inputs, "float16")


def _products_in(symbol: mx.sym.Symbol, inputs: Sequence[str], dtype_of_results: str) -> list[str]:
    """Return the names of the products of a graph whose results have a dtype."""
    graph = Graph.read(symbol)
    graph.infer(dict.fromkeys(inputs, "float32"))
    return [
        node.name
        for node in graph.nodes
        if node.operator in _PRODUCTS and node.outputs[0].dtype == dtype_of_results
    ]


def _paths(path: Union[str, Path]) -> tuple[Path, Path]:
    return Path(f"{path}-symbol.json"), Path(f"{path}-0000.params")
