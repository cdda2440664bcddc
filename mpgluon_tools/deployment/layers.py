"""The operands and results of a network's layers, in a file for comparisons with a port."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Union

from mpgluon.base.files import atomic_write, disk_error
from mpgluon.cast.arrays import arrays_in
from mpgluon.graph.nodes import Entry, Graph, Node
from mpgluon_tools.deployment.recording import Recording, record
from mpgluon_tools.leaving.recorded_layers import KINDS, known_by
from mpgluon_tools.leaving.torch_names import common_prefix, short_name

import mxnet as mx
import numpy as np
from mxnet import gluon

__all__ = ["record_layers", "run_recorded"]


def record_layers(net: gluon.HybridBlock, path: Union[str, Path], *inputs: mx.nd.NDArray) -> Path:
    """Write the operands and results of all layers with parameters, in FP32 at inference.

    ``mpgluon parity`` compares a port with the file, which NumPy reads. Of a cast network the FP32
    values are recorded that are behind its 16-bit ones. Waits for the devices.

    Parameters
    ----------
    net : gluon.HybridBlock
        Plain, cast or autocast, with values. It is not changed.
    path : str or Path
        Such as ``"layers.npz"``.
    inputs : NDArray
        A batch; two images are enough.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    ValueError
        If a parameter has no values, or the network does not work on these inputs.
    DataError
        If the file cannot be written. It is complete or as it was before.
    """
    names = [f"input{number}" for number in range(len(inputs))]
    recording, path = record(net, names, for_training=True), Path(path)
    given = [one.astype("float32") for one in inputs]
    recording.infer([one.shape for one in given])
    nodes = _layers_of(recording)
    heads = [entry for node in nodes for entry in (node.inputs[0], Entry(node))]
    heads += recording.graph.heads
    once = list({head.key: head for head in heads}.values())  # MXNet fails at some that are twice
    results = run_recorded(Recording(Graph(once), names, recording.values), given)
    computed = dict(zip((head.key for head in once), results))
    files = {f"input{number}": one.asnumpy() for number, one in enumerate(given)}
    for number, head in enumerate(recording.graph.heads):
        files[f"result{number}"] = computed[head.key]
    prefix = common_prefix([node.name for node in recording.graph.nodes if not node.is_variable])
    described = []
    for number, node in enumerate(nodes):
        described.append(_described(node, prefix, list(_parameters(node, recording))))
        files[f"layer{number}.input"] = _operand(node, computed[node.inputs[0].key])
        files[f"layer{number}.output"] = computed[node, 0]
        if node.operator == "BatchNorm":
            for name, entry in zip(("running_mean", "running_var"), node.inputs[3:5]):
                files[f"layer{number}.{name}"] = recording.values[entry.node.name]
    files["layers"] = np.array(json.dumps(described))
    try:
        with atomic_write(path) as file:
            np.savez(file, **files)
    except OSError as error:
        raise disk_error(error, path, "record the layers again") from error
    return path


def _layers_of(recording: Recording) -> list[Node]:
    """Return the operators that are layers with parameters, in order."""
    return [
        node
        for node in recording.graph.nodes
        if node.operator in KINDS
        and any(_is_parameter(entry.node, recording.values) for entry in node.inputs[1:])
    ]


def _operand(node: Node, operand: Any) -> Any:
    """Return a layer's operand; of an Embedding the rows that MXNet takes for it."""
    if node.operator != "Embedding":
        return operand
    return np.trunc(operand).clip(0, node.options["input_dim"] - 1)


def _is_parameter(node: Node, values: Any) -> bool:
    return node.name in values if node.is_variable else node.operator == "_rnn_param_concat"


def _parameters(node: Node, recording: Recording) -> Iterator[Any]:
    """Yield the parameters of a layer; the gamma of a BatchNorm with fix_gamma is 1."""
    for place, entry in enumerate(node.inputs[1:]):
        sources = [entry.node]
        if entry.node.operator == "_rnn_param_concat":
            sources = [one.node if one.node.is_variable else one.node.inputs[0].node
                       for one in entry.node.inputs]  # fmt: skip
        for one in sources:
            if one.name in recording.values:
                value = recording.values[one.name]
                fixed = place == 0 and node.options.get("fix_gamma", False)
                yield np.ones_like(value) if fixed else value


def _described(node: Node, prefix: str, parameters: Sequence[Any]) -> dict[str, Any]:
    """Return a layer's name, operator and options, and a hash of its parameters."""
    kept = ("momentum", "use_global_stats")
    return {
        "name": short_name(node.name, prefix),
        "operator": node.operator,
        "options": {name: node.options[name] for name in kept if name in node.options},
        "parameters": known_by(parameters),
    }


def run_recorded(recording: Recording, inputs: Sequence[mx.nd.NDArray]) -> list[Any]:
    """Compute a recording in FP32 with MXNet, and return its results as NumPy arrays."""
    variables = [mx.sym.var(name, dtype="float32") for name in recording.inputs]
    graph = recording.graph.symbol()
    if mx.util.is_np_array():  # the operators are of MXNet's NumPy interface
        graph, inputs = graph.as_np_ndarray(), [one.as_np_ndarray() for one in inputs]
        variables = [one.as_np_ndarray() for one in variables]
    with redirect_stdout(None):  # of a dtype that MXNet then corrects
        block = gluon.SymbolBlock(graph, variables)
    for name, parameter in block.collect_params().items():
        parameter._load_init(mx.nd.array(recording.values[name]), mx.cpu())
    results: Any = block(*inputs)
    return [one.asnumpy() for one in arrays_in(results)]
