"""The package's model of an MXNet graph: read a Symbol, infer shapes and dtypes, write a Symbol."""

from __future__ import annotations

import ast
import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional

from mpgluon.kernels.dtypes import name_of

import mxnet as mx
from mxnet.symbol import Symbol

__all__ = [
    "ACCUMULATION",
    "ADDED_IN_PLACE",
    "ROUNDING",
    "VARIABLE",
    "Entry",
    "Graph",
    "Key",
    "Node",
    "Value",
    "option_value",
]

VARIABLE = "null"
"""MXNet's name for the operator of an input or a parameter."""

ADDED_IN_PLACE = 8
"""From so many gradients of one value on, MXNet adds them in place."""

ACCUMULATION = "__mpgluon_accumulation__"
"""The attribute of products in a graph that are not to be summed in FP32, which says how."""

ROUNDING = "__mpgluon_rounding__"
"""The attribute of the casts in a graph that round FP32 values to a format MXNet does not have."""


@dataclass(frozen=True)
class Value:
    """Shape and dtype of one output of a node, as MXNet infers them.

    Attributes
    ----------
    dtype : str
        ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int32"`` and so on; empty if unknown.
    shape : tuple of int
        Empty if shapes were not inferred.
    """

    dtype: str
    shape: tuple[int, ...] = ()


@dataclass(eq=False)
class Node:
    """An operator of a graph, or a variable.

    Attributes
    ----------
    operator : str
        MXNet's name, such as ``"Convolution"``, or :data:`VARIABLE`.
    name : str
    attributes : dict of str to str
        The operator's options as MXNet writes them.
    inputs : list of Entry
    rest : dict
        The other fields of MXNet's JSON.
    outputs : list of Value
        Those that other operators can use; filled in by :meth:`Graph.infer`.
    layer : str
        The innermost block that the node belongs to, where that is known.
    """

    operator: str
    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    inputs: list[Entry] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    outputs: list[Value] = field(default_factory=list)
    layer: str = ""

    @property
    def is_variable(self) -> bool:
        """Whether it is an input or a parameter."""
        return self.operator == VARIABLE

    @property
    def mxnet_operator(self) -> str:
        """MXNet's name of the operator, whatever the formats."""
        if self.operator.startswith("_mpgluon_plain_"):
            return "amp_cast"
        return self.operator.rpartition("_")[2] if self.is_scaled else self.operator

    @property
    def is_scaled(self) -> bool:
        """Whether it is a product that rounds its operands to a format with little range."""
        return self.operator.startswith("_mpgluon_scaled_")

    @property
    def has_subgraph(self) -> bool:
        """Whether it holds a graph of its own, which is not read."""
        return "subgraphs" in self.rest

    @property
    def kind_of_subgraph(self) -> tuple[str, str]:
        """The nature of an operator with a graph of its own, and what to take instead, in words."""
        if self.operator in ("_foreach", "_while_loop", "_cond"):
            return "control flow", "a network without F.contrib.foreach, while_loop and cond"
        if self.attributes.get("quantized", "").lower() == "true":
            return "an operator of 8-bit integers", "the FP32 network that was quantized"
        return "an operator that a backend fused", "the graph from before the backend's changes"

    @property
    def options(self) -> dict[str, Any]:
        """The operator's options as Python values, without MXNet's internal attributes."""
        return {
            k: option_value(text) for k, text in self.attributes.items() if not k.startswith("__")
        }

    def casts_to(self, dtype: str) -> bool:
        """Whether it is a cast to this format."""
        return self.operator == "amp_cast" and self.attributes["dtype"] == dtype


Key = tuple[Node, int]
"""A node and the number of one of its outputs."""


class Entry(NamedTuple):
    """One output of a node, as an operand of another node or a result of the graph."""

    node: Node
    number: int = 0
    version: int = 0  # counts the writes to an auxiliary state

    @property
    def key(self) -> Key:
        """The node and the number of the output, which identify it."""
        return self.node, self.number

    @property
    def value(self) -> Value:
        """The output's inferred dtype and shape."""
        return self.node.outputs[self.number]


