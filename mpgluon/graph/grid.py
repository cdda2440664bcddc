"""Rewriting the graph of a 16-bit network on a CPU so that its values stay in 16-bit arrays.

In the graph that a cast network traces, casts mark where its format begins and ends: an operator
takes FP32 copies of 16-bit values, and a cast rounds its FP32 result. The rewritten graph has one
native operator in place of an operator and the casts around it. That takes and returns 16-bit
codes, computes in FP32 in memory that all operators share, and rounds once, forward and backward.
Results are equal bit for bit to the results of the graph with casts.

Codes lie as MXNet's arrays do, *plain*, or *packed*: with their channels in blocks, as oneDNN's
convolutions compute. Operators without a native one run behind casts, on plain arrays.

Where several operators take a value, MXNet's float16 arrays round each sum of two of their
gradients, and so does the rewritten graph, by native operators that supply two consumers each. A
format that MXNet's arrays do not have is held in FP32 arrays in imperative runs: the sum of the
gradients is rounded once, where the value was rounded. There, values whose gradients are sums of
more than two terms are widened before they are handed on.

References
----------
MXNet 1.9.1 collects the gradients of a value in the reverse order of the graph, within a node in
the order of its operands. It adds up to four of them from right to left, more from left to right.
An imperative run's graph begins with the loss: its order is as in a hybridized network's graph
where the loss takes the network's results in the order in which they are returned.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from itertools import count
from typing import Callable, NamedTuple, Optional, Union

from mpgluon import kernels
from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import FLOAT16, FloatFormat
from mpgluon.graph.cast_graph import (
    CODES,
    WITHOUT_ROUNDING,
    CastGraph,
    Consumer,
    copies,
    is_product,
    kernel_of,
    narrows,
    widens,
    with_codes,
)
from mpgluon.graph.nodes import ACCUMULATION, ADDED_IN_PLACE, Entry, Graph, Key, Node
from mpgluon.graph.operators import PACKED, PLAIN

import numpy as np
from mxnet.symbol import Symbol

__all__ = ["hold_on_grid"]

WIDE = "wide"  # a 16-bit value that is held as an FP32 number

_CODE_BITS = 8  # significant bits that codes have room for, in formats other than float16
_FROM_THE_RIGHT = 4  # so many gradients MXNet adds from right to left
# The attribute that tells nodes apart: MXNet merges equal ones, and would then add gradients before
# they are rounded.
_NUMBER = "__mpgluon_grid__"
_NUMBERS = count()


class _Value(NamedTuple):
    """A 16-bit value in the new graph."""

    entry: Entry
    held: str  # PLAIN, PACKED or WIDE


def hold_on_grid(
    symbol: Symbol,
    dtypes: Mapping[str, Union[str, FloatFormat]],
    *,
    fmt: FloatFormat = FLOAT16,
    rounded: Container[str] = (),
    with_kernels: bool,
    slot_of: Callable[[str], Optional[int]] = lambda _: None,
) -> Symbol:
    """Return a graph with the same results and gradients that computes with native operators.

    Parameters
    ----------
    symbol : Symbol
        A graph in which float16 begins and ends with ``amp_cast``, or another format with
        roundings of FP32 values, marked with :data:`ROUNDING`.
    dtypes : mapping from name to dtype
        Formats of every argument and auxiliary state; ``fmt`` itself for FP32 arrays on its grid.
    fmt : FloatFormat
        The 16-bit format.
    rounded : container of str
        The FP32 arguments whose values are numbers of the format already.
    with_kernels : bool
        Whether there are native operators; without them, and in formats that have no 16-bit codes,
        the graph stays as it is, except that MXNet does not merge equal operators.
    slot_of : callable
        Returns, for the name of a node, the slot of the layer whose flags its roundings raise.

    Returns
    -------
    Symbol
        Its arguments and results have the names, the order and the dtypes of the old one's; those
        of a format other than float16 are FP32 arrays.

    Raises
    ------
    PrecisionError
        If a loop contains a product that is not to be summed in FP32: its body is not rewritten.
    """
    graph = Graph.read(symbol)
    has_codes = with_kernels and (fmt == FLOAT16 or fmt.significand_bits <= _CODE_BITS)
    for node in graph.nodes if has_codes else ():
        if node.has_subgraph and ACCUMULATION in json.dumps(node.rest):
            raise PrecisionError(
                f"{node.name} is a loop or a branch: its products are summed as in a Tensor Core "
                "in imperative runs only; do not hybridize the block, or leave accumulation out"
            )
    tells_16_bits = has_codes or fmt == FLOAT16
    if tells_16_bits:
        graph = with_codes(graph, dtypes, fmt)
    uses = graph.uses()
    for node in graph.nodes:
        # MXNet refuses some graphs in which it adds gradients in place, so it may merge there.
        in_place = any(uses[entry.key] >= ADDED_IN_PLACE for entry in node.inputs)
        if not in_place or (tells_16_bits and _is_of_16_bits(node)):
            _keep_apart(node)
    if not has_codes:
        return graph.symbol()
    on_grid = {name for name, dtype in dtypes.items() if dtype == fmt}
    return Graph(_Rewriting(graph, fmt, on_grid, rounded, slot_of).heads()).symbol()


def _is_of_16_bits(node: Node) -> bool:
    values = (*node.outputs, *(entry.value for entry in node.inputs))
    return any(value.dtype in ("float16", CODES) for value in values)


def _keep_apart(node: Node) -> None:
    """Keep MXNet from merging an operator with an equal one, as an imperative run does not."""
    if not (node.is_variable or node.has_subgraph or node.operator == "Custom"):
        node.attributes[_NUMBER] = str(next(_NUMBERS))


class _Rewriting:
    """One rewriting, operands first.

    Parameters
    ----------
    graph : Graph
        Its dtypes were inferred; :data:`CODES` are the format's values.
    fmt : FloatFormat
    on_grid : set of str
        The variables of the format whose arrays are FP32.
    rounded : container of str
        The FP32 variables whose values need no rounding.
    slot_of : callable
        Returns the slot of the layer of a node, by its name.
    """

    def __init__(
        self,
        graph: Graph,
        fmt: FloatFormat,
        on_grid: set[str],
        rounded: Container[str],
        slot_of: Callable[[str], Optional[int]],
    ) -> None:
        self.format, self.on_grid, self.rounded = fmt, on_grid, rounded
        self.slot_of = slot_of
        self.layer: dict[str, str] = {}  # the option that names the layer at work
        # Whether MXNet has arrays of the format, and rounds the sum of each two gradients in them.
        self.in_arrays = fmt == FLOAT16
        self.graph = CastGraph(graph, in_arrays=self.in_arrays)
        self.new: dict[Key, Entry] = {}  # what replaces a value that was not one of the format
        self.results: dict[Node, _Value] = {}  # of native operators, rounded already
        self.operands: dict[Consumer, _Value] = {}  # of consumers of 16-bit values

    def heads(self) -> list[Entry]:
        """Rewrite the graph and return its results."""
        for node in self.graph.nodes:
            self._rewrite(node)
        return [
            self._take((None, position), PLAIN if self.in_arrays else WIDE)
            if entry.value.dtype == CODES
            else self.new[entry.key]
            for position, entry in enumerate(self.graph.heads)
        ]

    def _rewrite(self, node: Node) -> None:
        slot = self.slot_of(node.name)
        self.layer = {} if slot is None else {kernels.LAYER: str(slot)}
        if node.is_variable:
            self._rewrite_variable(node)
        elif narrows(node):
            self._rewrite_narrowing(node)
        elif widens(node):
            consumer = self.graph.only_consumer((node, 0))[0]
            if not self.graph.takes_codes(consumer, node):
                self.new[node, 0] = self._rounding_gradients(node)
        elif copies(node):
            if node.inputs[0].key in self.new:
                self.new[node, 0] = self.new[node.inputs[0].key]
            else:  # of the result of a native operator
                self.results[node] = self.results[node.inputs[0].node]
        elif self.graph.is_native(node):
            self.results[node] = self._native(node)
        elif any(entry.value.dtype == CODES for entry in node.inputs):
            if WITHOUT_ROUNDING in node.attributes:
                self.new[node, 0] = self._take((node, 0), WIDE)
            elif self.in_arrays and node.operator.endswith("_scalar") and kernel_of(node):
                self._rewrite_scalar(node)
            else:
                self._rewrite_move(node)
        else:
            inputs = [self.new[e.key]._replace(version=e.version) for e in node.inputs]
            operator = node.operator
            if ACCUMULATION in node.attributes:
                operator = self._operator(f"on_values_{operator}", node)
            self._provide(node, Node(operator, node.name, node.attributes, inputs, node.rest))

    # ---- Nodes of each kind.

    def _rewrite_variable(self, node: Node) -> None:
        if node.outputs[0].dtype != CODES:
            self.new[node, 0] = Entry(node)
            return
        held = WIDE if node.name in self.on_grid else PLAIN
        for consumer in self.graph.consumers[node, 0]:  # MXNet itself adds their gradients
            self.operands[consumer] = _Value(Entry(node), held)

    def _rewrite_narrowing(self, node: Node) -> None:
        operand = node.inputs[0]
        if operand.node in self.results:
            self._supply((node, 0), self.results[operand.node])
        elif not self.graph.is_rounded_weight(node):
            ways = {self.graph.wants(consumer) for consumer in self.graph.consumers[node, 0]}
            held = PACKED if PACKED in ways else PLAIN
            value = _Value(self.new[operand.key], WIDE)
            self._supply((node, 0), _Value(self._converted(value, held), held))

    def _rewrite_move(self, node: Node) -> None:
        """Rewrite an operator on 16-bit values themselves: as a rule it only moves them."""
        joins = node.operator == "Concat" and node.options.get("dim", 1) == 1
        held = PACKED if joins else PLAIN
        if self.graph.is_sum(node):
            held = WIDE
        inputs = [
            self._take((node, position), held)
            if entry.value.dtype == CODES
            else self.new[entry.key]
            for position, entry in enumerate(node.inputs)
        ]
        operator, attributes = node.operator, node.attributes
        if held == PACKED:
            operator = kernels.operator("concat", self.format)
            attributes = {**attributes, **self.layer}
        self._provide(node, Node(operator, node.name, attributes, inputs, node.rest), held)

    def _rewrite_scalar(self, node: Node) -> None:
        """Rewrite an operator on a float16 array and a number, which MXNet rounds to float16."""
        value = self.operands[node, 0]
        scalar = np.float16(np.float32(float(node.attributes["scalar"])))
        attributes = {**node.attributes, "scalar": repr(float(scalar)), **self.layer}
        kernel = kernel_of(node)
        assert kernel is not None
        operator = kernels.operator(kernel.name, self.format)
        new = Node(operator, node.name, attributes, [value.entry], node.rest)
        self._provide(node, new, value.held)

    def _provide(self, node: Node, new: Node, held: str = PLAIN) -> None:
        """Replace the outputs of a node by the outputs of a new one."""
        for number, output in enumerate(node.outputs):
            if output.dtype == CODES:
                self._supply((node, number), _Value(Entry(new, number), held))
            else:
                self.new[node, number] = Entry(new, number)

    # ---- Native operators.

    def _native(self, node: Node) -> _Value:
        """Return the result of the native operator in a node's place."""
        kernel, name = kernel_of(node), node.name
        assert kernel is not None
        operator, held = kernel.name, kernel.held
        if held is None:
            held = self.operands[node.inputs[0].node, 0].held
            held = PLAIN if held == WIDE else held
        if node.operator == "BatchNorm":
            options = node.options
            name = kernels.node_name(
                name,
                options.get("eps", 1e-3),
                options.get("momentum", 0.9),
                options.get("fix_gamma", True),
                options.get("use_global_stats", False),
            )
        inputs = []
        for position, entry in enumerate(node.inputs):
            if not self.graph.takes_codes(node, entry.node):
                inputs.append(self.new[entry.key]._replace(version=entry.version))
            elif position == 1 and is_product(node):
                inputs.append(self._weight(entry.node))
                if inputs[1].node.name in self.rounded or inputs[1].node.name in self.on_grid:
                    operator += "_rounded"
            else:
                inputs.append(self._take((entry.node, 0), held))
        operator = self._operator(operator, node)
        attributes = {**node.attributes, **self.layer}
        return _Value(Entry(Node(operator, name, attributes, inputs, node.rest)), held)

    def _operator(self, name: str, node: Node) -> str:
        """Return the native operator that rounds and adds as a node does."""
        if node.is_scaled:
            return node.operator.replace("_scaled_", "_scaled_codes_")
        if ACCUMULATION not in node.attributes:
            return kernels.operator(name, self.format)
        return kernels.accumulating_operator(name, self.format, node.attributes[ACCUMULATION])

    def _weight(self, widening: Node) -> Entry:
        """Return a product's weight: codes, or FP32 numbers that the operator rounds itself."""
        source = widening.inputs[0].node
        if narrows(source) and self.graph.is_rounded_weight(source):
            return self.new[source.inputs[0].key]
        value = self.operands[widening, 0]
        return value.entry if value.held == WIDE else self._converted(value, PLAIN)

    # ---- 16-bit values and their consumers.

    def _take(self, consumer: Consumer, held: str) -> Entry:
        """Return the operand of a consumer, in the layout that it takes."""
        return self._converted(self.operands[consumer], held)

    def _rounding_gradients(self, widening: Node) -> Entry:
        """Return FP32 numbers whose gradient is rounded."""
        value = self.operands[widening, 0]
        if value.held == WIDE:
            value = _Value(self._converted(value, PLAIN), PLAIN)
        return self._converted(value, WIDE)

    def _supply(self, key: Key, value: _Value) -> None:
        """Supply every consumer of a 16-bit value, and round gradients as they add."""
        consumers = self.graph.consumers[key]
        if not self.in_arrays and value.held != WIDE and self.graph.is_sum(key[0], key[1]):
            value = _Value(self._converted(value, WIDE), WIDE)
        adding = [one for one in consumers if not self.graph.ends_gradients(one)]
        for consumer in consumers:
            self.operands[consumer] = value
        if value.held == WIDE or len(adding) < 2:
            return
        # Gradients added in the order g0, g1, g2 give round(round(g0 + g1) + g2): the third
        # consumer has a supply of its own, apart from the first two's.
        # MXNet computes what gives the first operand of a sum first, and with it the running
        # statistics of a layer that is called twice.
        from_the_right = len(adding) <= _FROM_THE_RIGHT
        as_added = adding[::-1] if from_the_right else adding
        for consumer in as_added[:0:-1]:
            fork = self._node("fork", value.entry, value.entry).node
            value = value._replace(entry=Entry(fork, int(from_the_right)))
            self.operands[consumer] = value._replace(entry=Entry(fork, int(not from_the_right)))
        self.operands[as_added[0]] = value

    # ---- New nodes.

    def _converted(self, value: _Value, held: str) -> Entry:
        """Return a value that is held in another way."""
        operator = {
            (PLAIN, WIDE): "widen",
            (PACKED, WIDE): "unpack",
            (WIDE, PLAIN): "narrow",
            (WIDE, PACKED): "pack",
            (PLAIN, PACKED): "_mpgluon_block",
            (PACKED, PLAIN): "_mpgluon_unblock",
        }.get((value.held, held))
        return value.entry if operator is None else self._node(operator, value.entry)

    def _node(self, operator: str, *entries: Entry) -> Entry:
        """Return the first result of a native operator."""
        if not operator.startswith("_"):
            operator = kernels.operator(operator, self.format)
        number = str(next(_NUMBERS))
        attributes = {_NUMBER: number, **self.layer}
        name = f"grid{number}_{operator.strip('_')}"
        return Entry(Node(operator, name, attributes, list(entries)))
