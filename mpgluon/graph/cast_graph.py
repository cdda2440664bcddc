"""Questions about the graph that a cast network traces, before it is rewritten.

A cast widens a 16-bit value for one operator, or rounds its result. Which operators can be replaced
together with the casts around them, and what becomes of a value's gradients, is asked here;
:mod:`mpgluon.graph.grid` acts on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Optional, Union

from mpgluon.formats.float_format import FLOAT16, FloatFormat
from mpgluon.graph.any_layout import pads_images_with_zeros
from mpgluon.graph.nodes import ROUNDING, Entry, Graph, Key, Node
from mpgluon.graph.operators import PACKED, PLAIN, Kernel, facts_in_graph, name_in_f
from mpgluon.kernels.dtypes import CAST_NUMBER

__all__ = [
    "CODES",
    "WITHOUT_ROUNDING",
    "CastGraph",
    "Consumer",
    "copies",
    "is_product",
    "kernel_of",
    "narrows",
    "widens",
    "with_codes",
]

Consumer = tuple[Optional[Node], int]
"""Consumer of a value: a node (``None``: the graph's results) and the position of the operand."""

CODES = "codes"
"""The dtype of a graph's values in the format that it is rewritten for; no dtype of MXNet's."""

WITHOUT_ROUNDING = "__mpgluon_without_rounding__"
"""The attribute of a cast of a value on a grid that was not known to be there.

An imperative run has no cast in its place, and does not round the gradient.
"""

_POOLING = Kernel("on_copies_Pooling", PACKED)


def with_codes(
    graph: Graph, dtypes: Mapping[str, Union[str, FloatFormat]], fmt: FloatFormat
) -> Graph:
    """Return a graph in which :data:`CODES` is the dtype of the format's values.

    MXNet infers which those are from casts to float16 in place of the format's. Values that are
    float16 without them, in another format's graph, were asked for by name: they remain MXNet's
    float16.
    """
    asked_for = set() if fmt == FLOAT16 else _float16_in(graph, dtypes)
    if fmt != FLOAT16:
        graph = _marked_as_float16(graph)
        dtypes = {name: "float16" if dtype == fmt else dtype for name, dtype in dtypes.items()}
    for node, number in _float16_in(graph, dtypes) - asked_for:
        node.outputs[number] = replace(node.outputs[number], dtype=CODES)
    return graph


def _float16_in(graph: Graph, dtypes: Mapping[str, Union[str, FloatFormat]]) -> set[Key]:
    """Infer dtypes, with arrays on a grid as FP32, and return the keys of float16 values."""
    graph.infer({n: dtype if isinstance(dtype, str) else "float32" for n, dtype in dtypes.items()})
    outputs = ((node, number) for node in graph.nodes for number in range(len(node.outputs)))
    return {key for key in outputs if Entry(*key).value.dtype == "float16"}


def _marked_as_float16(graph: Graph) -> Graph:
    """Return a graph with float16 values in place of those on a grid, so that dtypes tell them.

    There, casts to the format and back to FP32 round (``arrays.onto_grid``, ``arrays.widen``).
    """
    for node in graph.nodes:
        what = node.attributes.get(ROUNDING)
        if what is None:
            node.attributes.update({WITHOUT_ROUNDING: "1"} if node.casts_to("float32") else {})
            continue
        if node.mxnet_operator != node.operator:  # a format that MXNet has no casts for
            node.operator = node.mxnet_operator
        elif node.casts_to("float32"):
            copy = node.inputs[0].node  # an identity is in front of each of the two casts
            narrow = copy.inputs[0].node
            node.inputs = narrow.inputs[0].node.inputs
        else:
            continue
        node.attributes["dtype"] = "float16" if what == "both" else "float32"
    return Graph(graph.heads)


def kernel_of(node: Node) -> Optional[Kernel]:
    """Return the native operator that may stand in a node's place."""
    if node.operator == "Pooling" and node.options.get("layout") in (None, "None", "NCHW"):
        return _POOLING if node.options.get("pool_type", "max") in ("max", "avg") else None
    return facts_in_graph(node.mxnet_operator).kernel


def is_product(node: Node) -> bool:
    """Whether a node's second operand is a weight that a native operator rounds."""
    return node.mxnet_operator in ("Convolution", "FullyConnected")


def _name(node: Node) -> str:
    """Return the name of an operator, whether its operands are broadcast, or one is a number."""
    name = name_in_f(node.operator)
    if name.startswith("_np"):  # an operator that only the NumPy interface has
        return name
    name = name.removeprefix("broadcast")
    return name.removeprefix("_").removesuffix("_scalar")


def narrows(node: Node) -> bool:
    """Whether a node is a cast from FP32 to the format."""
    is_cast = node.operator == "amp_cast" and node.outputs[0].dtype == CODES
    return is_cast and node.inputs[0].value.dtype == "float32"


def widens(node: Optional[Node]) -> bool:
    """Whether a node is a cast from the format to FP32, which rounds the gradient."""
    if node is None or WITHOUT_ROUNDING in node.attributes:
        return False
    return node.casts_to("float32") and node.inputs[0].value.dtype == CODES


def copies(node: Node) -> bool:
    """Whether a node is a part of a cast that returns its FP32 operand unchanged.

    A user's own identity has a place in the order in which gradients are added.
    """
    if CAST_NUMBER not in node.attributes:
        return False
    return node.operator == "_copy" and node.inputs[0].value.dtype == "float32"


class CastGraph:
    """The graph that a cast network traces: which casts belong to which operator.

    Parameters
    ----------
    graph : Graph
        Its dtypes were inferred; :data:`CODES` are the format's values.
    in_arrays : bool
        Whether MXNet has arrays of the format, and rounds the sum of each two gradients in them.

    Attributes
    ----------
    consumers : dict from Key to list of Consumer
        In the order in which MXNet collects the gradients that they return.
    """

    def __init__(self, graph: Graph, *, in_arrays: bool) -> None:
        self.nodes, self.heads, self.in_arrays = graph.nodes, graph.heads, in_arrays
        self.consumers: defaultdict[Key, list[Consumer]] = defaultdict(list)
        for position, entry in enumerate(graph.heads):
            self.consumers[entry.key].append((None, position))
        for node in reversed(graph.nodes):
            for position, entry in enumerate(node.inputs):
                self.consumers[entry.key].append((node, position))
        self._without_gradient: set[Node] = set()  # that return zeros, which MXNet does not add
        for node in reversed(graph.nodes):
            outputs = [self.consumers[node, number] for number in range(len(node.outputs))]
            ends = all(self.ends_gradients(one) for consumers in outputs for one in consumers)
            if ends or not facts_in_graph(_name(node)).has_gradient:
                self._without_gradient.add(node)

    def is_native(self, node: Node) -> bool:
        """Whether there is a native operator for a node and the casts around it."""
        kernel = kernel_of(node)
        if kernel is None or not self._becomes_codes(node):
            return False
        options = node.options
        if node.operator == "Activation" and options["act_type"] != "relu":
            return False
        if node.operator == "Pad" and not pads_images_with_zeros(node):
            return False
        is_unusual = options.get("axis", 1) != 1 or options.get("output_mean_var", False)
        if node.operator == "BatchNorm" and is_unusual:
            return False
        operands = range(kernel.operands or len(node.inputs))
        return all(self._is_widened_for(node, position) for position in operands)

    def _becomes_codes(self, node: Node) -> bool:
        """Whether a node's result is rounded, once, and nothing else becomes of it."""
        consumer = self.only_consumer((node, 0))[0]
        if consumer is None or len(node.outputs) != 1:
            return False
        return narrows(consumer) or (copies(consumer) and self._becomes_codes(consumer))

    def _is_widened_for(self, node: Node, position: int) -> bool:
        """Whether an operand of a node is a 16-bit value that was widened for it alone."""
        widening = node.inputs[position].node
        return widens(widening) and self.consumers[widening, 0] == [(node, position)]

    def takes_codes(self, node: Optional[Node], widening: Node) -> bool:
        """Whether the operator in a node's place takes an operand without its widening."""
        if node is None or not self.is_native(node):
            return False
        kernel = kernel_of(node)
        assert kernel is not None
        position = [entry.node for entry in node.inputs].index(widening)
        return position < (kernel.operands or len(node.inputs))

    def is_rounded_weight(self, narrowing: Node) -> bool:
        """Whether a value is rounded only to be the weight of a native product."""
        widening, _ = self.only_consumer((narrowing, 0))
        if not widens(widening):
            return False
        assert widening is not None
        product, position = self.only_consumer((widening, 0))
        return (
            position == 1
            and product is not None
            and is_product(product)
            and self.is_native(product)
        )

    def only_consumer(self, key: Key) -> Consumer:
        """Return the one consumer of a value; ``(None, 0)`` if there are none or several."""
        consumers = self.consumers[key]
        return consumers[0] if len(consumers) == 1 else (None, 0)

    def wants(self, consumer: Consumer) -> Optional[str]:
        """Return how a consumer takes a 16-bit value, ``None`` if that is all the same."""
        node, _ = consumer
        if not widens(node):
            return PLAIN
        assert node is not None
        behind = self.only_consumer((node, 0))[0]
        if behind is not None and self.takes_codes(behind, node):
            kernel = kernel_of(behind)
            return kernel.held if kernel else None
        return PLAIN

    def ends_gradients(self, consumer: Consumer) -> bool:
        """Whether a consumer returns no gradient."""
        node, position = consumer
        is_condition = node is not None and name_in_f(node.operator) == "where" and position == 0
        return is_condition or node in self._without_gradient

    def is_sum(self, node: Node, number: int = 0) -> bool:
        """Whether a value's gradients, of a format without arrays, are added before a rounding.

        Two of a value that is rounded itself can be added and rounded by one operator.
        """
        if self.in_arrays:
            return False
        if narrows(node):
            consumers = self.consumers[node, number]
            return len(consumers) > 2 or (len(consumers) == 2 and self._any_unrounded(consumers))
        outputs = [self.consumers[node, one] for one in range(len(node.outputs))]
        return not facts_in_graph(node.operator).moves or any(
            len(consumers) > 1 or self._any_unrounded(consumers) for consumers in outputs
        )

    def _any_unrounded(self, consumers: list[Consumer]) -> bool:
        """Whether one of them returns a gradient, of a format without arrays, in FP32."""
        return any(
            node is None
            or WITHOUT_ROUNDING in node.attributes
            or (not widens(node) and self.is_sum(node))
            for node, _ in consumers
        )
