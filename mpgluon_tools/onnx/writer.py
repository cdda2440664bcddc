"""A recording as an ONNX model, in FP32 or float16. It imports onnx, which is an extra.

A float16 model follows the table of operators of a cast network: products, pooling and sums
compute in float16, remaining BatchNorms and softmax in FP32, and Cast nodes stand between formats.
Input and output are FP32 in both models.
"""

from __future__ import annotations

import logging
from contextlib import redirect_stderr, suppress

from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import FLOAT16
from mpgluon.graph.nodes import Key, Node
from mpgluon.graph.operators import Rule, facts_in_graph, lost_numbers, name_in_f, rule_of
from mpgluon_tools.deployment.folding import fold_constants
from mpgluon_tools.deployment.recording import Recording
from mpgluon_tools.leaving.refusal import UnsupportedError, require
from mpgluon_tools.onnx.calls import TYPES, Nodes, OperatorCall
from mpgluon_tools.onnx.operators import TRANSLATIONS, translate

import onnx
from onnx import TensorProto, helper

__all__ = ["OPSET", "onnx_model"]

OPSET, _IR_VERSION = 17, 8
"""Of 2022: every maintained runtime reads them."""

_LENGTH, _BATCH, _NOTHING = "batch and length", "batch", ""  # the open sizes of a file
_logger = logging.getLogger(__name__)


def onnx_model(
    recording: Recording,
    input_shapes: list[tuple[int, ...]],
    dtype: str,
    *,
    may_fix_batch: bool = False,
) -> onnx.ModelProto:
    """Return a recording as a checked ONNX model with a batch of any size.

    The shapes of inputs include the batch; ``dtype`` is ``"float32"`` or ``"float16"``. With
    ``may_fix_batch``, a network that takes one size of the batch alone is written with the given
    shapes, and a warning is logged.

    Raises
    ------
    PrecisionError
        If an operator is not in the table of those that can be written, or its options have no
        equal in ONNX; all of them are named.
    ValueError
        If the network does not work on input of those shapes.
    """
    recording = fold_constants(recording)
    nodes = [node for node in recording.graph.nodes if not node.is_variable]
    unknown = [f"{n.name} ({n.operator})" for n in nodes if n.operator not in TRANSLATIONS]
    if unknown:
        raise _refusal(unknown, f". The operators that it knows: {', '.join(sorted(TRANSLATIONS))}")
    # In a network of sequences their length is open, too, unless an operator needs it.
    sequences = any(node.operator in ("RNN", "Embedding") for node in nodes)
    attempts = [_LENGTH] * sequences + [_BATCH] + [_NOTHING] * may_fix_batch
    problems: list[str] = []
    for is_open in attempts:
        writer = _Writer(recording, dtype, input_shapes, is_open)
        for node in nodes:
            writer.translate(node)
        if not writer.problems:
            if is_open == _NOTHING:
                _logger.warning("the file takes the given shapes alone: %s", "; ".join(problems))
            return writer.model()
        problems = writer.problems
    raise _refusal(problems)


def _refusal(problems: list[str], known: str = "") -> PrecisionError:
    return PrecisionError(
        f"ONNX export cannot express {'; '.join(problems)}; write these blocks with other "
        f"operators, or export the part of the network before them{known}"
    )


def _larger_example(
    recording: Recording, shapes: list[tuple[int, ...]], is_open: str
) -> list[tuple[int, ...]]:
    """Return shapes of inputs on which the network also works: sizes that are larger are open.

    These are the batch, the first axis of inputs and the second of begin states, and the
    length of sequences. In a network that has time first, they change places.
    """
    if is_open == _NOTHING:
        return shapes
    layers = [node for node in recording.graph.nodes if node.operator == "RNN"]
    states = {entry.node.name for node in layers for entry in node.inputs[2:]}
    second = [(place, 1) for place, shape in enumerate(shapes) if len(shape) > 1]
    batch = [(place, int(name in states and (place, 1) in second))
             for place, name in enumerate(recording.inputs)]  # fmt: skip
    larger, factor = [list(shape) for shape in shapes], 2
    for group in [batch, second, *([one] for one in batch)] if is_open == _LENGTH else [batch]:
        trial = [list(shape) for shape in larger]
        for place, axis in group:
            if trial[place][axis] == shapes[place][axis]:
                trial[place][axis] = factor * shapes[place][axis] + 1
        # A network that does not work on such a size says so.
        with suppress(ValueError), redirect_stderr(None):
            recording.infer([tuple(shape) for shape in trial])
            larger, factor = trial, factor + 1
    return [tuple(shape) for shape in larger]


