"""A network in 16 bits beside itself in FP32, layer by layer, and which layers to keep in FP32.

Errors are relative: the norm of the difference divided by the norm of the FP32 array. A layer is a
block that computes something itself, whether or not it has blocks in it; a container is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Optional

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon
from mxnet.gluon import nn

from mpgluon.cast.arrays import arrays_in, convert_arrays, mark
from mpgluon.cast.block import NORMALIZATION_LAYERS, autocast, blocks_of, restore
from mpgluon.cast.forward import PolicyForward, forward_of, is_hybrid
from mpgluon.diagnostics.observe import (
    Batch,
    Call,
    Seen,
    observed_batch,
    observing,
    untouched,
    values_of,
)
from mpgluon.numerics.dtypes import cast, dtype_name
from mpgluon.numerics.formats import BFLOAT16, FLOAT16
from mpgluon.tables import Table

__all__ = ["Comparison", "LayerError", "Suggestion", "compare_with_fp32", "suggest_keep_fp32"]

Values = npt.NDArray[np.float32]

_AS_GOOD = 1.1  # An error that is no larger than this many times another is as good.


@dataclass(frozen=True)
class LayerError:
    """How far one layer is from itself in FP32.

    Attributes
    ----------
    block : gluon.Block
    output, output_gradient, gradient : float
        Relative errors of what it returns, of the gradient of that, and of its parameters'
        gradients taken together; 0 where it has none, ``inf`` where a value is not finite, or all
        are zero in FP32 only.
    introduced : float
        The relative error that this block alone makes, all others in FP32: of what it returns or
        gives to a block in it, and has made itself; of several arrays the largest.
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
        In the order in which they first had something computed.
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
        is within the limit without any, or none makes it smaller.
    error_before, error_after : float
        The relative error of the network's result with everything in 16 bits, and with these
        blocks in FP32; ``inf`` while a gradient is not finite.
    limit : float
        What the error was to come down to.
    tried : sequence of gluon.Block
        What was kept one after the other, whether or not it helped.
    remains : str
        What spoils the result with all of those in FP32; empty if the error is within the limit.
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
            reference.run(net, batch, loss_scale)
        errors = _errors(net, batch, reference, loss_scale)
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

    Adds the layers that introduce most, one after the other, runs the network with them and all
    that is in them in FP32, and in the end drops those without which it is as good: within the
    limit, or with an error that is larger by a tenth at most. A gradient that is not finite counts
    as an infinite error; finite ones are not judged: a ReLU that opens or closes changes them
    much. Neither the network as a whole nor a normalization layer is tried: the one would be FP32
    training, and the other returns 16 bits in any case.

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
        compute_dtype = forwards[0].network_cast.policy.compute_dtype
        rounding = {"float16": FLOAT16, "bfloat16": BFLOAT16}[compute_dtype].unit_roundoff
        limit = 32 * rounding if limit is None else limit
        reference = _Reference(net, batch, forwards)
        with _kept(forwards):
            reference.run(net, batch, loss_scale)

        def errors_with(blocks: Sequence[gluon.Block]) -> _Errors:
            inside = _inside(blocks)
            with _kept([forward for forward in forwards if forward.block in inside]):
                return _errors(net, batch, reference, loss_scale)

        def judged(errors: _Errors) -> float:
            return math.inf if reference.broken(errors) else errors.of(net, "output")

        candidates = [
            block
            for block in reference.worst_first()
            if reference.introduced.largest(block) > rounding
            and block is not net
            and not isinstance(block, NORMALIZATION_LAYERS)
        ]
        kept: list[gluon.Block] = []
        errors = errors_with(kept)
        before = error = judged(errors)
        for block in candidates:
            if error <= limit or len(kept) == at_most:
                break
            if block not in _inside(kept):
                kept.append(block)
                errors = errors_with(kept)
                error = judged(errors)
        tried = tuple(kept)
        remains = "" if error <= limit else reference.remains(net, errors, tried, loss_scale)
        good = max(_AS_GOOD * error, limit)
        for block in tried:
            without = [other for other in kept if other is not block]
            error_without = judged(errors_with(without))
            if error_without <= good:
                kept, error = without, error_without
        return Suggestion(kept, before, error, limit, tried, remains)


def _inside(blocks: Sequence[gluon.Block]) -> set[gluon.Block]:
    """Return the blocks and all that are in them, which ``keep_fp32`` keeps with them."""
    return {inner for block in blocks for inner in blocks_of(block)}


def _names(blocks: Sequence[gluon.Block]) -> str:
    return ", ".join(block.name for block in blocks)


class _Errors:
    """Sums of squares of differences and of references, for each block and kind of array."""

    def __init__(self) -> None:
        self._sums: dict[tuple[gluon.Block, str], tuple[float, float]] = {}

    def add(self, block: gluon.Block, kind: str, values: Values, reference: Values) -> None:
        """Compare one array; what is infinite in FP32 too, such as a mask, is no error."""
        other = ~((values == reference) | (np.isnan(values) & np.isnan(reference)))
        differences = values[other].astype(np.float64) - reference[other]
        difference = np.sum(differences**2) if np.isfinite(differences).all() else math.inf
        before, size = self._sums.get((block, kind), (0.0, 0.0))
        size += float(np.sum(reference[np.isfinite(reference)].astype(np.float64) ** 2))
        self._sums[block, kind] = (before + float(difference), size)

    def of(self, block: gluon.Block, kind: str) -> float:
        """Return a relative error; 0 where there was nothing to compare."""
        difference, size = self._sums.get((block, kind), (0.0, 0.0))
        if difference == 0:
            return 0.0
        return math.sqrt(difference / size) if size else math.inf

    def finite(self, block: gluon.Block, kind: str) -> bool:
        """Whether every value was finite that is so in FP32."""
        return math.isfinite(self._sums.get((block, kind), (0.0, 0.0))[0])

    def largest(self, block: gluon.Block) -> float:
        """Return the largest of a block's relative errors."""
        return max((self.of(*key) for key in self._sums if key[0] is block), default=0.0)


