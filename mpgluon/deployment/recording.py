"""A network as a list of operators and FP32 values: what leaves the framework is made of this.

A recording knows no format and no device: casts are left out, and float16 parameters of a cast
network are the FP32 values that they stand for. :mod:`mpgluon.deployment.folding` shortens it;
it is carried out again in MXNet by :mod:`mpgluon.deployment.inference`, and written as ONNX by
:mod:`mpgluon.deployment.onnx_export`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon

from mpgluon.cast import fp32
from mpgluon.cast.arrays import arrays_in
from mpgluon.cast.block import blocks_of
from mpgluon.cast.forward import forward_of
from mpgluon.errors import PrecisionError
from mpgluon.graph.description import unchanged
from mpgluon.graph.nodes import options_of
from mpgluon.numerics.formats import FloatFormat, round_to

__all__ = ["VARIABLE", "Entry", "Operation", "Recording", "record"]

Entry = tuple[int, int]
"""The number of an operation, and which of its outputs."""

Values = dict[str, npt.NDArray[np.float32]]

VARIABLE = "null"
"""MXNet's name for the operator of an input or a parameter."""

# Each returns its first operand when nothing is trained.
_PASS_THROUGH = frozenset({"amp_cast", "_copy", "BlockGrad", "Dropout"})


@dataclass(frozen=True)
class Operation:
    """One operator of a recording, or a variable.

    Attributes
    ----------
    operator : str
        MXNet's name, such as ``"Convolution"``; :data:`VARIABLE` for a parameter or an input.
    name : str
    options : mapping from str to value
        As Python values: ``{"kernel": (3, 3), "no_bias": True}``.
    inputs : tuple of (int, int)
    """

    operator: str
    name: str
    options: Mapping[str, Any]
    inputs: tuple[Entry, ...]


@dataclass(frozen=True)
class Recording:
    """What a network computes at inference.

    Attributes
    ----------
    operations : tuple of Operation
        Each after those that it depends on.
    inputs : tuple of str
        Names of the variables that are given with each call.
    outputs : tuple of (int, int)
    values : dict from name to ndarray, float32
        Of all other variables.
    """

    operations: tuple[Operation, ...]
    inputs: tuple[str, ...]
    outputs: tuple[Entry, ...]
    values: Values

    def uses(self) -> Counter[Entry]:
        """Return how often each entry is an operand or a result."""
        operands = (entry for operation in self.operations for entry in operation.inputs)
        return Counter([*operands, *self.outputs])

    def values_of_inputs(self, operation: Operation) -> list[npt.NDArray[np.float32]]:
        """Return the values of those operands that are parameters, in their order."""
        names = (self.operations[number].name for number, _ in operation.inputs)
        return [self.values[name] for name in names if name in self.values]

    def refuse_overflow(self, fmt: FloatFormat) -> None:
        """Raise PrecisionError if a weight or bias would become infinite in ``fmt``.

        Values of BatchNorms do not count: they stay FP32.
        """
        too_large = [
            self.operations[number].name
            for operation in self.operations
            if operation.operator != "BatchNorm"
            for number, _ in operation.inputs
            if not self._fits(self.operations[number].name, fmt)
        ]
        if too_large:
            raise PrecisionError(
                f"{', '.join(dict.fromkeys(too_large))} hold values beyond {fmt.max:g}, the "
                f"largest number of {fmt}; use bfloat16 or float32"
            )

    def _fits(self, name: str, fmt: FloatFormat) -> bool:
        values = self.values.get(name)
        return values is None or bool(np.isfinite(round_to(values, fmt)).all())

    def without_what_nothing_uses(self) -> Recording:
        """Return the recording with only the operations that its outputs depend on."""
        needed = {number for number, _ in self.outputs}
        for number in reversed(range(len(self.operations))):
            if number in needed:
                needed.update(source for source, _ in self.operations[number].inputs)
        renumbered = {old: new for new, old in enumerate(sorted(needed))}

        def moved(entries: Iterable[Entry]) -> tuple[Entry, ...]:
            return tuple((renumbered[number], output) for number, output in entries)

        operations = tuple(
            Operation(one.operator, one.name, one.options, moved(one.inputs))
            for one in (self.operations[number] for number in renumbered)
        )
        kept = {one.name for one in operations}
        values = {name: value for name, value in self.values.items() if name in kept}
        return Recording(operations, self.inputs, moved(self.outputs), values)


