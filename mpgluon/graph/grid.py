"""Rewriting the graph of a 16-bit network on a CPU so that its values stay in FP32 arrays.

In the graph that a cast network traces, casts mark where its format begins and ends. Executed as it
is, every operator narrows its result and the next one widens it again. The rewritten graph holds
the same numbers in FP32 arrays instead, *on the format's grid*: it rounds where the casts round,
forward and backward, and nowhere else. Its results are equal bit for bit to an imperative run.

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
next. MXNet's other operators add in an order that depends on the layout; they receive plain arrays,
as they would behind a cast, and so do their gradients. What is kept for the backward pass is kept
in 16 bits where that saves memory: the weight of a convolution or dense layer, and the result of a
convolution or sum that BatchNorm takes.

References
----------
MXNet 1.9.1 collects the gradients of a value in the reverse order of the graph, within a node in
the order of its operands. It adds up to four of them from right to left, more from left to right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional, Union

from mxnet.symbol import Symbol

from mpgluon.graph.grid_analysis import Analysis, Consumer
from mpgluon.graph.grid_operators import Operators
from mpgluon.graph.nodes import MOVES, Entry, Graph, Key, Node
from mpgluon.numerics.formats import FLOAT16, FloatFormat

__all__ = ["ROUNDING", "hold_on_grid"]

ROUNDING = "__mpgluon_rounding__"
"""The attribute of the casts in a graph that round FP32 values to a format MXNet does not have."""

_MOVES = MOVES | {"zeros_like", "ones_like"}  # values and gradients stay on the grid
_FROM_THE_RIGHT = 4  # so many gradients MXNet adds from right to left


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
        roundings of FP32 values, marked with :data:`ROUNDING`.
    dtypes : mapping from name to dtype
        Of every argument and auxiliary state; ``fmt`` itself for FP32 arrays on its grid.
    fmt : FloatFormat
        The 16-bit format.
    native : bool
        Whether to use the native operators; otherwise pairs of casts round, as in the traced graph
        of a format other than float16.

    Returns
    -------
    Symbol
        Its arguments and results have the names, the order and the dtypes of the old one's; those
        of a format other than float16 are FP32 arrays.
    """
    if not native and fmt != FLOAT16:
        return symbol
    graph = Graph.read(symbol)
    if fmt != FLOAT16:
        graph = _marked_as_float16(graph)
    on_grid = {name for name, dtype in dtypes.items() if not isinstance(dtype, str)}
    graph.infer({name: "float16" if name in on_grid else str(dtypes[name]) for name in dtypes})
    analysis = Analysis(graph)
    operators = Operators(fmt, analysis, native=native)
    return Graph(_Rewriting(analysis, operators, on_grid).heads()).symbol()


def _marked_as_float16(graph: Graph) -> Graph:
    """Return a graph with float16 values in place of those on a grid, so that dtypes tell them.

    There, casts to the format and back to FP32 round (``arrays.onto_grid``, ``arrays.widen``).
    """
    for node in graph.nodes:
        what = node.attributes.get(ROUNDING)
        if what is not None and node.casts_to("float32"):
            copy = node.inputs[0].node  # an identity is in front of each of the two casts
            narrow = copy.inputs[0].node
            node.inputs = narrow.inputs[0].node.inputs
            node.attributes["dtype"] = "float16" if what == "both" else "float32"
    return Graph(graph.heads)


