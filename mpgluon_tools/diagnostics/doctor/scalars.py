"""Numbers in a network's code that are 0 or infinite in float16.

``-1e18`` fills masks in FP32, and ``1e-8`` keeps a denominator from zero. An operator of a cast
network computes with them in FP32; where they are written into float16, -1e18 is minus infinity,
the softmax of a fully masked row NaN, and so is 0 divided by ``0 + 1e-8``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from mpgluon.base.findings import Finding, note, ok, warning
from mpgluon.formats.float_format import FLOAT16
from mpgluon.graph.nodes import Graph, Node
from mpgluon.graph.operators import facts_in_graph, lost_numbers, name_in_f

import numpy as np

__all__ = ["scalars"]

# With these an infinity has the effect of the number.
_BOUNDS = re.compile("maximum|minimum|fmax|fmin|equal|greater|less|clip")


def scalars(graph: Graph) -> Iterator[Finding]:
    """Yield findings about the numbers in a graph; a function of the graph alone."""
    becoming_float16 = _becoming_float16(graph)
    has_finding = False
    for node in graph.nodes:
        values = [*(entry.value for entry in node.inputs), *node.outputs]
        is_float16 = any(value.dtype == "float16" for value in values)
        for number in lost_numbers(FLOAT16, node.operator, node.options):
            is_large = abs(number) > 1
            # A result that is rounded later need not keep numbers as small as that.
            is_rounded = node in becoming_float16 and (is_large or not node.inputs)
            if (is_float16 or is_rounded) and not (is_large and _BOUNDS.search(node.operator)):
                finding = _written(node, number)
            elif any(_widens(entry.node) for entry in node.inputs):
                finding = _in_fp32(node, number)
            else:
                continue
            has_finding = True
            yield finding
    if not has_finding:
        yield ok("scalar", "every number in the code is one in the format it meets")


def _widens(node: Node) -> bool:
    return node.casts_to("float32") and node.inputs[0].value.dtype == "float16"


def _written(node: Node, number: float) -> Finding:
    lost = _in_float16(number)
    return warning(
        "scalar",
        f"{name_in_f(node.operator)} in {node.layer} writes {number:g} into float16",
        f"float16 goes from {FLOAT16.smallest_subnormal:.2g} to {FLOAT16.max:g}, so it becomes "
        f"{lost:g}; "
        + (
            "a division by it, its logarithm or its root's gradient is then not finite"
            if lost == 0
            else "a softmax over a fully masked row is then NaN, and so is infinity times zero"
        ),
        f"a number that float16 has, such as {_instead(number):g} "
        "(a block with a cast method or a _dtype receives its format from the cast, and can "
        "choose), or keep the block in FP32 with keep_fp32",
    )


def _in_fp32(node: Node, number: float) -> Finding:
    lost = _in_float16(number)
    return note(
        "scalar",
        f"{name_in_f(node.operator)} in {node.layer} computes with {number:g}, in FP32",
        f"float16 would make it {lost:g}; the result is FP32, and so is what follows, up to the "
        "next product or normalization",
        f"nothing, or to save memory a number that float16 has, such as {_instead(number):g}",
    )


def _becoming_float16(graph: Graph) -> set[Node]:
    """Return the nodes whose FP32 results are rounded to float16 unchanged."""
    nodes: set[Node] = set()
    for node in reversed(graph.nodes):
        casts = node.operator in ("amp_cast", "Cast") and node.outputs[0].dtype == "float16"
        if casts or (facts_in_graph(node.operator).moves and node in nodes):
            nodes.update(entry.node for entry in node.inputs)
    return nodes


def _instead(number: float) -> float:
    """Return a number that float16 has, for one that it makes 0 or infinite."""
    return math.copysign(1e-4 if _in_float16(number) == 0 else 1e4, number)


def _in_float16(number: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(number).astype(np.float16))
