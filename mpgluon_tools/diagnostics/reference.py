"""The FP32 run that a network in 16 bits is compared with, and the error of each layer alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, Callable, Optional, Union

from mpgluon.cast.arrays import arrays_in, convert_arrays, mark
from mpgluon.cast.block import autocast, blocks_of, restore
from mpgluon.cast.dispatch import governed
from mpgluon.cast.forward import PolicyForward, forward_of
from mpgluon.cast.numpy_arrays import as_nd, in_current_interface
from mpgluon.formats.policy import Policy
from mpgluon.kernels.dtypes import cast, dtype_name
from mpgluon.updates.gluon_trainer import loss_scaler_of, set_loss_scaler
from mpgluon_tools.diagnostics.observe import (
    Batch,
    BlockCall,
    Observer,
    Seen,
    complete,
    observed_batch,
    observing,
    takes_operators,
    values_of,
)
from mpgluon_tools.diagnostics.temporarily import temporarily, untouched

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon

__all__ = ["Errors", "Reference", "in_fp32", "inner_blocks", "input_errors", "sixteen_bits"]

Values = npt.NDArray[np.float32]


class Errors:
    """Sums of squares of differences and of references, for each block and kind of array."""

    def __init__(self) -> None:
        self._sums: dict[tuple[gluon.Block, str], tuple[float, float]] = {}

    def add(self, block: gluon.Block, kind: str, array: mx.nd.NDArray, reference: Values) -> None:
        """Compare an array; values that are infinite in FP32 too, as in a mask, are not errors."""
        values = values_of(array)
        other = ~((values == reference) | (np.isnan(values) & np.isnan(reference)))
        differences = values[other].astype(np.float64) - reference[other]
        difference = np.sum(differences**2) if np.isfinite(differences).all() else math.inf
        before, size = self._sums.get((block, kind), (0.0, 0.0))
        size += float(np.sum(reference[np.isfinite(reference)].astype(np.float64) ** 2))
        self._sums[block, kind] = (before + float(difference), size)

    def of(self, block: gluon.Block, kind: str) -> float:
        """Return a relative error; 0 where there was nothing to compare."""
        return _relative(*self._sums.get((block, kind), (0.0, 0.0)))

    def together(self, kind: str) -> float:
        """Return the relative error of all arrays of a kind."""
        sums = [sums for (_, other), sums in self._sums.items() if other == kind]
        return _relative(*map(sum, zip(*sums))) if sums else 0.0

    def finite(self, block: gluon.Block, kind: str) -> bool:
        """Whether all values are finite that are finite in FP32."""
        return math.isfinite(self._sums.get((block, kind), (0.0, 0.0))[0])

    def largest(self, block: gluon.Block) -> float:
        """Return the largest of a block's relative errors."""
        return max((self.of(*key) for key in self._sums if key[0] is block), default=0.0)


def _relative(difference: float, size: float) -> float:
    """Return a relative error from two sums of squares."""
    if difference == 0:
        return 0.0
    return math.sqrt(difference / size) if size else math.inf