class _Reference:
    """The FP32 run: its arrays, and what each layer alone makes of them in 16 bits."""

    def __init__(self, net: gluon.Block, batch: Batch, forwards: Sequence[PolicyForward]) -> None:
        # Of each call of a block, the formats that it has to do with in 16 bits.
        self._formats: dict[gluon.Block, list[list[Optional[str]]]] = {}
        with untouched(net), autograd.train_mode(), observing(net, self._note_formats):
            batch.loss_fn(net(*batch.arguments), batch.labels)  # which may call blocks too
        self.arrays: dict[tuple[gluon.Block, str, str], list[Values]] = {}
        self.layers: list[gluon.Block] = []
        self.introduced = _Errors()
        self._forwards = {forward.block: forward for forward in forwards if not forward.kept}
        self._trying: Optional[gluon.Block] = None
        self._trial: Optional[Call] = None

    def run(self, net: gluon.Block, batch: Batch, loss_scale: float) -> None:
        """Run the network, which is in FP32 now, and try each layer by itself."""
        observed_batch(net, batch, self._see, loss_scale=loss_scale, handed_on=True)

    def worst_first(self) -> list[gluon.Block]:
        """Return the layers, the one that introduces most first."""
        return sorted(self.layers, key=self.introduced.largest, reverse=True)

    def broken(self, errors: _Errors) -> Optional[tuple[gluon.Block, str]]:
        """Return the first gradient of the backward pass that is not finite: whose, and which."""
        kinds = ("output gradient", "gradient")
        found = ((b, kind) for b in reversed(self.layers) for kind in kinds)
        return next((one for one in found if not errors.finite(*one)), None)

    def remains(
        self, net: gluon.Block, errors: _Errors, kept: Sequence[gluon.Block], loss_scale: float
    ) -> str:
        """Say what spoils the result, or a gradient, though some blocks are kept."""
        broken = self.broken(errors)
        if broken is not None and errors.finite(net, "output"):
            block, kind = broken
            return (
                f"the {kind} of {block.name} is not finite at a loss scale of {loss_scale:g}: "
                "locate_overflow tells where that begins, range_report which scale fits"
            )
        inside = _inside(kept)
        left = [block for block in self.worst_first() if block not in inside]
        if not left:
            return "no other layer is left to be tried"
        said = f"most of what remains is introduced by {left[0].name}"
        if left[0] is net:
            said += ", the network as a whole: give its own operators a block of theirs"
        return said

    def _note_formats(self, seen: Seen) -> None:
        if seen.call is not None and seen.place == 0:
            formats = [dtype_name(array) for array in arrays_in(_taken(seen.call))]
            self._formats.setdefault(seen.block, []).append(formats)

    def _see(self, seen: Seen) -> None:
        if self._trying is not None:
            if seen.block is self._trying and seen.call is not None:
                self._trial = seen.call
            return
        if seen.made and seen.kind in ("handed on", "output") and seen.block not in self.layers:
            self.layers.append(seen.block)
        if seen.kind != "handed on":
            key = (seen.block, seen.kind, seen.operator)
            self.arrays.setdefault(key, []).append(values_of(seen.array))
        if seen.call is not None and seen.place == 0 and seen.block in self._forwards:
            self._try(seen.call)

    def _try(self, call: Call) -> None:
        """Let a block alone compute in 16 bits, and compare what it makes.

        What it takes from others, the blocks in it included, is what they gave in FP32, in the
        format in which they give it in 16 bits. So they need not compute again.
        """
        formats = iter(self._formats[call.block].pop(0))
        if not any(made for _, made in call.handed_on):
            return
        forward = self._forwards[call.block]
        self._trying, forward.kept = call.block, False
        try:
            with autograd.pause(train_mode=autograd.is_training()):
                arguments, parameters, results = convert_arrays(
                    _taken(call), lambda array: mark(cast(array, next(formats) or ""), None)
                )
                if is_hybrid(call.block):
                    arguments = (mx.nd, *arguments)
                with _answering([block for block, _ in call.returned], results):
                    forward(*arguments, **dict(zip(call.keywords, parameters)))
        finally:
            self._trying, forward.kept = None, True
        assert self._trial is not None  # forward was observed
        for place, (fp32, tried) in enumerate(zip(call.handed_on, self._trial.handed_on)):
            array, made = fp32
            if made:
                self.introduced.add(call.block, str(place), values_of(tried[0]), values_of(array))


def _taken(call: Call) -> list[Any]:
    """Return what a block takes from others: arguments, parameters, and results of blocks in it."""
    return [call.arguments, list(call.keywords.values()), [result for _, result in call.returned]]


@contextmanager
def _answering(blocks: Sequence[gluon.Block], results: Sequence[Any]) -> Iterator[None]:
    """Let blocks return given results, one at each call, and compute nothing."""
    answers: dict[gluon.Block, list[Any]] = {}
    for block, result in zip(blocks, results):
        answers.setdefault(block, []).append(result)
    before = {block: vars(block).get("forward") for block in answers}
    try:
        for block, own in answers.items():
            block.forward = _answer(own)
        yield
    finally:
        for block, forward in before.items():
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _answer(results: Sequence[Any]) -> Callable[..., Any]:
    remaining = iter(results)
    return lambda *_, **__: next(remaining)


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