class _Rewriting:
    """One rewriting, operands first.

    Parameters
    ----------
    graph : Analysis
    operators : Operators
    on_grid : set of str
        The variables whose FP32 arrays are on the format's grid.
    """

    def __init__(self, graph: Analysis, operators: Operators, on_grid: set[str]) -> None:
        self.graph, self.operators, self.on_grid = graph, operators, on_grid
        # Whether MXNet has arrays of the format, and rounds the sum of each two gradients in them.
        self.in_arrays = operators.format == FLOAT16
        self.new: dict[Key, Entry] = {}  # what replaces a value that was not float16
        self.operands: dict[Consumer, Entry] = {}  # what a consumer of a float16 value takes

    def heads(self) -> list[Entry]:
        """Rewrite the graph and return its results."""
        for node in self.graph.nodes:
            self._rewrite(node)
        results = []
        for position, entry in enumerate(self.graph.heads):
            if entry.value.dtype != "float16":
                results.append(self.new[entry.key])
            elif self.in_arrays:
                results.append(self.operators.cast(self.operands[None, position], "float16"))
            else:
                results.append(self.operands[None, position])
        return results

    def _rewrite(self, node: Node) -> None:
        if self.graph.narrows(node):
            operand = node.inputs[0]
            origin, value = self.graph.origin(operand), self.new[operand.key]
            if not self.operators.is_free(origin):
                value = self.operators.plain(value)
            is_rounded = (
                operand.key in self.graph.values_on_grid
                or "result" in self.operators.rounds(origin)
            )
            self._supply((node, 0), value, round_it=not is_rounded)
        elif self.graph.widens(node):
            self.new[node, 0] = self.operands[node, 0]
        elif self.graph.copies(node):
            self.new[node, 0] = self.new[node.inputs[0].key]
        else:
            self._rewrite_operator(node)

    def _rewrite_operator(self, node: Node) -> None:
        narrow = [entry.value.dtype == "float16" for entry in node.inputs]
        moves = node.operator in _MOVES and any(narrow) and all(narrow)
        inputs = []
        for position, entry in enumerate(node.inputs):
            if moves:
                inputs.append(self.operators.plain(self.operands[node, position]))
            elif narrow[position]:
                value = self.operands[node, position]
                inputs.append(self.operators.cast(value, "float16") if self.in_arrays else value)
            elif self.operators.takes_codes(node, position):
                inputs.append(self.new[entry.key])
            elif self.graph.widens(entry.node) and not self.operators.is_free(node):
                inputs.append(self.operators.plain(self.new[entry.key]))
            else:
                inputs.append(self.new[entry.key]._replace(version=entry.version))
        made = self.operators.in_place_of(node, inputs)
        for index, output in enumerate(node.outputs):
            key, entry = (node, index), Entry(made, index)
            if output.dtype != "float16":
                self.new[key] = entry
            elif moves:
                self._supply(key, self.operators.plain(entry))
            elif self._operand_as_codes(self.graph.only_consumer(key)[0]) is not None:
                self.operands[self.graph.consumers[key][0]] = entry
            elif node.name in self.on_grid:
                self._supply(key, entry)
            else:  # a variable, or an operator that computes in float16
                wide = self.operators.cast(entry, "float32")
                self._supply(key, wide, gradient_is_rounded=True)

    def _operand_as_codes(self, widening: Optional[Node]) -> Optional[int]:
        """Return as which operand an operator takes, as codes, the value that is widened for it."""
        if widening is None or not self.graph.widens(widening):
            return None
        behind, position = (self.graph.consumers[widening, 0] or [(None, 0)])[0]
        if behind is None or not self.operators.takes_codes(behind, position):
            return None
        return position

    def _needs_rounding(self, consumer: Optional[Node]) -> bool:
        """Whether the gradient that a consumer of a 16-bit value returns must be rounded."""
        if consumer is None or not self.graph.widens(consumer):
            return False
        behind, position = self.graph.only_consumer((consumer, 0))
        rounds_itself = (
            behind is not None and position == 0 and "gradient" in self.operators.rounds(behind)
        )
        return (consumer, 0) not in self.graph.gradients_on_grid and not rounds_itself

    def _supply(
        self, key: Key, value: Entry, *, round_it: bool = False, gradient_is_rounded: bool = False
    ) -> None:
        """Supply every consumer of a 16-bit value, and round gradients as they add.

        Parameters
        ----------
        key : Key
            The value.
        value : Entry
            The FP32 value that replaces it.
        round_it : bool
            Whether that must be rounded first.
        gradient_is_rounded : bool
            Whether the gradient of ``value`` is rounded in any case.
        """
        consumers = self.graph.consumers[key]
        node = key[0]
        rounds = [self._needs_rounding(consumer) for consumer, _ in consumers]
        # On a grid only the sum of all gradients is rounded, where the value was.
        rounds_sum = self.in_arrays or self.graph.narrows(node)
        if len(consumers) == 1:
            only = consumers[0][0]
            is_sum = not self.in_arrays and (only is None or not self.graph.widens(only))
            backward = (rounds[0] or (is_sum and rounds_sum)) and not gradient_is_rounded
            self._supply_one(consumers[0], value, forward=round_it, backward=backward)
            return
        if self.graph.narrows(node) and self.graph.rounds_before_relu(node):
            value = self.operators.round(value, forward=round_it, backward=False)
            for consumer, backward in zip(consumers, rounds):
                self._supply_one(consumer, value, forward=False, backward=backward)
            return
        # Gradients added in the order g0, g1, g2 give round(round(g0 + g1) + g2): the first two
        # consumers take the value behind two nodes that round, the third behind one. Copies keep
        # the order of sums that are not rounded.
        levels = [self.operators.round(value, forward=round_it, backward=rounds_sum)]
        for _ in consumers[2:]:
            levels.append(
                self.operators.round(levels[-1], forward=False, backward=True)
                if self.in_arrays
                else self.operators.copy(levels[-1])
            )
        as_collected = list(zip(consumers, rounds))
        as_added = as_collected if len(consumers) > _FROM_THE_RIGHT else as_collected[::-1]
        for number, (consumer, backward) in enumerate(as_added):
            level = levels[len(consumers) - 1 - max(number, 1)]
            self._supply_one(consumer, level, forward=False, backward=backward)

    def _supply_one(
        self, consumer: Consumer, value: Entry, *, forward: bool, backward: bool
    ) -> None:
        position = self._operand_as_codes(consumer[0])
        if position == 0:
            self.operands[consumer] = self.operators.pack(value)
        elif position == 1:
            self.operands[consumer] = self.operators.narrow(value)
        else:
            self.operands[consumer] = self.operators.round(
                value, forward=forward, backward=backward
            )
