"""MXNet's operators in ONNX: one short function for each.

A function is given an operator's operands, already in the format that it computes in, and adds the
ONNX nodes that do the same. Which format that is, is decided in
:mod:`mpgluon.deployment.onnx_writer`. What ONNX cannot express exactly is refused.

References
----------
The ONNX operator specification, opset 17.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Callable, Optional, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["TRANSLATIONS", "Call", "Nodes", "UnsupportedError"]


class UnsupportedError(Exception):
    """ONNX, or this translation, has no equal for one use of an operator; says why."""


class Nodes(Protocol):
    """Where translations put what they make."""

    def add(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""

    def constant(self, name: str, values: Any, dtype: str) -> str:
        """Add a constant and return its name."""


@dataclass(frozen=True)
class Call:
    """One operator and its operands.

    Attributes
    ----------
    name : str
        Of the output.
    options : dict
        The operator's, as Python values.
    inputs : list of str
        Names of the operands in ONNX.
    shapes : list of tuple of int
        Of the operands; the first axis of data is the batch, whose size is not to be relied on.
    output_shape : tuple of int
    values : list of ndarray or None
        Of those operands that are parameters.
    dtype : str
        What the operands are in: ``"float32"`` or ``"float16"``.
    """

    name: str
    options: dict[str, Any]
    inputs: list[str]
    shapes: list[tuple[int, ...]]
    output_shape: tuple[int, ...]
    values: list[Optional[npt.NDArray[np.float32]]]
    dtype: str


Translation = Callable[[Nodes, Call], str]


def _refuse(unless: bool, why: str) -> None:
    if not unless:
        raise UnsupportedError(why)


def _convolution(nodes: Nodes, call: Call) -> str:
    options = call.options
    _refuse(options.get("layout") in (None, "NCW", "NCHW", "NCDHW"), "its layout is not NCHW")
    axes = len(options["kernel"])
    pad = _per_axis(options.get("pad"), axes, 0)
    return nodes.add(
        "Conv",
        call.inputs,
        call.name,
        kernel_shape=options["kernel"],
        strides=_per_axis(options.get("stride"), axes, 1),
        dilations=_per_axis(options.get("dilate"), axes, 1),
        pads=[*pad, *pad],
        group=options.get("num_group", 1),
    )


def _per_axis(sizes: Optional[tuple[int, ...]], axes: int, default: int) -> tuple[int, ...]:
    return tuple(sizes) if sizes else (default,) * axes


def _dense(nodes: Nodes, call: Call) -> str:
    data, *parameters = call.inputs
    if len(call.shapes[0]) != 2:
        _refuse(call.options.get("flatten", True), "flatten=False with more than two axes")
        data = nodes.add("Flatten", [data], f"{call.name}_flat", axis=1)
    return nodes.add("Gemm", [data, *parameters], call.name, transB=1)


def _batch_norm(nodes: Nodes, call: Call) -> str:
    options = call.options
    _refuse(options.get("axis", 1) == 1, f"its axis is {options.get('axis')}, not 1")
    data, gamma, *rest = call.inputs
    if options["fix_gamma"]:
        gamma = nodes.constant(f"{call.name}_ones", np.ones(call.shapes[1]), call.dtype)
    return nodes.add(
        "BatchNormalization", [data, gamma, *rest], call.name, epsilon=float(options["eps"])
    )


_ACTIVATIONS = {
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "softrelu": "Softplus",
    "softsign": "Softsign",
}


def _activation(nodes: Nodes, call: Call) -> str:
    return nodes.add(_ACTIVATIONS[call.options["act_type"]], call.inputs, call.name)


def _leaky_relu(nodes: Nodes, call: Call) -> str:
    kind = call.options.get("act_type", "leaky")
    _refuse(kind in ("leaky", "elu", "prelu"), f"act_type={kind!r}")
    if kind == "prelu":
        values = call.values[1]
        _refuse(values is not None, "its slope is computed")
        assert values is not None
        trailing = (1,) * (len(call.shapes[0]) - 2)  # one slope per channel, the second axis
        slope = nodes.constant(f"{call.name}_slope", values.reshape(-1, *trailing), call.dtype)
        return nodes.add("PRelu", [call.inputs[0], slope], call.name)
    operator = "LeakyRelu" if kind == "leaky" else "Elu"
    return nodes.add(operator, call.inputs, call.name, alpha=float(call.options.get("slope", 0.25)))


def _pooling(nodes: Nodes, call: Call) -> str:
    options = call.options
    kind = options.get("pool_type", "max")
    _refuse(kind in ("max", "avg"), f"pool_type={kind!r}")
    _refuse(options.get("layout") in (None, "NCW", "NCHW", "NCDHW"), "its layout is not NCHW")
    if options.get("global_pool", False):
        operator = "GlobalMaxPool" if kind == "max" else "GlobalAveragePool"
        return nodes.add(operator, call.inputs, call.name)
    kernel = options["kernel"]
    stride = _per_axis(options.get("stride"), len(kernel), 1)
    pad = _per_axis(options.get("pad"), len(kernel), 0)
    # MXNet's "full" convention rounds the number of windows up. Padding at the end by what the
    # last window lacks says so without ONNX's ceil_mode, which runtimes understand differently.
    lacks = [
        max(0, (windows - 1) * s + k - (size + 2 * p))
        for windows, size, k, s, p in zip(
            call.output_shape[2:], call.shapes[0][2:], kernel, stride, pad
        )
    ]
    attributes = {"kernel_shape": kernel, "strides": stride}
    attributes["pads"] = [*pad, *(p + lack for p, lack in zip(pad, lacks))]
    if kind == "max":
        return nodes.add("MaxPool", call.inputs, call.name, **attributes)
    counts_pad = options.get("count_include_pad", True)
    _refuse(
        not (counts_pad and any(lacks)),
        "average pooling whose last window reaches beyond the padding; use "
        "count_include_pad=False, or ceil_mode=False",
    )
    return nodes.add(
        "AveragePool", call.inputs, call.name, count_include_pad=int(counts_pad), **attributes
    )


def _adaptive_pooling(nodes: Nodes, call: Call) -> str:
    size = call.output_shape[2:]
    _refuse(prod(size) == 1, f"its output has {size} pixels, not one")
    return nodes.add("GlobalAveragePool", call.inputs, call.name)


def _clip(nodes: Nodes, call: Call) -> str:
    bounds = [
        nodes.constant(f"{call.name}_{key}", float(call.options[key]), call.dtype)
        for key in ("a_min", "a_max")
    ]
    return nodes.add("Clip", [*call.inputs, *bounds], call.name)


def _concat(nodes: Nodes, call: Call) -> str:
    return nodes.add("Concat", call.inputs, call.name, axis=call.options.get("dim", 1))


def _flatten(nodes: Nodes, call: Call) -> str:
    return nodes.add("Flatten", call.inputs, call.name, axis=1)


def _reshape(nodes: Nodes, call: Call) -> str:
    shape = call.options["shape"]
    understood = all(size >= -1 for size in shape) and not call.options.get("reverse", False)
    _refuse(understood, f"shape={shape}: ONNX knows 0 and -1 only")
    _refuse(shape[0] in (0, -1), f"shape={shape} fixes the size of the batch; begin with 0 or -1")
    wanted = nodes.constant(f"{call.name}_shape", np.array(shape), "int64")
    return nodes.add("Reshape", [*call.inputs, wanted], call.name)


def _transpose(nodes: Nodes, call: Call) -> str:
    axes = call.options.get("axes") or tuple(reversed(range(len(call.shapes[0]))))
    return nodes.add("Transpose", call.inputs, call.name, perm=axes)


def _softmax(operator: str) -> Translation:
    def translation(nodes: Nodes, call: Call) -> str:
        options = call.options
        plain = options.get("temperature") in (None, 1.0) and not options.get("use_length", False)
        _refuse(plain, "a temperature or a length")
        return nodes.add(operator, call.inputs, call.name, axis=options.get("axis", -1))

    return translation


def _mean(nodes: Nodes, call: Call) -> str:
    options = call.options
    axis = options.get("axis")
    axes = (axis,) if isinstance(axis, int) else axis
    _refuse(bool(axes) and not options.get("exclude", False), "it names no axes")
    keep = int(options.get("keepdims", False))
    return nodes.add("ReduceMean", call.inputs, call.name, axes=axes, keepdims=keep)


def _same(operator: str) -> Translation:
    def translation(nodes: Nodes, call: Call) -> str:
        return nodes.add(operator, call.inputs, call.name)

    return translation


def _with_number(operator: str, *, reverse: bool = False) -> Translation:
    def translation(nodes: Nodes, call: Call) -> str:
        number = nodes.constant(f"{call.name}_scalar", float(call.options["scalar"]), call.dtype)
        operands = [*call.inputs, number]
        return nodes.add(operator, operands[::-1] if reverse else operands, call.name)

    return translation


_ARITHMETIC = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}

TRANSLATIONS: MappingProxyType[str, Translation] = MappingProxyType(
    {
        "Convolution": _convolution,
        "FullyConnected": _dense,
        "BatchNorm": _batch_norm,
        "Activation": _activation,
        "LeakyReLU": _leaky_relu,
        "relu": _same("Relu"),
        "sigmoid": _same("Sigmoid"),
        "tanh": _same("Tanh"),
        "Pooling": _pooling,
        "_contrib_AdaptiveAvgPooling2D": _adaptive_pooling,
        "clip": _clip,
        "Concat": _concat,
        "Flatten": _flatten,
        "Reshape": _reshape,
        "transpose": _transpose,
        "softmax": _softmax("Softmax"),
        "log_softmax": _softmax("LogSoftmax"),
        "mean": _mean,
        **{f"elemwise_{name}": _same(operator) for name, operator in _ARITHMETIC.items()},
        **{f"broadcast_{name}": _same(operator) for name, operator in _ARITHMETIC.items()},
        "add_n": _same("Sum"),
        "_plus_scalar": _with_number("Add"),
        "_minus_scalar": _with_number("Sub"),
        "_rminus_scalar": _with_number("Sub", reverse=True),
        "_mul_scalar": _with_number("Mul"),
        "_div_scalar": _with_number("Div"),
        "_rdiv_scalar": _with_number("Div", reverse=True),
    }
)
