"""MXNet's operators in ONNX: one short function for each.

A function receives an operator's operands, already in the format that it computes in, and adds the
ONNX nodes that do the same. The format is chosen in :mod:`mpgluon_tools.onnx.writer`. An
operator or option that ONNX cannot express exactly is refused.

References
----------
The ONNX operator specification, opset 17.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import log, prod, sqrt
from types import MappingProxyType
from typing import Any, Union

from mpgluon.graph.operators import operators_with
from mpgluon_tools.leaving.refusal import require
from mpgluon_tools.onnx.calls import Operand, OperatorCall, Translation
from mpgluon_tools.onnx.detection import DETECTION
from mpgluon_tools.onnx.recurrent import recurrent
from mpgluon_tools.onnx.shapes import SHAPES

import numpy as np
import numpy.typing as npt

__all__ = ["TRANSLATIONS", "translate"]


_CHANNELS_FIRST = (None, "None", "NCW", "NCHW", "NCDHW")


def _convolution(call: OperatorCall, *, transposed: bool = False) -> str:
    require(call.option("layout") in _CHANNELS_FIRST, "its layout is not NCHW")
    require(not call.option("target_shape"), "a target_shape; give adj and pad")
    attributes = {"output_padding": _per_axis(call, "adj", 0)} if transposed else {}
    return call.node(
        "ConvTranspose" if transposed else "Conv",
        *call.inputs,
        kernel_shape=call.options["kernel"],
        strides=_per_axis(call, "stride", 1),
        dilations=_per_axis(call, "dilate", 1),
        pads=_per_axis(call, "pad", 0) * 2,
        group=call.option("num_group", 1),
        **attributes,
    )


def _per_axis(call: OperatorCall, option: str, default: int) -> tuple[int, ...]:
    return tuple(call.option(option) or (default,) * len(call.options["kernel"]))


def _dense(call: OperatorCall) -> str:
    data, weight, *bias = call.inputs
    if call.rank > 2 and not call.option("flatten", True):
        product = call.step("MatMul", data, call.step("Transpose", weight, perm=(1, 0)))
        return call.node("Add", product, *bias) if bias else product
    if call.rank != 2:
        data = call.step("Flatten", data, axis=1)
    return call.node("Gemm", data, weight, *bias, transB=1)


def _batch_norm(call: OperatorCall) -> str:
    options = call.options
    require(options.get("axis", 1) == 1, f"its axis is {options.get('axis')}, not 1")
    data, gamma, *rest = call.inputs
    scale = np.ones(call.shapes[1]) if options["fix_gamma"] else gamma
    return call.node("BatchNormalization", data, scale, *rest, epsilon=float(options["eps"]))


def _layer_norm(call: OperatorCall) -> str:
    axis = call.option("axis", -1)
    require(axis in (-1, call.rank - 1), f"its axis is {axis}, not the last")
    return call.node("LayerNormalization", epsilon=float(call.option("eps", 1e-5)))


def _group_norm(call: OperatorCall) -> str:
    """Translate a GroupNorm; MXNet 1.9.1 has a scale for each group, as if it were a channel."""
    data, *parameters = call.inputs
    groups = call.step("Reshape", data, [0, call.option("num_groups", 1), -1])
    epsilon = float(call.option("eps", 1e-5))
    normalized = call.step("InstanceNormalization", groups, *parameters, epsilon=epsilon)
    return call.node("Reshape", normalized, call.step("Shape", data))


def _l2_normalization(call: OperatorCall) -> str:
    mode, data = call.option("mode", "instance"), call.inputs[0]
    axes = {"instance": range(1, call.rank), "channel": [1], "spatial": range(2, call.rank)}[mode]
    squares = call.step("ReduceSumSquare", data, axes=axes, keepdims=1)
    summed = call.step("Add", squares, float(call.option("eps", 1e-10)))
    return call.node("Div", data, call.step("Sqrt", summed))


_ACTIVATIONS = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh",
                "softrelu": "Softplus", "softsign": "Softsign"}  # fmt: skip


def _leaky_relu(call: OperatorCall) -> str:
    kind, data, slope = call.option("act_type", "leaky"), call.inputs[0], call.option("slope", 0.25)
    if kind == "prelu":
        values = call.values[1]
        require(values is not None, "its slope is computed")
        assert values is not None  # one slope per channel, the second axis
        return call.node("PRelu", data, values.reshape(-1, *(1,) * (call.rank - 2)))
    if kind == "gelu":
        share = call.step("Add", call.step("Erf", call.step("Div", data, sqrt(2))), 1.0)
        return call.node("Mul", call.step("Mul", data, 0.5), share)
    operators = {"leaky": "LeakyRelu", "elu": "Elu", "selu": "Selu"}
    require(kind in operators, f"act_type={kind!r}")
    attributes = {"alpha": float(slope)} if kind != "selu" else {}
    return call.node(operators[kind], **attributes)


def _pooling(call: OperatorCall) -> str:
    kind, sizes = call.option("pool_type", "max"), call.shapes[0][2:]
    require(kind in ("max", "avg"), f"pool_type={kind!r}")
    require(call.option("layout") in _CHANNELS_FIRST, "its layout is not NCHW")
    if call.option("global_pool", False):
        return call.node("GlobalMaxPool" if kind == "max" else "GlobalAveragePool")
    if call.option("pooling_convention", "valid") != "valid":
        sizes = tuple(call.size(axis) for axis in range(2, call.rank))
    kernel, stride = call.options["kernel"], _per_axis(call, "stride", 1)
    pad = _per_axis(call, "pad", 0)
    # MXNet's "full" convention rounds the number of windows up. Padding the end by the missing
    # part of the last window has the same effect, without ONNX's ceil_mode, on which runtimes
    # differ.
    lacks = [
        max(0, (windows - 1) * s + k - (size + 2 * p))
        for windows, size, k, s, p in zip(call.output_shape[2:], sizes, kernel, stride, pad)
    ]
    inside = all(p + lack < k for k, p, lack in zip(kernel, pad, lacks))
    require(inside, "pooling whose last window lies in the padding; use ceil_mode=False")
    attributes = {"kernel_shape": kernel, "strides": stride}
    attributes["pads"] = [*pad, *(p + lack for p, lack in zip(pad, lacks))]
    if kind == "max":
        return call.node("MaxPool", **attributes)
    counts_pad = call.option("count_include_pad", True)
    require(
        not (counts_pad and any(lacks)),
        "average pooling whose last window reaches beyond the padding; use "
        "count_include_pad=False, or ceil_mode=False",
    )
    return call.node("AveragePool", count_include_pad=int(counts_pad), **attributes)


def _adaptive_pooling(call: OperatorCall) -> str:
    """Translate an adaptive pooling: means over parts of rows and columns are two products."""
    if prod(call.output_shape[2:]) == 1:
        return call.node("GlobalAveragePool")
    rows, columns = (_means(call.size(axis), call.output_shape[axis]) for axis in (2, 3))
    return call.node("MatMul", call.step("MatMul", rows, call.inputs[0]), columns.T)


def _means(size: int, parts: int) -> npt.NDArray[np.float64]:
    """Return the matrix, (parts, size), of means over parts that overlap if they do not fit."""
    ends = [(part * size // parts, -(-(part + 1) * size // parts)) for part in range(parts)]
    inside = np.array([[begin <= place < end for place in range(size)] for begin, end in ends])
    return np.asarray(inside / inside.sum(axis=1, keepdims=True))


def _pad(call: OperatorCall) -> str:
    width, value = call.options["pad_width"], float(call.option("constant_value", 0))
    pads = [*width[::2], *width[1::2]]
    return call.node("Pad", *call.inputs, pads, value, mode=call.options["mode"])


def _product(call: OperatorCall, *, matrices: bool) -> str:
    """Write a product of the last axis of one operand and the last but one of the other."""
    left, right = call.shapes
    fits = bool(left and right) and (matrices or len(right) <= 2)
    require(fits, f"operands of {len(left)} and {len(right)} axes")
    operands = list(call.inputs)
    for place, shape in enumerate(call.shapes):
        if call.option(("transpose_a", "transpose_b")[place], False):
            require(len(shape) == 2 or matrices, f"a transposed operand of {len(shape)} axes")
            *axes, row, column = range(len(shape))
            operands[place] = call.step("Transpose", operands[place], perm=[*axes, column, row])
    if len(left) == len(right) == 1 and call.output_shape:  # MXNet's number has one axis
        return call.node("Reshape", call.step("MatMul", *operands), [1])
    return call.node("MatMul", *operands)


def _softmax(operator: str, call: OperatorCall) -> str:
    temperature, data = float(call.option("temperature", 1)), call.inputs[0]
    require(not call.option("use_length", False), "a length")
    if temperature != 1:
        data = call.step("Div", data, temperature)
    return call.node(operator, data, axis=call.option("axis", -1))


def _reduction(operator: str, call: OperatorCall) -> str:
    require(call.option("dtype") is None, f"dtype={call.option('dtype')}")
    sizes = call.output_shape, call.larger_shape
    if operator != "ReduceL2" and sizes == (call.shapes[0], call.larger_shapes[0]):
        return call.inputs[0]  # of no axes, or of axes with one element
    axes, keep = call.axes("axis", range(call.rank)), call.option("keepdims", False)
    if call.option("exclude", False) and call.option("axis") not in (None, ()):
        axes = [axis for axis in range(call.rank) if axis not in axes]
    attributes: dict[str, Any] = {"keepdims": int(keep), "axes": axes}
    # A ReduceSum alone takes the axes as an operand.
    more = [attributes.pop("axes")] if operator == "ReduceSum" else []
    result = call.step(operator, call.inputs[0], *more, **attributes)
    # MXNet's result of a reduction of all axes has one axis, and ONNX's none.
    everything = len(axes) == call.rank and not keep and call.output_shape == (1,)
    return call.node("Reshape", result, [1]) if everything else result


def _norm(call: OperatorCall) -> str:
    if call.option("ord", 2) == 2:
        return _reduction("ReduceL2", call)
    # OpenVINO's ReduceL1 is of all axes.
    return _reduction("ReduceSum", replace(call, inputs=[call.step("Abs", *call.inputs)]))


def _question(operator: str, call: OperatorCall) -> str:
    """Translate a question, whose answer is 1 or 0; of a connective also those that it takes."""
    connective = operator in ("And", "Or", "Xor", "Not")
    operands: list[Operand] = [call.truth(one) if connective else one for one in call.inputs]
    if "scalar" in call.options:
        operands.append(call.number("scalar"))
    answer = call.step("Equal" if operator == "NotEqual" else operator, *operands)
    return call.as_numbers(call.step("Not", answer) if operator == "NotEqual" else answer)


def _where(call: OperatorCall) -> str:
    condition, *choices = call.inputs
    if call.shapes[0] != call.output_shape:  # one for each row
        condition = call.step("Unsqueeze", condition, list(range(1, len(call.output_shape))))
    return call.node("Where", call.truth(condition), *choices)


def _quotient(operator: str, call: OperatorCall) -> str:
    """Translate a division or remainder, of integers if MXNet's arrays are."""
    if not call.integer:
        require(operator == "Div", "the remainder of numbers that are not integers")
        return call.node(operator)
    return call.as_numbers(call.step(operator, *map(call.cut, call.inputs)))


