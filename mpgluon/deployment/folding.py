"""Folding BatchNorm into the convolution or dense layer before it.

At inference a BatchNorm multiplies each channel by one number and adds another, which the layer
before it can do with other weights and another bias. These are computed in float64 and rounded to
FP32 once; rounding to 16 bits comes later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Optional

import numpy as np
import numpy.typing as npt

from mpgluon.deployment.recording import VARIABLE, Entry, Operation, Recording
from mpgluon.numerics.formats import FloatFormat, round_to

__all__ = ["fold_batch_norms"]

_LAYERS = frozenset({"Convolution", "FullyConnected"})
_CHANNELS_FIRST = (None, "NCW", "NCHW", "NCDHW")

FP32Array = npt.NDArray[np.float32]


def fold_batch_norms(recording: Recording, fmt: FloatFormat) -> Recording:
    """Return a recording without the BatchNorms that alone use the result of a layer.

    Others stay, such as those of ResNet v2, which come before their convolutions.

    Parameters
    ----------
    recording : Recording
    fmt : FloatFormat
        The format that values will be rounded to. A BatchNorm stays if a folded value would become
        infinite in it, as with a channel of almost no variance.
    """
    folded = {
        layer: (norm, *both)
        for layer, norm in _pairs(recording)
        if (both := _folded(recording, layer, norm, fmt)) is not None
    }
    layer_of = {norm: layer for layer, (norm, *_) in folded.items()}
    values = dict(recording.values)
    operations: list[Operation] = []
    numbers: dict[int, int] = {}  # of an operation: in the new recording

    def moved(entries: Iterable[Entry]) -> tuple[Entry, ...]:
        return tuple((numbers[number], output) for number, output in entries)

    for number, operation in enumerate(recording.operations):
        if number in layer_of:
            numbers[number] = numbers[layer_of[number]]
            continue
        options, operands = operation.options, moved(operation.inputs)
        if number in folded:
            _, weight, bias = folded[number]
            bias_name = f"{operation.name}_folded_bias"
            values[_name_of_weight(recording, number)] = weight
            values[bias_name] = bias
            operands = (*operands[:2], (len(operations), 0))
            operations.append(Operation(VARIABLE, bias_name, {}, ()))
            options = {**options, "no_bias": False}
        numbers[number] = len(operations)
        operations.append(Operation(operation.operator, operation.name, options, operands))
    whole = Recording(tuple(operations), recording.inputs, moved(recording.outputs), values)
    return whole.without_what_nothing_uses()


def _pairs(recording: Recording) -> Iterator[tuple[int, int]]:
    """Yield each layer whose only use is a BatchNorm of its channels, with that BatchNorm."""
    uses = recording.uses()
    for norm, operation in enumerate(recording.operations):
        if operation.operator != "BatchNorm" or operation.options.get("axis", 1) != 1:
            continue
        number, output = operation.inputs[0]
        layer = recording.operations[number]
        if (
            layer.operator in _LAYERS
            and layer.options.get("layout") in _CHANNELS_FIRST
            and layer.options.get("flatten", True)
            and uses[number, output] == 1
            and uses[layer.inputs[1]] == 1
            and _name_of_weight(recording, number) in recording.values
        ):
            yield number, norm


def _name_of_weight(recording: Recording, layer: int) -> str:
    return recording.operations[recording.operations[layer].inputs[1][0]].name


def _folded(
    recording: Recording, layer: int, norm: int, fmt: FloatFormat
) -> Optional[tuple[FP32Array, FP32Array]]:
    """Return the weight and bias of both together, or ``None`` if ``fmt`` cannot hold them."""
    weight, *bias = recording.values_of_inputs(recording.operations[layer])
    options = recording.operations[norm].options
    gamma, beta, mean, variance = (
        value.astype(np.float64) for value in recording.values_of_inputs(recording.operations[norm])
    )
    scale = 1 / np.sqrt(variance + options["eps"])
    if not options["fix_gamma"]:
        scale = scale * gamma
    new_bias = beta + ((bias[0] if bias else 0) - mean) * scale
    new_weight = weight * scale.reshape(-1, *(1,) * (weight.ndim - 1))
    folded = new_weight.astype(np.float32), new_bias.astype(np.float32)
    fits = all(np.isfinite(round_to(array, fmt)).all() for array in folded)
    return folded if fits else None
