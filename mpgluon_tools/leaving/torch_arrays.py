"""MXNet's functions of arrays in PyTorch: arithmetic, shapes, indices, reductions.

A function receives an operator and the names of its operands in ``forward``, and returns an
expression. An operator or option without an equal is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Optional

from mpgluon_tools.leaving.refusal import require
from mpgluon_tools.leaving.torch_call import Call, Translation, flattened, number

__all__ = ["ARRAYS", "COMPARISONS", "joined", "reduction", "reshaped"]


def _clip(call: Call) -> str:
    ends = (call.number(call.option(name)) for name in ("a_min", "a_max"))
    return f"{call.operands[0]}.clamp({', '.join(ends)})"


def _bounded(side: str, call: Call) -> str:
    return f"{call.operands[0]}.clamp({side}={call.scalar()})"


def joined(function: str, option: str, default: int, call: Call) -> str:
    """Translate a join of arrays along an axis."""
    return f"torch.{function}([{', '.join(call.operands)}], {call.axis(option, default)})"


def _reshape(call: Call) -> str:
    shape = call.option("shape")
    require(shape is not None, "a target_shape; give shape")
    shape = shape if isinstance(shape, tuple) else (shape,)
    require(not call.option("reverse", False) and len(shape) > 0, "it counts from the last axis")
    if shape == (0, -1):
        return flattened(call) if call.rank == 1 else f"{call.operands[0]}.flatten(1)"
    return reshaped(call, shape)


def reshaped(call: Call, codes: Sequence[Optional[int]]) -> str:
    """Translate a reshape, whose codes are sizes or tell what becomes of an axis.

    0 keeps an axis, ``None`` drops one of size 1, -2 keeps the rest, -3 joins two, -4 splits one in
    the two sizes that follow. Codes alone become a chain of methods.
    """
    x, rest = call.operands[0], list(codes)
    chain, taken = x, 0  # of the operand's axes
    has_sizes, sizes = False, list[str]()
    while rest:
        code, place = rest.pop(0), len(sizes)
        if code is None:
            chain, taken = f"{chain}.squeeze({place})", taken + 1
        elif code == -2:
            require(not rest or call.rank is not None, f"{tuple(codes)}: sizes after the rest")
            sizes += [f"{x}.shape[{axis}]" for axis in range(taken, call.rank or taken + 1)]
            taken = call.rank or taken
        elif code == -3:
            chain = f"{chain}.flatten({place}, {place + 1})"
            sizes, taken = [*sizes, f"{x}.shape[{taken}] * {x}.shape[{taken + 1}]"], taken + 2
        elif code == -4:
            pair, rest = (rest[0], rest[1]), rest[2:]
            chain = f"{chain}.unflatten({place}, {pair})"
            sizes, taken = [*sizes, *map(str, pair)], taken + 1
        else:
            sizes, taken = [*sizes, str(code) if code else f"{x}.shape[{taken}]"], taken + 1
            has_sizes = has_sizes or code != 0
    if not has_sizes:
        return chain
    require(sizes.count("-1") < 2 and (-2 not in codes or call.rank is not None), f"{tuple(codes)}")
    if "-1" not in sizes:  # PyTorch finds one size
        joined_size = next((size for size in sizes if "*" in size), "")
        sizes = ["-1" if size == joined_size else size for size in sizes]
    return f"{x}.reshape({', '.join(sizes)})"


def _transpose(call: Call) -> str:
    axes = call.option("axes")
    if not axes:
        require(call.rank is not None, "it reverses axes whose number is not known")
        axes = range(call.rank or 0)[::-1]
    return f"{call.operands[0]}.permute({tuple(axes)})"


def _softmax(name: str, call: Call) -> str:
    plain = call.option("temperature") in (None, 1.0) and not call.option("use_length", False)
    require(plain, "a temperature or a length")
    require(call.option("dtype") != "float16", "dtype=float16")
    return f"F.{name}({call.operands[0]}, {call.option('axis', -1)})"


def reduction(name: str, call: Call, *, in_numpy: bool = False) -> str:
    """Translate a reduction; over all axes the result has one axis, or none in MXNet's NumPy."""
    axis, x, exclude = call.option("axis"), call.operands[0], call.option("exclude", False)
    if name == "mean" and call.integers:
        require(in_numpy, "the mean of integers, which MXNet rounds; cast them first")
        x = f"{x}.float()"
    if exclude:
        known = call.rank is not None and axis is not None
        require(known, "it excludes axes of an unknown number")
        kept = {one % (call.rank or 1) for one in (axis if isinstance(axis, tuple) else (axis,))}
        axis = tuple(one for one in range(call.rank or 0) if one not in kept)
    if axis == () and (in_numpy or exclude):
        return x
    if axis in (None, ()):
        require(not call.keepdim, "it keeps all axes; name them")
        return f"{x}.{name}(){'' if in_numpy else '.reshape(1)'}"
    require(name != "prod" or isinstance(axis, int), "a product over several axes")
    return f"{x}.{name}({axis}{call.keepdim}){'' if in_numpy else _of_all(call, axis)}"


