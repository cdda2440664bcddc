"""MXNet's operators in PyTorch: one short function for each.

A function receives an operator and the names of its operands in ``forward``, and returns an
expression. A layer with parameters is defined on the way. Wherever the two libraries mean different
things by one name, the function says so. An operator or option without an equal is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Optional

from mpgluon_tools.leaving.mxnet_files import Node

import numpy as np

__all__ = ["TRANSLATIONS", "Call", "Layer", "UnsupportedError"]


class UnsupportedError(ValueError):
    """PyTorch, or this translation, has no equal for one use of an operator; says why."""


@dataclass
class Layer:
    """A module of ``torch.nn`` with its parameters.

    Attributes
    ----------
    definition : str
        Such as ``"nn.Linear(512, 10)"``.
    state : dict of str to ndarray
        Parameters and buffers by their names in the module.
    """

    definition: str
    state: dict[str, Any] = field(default_factory=dict)


@dataclass
class Call:
    """One operator with its operands.

    Attributes
    ----------
    node : Node
    operands : sequence of str
        Expressions; of a parameter that no layer takes, ``self.`` and its name.
    values : sequence of ndarray or None
        The values of the operands that are parameters.
    shapes : sequence of tuple or None
        Shapes of the operands, where they are known.
    rank : int or None
        The axes of the first operand, where they are known.
    layer : Layer or None
        Set by the translation.
    """

    node: Node
    operands: Sequence[str]
    values: Sequence[Optional[Any]]
    shapes: Sequence[Optional[tuple[int, ...]]]
    rank: Optional[int] = None
    layer: Optional[Layer] = None

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option of the operator as a Python value."""
        return self.node.value(name, default)

    def parameter(self, place: int) -> Any:
        """Return the value of an operand that must be a parameter."""
        if place >= len(self.values) or self.values[place] is None:
            raise UnsupportedError("an operand that must be a parameter is computed")
        return self.values[place]

    def module(self, kind: str, *arguments: Any, state: Mapping[str, Any], **options: Any) -> str:
        """Define a layer that is called with the first operand."""
        words = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
        self.layer = Layer(f"nn.{kind}({', '.join(words)})", dict(state))
        return f"self.LAYER({self.operands[0]})"


Translation = Callable[[Call], str]


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UnsupportedError(otherwise)


def _one_or_all(sizes: Sequence[int]) -> Any:
    return sizes[0] if len(set(sizes)) == 1 else tuple(sizes)


def _windows(call: Call, axes: int, *names: str) -> dict[str, Any]:
    """Return stride, padding and dilation, without those that PyTorch assumes."""
    found = {}
    for name, theirs, default in (
        ("stride", "stride", 1), ("pad", "padding", 0), ("dilate", "dilation", 1),
    ):  # fmt: skip
        sizes = call.option(name) or (default,) * axes
        if name in names and set(sizes) != {default}:
            found[theirs] = _one_or_all(sizes)
    return found


def _convolution(call: Call, *, transposed: bool = False) -> str:
    kernel = call.option("kernel")
    axes = len(kernel)
    _require(call.option("layout") in (None, "None", "NCW", "NCHW", "NCDHW"), "its layout")
    weight, groups = call.parameter(1), int(call.option("num_group", 1))
    has_bias = not call.option("no_bias", transposed)
    channels = (weight.shape[0], weight.shape[1] * groups)
    options = _windows(call, axes, "stride", "pad", "dilate")
    if transposed:
        _require(not call.option("target_shape"), "a target_shape; give adj and pad")
        adj = call.option("adj") or (0,) * axes
        if any(adj):
            options["output_padding"] = _one_or_all(adj)
    else:
        channels = channels[::-1]
    if groups > 1:
        options["groups"] = groups
    if not has_bias:
        options["bias"] = False
    state = {"weight": weight, **({"bias": call.parameter(2)} if has_bias else {})}
    kind = f"Conv{'Transpose' if transposed else ''}{axes}d"
    return call.module(kind, *channels, _one_or_all(kernel), state=state, **options)


def _dense(call: Call) -> str:
    weight, has_bias = call.parameter(1), not call.option("no_bias", False)
    state = {"weight": weight, **({"bias": call.parameter(2)} if has_bias else {})}
    options = {} if has_bias else {"bias": False}
    if call.option("flatten", True) and call.rank != 2:
        call.operands = [f"torch.flatten({call.operands[0]}, 1)"]
    return call.module("Linear", weight.shape[1], weight.shape[0], state=state, **options)


