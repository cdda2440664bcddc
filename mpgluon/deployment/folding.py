"""Folding BatchNorm into the convolution or dense layer before it.

At inference a BatchNorm multiplies each channel by one number and adds another, which the layer
before it can do with other weights and another bias. These are computed in float64 and rounded to
FP32 once; rounding to 16 bits comes later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Optional

from mpgluon.deployment.recording import Recording
from mpgluon.formats.float_format import FloatFormat, round_to
from mpgluon.graph.nodes import VARIABLE, Entry, Graph, Node

import numpy as np
import numpy.typing as npt

__all__ = ["fold_batch_norms"]

_LAYERS = frozenset({"Convolution", "FullyConnected"})
_CHANNELS_FIRST = (None, "NCW", "NCHW", "NCDHW")

FP32Array = npt.NDArray[np.float32]


def fold_batch_norms(recording: Recording, fmt: FloatFormat) -> Recording:
    """Return a recording without the BatchNorms that alone use the result of a layer.

    Others stay, such as those of ResNet v2, which come before their convolutions; those with a
    weight, bias or gamma that the network computes; and those whose folded values would become
    infinite in ``fmt``, the format that values will be rounded to, as with a channel of almost no
    variance.
    """
    folded = {
        layer: (norm, *both)
        for layer, norm in _pairs(recording)
        if (both := _folded(recording, layer, norm, fmt)) is not None
    }
    layer_of = {norm: layer for layer, (norm, *_) in folded.items()}
    values = dict(recording.values)
    new: dict[Node, Node] = {}

    def moved(entries: Sequence[Entry]) -> list[Entry]:
        return [Entry(new[entry.node], entry.number) for entry in entries]

    for node in recording.graph.nodes:
        if node in layer_of:
            new[node] = new[layer_of[node]]
            continue
        attributes, inputs = node.attributes, moved(node.inputs)
        if node in folded:
            _, weight, bias = folded[node]
            bias_name = f"{node.name}_folded_bias"
            values[_name_of_weight(node)] = weight
            values[bias_name] = bias
            inputs = [*inputs[:2], Entry(Node(VARIABLE, bias_name))]
            attributes = {**attributes, "no_bias": "False"}
        new[node] = Node(node.operator, node.name, attributes, inputs)
    return Recording(Graph(moved(recording.graph.heads)), recording.inputs, values)


def _pairs(recording: Recording) -> Iterator[tuple[Node, Node]]:
    """Yield each layer whose only use is a BatchNorm of its channels, with that BatchNorm."""
    uses = recording.uses()
    for norm in recording.graph.nodes:
        if norm.operator != "BatchNorm" or norm.options.get("axis", 1) != 1:
            continue
        layer, options = norm.inputs[0].node, norm.inputs[0].node.options
        if (
            layer.operator in _LAYERS
            and options.get("layout") in _CHANNELS_FIRST
            and options.get("flatten", True)
            and uses[norm.inputs[0].key] == 1
            and uses[layer.inputs[1].key] == 1
        ):
            yield layer, norm


def _name_of_weight(layer: Node) -> str:
    return layer.inputs[1].node.name


def _folded(
    recording: Recording, layer: Node, norm: Node, fmt: FloatFormat
) -> Optional[tuple[FP32Array, FP32Array]]:
    """Return the weight and bias of both together.

    ``None`` if an operand is computed, or ``fmt`` cannot hold the result.
    """
    of_layer, of_norm = (recording.values_after_data(node) for node in (layer, norm))
    if of_layer is None or of_norm is None:
        return None
    weight, *bias = of_layer
    options = norm.options
    gamma, beta, mean, variance = (value.astype(np.float64) for value in of_norm)
    scale = 1 / np.sqrt(variance + options["eps"])
    if not options["fix_gamma"]:
        scale = scale * gamma
    new_bias = beta + ((bias[0] if bias else 0) - mean) * scale
    new_weight = weight * scale.reshape(-1, *(1,) * (weight.ndim - 1))
    folded = new_weight.astype(np.float32), new_bias.astype(np.float32)
    fits = all(np.isfinite(round_to(array, fmt)).all() for array in folded)
    return folded if fits else None