def _of_all(call: Call, axis: Any) -> str:
    """Return the end of a reduction, whose result has one axis if it had none."""
    count = len(axis) if isinstance(axis, tuple) else 1
    return ".reshape(1)" if count == call.rank and not call.keepdim else ""


def _norm(call: Call) -> str:
    axis, order = call.axis(), call.option("ord", 2)
    require(not call.integers, "the norm of integers, which MXNet rounds; cast them first")
    text = f"torch.linalg.vector_norm({call.operands[0]}, {order}, {axis}{call.keepdim})"
    return f"{text}{_of_all(call, axis)}"


def _l2_normalization(call: Call) -> str:
    require(call.rank is not None, "its operand has unknown axes")
    mode, axes = call.option("mode", "instance"), range(1, call.rank or 0)
    axes = {"instance": axes, "channel": axes[:1], "spatial": axes[1:]}[mode]
    x, eps = call.operands[0], float(call.option("eps", 1e-10))
    return f"{x} / ({x}.square().sum({tuple(axes)}, keepdim=True) + {eps!r}).sqrt()"


def _arg_extreme(name: str, call: Call) -> str:
    axis = call.axis()
    return f"{call.operands[0]}.{name}({axis}{call.keepdim}).float(){_of_all(call, axis)}"


def _sorted(text: str, call: Call) -> str:
    """Translate a sort, to the numbers in order or to their places."""
    axis, downwards = call.axis(default=-1), not call.option("is_ascend", True)
    order = f"dim={axis}{', descending=True' if downwards else ''}, stable=True"
    return f"{call.operands[0]}.{text.format(order)}"


def _topk(call: Call) -> str:
    kind, axis = call.option("ret_typ", "indices"), call.axis(default=-1)
    require(kind in ("indices", "value", "both"), f"ret_typ={kind!r}")
    order = ", largest=False" if call.option("is_ascend", False) else ""
    call.results = {"value": [".values"], "indices": [".indices.float()"]}.get(
        kind, [".values", ".indices.float()"]
    )
    call.unpacked = ""
    count = call.option("k", 1)
    count = count if count > 0 else f"{call.operands[0]}.shape[{axis}]"
    return f"{call.operands[0]}.topk({count}, {axis}{order})"


def _box_nms(call: Call) -> str:
    """Translate the suppression of boxes, a function of its own in the program."""
    formats = {call.option(f"{side}_format", "corner") for side in ("in", "out")}
    require(len(formats) == 1, "another format of its results")
    options = [
        float(call.option("overlap_thresh", 0.5)), float(call.option("valid_thresh", 0)),
        call.option("topk", -1) if call.option("topk", -1) > 0 else None,
        *(call.option(name, default) for name, default in
          (("coord_start", 2), ("score_index", 1), ("id_index", -1), ("background_id", -1),
           ("force_suppress", False))),
        formats == {"center"},
    ]  # fmt: skip
    return f"box_nms({call.operands[0]}, {', '.join(map(repr, options))})"


def _box_decode(call: Call) -> str:
    scales = [float(call.option(f"std{place}", 1)) for place in range(4)]
    largest = float(call.option("clip", -1))
    corners = call.option("format", "center") == "corner"
    words = [str(scales), number(largest if largest > 0 else math.inf), str(corners)]
    return f"box_decode({', '.join([*call.operands, *words])})"


def _roi_align(call: Call) -> str:
    """Translate means over parts of boxes, a function of its own in the program."""
    samples = call.option("sample_ratio", -1)
    require(samples > 0, f"sample_ratio={samples}, as many samples as a box needs")
    require(not call.option("position_sensitive", False), "position_sensitive")
    scale, aligned = float(call.option("spatial_scale")), bool(call.option("aligned", False))
    words = map(repr, (tuple(call.option("pooled_size")), scale, samples, aligned))
    return f"roi_align({', '.join([*call.operands, *words])})"