def _same(operator: str) -> Translation:
    return lambda call: call.node(operator)


def _with_number(operator: str, call: OperatorCall, *, reverse: bool = False) -> str:
    operands: list[Operand] = [call.inputs[0], call.number("scalar")]
    return call.node(operator, *(operands[::-1] if reverse else operands))


_REDUCTIONS = {"mean": "ReduceMean", "sum": "ReduceSum", "max": "ReduceMax", "min": "ReduceMin"}
_QUESTIONS = {
    "equal": "Equal", "not_equal": "NotEqual", "greater": "Greater",
    "greater_equal": "GreaterOrEqual", "lesser": "Less", "lesser_equal": "LessOrEqual",
}  # fmt: skip

_IN_NUMPY: dict[str, Translation] = {
    **{name: _same(operator) for name, operator in (
        ("_npi_add", "Add"), ("_npi_subtract", "Sub"), ("_npi_multiply", "Mul"),
        ("_npi_true_divide", "Div"), ("_npi_power", "Pow"), ("_npi_absolute", "Abs"),
        ("_npi_negative", "Neg"), ("_npi_exp", "Exp"), ("_npi_log", "Log"), ("_npi_sqrt", "Sqrt"),
        ("_npi_reciprocal", "Reciprocal"), ("_npi_tanh", "Tanh"), ("_npx_relu", "Relu"),
        ("_npx_sigmoid", "Sigmoid"))},
    **{f"_npi_{name}_scalar": partial(_with_number, operator, reverse=name[0] == "r")
       for name, operator in (
        ("add", "Add"), ("subtract", "Sub"), ("rsubtract", "Sub"), ("multiply", "Mul"),
        ("true_divide", "Div"), ("rtrue_divide", "Div"), ("power", "Pow"))},
    "_npi_square": lambda call: call.node("Mul", *call.inputs * 2),
    **{f"_np{'i' * (name == 'mean')}_{name}": partial(_reduction, operator)
       for name, operator in _REDUCTIONS.items()},
    "_np_dot": partial(_product, matrices=False), "_npi_matmul": partial(_product, matrices=True),
}  # fmt: skip
"""Operators of MXNet's NumPy interface."""

