"""The nodes of an MXNet graph as Python objects: reading a Symbol, writing one."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet.symbol import Symbol

__all__ = ["Entry", "Key", "Node", "infer_dtypes", "options_of", "read_graph", "write_graph"]


@dataclass(eq=False)
class Node:
    """A node of a graph; ``op`` is ``"null"`` for an argument.

    Attributes
    ----------
    op, name : str
    attrs : dict
        The operator's settings, as text.
    inputs : list of Entry
    rest : dict
        What MXNet's JSON says of it beyond these.
    """

    op: str
    name: str
    attrs: dict[str, str] = field(default_factory=dict)
    inputs: list[Entry] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)

    def casts_to(self, dtype: str) -> bool:
        """Whether it is a cast to this format."""
        return self.op == "amp_cast" and self.attrs["dtype"] == dtype


class Entry(NamedTuple):
    """One of the results of a node, as an operand of another or a result of the graph."""

    node: Node
    number: int = 0
    version: int = 0  # counts who has written an auxiliary state

    @property
    def key(self) -> Key:
        """What tells results apart."""
        return self.node, self.number


Key = tuple[Node, int]


def options_of(attributes: Mapping[str, str]) -> dict[str, Any]:
    """Return an operator's options as Python values; what MXNet keeps for itself is left out."""
    return {key: _value(text) for key, text in attributes.items() if not key.startswith("__")}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a word, such as "relu"
        return text


def read_graph(symbol: Symbol) -> tuple[list[Node], list[Entry]]:
    """Return the nodes of a graph, operands first, and its results."""
    graph = json.loads(symbol.tojson(remove_amp_cast=False))
    nodes: list[Node] = []
    for record in graph["nodes"]:
        inputs = [Entry(nodes[i], index, version) for i, index, version in record.pop("inputs")]
        op, name, attrs = record.pop("op"), record.pop("name"), record.pop("attrs", {})
        nodes.append(Node(op, name, attrs, inputs, record))
    return nodes, [Entry(nodes[i], index, version) for i, index, version in graph["heads"]]


def write_graph(heads: Sequence[Entry]) -> Symbol:
    """Return the graph with these results."""
    nodes = _in_order(heads)
    numbers = {node: number for number, node in enumerate(nodes)}

    def positions(entries: Sequence[Entry]) -> list[list[int]]:
        return [[numbers[entry.node], entry.number, entry.version] for entry in entries]

    records = [
        {"op": n.op, "name": n.name, "attrs": n.attrs, "inputs": positions(n.inputs), **n.rest}
        for n in nodes
    ]
    graph = {
        "nodes": records,
        "arg_nodes": [number for number, node in enumerate(nodes) if node.op == "null"],
        "heads": positions(heads),
        "attrs": {"mxnet_version": ["int", _version_number()]},
    }
    return mx.sym.load_json(json.dumps(graph))


def _version_number() -> int:
    """Return MXNet's version as its JSON says it; without one it looks for graphs of old."""
    major, minor, patch = (int(part) for part in mx.__version__.split(".")[:3])
    return 10000 * major + 100 * minor + patch


def _in_order(heads: Sequence[Entry]) -> list[Node]:
    """Return all nodes in MXNet's own order: depth first, operands before what takes them."""
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


def infer_dtypes(
    nodes: Sequence[Node], heads: Sequence[Entry], known: Mapping[str, str]
) -> dict[Key, Any]:
    """Return the dtype of each result, ``None`` where MXNet cannot tell.

    Parameters
    ----------
    nodes, heads
        From :func:`read_graph`.
    known : mapping from name to dtype
        Of the arguments and auxiliary states.
    """
    names = [node.name for node in nodes]
    for number, node in enumerate(nodes):
        node.name = f"n{number}"  # so that the name of a result tells its node
    results = write_graph(heads).get_internals()
    # MXNet has no name for bfloat16 here, and finds it out from what takes the argument.
    given = {n.name: known[name] for n, name in zip(nodes, names) if n.op == "null"}
    arguments = {name: dtype for name, dtype in given.items() if dtype != "bfloat16"}
    _, dtypes, _ = results.infer_type_partial(**arguments)
    for node, name in zip(nodes, names):
        node.name = name
    found: dict[Node, list[Any]] = defaultdict(list)
    for result, dtype in zip(results.list_outputs(), dtypes):
        found[nodes[int(result[1:].split("_")[0])]].append(dtype and _name(np.dtype(dtype)))
    return {(node, i): dtype for node, all_ in found.items() for i, dtype in enumerate(all_)}


def _name(dtype: np.dtype[Any]) -> str:
    return dtype.names[0] if dtype.names else dtype.name  # MXNet's bfloat16 has a field's name
