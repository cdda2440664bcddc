"""Rewriting the graph of a bfloat16 network on a CPU so that it does the same with less work.

A cast that involves bfloat16 goes through an identity, whose gradient can be added to, where
oneDNN's cast overwrites. The identity copies every weight in every step, forward and backward. One
native operator does both without the copies, and gives the same bits.

A convolution of images, of at most three channels, is computed in FP32 on rounded operands, and its
result is rounded: the products are exact, as in bfloat16, and only the order of the sums differs.
oneDNN's own in bfloat16 takes longer and leaves a plain array, on which a BatchNorm then takes
longer than all others of a ResNet-50 together.

``clip``, such as a ReLU6, and padding with zeros take and return bfloat16 where their operand was
cast from it and nothing is rounded otherwise.

BatchNorm, depthwise convolutions and the gradients of weights of narrow groups are computed by own
operators in layouts and shapes for which oneDNN has slow code only. Their FP32 sums have another
order than oneDNN's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from typing import Any, Optional

from mpgluon import kernels
from mpgluon.formats.float_format import BFLOAT16
from mpgluon.graph.any_layout import ANY_LAYOUT, compute_in_any_layout, pads_images_with_zeros
from mpgluon.graph.nodes import ADDED_IN_PLACE, Entry, Graph, Node
from mpgluon.kernels.dtypes import CAST_NUMBER

import numpy as np
from mxnet.symbol import Symbol

__all__ = ["compute_natively"]

_NARROW, _WIDEN = "_mpgluon_to_bfloat16", "_mpgluon_from_bfloat16"
_OPERATORS = {("float32", "bfloat16"): _NARROW, ("bfloat16", "float32"): _WIDEN}
_GROUPED, _CONCAT = "_mpgluon_grouped_", "_mpgluon_bfloat16_Concat"
_DENSE, _POOLING = "_mpgluon_bfloat16_FullyConnected", "_mpgluon_bfloat16_Pooling"
_NORM = f"{ANY_LAYOUT}BatchNorm"
_IN_BLOCKS = "_in_blocks"
_MOST_CHANNELS_OF_IMAGES, _AXES_OF_IMAGES = 3, 2
_NUMBERS = count()


def compute_natively(
    symbol: Symbol,
    dtypes: Mapping[str, Any],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    for_backend: bool = False,
) -> Symbol:
    """Return a graph with native casts, and first convolutions where oneDNN is fast.

    Parameters
    ----------
    symbol : Symbol
    dtypes : mapping from name to dtype
        Dtypes of every argument and auxiliary state.
    shapes : mapping from name to shape
        Shapes of the parameters.
    for_backend : bool
        Whether a backend will fuse operators, which it knows by MXNet's names.

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
    graph = Graph(graph.heads)
    for node in graph.nodes:
        if _is_of_images(node, shapes):
            _compute_in_fp32(graph, node, for_backend=for_backend)
    graph = Graph(graph.heads)
    for node in list(graph.nodes):
        if node.operator == "clip":
            _clip_in_bfloat16(graph, node)
    graph = Graph(graph.heads)
    for node in graph.nodes:
        if node.operator == "Pad":
            _pad_in_bfloat16(graph, node)
        else:
            _choose_own_operator(node, for_backend=for_backend)
    _hold_in_bfloat16(graph)
    graph = Graph(graph.heads)
    for node in graph.nodes:
        if node.operator in (_NARROW, _WIDEN) and _may_keep_blocks(graph, node.inputs[0]):
            node.operator += _IN_BLOCKS
    return compute_in_any_layout(graph.symbol(), for_backend=for_backend)


def _is_behind_identity(node: Node) -> bool:
    """Whether a node is a cast that was made together with the identity in front of it."""
    if node.operator != "amp_cast" or CAST_NUMBER not in node.attributes:
        return False
    before = node.inputs[0].node
    number = node.attributes[CAST_NUMBER]
    return before.operator == "_copy" and before.attributes.get(CAST_NUMBER) == number


def _may_keep_blocks(graph: Graph, operand: Entry) -> bool:
    """Whether a cast and its gradient may leave arrays in oneDNN's blocks of channels.

    Where MXNet adds gradients in place, it loses their layout.
    """
    return not operand.node.is_variable and len(_readers(graph, operand)) < ADDED_IN_PLACE


