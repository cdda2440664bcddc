"""Tensor Core alignment: products whose sizes are not multiples of 8, and the cost of padding.

A Tensor Core multiplies tiles whose sides are multiples of 8 float16 numbers. This module finds
every convolution and matrix product of a network, with its three sizes. It computes nothing and
predicts no time: it counts the multiply-adds of the forward pass.

References
----------
NVIDIA, "Convolutional Layers User's Guide", 1, and "Linear/Fully-Connected Layers User's Guide",
1: channels divisible by 8 in FP16, in dense layers the batch too; 4 channels for an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Callable

from mpgluon.graph.description import InputShape, trace
from mpgluon.graph.nodes import Graph, Node
from mpgluon.graph.operators import Rule, name_in_f, rule_of
from mpgluon_tools.plots.axes import axes_or_new
from mpgluon_tools.plots.rows import draw_bars
from mpgluon_tools.tables import Result, Table

from mxnet import gluon

__all__ = ["AlignmentReport", "Product", "alignment_report"]


@dataclass(frozen=True)
class Product:
    """One matrix product, or many of the same sizes: batch x inputs times inputs x outputs.

    Attributes
    ----------
    layer : str
        The block that computes it.
    kind : str
        MXNet's operator, and for a recurrent layer the matrix.
    batch : int
        M of the product; the positions of a convolution, by which a GPU multiplies it, count as
        ``repeats``.
    inputs, outputs : int
        K and N of the product: channels, in each group of a grouped convolution.
    repeats : int
        Positions times kernel elements times groups, or time steps.
    multiple : int
        Aligned sizes are multiples of it.
    role : str
        ``"first convolution"``, ``"depthwise"``, ``"classifier"`` or empty.
    """

    layer: str
    kind: str
    batch: int
    inputs: int
    outputs: int
    repeats: int
    multiple: int = 8
    role: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that should be multiples, by name."""
        return {"batch": self.batch, "inputs": self.inputs, "outputs": self.outputs}

    @property
    def padded(self) -> dict[str, int]:
        """The sizes, each rounded up to the next multiple."""
        return {name: -(-n // self.multiple) * self.multiple for name, n in self.sizes.items()}

    @property
    def misaligned(self) -> tuple[str, ...]:
        """The names of the sizes that are not multiples."""
        return tuple(name for name, size in self.sizes.items() if size % self.multiple)

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one forward pass of the batch."""
        return prod(self.sizes.values()) * self.repeats

    @property
    def padded_multiply_adds(self) -> int:
        """The same with padded sizes."""
        return prod(self.padded.values()) * self.repeats

    @property
    def advice(self) -> str:
        """How to align it, in a few words; empty if it is aligned."""
        if self.role == "depthwise":
            return "one channel per group: no Tensor Core's work, leave it"
        return "; ".join(self._advice(name) for name in self.misaligned)

    def _advice(self, name: str) -> str:
        size, target = self.sizes[name], self.padded[name]
        if name == "inputs" and self.role == "first convolution" and size <= 4:
            return f"{size} image channels: leave them to cuDNN, or pad to 4 in NHWC"
        label = "classes" if name == "outputs" and self.role == "classifier" else name
        return f"{label} {size} -> {target}"


@dataclass(frozen=True)
class AlignmentReport(Result):
    """The products of a network, in the order in which they are computed.

    Attributes
    ----------
    products : tuple of Product
    unseen : tuple of str
        Operators that may multiply matrices and are not examined, such as control flow.
    multiple : int
        Aligned sizes are multiples of it.
    """

    products: tuple[Product, ...]
    unseen: tuple[str, ...]
    multiple: int

    @property
    def misaligned(self) -> tuple[Product, ...]:
        """The products with a size that is not a multiple."""
        return tuple(product for product in self.products if product.misaligned)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all products, in one forward pass of the batch."""
        return sum(product.multiply_adds for product in self.products)

    @property
    def misaligned_share(self) -> float:
        """The misaligned products' share in [0, 1] of the multiply-adds."""
        misaligned = sum(product.multiply_adds for product in self.misaligned)
        return misaligned / self.multiply_adds if self.products else 0.0

    @property
    def padding_cost(self) -> int:
        """The multiply-adds that padding adds, depthwise convolutions not counted.

        These have one channel in each group, and padding would multiply their cost by 64.
        """
        return sum(
            product.padded_multiply_adds - product.multiply_adds
            for product in self.products
            if product.role != "depthwise"
        )

    def table(self, *, everything: bool = False) -> Table:
        """Return the misaligned products as a table, or all of them."""
        shown = self.products if everything else self.misaligned
        total = self.multiply_adds
        headings = ("layer", "product", "batch", "inputs", "outputs", "10^6 multiply-adds")
        return Table(
            (*headings, "share", "padded", "advice"),
            [
                (
                    product.layer,
                    product.kind,
                    *(str(size) for size in product.sizes.values()),
                    f"{product.multiply_adds / 1e6:.3f}",
                    f"{product.multiply_adds / total:.2%}",
                    f"{product.padded_multiply_adds / product.multiply_adds - 1:+.1%}",
                    product.advice,
                )
                for product in shown
            ],
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw the shares of the multiply-adds of the 20 largest products, misaligned ones black.

        Draws on ``ax``, Axes of Matplotlib, by default of a new figure, and returns them.
        """
        axes = axes_or_new(ax)
        largest = sorted(self.products, key=lambda one: one.multiply_adds, reverse=True)[:20]
        products = [product for product in self.products if product in largest]
        shares = [100 * product.multiply_adds / self.multiply_adds for product in products]
        pairs = list(zip(products, shares))
        parts = {
            "misaligned": [share if product.misaligned else 0.0 for product, share in pairs],
            "aligned": [0.0 if product.misaligned else share for product, share in pairs],
        }
        draw_bars(axes, [product.layer for product in products], parts)
        axes.set_xlabel(f"share of the multiply-adds (%); aligned to {self.multiple}")
        return axes

    def __str__(self) -> str:
        lines = [
            f"{len(self.misaligned)} of {len(self.products)} products have a size that is no "
            f"multiple of {self.multiple}; they carry {self.misaligned_share:.2%} of "
            f"{self.multiply_adds / 1e6:,.1f} million multiply-adds"
        ]
        if self.misaligned:
            relative = self.padding_cost / self.multiply_adds
            lines.append(
                f"padding them would add {self.padding_cost / 1e6:,.1f} million ({relative:.2%}), "
                "depthwise convolutions left as they are"
            )
        if self.unseen:
            lines.append(f"not examined: {', '.join(self.unseen)}")
        return "\n".join([*lines, str(self.table())] if self.misaligned else lines)


def alignment_report(
    net: gluon.HybridBlock, input_shape: InputShape, *, multiple: int = 8
) -> AlignmentReport:
    """Find every convolution and matrix product of a network, and its sizes.

    Parameters
    ----------
    net : gluon.HybridBlock
        Initialized or not, cast or not, hybridized or not. It is not changed.
    input_shape : tuple of int, or sequence of such tuples
        Shape of its input, batch included, such as ``(32, 3, 224, 224)``; or of each input.
    multiple : int
        8 for 16-bit formats.

    Returns
    -------
    AlignmentReport
        Print it. The batch of a convolution is multiplied by its positions: a misaligned one
        matters less there than in a dense layer.

    Raises
    ------
    TypeError
        If ``net`` is not a ``HybridBlock``.
    ValueError
        If ``input_shape`` does not fit the network, or ``multiple`` is not positive.
    """
    if multiple < 1:
        raise ValueError(f"multiple must be a positive integer such as 8, received {multiple!r}")
    graph = trace(net, input_shape)
    products = [
        replace(product, multiple=multiple)
        for node in graph.nodes
        if node.operator in _PRODUCTS_OF
        for product in _PRODUCTS_OF[node.operator](node, graph)
    ]
    for place, role, kind in ((0, "first convolution", "Convolution"), (-1, "classifier", "Fully")):
        if products and products[place].kind.startswith(kind):
            products[place] = replace(products[place], role=products[place].role or role)
    return AlignmentReport(
        products=tuple(products),
        unseen=tuple(
            f"{node.name} ({node.operator})"
            for node in graph.nodes
            if node.operator not in _PRODUCTS_OF and (node.has_subgraph or _multiplies(node))
        ),
        multiple=multiple,
    )


def _multiplies(node: Node) -> bool:
    return rule_of(name_in_f(node.operator)) is Rule.COMPUTE or node.operator == "Custom"


def _flag(node: Node, name: str) -> bool:
    return node.attributes.get(name, "False") in ("True", "1")


def _convolution(node: Node, graph: Graph) -> Iterator[Product]:
    data, weight, *_ = graph.shapes(node)
    transposed = node.operator == "Deconvolution"
    groups = int(node.attributes.get("num_group", "1"))
    layout = node.attributes.get("layout", "None")
    channel_axis = layout.index("C") if "C" in layout else 1
    batch, channels = data[0], data[channel_axis]
    filters = int(node.attributes["num_filter"])
    # Each element of the smaller image, or of the result, meets each element of the kernel.
    positions = prod(data if transposed else node.outputs[0].shape) // batch
    positions //= channels if transposed else filters
    kernel = prod(weight) * groups // (channels * filters)
    yield Product(
        node.layer,
        node.operator,
        batch=batch,
        inputs=channels // groups,
        outputs=filters // groups,
        repeats=positions * kernel * groups,
        role="depthwise" if groups > 1 and channels == groups else "",
    )


def _fully_connected(node: Node, graph: Graph) -> Iterator[Product]:
    data, (outputs, inputs), *_ = graph.shapes(node)
    yield Product(node.layer, node.operator, prod(data) // inputs, inputs, outputs, repeats=1)


def _dot(node: Node, graph: Graph) -> Iterator[Product]:
    left, right = graph.shapes(node)
    if not left or not right:  # np.dot of a number
        return
    inner = left[0] if _flag(node, "transpose_a") else left[-1]
    yield Product(
        node.layer, node.operator, prod(left) // inner, inner, prod(right) // inner, repeats=1
    )


def _batch_dot(node: Node, graph: Graph) -> Iterator[Product]:
    left, right, *_ = graph.shapes(node)
    axis = int(node.attributes.get("axis", "-2"))  # of the rows; the columns are the last
    rows, inner = left[axis], left[-1]
    if _flag(node, "transpose_a"):
        rows, inner = inner, rows
    columns = right[axis] if _flag(node, "transpose_b") else right[-1]
    repeats = prod(left) // (rows * inner)
    yield Product(node.layer, node.operator, rows, inner, columns, repeats)


def _matmul(node: Node, graph: Graph) -> Iterator[Product]:
    left, right = graph.shapes(node)
    rows, columns = left[-2] if left[1:] else 1, right[-1] if right[1:] else 1
    repeats = prod(node.outputs[0].shape) // (rows * columns)
    yield Product(node.layer, node.operator, rows, left[-1], columns, repeats)


def _recurrent(node: Node, graph: Graph) -> Iterator[Product]:
    steps, batch, inputs = graph.shapes(node)[0]
    options = node.attributes
    size = int(options["state_size"])
    projection = options.get("projection_size", "None")
    state = size if projection == "None" else int(projection)
    gates = {"lstm": 4, "gru": 3}.get(options["mode"], 1) * size
    directions = 2 if _flag(node, "bidirectional") else 1
    repeats = steps * directions
    for layer in range(int(options.get("num_layers", "1"))):
        kind = f"RNN layer {layer}, "
        yield Product(node.layer, kind + "input", batch, inputs, gates, repeats)
        yield Product(node.layer, kind + "state", batch, state, gates, repeats)
        if projection != "None":
            yield Product(node.layer, kind + "projection", batch, size, state, repeats)
        inputs = state * directions


_PRODUCTS_OF: dict[str, Callable[[Node, Graph], Iterator[Product]]] = {
    "Convolution": _convolution,
    "Deconvolution": _convolution,
    "FullyConnected": _fully_connected,
    "dot": _dot,
    "_np_dot": _dot,
    "_npi_matmul": _matmul,
    "batch_dot": _batch_dot,
    "_linalg_gemm": _batch_dot,
    "_linalg_gemm2": _batch_dot,
    "RNN": _recurrent,
}