def _batch_norm(call: Call) -> str:
    """Translate a BatchNorm.

    MXNet's momentum is the share of the old statistics, PyTorch's of the new ones; ``fix_gamma``
    means a scale of 1, whatever the parameter holds; MXNet's own default of epsilon is 0.001.
    """
    _require(call.option("axis", 1) == 1, f"its axis is {call.option('axis')}, not 1")
    gamma = call.parameter(1)
    if call.option("fix_gamma", True):
        gamma = np.ones_like(gamma)
    names = ("bias", "running_mean", "running_var")
    state = {"weight": gamma, **{name: call.parameter(2 + i) for i, name in enumerate(names)}}
    state["num_batches_tracked"] = np.zeros((), np.int64)
    _require(call.rank in (2, 3, 4, 5), f"its operand has {call.rank or 'unknown'} axes")
    kind = f"BatchNorm{max(1, (call.rank or 0) - 2)}d"
    momentum = round(1 - float(call.option("momentum", 0.9)), 10)
    options = {"eps": float(call.option("eps", 1e-3)), "momentum": momentum}
    defaults = {"eps": 1e-5, "momentum": 0.1}
    options = {name: value for name, value in options.items() if value != defaults[name]}
    text = call.module(kind, len(gamma), state=state, **options)
    if not call.option("use_global_stats", False):
        return text
    assert call.layer is not None
    call.layer.definition = f"Frozen({call.layer.definition})"
    call.layer.state = {f"norm.{name}": value for name, value in state.items()}
    return text


def _layer_norm(call: Call) -> str:
    axis = call.option("axis", -1)
    _require(axis in (-1, (call.rank or 0) - 1), f"its axis is {axis}, not the last")
    state = {"weight": call.parameter(1), "bias": call.parameter(2)}
    eps = float(call.option("eps", 1e-5))
    return call.module("LayerNorm", len(state["weight"]), state=state,
                       **({} if eps == 1e-5 else {"eps": eps}))  # fmt: skip