def _is_of_images(node: Node, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a node is a convolution in bfloat16 of arrays with few channels."""
    if node.operator != "Convolution" or node.outputs[0].dtype != "bfloat16":
        return False
    weight = node.inputs[1].node
    if weight.operator == _NARROW:
        weight = weight.inputs[0].node
    shape = shapes.get(weight.name, ())
    return (
        len(shape) == 4
        and shape[1] <= _MOST_CHANNELS_OF_IMAGES
        and node.options.get("num_group", 1) == 1
    )


def _compute_in_fp32(graph: Graph, node: Node, *, for_backend: bool) -> None:
    """Let a convolution take and return FP32 values, and round its result.

    Rounding may change places with ReLU, max pooling and clipping, which keep the order of numbers:
    it comes last, so that oneDNN can fuse the others, and fewer numbers are rounded. Behind a clip
    only a backend has it so: gradients of numbers that are rounded to a bound would be others.
    """
    node.inputs = [_fp32_of(entry) for entry in node.inputs]
    followers = _followers(graph, node, _WIDEN, "clip", _NARROW) if for_backend else None
    if followers is not None:
        followers[1].inputs = [Entry(node)]
        return
    result = node
    behind = _only_reader(graph, Entry(result))
    if behind is not None and behind.options.get("act_type") == "relu":
        result, behind = behind, _only_reader(graph, Entry(behind))
    if behind is not None and behind.operator == _WIDEN and _is_for_max_pooling(graph, behind):
        _replace(graph, behind, result)
    else:
        _replace(graph, result, _made(_NARROW, Entry(result)).node)


def _clip_in_bfloat16(graph: Graph, node: Node) -> None:
    """Clip bfloat16 numbers instead of FP32 numbers that were cast from them for this alone."""
    before, behind = node.inputs[0].node, _only_reader(graph, Entry(node))
    if before.operator != _WIDEN or _only_reader(graph, node.inputs[0]) is not node:
        return
    rounding = behind if behind is not None and behind.operator == _NARROW else None
    bounds = np.array([node.options["a_min"], node.options["a_max"]], np.float32)
    if rounding is None and np.any(bounds.view(np.uint32) & 0xFFFF):
        return  # bfloat16 does not have both bounds
    node.inputs = before.inputs
    if rounding is not None:
        _replace(graph, rounding, node)
    else:
        wide = _made(_WIDEN, Entry(node)).node
        _replace(graph, node, wide)
        graph.nodes.append(wide)


def _pad_in_bfloat16(graph: Graph, node: Node) -> None:
    """Leave out the casts around a ``Pad`` of images with zeros that they are for alone."""
    before, behind = node.inputs[0].node, _only_reader(graph, Entry(node))
    if before.operator != _WIDEN or behind is None or behind.operator != _NARROW:
        return
    if pads_images_with_zeros(node) and _only_reader(graph, node.inputs[0]) is node:
        node.inputs = before.inputs
        _replace(graph, behind, node)


def _choose_own_operator(node: Node, *, for_backend: bool) -> None:
    """Choose an own operator where oneDNN has slow code for some layouts or shapes."""
    options, has_gradients = node.options, not for_backend
    if node.operator == "Convolution" and options.get("num_group", 1) > 1 and has_gradients:
        node.operator = f"{_GROUPED}Convolution"
    elif node.operator == "FullyConnected" and has_gradients:
        node.operator = _DENSE
    elif node.operator == "BatchNorm" and options.get("axis", 1) == 1:
        node.operator = _NORM
    elif node.operator == "broadcast_mul":
        node.operator = f"{ANY_LAYOUT}broadcast_mul"
    elif _averages_all_pixels(node):
        node.operator = f"{ANY_LAYOUT}Pooling"
        node.attributes = {"global_pool": "True", "pool_type": "avg", "kernel": "(1, 1)"}


def _averages_all_pixels(node: Node) -> bool:
    if node.operator == "_contrib_AdaptiveAvgPooling2D":
        return node.options.get("output_size", 1) in (1, (1,), (1, 1), ())
    return _is_pooling(node, "avg") and bool(node.options.get("global_pool"))


def _is_pooling(node: Node, kind: str) -> bool:
    """Whether a node is a pooling of this kind, with the channels first."""
    return (
        node.operator == "Pooling"
        and node.options.get("pool_type", "max") == kind
        and node.options.get("layout") in (None, "None", "NCHW")
    )


def _hold_in_bfloat16(graph: Graph) -> None:
    """Concatenate, normalize and pool bfloat16 numbers where the results are rounded in any case.

    BatchNorm, ReLU and max pooling take and return bfloat16 where their operand was cast from it,
    and their results are read by casts to it, or by each other; so does the concatenation of
    channels, whose results BatchNorm and averages may read in FP32. Forward, only other operands of
    a concatenation are rounded earlier; backward, the sums of gradients are rounded.
    """
    readers: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for entry in node.inputs:
            if entry.number == 0:
                readers[entry.node].append(node)
    results = {entry.node for entry in graph.heads}
    holds: dict[Node, bool] = {}
    for node in reversed(graph.nodes):
        if _joins(node):
            fitting = [
                one.operator in (_NARROW, _NORM, "Pooling") or _joins(one) for one in readers[node]
            ]
        elif _is_relu(node) or _pools(node) or node.operator == _NORM:
            fitting = [one.operator == _NARROW or holds[one] for one in readers[node]]
        else:
            fitting = [False]
        holds[node] = node not in results and len(fitting) < ADDED_IN_PLACE and all(fitting)
    for node in [node for node in graph.nodes if holds[node]]:
        operands = node.inputs if _joins(node) else node.inputs[:1]
        if not any(entry.node.operator == _WIDEN for entry in operands):
            continue
        for number, entry in enumerate(operands):
            is_wide = entry.node.operator == _WIDEN
            node.inputs[number] = entry.node.inputs[0] if is_wide else _made(_NARROW, entry)
        if _joins(node):
            node.operator = _CONCAT
        elif _pools(node):
            node.operator = _POOLING
        wide = _made(_WIDEN, Entry(node))
        for reader in readers[node]:
            reader.inputs = [wide if one.key == (node, 0) else one for one in reader.inputs]
        graph.nodes.append(wide.node)
    for node in graph.nodes:
        node.inputs = [_without_casts(entry) for entry in node.inputs]


def _without_casts(entry: Entry) -> Entry:
    """Return a bfloat16 value that was cast to FP32 and back."""
    if entry.node.operator == _NARROW and entry.node.inputs[0].node.operator == _WIDEN:
        return entry.node.inputs[0].node.inputs[0]
    return entry


def _joins(node: Node) -> bool:
    return node.operator == "Concat" and node.options.get("dim", 1) == 1


def _pools(node: Node) -> bool:
    """Whether a node is the max pooling of images, and not of all their pixels."""
    of_images = len(node.options.get("kernel", ())) == _AXES_OF_IMAGES
    return _is_pooling(node, "max") and of_images and not node.options.get("global_pool")


def _is_relu(node: Node) -> bool:
    return node.operator == "Activation" and node.options["act_type"] == "relu"


def _fp32_of(entry: Entry) -> Entry:
    """Return the FP32 value of a bfloat16 one; the gradient is rounded too."""
    if entry.node.operator == _NARROW:
        return _made(kernels.operator("plain_both", BFLOAT16), entry.node.inputs[0])
    return _made(_WIDEN, entry)


def _is_for_max_pooling(graph: Graph, node: Node) -> bool:
    """Whether all that becomes of a value is that it is pooled and then rounded to bfloat16."""
    pooling = _only_reader(graph, Entry(node))
    if pooling is None or pooling.operator != "Pooling":
        return False
    readers = _readers(graph, Entry(pooling))
    is_max = pooling.options.get("pool_type", "max") == "max"
    return is_max and all(one is not None and one.operator == _NARROW for one in readers)


def _readers(graph: Graph, read: Entry) -> list[Optional[Node]]:
    """Return the nodes that take a value, and ``None`` where it is a result of the graph."""
    readers: list[Optional[Node]] = [
        node for node in graph.nodes for entry in node.inputs if entry.key == read.key
    ]
    return readers + [None for entry in graph.heads if entry.key == read.key]


def _only_reader(graph: Graph, read: Entry) -> Optional[Node]:
    readers = _readers(graph, read)
    return readers[0] if len(readers) == 1 else None


def _followers(graph: Graph, node: Node, *operators: str) -> Optional[list[Node]]:
    """Return the only reader of a node, its only reader and so on, if they have these operators."""
    followers: list[Node] = []
    for operator in operators:
        behind = _only_reader(graph, Entry(followers[-1] if followers else node))
        if behind is None or behind.operator != operator:
            return None
        followers.append(behind)
    return followers


def _replace(graph: Graph, old: Node, new: Node) -> None:
    """Let everything but ``new`` itself take the first result of ``new`` in place of ``old``'s."""

    def replaced(entries: list[Entry]) -> list[Entry]:
        return [Entry(new) if entry.key == (old, 0) else entry for entry in entries]

    for node in graph.nodes:
        if node is not new:
            node.inputs = replaced(node.inputs)
    graph.heads = replaced(graph.heads)


def _made(operator: str, entry: Entry) -> Entry:
    number = str(next(_NUMBERS))  # MXNet merges equal nodes
    return Entry(Node(operator, f"bfloat16_{number}", {CAST_NUMBER: f"first{number}"}, [entry]))