class Reference:
    """The FP32 run of a network in 16 bits: its arrays, and the error that each layer introduces.

    While the network runs in FP32, each layer that has computed computes once more, alone in 16
    bits, on the same values. Its inner blocks do not: they return their FP32 results again.
    """

    def __init__(
        self,
        net: gluon.Block,
        batch: Batch,
        forwards: Sequence[PolicyForward],
        loss_scale: float,
    ) -> None:
        self.layers: list[gluon.Block] = []
        self.introduced = Errors()
        self._net, self._batch, self._loss_scale = net, batch, loss_scale
        self._forwards = {forward.block: forward for forward in forwards if not forward.kept}
        self._arrays: dict[tuple[gluon.Block, str, str], list[Values]] = {}
        # For each call of a block, the formats of its operands in 16 bits.
        self._formats: dict[gluon.Block, list[list[Optional[str]]]] = {}
        self._trying: Optional[gluon.Block] = None
        self._trial: Optional[BlockCall] = None
        with untouched(net), autograd.train_mode(), observing(net, self._note_formats):
            batch.loss_fn(net(*batch.arguments), batch.labels)  # which may call blocks too
        with in_fp32(self._forwards.values()):
            observed_batch(net, batch, self._see, loss_scale=loss_scale, handed_on=True)

    def errors(self, kept: Sequence[gluon.Block] = ()) -> Errors:
        """Run the network with some blocks in FP32, and compare every array with the FP32 run."""
        errors = Errors()
        places: dict[tuple[gluon.Block, str, str], int] = {}

        def compare(seen: Seen) -> None:
            key = (seen.block, seen.kind, seen.operator)
            place = places[key] = places.get(key, -1) + 1
            errors.add(seen.block, seen.kind, seen.array, self._arrays[key][place])

        with in_fp32(self._forwards.values(), kept):
            self._observe(compare)
        return errors

    def _observe(self, observer: Observer) -> None:
        observed_batch(self._net, self._batch, observer, loss_scale=self._loss_scale)

    def in_16_bits(self) -> Reference:
        """Return a reference with the network's present results in place of FP32's."""
        made = copy(self)
        made._arrays = {}
        self._observe(made._keep)
        return made

    def _keep(self, seen: Seen) -> None:
        key = (seen.block, seen.kind, seen.operator)
        self._arrays.setdefault(key, []).append(values_of(seen.array))

    def judged(self, errors: Errors) -> float:
        """Return the error of the result; ``inf`` if a gradient is not finite."""
        return math.inf if self._broken(errors) else errors.of(self._net, "output")

    def worst_first(self) -> list[gluon.Block]:
        """Return the layers, the one that introduces the largest error first."""
        return sorted(self.layers, key=self.introduced.largest, reverse=True)

    def remains(self, errors: Errors, kept: Sequence[gluon.Block]) -> str:
        """Return the cause of the error that remains although some blocks are kept."""
        broken = self._broken(errors)
        if broken is not None and errors.finite(self._net, "output"):
            block, kind = broken
            return (
                f"the {kind} of {block.name} is not finite at a loss scale of "
                f"{self._loss_scale:g}: locate_overflow tells where that begins, range_report "
                "which scale fits"
            )
        inside = inner_blocks(kept)
        left = [block for block in self.worst_first() if block not in inside]
        if not left:
            return "no other layer is left to be tried"
        said = f"most of what remains is introduced by {left[0].name}"
        if left[0] is self._net:
            said += ", the network as a whole: give its own operators a block of theirs"
        return said

    def _broken(self, errors: Errors) -> Optional[tuple[gluon.Block, str]]:
        """Return block and kind of the backward pass's first gradient that is not finite."""
        kinds = ("output gradient", "gradient")
        pairs = ((b, kind) for b in reversed(self.layers) for kind in kinds)
        return next((pair for pair in pairs if not errors.finite(*pair)), None)

    def _note_formats(self, seen: Seen) -> None:
        if seen.call is not None and seen.place == 0:
            formats = [dtype_name(array) for array in arrays_in(_operands(seen.call))]
            self._formats.setdefault(seen.block, []).append(formats)

    def _see(self, seen: Seen) -> None:
        if self._trying is not None:
            if seen.block is self._trying and seen.call is not None:
                self._trial = seen.call
            return
        if seen.made and seen.kind in ("handed on", "output") and seen.block not in self.layers:
            self.layers.append(seen.block)
        if seen.kind != "handed on":
            self._keep(seen)
        if seen.call is not None and seen.place == 0 and seen.block in self._forwards:
            self._try(seen.call)

    def _try(self, call: BlockCall) -> None:
        """Compute one block alone in 16 bits, and compare the arrays that it computes itself.

        Its operands are the FP32 values, in the formats that they have in 16 bits.
        """
        formats = iter(self._formats[call.block].pop(0))
        if not any(made for _, made in call.handed_on):
            return
        forward = self._forwards[call.block]
        self._trying = call.block
        try:
            with temporarily([forward], "kept", False), autograd.pause(autograd.is_training()):
                arguments, parameters, results = in_current_interface(
                    convert_arrays(
                        as_nd(_operands(call)),
                        lambda array: mark(cast(array, next(formats) or ""), None),
                    )
                )
                if takes_operators(call.block):
                    arguments = (mx.nd, *arguments)
                with _answering([block for block, _ in call.returned], results):
                    forward(*arguments, **dict(zip(call.keywords, parameters)))
        finally:
            self._trying = None
        assert self._trial is not None  # forward was observed
        for place, (fp32, tried) in enumerate(zip(call.handed_on, self._trial.handed_on)):
            array, made = fp32
            if made:
                self.introduced.add(call.block, str(place), tried[0], values_of(array))


