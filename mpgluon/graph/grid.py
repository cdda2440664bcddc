"""Rewriting the graph of a 16-bit network on a CPU so that its values stay in FP32 arrays.

The graph that a cast network traces says in casts where its format begins and ends. Carried out as
it stands, every operator narrows its result and the next one widens it again. Here the same numbers
are held in FP32 arrays instead, *on the format's grid*: rounded where the casts round, forward and
backward, and nowhere else. What comes out is equal bit for bit to an imperative run.

=========================== =================== ====================
in the traced graph         forward             backward
=========================== =================== ====================
cast from FP32 to float16   rounds              the gradient passes
cast from float16 to FP32   the value passes    rounds the gradient
=========================== =================== ====================

A rounding that would change nothing is left out: ReLU and moves keep values on the grid, ReLU and
sums keep gradients there. Where several operators take a value, MXNet's float16 arrays round each
sum of two of their gradients, and so does the rewritten graph. A format that MXNet's arrays do not
have is held in FP32 arrays in imperative runs too: the sum of the gradients is rounded once, where
the value was rounded.

With the native operators, arrays also stay in oneDNN's blocked layouts from one convolution to the
next. MXNet's other operators add in an order that depends on the layout; they are handed plain
arrays, as a cast would hand them, and so are their gradients. What is kept for the backward pass is
kept in float16 where that saves memory: the weight of a convolution or dense layer, and the result
of a convolution or sum that BatchNorm takes.

References
----------
MXNet 1.9.1 collects the gradients of a value in the reverse order of the graph, within a node in
the order of its operands. It adds up to four of them from right to left, more from left to right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Optional, Union

from mxnet.symbol import Symbol

from mpgluon import native as operators_of_ours
from mpgluon.cast.arrays import ROUNDING
from mpgluon.graph.nodes import (
    Entry,
    Key,
    Node,
    infer_dtypes,
    read_graph,
    write_graph,
)
from mpgluon.numerics.formats import FLOAT16, FloatFormat

__all__ = ["hold_on_grid"]

# Operators that only move values. Their results are on the grid if what they move is, and so are
# the gradients of their operands.
_NAMES_OF_MOVES = """
    Reshape Flatten transpose SwapAxis expand_dims squeeze slice slice_axis SliceChannel _split_v2
    reverse _copy BlockGrad Concat stack zeros_like ones_like depth_to_space space_to_depth
    diag _rnn_param_concat
