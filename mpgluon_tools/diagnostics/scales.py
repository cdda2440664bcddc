"""The gradients of each layer at any loss scale, and at the one that is recommended.

Multiplying by a power of two moves a histogram of exponents and does nothing else, so one batch
that was run once answers for every loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpgluon.cast.block import NORMALIZATION_LAYERS, blocks_of
from mpgluon.formats.float_format import FLOAT16, FloatFormat
from mpgluon.formats.loss_scale import DynamicLossScale
from mpgluon_tools.diagnostics.exponents import EMPTY, ExponentHistogram
from mpgluon_tools.diagnostics.ranges import RangeReport
from mpgluon_tools.tables import Table, percent

from mxnet import gluon

__all__ = [
    "LOST_LIMIT",
    "LayerGradient",
    "LossScales",
    "loss_scale_code",
    "loss_scales",
    "owners_of",
    "share_text",
]

LOST_LIMIT = 0.01
"""The share of a layer's nonzero gradients that may be lost.

Micikevicius et al., "Mixed Precision Training", ICLR 2018, 3.1, saw accuracy suffer where 5 % of
the weight gradients were too small for float16; this is a fifth of that. Where nothing overflows,
the numbers that are lost are the layer's smallest ones.
"""


@dataclass(frozen=True)
class LayerGradient:
    """The gradients of one layer.

    Attributes
    ----------
    block : gluon.Block
    what : {"parameters", "output"}
        The gradients of its own parameters taken together, or the gradient of its result.
    exponents : ExponentHistogram
        Without a loss scale.
    """

    block: gluon.Block
    what: str
    exponents: ExponentHistogram


@dataclass(frozen=True)
class LossScales:
    """The gradients that float16 has to hold, layer by layer, and the recommended loss scale.

    Attributes
    ----------
    gradients : sequence of LayerGradient
        In the order of the network. Parameters of normalization layers are not among them: they
        and their gradients are FP32 under every policy.
    scale : float
        The recommended loss scale, a power of two.
    fmt : FloatFormat
    """

    gradients: Sequence[LayerGradient]
    scale: float
    fmt: FloatFormat

    @property
    def power(self) -> int:
        """The base-2 logarithm of the recommended scale."""
        return round(math.log2(self.scale))

    def shares(self, scale: float) -> list[dict[str, float]]:
        """Return the shares of each gradient's nonzero numbers in each part of the format's range.

        As :meth:`mpgluon_tools.diagnostics.exponents.ExponentHistogram.shares` counts them.
        """
        return [one.exponents.times(scale).shares(self.fmt) for one in self.gradients]

    def worst(self, count: int) -> list[tuple[LayerGradient, dict[str, float]]]:
        """Return the gradients that overflow most at the scale, then those that lose most."""

        def badness(pair: tuple[LayerGradient, dict[str, float]]) -> tuple[float, ...]:
            return tuple(pair[1][part] for part in ("overflow", "lost", "subnormal"))

        pairs = list(zip(self.gradients, self.shares(self.scale)))
        return sorted(pairs, key=badness, reverse=True)[:count]

    def summary(self) -> str:
        """Return how many gradients overflow at the scale, and how many lose much."""
        shares = self.shares(self.scale)
        overflowing = sum(one["overflow"] > 0 for one in shares)
        losing = sum(one["lost"] > LOST_LIMIT for one in shares)
        return (
            f"At a loss scale of {self.scale:.16g}, {overflowing} of {len(shares)} gradients "
            f"overflow in part, and {losing} lose more than {LOST_LIMIT:.0%} of their numbers."
        ).replace("%", " %")

    def table(self, count: int = 10) -> Table:
        """Return the gradients with the largest losses at the scale."""
        rows = [
            (one.block.name, one.what, *(share_text(shares[part]) for part in _PARTS))
            for one, shares in self.worst(count)
        ]
        return Table(("layer", "gradient of", *_PARTS), rows)


_PARTS = ("lost", "subnormal", "overflow")


def loss_scales(
    net: gluon.Block, report: RangeReport, scale: float, fmt: FloatFormat = FLOAT16
) -> LossScales:
    """Gather the gradients of a network's range report by layer; ``scale`` is to be recommended."""
    blocks = {block.name: block for block in blocks_of(net)}
    owners = owners_of(net)
    histograms: dict[tuple[gluon.Block, str], ExponentHistogram] = {}
    for array in report.arrays:
        if array.kind == "gradient" and not isinstance(owners[array.name], NORMALIZATION_LAYERS):
            key = (owners[array.name], "parameters")
        elif array.kind == "output gradient":
            key = (blocks[array.name], "output")
        else:
            continue
        histograms[key] = histograms.get(key, EMPTY) + array.exponents
    places = {block: place for place, block in enumerate(blocks.values())}
    keys = sorted(histograms, key=lambda key: (places[key[0]], key[1]))
    return LossScales([LayerGradient(*key, histograms[key]) for key in keys], scale, fmt)


def loss_scale_code(scale: float) -> str:
    """Return the expression for a dynamic loss scale that begins with ``scale``."""
    default = DynamicLossScale()
    bounds = ""
    if scale < default.min_scale:
        bounds = f", min_scale={_power(scale / 2**10)}"
    elif scale > default.max_scale:
        bounds = f", max_scale={_power(scale)}"
    return f"mpgluon.DynamicLossScale(init_scale={_power(scale)}{bounds})"


def _power(scale: float) -> str:
    return f"2.0**{round(math.log2(scale))}"


def owners_of(net: gluon.Block) -> dict[str, gluon.Block]:
    """Return the block of each parameter by name; of a shared one, the first in the network."""
    blocks = reversed(list(blocks_of(net)))
    return {p.name: block for block in blocks for p in block._reg_params.values()}


def share_text(share: float) -> str:
    """Return a share in percent that is only "0 %" if nothing is."""
    if share == 0:
        return "0 %"
    return "<0.01 %" if share < 0.00005 else percent(share)
