"""The nodes that :mod:`mpgluon.graph.grid` puts in place of casts and of operators between them."""

from __future__ import annotations

from itertools import count

from mpgluon import native
from mpgluon.graph.grid_analysis import Analysis, is_relu
from mpgluon.graph.nodes import Entry, Node
from mpgluon.numerics.formats import FLOAT16, FloatFormat

__all__ = ["Operators"]

_PRODUCTS = {"Convolution": "convolution", "FullyConnected": "fully_connected"}
_NUMBERS = count()


class Operators:
    """Native operators, or pairs of MXNet's casts where there are none.

    Parameters
    ----------
    fmt : FloatFormat
        The emulated format.
    graph : Analysis
        The graph that is rewritten.
    native : bool
        Whether to use the native operators.
    """

    def __init__(self, fmt: FloatFormat, graph: Analysis, *, native: bool) -> None:
        self.format, self.graph, self.native = fmt, graph, native

    def cast(self, entry: Entry, dtype: str) -> Entry:
        """Cast to float16 or float32."""
        name = {"float16": "narrow", "float32": "widen"}[dtype]
        return self._apply(name, FLOAT16, entry, dtype)

    def narrow(self, entry: Entry) -> Entry:
        """Round an FP32 value to a 16-bit code, for an operator that takes one."""
        return self._apply("narrow", self.format, entry, "float16")

    def pack(self, entry: Entry) -> Entry:
        """Round an FP32 value to codes in the native BatchNorm's own layout."""
        return self._apply("pack", self.format, entry, "float16")

    def round(self, entry: Entry, *, forward: bool, backward: bool) -> Entry:
        """Round an FP32 value, its gradient, or both."""
        if not forward and not backward:
            return entry
        kind = "both" if forward and backward else "value" if forward else "gradient"
        return self._apply(f"round_{kind}", self.format, entry, "float16", "float32")

    def plain(self, entry: Entry) -> Entry:
        """Pass a value on the grid and its gradient as plain arrays."""
        if self.native:
            return self._node("_mpgluon_plain", entry)
        return self.round(entry, forward=True, backward=True)

    def copy(self, entry: Entry) -> Entry:
        """Pass a value and its gradient."""
        return self._node("_copy", entry)

    def is_free(self, node: Node) -> bool:
        """Whether a node gives the same bits in any layout; casts leave plain arrays only."""
        elementwise = node.operator == "elemwise_add" or is_relu(node)
        return not self.native or (
            (elementwise or node.operator == "Convolution" or self._normalizes_codes(node))
            and self.graph.becomes_float16(node)
        )

    def rounds(self, node: Node) -> frozenset[str]:
        """Return what the operator in a node's place rounds itself: "result", "gradient"."""
        if self._normalizes_codes(node):
            return frozenset({"result", "gradient"})
        if self.native and node.operator == "Convolution" and self.graph.takes_float16(node):
            return frozenset({"gradient"})
        return frozenset()

    def takes_codes(self, node: Node, position: int) -> bool:
        """Whether the operator in a node's place takes an operand as 16-bit codes."""
        # Codes are float16's own, or the upper halves of FP32 numbers.
        has_codes = self.format == FLOAT16 or self.format.significand_bits <= 8
        if not self.native or not has_codes or not self.graph.takes_float16(node, position):
            return False
        source = node.inputs[position].node.inputs[0]
        if position == 1 and node.operator in _PRODUCTS:  # a weight that nothing else takes
            is_weight = self.graph.narrows(source.node) or (
                source.node.is_variable and self.format == FLOAT16
            )
            return is_weight and len(self.graph.consumers[source.key]) == 1
        if position == 0 and self._normalizes_codes(node):
            # Nothing else keeps the results of these operators.
            return self.graph.narrows(source.node) and self.graph.origin(
                source.node.inputs[0]
            ).operator in ("Convolution", "elemwise_add")
        return False

    def in_place_of(self, node: Node, inputs: list[Entry]) -> Node:
        """Return the node that does what ``node`` did, on FP32 values and codes."""
        rounds, operator, name = self.rounds(node), node.operator, node.name
        if operator in _PRODUCTS and (rounds or self.takes_codes(node, 1)):
            operator = native.operator(_PRODUCTS[operator], self.format)
            name = native.node_name(name, "gradient" in rounds)
        elif rounds:
            operator, options = native.operator("batch_norm", self.format), node.options
            name = native.node_name(
                name,
                options.get("eps", 1e-3),
                options.get("momentum", 0.9),
                options.get("fix_gamma", True),
                options.get("use_global_stats", False),
            )
        return Node(operator, name, node.attributes, inputs, node.rest)

    def _normalizes_codes(self, node: Node) -> bool:
        return (
            self.native
            and node.operator == "BatchNorm"
            and node.options.get("axis", 1) == 1
            and not node.options.get("output_mean_var", False)
            and self.graph.takes_float16(node)
            and self.graph.becomes_float16(node)
        )

    def _apply(self, name: str, fmt: FloatFormat, entry: Entry, *dtypes: str) -> Entry:
        """Return the result of a native operator, or of casts to these dtypes in turn."""
        if self.native:
            return self._node(native.operator(name, fmt), entry)
        for dtype in dtypes:
            entry = self._node("amp_cast", entry, dtype=dtype)
        return entry

    @staticmethod
    def _node(operator: str, entry: Entry, **attributes: str) -> Entry:
        number = str(next(_NUMBERS))
        # MXNet merges equal nodes, and would then add gradients before they are rounded.
        attributes["__mpgluon_grid__"] = number
        name = f"grid{number}_{operator.strip('_')}"
        return Entry(Node(operator, name, attributes, [entry]))
