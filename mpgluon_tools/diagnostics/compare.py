"""Compare a network in 16 bits with FP32, layer by layer, and find layers to keep in FP32.

Errors are relative: the norm of the difference divided by the norm of the FP32 array. A layer is a
block that computes something itself, with or without inner blocks; a container is not a layer.
The sums of Tensor Cores are compared in :mod:`mpgluon_tools.diagnostics.sums`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from mpgluon.cast.block import NORMALIZATION_LAYERS
from mpgluon.formats.float_format import format_named
from mpgluon.formats.policy import Policy
from mpgluon_tools.diagnostics.observe import Batch
from mpgluon_tools.diagnostics.reference import Reference, inner_blocks, sixteen_bits
from mpgluon_tools.diagnostics.sums import SumsReport, compare_sums
from mpgluon_tools.plots.axes import axes_or_new
from mpgluon_tools.plots.rows import draw_dots
from mpgluon_tools.tables import Result, Table

from mxnet import gluon

__all__ = ["Comparison", "LayerError", "Suggestion", "compare_with_fp32", "suggest_keep_fp32"]

_AS_GOOD = 1.1  # An error that is no larger than this many times another is as good.


@dataclass(frozen=True)
class LayerError:
    """The errors of one layer.

    Attributes
    ----------
    block : gluon.Block
    output, output_gradient, gradient : float
        Relative errors of its result, of the gradient of that, and of its parameters' gradients
        taken together; 0 where it has none, ``inf`` where a value is not finite, or all are zero
        in FP32 only.
    introduced : float
        The relative error that this block introduces while all others compute in FP32: of the
        arrays that it computes itself and returns or passes to an inner block, the largest.
    """

    block: gluon.Block
    output: float
    output_gradient: float
    gradient: float
    introduced: float


@dataclass(frozen=True)
class Comparison(Result):
    """The errors of all layers of a network, and of its result.

    Attributes
    ----------
    layers : sequence of LayerError
        In the order in which they first computed something.
    result : float
        The relative error of the network's result.
    loss_scale : float
    sums : SumsReport
        Changes that come from other sums than FP32's; empty if none were requested.
    """

    layers: Sequence[LayerError]
    result: float
    loss_scale: float
    sums: SumsReport = field(default_factory=SumsReport)

    def ranked(self) -> list[LayerError]:
        """Return the layers, the one that introduces the largest error first."""
        return sorted(self.layers, key=lambda layer: layer.introduced, reverse=True)

    def table(self, worst: int = 20) -> Table:
        """Return the layers that introduce the largest errors."""
        headings = ("layer", "kind", "introduced", "output", "output gradient", "gradient")
        rows = []
        for layer in self.ranked()[:worst]:
            errors = (layer.introduced, layer.output, layer.output_gradient, layer.gradient)
            names = (layer.block.name, type(layer.block).__name__)
            rows.append((*names, *(f"{error:.2g}" for error in errors)))
        return Table(headings, rows)

    def plot(self, ax: Any = None) -> Any:
        """Draw the error that each layer introduces and the error of its result, for the 20 worst.

        Draws on ``ax``, Axes of Matplotlib, by default of a new figure, and returns them.
        """
        axes = axes_or_new(ax)
        worst = self.ranked()[:20]
        layers = [layer for layer in self.layers if layer in worst]
        errors = {
            "introduced": [layer.introduced for layer in layers],
            "of its result": [layer.output for layer in layers],
        }
        draw_dots(axes, [layer.block.name for layer in layers], errors)
        axes.set_xlabel(f"relative error; of the network's result: {self.result:.2g}")
        return axes

    def __str__(self) -> str:
        text = f"relative error of the result: {self.result:.2g}\n{self.table()}"
        return f"{text}\n\n{self.sums}" if self.sums.changes else text


@dataclass(frozen=True)
class Suggestion:
    """Which blocks to keep in FP32, and the measured effect.

    Attributes
    ----------
    blocks : sequence of gluon.Block
        For ``keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, *suggestion.blocks)``; empty if the error
        is within the limit without any, or no block reduces it.
    error_before, error_after : float
        The relative error of the network's result with everything in 16 bits, and with these
        blocks in FP32; ``inf`` while a gradient is not finite.
    limit : float
        The largest error allowed.
    tried : sequence of gluon.Block
        The blocks that were kept one after the other, whether or not it helped.
    remains : str
        The cause of the error that is left with all of those in FP32; empty within the limit.
    """

    blocks: Sequence[gluon.Block]
    error_before: float
    error_after: float
    limit: float
    tried: Sequence[gluon.Block]
    remains: str

    def __str__(self) -> str:
        change = f"the error goes from {self.error_before:.2g} to {self.error_after:.2g}"
        if self.error_after <= self.limit:
            if not self.blocks:
                return f"keep nothing more in FP32; the error is {self.error_before:.2g}"
            return f"keep {_names(self.blocks)} in FP32: {change}"
        tried = f"tried: {_names(self.tried) or 'no layer'}; {self.remains}"
        if not self.blocks:
            return (
                f"no layer was found whose FP32 helps; the error of {self.error_before:.2g} is "
                f"above the limit of {self.limit:.2g}; {tried}"
            )
        return (
            f"keep {_names(self.blocks)} in FP32: {change}, which is still above the limit of "
            f"{self.limit:.2g}; {tried}"
        )


def _names(blocks: Sequence[gluon.Block]) -> str:
    return ", ".join(block.name for block in blocks)


def compare_with_fp32(
    net: gluon.Block,
    batch: Batch,
    *,
    dtype: Union[str, Policy] = "float16",
    loss_scale: float = 1.0,
    accumulation: Sequence[str] = (),
) -> Comparison:
    """Compare a network in 16 bits with itself in FP32, on the same batch and the same weights.

    With ``accumulation``, the network in 16 bits is also compared with itself when products are
    summed as in the Tensor Cores of these GPUs, which shows whether it matters on which of them it
    runs. All arrays of the FP32 run are kept in memory until then: take a small batch.

    Parameters
    ----------
    net : gluon.Block
        Cast or autocast; a network in FP32 is autocast to ``dtype`` for the comparison.
    batch : Batch
        Nothing is dropped at random here; other random numbers count as errors.
    dtype : {"float16", "bfloat16"} or Policy
        For a network in FP32.
    loss_scale : float
        The loss scale of all runs.
    accumulation : sequence of str
        Such as ``("volta", "ampere", "hopper")``; see :mod:`mpgluon.formats.tensor_core`. On a
        CPU, with native operators, and volta with float16 only. FP32 sums are what these are
        compared with under any policy of ``net``; the errors against FP32 are the policy's.

    Raises
    ------
    ValueError, PrecisionError
        If an accumulation is unknown or cannot be computed, as :class:`mpgluon.Policy` says.
    """
    with sixteen_bits(net, batch, dtype) as forwards:
        reference = Reference(net, batch, forwards, loss_scale)
        errors = reference.errors()
        sums = compare_sums(net, reference, forwards, accumulation)
    layers = [
        LayerError(
            block=block,
            output=errors.of(block, "output"),
            output_gradient=errors.of(block, "output gradient"),
            gradient=errors.of(block, "gradient"),
            introduced=reference.introduced.largest(block),
        )
        for block in reference.layers
    ]
    return Comparison(layers, errors.of(net, "output"), loss_scale, sums)


def suggest_keep_fp32(
    net: gluon.Block,
    batch: Batch,
    *,
    dtype: str = "float16",
    loss_scale: float = 1.0,
    limit: Optional[float] = None,
    at_most: int = 5,
) -> Suggestion:
    """Return which blocks to keep in FP32 so that the error stays within a limit.

    Adds the layers that introduce the largest errors, one after the other, runs the network with
    them and their inner blocks in FP32, and finally drops those without which it is as good:
    within the limit, or with an error that is larger by a tenth at most. A gradient that is not
    finite counts as an infinite error. Finite gradients are not judged, since a ReLU that opens or
    closes changes them much. Neither the network as a whole nor a normalization layer is tried: the
    first would be FP32 training, and the second returns 16 bits in any case.

    Parameters
    ----------
    net, batch, dtype, loss_scale
        As for :func:`compare_with_fp32`.
    limit : float, optional
        Largest relative error of the result; by default 32 rounding errors of the format.
    at_most : int
        How many blocks to keep.
    """
    with sixteen_bits(net, batch, dtype) as forwards:
        dtype_of_products = forwards[0].network_cast.policy.product_dtype
        rounding = format_named(dtype_of_products).unit_roundoff
        limit = 32 * rounding if limit is None else limit
        reference = Reference(net, batch, forwards, loss_scale)
        candidates = [
            block
            for block in reference.worst_first()
            if reference.introduced.largest(block) > rounding
            and block is not net
            and not isinstance(block, NORMALIZATION_LAYERS)
        ]
        blocks: list[gluon.Block] = []
        errors = reference.errors(blocks)
        before = error = reference.judged(errors)
        for block in candidates:
            if error <= limit or len(blocks) == at_most:
                break
            if block not in inner_blocks(blocks):
                blocks.append(block)
                errors = reference.errors(blocks)
                error = reference.judged(errors)
        tried = tuple(blocks)
        remains = "" if error <= limit else reference.remains(errors, tried)
        good = max(_AS_GOOD * error, limit)
        for block in tried:
            without = [other for other in blocks if other is not block]
            error_without = reference.judged(reference.errors(without))
            if error_without <= good:
                blocks, error = without, error_without
        return Suggestion(blocks, before, error, limit, tried, remains)
