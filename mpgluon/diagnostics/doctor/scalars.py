"""Numbers in a network's code that are infinite in the format of the array they are written to.

``-1e18`` fills masks in FP32. In float16 it is minus infinity, and the softmax of a fully masked
row is then NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Optional

from mpgluon.findings import Finding, ok, warning
from mpgluon.graph.nodes import NUMBER, Graph, Node
from mpgluon.graph.operators import facts_in_graph, name_in_f

import numpy as np

__all__ = ["scalars"]

_WRITTEN = (NUMBER, "scalar", "value", "constant_value", "on_value", "off_value")
# With these an infinity has the effect of the number.
_COMPARES = frozenset(
    f"_{prefix}{name}_scalar"
    for prefix, less in (("", "lesser"), ("npi_", "less"))
    for name in (
        *("maximum", "minimum", "fmax", "fmin"),
        *("equal", "not_equal", "greater", "greater_equal", less, f"{less}_equal"),
    )
)
_LARGEST = float(np.finfo(np.float16).max)


def scalars(graph: Graph) -> Iterator[Finding]:
    """Yield findings about the numbers in a graph; a function of the graph alone."""
    becoming_float16 = _becoming_float16(graph)
    has_finding = False
    for node in graph.nodes:
        values = [*(entry.value for entry in node.inputs), *node.outputs]
        meets = node in becoming_float16 or any(value.dtype == "float16" for value in values)
        if not meets or node.operator in _COMPARES:
            continue
        for written in filter(_is_too_large, map(_number, map(node.attributes.get, _WRITTEN))):
            has_finding = True
            yield warning(
                "scalar",
                f"{name_in_f(node.operator)} in {node.layer} writes {written:g} into float16",
                f"float16 ends at {_LARGEST:g}, so it becomes {math.copysign(math.inf, written)}; "
                "a softmax over a fully masked row is then NaN, and so is "
                "infinity times zero",
                f"a number that float16 has, such as {math.copysign(1e4, written):g} for a mask (a "
                "block with a cast method or a _dtype receives its format from the cast, and can "
                "choose), or keep the block in FP32 with keep_fp32",
            )
    if not has_finding:
        yield ok("scalar", "every number in the code is one in the format it meets")


def _becoming_float16(graph: Graph) -> set[Node]:
    """Return the nodes whose FP32 results are rounded to float16 unchanged."""
    nodes: set[Node] = set()
    for node in reversed(graph.nodes):
        casts = node.operator in ("amp_cast", "Cast") and node.outputs[0].dtype == "float16"
        if casts or (facts_in_graph(node.operator).moves and node in nodes):
            nodes.update(entry.node for entry in node.inputs)
    return nodes


def _is_too_large(number: float) -> bool:
    return math.isfinite(number) and math.isinf(np.float32(number).astype(np.float16))


def _number(text: Optional[str]) -> float:
    try:
        return float(text or "nan")
    except ValueError:  # an option of another kind
        return math.nan
