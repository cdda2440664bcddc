"""Operators of MXNet's that are fast on no layout of FP32 arrays, and own ones with the same bits.

MXNet's ``clip`` and ``Pad`` take one element at a time, of plain arrays: oneDNN's arrays, in blocks
of channels, are first turned around, and the results turned back for the next convolution. The own
operators leave arrays in their layout. Most operators that follow compute the same bits from either
layout; BatchNorm and Pooling add the numbers of blocks in another order.
"""

from __future__ import annotations

from mpgluon import kernels
from mpgluon.graph.nodes import Graph, Node

from mxnet.symbol import Symbol

__all__ = [
    "ANY_LAYOUT",
    "compute_between_convolutions",
    "compute_in_any_layout",
    "pads_images_with_zeros",
]

ANY_LAYOUT = "_mpgluon_any_layout_"
"""How the names of the own operators begin; MXNet's follows."""
_ELEMENTWISE = ("_plus_scalar", "_div_scalar", "elemwise_mul")


def compute_in_any_layout(symbol: Symbol, *, for_backend: bool = False) -> Symbol:
    """Return a graph with own operators, where the order of the other operators' sums is free.

    A backend fuses some operators with the convolutions before them, and knows them by MXNet's
    names.
    """
    graph = Graph.read(symbol)
    slow = {node for node in graph.nodes if node.operator in _ELEMENTWISE or _is_slow(node)}
    return _with_own_operators(
        graph, {node for node in slow if not (for_backend and _is_fused(node))}
    )


def compute_between_convolutions(symbol: Symbol) -> Symbol:
    """Return a graph with own operators only where all operators keep their bits.

    And only where MXNet does not add to a gradient, which its ``clip`` overwrites. Where there are
    no native operators, the graph is the same one.
    """
    graph = Graph.read(symbol)
    slow = _between_convolutions(graph, {node for node in graph.nodes if _is_slow(node)})
    return _with_own_operators(graph, slow) if slow and kernels.load() else symbol


def _with_own_operators(graph: Graph, slow: set[Node]) -> Symbol:
    for node in slow:
        node.operator = f"{ANY_LAYOUT}{node.operator}"
    return graph.symbol()


def _is_slow(node: Node) -> bool:
    return node.operator == "clip" or pads_images_with_zeros(node)


def _is_fused(node: Node) -> bool:
    """Whether a backend may compute a node, a ReLU6, together with the convolution before it."""
    if node.operator != "clip" or node.options["a_min"] != 0:
        return False
    return node.inputs[0].node.operator == "Convolution"


def _between_convolutions(graph: Graph, slow: set[Node]) -> set[Node]:
    """Return the slow nodes whose layout changes no other operator's bits.

    A Convolution chooses its layouts by shapes alone, forward and backward. The backward pass of a
    BatchNorm takes the layout of its own input if that is in blocks, as the gradient of a ``clip``
    then is; the gradient of a ``Pad`` may be in blocks alone.
    """
    hidden, uses = slow - {head.node for head in graph.heads}, graph.uses()
    for node in reversed(graph.nodes):
        for place, one in enumerate(node.inputs):
            if node not in hidden and (node.operator, place) != ("Convolution", 0):
                hidden.discard(one.node)
    for node in graph.nodes:
        if node in hidden and (before := node.inputs[0]).node not in hidden:
            blind = {"Convolution", "BatchNorm"} if node.operator == "clip" else {"Convolution"}
            if before.node.operator not in blind or uses[before.key] > 1:
                hidden.remove(node)
    return hidden


def pads_images_with_zeros(node: Node) -> bool:
    """Whether a node is a ``Pad`` that the own operator computes."""
    if node.operator != "Pad":
        return False
    options = node.options
    of_images = len(options["pad_width"]) == 8 and not any(options["pad_width"][:4])
    with_zeros = options.get("constant_value", 0) == 0
    return of_images and with_zeros and options["mode"] == "constant"