TRANSLATIONS: MappingProxyType[str, Translation] = MappingProxyType({
    **{name: _same(operator) for name, operator in operators_with("onnx").items()},
    "Convolution": _convolution, "Deconvolution": partial(_convolution, transposed=True),
    "FullyConnected": _dense,
    "RNN": recurrent,
    "BatchNorm": _batch_norm, "LayerNorm": _layer_norm,
    "InstanceNorm": lambda call: call.node(
        "InstanceNormalization", epsilon=float(call.option("eps", 1e-3))),
    "GroupNorm": _group_norm, "L2Normalization": _l2_normalization,
    "Activation": lambda call: call.node(_ACTIVATIONS[call.options["act_type"]]),
    "LeakyReLU": _leaky_relu,
    "Pooling": _pooling, "_contrib_AdaptiveAvgPooling2D": _adaptive_pooling,
    "clip": lambda call: call.node(
        "Clip", *call.inputs, *map(call.number, ("a_min", "a_max"))),
    "Pad": _pad, "where": _where,
    "softmax": partial(_softmax, "Softmax"), "log_softmax": partial(_softmax, "LogSoftmax"),
    **{name: partial(_reduction, operator) for name, operator in _REDUCTIONS.items()},
    "prod": partial(_reduction, "ReduceProd"),
    "norm": _norm,
    "square": lambda call: call.node("Mul", *call.inputs * 2),
    "log2": lambda call: call.node("Mul", call.step("Log", *call.inputs), 1 / log(2)),
    "rsqrt": lambda call: call.node("Reciprocal", call.step("Sqrt", *call.inputs)),
    "dot": partial(_product, matrices=False), "batch_dot": partial(_product, matrices=True),
    **dict.fromkeys(("elemwise_div", "broadcast_div"), partial(_quotient, "Div")),
    "broadcast_mod": partial(_quotient, "Mod"),
    **{f"_{name}_scalar": partial(_with_number, operator, reverse=name[0] == "r")
       for name, operator in (
        ("plus", "Add"), ("minus", "Sub"), ("rminus", "Sub"), ("mul", "Mul"), ("div", "Div"),
        ("rdiv", "Div"), ("power", "Pow"), ("rpower", "Pow"), ("maximum", "Max"),
        ("minimum", "Min"))},
    **{name.format(question): partial(_question, operator) for question, operator in
       _QUESTIONS.items() for name in ("broadcast_{}", "_{}", "_{}_scalar")},
    **{name: partial(_question, name.rpartition("_")[2].capitalize()) for name in
       ("broadcast_logical_and", "broadcast_logical_or", "broadcast_logical_xor", "logical_not")},
    **SHAPES, **DETECTION, **_IN_NUMPY,
})  # fmt: skip

