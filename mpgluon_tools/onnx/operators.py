"""MXNet's operators in ONNX: one short function for each.

A function receives an operator's operands, already in the format that it computes in, and adds the
ONNX nodes that do the same. The format is chosen in :mod:`mpgluon_tools.onnx.writer`. An
operator or option that ONNX cannot express exactly is refused.

References
----------
The ONNX operator specification, opset 17.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Callable, Optional

from mpgluon.graph.operators import operators_with

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

__all__ = ["TRANSLATIONS", "Nodes", "OperatorCall", "UnsupportedError"]


class UnsupportedError(Exception):
    """ONNX, or this translation, has no equal for one use of an operator; says why."""


class Nodes:
    """The nodes and constants of an ONNX model, as they are added."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def add(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Add a node with one output, and return its name."""
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def constant(self, name: str, values: Any, dtype: str) -> str:
        """Add a constant, rounded to ``dtype``, and return its name."""
        self.constants[name] = numpy_helper.from_array(np.asarray(values).astype(dtype), name)
        return name


@dataclass(frozen=True)
class OperatorCall:
    """One operator with its operands, and the model that its nodes are added to."""

    model: Nodes
    name: str  # of the output
    options: dict[str, Any]  # as Python values
    inputs: list[str]  # names of the operands in ONNX
    shapes: list[tuple[int, ...]]  # of the operands; data begins with the batch, of any size
    output_shape: tuple[int, ...]
    larger_shape: tuple[int, ...]  # of the output for a larger batch
    values: list[Optional[npt.NDArray[np.float32]]]  # of the operands that are parameters
    dtype: str  # of the operands: "float32" or "float16"

    def node(self, operator: str, inputs: Optional[list[str]] = None, **attributes: Any) -> str:
        """Add the node of the result, by default of all operands, and return its name."""
        operands = self.inputs if inputs is None else inputs
        return self.model.add(operator, operands, self.name, **attributes)

    def constant(self, suffix: str, values: Any, dtype: Optional[str] = None) -> str:
        """Add a constant in the operator's format, and return its name."""
        return self.model.constant(f"{self.name}_{suffix}", values, dtype or self.dtype)


Translation = Callable[[OperatorCall], str]


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UnsupportedError(otherwise)


def _convolution(call: OperatorCall) -> str:
    options = call.options
    _require(options.get("layout") in (None, "NCW", "NCHW", "NCDHW"), "its layout is not NCHW")
    axes = len(options["kernel"])
    pad = _per_axis(options.get("pad"), axes, 0)
    return call.node(
        "Conv",
        kernel_shape=options["kernel"],
        strides=_per_axis(options.get("stride"), axes, 1),
        dilations=_per_axis(options.get("dilate"), axes, 1),
        pads=[*pad, *pad],
        group=options.get("num_group", 1),
    )


def _per_axis(sizes: Optional[tuple[int, ...]], axes: int, default: int) -> tuple[int, ...]:
    return tuple(sizes) if sizes else (default,) * axes


def _dense(call: OperatorCall) -> str:
    data, *parameters = call.inputs
    if len(call.shapes[0]) != 2:
        _require(call.options.get("flatten", True), "flatten=False with more than two axes")
        data = call.model.add("Flatten", [data], f"{call.name}_flat", axis=1)
    return call.node("Gemm", [data, *parameters], transB=1)


def _batch_norm(call: OperatorCall) -> str:
    options = call.options
    _require(options.get("axis", 1) == 1, f"its axis is {options.get('axis')}, not 1")
    data, gamma, *rest = call.inputs
    if options["fix_gamma"]:
        gamma = call.constant("ones", np.ones(call.shapes[1]))
    return call.node("BatchNormalization", [data, gamma, *rest], epsilon=float(options["eps"]))


def _layer_norm(call: OperatorCall) -> str:
    axis = call.options.get("axis", -1)
    _require(axis in (-1, len(call.shapes[0]) - 1), f"its axis is {axis}, not the last")
    return call.node("LayerNormalization", epsilon=float(call.options.get("eps", 1e-5)))


_ACTIVATIONS = {
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "softrelu": "Softplus",
    "softsign": "Softsign",
}


def _leaky_relu(call: OperatorCall) -> str:
    kind = call.options.get("act_type", "leaky")
    _require(kind in ("leaky", "elu", "prelu"), f"act_type={kind!r}")
    if kind == "prelu":
        values = call.values[1]
        _require(values is not None, "its slope is computed")
        assert values is not None
        trailing = (1,) * (len(call.shapes[0]) - 2)  # one slope per channel, the second axis
        slope = call.constant("slope", values.reshape(-1, *trailing))
        return call.node("PRelu", [call.inputs[0], slope])
    operator = "LeakyRelu" if kind == "leaky" else "Elu"
    return call.node(operator, alpha=float(call.options.get("slope", 0.25)))