def _group_norm(call: Call) -> str:
    """Translate a GroupNorm; MXNet 1.9.1 has a scale for each group where PyTorch has channels."""
    groups, weight, bias = int(call.option("num_groups", 1)), call.parameter(1), call.parameter(2)
    _require(call.shapes[0] is not None, "its channels are not known")
    assert call.shapes[0] is not None
    channels = call.shapes[0][1]
    if len(weight) != channels:
        weight, bias = (np.repeat(one, channels // groups) for one in (weight, bias))
    state = {"weight": weight, "bias": bias}
    return call.module("GroupNorm", groups, channels, state=state,
                       eps=float(call.option("eps", 1e-5)))  # fmt: skip


def _instance_norm(call: Call) -> str:
    _require(call.rank in (3, 4, 5), f"its operand has {call.rank or 'unknown'} axes")
    state = {"weight": call.parameter(1), "bias": call.parameter(2)}
    return call.module(f"InstanceNorm{(call.rank or 0) - 2}d", len(state["weight"]), state=state,
                       eps=float(call.option("eps", 1e-3)), affine=True)  # fmt: skip


def _embedding(call: Call) -> str:
    """Translate an embedding; MXNet clips indices, and PyTorch refuses those out of range."""
    weight = call.parameter(1)
    call.operands = [f"{call.operands[0]}.long().clamp(0, {len(weight) - 1})"]
    return call.module("Embedding", *weight.shape, state={"weight": weight})


_ACTIVATIONS = {
    "relu": "F.relu({})",
    "sigmoid": "torch.sigmoid({})",
    "tanh": "torch.tanh({})",
    "softrelu": "F.softplus({})",
    "softsign": "F.softsign({})",
}


def _activation(call: Call) -> str:
    kind = call.option("act_type")
    _require(kind in _ACTIVATIONS, f"act_type={kind!r}")
    return _ACTIVATIONS[kind].format(call.operands[0])


def _leaky_relu(call: Call) -> str:
    kind, slope = call.option("act_type", "leaky"), float(call.option("slope", 0.25))
    if kind == "prelu":
        weight = call.parameter(1)
        return call.module(
            "PReLU",
            weight.size,
            state={"weight": weight if weight.ndim == 1 else weight.reshape(-1)},
        )
    texts = {
        "leaky": f"F.leaky_relu({{}}, {slope!r})",
        "elu": f"F.elu({{}}, {slope!r})",
        "selu": "F.selu({})",
        "gelu": "F.gelu({})",
    }
    _require(kind in texts, f"act_type={kind!r}")
    return texts[kind].format(call.operands[0])


def _pooling(call: Call) -> str:
    """Translate a pooling; MXNet's "full" keeps a last window that begins in the padding."""
    kind = call.option("pool_type", "max")
    _require(kind in ("max", "avg"), f"pool_type={kind!r}")
    _require(call.option("layout") in (None, "None", "NCW", "NCHW", "NCDHW"), "its layout")
    shape, operand = call.shapes[0], call.operands[0]
    if call.option("global_pool", False):
        rank = call.rank or 2 + len(call.option("kernel", ()))
        _require(rank > 2, "its operand has unknown axes")
        axes = tuple(range(2, rank))
        return f"{operand}.{'amax' if kind == 'max' else 'mean'}({axes}, keepdim=True)"
    kernel = call.option("kernel")
    inside = all(2 * pad <= size for pad, size in zip(call.option("pad") or (), kernel))
    _require(inside, "its padding is more than half of its window")
    options = _windows(call, len(kernel), "stride", "pad")
    options.setdefault("stride", 1)  # PyTorch's default is the kernel
    if call.option("pooling_convention", "valid") == "full":
        _require(shape is not None, "ceil_mode, and the size of its images is not known")
        assert shape is not None
        stride, pad = (call.option(name) or (default,) * len(kernel) for name, default in
                       (("stride", 1), ("pad", 0)))  # fmt: skip
        inside = all(
            -(-(size + 2 * p - k) // s) * s < size + p
            for size, k, s, p in zip(shape[2:], kernel, stride, pad)
        )
        _require(inside, "a last window that begins in the padding; use ceil_mode=False")
        options["ceil_mode"] = True
    if kind == "avg" and not call.option("count_include_pad", True):
        options["count_include_pad"] = False
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    name = f"F.{kind}_pool{len(kernel)}d"
    return f"{name}({operand}, {_one_or_all(kernel)!r}, {words})"


def _adaptive_pooling(call: Call) -> str:
    size = call.option("output_size") or (1,)
    sides = tuple(size) if isinstance(size, tuple) else (size,)
    return f"F.adaptive_avg_pool2d({call.operands[0]}, {_one_or_all(sides)!r})"


def _clip(call: Call) -> str:
    ends = (_number(call.option(name)) for name in ("a_min", "a_max"))
    return f"{call.operands[0]}.clamp({', '.join(ends)})"


def _bounded(side: str, call: Call) -> str:
    return f"{call.operands[0]}.clamp({side}={_number(call.option('scalar'))})"


def _number(value: float) -> str:
    """Return a number as Python writes it; infinities have no literal."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _pad(call: Call) -> str:
    """Translate a Pad, whose widths PyTorch takes from the last axis on."""
    width, mode = call.option("pad_width"), call.option("mode")
    modes = {"constant": "constant", "edge": "replicate", "reflect": "reflect"}
    _require(not any(width[:4]), "it pads batch or channels")
    pairs = [width[place : place + 2] for place in range(4, len(width), 2)]
    widths = tuple(size for pair in reversed(pairs) for size in pair)
    value = float(call.option("constant_value", 0))
    more = f", {modes[mode]!r}" if mode != "constant" else f", value={value!r}" if value else ""
    return f"F.pad({call.operands[0]}, {widths}{more})"


def _concat(option: str, default: int, call: Call) -> str:
    return f"torch.cat([{', '.join(call.operands)}], {call.option(option, default)})"


def _reshape(call: Call) -> str:
    shape = call.option("shape")
    shape = shape if isinstance(shape, tuple) else (shape,)
    known = not call.option("reverse", False) and all(size >= -1 for size in shape)
    _require(known, f"shape={shape}: 0 and -1 only")
    if tuple(shape) == (0, -1):
        return f"{call.operands[0]}.flatten(1)"
    sizes = [str(size) if size else f"{call.operands[0]}.shape[{place}]"
             for place, size in enumerate(shape)]  # fmt: skip
    return f"{call.operands[0]}.reshape({', '.join(sizes)})"


def _transpose(call: Call) -> str:
    axes = call.option("axes")
    if not axes:
        _require(call.rank is not None, "it reverses axes whose number is not known")
        axes = range(call.rank or 0)[::-1]
    return f"{call.operands[0]}.permute({tuple(axes)})"


def _softmax(name: str, call: Call) -> str:
    plain = call.option("temperature") in (None, 1.0) and not call.option("use_length", False)
    _require(plain, "a temperature or a length")
    return f"F.{name}({call.operands[0]}, {call.option('axis', -1)})"


def _reduction(name: str, call: Call) -> str:
    axis = call.option("axis")
    _require(axis not in (None, ()) and not call.option("exclude", False), "it names no axes")
    keep = ", keepdim=True" if call.option("keepdims", False) else ""
    return f"{call.operands[0]}.{name}({axis}{keep})"


def _operator(sign: str, call: Call) -> str:
    return f"{call.operands[0]} {sign} {call.operands[1]}"


def _with_number(sign: str, call: Call, *, reverse: bool = False) -> str:
    number, operand = _number(float(call.option("scalar"))), call.operands[0]
    return f"{number} {sign} {operand}" if reverse else f"{operand} {sign} {number}"


def _function(text: str, call: Call) -> str:
    return text.format(*call.operands)


def _dropout(call: Call) -> str:
    share = float(call.option("p", 0.5))
    _require(not call.option("axes"), "axes, whose numbers are dropped together")
    training = "" if call.option("mode", "training") == "always" else ", self.training"
    return f"F.dropout({call.operands[0]}, {share!r}{training})"


def _slice_axis(call: Call) -> str:
    axis, begin, end = (call.option(name) for name in ("axis", "begin", "end"))
    _require(axis >= 0, f"axis={axis}; count from the first")
    part = f"{begin or ''}:{'' if end in (None, 'None') else end}"
    return f"{call.operands[0]}[{':, ' * axis}{part}]"


def _dot(call: Call) -> str:
    transposed = call.option("transpose_a", False) or call.option("transpose_b", False)
    _require(not transposed, "a transposed operand")
    ranks = [None if shape is None else len(shape) for shape in call.shapes]
    ranks = [rank if value is None else value.ndim for rank, value in zip(ranks, call.values)]
    _require(set(ranks) <= {1, 2}, "an operand that is not known to be a vector or a matrix")
    return f"{call.operands[0]} @ {call.operands[1]}"


def _batch_dot(call: Call) -> str:
    operands = [
        f"{operand}.transpose(1, 2)" if call.option(f"transpose_{side}", False) else operand
        for operand, side in zip(call.operands, "ab")
    ]
    return f"torch.bmm({', '.join(operands)})"


def _upsampling(call: Call) -> str:
    _require(call.option("sample_type") == "nearest", "it is bilinear, with a weight")
    _require(len(call.operands) == 1, "it has several operands")
    return f"F.interpolate({call.operands[0]}, scale_factor={call.option('scale')})"


_SIGNS = {"add": "+", "plus": "+", "sub": "-", "minus": "-", "mul": "*", "div": "/", "power": "**"}

TRANSLATIONS: Mapping[str, Translation] = {
    "Convolution": _convolution,
    "Deconvolution": partial(_convolution, transposed=True),
    "FullyConnected": _dense,
    "BatchNorm": _batch_norm,
    "LayerNorm": _layer_norm,
    "GroupNorm": _group_norm,
    "InstanceNorm": _instance_norm,
    "Embedding": _embedding,
    "Activation": _activation,
    "LeakyReLU": _leaky_relu,
    "Pooling": _pooling,
    "_contrib_AdaptiveAvgPooling2D": _adaptive_pooling,
    "UpSampling": _upsampling,
    "clip": _clip,
    "Pad": _pad,
    "Concat": partial(_concat, "dim", 1),
    "concat": partial(_concat, "dim", 1),
    "Flatten": partial(_function, "torch.flatten({}, 1)"),
    "Reshape": _reshape,
    "reshape": _reshape,
    "transpose": _transpose,
    "softmax": partial(_softmax, "softmax"),
    "log_softmax": partial(_softmax, "log_softmax"),
    "Dropout": _dropout,
    "slice_axis": _slice_axis,
    "batch_dot": _batch_dot,
    "dot": _dot,
    **{name: partial(_reduction, theirs) for name, theirs in
       (("mean", "mean"), ("sum", "sum"), ("max", "amax"), ("min", "amin"))},
    **{f"{kind}_{name}": partial(_operator, sign) for name, sign in _SIGNS.items()
       for kind in ("elemwise", "broadcast", "")},
    **{f"_{name}_scalar": partial(_with_number, sign) for name, sign in _SIGNS.items()},
    "_rminus_scalar": partial(_with_number, "-", reverse=True),
    "_rdiv_scalar": partial(_with_number, "/", reverse=True),
    "_maximum_scalar": partial(_bounded, "min"),
    "_minimum_scalar": partial(_bounded, "max"),
    "broadcast_maximum": partial(_function, "torch.maximum({}, {})"),
    "broadcast_minimum": partial(_function, "torch.minimum({}, {})"),
    "square": partial(_function, "{} ** 2"),
    **{name: partial(_function, f"torch.{name}({{}})") for name in
       ("sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "abs", "erf")},
    "relu": partial(_function, "F.relu({})"),
    "negative": partial(_function, "-{}"),
    "expand_dims": lambda call: f"{call.operands[0]}.unsqueeze({call.option('axis')})",
    "squeeze": lambda call: f"{call.operands[0]}.squeeze({call.option('axis', '')})",
    "BlockGrad": partial(_function, "{}.detach()"),
    "_copy": partial(_function, "{}"),
    "identity": partial(_function, "{}"),
}  # fmt: skip
"""The translations by the names of MXNet's operators."""
