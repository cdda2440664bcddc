"""A recording as an ONNX model, in FP32 or float16. It imports onnx, which is an extra.

A float16 model follows the table of operators of a cast network: products, pooling and sums
compute in float16, remaining BatchNorms and softmax in FP32, and Cast nodes stand between formats.
Input and output are FP32 in both models.
"""

from __future__ import annotations

import mxnet as mx
import onnx
from mxnet.base import MXNetError
from onnx import TensorProto, helper

from mpgluon.cast.table import Rule, rule_of
from mpgluon.deployment.inference import replay
from mpgluon.deployment.onnx_operators import (
    TRANSLATIONS,
    Nodes,
    OperatorCall,
    UnsupportedError,
)
from mpgluon.deployment.recording import VARIABLE, Entry, Operation, Recording
from mpgluon.errors import PrecisionError

__all__ = ["OPSET", "onnx_model"]

OPSET, _IR_VERSION = 17, 8
"""Of 2022: every maintained runtime reads them."""

_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def onnx_model(
    recording: Recording, input_shapes: list[tuple[int, ...]], dtype: str
) -> onnx.ModelProto:
    """Return a recording as a checked ONNX model with a batch of any size.

    Parameters
    ----------
    recording : Recording
    input_shapes : list of tuple of int
        Of each input, batch included.
    dtype : {"float32", "float16"}

    Raises
    ------
    PrecisionError
        If an operator has no equal in ONNX; all of them are named.
    ValueError
        If the network does not work on input of those shapes.
    """
    writer = _Writer(recording, _shapes(recording, input_shapes), dtype)
    for number, operation in enumerate(recording.operations):
        if operation.operator != VARIABLE:
            writer.translate(number, operation)
    if writer.problems:
        raise PrecisionError(
            "ONNX export cannot express " + "; ".join(writer.problems) + "; write these blocks "
            "with other operators, or export the part of the network before them"
        )
    return writer.model()


def _shapes(
    recording: Recording, input_shapes: list[tuple[int, ...]]
) -> dict[Entry, tuple[int, ...]]:
    """Return the shape of every entry, as MXNet infers it."""
    variables = {one.name for one in recording.operations if one.operator == VARIABLE}
    given = {name: mx.sym.var(name) for name in variables}
    found = replay(recording, mx.sym, given)
    entries = [
        (number, output) for number, outputs in enumerate(found) for output in range(len(outputs))
    ]
    known = {name: value.shape for name, value in recording.values.items()}
    known.update(zip(recording.inputs, input_shapes))
    everything = mx.sym.Group([found[number][output] for number, output in entries])
    try:
        _, shapes, _ = everything.infer_shape(**known)
    except MXNetError as error:
        raise ValueError(
            f"the network does not work on input of shape {input_shapes}: "
            f"{str(error).strip().splitlines()[-1]}"
        ) from error
    return dict(zip(entries, shapes))


class _Writer:
    """Translates operations one by one, each into the format that it computes in."""

    def __init__(
        self, recording: Recording, shapes: dict[Entry, tuple[int, ...]], dtype: str
    ) -> None:
        self.problems: list[str] = []
        self._recording, self._shapes, self._dtype = recording, shapes, dtype
        self._model = Nodes()
        self._formats: dict[Entry, str] = {}
        self._names: dict[tuple[Entry, str], str] = {}  # of an entry in a format
        for number, operation in enumerate(recording.operations):
            if operation.operator == VARIABLE and operation.name not in recording.values:
                self._set((number, 0), "float32", operation.name)

    def translate(self, number: int, operation: Operation) -> None:
        """Add the nodes of an operation, or note why ONNX cannot express it."""
        translation = TRANSLATIONS.get(operation.operator)
        if translation is None:
            self.problems.append(f"{operation.name} ({operation.operator})")
            return
        rule = rule_of(operation.operator.replace("_contrib_", "contrib.", 1))
        dtype = self._format_of(rule, operation)
        result_dtype = self._dtype if rule is Rule.NORMALIZE else dtype
        call = OperatorCall(
            model=self._model,
            name=operation.name,
            options=dict(operation.options),
            inputs=[self._in_format(entry, dtype) for entry in operation.inputs],
            shapes=[self._shapes[entry] for entry in operation.inputs],
            output_shape=self._shapes[number, 0],
            values=[self._recording.values.get(self._variable(e)) for e in operation.inputs],
            dtype=dtype,
        )
        try:
            name = translation(call)
        except UnsupportedError as why:
            self.problems.append(f"{operation.name} ({operation.operator}: {why})")
            name = operation.name  # so that later operations are translated, too
        self._set((number, 0), dtype, name)
        if result_dtype != dtype:
            self._set((number, 0), result_dtype, self._in_format((number, 0), result_dtype))

    def model(self) -> onnx.ModelProto:
        """Return the model, after onnx's own checks."""
        recording = self._recording
        outputs = []
        for place, entry in enumerate(recording.outputs):
            name = "logits" if len(recording.outputs) == 1 else f"logits{place}"
            self._model.add("Identity", [self._in_format(entry, "float32")], name)
            outputs.append(_described(name, self._shapes[entry]))
        used = {name for node in self._model.nodes for name in node.input}
        graph = helper.make_graph(
            self._model.nodes,
            "network",
            [_described(name, self._shapes_of_input(name)) for name in recording.inputs],
            outputs,
            [constant for name, constant in self._model.constants.items() if name in used],
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=_IR_VERSION,
            producer_name="mpgluon",
        )
        onnx.checker.check_model(model, full_check=True)
        return model

    def _format_of(self, rule: Rule, operation: Operation) -> str:
        """Return the format that an operation computes in."""
        if self._dtype == "float32" or rule in (Rule.NORMALIZE, Rule.FLOAT32):
            return "float32"
        if rule is Rule.COMPUTE:
            return self._dtype
        formats = {self._formats.get(entry, self._dtype) for entry in operation.inputs}
        return "float32" if "float32" in formats else self._dtype

    def _in_format(self, entry: Entry, dtype: str) -> str:
        """Return the name of an entry in a format: a constant, or the result of a Cast."""
        if (entry, dtype) not in self._names:
            variable = self._variable(entry)
            values = self._recording.values.get(variable)
            if values is not None:
                name = variable if dtype == self._dtype else f"{variable}_{dtype}"
                self._names[entry, dtype] = self._model.constant(name, values, dtype)
            else:
                name = self._names[entry, self._formats[entry]]
                cast = self._model.add("Cast", [name], f"{name}_{dtype}", to=_TYPES[dtype])
                self._names[entry, dtype] = cast
        return self._names[entry, dtype]

    def _set(self, entry: Entry, dtype: str, name: str) -> None:
        self._formats[entry] = dtype
        self._names[entry, dtype] = name

    def _variable(self, entry: Entry) -> str:
        """Return the name of a variable; an empty one for an operation."""
        operation = self._recording.operations[entry[0]]
        return operation.name if operation.operator == VARIABLE else ""

    def _shapes_of_input(self, name: str) -> tuple[int, ...]:
        numbers = (n for n, one in enumerate(self._recording.operations) if one.name == name)
        return self._shapes[next(numbers), 0]


def _described(name: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    """Return the type of an input or output, whose first axis is a batch of any size."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape[1:]])