def _operator(sign: str, call: Call) -> str:
    if sign == "/" and call.integers:
        return f'torch.div({", ".join(call.operands)}, rounding_mode="trunc")'
    return f"{call.operands[0]} {sign} {call.operands[1]}"


def _with_number(sign: str, call: Call, *, reverse: bool = False) -> str:
    scalar, operand = call.scalar(), call.operands[0]
    makes_fractions = call.integers and sign in ("/", "**")
    require(not makes_fractions, "integers and a number that may make fractions; cast them first")
    scalar = f"({scalar})" if reverse and scalar.startswith("-") else scalar
    return f"{scalar} {sign} {operand}" if reverse else f"{operand} {sign} {scalar}"


def _comparison(sign: str, call: Call) -> str:
    """Translate a comparison, whose results are 1 and 0 in MXNet."""
    other = call.scalar() if len(call.operands) == 1 else call.operands[1]
    return f"({call.operands[0]} {sign} {other}).float()"


def _sum_of_all(call: Call) -> str:
    return " + ".join(call.operands)


def _function(text: str, call: Call) -> str:
    return text.format(*call.operands)


def _of_fractions(text: str, call: Call) -> str:
    require(not call.integers, "of integers, which MXNet rounds; cast them first")
    return _function(text, call)


def _slice_axis(call: Call) -> str:
    axis, begin, end = (call.option(name) for name in ("axis", "begin", "end"))
    require(axis >= 0 or call.rank is not None, f"axis={axis}; count from the first")
    axis %= call.rank or axis + 1
    part = f"{begin or ''}:{'' if end in (None, 'None') else end}"
    return f"{call.operands[0]}[{':, ' * axis}{part}]"


def _slice(call: Call) -> str:
    parts = []
    for begin, end, step in zip_longest(*(call.option(name) or () for name in
                                          ("begin", "end", "step"))):  # fmt: skip
        require(step is None or step > 0, "a negative step")
        text = ":".join("" if one is None else str(one) for one in (begin, end))
        parts.append(text if step in (None, 1) else f"{text}:{step}")
    return f"{call.operands[0]}[{', '.join(parts)}]"


def _slice_like(call: Call) -> str:
    axes = call.option("axes")
    axes = (axes,) if isinstance(axes, int) else axes or tuple(range(len(call.shapes[1] or ())))
    require(len(axes) > 0 and min(axes) >= 0, "its axes; name them, from the first")
    parts = [f":{call.operands[1]}.shape[{axis}]" if axis in axes else ":"
             for axis in range(max(axes) + 1)]  # fmt: skip
    return f"{call.operands[0]}[{', '.join(parts)}]"


def _split(call: Call) -> str:
    count, axis = int(call.option("num_outputs")), call.option("axis", 1)
    call.set_parts(count)
    if call.option("squeeze_axis", False):
        return f"{call.operands[0]}.unbind({axis})"
    return f"{call.operands[0]}.chunk({count}, {axis})"


def _indices(call: Call, place: int, size: str) -> str:
    mode, text = call.option("mode", "clip"), f"{call.operands[place]}.long()"
    ends = {"clip": f".clamp(0, {size} - 1)", "wrap": f" % {size}", "raise": ""}
    require(mode in ends, f"mode={mode!r}")
    return text + ends[mode]


def _take(call: Call) -> str:
    axis = call.option("axis", 0)
    require(axis >= 0, f"axis={axis}; count from the first")
    indices = _indices(call, 1, f"{call.operands[0]}.shape[{axis}]")
    return f"{call.operands[0]}[{':, ' * axis}{indices}]"


def _pick(call: Call) -> str:
    """Translate a pick: one number along an axis, at an index."""
    axis, x = call.axis(default=-1), call.operands[0]
    require(call.option("mode", "clip") == "clip", f"mode={call.option('mode')!r}")
    indices = _indices(call, 1, f"{x}.shape[{axis}]")
    if call.shapes[1] is not None and call.rank != len(call.shapes[1]):
        indices = f"{indices}.unsqueeze({axis})"
    text = f"{x}.gather({axis}, {indices})"
    return text if call.option("keepdims", False) else f"{text}.squeeze({axis})"


def _one_hot(call: Call) -> str:
    """Translate to a comparison: an index out of range gives a row of zeros, as in MXNet."""
    plain = (float(call.option("on_value", 1)), float(call.option("off_value", 0))) == (1, 0)
    require(plain, "other values than 1 and 0")
    x, depth = call.operands[0], call.option("depth")
    return f"({x}.long()[..., None] == torch.arange({depth}, device={x}.device)).float()"


