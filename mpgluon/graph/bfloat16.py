"""Rewriting the graph of a bfloat16 network on a CPU so that its casts copy nothing.

A cast that involves bfloat16 goes through an identity, whose gradient can be added to, where
oneDNN's cast overwrites. The identity copies every weight in every step, forward and backward. One
native operator does both without the copies, and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mxnet.symbol import Symbol

from mpgluon.graph.nodes import Graph, Node
from mpgluon.numerics.dtypes import CAST_NUMBER

__all__ = ["cast_without_copies"]

_OPERATORS = {
    ("float32", "bfloat16"): "_mpgluon_to_bfloat16",
    ("bfloat16", "float32"): "_mpgluon_from_bfloat16",
}


def cast_without_copies(symbol: Symbol, dtypes: Mapping[str, Any]) -> Symbol:
    """Return a graph with the same results and gradients, with native casts to and from bfloat16.

    Parameters
    ----------
    symbol : Symbol
    dtypes : mapping from name to dtype
        Of every argument and auxiliary state.

    Returns
    -------
    Symbol
        Its arguments and results have the names, the order and the dtypes of the old one's.
    """
    graph = Graph.read(symbol)
    graph.infer(dtypes)
    for node in graph.nodes:
        if not _is_behind_identity(node):
            continue
        (operand,) = node.inputs[0].node.inputs
        operator = _OPERATORS.get((operand.value.dtype, node.attributes["dtype"]))
        if operator is not None:
            # The number keeps it apart from equal ones, see dtypes.cast.
            node.operator = operator
            node.attributes = {CAST_NUMBER: node.attributes[CAST_NUMBER]}
            node.inputs = [operand]
    return Graph(graph.heads).symbol()


def _is_behind_identity(node: Node) -> bool:
    """Whether a node is a cast that was made together with the identity in front of it."""
    if node.operator != "amp_cast" or CAST_NUMBER not in node.attributes:
        return False
    before = node.inputs[0].node
    number = node.attributes[CAST_NUMBER]
    return before.operator == "_copy" and before.attributes.get(CAST_NUMBER) == number