def _pooling(call: OperatorCall) -> str:
    options = call.options
    kind = options.get("pool_type", "max")
    _require(kind in ("max", "avg"), f"pool_type={kind!r}")
    _require(options.get("layout") in (None, "NCW", "NCHW", "NCDHW"), "its layout is not NCHW")
    if options.get("global_pool", False):
        return call.node("GlobalMaxPool" if kind == "max" else "GlobalAveragePool")
    kernel = options["kernel"]
    stride = _per_axis(options.get("stride"), len(kernel), 1)
    pad = _per_axis(options.get("pad"), len(kernel), 0)
    # MXNet's "full" convention rounds the number of windows up. Padding the end by the missing
    # part of the last window has the same effect, without ONNX's ceil_mode, on which runtimes
    # differ.
    lacks = [
        max(0, (windows - 1) * s + k - (size + 2 * p))
        for windows, size, k, s, p in zip(
            call.output_shape[2:], call.shapes[0][2:], kernel, stride, pad
        )
    ]
    inside = all(p + lack < k for k, p, lack in zip(kernel, pad, lacks))
    _require(inside, "pooling whose last window lies in the padding; use ceil_mode=False")
    attributes = {"kernel_shape": kernel, "strides": stride}
    attributes["pads"] = [*pad, *(p + lack for p, lack in zip(pad, lacks))]
    if kind == "max":
        return call.node("MaxPool", **attributes)
    counts_pad = options.get("count_include_pad", True)
    _require(
        not (counts_pad and any(lacks)),
        "average pooling whose last window reaches beyond the padding; use "
        "count_include_pad=False, or ceil_mode=False",
    )
    return call.node("AveragePool", count_include_pad=int(counts_pad), **attributes)


def _adaptive_pooling(call: OperatorCall) -> str:
    size = call.output_shape[2:]
    _require(prod(size) == 1, f"its output has {size} pixels, not one")
    return call.node("GlobalAveragePool")


def _clip(call: OperatorCall) -> str:
    bounds = [call.constant(key, float(call.options[key])) for key in ("a_min", "a_max")]
    return call.node("Clip", [*call.inputs, *bounds])


def _pad(call: OperatorCall) -> str:
    width, value = call.options["pad_width"], float(call.options.get("constant_value", 0))
    pads = call.constant("pads", np.array([*width[::2], *width[1::2]]), "int64")
    operands = [*call.inputs, pads, call.constant("value", value)]
    return call.node("Pad", operands, mode=call.options["mode"])


def _reshape(call: OperatorCall) -> str:
    shape = call.options["shape"]
    understood = all(size >= -1 for size in shape) and not call.options.get("reverse", False)
    _require(understood, f"shape={shape}: ONNX knows 0 and -1 only")
    _require(shape[0] in (0, -1), f"shape={shape} fixes the size of the batch; begin with 0 or -1")
    target = call.constant("shape", np.array(shape), "int64")
    return call.node("Reshape", [*call.inputs, target])


def _reshape_in_numpy(call: OperatorCall) -> str:
    """Write a shape whose size that depends on the batch is open; MXNet has inferred the others."""
    shape, order = call.options["newshape"], call.options.get("order", "C")
    sizes = shape if isinstance(shape, tuple) else (shape,)
    keeps_batch = sizes[0] in (-2, -4) and call.output_shape[:1] == call.shapes[0][:1]
    _require(order == "C", f"order={order!r}")
    _require(
        keeps_batch or sizes[0] in (-1, -5),
        f"newshape={shape} fixes or removes the size of the batch; begin with -1, in npx with -2",
    )
    pairs = enumerate(zip(call.output_shape, call.larger_shape))
    varying = [axis for axis, (size, larger) in pairs if size != larger]
    _require(len(varying) < 2, f"newshape={shape} has two sizes that depend on the batch")
    target = np.array(call.output_shape)
    open_axis = varying[0] if varying else 0
    target[open_axis] = 0 if keeps_batch and open_axis == 0 else -1
    return call.node("Reshape", [*call.inputs, call.constant("shape", target, "int64")])


def _product(call: OperatorCall, *, matrices: bool) -> str:
    """Write a product of the last axis of one operand and the last but one of the other."""
    transposed = call.options.get("transpose_a", False) or call.options.get("transpose_b", False)
    left, right = call.shapes
    _require(not transposed, "a transposed operand")
    fits = bool(left and right) and (matrices or len(right) <= 2)
    _require(fits, f"operands of {len(left)} and {len(right)} axes")
    return call.node("MatMul")


def _transpose(call: OperatorCall) -> str:
    axes = call.options.get("axes") or tuple(reversed(range(len(call.shapes[0]))))
    return call.node("Transpose", perm=axes)


def _softmax(operator: str, call: OperatorCall) -> str:
    options = call.options
    plain = options.get("temperature") in (None, 1.0) and not options.get("use_length", False)
    _require(plain, "a temperature or a length")
    return call.node(operator, axis=options.get("axis", -1))