def _where(call: Call) -> str:
    condition, axes = call.operands[0], [None if one is None else len(one) for one in call.shapes]
    require(None not in axes, "operands of unknown shapes")
    if axes[0] != axes[1]:  # one for each row
        condition += f"[:, {', '.join(['None'] * ((axes[1] or 0) - 1))}]"
    return f"torch.where({condition} != 0, {call.operands[1]}, {call.operands[2]})"


def _expand(call: Call) -> str:
    """Translate a broadcast to a shape, in which 0 keeps a size."""
    sizes = [str(size or -1) for size in call.option("shape")]
    return f"{call.operands[0]}.expand({', '.join(sizes)})"


def _expand_along(call: Call) -> str:
    axes, sizes = ((one,) if isinstance(one, int) else one
                   for one in (call.option("axis"), call.option("size")))  # fmt: skip
    require(call.rank is not None, "its operand has unknown axes")
    wanted = dict(zip(axes, sizes))
    text = ", ".join(str(wanted.get(axis, -1)) for axis in range(call.rank or 0))
    return f"{call.operands[0]}.expand({text})"


def _expand_as(call: Call) -> str:
    require(not call.option("lhs_axes"), "lhs_axes")
    return f"{call.operands[0]}.expand_as({call.operands[1]})"


def _repeat(call: Call) -> str:
    axis = "" if call.option("axis") is None else f", {call.option('axis')}"
    return f"{call.operands[0]}.repeat_interleave({call.option('repeats')}{axis})"


def _arange_like(call: Call) -> str:
    axis, step = call.option("axis"), float(call.option("step", 1))
    plain = call.option("repeat", 1) == 1 and step == 1 and axis is not None
    require(plain, "no axis, a repeat or a step")
    count = f"torch.arange({call.operands[0]}.shape[{axis}], device={call.operands[0]}.device)"
    start = float(call.option("start", 0))
    return f"{count} + {start!r}" if start else f"{count}.float()"


def _sequence_mask(call: Call) -> str:
    """Translate a mask: numbers from a length on become a value."""
    x, axis = call.operands[0], int(call.option("axis", 0))
    if not call.option("use_sequence_length", False):
        return x
    require(call.rank is not None, "its operand has unknown axes")
    places, lengths = [1] * (call.rank or 0), [1] * (call.rank or 0)
    places[axis], lengths[1 - axis] = -1, -1
    steps = f"torch.arange({x}.shape[{axis}], device={x}.device).reshape{tuple(places)}"
    inside = f"{steps} < {call.operands[1]}.long().reshape{tuple(lengths)}"
    return f"torch.where({inside}, {x}, {number(float(call.option('value', 0)))})"


def _hard_sigmoid(call: Call) -> str:
    alpha, beta = float(call.option("alpha", 0.2)), float(call.option("beta", 0.5))
    return f"({call.operands[0]} * {alpha!r} + {beta!r}).clamp(0, 1)"


def _cast(call: Call) -> str:
    dtype = call.option("dtype")
    known = ("float32", "float64", "int8", "uint8", "int32", "int64", "bool")
    require(dtype in known, f"dtype={dtype!r}")
    return f"{call.operands[0]}.to(torch.{dtype})"


def _dot(call: Call) -> str:
    transposed = call.option("transpose_a", False) or call.option("transpose_b", False)
    require(not transposed, "a transposed operand")
    ranks = [None if shape is None else len(shape) for shape in call.shapes]
    ranks = [rank if value is None else value.ndim for rank, value in zip(ranks, call.values)]
    require(set(ranks) <= {1, 2}, "an operand that is not known to be a vector or a matrix")
    return f"{call.operands[0]} @ {call.operands[1]}"


def _batch_dot(call: Call) -> str:
    transposed = [call.option(f"transpose_{side}", False) for side in "ab"]
    left, right = (
        f"{operand}.transpose(-2, -1)" if turned else operand
        for operand, turned in zip(call.operands, transposed)
    )
    return f"torch.bmm({left}, {right})" if call.rank == 3 else f"{left} @ {right}"


COMPARISONS = {"equal": "==", "not_equal": "!=", "greater": ">", "greater_equal": ">=",
                "lesser": "<", "lesser_equal": "<="}  # fmt: skip
_SIGNS = {"add": "+", "plus": "+", "sub": "-", "minus": "-", "mul": "*", "div": "/", "power": "**"}

