"""What a traced graph says of its 16-bit values before it is rewritten; see graph/grid.py.

"float16" stands for the emulated format here: values of another format are marked as float16 first.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Optional

from mpgluon.graph.nodes import Entry, Graph, Key, Node

__all__ = ["Analysis", "Consumer", "is_relu"]

Consumer = tuple[Optional[Node], int]
"""What takes a value: a node (``None`` for the graph's results) and the position of the operand."""


class Analysis:
    """A traced graph whose dtypes were inferred, and what follows from it.

    Attributes
    ----------
    nodes, heads
        As in :class:`~mpgluon.graph.nodes.Graph`.
    consumers : dict from Key to list of Consumer
        In the order in which MXNet collects the gradients that they return.
    values_on_grid : set of Key
        FP32 values that need no rounding.
    gradients_on_grid : set of Key
        FP32 values whose gradients need no rounding.
    """

    def __init__(self, graph: Graph) -> None:
        self.nodes, self.heads = graph.nodes, graph.heads
        self.consumers: defaultdict[Key, list[Consumer]] = defaultdict(list)
        for position, entry in enumerate(self.heads):
            self.consumers[entry.key].append((None, position))
        for node in reversed(self.nodes):
            for position, entry in enumerate(node.inputs):
                self.consumers[entry.key].append((node, position))
        self.values_on_grid = self._find_values_on_grid()
        self.gradients_on_grid = self._find_gradients_on_grid()

    def narrows(self, node: Node) -> bool:
        """Whether a node is a cast from FP32 to float16."""
        return node.casts_to("float16") and node.inputs[0].value.dtype == "float32"

    def widens(self, node: Node) -> bool:
        """Whether a node is a cast from float16 to FP32."""
        return node.casts_to("float32") and node.inputs[0].value.dtype == "float16"

    def copies(self, node: Node) -> bool:
        """Whether a node returns its FP32 operand unchanged."""
        return node.operator == "_copy" and node.inputs[0].value.dtype == "float32"

    def _find_values_on_grid(self) -> set[Key]:
        found: set[Key] = set()
        for node in self.nodes:
            keeps = self.copies(node) or is_relu(node)
            if self.widens(node) or (keeps and node.inputs[0].key in found):
                found.add((node, 0))
        return found

    def _find_gradients_on_grid(self) -> set[Key]:
        found: set[Key] = set()
        for node in reversed(self.nodes):
            consumer = self.only_consumer((node, 0))[0]
            if consumer is not None:
                passes = (
                    self.copies(consumer)
                    or is_relu(consumer)
                    or consumer.operator == "elemwise_add"
                )
                narrows = self.narrows(consumer) and not self.rounds_before_relu(consumer)
                if narrows or (passes and (consumer, 0) in found):
                    found.add((node, 0))
        return found

    def only_consumer(self, key: Key) -> Consumer:
        """Return the one consumer of a value; ``(None, 0)`` if there are none or several."""
        consumers = self.consumers[key]
        return consumers[0] if len(consumers) == 1 else (None, 0)

    def rounds_before_relu(self, node: Node) -> bool:
        """Whether the sum of the two gradients of a ReLU's float16 result is rounded behind it.

        ReLU's gradient is the incoming one or zero, so it may be rounded before or after. After,
        the rounding often coincides with one that is needed there anyway.
        """
        return len(self.consumers[node, 0]) == 2 and is_relu(self.origin(node.inputs[0]))

    def origin(self, entry: Entry) -> Node:
        """Return the node that made an FP32 value, behind any copies."""
        while self.copies(entry.node):
            entry = entry.node.inputs[0]
        return entry.node

    def takes_float16(self, node: Node, position: int = 0) -> bool:
        """Whether an operand of a node is a float16 value that was widened for it alone."""
        if len(node.inputs) <= position:
            return False
        widened = node.inputs[position].node
        return self.widens(widened) and self.consumers[widened, 0] == [(node, position)]

    def becomes_float16(self, node: Node) -> bool:
        """Whether every consumer of a node's result takes it as float16."""
        return all(
            consumer is not None
            and (
                self.narrows(consumer) or (self.copies(consumer) and self.becomes_float16(consumer))
            )
            for consumer, _ in self.consumers[node, 0]
        )


def is_relu(node: Node) -> bool:
    """Whether a node is a ReLU layer's operator."""
    return node.operator == "Activation" and node.attributes["act_type"] == "relu"
