"""Operators of MXNet's that are fast on no layout of FP32 arrays, and own ones with the same bits.

MXNet's ``clip`` and ``Pad`` take one element at a time, of plain arrays: oneDNN's arrays, in blocks
of channels, are first turned around, and the results turned back for the next convolution. So they
are for sums, products and quotients, as in a hard swish.
"""

from __future__ import annotations

from mpgluon.graph.nodes import Graph, Node

from mxnet.symbol import Symbol

__all__ = ["ANY_LAYOUT", "compute_in_any_layout", "is_fused_clip", "pads_images_with_zeros"]

ANY_LAYOUT = "_mpgluon_any_layout_"
"""How the names of the own operators begin; MXNet's follows."""
_ELEMENTWISE = ("clip", "_plus_scalar", "_div_scalar", "elemwise_mul")


def compute_in_any_layout(symbol: Symbol, *, for_backend: bool = False) -> Symbol:
    """Return a graph with the same bits for a CPU, where there are native operators.

    A backend fuses some operators with the convolutions before them, and knows them by MXNet's
    names.
    """
    graph = Graph.read(symbol)
    slow = [
        node
        for node in graph.nodes
        if node.operator in _ELEMENTWISE or pads_images_with_zeros(node)
        if not (for_backend and is_fused_clip(node))
    ]
    for node in slow:
        node.operator = f"{ANY_LAYOUT}{node.operator}"
    return graph.symbol() if slow else symbol


def is_fused_clip(node: Node) -> bool:
    """Whether a backend may compute a node, a ReLU6, together with the convolution before it."""
    if node.operator != "clip" or node.options["a_min"] != 0:
        return False
    return node.inputs[0].node.operator == "Convolution"


def pads_images_with_zeros(node: Node) -> bool:
    """Whether a node is a ``Pad`` that the own operator computes."""
    if node.operator != "Pad":
        return False
    options = node.options
    of_images = len(options["pad_width"]) == 8 and not any(options["pad_width"][:4])
    with_zeros = options.get("constant_value", 0) == 0
    return of_images and with_zeros and options["mode"] == "constant"
