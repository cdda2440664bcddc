"""A recording as an ONNX model, in FP32 or float16. It imports onnx, which is an extra.

In a float16 model the same table of operators decides as in a cast network: products, pooling and
sums are float16, BatchNorms that are left and softmax compute in FP32, and Cast nodes stand where
formats meet. So does an FP32 input and output, so that both models are called alike.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import onnx
from mxnet.base import MXNetError
from onnx import TensorProto, helper, numpy_helper

from mpgluon.cast.table import Rule, rule_of
from mpgluon.deployment.onnx_operators import TRANSLATIONS, Call, UnsupportedError
from mpgluon.deployment.recording import Recording
from mpgluon.errors import PrecisionError
from mpgluon.graph.nodes import Key, Node
from mpgluon.graph.replay import replay

__all__ = ["OPSET", "onnx_model"]

OPSET, _IR_VERSION = 17, 8
"""Of 2022: every runtime that is still in use reads them."""

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
    for node in recording.graph.nodes:
        if not node.is_variable:
            writer.translate(node)
    if writer.problems:
        raise PrecisionError(
            "ONNX export cannot express " + "; ".join(writer.problems) + "; write these blocks "
            "with other operators, or export the part of the network before them"
        )
    return writer.model()


def _shapes(
    recording: Recording, input_shapes: list[tuple[int, ...]]
) -> dict[Key, tuple[int, ...]]:
    """Return the shape of every output, as MXNet infers it."""
    names = {node.name for node in recording.graph.nodes if node.is_variable}
    found = replay(recording.graph, mx.sym, {name: mx.sym.var(name) for name in names})
    known = {name: value.shape for name, value in recording.values.items()}
    known.update(zip(recording.inputs, input_shapes))
    everything = mx.sym.Group(list(found.values()))
    try:
        _, shapes, _ = everything.infer_shape(**known)
    except MXNetError as error:
        raise ValueError(
            f"the network does not work on input of shape {input_shapes}: "
            f"{str(error).strip().splitlines()[-1]}"
        ) from error
    return dict(zip(found, shapes))


class _Writer:
    """Collects the nodes and constants of a model; the ``Nodes`` of the translations."""

    def __init__(
        self, recording: Recording, shapes: dict[Key, tuple[int, ...]], dtype: str
    ) -> None:
        self.problems: list[str] = []
        self._recording, self._shapes, self._dtype = recording, shapes, dtype
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._formats: dict[Key, str] = {}
        self._names: dict[tuple[Key, str], str] = {}  # of an output in a format
        for node in recording.graph.nodes:
            if node.is_variable and node.name not in recording.values:
                self._set((node, 0), "float32", node.name)

    def translate(self, node: Node) -> None:
        """Add the ONNX nodes of an operator, or note why it has none."""
        translation = TRANSLATIONS.get(node.operator)
        inputs = [entry.key for entry in node.inputs]
        if translation is None:
            self.problems.append(f"{node.name} ({node.operator})")
            return
        rule = rule_of(_table_name(node.operator))
        dtype = self._format_of(rule, inputs)
        result_dtype = self._dtype if rule is Rule.NORMALIZE else dtype
        call = Call(
            name=node.name,
            options=node.options,
            inputs=[self._in_format(key, dtype) for key in inputs],
            shapes=[self._shapes[key] for key in inputs],
            output_shape=self._shapes[node, 0],
            values=[self._recording.values.get(self._variable(key)) for key in inputs],
            dtype=dtype,
        )
        try:
            name = translation(self, call)
        except UnsupportedError as why:
            self.problems.append(f"{node.name} ({node.operator}: {why})")
            name = node.name  # so that what follows is looked at too
        self._set((node, 0), dtype, name)
        if result_dtype != dtype:
            self._set((node, 0), result_dtype, self._in_format((node, 0), result_dtype))

    def add(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node with one output, and return its name."""
        self._nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def constant(self, name: str, values: Any, dtype: str) -> str:
        """Add a constant, rounded to ``dtype``, and return its name."""
        self._constants[name] = numpy_helper.from_array(np.asarray(values).astype(dtype), name)
        return name

    def model(self) -> onnx.ModelProto:
        """Return what was added as a model, after onnx's own checks."""
        recording = self._recording
        outputs = []
        heads = [entry.key for entry in recording.graph.heads]
        for place, key in enumerate(heads):
            name = "logits" if len(heads) == 1 else f"logits{place}"
            self.add("Identity", [self._in_format(key, "float32")], name)
            outputs.append(_described(name, self._shapes[key]))
        used = {name for node in self._nodes for name in node.input}
        graph = helper.make_graph(
            self._nodes,
            "network",
            [_described(name, self._shapes_of_input(name)) for name in recording.inputs],
            outputs,
            [constant for name, constant in self._constants.items() if name in used],
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=_IR_VERSION,
            producer_name="mpgluon",
        )
        onnx.checker.check_model(model, full_check=True)
        return model

    def _format_of(self, rule: Rule, inputs: list[Key]) -> str:
        """Return the format in which an operator computes."""
        if self._dtype == "float32" or rule in (Rule.NORMALIZE, Rule.FLOAT32):
            return "float32"
        if rule is Rule.COMPUTE:
            return self._dtype
        formats = {self._formats.get(key, self._dtype) for key in inputs}
        return "float32" if "float32" in formats else self._dtype

    def _in_format(self, key: Key, dtype: str) -> str:
        """Return the name of an output in a format: a constant, or by way of a Cast."""
        if (key, dtype) not in self._names:
            variable = self._variable(key)
            if variable in self._recording.values:
                same = dtype == self._dtype
                name = variable if same else f"{variable}_{dtype}"
                self._names[key, dtype] = self.constant(
                    name, self._recording.values[variable], dtype
                )
            else:
                name = self._names[key, self._formats[key]]
                self._names[key, dtype] = self.add(
                    "Cast", [name], f"{name}_{dtype}", to=_TYPES[dtype]
                )
        return self._names[key, dtype]

    def _set(self, key: Key, dtype: str, name: str) -> None:
        self._formats[key] = dtype
        self._names[key, dtype] = name

    @staticmethod
    def _variable(key: Key) -> str:
        """Return the name of a variable, and of anything else an empty one."""
        return key[0].name if key[0].is_variable else ""

    def _shapes_of_input(self, name: str) -> tuple[int, ...]:
        nodes = (node for node in self._recording.graph.nodes if node.name == name)
        return self._shapes[next(nodes), 0]


def _table_name(operator: str) -> str:
    return operator.replace("_contrib_", "contrib.", 1)


def _described(name: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    """Return the type of an input or output, whose first axis is a batch of any size."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape[1:]])
