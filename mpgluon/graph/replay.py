"""Calling a graph's operators one by one, on arrays or symbols, as a ``hybrid_forward`` would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from mxnet import gluon
from mxnet.symbol import Symbol

from mpgluon.graph.nodes import Graph, Key, Node

__all__ = ["replay"]


def replay(
    graph: Graph,
    F: Any,  # noqa: N803 - Gluon's name
    given: Mapping[str, Any],
    *,
    blocks: Optional[Mapping[Node, gluon.Block]] = None,
    prefix: str = "",
) -> dict[Key, Any]:
    """Call the operators of a graph, and return every output.

    Parameters
    ----------
    graph : Graph
    F : module
        ``mx.nd``, ``mx.sym`` or a stand-in for one.
    given : mapping from name to array
        The variables; a parameter of one of the ``blocks`` may be missing.
    blocks : mapping from Node to Block, optional
        Blocks that replace operators, called with the first operand only.
    prefix : str
        What MXNet itself puts before names.
    """
    found: dict[Key, Any] = {}
    for node in graph.nodes:
        if node.is_variable:
            found[node, 0] = given.get(node.name)
            continue
        operands = [found[entry.key] for entry in node.inputs]
        if blocks and node in blocks:
            result = blocks[node](operands[0])
        else:
            function = _operator_named(F, node.operator)
            result = function(*operands, name=node.name.removeprefix(prefix), **node.options)
        found.update({(node, number): one for number, one in enumerate(_outputs(result))})
    return found


def _operator_named(F: Any, name: str) -> Any:  # noqa: N803 - Gluon's name
    """Return the function that calls an operator, which ``F`` keeps in several places."""
    for part in ("contrib", "linalg"):
        if name.startswith(f"_{part}_"):
            return getattr(getattr(F, part), name.removeprefix(f"_{part}_"))
    return getattr(F._internal if name.startswith("_") else F, name)


def _outputs(result: Any) -> list[Any]:
    if isinstance(result, Symbol) and len(result) > 1:
        return [result[number] for number in range(len(result))]
    return list(result) if isinstance(result, (list, tuple)) else [result]