# Words in the names of operators whose results are integers if their operands are.
_WHOLE = re.compile(
    "_(a[bd][a-z]*|ceil|clip|equal|floor|greater|lesser|logical|max(imum)?|min(imum|us)?|mul(tiply)?|"
    "negative|plus|prod|relu|r?minus|r?sub(tract)?|sign|square|sum|where)_"
)
_MOVES = {*SHAPES, "where"} - {"_np_cumsum", "argsort", "one_hot", "topk"}
_OF_INTEGERS = {
    *SHAPES, "elemwise_div", "broadcast_div", "broadcast_mod",
    *(name for name in TRANSLATIONS if _WHOLE.search(f"_{name}_")),
}  # fmt: skip


def translate(operator: str, call: OperatorCall) -> Union[str, Sequence[str]]:
    """Add the nodes of an operator, and return the name of its result, or of each.

    MXNet's integers are FP32 numbers in the file: an operator is refused that cuts off their
    fractions in MXNet, or wraps them to 8 bits.
    """
    narrow = call.in_mxnet[0] == "bool" or not {"int8", "uint8"}.isdisjoint(call.in_mxnet)
    possible = _MOVES if narrow else _OF_INTEGERS if call.integer else TRANSLATIONS
    formats = " and ".join(sorted({*call.in_mxnet} - {"float32"}))
    require(operator in possible, f"it computes in {formats}; cast its operands to float32 first")
    return TRANSLATIONS[operator](call)
