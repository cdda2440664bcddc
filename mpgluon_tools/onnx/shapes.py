"""MXNet's operators that move, choose or create elements, in ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mpgluon_tools.leaving.refusal import require
from mpgluon_tools.onnx.calls import TYPES, OperatorCall, Translation

import numpy as np

__all__ = ["SHAPES"]

_END = 2**62  # of a slice, beyond every size


def _reshape(call: OperatorCall) -> str:
    """Write a shape that MXNet has inferred, whatever its codes; sizes stay open."""
    shape, order = call.option("newshape", call.option("shape")), call.option("order", "C")
    first = shape[0] if isinstance(shape, tuple) else shape
    require(order == "C", f"order={order!r}")
    sizes = call.shapes[0][0], call.larger_shapes[0][0]
    fixed = first > 0 and (not call.model.sources or sizes in call.model.sources)
    advice = "begin with 0 or -1, in npx -2"
    is_right = call.model.batch_is_fixed or not fixed
    require(is_right, f"shape={shape} fixes the size of the batch; {advice}")
    return call.node("Reshape", call.inputs[0], call.open_shape())


def _swap_axes(call: OperatorCall) -> str:
    axes, one, other = list(range(call.rank)), call.axis("dim1"), call.axis("dim2")
    axes[one], axes[other] = other, one
    return call.node("Transpose", perm=axes)


def _concat(option: str, default: int, call: OperatorCall) -> str:
    axis = call.options.get(option, default)
    require(isinstance(axis, int), f"{option}={axis}")
    return call.node("Concat", axis=axis)


def _split(call: OperatorCall) -> Sequence[str]:
    axis, starts = call.axis(default=int("num_outputs" in call.options)), call.option("indices")
    count, sizes = call.option("num_outputs", call.option("sections", 0)), []
    if not count:
        sizes, count = [np.diff([*starts, call.size(axis)])], len(starts)
    elif call.shapes[0][axis] % count:  # of mx.np.array_split, whose first parts are larger
        places = np.array_split(range(call.size(axis)), count)
        sizes = [np.array([len(part) for part in places])]
    parts = call.several("Split", count, call.inputs[0], *sizes, axis=axis)
    squeeze = call.option("squeeze_axis", False)
    return [call.step("Squeeze", part, [axis]) for part in parts] if squeeze else parts


def _slice(call: OperatorCall) -> str:
    """Translate a slice of several axes; without an end it goes as far as its step does."""
    options = call.options
    steps = [one or 1 for one in call.option("step", ())] or [1] * len(options["begin"])
    far = [_END if step > 0 else -_END for step in steps]
    starts = [-end if one is None else one for one, end in zip(options["begin"], far)]
    ends = [end if one is None else one for one, end in zip(options["end"], far)]
    return call.node("Slice", call.inputs[0], starts, ends, list(range(len(steps))), steps)


def _slice_like(call: OperatorCall) -> str:
    axes = call.axes("axes", range(call.rank))
    ends = call.step("Gather", call.step("Shape", call.inputs[1]), axes)
    return call.node("Slice", call.inputs[0], [0] * len(axes), ends, axes)


def _like(operator: str, call: OperatorCall) -> str:
    sides = ("lhs_axes", "rhs_axes", "lhs_begin", "rhs_begin")
    require(all(call.option(side) is None for side in sides), "it names axes")
    return call.node(operator, call.inputs[0], call.step("Shape", call.inputs[1]))


def _filled(value: float, call: OperatorCall) -> str:
    """Write an array of one number, of the operand's shape or, such as begin states, of inputs'."""
    shape = call.step("Shape", call.inputs[0]) if call.inputs else call.open_shape()
    return call.node("Expand", value, shape)


def _tile(call: OperatorCall) -> str:
    repeats, data = np.atleast_1d(call.options["reps"]).tolist(), call.inputs[0]
    more = len(repeats) - call.rank
    if more > 0:
        data = call.step("Unsqueeze", data, list(range(more)))
    return call.node("Tile", data, [1] * -more + repeats)


def _repeat(call: OperatorCall) -> str:
    """Translate a repetition of each element: along a new axis, which then joins the one before."""
    data, axis, count = call.inputs[0], call.axis(), call.options["repeats"]
    after = [call.size(place) for place in range(axis + 1, call.rank)]
    if call.option("axis") is None:  # of all elements in one row
        data, axis, after = call.step("Reshape", data, [-1]), 0, []
    apart = call.step("Unsqueeze", data, [axis + 1])
    tiled = call.step("Tile", apart, [1] * (axis + 1) + [count] + [1] * len(after))
    return call.node("Reshape", tiled, [*[0] * axis, -1, *after])


def _nearest(call: OperatorCall, indices: str, size: int) -> str:
    """Return indices as MXNet takes them: cut to integers, then to the nearest that exists."""
    return call.step("Clip", call.cut(indices), 0, size - 1)


def _take(data: int, call: OperatorCall) -> str:
    """Translate a take, whose array is this one of the operands: of an Embedding it is the last."""
    mode, axis, indices = call.option("mode", "clip"), call.axis(), call.inputs[1 - data]
    require(mode in ("clip", "wrap"), f"mode={mode!r}")
    size = call.size(axis, data)
    wrap = mode == "wrap"
    places = call.step("Mod", call.cut(indices), size) if wrap else _nearest(call, indices, size)
    return call.node("Gather", call.inputs[data], places, axis=axis)


def _pick(call: OperatorCall) -> str:
    axis, (data, indices) = call.axis(default=-1), call.inputs
    require(call.option("mode", "clip") == "clip", "its mode is not clip")
    if len(call.shapes[1]) < call.rank:
        indices = call.step("Unsqueeze", indices, [axis])
    places = _nearest(call, indices, call.size(axis))
    chosen = call.step("GatherElements", data, places, axis=axis)
    return chosen if call.option("keepdims", False) else call.node("Squeeze", chosen, [axis])


def _gather_nd(call: OperatorCall) -> str:
    perm = [*range(1, len(call.shapes[1])), 0]
    indices = call.step("Transpose", call.cut(call.inputs[1]), perm=perm)
    return call.node("GatherND", call.inputs[0], indices)


def _one_hot(call: OperatorCall) -> str:
    """Translate a one_hot, whose rows for indices out of range are empty."""
    places = call.step("Unsqueeze", call.cut(call.inputs[0]), [call.rank])
    chosen = call.step("Equal", places, list(range(call.options["depth"])))
    on, off = (call.number(f"{name}_value", name == "on") for name in ("on", "off"))
    return call.node("Where", chosen, on, off)


def _arange_like(call: OperatorCall) -> str:
    require(call.option("repeat", 1) == 1, "its numbers are repeated")
    shape, along = call.step("Shape", call.inputs[0]), call.option("axis") is not None
    size = call.step("Gather", shape, call.axis()) if along else call.step("Size", call.inputs[0])
    places = call.step("Cast", call.step("Range", 0, size, 1), to=TYPES[call.dtype])
    steps = call.step("Mul", places, float(call.option("step", 1)))
    numbers = call.step("Add", steps, float(call.option("start", 0)))
    return numbers if along else call.node("Reshape", numbers, shape)


def _order(call: OperatorCall, *, ascend: bool) -> dict[str, int]:
    """Return the axis and direction of a TopK."""
    require(call.options.get("axis", -1) not in (None, "None"), "it sorts over all axes")
    return {"axis": call.axis(default=-1), "largest": int(not call.option("is_ascend", ascend))}


def _topk(call: OperatorCall) -> Sequence[str]:
    kind, count = call.option("ret_typ", "indices"), call.option("k", 1)
    require(kind in ("indices", "value", "both") and count > 0, f"ret_typ={kind!r}, k={count}")
    order = _order(call, ascend=False)
    values, places = call.several("TopK", 2, call.inputs[0], [count], **order)
    return values if kind == "value" else [values, call.as_numbers(places)][kind == "indices" :]


def _running_sum(call: OperatorCall) -> str:
    require(call.option("axis") is not None, "it sums over all axes")
    require(call.option("dtype") is None, f"dtype={call.option('dtype')}")
    return call.node("CumSum", call.inputs[0], np.array(call.axis()))


def _reverse(call: OperatorCall) -> str:
    axes = call.axes("axis", ())
    backwards = [-1] * len(axes)
    return call.node("Slice", call.inputs[0], backwards, [-_END] * len(axes), axes, backwards)


def _sorted(places: bool, call: OperatorCall) -> str:
    """Translate a sort, to all numbers in order or to their places."""
    order = _order(call, ascend=True)
    results = call.several("TopK", 2, call.inputs[0], [call.size(order["axis"])], **order)
    return call.as_numbers(results[1]) if places else results[0]


def _first(operator: str, call: OperatorCall) -> str:
    """Translate an argmax or argmin, whose result is a number."""
    require(call.option("axis") is not None, "it names no axis")
    keep = int(call.option("keepdims", False))
    return call.as_numbers(call.step(operator, call.inputs[0], axis=call.axis(), keepdims=keep))


def _cast(call: OperatorCall) -> str:
    """Translate a cast: integers lose their fractions, and 8-bit ones wrap.

    Formats of floats are the writer's.
    """
    if not call.integer:
        return call.inputs[0]
    if call.in_mxnet[0] == "bool":
        return call.as_numbers(call.truth(call.inputs[0]))
    whole, narrow = call.cut(call.inputs[0]), TYPES.get(call.in_mxnet[0])
    return call.as_numbers(call.step("Cast", whole, to=narrow) if narrow else whole)


SHAPES: dict[str, Translation] = {
    **dict.fromkeys(("Reshape", "_np_reshape", "_npx_reshape"), _reshape),
    **dict.fromkeys(("transpose", "_np_transpose"), lambda call: call.node(
        "Transpose", perm=call.option("axes") or range(call.rank)[::-1])),
    **dict.fromkeys(("SliceChannel", "_split_v2"), _split),
    **dict.fromkeys(("broadcast_to", "broadcast_axis"), lambda call: call.node(
        "Expand", call.inputs[0], [1 if old == new else new
                                   for old, new in zip(call.shapes[0], call.output_shape)])),
    **dict.fromkeys(("_zeros", "zeros_like"), partial(_filled, 0.0)),
    "ones_like": partial(_filled, 1.0),
    "Flatten": lambda call: call.node("Flatten", axis=1),
    "SwapAxis": _swap_axes,
    "Concat": partial(_concat, "dim", 1), "_npi_concatenate": partial(_concat, "axis", 0),
    "stack": lambda call: call.node("Concat", *(
        call.step("Unsqueeze", one, [call.axis(more=1)]) for one in call.inputs),
        axis=call.axis(more=1)),
    "tile": _tile, "repeat": _repeat, "slice": _slice, "slice_like": _slice_like,
    "slice_axis": lambda call: call.node(
        "Slice", call.inputs[0], [call.option("begin", 0)], [call.option("end", _END)],
        [call.axis()]),
    "reshape_like": partial(_like, "Reshape"), "broadcast_like": partial(_like, "Expand"),
    "expand_dims": lambda call: call.node("Unsqueeze", call.inputs[0], [call.axis(more=1)]),
    "squeeze": lambda call: call.node("Squeeze", call.inputs[0], call.axes(
        "axis", [axis for axis, size in enumerate(call.shapes[0]) if size == 1])),
    "Embedding": partial(_take, 1), "take": partial(_take, 0), "pick": _pick,
    "gather_nd": _gather_nd, "one_hot": _one_hot, "topk": _topk, "sort": partial(_sorted, False),
    "argsort": partial(_sorted, True),
    "_np_cumsum": _running_sum, "reverse": _reverse,
    "_contrib_arange_like": _arange_like,
    "argmax": partial(_first, "ArgMax"), "argmin": partial(_first, "ArgMin"),
    "shape_array": lambda call: call.as_numbers(call.step("Shape", call.inputs[0])),
    "Cast": _cast,
}  # fmt: skip
"""Operators that move, choose or create elements."""
