"""Rewriting the graph of a bfloat16 network on a CPU so that its casts copy nothing.

A cast that involves bfloat16 goes through an identity, whose gradient can be added to, where
oneDNN's cast overwrites. The identity copies every weight in every step, forward and backward. The
native operators are both in one: the same bits without the copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from mxnet.symbol import Symbol

from mpgluon.graph.nodes import Node, infer_dtypes, read_graph, write_graph
from mpgluon.numerics.dtypes import CAST_NUMBER

__all__ = ["cast_without_copies"]

_OPERATORS: dict[tuple[Optional[str], str], str] = {
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
    nodes, heads = read_graph(symbol)
    known = infer_dtypes(nodes, heads, dtypes)
    for node in nodes:
        if not _is_behind_identity(node):
            continue
        (operand,) = node.inputs[0].node.inputs
        operator = _OPERATORS.get((known.get(operand.key), node.attrs["dtype"]))
        if operator is not None:
            # The number keeps it apart from equal ones, see dtypes.cast.
            node.op, node.attrs = operator, {CAST_NUMBER: node.attrs[CAST_NUMBER]}
            node.inputs = [operand]
    return write_graph(heads)


def _is_behind_identity(node: Node) -> bool:
    """Whether a node is a cast that was made together with the identity in front of it."""
    if node.op != "amp_cast" or CAST_NUMBER not in node.attrs:
        return False
    before = node.inputs[0].node
    return before.op == "_copy" and before.attrs.get(CAST_NUMBER) == node.attrs[CAST_NUMBER]
