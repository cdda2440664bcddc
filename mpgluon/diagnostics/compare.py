"""A network in 16 bits beside itself in FP32, layer by layer, and which layers to keep in FP32.

Errors are relative: the norm of the difference divided by the norm of the FP32 array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Optional

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon
from mxnet.gluon import nn

from mpgluon.diagnostics.observe import Batch, Seen, observed_batch, observing, untouched, values_of
from mpgluon.dtypes import cast, dtype_name
from mpgluon.formats import BFLOAT16, FLOAT16
from mpgluon.precision.autocast import autocast
from mpgluon.precision.casting import blocks_of, restore
from mpgluon.precision.forward import PolicyForward, forward_of, is_hybrid
from mpgluon.precision.tracked import arrays_in, convert_arrays
from mpgluon.tables import Table

__all__ = ["Comparison", "LayerError", "Suggestion", "compare_with_fp32", "suggest_keep_fp32"]

Values = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerError:
    """How far one innermost block is from itself in FP32.

    Attributes
    ----------
    block : gluon.Block
    output, output_gradient, gradient : float
        Relative errors of what it returns, of the gradient of that, and of its parameters'
        gradients taken together; 0 where it has none, ``inf`` where a value is not finite.
    introduced : float
        The relative error that this block alone makes: all others in FP32, compared at its output.
    """

    block: gluon.Block
    output: float
    output_gradient: float
    gradient: float
    introduced: float


@dataclass(frozen=True)
class Comparison:
    """All layers of a network, and its result.

    Attributes
    ----------
    layers : sequence of LayerError
        In the order of computation.
    result : float
        The relative error of what the network returns.
    loss_scale : float
    """

    layers: Sequence[LayerError]
    result: float
    loss_scale: float

    def ranked(self) -> list[LayerError]:
        """Return the layers, the one that introduces most first."""
        return sorted(self.layers, key=lambda layer: layer.introduced, reverse=True)

    def table(self, worst: int = 20) -> Table:
        """Return the layers that introduce most."""
        headings = ("layer", "kind", "introduced", "output", "output gradient", "gradient")
        rows = [
            (
                layer.block.name,
                type(layer.block).__name__,
                *(
                    f"{error:.2g}"
                    for error in (
                        layer.introduced,
                        layer.output,
                        layer.output_gradient,
                        layer.gradient,
                    )
                ),
            )
            for layer in self.ranked()[:worst]
        ]
        return Table(headings, rows)

    def __str__(self) -> str:
        return f"relative error of the result: {self.result:.2g}\n{self.table()}"


@dataclass(frozen=True)
class Suggestion:
    """Which blocks to keep in FP32, and what that was seen to change.

    Attributes
    ----------
    blocks : sequence of gluon.Block
        For ``keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, *suggestion.blocks)``; empty if the error
        is within the limit without any.
    error_before, error_after : float
        The relative error of the network's result with everything in 16 bits, and with these
        blocks in FP32; ``inf`` while a gradient is not finite.
    """

    blocks: Sequence[gluon.Block]
    error_before: float
    error_after: float

    def __str__(self) -> str:
        if not self.blocks:
            return f"keep nothing more in FP32; the error is {self.error_before:.2g}"
        names = ", ".join(block.name for block in self.blocks)
        return (
            f"keep {names} in FP32: the error goes from {self.error_before:.2g} "
            f"to {self.error_after:.2g}"
        )


def compare_with_fp32(
    net: gluon.Block, batch: Batch, *, dtype: str = "float16", loss_scale: float = 1.0
) -> Comparison:
    """Compare a network in 16 bits with itself in FP32, on the same batch and the same weights.

    All arrays of the FP32 run are kept in memory meanwhile: take a small batch.

    Parameters
    ----------
    net : gluon.Block
        Cast or autocast; or in FP32, and then it is autocast to ``dtype`` meanwhile.
    batch : Batch
        ``Dropout`` layers do nothing meanwhile; other randomness counts as an error.
    dtype : {"float16", "bfloat16"}
        For a network in FP32.
    loss_scale : float
        Of both runs.
    """
    with _sixteen_bits(net, dtype) as forwards:
        reference = _Reference(net, batch, forwards)
        with _kept(forwards):
            observed_batch(net, batch, reference.see, loss_scale=loss_scale)
        errors = _errors(net, batch, reference, loss_scale)
    layers = [
        LayerError(
            block=block,
            output=errors.of(block, "output"),
            output_gradient=errors.of(block, "output gradient"),
            gradient=errors.of(block, "gradient"),
            introduced=reference.introduced.of(block, "output"),
        )
        for block in reference.leaves
    ]
    return Comparison(layers, errors.of(net, "output"), loss_scale)


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

    Adds the blocks that introduce most, one after the other, runs the network with them in FP32,
    and in the end drops those without which it is as good. A gradient that is not finite counts as
    an infinite error; finite ones are not judged: a ReLU that opens or closes changes them much.

    Parameters
    ----------
    net, batch, dtype, loss_scale
        As for :func:`compare_with_fp32`.
    limit : float, optional
        Of the relative error of the result; 32 rounding errors of the format unless told.
    at_most : int
        How many blocks to keep.
    """
    with _sixteen_bits(net, dtype) as forwards:
        compute_dtype = forwards[0].owner.policy.compute_dtype
        rounding = {"float16": FLOAT16, "bfloat16": BFLOAT16}[compute_dtype].unit_roundoff
        limit = 32 * rounding if limit is None else limit
        reference = _Reference(net, batch, forwards)
        with _kept(forwards):
            observed_batch(net, batch, reference.see, loss_scale=loss_scale)

        def error_with(blocks: Sequence[gluon.Block]) -> float:
            with _kept([forward for forward in forwards if forward.block in blocks]):
                errors = _errors(net, batch, reference, loss_scale)
            kinds = ("output gradient", "gradient")
            broken = (math.isinf(errors.of(b, kind)) for b in reference.leaves for kind in kinds)
            return math.inf if any(broken) else errors.of(net, "output")

        candidates = sorted(
            (b for b in reference.leaves if reference.introduced.of(b, "output") > rounding),
            key=lambda block: reference.introduced.of(block, "output"),
            reverse=True,
        )
        kept: list[gluon.Block] = []
        before = error = error_with(())
        for block in candidates[:at_most]:
            if error <= limit:
                break
            kept.append(block)
            error = error_with(kept)
        for block in list(kept):
            without = [other for other in kept if other is not block]
            error_without = error_with(without)
            if error_without <= max(error, limit):
                kept, error = without, error_without
        return Suggestion(kept, before, error)