"""
_MOVES = frozenset(_NAMES_OF_MOVES.split())
_PRODUCTS = {"Convolution": "convolution", "FullyConnected": "fully_connected"}
_FROM_THE_RIGHT = 4  # so many gradients MXNet adds from right to left
_NUMBERS = count()

Taker = tuple[Optional[Node], int]
"""Who takes a result: a node (``None`` for the graph itself) and the position of the operand."""


def hold_on_grid(
    symbol: Symbol,
    dtypes: Mapping[str, Union[str, FloatFormat]],
    *,
    fmt: FloatFormat = FLOAT16,
    native: bool,
) -> Symbol:
    """Return a graph with the same results and gradients, whose 16-bit values are FP32 arrays.

    Parameters
    ----------
    symbol : Symbol
        A graph in which float16 begins and ends with ``amp_cast``, or another format with
        roundings of FP32 values (:func:`mpgluon.cast.arrays.onto_grid`).
    dtypes : mapping from name to dtype
        Of every argument and auxiliary state; ``fmt`` itself for FP32 arrays on its grid.
    fmt : FloatFormat
        The 16-bit format.
    native : bool
        Whether the native operators may be used; else pairs of casts do the rounding, as they do
        in the traced graph of a format other than float16.

    Returns
    -------
    Symbol
        Its arguments and results have the names, the order and the dtypes of the old one's; those
        of a format other than float16 are FP32 arrays.
    """
    if not native and fmt != FLOAT16:
        return symbol
    nodes, heads = read_graph(symbol)
    if fmt != FLOAT16:
        nodes = _with_float16_in_its_place(nodes)
    known = {name: dtype if isinstance(dtype, str) else "float16" for name, dtype in dtypes.items()}
    analysis = _Analysis(nodes, heads, infer_dtypes(nodes, heads, known))
    on_grid = {name for name, dtype in dtypes.items() if not isinstance(dtype, str)}
    operators = _NativeOperators(fmt) if native else _Operators(fmt)
    return write_graph(_Rewriting(analysis, operators, on_grid).heads())


def _with_float16_in_its_place(nodes: Sequence[Node]) -> list[Node]:
    """Return a graph with float16 values in place of those on a grid, so that their type tells.

    There, casts to the format and back to FP32 round (``tracked.onto_grid``, ``tracked.widen``).
    """
    gone: set[Node] = set()
    for node in nodes:
        what = node.attrs.get(ROUNDING)
        if what is not None and node.casts_to("float32"):
            copy = node.inputs[0].node  # an identity is in front of each of the two casts
            narrow = copy.inputs[0].node
            first = narrow.inputs[0].node
            gone.update((copy, narrow, first))
            node.inputs = first.inputs
            node.attrs["dtype"] = "float16" if what == "both" else "float32"
    return [node for node in nodes if node not in gone]


class _Analysis:
    """What is known of a traced graph before it is rewritten."""

    def __init__(
        self, nodes: Sequence[Node], heads: Sequence[Entry], dtypes: Mapping[Key, Optional[str]]
    ) -> None:
        self.nodes, self.heads, self.dtypes = nodes, heads, dtypes
        # In the order in which MXNet collects the gradients that they hand back.
        self.takers: defaultdict[Key, list[Taker]] = defaultdict(list)
        for position, entry in enumerate(heads):
            self.takers[entry.key].append((None, position))
        for node in reversed(nodes):
            for position, entry in enumerate(node.inputs):
                self.takers[entry.key].append((node, position))
        self.results: defaultdict[Node, set[int]] = defaultdict(set)
        for node, index in (*dtypes, *self.takers):
            self.results[node].add(index)
        self.values_on_grid = self._find_values_on_grid()
        self.gradients_on_grid = self._find_gradients_on_grid()

    def is_half(self, key: Key) -> bool:
        """Whether a result is a float16 array."""
        return self.dtypes.get(key) == "float16"

    def narrows(self, node: Node) -> bool:
        """Whether a node is a cast from FP32 to float16."""
        return node.casts_to("float16") and self.dtypes.get(node.inputs[0].key) == "float32"

    def widens(self, node: Node) -> bool:
        """Whether a node is a cast from float16 to FP32."""
        return node.casts_to("float32") and self.is_half(node.inputs[0].key)

    def copies(self, node: Node) -> bool:
        """Whether a node hands an FP32 array on as it is."""
        return node.op == "_copy" and self.dtypes.get(node.inputs[0].key) == "float32"

    def _find_values_on_grid(self) -> set[Key]:
        """Return the FP32 results that need no rounding."""
        found: set[Key] = set()
        for node in self.nodes:
            keeps = self.copies(node) or _is_relu(node)
            if self.widens(node) or (keeps and node.inputs[0].key in found):
                found.add((node, 0))
        return found

    def _find_gradients_on_grid(self) -> set[Key]:
        """Return the FP32 results whose gradients need no rounding."""
        found: set[Key] = set()
        for node in reversed(self.nodes):
            takers = self.takers[node, 0]
            taker = takers[0][0] if len(takers) == 1 else None
            if taker is not None:
                passes = self.copies(taker) or _is_relu(taker) or taker.op == "elemwise_add"
                narrows = self.narrows(taker) and not self.rounds_before_relu(taker)
                if narrows or (passes and (taker, 0) in found):
                    found.add((node, 0))
        return found

    def rounds_before_relu(self, node: Node) -> bool:
        """Whether the sum of the two gradients of a ReLU's float16 result is rounded behind it.

        ReLU's gradient is what comes in or zero, so it may be rounded before or after. After, that
        is often one with a rounding that is needed there anyway.
        """
        return len(self.takers[node, 0]) == 2 and _is_relu(self.origin(node.inputs[0]))

    def origin(self, entry: Entry) -> Node:
        """Return the node that made an FP32 value, behind those that only hand it on."""
        while self.copies(entry.node):
            entry = entry.node.inputs[0]
        return entry.node

    def takes_half(self, node: Node, position: int = 0) -> bool:
        """Whether an operand of a node is a float16 value that was widened for it alone."""
        if len(node.inputs) <= position:
            return False
        widened = node.inputs[position].node
        return self.widens(widened) and self.takers[widened, 0] == [(node, position)]

    def becomes_half(self, node: Node) -> bool:
        """Whether everything that takes a node's result takes it as float16."""
        takers = [taker for taker, _ in self.takers[node, 0]]
        return all(
            taker is not None
            and (self.narrows(taker) or (self.copies(taker) and self.becomes_half(taker)))
            for taker in takers
        )