class _Writer:
    """Translates operations one by one, each into the format that it computes in."""

    def __init__(
        self, recording: Recording, dtype: str, shapes: list[tuple[int, ...]], is_open: str
    ) -> None:
        self.problems: list[str] = []
        self._recording, self._dtype = recording, dtype
        larger = _larger_example(recording, shapes, is_open)
        recording.infer(larger)
        self._larger = {
            (node, place): output.shape
            for node in recording.graph.nodes
            for place, output in enumerate(node.outputs)
        }
        recording.infer(shapes)
        sources = {
            pair: (name, axis)
            for name, sizes, others in zip(recording.inputs, shapes, larger)
            for axis, pair in enumerate(zip(sizes, others))
            if pair[0] != pair[1]
        }
        self._model = Nodes(sources, batch_is_fixed=is_open == _NOTHING)
        self._batch_is_first = all(axis == 0 for _, axis in sources.values())
        count = len(recording.graph.heads)
        self._results = ["logits"] if count == 1 else [f"logits{place}" for place in range(count)]
        self._uses = recording.uses()
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
        fixed = {key for place, key in enumerate(inputs)  # such as indices
                 if place in facts_in_graph(node.operator).not_cast}  # fmt: skip
        in_mxnet = tuple(
            value.dtype for value in (node.outputs[0], *(e.value for e in node.inputs))
        )
        integer = in_mxnet[0].startswith(("int", "uint", "bool"))  # in ONNX an FP32 number
        followed = [key for key in inputs if key not in fixed]
        dtype = "float32" if integer else self._format_of(node, rule, followed)
        result_dtype = self._dtype if rule is Rule.NORMALIZE else dtype
        formats = [self._formats.get(key, "float32") if key in fixed else dtype for key in inputs]
        call = OperatorCall(
            model=self._model,
            name=self._free(node.name),
            options=node.options,
            inputs=[self._in_format(key, one) for key, one in zip(inputs, formats)],
            shapes=self._recording.graph.shapes(node),
            larger_shapes=[self._larger[key] for key in inputs],
            output_shape=node.outputs[0].shape,
            larger_shape=self._larger[node, 0],
            values=[self._recording.values.get(self._variable(key)) for key in inputs],
            dtype=dtype,
            in_mxnet=in_mxnet,
            integer=integer,
        )
        try:
            results = translate(node.operator, call)
            results = [results] if isinstance(results, str) else results
            others = range(len(results), len(node.outputs))
            require(not any(self._uses[node, place] for place in others), "its statistics are used")
        except UnsupportedError as why:
            self.problems.append(f"{node.name} ({node.operator}: {why})")
            results = [node.name] * len(node.outputs)  # so that later operators are translated, too
        for place, name in enumerate(results):
            self._set((node, place), dtype, name)
            if result_dtype != dtype:
                cast = self._in_format((node, place), result_dtype)
                self._set((node, place), result_dtype, cast)

    def _free(self, name: str) -> str:
        """Return the name of an operator or constant, longer if a result has that name."""
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
            outputs.append(self._described(name, entry.value.shape, self._larger[entry.key]))
        used = {name for node in self._model.nodes for name in node.input}
        variables = {node.name: node for node in recording.graph.nodes if node.is_variable}
        inputs = [variables[name] for name in recording.inputs]
        graph = helper.make_graph(
            self._model.nodes,
            "network",
            [self._described(n.name, n.outputs[0].shape, self._larger[n, 0]) for n in inputs],
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
                name = self._free(name)
                self._names[key, dtype] = self._model.constant(name, values, dtype)
            else:
                name = self._names[key, self._formats[key]]
                cast = self._model.add("Cast", [name], f"{name}_{dtype}", to=TYPES[dtype])
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
        self, name: str, shape: tuple[int, ...], larger: tuple[int, ...]
    ) -> onnx.ValueInfoProto:
        """Return the type of an input or output; sizes that a larger example changes are open."""
        batch = "batch" if self._batch_is_first else f"{name}_0"
        sizes = [
            size if size == other else f"{name}_{axis}" if axis else batch
            for axis, (size, other) in enumerate(zip(shape, larger))
        ]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)
