"""MXNet's recurrent layers in ONNX, which has a node for each layer and other orders of gates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpgluon_tools.leaving.refusal import require
from mpgluon_tools.onnx.calls import OperatorCall

import numpy as np
import numpy.typing as npt

__all__ = ["recurrent"]

# The node, and the places of its gates in MXNet's: LSTM i f c o as i o f c, GRU r z n as z r n.
_KINDS: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "lstm": ("LSTM", [0, 3, 1, 2], {}),
    "gru": ("GRU", [1, 0, 2], {"linear_before_reset": 1}),
    "rnn_tanh": ("RNN", [0], {"activations": ["Tanh"]}),
    "rnn_relu": ("RNN", [0], {"activations": ["Relu"]}),
}


def recurrent(call: OperatorCall) -> list[str]:
    """Translate all layers of an ``RNN``; dropout between them is nothing at inference."""
    data, (_, packed, *_), (_, _, *states) = call.inputs[0], call.values, call.inputs
    for option in ("projection_size", "use_sequence_length", "lstm_state_clip_min"):
        require(not call.option(option, False), option)
    require(packed is not None, "its parameters are computed")
    assert packed is not None
    operator, order, attributes = _KINDS[call.options["mode"]]
    size, both = call.options["state_size"], 2 if call.option("bidirectional", False) else 1
    attributes = {name: value * both if name == "activations" else value
                  for name, value in attributes.items()}  # fmt: skip
    attributes.update(hidden_size=size, direction="bidirectional" if both == 2 else "forward")
    widths = [call.size(2), *[both * size] * (call.options["num_layers"] - 1)]
    last = []
    for layer, weights in enumerate(_unpacked(packed, size, order, widths, both)):
        places = [layer * both], [layer * both + both], [0]
        begin = [call.step("Slice", state, *places) for state in states]
        operands: list[Any] = [data, *weights, "", *begin]
        data, *ends = call.several(operator, 1 + len(states), *operands, **attributes)
        last.append(ends)
        data = call.step("Transpose", data, perm=(0, 2, 1, 3))  # time, batch, direction, unit
        data = call.step("Reshape", data, [0, 0, both * size])
    return [data, *(call.step("Concat", *one, axis=0) for one in zip(*last))]


def _unpacked(
    packed: npt.NDArray[np.float32], size: int, order: list[int], widths: list[int], both: int
) -> Iterator[list[npt.NDArray[np.float32]]]:
    """Yield W, R and B of ONNX for each layer.

    MXNet has all weights first, of input and state for each layer and direction, then all biases.
    """
    rest = packed

    def taken(columns: int) -> npt.NDArray[np.float32]:
        nonlocal rest
        part, rest = np.split(rest, [len(order) * size * columns])
        return part.reshape(len(order), size, columns)[order].reshape(-1, columns)

    weights = [[(taken(width), taken(size)) for _ in range(both)] for width in widths]
    for directions in weights:
        biases = [np.concatenate([taken(1), taken(1)])[:, 0] for _ in range(both)]
        yield [*(np.stack(one) for one in zip(*directions)), np.stack(biases)]