class Graph:
    """A graph, given by its results.

    Parameters
    ----------
    heads : sequence of Entry
        The results.

    Attributes
    ----------
    heads : list of Entry
    nodes : list of Node
        All nodes that the results depend on, each after its operands, in MXNet's order.
    """

    def __init__(self, heads: Sequence[Entry]) -> None:
        self.heads = list(heads)
        self.nodes = _in_order(heads)

    @classmethod
    def read(cls, symbol: Symbol) -> Graph:
        """Return the graph of a Symbol, casts included."""
        return cls.from_json(symbol.tojson(remove_amp_cast=False))

    @classmethod
    def from_json(cls, text: str) -> Graph:
        """Return the graph that MXNet has written as JSON."""
        graph = json.loads(text)
        nodes: list[Node] = []
        for record in graph["nodes"]:
            inputs = [Entry(nodes[i], *rest) for i, *rest in record.pop("inputs")]
            operator, name = record.pop("op"), record.pop("name")
            nodes.append(Node(operator, name, record.pop("attrs", {}), inputs, record))
        return cls([Entry(nodes[i], *rest) for i, *rest in graph["heads"]])

    def symbol(self) -> Symbol:
        """Return the graph as a Symbol."""
        numbers = {node: number for number, node in enumerate(self.nodes)}

        def positions(entries: Sequence[Entry]) -> list[list[int]]:
            return [[numbers[entry.node], entry.number, entry.version] for entry in entries]

        records = [
            {
                "op": node.operator,
                "name": node.name,
                "attrs": node.attributes,
                "inputs": positions(node.inputs),
                **node.rest,
            }
            for node in self.nodes
        ]
        graph = {
            "nodes": records,
            "arg_nodes": [number for number, node in enumerate(self.nodes) if node.is_variable],
            "heads": positions(self.heads),
            "attrs": {"mxnet_version": ["int", _version_number()]},
        }
        return mx.sym.load_json(json.dumps(graph, ensure_ascii=False))

    def infer(
        self,
        dtypes: Mapping[str, str],
        shapes: Optional[Mapping[str, tuple[int, ...]]] = None,
    ) -> bool:
        """Fill in the ``outputs`` of each node, and return whether all of them are known.

        Parameters
        ----------
        dtypes, shapes : mapping from name to dtype, and to shape
            For variables; MXNet infers all others. Without ``shapes`` only dtypes are inferred.

        Raises
        ------
        MXNetError
            If dtypes or shapes contradict each other.
        """
        results = self.symbol().get_internals()
        # MXNet has no name for bfloat16 here; it follows from the operators that use the variable.
        names = {node.name for node in self.nodes if node.is_variable}
        unnamed = ("", "bfloat16")
        named_dtypes = {
            n: dtype for n, dtype in dtypes.items() if n in names and dtype not in unnamed
        }
        with warnings.catch_warnings():  # MXNet's, about what stays unknown
            warnings.simplefilter("ignore")
            _, inferred, _ = results.infer_type_partial(**named_dtypes)
            sizes = None if shapes is None else results.infer_shape(**shapes)[1]
        for node in self.nodes:
            node.outputs = []
        dtypes_now = ["" if dtype is None else name_of(dtype) for dtype in inferred]
        for entry, dtype, shape in zip(_heads(results), dtypes_now, sizes or [()] * len(inferred)):
            self.nodes[entry].outputs.append(Value(dtype, shape))
        return None not in inferred and (shapes is None or sizes is not None)

    def replaced(self, new: Mapping[Key, Entry]) -> Graph:
        """Return a copy of the graph in which other entries take the place of some.

        Parameters
        ----------
        new : mapping from Key to Entry
            Entries to put in place of others, in the order in which the graph computes them.
            Operands of the new ones are replaced, too.
        """
        copies: dict[Node, Node] = {}

        def copied(entry: Entry) -> Entry:
            while entry.key in new:
                entry = new[entry.key]
            return entry._replace(node=copies[entry.node])

        for node in _in_order([*new.values(), *self.heads]):
            copies[node] = replace(node, inputs=[copied(entry) for entry in node.inputs])
        return Graph([copied(head) for head in self.heads])

    def uses(self) -> Counter[Key]:
        """Return how many operands take each value."""
        return Counter(entry.key for node in self.nodes for entry in node.inputs)

    def adds_gradients_in_place(self) -> bool:
        """Whether MXNet adds the gradients of a value in place, since so many operands take it."""
        return max(self.uses().values(), default=0) >= ADDED_IN_PLACE

    def shapes(self, node: Node) -> list[tuple[int, ...]]:
        """Return the shapes of a node's operands."""
        return [entry.value.shape for entry in node.inputs]


def _heads(symbol: Symbol) -> list[int]:
    """Return the number of the node of each result."""
    heads = json.loads(symbol.tojson(remove_amp_cast=False))["heads"]
    return [number for number, *_ in heads]


def option_value(text: str) -> Any:
    """Return the Python value of an operator's option."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a word, such as "relu"
        return text


def _version_number() -> int:
    """Return MXNet's version as its JSON writes it; without one MXNet expects an old graph."""
    major, minor, patch = (int(part) for part in mx.__version__.split(".")[:3])
    return 10000 * major + 100 * minor + patch


def _in_order(heads: Sequence[Entry]) -> list[Node]:
    """Return all nodes in MXNet's order: depth first, operands before the node that takes them."""
    done: dict[Node, None] = {}
    waiting = [(entry.node, False) for entry in reversed(heads)]
    while waiting:
        node, operands_are_done = waiting.pop()
        if node in done:
            continue
        if operands_are_done:
            done[node] = None
        else:
            waiting.append((node, True))
            waiting.extend((entry.node, False) for entry in reversed(node.inputs))
    return list(done)
