"""Folding BatchNorms and other constant computation into the weights of a network.

At inference a BatchNorm multiplies each channel by one number and adds another, which the layer
before it can do with other weights and another bias. These are computed in float64 and rounded to
FP32 once. A weight that is computed from parameters alone, such as a standardized one, becomes a
parameter. Rounding to 16 bits comes later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Optional

from mpgluon.base.devices import from_numpy
from mpgluon.formats.float_format import FloatFormat, lost_values
from mpgluon.graph.nodes import VARIABLE, Entry, Graph, Key, Node
from mpgluon.graph.operators import Rule, name_in_f, rule_of
from mpgluon.graph.replay import replay
from mpgluon_tools.deployment.recording import Recording

import mxnet as mx
import numpy as np
import numpy.typing as npt

__all__ = ["fold", "fold_constants"]

# Operators that draw random numbers; the rule of the others that do is OTHER.
_DRAWS = re.compile("random|sample|shuffle|dropout", re.IGNORECASE)
_CREATIONS = frozenset({"_zeros", "_ones", "_full", "_arange"})
_LAYERS = frozenset({"Convolution", "FullyConnected"})
_CHANNELS_FIRST = (None, "NCW", "NCHW", "NCDHW")

FP32Array = npt.NDArray[np.float32]


def fold(recording: Recording, fmt: FloatFormat) -> Recording:
    """Return a recording without computed weights, and without most BatchNorms.

    BatchNorms stay that do not alone use the result of a layer, such as in ResNet v2, where they
    come before their convolutions; those with a weight, bias or gamma that depends on the input;
    and those whose folded values would become infinite or 0 in ``fmt``, the format that values will
    be rounded to, as with a channel of almost no variance.
    """
    return _fold_batch_norms(_compute_weights(recording), fmt)


def fold_constants(recording: Recording) -> Recording:
    """Return a recording without computation from parameters, numbers and shapes alone."""
    return _compute_weights(recording, every_operand=True)


def _compute_weights(recording: Recording, *, every_operand: bool = False) -> Recording:
    """Replace the operands of products and normalizations that depend on parameters only.

    A recurrent layer keeps its parameters, which MXNet puts into one array in each call. With
    ``every_operand`` nothing is kept, and the operands of other operators are replaced, too.
    """
    constant: set[Node] = set()
    computed: dict[Key, Entry] = {}
    for node in recording.graph.nodes:
        if node.is_variable:
            if node.name in recording.values:
                constant.add(node)
            continue
        rule, operands = rule_of(name_in_f(node.operator)), {entry.node for entry in node.inputs}
        may_vary = rule is Rule.OTHER or _DRAWS.search(node.operator)
        shape = np.atleast_1d(node.options.get("shape", 1))  # 0 and -1 are sizes that MXNet infers
        created = every_operand and node.operator in _CREATIONS and (shape > 0).all()
        if created or (operands and operands <= constant and not may_vary):
            constant.add(node)
        weights = rule in (Rule.COMPUTE, Rule.NORMALIZE) and node.operator != "RNN"
        if weights or (every_operand and node not in constant):
            computed.update(
                (entry.key, entry)
                for entry in node.inputs
                if entry.node in constant and not entry.node.is_variable
            )
    if not computed:
        return recording
    graph = Graph(list(computed.values()))
    names = [node.name for node in graph.nodes if node.is_variable]
    variables = {name: from_numpy(recording.values[name]) for name in names}
    if mx.util.is_np_array():
        variables = {name: array.as_np_ndarray() for name, array in variables.items()}
    results = replay(graph, mx.nd, variables)
    values, parameters, given = dict(recording.values), {}, set(recording.given)
    for number, key in enumerate(computed):
        name = f"{key[0].name}_computed{number}"
        values[name] = results[key].asnumpy().astype(np.float32, copy=False)
        parameters[key] = Entry(Node(VARIABLE, name))
    if every_operand:  # such as positions, which may be too large for a 16-bit format
        given.update(values.keys() - recording.values.keys())
    return Recording(recording.graph.replaced(parameters), recording.inputs, values, given)


def _fold_batch_norms(recording: Recording, fmt: FloatFormat) -> Recording:
    """Fold each BatchNorm that alone uses the result of a layer into it."""
    values = dict(recording.values)
    folded: dict[Key, Entry] = {}
    for layer, norm in _pairs(recording):
        both = _folded(recording, layer, norm, fmt)
        if both is None:
            continue
        data, weight, *_ = layer.inputs
        bias = Node(VARIABLE, f"{layer.name}_folded_bias")
        values[weight.node.name], values[bias.name] = both
        attributes = {**layer.attributes, "no_bias": "False"}
        together = replace(layer, attributes=attributes, inputs=[data, weight, Entry(bias)])
        folded[norm, 0] = Entry(together)
    return Recording(recording.graph.replaced(folded), recording.inputs, values, recording.given)


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


def _folded(
    recording: Recording, layer: Node, norm: Node, fmt: FloatFormat
) -> Optional[tuple[FP32Array, FP32Array]]:
    """Return the weight and bias of both together.

    ``None`` if an operand is computed, or the result is out of the range of ``fmt``.
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
    fits = all(np.isfinite(array).all() and not lost_values(array, fmt)[0] for array in folded)
    fits &= not lost_values(folded[0], fmt)[1]  # a bias as small adds nothing
    return folded if fits else None
