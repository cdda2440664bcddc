"""A network as a graph of operators and FP32 values, from which inference and export start.

A recording has no format and no device: casts are left out, and float16 parameters of a cast
network are the FP32 values that they stand for. :mod:`mpgluon_tools.deployment.folding` shortens
it, :mod:`mpgluon_tools.deployment.inference` computes it in MXNet, and
:mod:`mpgluon_tools.onnx.export` writes it as ONNX.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import redirect_stdout
from typing import Optional

from mpgluon.base.blocks import blocks_of, require_values
from mpgluon.cast import fp32
from mpgluon.cast.forward import forward_of
from mpgluon.cast.given import is_given, product_weights, rounds_operands, warn_of_lost_values
from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import FLOAT16, FLOAT32, FloatFormat, integers_beyond, lost_values
from mpgluon.graph.description import symbol_of, unchanged
from mpgluon.graph.nodes import Graph, Key, Node

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.base import MXNetError

__all__ = ["Recording", "record"]

Values = dict[str, npt.NDArray[np.float32]]

# Operators that return their first operand at inference; amp_multicast returns each of them.
_PASS_THROUGH = frozenset(
    {"amp_cast", "amp_multicast", "_copy", "_np_copy", "BlockGrad", "Dropout"}
)


class Recording:
    """A network's computation at inference.

    Parameters
    ----------
    graph : Graph
    inputs : sequence of str
        The variables that are given with each call.
    values : dict from name to ndarray, float32
        The other variables; those that the graph does not have are left out.
    given : collection of str
        Those that stay FP32 in float16, except as operands of products.
    """

    def __init__(
        self, graph: Graph, inputs: Sequence[str], values: Values, given: Collection[str] = ()
    ) -> None:
        self.graph, self.inputs, self.given = graph, tuple(inputs), given
        variables = {node.name for node in graph.nodes if node.is_variable}
        self.values = {name: value for name, value in values.items() if name in variables}

    def uses(self) -> Counter[Key]:
        """Return how often each output of a node is an operand or a result."""
        return self.graph.uses() + Counter(entry.key for entry in self.graph.heads)

    def unused_inputs(self) -> list[str]:
        """Return the names of inputs that nothing in the network uses."""
        variables = {node.name for node in self.graph.nodes if node.is_variable}
        return [name for name in self.inputs if name not in variables]

    def values_after_data(self, node: Node) -> Optional[list[npt.NDArray[np.float32]]]:
        """Return the values of all operands but the first, or ``None`` if one is computed."""
        operands = [entry.node for entry in node.inputs[1:]]
        if all(operand.is_variable and operand.name in self.values for operand in operands):
            return [self.values[operand.name] for operand in operands]
        return None

    def infer(self, input_shapes: Sequence[tuple[int, ...]]) -> None:
        """Infer the outputs of each node for FP32 inputs of some shapes.

        Raises
        ------
        ValueError
            If the network does not work on them, or does not use one of its inputs.
        """
        unused = self.unused_inputs()
        if unused:
            raise ValueError(
                f"the network does not use its input {', '.join(unused)}; take a block without it"
            )
        shapes = {name: value.shape for name, value in self.values.items()}
        dtypes = dict.fromkeys([*shapes, *self.inputs], "float32")
        try:
            with redirect_stdout(None):  # MXNet's list of all shapes
                self.graph.infer(dtypes, {**shapes, **dict(zip(self.inputs, input_shapes))})
        except MXNetError as error:
            raise ValueError(
                f"the network does not work on input of shape {list(input_shapes)}: "
                f"{str(error).strip().splitlines()[-1]}"
            ) from error

    def check_range(self, fmt: FloatFormat) -> None:
        """Raise PrecisionError if a weight or bias would become infinite in ``fmt``, log if 0.

        Values of BatchNorms do not count, nor do given ones: they stay FP32.
        """
        names = dict.fromkeys(
            entry.node.name
            for node in self.graph.nodes
            for entry in node.inputs
            if node.operator != "BatchNorm"
            and entry.node.name in self.values
            and (entry.node.name not in self.given or rounds_operands(node))
        )
        too_large = [name for name in names if lost_values(self.values[name], fmt)[0]]
        if too_large:
            raise PrecisionError(
                f"{', '.join(too_large)} hold values beyond {fmt.max:g}, the "
                f"largest number of {fmt}; use bfloat16 or float32"
            )
        values = {name: self.values[name] for name in names}
        warn_of_lost_values(values, fmt, "use bfloat16 or float32")


def record(
    net: gluon.HybridBlock, inputs: Sequence[str] = ("data",), *, for_training: bool = False
) -> Recording:
    """Record a network's computation at inference, and the values of its parameters in FP32.

    Casts are left out, and Dropout unless ``for_training``. A cast network's float16 parameters
    are recorded as the FP32 values behind them: those from before the cast, or the optimizer's
    masters. The network is not changed. Waits for the devices.

    Parameters
    ----------
    net : gluon.HybridBlock
        Plain, cast or autocast; its parameters must have values.
    inputs : sequence of str
        A name for each argument of the network.

    Raises
    ------
    TypeError
        If ``net`` is not a ``HybridBlock``, or takes another number of inputs.
    ValueError
        If a parameter has no values yet, two inputs or an input and a parameter have one name, or
        an operator holds other operators (control flow, quantized networks).
    """
    values = _values_of(net)
    unusable = [name for name in inputs if name in values or list(inputs).count(name) > 1]
    if unusable:
        raise ValueError(
            f"inputs must be names of their own, received {', '.join(inputs)}: {unusable[0]} is "
            f"{'a parameter of the network' if unusable[0] in values else 'there twice'}"
        )
    with unchanged(net), mx.cpu():
        for block in blocks_of(net):
            forward = forward_of(block)
            if forward is not None:
                forward.detach()
        graph = Graph.read(symbol_of(net, inputs))
    for node in graph.nodes:
        if mx.util.is_np_shape() and node.operator == "_zeros":
            # A begin state, with 0 for the size that is -1 in NumPy's shapes.
            shape = re.sub(r"\b0\b", "-1", node.attributes["shape"])
            node.attributes = {**node.attributes, "shape": shape}
        if node.has_subgraph:
            what, instead = node.kind_of_subgraph
            raise ValueError(
                f"{node.name} is {what} ({node.operator}), which is not recorded; take {instead}"
            )
    kept = {"Dropout", "BlockGrad"} if for_training else set()
    passed = {
        (node, place): operand
        for node in graph.nodes
        if _passes_through(node) and node.operator not in kept
        for place, operand in enumerate(
            node.inputs if node.operator == "amp_multicast" else node.inputs[:1]
        )
    }
    recorded = graph.replaced(passed)
    calls: Counter[str] = Counter()
    for node in recorded.nodes:
        if node.operator == "BatchNorm":  # a graph lacks options that were not given
            node.attributes = {"eps": "0.001", "fix_gamma": "True", **node.attributes}
        calls[node.name] += 1
        if calls[node.name] > 1:  # operators of a block that is called twice have the same names
            node.name = f"{node.name}_{calls[node.name]}"
    variables = {node.name for node in recorded.nodes if node.is_variable}
    unknown = sorted(variables - values.keys() - set(inputs))
    if unknown:
        raise ValueError(
            f"the network's graph has the variable {', '.join(unknown)}, which is neither an input "
            f"({', '.join(inputs)}) nor a parameter of it"
        )
    return Recording(recorded, inputs, values, _given(net, recorded, values))


def _given(net: gluon.Block, graph: Graph, values: Values) -> set[str]:
    """Return the names of the parameters that a cast of the network to float16 leaves in FP32.

    So are positions in an imported graph, whose parameters do not say that they are not trained.
    """
    given = {
        name
        for name, parameter in net.collect_params().items()
        if (fp32.format_of(parameter) == FLOAT32 and is_given(parameter, FLOAT16))
        or integers_beyond(values[name], FLOAT16)
    }
    return given - product_weights(graph)


def _passes_through(node: Node) -> bool:
    return node.operator in _PASS_THROUGH and node.options.get("mode") != "always"


def _values_of(net: gluon.Block) -> Values:
    """Return the FP32 value of each parameter by its name; the mean, where devices differ.

    They differ in the running statistics of BatchNorm: each device has seen other images.

    Raises
    ------
    ValueError
        If a parameter has no values.
    """
    mx.nd.waitall()  # a running inference may change the layout of a weight that is being read
    require_values(net)
    return {name: _fp32_values(p) for name, p in net.collect_params().items()}


def _fp32_values(parameter: gluon.Parameter) -> npt.NDArray[np.float32]:
    master, fmt = fp32.known(parameter), fp32.format_of(parameter)
    copies: list[npt.NDArray[np.float32]] = [
        fp32.fp32_value(data, master, fmt).asnumpy().astype(np.float32, copy=False)
        for data in parameter.list_data()
    ]
    if all(copy.tobytes() == copies[0].tobytes() for copy in copies):
        return copies[0]
    return np.asarray(np.mean(copies, axis=0, dtype=np.float64), dtype=np.float32)
