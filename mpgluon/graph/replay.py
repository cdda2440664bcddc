"""Calling a graph's operators one by one, on arrays or symbols, as a ``hybrid_forward`` would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from mpgluon import kernels
from mpgluon.errors import PrecisionError
from mpgluon.graph.nodes import Graph, Key, Node

import mxnet as mx
from mxnet import gluon
from mxnet.symbol import Symbol

__all__ = ["replay"]


def replay(
    graph: Graph,
    F: Any,  # noqa: N803 - Gluon's name
    variables: Mapping[str, Any],
    *,
    blocks: Optional[Mapping[Node, gluon.Block]] = None,
    shapes: Optional[Mapping[Node, tuple[int, ...]]] = None,
    prefix: str = "",
) -> dict[Key, Any]:
    """Call the operators of a graph, and return every output.

    Parameters
    ----------
    graph : Graph
    F : module
        ``mx.nd``, ``mx.sym`` or a stand-in for one. While MXNet's NumPy interface is switched on,
        all arrays are of it, and so are the operators.
    variables : mapping from name to array
        The variables; a parameter of one of the ``blocks`` may be missing.
    blocks : mapping from Node to Block, optional
        Blocks that replace operators, called with the first operand only.
    shapes : mapping from Node to tuple of int, optional
        The shapes of arrays that operators make, where only a whole graph infers a part of them.
    prefix : str
        The prefix that MXNet itself puts before names.

    Raises
    ------
    PrecisionError
        If an operator belongs to MXNet's NumPy interface, which is switched off.
    """
    values: dict[Key, Any] = {}
    for node in graph.nodes:
        if node.is_variable:
            values[node, 0] = variables.get(node.name)
            continue
        operands = [values[entry.key] for entry in node.inputs]
        if blocks and node in blocks:
            result = blocks[node](operands[0])
        else:
            function = _operator_named(F, node.operator)
            options = node.options
            if shapes and node in shapes:
                options = {**options, "shape": shapes[node]}
            result = function(*operands, name=node.name.removeprefix(prefix), **options)
        values.update({(node, number): one for number, one in enumerate(_outputs(result))})
    return values


def _operator_named(F: Any, name: str) -> Any:  # noqa: N803 - Gluon's name
    """Return the function that calls an operator, which ``F`` keeps in several places.

    Raises
    ------
    PrecisionError
        If there is none: the operator belongs to MXNet's NumPy interface, which is switched off.
    """
    if mx.util.is_np_array():
        return kernels.function(name, of_symbols=F is mx.sym, in_numpy=True)
    # The only operator of mx.nd and mx.sym whose name in a graph is from the NumPy interface.
    place, local = F, "cumsum" if name == "_np_cumsum" else name
    if local.startswith("_"):
        part, _, rest = local[1:].partition("_")
        # F.random takes other arguments than _random_normal, but the same as _random_normal_like.
        if part in ("contrib", "linalg", "image", "sparse") or name.endswith("_like"):
            place, local = getattr(F, part, None), rest
        else:
            place = F._internal
    function = getattr(place, local, None)
    if function is None:
        raise PrecisionError(
            f"the graph has the operator {name}, which mx.nd and mx.sym cannot call; those of "
            "MXNet's NumPy interface begin with _np: call mx.npx.set_np() before the network is "
            "made, cast and run, or keep a block with it in FP32 with keep_fp32"
        )
    return function


def _outputs(result: Any) -> list[Any]:
    count = len(result.list_outputs()) if isinstance(result, Symbol) else 1
    if count > 1:
        return [result[number] for number in range(count)]
    return list(result) if isinstance(result, (list, tuple)) else [result]