def record(net: gluon.HybridBlock, inputs: Sequence[str] = ("data",)) -> Recording:
    """Record what a network computes at inference, and in FP32 the values of its parameters.

    Casts and Dropout are left out. A cast network's float16 parameters are recorded as the FP32
    values behind them: those from before the cast, or the optimizer's masters. The network is
    not changed. Waits for the devices.

    Parameters
    ----------
    net : gluon.HybridBlock
        Plain, cast or autocast; its parameters must have values.
    inputs : sequence of str
        A name for each argument of the network.

    Raises
    ------
    TypeError
        If ``net`` is not a ``HybridBlock``, or takes another number of inputs.
    ValueError
        If a parameter has no values yet, or an operator holds other operators (control flow).
    """
    values = _values_of(net)
    with unchanged(net), mx.cpu():
        for block in blocks_of(net):
            forward = forward_of(block)
            if forward is not None:
                forward.detach()
        result = net(*(mx.sym.var(name) for name in inputs))
    described = json.loads(mx.sym.Group(arrays_in((result,))).tojson(remove_amp_cast=False))
    operations: list[Operation] = []
    recorded: dict[int, int] = {}  # a node of the described graph: its number here
    calls: Counter[str] = Counter()
    passed: dict[Entry, Entry] = {}  # what comes out of a node that is left out

    def moved(described_entry: Sequence[int]) -> Entry:
        number, output = described_entry[:2]
        return passed[number, output] if number not in recorded else (recorded[number], output)

    for number, node in enumerate(described["nodes"]):
        if "subgraphs" in node:
            raise ValueError(
                f"{node['name']} is control flow ({node['op']}), which is not recorded; write the "
                "network without F.contrib.foreach, while_loop and cond"
            )
        operands = tuple(moved(entry) for entry in node["inputs"])
        options = options_of(node.get("attrs", {}))
        if node["op"] in _PASS_THROUGH and options.get("mode") != "always":
            passed[number, 0] = operands[0]
            continue
        recorded[number] = len(operations)
        calls[node["name"]] += 1
        # A block that is called twice gives its operators the same names twice.
        again = f"_{calls[node['name']]}" if calls[node["name"]] > 1 else ""
        operations.append(Operation(node["op"], f"{node['name']}{again}", options, operands))
    variables = {one.name for one in operations if one.operator == VARIABLE}
    unknown = sorted(variables - values.keys() - set(inputs))
    if unknown:
        raise ValueError(
            f"the network's graph asks for {', '.join(unknown)}, which is neither an input "
            f"({', '.join(inputs)}) nor a parameter of it"
        )
    outputs = tuple(moved(entry) for entry in described["heads"])
    whole = Recording(tuple(operations), tuple(inputs), outputs, values)
    return whole.without_what_nothing_uses()


def _values_of(net: gluon.Block) -> Values:
    """Return the FP32 value of each parameter by its name; the mean, where devices differ.

    They differ in the running statistics of BatchNorm: each device has seen other images.

    Raises
    ------
    ValueError
        If a parameter has no values.
    """
    mx.nd.waitall()  # a running inference may change the layout of a weight that is being read
    empty = [name for name, p in net.collect_params().items() if p._data is None]
    if empty:
        raise ValueError(
            f"no values yet: {', '.join(empty[:3])}{', …' if len(empty) > 3 else ''}; initialize "
            "the network or load parameters, and call it once on an input"
        )
    return {name: _fp32_values(p) for name, p in net.collect_params().items()}


def _fp32_values(parameter: gluon.Parameter) -> npt.NDArray[np.float32]:
    known = fp32.known(parameter)
    copies: list[npt.NDArray[np.float32]] = [
        fp32.fp32_value(data, known).asnumpy().astype(np.float32, copy=False)
        for data in parameter.list_data()
    ]
    if all(copy.tobytes() == copies[0].tobytes() for copy in copies):
        return copies[0]
    return np.asarray(np.mean(copies, axis=0, dtype=np.float64), dtype=np.float32)