class _Errors:
    """Sums of squares of differences and of references, for each block and kind of array."""

    def __init__(self) -> None:
        self._sums: dict[tuple[gluon.Block, str], tuple[float, float]] = {}

    def add(self, block: gluon.Block, kind: str, values: Values, reference: Values) -> None:
        """Compare one array."""
        if np.isfinite(values).all():
            difference = float(np.sum((values.astype(np.float64) - reference) ** 2))
        else:
            difference = math.inf
        before, size = self._sums.get((block, kind), (0.0, 0.0))
        size += float(np.sum(reference.astype(np.float64) ** 2))
        self._sums[block, kind] = (before + difference, size)

    def of(self, block: gluon.Block, kind: str) -> float:
        """Return a relative error; 0 where there was nothing to compare."""
        difference, size = self._sums.get((block, kind), (0.0, 0.0))
        if difference == 0:
            return 0.0
        return math.sqrt(difference / size) if size else math.inf


class _Reference:
    """An observer of the FP32 run: keeps its arrays, and tries each innermost block in 16 bits."""

    def __init__(self, net: gluon.Block, batch: Batch, forwards: Sequence[PolicyForward]) -> None:
        self._formats: dict[gluon.Block, list[Optional[str]]] = {}
        with untouched(net), autograd.train_mode(), observing(net, self._note_formats):
            net(*batch.arguments)
        self.arrays: dict[tuple[gluon.Block, str, str], list[Values]] = {}
        self.leaves: list[gluon.Block] = []
        self.introduced = _Errors()
        self._forwards = {forward.block: forward for forward in forwards if not forward.kept}
        self._trying = False

    def _note_formats(self, seen: Seen) -> None:
        """Remember in which formats a block has its inputs in 16 bits."""
        self._formats.setdefault(seen.block, [dtype_name(array) for array in seen.inputs])

    def see(self, seen: Seen) -> None:
        """Keep an array."""
        if self._trying:
            return
        values = values_of(seen.array)
        self.arrays.setdefault((seen.block, seen.kind, seen.operator), []).append(values)
        if seen.kind == "output" and not seen.block._children:
            if seen.block not in self.leaves:
                self.leaves.append(seen.block)
            if seen.block in self._forwards:
                self._try(seen, values)

    def _try(self, seen: Seen, values: Values) -> None:
        forward, formats = self._forwards[seen.block], iter(self._formats[seen.block])
        arguments = convert_arrays(seen.arguments, lambda a: cast(a, next(formats, None) or ""))
        if is_hybrid(seen.block):
            arguments = (mx.nd, *arguments)
        forward.kept, self._trying = False, True
        try:
            with autograd.pause(train_mode=autograd.is_training()):
                results = arrays_in(forward(*arguments, **seen.keywords))
        finally:
            forward.kept, self._trying = True, False
        self.introduced.add(seen.block, "output", values_of(results[seen.place]), values)


def _errors(net: gluon.Block, batch: Batch, reference: _Reference, loss_scale: float) -> _Errors:
    """Run the network as it is, and compare every array with that of the FP32 run."""
    errors = _Errors()
    places: dict[tuple[gluon.Block, str, str], int] = {}

    def compare(seen: Seen) -> None:
        key = (seen.block, seen.kind, seen.operator)
        place = places[key] = places.get(key, -1) + 1
        errors.add(seen.block, seen.kind, values_of(seen.array), reference.arrays[key][place])

    observed_batch(net, batch, compare, loss_scale=loss_scale)
    return errors


@contextmanager
def _sixteen_bits(net: gluon.Block, dtype: str) -> Iterator[list[PolicyForward]]:
    """Yield what makes a network compute in 16 bits; an FP32 network does so meanwhile."""
    already = any(forward_of(block) is not None for block in blocks_of(net))
    rates = {block: block._rate for block in blocks_of(net) if isinstance(block, nn.Dropout)}
    if not already:
        autocast(net, dtype)
    try:
        for block in rates:  # which would draw another mask each time
            block._rate = 0
        found = (forward_of(block) for block in blocks_of(net))
        yield [forward for forward in found if forward is not None]
    finally:
        for block, rate in rates.items():
            block._rate = rate
        if not already:
            restore(net)


@contextmanager
def _kept(forwards: Sequence[PolicyForward]) -> Iterator[None]:
    """Let some blocks compute in FP32."""
    changed = [forward for forward in forwards if not forward.kept]
    for forward in changed:
        forward.kept = True
    try:
        yield
    finally:
        for forward in changed:
            forward.kept = False