def _is_relu(node: Node) -> bool:
    return node.op == "Activation" and node.attrs["act_type"] == "relu"


class _Operators:
    """The nodes that are put in place of casts: pairs of MXNet's own casts."""

    def __init__(self, fmt: FloatFormat) -> None:
        self.format = fmt

    def cast(self, entry: Entry, dtype: str) -> Entry:
        """Cast to a dtype of MXNet's."""
        return self._node("amp_cast", entry, dtype=dtype)

    def narrow(self, entry: Entry) -> Entry:
        """Round an FP32 value to a 16-bit code, for an operator that takes one."""
        return self.cast(entry, "float16")

    def round(self, entry: Entry, *, forward: bool, backward: bool) -> Entry:
        """Round an FP32 value, its gradient, or both."""
        if not forward and not backward:
            return entry
        return self.cast(self.cast(entry, "float16"), "float32")

    def copy(self, entry: Entry) -> Entry:
        """Hand on a value and its gradient."""
        return self._node("_copy", entry)

    def plain(self, entry: Entry) -> Entry:
        """Hand on a plain array, and a plain gradient."""
        return self.round(entry, forward=True, backward=True)

    def is_free(self, node: Node, graph: _Analysis) -> bool:  # noqa: ARG002 - native ones ask
        """Whether a node gives the same bits in any layout; a cast leaves only plain ones."""
        return True

    def rounds(self, node: Node, graph: _Analysis) -> frozenset[str]:  # noqa: ARG002
        """Return what the operator in a node's place rounds itself: "result", "gradient"."""
        return frozenset()

    def takes_half(self, node: Node, position: int, graph: _Analysis) -> bool:  # noqa: ARG002
        """Whether the operator in a node's place takes an operand as a float16 array."""
        return False

    def pack(self, entry: Entry) -> Entry:
        """Round an FP32 value to float16 for a BatchNorm that takes it, in a layout of our own."""
        return self.cast(entry, "float16")

    def in_place_of(self, node: Node, inputs: list[Entry], graph: _Analysis) -> Node:  # noqa: ARG002
        """Return the node that does what ``node`` did, on values on the grid."""
        return Node(node.op, node.name, node.attrs, inputs, node.rest)

    @staticmethod
    def _node(op: str, entry: Entry, **attrs: str) -> Entry:
        number = str(next(_NUMBERS))
        # MXNet merges equal nodes, and would then add gradients before they are rounded.
        attrs["__mpgluon_grid__"] = number
        return Entry(Node(op, f"grid{number}_{op.strip('_')}", attrs, [entry]))


