"""MXNet's layers in PyTorch: one short function for each.

A layer with parameters is defined on the way. Wherever the two libraries mean different things by
one name, the function says so. An operator or option without an equal is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mpgluon_tools.leaving.refusal import require
from mpgluon_tools.leaving.torch_call import Call, Translation, flattened, one_or_all

import numpy as np

__all__ = ["LAYERS"]


def _windows(call: Call, axes: int, *names: str) -> dict[str, Any]:
    """Return stride, padding and dilation, without those that PyTorch assumes."""
    found = {}
    for name, theirs, default in (
        ("stride", "stride", 1), ("pad", "padding", 0), ("dilate", "dilation", 1),
    ):  # fmt: skip
        sizes = call.option(name) or (default,) * axes
        if name in names and set(sizes) != {default}:
            found[theirs] = one_or_all(sizes)
    return found


def _convolution(call: Call, *, transposed: bool = False) -> str:
    kernel = call.option("kernel")
    axes = len(kernel)
    require(call.option("layout") in (None, "None", "NCW", "NCHW", "NCDHW"), "its layout")
    weight, groups = call.parameter(1), int(call.option("num_group", 1))
    has_bias = not call.option("no_bias", transposed)
    channels = (weight.shape[0], weight.shape[1] * groups)
    options = _windows(call, axes, "stride", "pad", "dilate")
    if transposed:
        require(not call.option("target_shape"), "a target_shape; give adj and pad")
        adj = call.option("adj") or (0,) * axes
        if any(adj):
            options["output_padding"] = one_or_all(adj)
    else:
        channels = channels[::-1]
    if groups > 1:
        options["groups"] = groups
    if not has_bias:
        options["bias"] = False
    state = {"weight": weight, **({"bias": call.parameter(2)} if has_bias else {})}
    kind = f"Conv{'Transpose' if transposed else ''}{axes}d"
    return call.module(kind, *channels, one_or_all(kernel), state=state, **options)


def _dense(call: Call) -> str:
    weight, has_bias = call.parameter(1), not call.option("no_bias", False)
    state = {"weight": weight, **({"bias": call.parameter(2)} if has_bias else {})}
    options = {} if has_bias else {"bias": False}
    if call.option("flatten", True) and call.rank != 2:
        call.operands = [flattened(call)]
    return call.module("Linear", weight.shape[1], weight.shape[0], state=state, **options)


def _recurrent(call: Call) -> str:
    """Translate a recurrent layer; the gates have the same order: i, f, g, o and r, z, n.

    MXNet packs the parameters: the weights of all layers and directions, then the biases.
    """
    mode, layers = call.option("mode"), int(call.option("num_layers"))
    for option in ("projection_size", "use_sequence_length", "lstm_state_clip_nan",
                   "lstm_state_clip_min", "lstm_state_clip_max"):  # fmt: skip
        require(call.option(option) in (None, False, "None"), option)
    packed, directions = call.parameter(1), 1 + bool(call.option("bidirectional", False))
    require(isinstance(packed, list), "its parameters are one vector, and not arrays")
    state, count = {}, 2 * layers * directions
    for place in range(0, count, 2):
        layer, is_reverse = divmod(place // 2, directions)
        for kind, arrays in (("weight", packed[:count]), ("bias", packed[count:])):
            for part, array in zip(("ih", "hh"), arrays[place : place + 2]):
                state[f"{kind}_{part}_l{layer}{'_reverse' * is_reverse}"] = array
    options: dict[str, Any] = {"num_layers": layers} if layers > 1 else {}
    if directions == 2:
        options["bidirectional"] = True
    if layers > 1 and float(call.option("p", 0)):
        options["dropout"] = float(call.option("p"))
    if mode == "rnn_relu":
        options["nonlinearity"] = "relu"
    given = [text for text, kind in zip(call.operands[2:], call.kinds[2:]) if kind != "_zeros"]
    require(len(given) in (0, len(call.operands) - 2), "one of its two first states")
    if given:
        states = given[0] if len(given) == 1 else f"({', '.join(given)})"
        call.operands = [f"{call.operands[0]}, {states}"]
    is_lstm = mode == "lstm"
    call.results = ("[0]", "[1][0]", "[1][1]") if is_lstm else ("[0]", "[1]")
    call.unpacked = "{}, ({}, {})" if is_lstm else "{}, {}"
    sizes = state["weight_ih_l0"].shape[1], int(call.option("state_size"))
    return call.module(mode.upper()[:4].rstrip("_"), *sizes, state=state, **options)


def _batch_norm(call: Call) -> str:
    """Translate a BatchNorm.

    MXNet's momentum is the share of the old statistics, PyTorch's of the new ones; ``fix_gamma``
    means a scale of 1, whatever the parameter holds; MXNet's own default of epsilon is 0.001.
    """
    require(call.option("axis", 1) == 1, f"its axis is {call.option('axis')}, not 1")
    gamma = call.parameter(1)
    if call.option("fix_gamma", True):
        gamma = np.ones_like(gamma)
    names = ("bias", "running_mean", "running_var")
    state = {"weight": gamma, **{name: call.parameter(2 + i) for i, name in enumerate(names)}}
    state["num_batches_tracked"] = np.zeros((), np.int64)
    require(call.rank in (2, 3, 4, 5), f"its operand has {call.rank or 'unknown'} axes")
    kind = f"BatchNorm{max(1, (call.rank or 0) - 2)}d"
    momentum = round(1 - float(call.option("momentum", 0.9)), 10)
    options = {"eps": float(call.option("eps", 1e-3)), "momentum": momentum}
    defaults = {"eps": 1e-5, "momentum": 0.1}
    options = {name: value for name, value in options.items() if value != defaults[name]}
    text = call.module(kind, len(gamma), state=state, **options)
    if call.option("use_global_stats", False):
        assert call.layer is not None
        call.layer.definition = call.layer.definition.replace(f"nn.{kind}", "Frozen")
    return text


def _layer_norm(call: Call) -> str:
    axis = call.option("axis", -1)
    require(axis in (-1, (call.rank or 0) - 1), f"its axis is {axis}, not the last")
    state = {"weight": call.parameter(1), "bias": call.parameter(2)}
    eps = float(call.option("eps", 1e-5))
    return call.module("LayerNorm", len(state["weight"]), state=state,
                       **({} if eps == 1e-5 else {"eps": eps}))  # fmt: skip


def _group_norm(call: Call) -> str:
    """Translate a GroupNorm; MXNet 1.9.1 has a scale for each group where PyTorch has channels."""
    groups, weight, bias = int(call.option("num_groups", 1)), call.parameter(1), call.parameter(2)
    require(call.shapes[0] is not None, "its channels are not known")
    assert call.shapes[0] is not None
    channels = call.shapes[0][1]
    if len(weight) != channels:
        weight, bias = (np.repeat(one, channels // groups) for one in (weight, bias))
    state = {"weight": weight, "bias": bias}
    return call.module("GroupNorm", groups, channels, state=state,
                       eps=float(call.option("eps", 1e-5)))  # fmt: skip


def _instance_norm(call: Call) -> str:
    require(call.rank in (3, 4, 5), f"its operand has {call.rank or 'unknown'} axes")
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
    require(kind in _ACTIVATIONS, f"act_type={kind!r}")
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
    require(kind in texts, f"act_type={kind!r}")
    return texts[kind].format(call.operands[0])


def _pooling(call: Call) -> str:
    """Translate a pooling; MXNet's "full" keeps a last window that begins in the padding."""
    kind = call.option("pool_type", "max")
    require(kind in ("max", "avg"), f"pool_type={kind!r}")
    require(call.option("layout") in (None, "None", "NCW", "NCHW", "NCDHW"), "its layout")
    convention = call.option("pooling_convention", "valid")
    require(convention in ("valid", "full"), f"pooling_convention={convention!r}")
    shape, operand = call.shapes[0], call.operands[0]
    if call.option("global_pool", False):
        rank = call.rank or 2 + len(call.option("kernel", ()))
        require(rank > 2, "its operand has unknown axes")
        axes = tuple(range(2, rank))
        return f"{operand}.{'amax' if kind == 'max' else 'mean'}({axes}, keepdim=True)"
    kernel = call.option("kernel")
    inside = all(2 * pad <= size for pad, size in zip(call.option("pad") or (), kernel))
    require(inside, "its padding is more than half of its window")
    options = _windows(call, len(kernel), "stride", "pad")
    options.setdefault("stride", 1)  # PyTorch's default is the kernel
    if convention == "full":
        require(shape is not None, "ceil_mode, and the size of its images is not known")
        assert shape is not None
        stride, pad = (call.option(name) or (default,) * len(kernel) for name, default in
                       (("stride", 1), ("pad", 0)))  # fmt: skip
        inside = all(
            -(-(size + 2 * p - k) // s) * s < size + p
            for size, k, s, p in zip(shape[2:], kernel, stride, pad)
        )
        require(inside, "a last window that begins in the padding; use ceil_mode=False")
        options["ceil_mode"] = True
    if kind == "avg" and not call.option("count_include_pad", True):
        options["count_include_pad"] = False
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    name = f"F.{kind}_pool{len(kernel)}d"
    return f"{name}({operand}, {one_or_all(kernel)!r}, {words})"


def _adaptive_pooling(call: Call) -> str:
    size = call.option("output_size") or (1,)
    sides = tuple(size) if isinstance(size, tuple) else (size,)
    return f"F.adaptive_avg_pool2d({call.operands[0]}, {one_or_all(sides)!r})"


def _pad(call: Call) -> str:
    """Translate a Pad, whose widths PyTorch takes from the last axis on."""
    width, mode = call.option("pad_width"), call.option("mode")
    modes = {"constant": "constant", "edge": "replicate", "reflect": "reflect"}
    require(not any(width[:4]), "it pads batch or channels")
    pairs = [width[place : place + 2] for place in range(4, len(width), 2)]
    widths = tuple(size for pair in reversed(pairs) for size in pair)
    value = float(call.option("constant_value", 0))
    more = f", {modes[mode]!r}" if mode != "constant" else f", value={value!r}" if value else ""
    return f"F.pad({call.operands[0]}, {widths}{more})"


def _dropout(call: Call) -> str:
    share = float(call.option("p", 0.5))
    require(not call.option("axes"), "axes, whose numbers are dropped together")
    training = "" if call.option("mode", "training") == "always" else ", self.training"
    return f"F.dropout({call.operands[0]}, {share!r}{training})"


def _bilinear_resize(call: Call) -> str:
    """Translate a resize, whose corners MXNet aligns by default."""
    require(call.option("mode", "size") in ("size", "like"), f"mode={call.option('mode')!r}")
    if call.option("mode", "size") == "like":
        size = f"{call.operands[1]}.shape[2:]"
    else:
        require(call.option("scale_height") is None, "a scale; give height and width")
        size = str((int(call.option("height", 1)), int(call.option("width", 1))))
    aligned = bool(call.option("align_corners", True))
    options = f'mode="bilinear", align_corners={aligned}'
    return f"F.interpolate({call.operands[0]}, {size}, {options})"


def _upsampling(call: Call) -> str:
    require(call.option("sample_type") == "nearest", "it is bilinear, with a weight")
    require(len(call.operands) == 1, "it has several operands")
    return f"F.interpolate({call.operands[0]}, scale_factor={call.option('scale')})"


LAYERS: Mapping[str, Translation] = {
    "Convolution": _convolution,
    "Deconvolution": partial(_convolution, transposed=True),
    "FullyConnected": _dense,
    "RNN": _recurrent,
    "BatchNorm": _batch_norm,
    "LayerNorm": _layer_norm,
    "GroupNorm": _group_norm,
    "InstanceNorm": _instance_norm,
    "Embedding": _embedding,
    "Activation": _activation,
    "LeakyReLU": _leaky_relu,
    "Pooling": _pooling,
    "_contrib_AdaptiveAvgPooling2D": _adaptive_pooling,
    "_contrib_BilinearResize2D": _bilinear_resize,
    "UpSampling": _upsampling,
    "Pad": _pad,
    "Dropout": _dropout,
}
"""The translations by the names of MXNet's operators."""
