"""Values that a network is given, not taught: a cast may change their format, never their value.

A Constant is cast where the format holds its numbers exactly. Another one stays FP32, and so does
every other parameter without gradient, whose values may change after the cast: a table, a running
average. The operator that reads it computes in FP32 and returns FP32, as under ``autocast``; a
product rounds it as it rounds a weight. Frozen weights of layers that are products are cast as
trained ones are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from mpgluon.formats.float_format import FloatFormat, lost_values, round_to
from mpgluon.graph.nodes import Graph, Node
from mpgluon.graph.operators import Rule, name_in_f, rule_of

import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.gluon import nn, rnn

__all__ = [
    "is_given",
    "product_weights",
    "rounds_operands",
    "warn_of_lost_values",
    "weights_of_layers",
]

_logger = logging.getLogger(__name__)

_LAYERS = (
    nn.Dense,
    nn.conv_layers._Conv,
    rnn.rnn_layer._RNNLayer,
    rnn.HybridRecurrentCell,
    gluon.contrib.cnn.DeformableConvolution,
    gluon.contrib.cnn.ModulatedDeformableConvolution,
)


def is_given(parameter: gluon.Parameter, fmt: FloatFormat) -> bool:
    """Whether a parameter stays FP32 in a cast to a format, unless products alone read it."""
    if parameter.grad_req != "null":
        return False
    if not isinstance(parameter, gluon.Constant):
        return True
    has_data = parameter._data is not None
    values = (parameter.list_data()[0] if has_data else parameter.value).asnumpy()
    if values.dtype.kind != "f" or values.dtype.itemsize == 2:
        return False
    return not np.array_equal(round_to(values, fmt), values, equal_nan=True)


def weights_of_layers(blocks: Iterable[gluon.Block]) -> set[gluon.Parameter]:
    """Return the parameters, constants apart, of MXNet's layers that are products."""
    layers = [block for block in blocks if isinstance(block, _LAYERS)]
    parameters = {parameter for layer in layers for parameter in layer._reg_params.values()}
    return {one for one in parameters if not isinstance(one, gluon.Constant)}


def rounds_operands(node: Node) -> bool:
    """Whether a node rounds its operands."""
    return rule_of(name_in_f(node.operator)) is Rule.COMPUTE


def product_weights(graph: Graph) -> set[str]:
    """Return the names of the variables that products alone read, reshaped or as they are."""
    otherwise = {entry.node for entry in graph.heads}
    for node in reversed(graph.nodes):
        moves = rule_of(name_in_f(node.operator)) is Rule.MOVE and node not in otherwise
        if not (moves or rounds_operands(node)):
            otherwise.update(entry.node for entry in node.inputs)
    return {node.name for node in graph.nodes if node.is_variable and node not in otherwise}


def warn_of_lost_values(
    values: Mapping[str, npt.NDArray[np.float32]], fmt: FloatFormat, cure: str
) -> None:
    """Log which arrays have values that a format makes infinite, or 0 among small ones only.

    A bias that becomes 0 is less than any sum's rounding error, and is not named.
    """
    lost = {name: lost_values(array, fmt) for name, array in values.items()}
    for place, what in enumerate(
        (
            f"are beyond {fmt}'s range ({fmt.max:g}) and have become infinite",
            f"are below {fmt}'s smallest number ({fmt.smallest_subnormal:.2g}) and have become 0, "
            "in arrays without larger ones",
        )
    ):
        counts = {name: count[place] for name, count in lost.items() if count[place]}
        if place == 1:
            counts = {name: n for name, n in counts.items() if not name.endswith("bias")}
        if counts:
            named = ", ".join(f"{count} in {name}" for name, count in list(counts.items())[:5])
            more = ", …" if len(counts) > 5 else ""
            _logger.warning(
                "%d weights %s: %s%s; %s", sum(counts.values()), what, named, more, cure
            )