ARRAYS: Mapping[str, Translation] = {
    "clip": _clip,
    "Concat": partial(joined, "cat", "dim", 1),
    "concat": partial(joined, "cat", "dim", 1),
    "Flatten": flattened,
    "Reshape": _reshape,
    "reshape": _reshape,
    "transpose": _transpose,
    "softmax": partial(_softmax, "softmax"),
    "log_softmax": partial(_softmax, "log_softmax"),
    "slice_axis": _slice_axis,
    "slice": _slice,
    "slice_like": _slice_like,
    "SliceChannel": _split,
    "split": _split,
    "SwapAxis": lambda call: (
        f"{call.operands[0]}.transpose({call.option('dim1', 0)}, {call.option('dim2', 0)})"
    ),
    "stack": partial(joined, "stack", "axis", 0),
    "take": _take,
    "pick": _pick,
    "gather_nd": partial(_function, "{}[tuple({}.long())]"),
    "one_hot": _one_hot,
    "where": _where,
    "broadcast_to": _expand,
    "broadcast_axis": _expand_along,
    "broadcast_like": _expand_as,
    "repeat": _repeat,
    "tile": lambda call: f"{call.operands[0]}.tile({call.option('reps')})",
    "reverse": lambda call: f"{call.operands[0]}.flip({call.option('axis')})",
    "ones_like": partial(_function, "torch.ones_like({})"),
    "zeros_like": partial(_function, "torch.zeros_like({})"),
    "_contrib_arange_like": _arange_like,
    "SequenceMask": _sequence_mask,
    "norm": _norm,
    "L2Normalization": _l2_normalization,
    "argmax": partial(_arg_extreme, "argmax"),
    "argmin": partial(_arg_extreme, "argmin"),
    "argsort": partial(_sorted, "argsort({}).float()"),
    "sort": partial(_sorted, "sort({}).values"),
    "topk": _topk,
    "_contrib_ROIAlign": _roi_align,
    "_contrib_box_nms": _box_nms,
    "_contrib_box_decode": _box_decode,
    "shape_array": partial(_function, "torch.tensor({0}.shape, device={0}.device)"),
    "broadcast_mod": partial(_function, "torch.remainder({}, {})"),
    "_mod_scalar": lambda call: (
        f"torch.remainder({call.operands[0]}, {call.scalar()})"
    ),
    "Cast": _cast,
    "hard_sigmoid": _hard_sigmoid,
    "add_n": _sum_of_all,
    "ElementWiseSum": _sum_of_all,
    "_contrib_div_sqrt_dim": partial(_function, "{0} / {0}.shape[-1] ** 0.5"),
    "batch_dot": _batch_dot,
    "dot": _dot,
    **{name: partial(reduction, theirs) for name, theirs in
       (("mean", "mean"), ("sum", "sum"), ("max", "amax"), ("min", "amin"), ("prod", "prod"))},
    **{name: partial(_comparison, sign) for kind, sign in COMPARISONS.items()
       for name in (f"_{kind}", f"_{kind}_scalar", f"broadcast_{kind}")},
    **{f"{kind}_{name}": partial(_operator, sign) for name, sign in _SIGNS.items()
       for kind in ("elemwise", "broadcast", "")},
    **{f"_{name}_scalar": partial(_with_number, sign) for name, sign in _SIGNS.items()},
    "_rminus_scalar": partial(_with_number, "-", reverse=True),
    "_rpower_scalar": partial(_with_number, "**", reverse=True),
    "_rdiv_scalar": partial(_with_number, "/", reverse=True),
    "_maximum_scalar": partial(_bounded, "min"),
    "_minimum_scalar": partial(_bounded, "max"),
    "broadcast_maximum": partial(_function, "torch.maximum({}, {})"),
    "broadcast_minimum": partial(_function, "torch.minimum({}, {})"),
    "square": partial(_function, "{} ** 2"),
    **{name: partial(_of_fractions, f"torch.{name}({{}})") for name in
       ("sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "erf", "sin", "cos", "log1p", "expm1",
        "log2", "reciprocal")},
    **{name: partial(_function, f"torch.{name}({{}})") for name in
       ("abs", "floor", "ceil", "sign", "trunc")},
    "rint": partial(_function, "torch.ceil({} - 0.5)"),
    "relu": partial(_function, "F.relu({})"),
    "negative": partial(_function, "-{}"),
    "expand_dims": lambda call: f"{call.operands[0]}.unsqueeze({call.option('axis')})",
    "squeeze": lambda call: f"{call.operands[0]}.squeeze({call.option('axis', '')})",
    "BlockGrad": partial(_function, "{}.detach()"),
    "_copy": partial(_function, "{}"),
    "identity": partial(_function, "{}"),
}  # fmt: skip
"""The translations by the names of MXNet's operators."""
