"""A recording as an ONNX model, in FP32 or float16. It imports onnx, which is an extra.

A float16 model follows the table of operators of a cast network: products, pooling and sums
compute in float16, remaining BatchNorms and softmax in FP32, and Cast nodes stand between formats.
Input and output are FP32 in both models.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Optional

from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import FLOAT16
from mpgluon.graph.nodes import Key, Node
from mpgluon.graph.operators import Rule, lost_numbers, name_in_f, rule_of
from mpgluon_tools.deployment.recording import Recording
from mpgluon_tools.onnx.operators import TRANSLATIONS, Nodes, OperatorCall, UnsupportedError

import onnx
from onnx import TensorProto, helper

__all__ = ["OPSET", "onnx_model"]

OPSET, _IR_VERSION = 17, 8
"""Of 2022: every maintained runtime reads them."""

_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def onnx_model(
    recording: Recording, input_shapes: list[tuple[int, ...]], dtype: str
) -> onnx.ModelProto:
    """Return a recording as a checked ONNX model with a batch of any size.

    The shapes of inputs include the batch; ``dtype`` is ``"float32"`` or ``"float16"``.

    Raises
    ------
    PrecisionError
        If an operator is not in the table of those that can be written, or its options have no
        equal in ONNX; all of them are named.
    ValueError
        If the network does not work on input of those shapes.
    """
    nodes = [node for node in recording.graph.nodes if not node.is_variable]
    unknown = [f"{n.name} ({n.operator})" for n in nodes if n.operator not in TRANSLATIONS]
    if unknown:
        raise _refusal(unknown, f". The operators that it knows: {', '.join(sorted(TRANSLATIONS))}")
    writer = _Writer(recording, dtype, _infer_shapes(recording, input_shapes))
    for node in nodes:
        writer.translate(node)
    if writer.problems:
        raise _refusal(writer.problems)
    return writer.model()


def _refusal(problems: list[str], known: str = "") -> PrecisionError:
    return PrecisionError(
        f"ONNX export cannot express {'; '.join(problems)}; write these blocks with other "
        f"operators, or export the part of the network before them{known}"
    )


def _infer_shapes(
    recording: Recording, input_shapes: list[tuple[int, ...]]
) -> dict[Key, tuple[int, ...]]:
    """Infer the shape of every output with MXNet, and return the shapes for a larger batch.

    The mapping is empty if the network does not work on a larger batch.
    """
    graph, larger = recording.graph, {}
    with suppress(ValueError):  # of a reshape to a fixed batch, which is refused by its name
        recording.infer([(2 * shape[0] + 1, *shape[1:]) for shape in input_shapes])
        larger = {
            (node, place): output.shape
            for node in graph.nodes
            for place, output in enumerate(node.outputs)
        }
    recording.infer(input_shapes)
    return larger


class _Writer:
    """Translates operations one by one, each into the format that it computes in."""

    def __init__(
        self, recording: Recording, dtype: str, larger: dict[Key, tuple[int, ...]]
    ) -> None:
        self.problems: list[str] = []
        self._recording, self._dtype, self._larger = recording, dtype, larger
        count = len(recording.graph.heads)
        self._results = ["logits"] if count == 1 else [f"logits{place}" for place in range(count)]
        self._model = Nodes()
        self._formats: dict[Key, str] = {}
        self._names: dict[tuple[Key, str], str] = {}  # of an output in a format
        for node in recording.graph.nodes:
            if node.is_variable and node.name not in recording.values:
                self._set((node, 0), "float32", node.name)
            elif node.is_variable and node.name in recording.given:
                self._formats[node, 0] = "float32"

    def translate(self, node: Node) -> None:
        """Add the ONNX nodes of an operator, or note why ONNX cannot express its options."""
        inputs = [entry.key for entry in node.inputs]
        rule = rule_of(name_in_f(node.operator), node.options)
        dtype = self._format_of(node, rule, inputs)
        result_dtype = self._dtype if rule is Rule.NORMALIZE else dtype
        call = OperatorCall(
            model=self._model,
            name=self._free(node.name),
            options=node.options,
            inputs=[self._in_format(key, dtype) for key in inputs],
            shapes=self._recording.graph.shapes(node),
            output_shape=node.outputs[0].shape,
            larger_shape=self._larger.get((node, 0), node.outputs[0].shape),
            values=[self._recording.values.get(self._variable(key)) for key in inputs],
            dtype=dtype,
        )
        try:
            name = TRANSLATIONS[node.operator](call)
        except UnsupportedError as why:
            self.problems.append(f"{node.name} ({node.operator}: {why})")
            name = node.name  # so that later operators are translated, too
        self._set((node, 0), dtype, name)
        if result_dtype != dtype:
            self._set((node, 0), result_dtype, self._in_format((node, 0), result_dtype))

    def _free(self, name: str) -> str:
        """Return an operator's name, or a longer one if a result of the model has this name."""
        if name in self._results:
            taken = {node.name for node in self._recording.graph.nodes}
            while name in taken:
                name += "_"
        return name

    def model(self) -> onnx.ModelProto:
        """Return the model, after onnx's own checks."""
        recording = self._recording
        outputs = []
        for name, entry in zip(self._results, recording.graph.heads):
            self._model.add("Identity", [self._in_format(entry.key, "float32")], name)
            outputs.append(_described(name, entry.value.shape, self._larger.get(entry.key)))
        used = {name for node in self._model.nodes for name in node.input}
        shapes = {n.name: n.outputs[0].shape for n in recording.graph.nodes if n.is_variable}
        graph = helper.make_graph(
            self._model.nodes,
            "network",
            [_described(name, shapes[name]) for name in recording.inputs],
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

    def _format_of(self, node: Node, rule: Rule, inputs: list[Key]) -> str:
        """Return the format that an operator computes in."""
        if rule is Rule.FOLLOW and lost_numbers(FLOAT16, node.operator, node.options):
            return "float32"
        if self._dtype == "float32" or rule in (Rule.NORMALIZE, Rule.FLOAT32):
            return "float32"
        if rule is Rule.COMPUTE:
            return self._dtype
        formats = {self._formats.get(key, self._dtype) for key in inputs}
        return "float32" if "float32" in formats else self._dtype

    def _in_format(self, key: Key, dtype: str) -> str:
        """Return the name of an output in a format: a constant, or the result of a Cast."""
        if (key, dtype) not in self._names:
            variable = self._variable(key)
            values = self._recording.values.get(variable)
            if values is not None:
                name = variable if dtype == self._dtype else f"{variable}_{dtype}"
                self._names[key, dtype] = self._model.constant(name, values, dtype)
            else:
                name = self._names[key, self._formats[key]]
                cast = self._model.add("Cast", [name], f"{name}_{dtype}", to=_TYPES[dtype])
                self._names[key, dtype] = cast
        return self._names[key, dtype]

    def _set(self, key: Key, dtype: str, name: str) -> None:
        self._formats[key] = dtype
        self._names[key, dtype] = name

    @staticmethod
    def _variable(key: Key) -> str:
        """Return the name of a variable; an empty one for an operator."""
        return key[0].name if key[0].is_variable else ""


def _described(
    name: str, shape: tuple[int, ...], larger: Optional[tuple[int, ...]] = None
) -> onnx.ValueInfoProto:
    """Return the type of an input or output.

    Its first axis is a batch of any size; for a result, each size is open that a larger batch
    changes.
    """
    if larger is None:
        larger = (-1, *shape[1:])
    sizes = [
        size if size == other else f"{name}_{axis}" if axis else "batch"
        for axis, (size, other) in enumerate(zip(shape, larger))
    ]
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)