class _NativeOperators(_Operators):
    """The nodes that are put in place of casts: operators of the native library."""

    def cast(self, entry: Entry, dtype: str) -> Entry:
        name = {"float16": "narrow", "float32": "widen"}[dtype]
        return self._node(operators_of_ours.operator(name, FLOAT16), entry)

    def narrow(self, entry: Entry) -> Entry:
        return self._node(self._own("narrow"), entry)

    def _own(self, name: str) -> str:
        return operators_of_ours.operator(name, self.format)

    def round(self, entry: Entry, *, forward: bool, backward: bool) -> Entry:
        if not forward and not backward:
            return entry
        kind = {(True, True): "both", (False, True): "gradient", (True, False): "value"}
        return self._node(self._own(f"round_{kind[forward, backward]}"), entry)

    def plain(self, entry: Entry) -> Entry:
        return self._node("_mpgluon_plain", entry)

    def pack(self, entry: Entry) -> Entry:
        return self._node(self._own("pack"), entry)

    @property
    def _has_codes(self) -> bool:
        """Whether 16 bits hold the format's numbers: float16's own, or the upper half of FP32's."""
        return self.format == FLOAT16 or self.format.significand_bits <= 8

    def takes_half(self, node: Node, position: int, graph: _Analysis) -> bool:
        if not graph.takes_half(node, position) or not self._has_codes:
            return False
        half = node.inputs[position].node.inputs[0]
        if position == 1 and node.op in _PRODUCTS:  # a weight of its own
            is_weight = graph.narrows(half.node) or (
                half.node.op == "null" and self.format == FLOAT16
            )
            return is_weight and len(graph.takers[half.key]) == 1
        if position == 0 and self._normalizes_half(node, graph):
            # Nobody else keeps what these make.
            return graph.narrows(half.node) and graph.origin(half.node.inputs[0]).op in (
                "Convolution",
                "elemwise_add",
            )
        return False

    def is_free(self, node: Node, graph: _Analysis) -> bool:
        elementwise = node.op == "elemwise_add" or _is_relu(node)
        return (
            elementwise or node.op == "Convolution" or self._normalizes_half(node, graph)
        ) and graph.becomes_half(node)

    @staticmethod
    def _normalizes_half(node: Node, graph: _Analysis) -> bool:
        return (
            node.op == "BatchNorm"
            and node.attrs.get("axis", "1") == "1"
            and node.attrs.get("output_mean_var", "False") == "False"
            and graph.takes_half(node)
            and graph.becomes_half(node)
        )

    def rounds(self, node: Node, graph: _Analysis) -> frozenset[str]:
        if self._normalizes_half(node, graph):
            return frozenset({"result", "gradient"})
        if node.op == "Convolution" and graph.takes_half(node):
            return frozenset({"gradient"})
        return frozenset()

    def in_place_of(self, node: Node, inputs: list[Entry], graph: _Analysis) -> Node:
        rounds, attrs = self.rounds(node, graph), node.attrs
        # The native operators read settings from their names.
        if node.op in _PRODUCTS and (rounds or self.takes_half(node, 1, graph)):
            name = f"{node.name}|{'gradient' in rounds:d}"
            return Node(self._own(_PRODUCTS[node.op]), name, attrs, inputs, node.rest)
        if not rounds:
            return super().in_place_of(node, inputs, graph)
        eps, momentum = float(attrs.get("eps", 1e-3)), float(attrs.get("momentum", 0.9))
        fix_gamma = attrs.get("fix_gamma", "True") in ("True", "1")
        use_global_stats = attrs.get("use_global_stats", "False") in ("True", "1")
        name = f"{node.name}|{eps!r}|{momentum!r}|{fix_gamma:d}|{use_global_stats:d}"
        return Node(self._own("batch_norm"), name, attrs, inputs, node.rest)