def _reduction(operator: str, call: OperatorCall) -> str:
    options = call.options
    axis = options.get("axis")
    axes = (axis,) if isinstance(axis, int) else axis
    _require(bool(axes) and not options.get("exclude", False), "it names no axes")
    _require(options.get("dtype") is None, f"dtype={options.get('dtype')}")
    keep = int(options.get("keepdims", False))
    # MXNet's result of such a reduction has one axis, and ONNX's none.
    whole = len(axes or ()) == len(call.shapes[0]) and not keep and call.output_shape == (1,)
    _require(not whole, "it reduces every axis, the batch too")
    if operator != "ReduceSum":  # which alone takes them as an operand
        return call.node(operator, axes=axes, keepdims=keep)
    operands = [*call.inputs, call.constant("axes", np.array(axes), "int64")]
    return call.node(operator, operands, keepdims=keep)


def _concat(option: str, default: int, call: OperatorCall) -> str:
    axis = call.options.get(option, default)
    _require(isinstance(axis, int), f"{option}={axis}")
    return call.node("Concat", axis=axis)


def _same(operator: str) -> Translation:
    return lambda call: call.node(operator)


def _with_number(operator: str, call: OperatorCall, *, reverse: bool = False) -> str:
    operands = [*call.inputs, call.constant("scalar", float(call.options["scalar"]))]
    return call.node(operator, operands[::-1] if reverse else operands)


_IN_NUMPY: dict[str, Translation] = {
    **{
        f"_np{interface}_{name}": _same(operator)
        for interface, name, operator in (
            *(("i", "add", "Add"), ("i", "subtract", "Sub"), ("i", "multiply", "Mul")),
            *(("i", "true_divide", "Div"), ("i", "power", "Pow"), ("i", "absolute", "Abs")),
            *(("i", "negative", "Neg"), ("i", "exp", "Exp"), ("i", "log", "Log")),
            *(("i", "sqrt", "Sqrt"), ("i", "reciprocal", "Reciprocal"), ("i", "tanh", "Tanh")),
            *(("x", "relu", "Relu"), ("x", "sigmoid", "Sigmoid")),
        )
    },
    **{
        f"_npi_{name}_scalar": partial(_with_number, operator, reverse=name[0] == "r")
        for name, operator in (
            *(("add", "Add"), ("subtract", "Sub"), ("rsubtract", "Sub"), ("multiply", "Mul")),
            *(("true_divide", "Div"), ("rtrue_divide", "Div"), ("power", "Pow")),
        )
    },
    "_npi_square": lambda call: call.node("Mul", call.inputs * 2),
    "_npi_mean": partial(_reduction, "ReduceMean"),
    "_np_sum": partial(_reduction, "ReduceSum"),
    "_np_max": partial(_reduction, "ReduceMax"),
    "_np_min": partial(_reduction, "ReduceMin"),
    "_np_reshape": _reshape_in_numpy,
    "_npx_reshape": _reshape_in_numpy,
    "_np_transpose": _transpose,
    "_npi_concatenate": partial(_concat, "axis", 0),
    "_np_dot": partial(_product, matrices=False),
    "_npi_matmul": partial(_product, matrices=True),
}
"""Operators of MXNet's NumPy interface."""

TRANSLATIONS: MappingProxyType[str, Translation] = MappingProxyType(
    {
        **{name: _same(operator) for name, operator in operators_with("onnx").items()},
        "Convolution": _convolution,
        "FullyConnected": _dense,
        "BatchNorm": _batch_norm,
        "LayerNorm": _layer_norm,
        "Activation": lambda call: call.node(_ACTIVATIONS[call.options["act_type"]]),
        "LeakyReLU": _leaky_relu,
        "Pooling": _pooling,
        "_contrib_AdaptiveAvgPooling2D": _adaptive_pooling,
        "clip": _clip,
        "Pad": _pad,
        "Concat": partial(_concat, "dim", 1),
        "Flatten": lambda call: call.node("Flatten", axis=1),
        "Reshape": _reshape,
        "transpose": _transpose,
        "softmax": partial(_softmax, "Softmax"),
        "log_softmax": partial(_softmax, "LogSoftmax"),
        "mean": partial(_reduction, "ReduceMean"),
        "sum": partial(_reduction, "ReduceSum"),
        "max": partial(_reduction, "ReduceMax"),
        "min": partial(_reduction, "ReduceMin"),
        "square": lambda call: call.node("Mul", call.inputs * 2),
        "dot": partial(_product, matrices=False),
        "_plus_scalar": partial(_with_number, "Add"),
        "_minus_scalar": partial(_with_number, "Sub"),
        "_rminus_scalar": partial(_with_number, "Sub", reverse=True),
        "_mul_scalar": partial(_with_number, "Mul"),
        "_div_scalar": partial(_with_number, "Div"),
        "_rdiv_scalar": partial(_with_number, "Div", reverse=True),
        "_power_scalar": partial(_with_number, "Pow"),
        "_maximum_scalar": partial(_with_number, "Max"),
        "_minimum_scalar": partial(_with_number, "Min"),
        **_IN_NUMPY,
    }
)