def _operands(call: BlockCall) -> list[Any]:
    """Return arguments, parameters, and results of inner blocks."""
    return [call.arguments, list(call.keywords.values()), [result for _, result in call.returned]]


@contextmanager
def _answering(blocks: Sequence[gluon.Block], results: Sequence[Any]) -> Iterator[None]:
    """Make blocks return these results, one at each call, and compute nothing."""

    def answer(own: Iterator[Any]) -> Callable[..., Any]:
        return lambda *_, **__: next(own)

    with ExitStack() as stack:
        for block in set(blocks):
            own = [result for other, result in zip(blocks, results) if other is block]
            stack.enter_context(temporarily([block], "forward", answer(iter(own))))
        yield


def inner_blocks(blocks: Sequence[gluon.Block]) -> set[gluon.Block]:
    """Return the blocks and their inner blocks, which ``keep_fp32`` keeps with them."""
    return {inner for block in blocks for inner in blocks_of(block)}


def in_fp32(
    forwards: Iterable[PolicyForward], blocks: Optional[Sequence[gluon.Block]] = None
) -> AbstractContextManager[None]:
    """Keep blocks and their inner blocks, by default all, in FP32 inside a ``with`` block."""
    inside = None if blocks is None else inner_blocks(blocks)
    chosen = [f for f in forwards if inside is None or f.block in inside]
    return temporarily(chosen, "kept", True)


def input_errors(net: gluon.Block, batch: Batch, dtype: str) -> tuple[float, float]:
    """Return relative errors of an FP32 network's result on the same batch, and on a rounded one.

    The first is not 0 where the network draws random numbers; FP32 inputs are rounded.
    """
    exact = list[Values]()

    def keep(seen: Seen) -> None:
        if seen.block is net and seen.kind == "output":
            exact.append(values_of(seen.array))

    def error_of(inputs: tuple[mx.nd.NDArray, ...]) -> float:
        errors, references = Errors(), iter(exact)

        def compare(seen: Seen) -> None:
            if seen.block is net and seen.kind == "output":
                errors.add(net, "output", seen.array, next(references))

        observed_batch(net, replace(batch, inputs=inputs), compare)
        return errors.of(net, "output")

    rounded = tuple(
        in_current_interface(cast(cast(one, dtype), "float32"))
        if dtype_name(one) == "float32"
        else one
        for one in batch.arguments
    )
    with sixteen_bits(net, batch, dtype) as forwards, in_fp32(forwards):
        observed_batch(net, batch, keep)
        return error_of(batch.arguments), error_of(rounded)


@contextmanager
def sixteen_bits(
    net: gluon.Block, batch: Batch, dtype: Union[str, Policy]
) -> Iterator[list[PolicyForward]]:
    """Yield the forward methods of a cast network; an FP32 network is autocast inside."""
    complete(net, batch)  # before its values are rounded
    already = any(forward_of(block) is not None for block in blocks_of(net))
    trainers = {p._trainer for p in net.collect_params().values()} - {None}
    scalers = {trainer: loss_scaler_of(trainer) for trainer in trainers}
    if not already:
        autocast(net, dtype)
    try:
        with governed(drops_nothing=True):  # otherwise each run draws another mask
            yield [f for f in map(forward_of, blocks_of(net)) if f is not None]
    finally:
        if not already:
            restore(net)
            for trainer, scaler in scalers.items():
                set_loss_scaler(trainer, scaler)  # not the keeper of masters that a cast adds