class _Rewriting:
    """One rewriting, operands first."""

    def __init__(self, analysis: _Analysis, operators: _Operators, on_grid: set[str]) -> None:
        self.graph, self.operators, self.on_grid = analysis, operators, on_grid
        # Whether MXNet has arrays of the format, and rounds the sum of each two gradients in them.
        self.in_arrays = operators.format == FLOAT16
        self.new: dict[Key, Entry] = {}  # what stands for a result that was not float16
        self.taken: dict[Taker, Entry] = {}  # what a taker of a float16 result takes, as FP32

    def heads(self) -> list[Entry]:
        """Rewrite the graph and return its results."""
        for node in self.graph.nodes:
            self._rewrite(node)
        results = []
        for position, entry in enumerate(self.graph.heads):
            if not self.graph.is_half(entry.key):
                results.append(self.new[entry.key])
            elif self.in_arrays:
                results.append(self.operators.cast(self.taken[None, position], "float16"))
            else:
                results.append(self.taken[None, position])
        return results

    def _rewrite(self, node: Node) -> None:
        if self.graph.narrows(node):
            operand = node.inputs[0]
            origin, value = self.graph.origin(operand), self.new[operand.key]
            if not self._is_free(origin):
                value = self.operators.plain(value)
            is_rounded = (
                operand.key in self.graph.values_on_grid
                or "result" in self.operators.rounds(origin, self.graph)
            )
            self._hand_out((node, 0), value, round_it=not is_rounded)
        elif self.graph.widens(node):
            self.new[node, 0] = self.taken[node, 0]
        elif self.graph.copies(node):
            self.new[node, 0] = self.new[node.inputs[0].key]
        else:
            self._rewrite_operator(node)

    def _rewrite_operator(self, node: Node) -> None:
        half = [self.graph.is_half(entry.key) for entry in node.inputs]
        moves = node.op in _MOVES and any(half) and all(half)
        inputs = []
        for position, entry in enumerate(node.inputs):
            if moves:
                inputs.append(self.operators.plain(self.taken[node, position]))
            elif half[position]:
                value = self.taken[node, position]
                inputs.append(self.operators.cast(value, "float16") if self.in_arrays else value)
            elif self.operators.takes_half(node, position, self.graph):
                inputs.append(self.new[entry.key])
            elif self.graph.widens(entry.node) and not self._is_free(node):
                inputs.append(self.operators.plain(self.new[entry.key]))
            else:
                inputs.append(self.new[entry.key]._replace(version=entry.version))
        made = self.operators.in_place_of(node, inputs, self.graph)
        for index in sorted(self.graph.results[node]):
            key, entry = (node, index), Entry(made, index)
            if not self.graph.is_half(key):
                self.new[key] = entry
            elif moves:
                self._hand_out(key, self.operators.plain(entry))
            elif self._is_taken_as_half(key):
                self.taken[self.graph.takers[key][0]] = entry
            elif node.name in self.on_grid:
                self._hand_out(key, entry)
            else:  # an argument, or an operator that computes in float16
                wide = self.operators.cast(entry, "float32")
                self._hand_out(key, wide, gradient_is_rounded=True)

    def _is_taken_as_half(self, key: Key) -> bool:
        """Whether a float16 result goes to one operator only, which takes it as it is."""
        takers = self.graph.takers[key]
        return len(takers) == 1 and self._half_operand(takers[0][0]) is not None

    def _half_operand(self, widening: Optional[Node]) -> Optional[int]:
        """Return as which operand an operator takes in float16 what here is widened for it."""
        if widening is None or not self.graph.widens(widening):
            return None
        behind, position = (self.graph.takers[widening, 0] or [(None, 0)])[0]
        if behind is None or not self.operators.takes_half(behind, position, self.graph):
            return None
        return position

    def _is_free(self, node: Node) -> bool:
        return self.operators.is_free(node, self.graph)

    def _needs_rounding(self, taker: Optional[Node]) -> bool:
        """Whether the gradient that a taker of a 16-bit result hands back must be rounded."""
        if taker is None or not self.graph.widens(taker):
            return False
        (behind, position), *others = self.graph.takers[taker, 0] or [(None, 0)]
        rounds_itself = (
            behind is not None
            and position == 0
            and not others
            and "gradient" in self.operators.rounds(behind, self.graph)
        )
        return (taker, 0) not in self.graph.gradients_on_grid and not rounds_itself

    def _hand_out(
        self, key: Key, value: Entry, *, round_it: bool = False, gradient_is_rounded: bool = False
    ) -> None:
        """Give every taker of a 16-bit result its value, and round gradients as they add.

        Parameters
        ----------
        key : Key
            The result.
        value : Entry
            What stands for it, FP32.
        round_it : bool
            Whether that must be rounded first.
        gradient_is_rounded : bool
            Whether what comes before rounds the gradient of ``value`` in any case.
        """
        takers = self.graph.takers[key]
        node = key[0]
        rounds = [self._needs_rounding(taker) for taker, _ in takers]
        # On a grid only the sum of all gradients is rounded, where the value was.
        rounds_sum = self.in_arrays or self.graph.narrows(node)
        if len(takers) == 1:
            only = takers[0][0]
            is_sum = not self.in_arrays and (only is None or not self.graph.widens(only))
            backward = (rounds[0] or (is_sum and rounds_sum)) and not gradient_is_rounded
            self._give(takers[0], value, forward=round_it, backward=backward)
            return
        if self.graph.narrows(node) and self.graph.rounds_before_relu(node):
            value = self.operators.round(value, forward=round_it, backward=False)
            for taker, backward in zip(takers, rounds):
                self._give(taker, value, forward=False, backward=backward)
            return
        # Gradients added in the order g0, g1, g2 give round(round(g0 + g1) + g2): the first two
        # takers take the value behind two nodes that round, the third behind one. Copies keep the
        # order of sums that are not rounded.
        levels = [self.operators.round(value, forward=round_it, backward=rounds_sum)]
        for _ in takers[2:]:
            levels.append(
                self.operators.round(levels[-1], forward=False, backward=True)
                if self.in_arrays
                else self.operators.copy(levels[-1])
            )
        as_collected = list(zip(takers, rounds))
        as_added = as_collected if len(takers) > _FROM_THE_RIGHT else as_collected[::-1]
        for number, (taker, backward) in enumerate(as_added):
            level = levels[len(takers) - 1 - max(number, 1)]
            self._give(taker, level, forward=False, backward=backward)

    def _give(self, taker: Taker, value: Entry, *, forward: bool, backward: bool) -> None:
        """Give a taker of a float16 result what stands for it."""
        operand = self._half_operand(taker[0])
        if operand == 0:
            self.taken[taker] = self.operators.pack(value)
        elif operand == 1:
            self.taken[taker] = self.operators.narrow(value)
        else:
            self.taken[taker] = self.operators.round(value, forward=forward, backward=backward)
