"""Functions of MXNet's NumPy interface in PyTorch, which has most of them under NumPy's names.

As in :mod:`mpgluon_tools.leaving.torch_arrays`. Comparisons are truth values here, and a reduction
of all axes has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from mpgluon_tools.leaving.refusal import require
from mpgluon_tools.leaving.torch_arrays import ARRAYS, COMPARISONS, joined, reduction, reshaped
from mpgluon_tools.leaving.torch_call import Call, Translation, number

__all__ = ["NUMPY", "is_question"]

_SAME = """absolute add arccos arccosh arcsin arcsinh arctan arctanh ceil cos cosh exp expm1 fix
    floor log log10 log1p log2 logical_not negative reciprocal sign sin sinh sqrt square subtract
    multiply tan tanh true_divide trunc vstack hstack dstack"""  # the names in PyTorch
_JOINS = "vstack", "hstack", "dstack"
_QUESTIONS = {name.replace("lesser", "less"): sign for name, sign in COMPARISONS.items()}
_SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "true_divide": "/", "power": "**"}


def _function(name: str, call: Call) -> str:
    operands = ", ".join(call.operands)
    return f"torch.{name}({f'[{operands}]' if name in _JOINS else operands})"


def _signed(sign: str, call: Call, *, reverse: bool = False) -> str:
    """Translate a sign between two arrays, or an array and a number."""
    left, right = [*map(partial(_operand, sign, call), range(len(call.operands))), ""][:2]
    right = right or _scalar(sign, call)
    if reverse:
        return f"({right}) {sign} {left}" if right.startswith("-") else f"{right} {sign} {left}"
    return f"{left} {sign} {right}"


def _operand(sign: str, call: Call, place: int) -> str:
    """Return an operand; PyTorch does not subtract truth values."""
    is_truth = sign == "-" and is_question(call.kinds[place])
    return f"{call.operands[place]}.float()" if is_truth else call.operands[place]


def _scalar(sign: str, call: Call) -> str:
    value = float(call.option("scalar"))
    if call.integers and sign != "/":
        return call.scalar()
    return str(int(value)) if call.option("is_int", False) and value.is_integer() else number(value)


def _deviation(name: str, call: Call) -> str:
    axis = call.option("axis")
    require(not call.integers, "of integers, whose mean MXNet rounds; cast them first")
    return f"{call.operands[0]}.{name}({axis}, correction={call.option('ddof', 0)}{call.keepdim})"


def _cumsum(call: Call) -> str:
    axis, x = call.option("axis"), call.operands[0]
    return f"{x}.flatten().cumsum(0)" if axis is None else f"{x}.cumsum({axis})"


def _reshape_like(call: Call) -> str:
    require(not any("hs_" in name for name in call.node.attrs), "a part of the axes")
    return f"{call.operands[0]}.reshape_as({call.operands[1]})"


def _method(name: str, options: str, call: Call) -> str:
    """Translate a call with the values of options, in this order."""
    values = (call.option(one) for one in options.split())
    return f"{call.operands[0]}.{name}({', '.join(repr(one) for one in values if one is not None)})"


def _reshape(call: Call) -> str:
    sizes = call.option("newshape")
    require(call.option("order", "C") == "C", f"order={call.option('order')!r}")
    sizes = sizes if isinstance(sizes, (tuple, list)) else (sizes,)
    return f"{call.operands[0]}.reshape({', '.join(map(str, sizes))})"


_CODES = {-2: 0, -3: None, -4: -2, -5: -3, -6: -4}  # as MXNet's other interface has them


def _reshape_by_codes(call: Call) -> str:
    sizes = call.option("newshape")
    sizes = sizes if isinstance(sizes, (tuple, list)) else (sizes,)
    require(not call.option("reverse", False), "it counts from the last axis")
    return reshaped(call, [_CODES.get(size, size) for size in sizes])


def _broadcast_to(call: Call) -> str:
    sizes = [str(-1 if size == -2 else size) for size in call.option("shape")]
    return f"{call.operands[0]}.expand({', '.join(sizes)})"


def _split(call: Call) -> str:
    places = list(call.option("indices", ()) or ())[1:]  # MXNet's begin with 0
    parts = int(call.option("sections", 0)) or places
    count = parts if isinstance(parts, int) else len(parts) + 1
    require(not call.option("squeeze_axis", False), "squeeze_axis")
    call.set_parts(count)
    return f"{call.operands[0]}.tensor_split({parts}, {call.option('axis', 1)})"


def _dot(call: Call) -> str:
    rank = None if call.shapes[1] is None else len(call.shapes[1])
    rank = rank if call.values[1] is None else call.values[1].ndim
    require(rank in (1, 2), "its second operand is not known to be a vector or a matrix")
    return f"{call.operands[0]} @ {call.operands[1]}"


def _tensordot(call: Call) -> str:
    axes = call.option("axes")
    if axes is None:
        axes = [list(call.option(f"{side}_axes_summed")) for side in "ab"]
    return f"torch.tensordot({', '.join(call.operands)}, {axes})"


def _where(form: str, call: Call) -> str:
    condition = call.operands[0] if is_question(call.kinds[0]) else f"{call.operands[0]} != 0"
    numbers = [number(float(call.option(name, 0))) for name in ("scalar", "x", "y")]
    choices = form.format(*call.operands[1:], *[""] * 2, numbers=numbers)
    return f"torch.where({condition}, {choices})"


def is_question(kind: str) -> bool:
    """Return whether an operator's results are truth values."""
    name = kind.removeprefix("_npi_").removesuffix("_scalar")
    return name in _QUESTIONS or name == "logical_not"


def _norm(call: Call) -> str:
    axes, order = call.option("axis"), call.option("ord", 2)
    axes = axes[0] if isinstance(axes, tuple) and len(axes) == 1 else axes
    is_root = order == 2 and call.option("flag") in (1, -2)  # of all squares
    require(is_root or isinstance(axes, int), "a norm of a matrix")
    require(not isinstance(order, str), f"ord={order!r}")
    return f"torch.linalg.vector_norm({call.operands[0]}, {order}, {axes}{call.keepdim})"


def _pad(call: Call) -> str:
    require(call.option("mode") == "constant", f"mode={call.option('mode')!r}")
    widths = tuple(size for pair in reversed(call.option("pad_width")) for size in pair)
    return f"F.pad({call.operands[0]}, {widths}, value={float(call.option('constant_value', 0))})"


def _average(call: Call) -> str:
    plain = not call.option("weighted", True) and not call.option("returned", False)
    require(plain, "weights")
    return reduction("mean", call, in_numpy=True)


def _in_fp32(translation: Translation, call: Call) -> str:
    """Refuse options that many of these functions have, and then translate."""
    for name in ("dtype", "initial"):
        value = call.option(name)
        require(value in (None, "float32"), f"{name}={value}")
    return translation(call)


_TRANSLATIONS: Mapping[str, Translation] = {
    **{f"_npi_{name}": partial(_function, name) for name in _SAME.split()},
    **{f"_npi_{name}{kind}": partial(_signed, sign) for name, sign in _SIGNS.items()
       for kind in ("", "_scalar")},
    **{f"_npi_r{name}_scalar": partial(_signed, sign, reverse=True)
       for name, sign in _SIGNS.items()},
    **{f"_npi_{name}{kind}": partial(_signed, sign) for name, sign in _QUESTIONS.items()
       for kind in ("", "_scalar")},
    "_npi_mod": partial(_function, "remainder"),
    "_npi_mod_scalar": ARRAYS["_mod_scalar"],
    "_npi_rint": ARRAYS["rint"],
    "_npi_around": lambda call: (
        f"torch.round({call.operands[0]}, decimals={call.option('decimals', 0)})"
    ),
    "_npx_relu": ARRAYS["relu"],
    "_npx_sigmoid": ARRAYS["sigmoid"],
    **{name: partial(reduction, theirs, in_numpy=True) for name, theirs in
       (("_npi_mean", "mean"), ("_np_sum", "sum"), ("_np_max", "amax"), ("_np_min", "amin"),
        ("_np_prod", "prod"), ("_npi_argmax", "argmax"), ("_npi_argmin", "argmin"))},
    "_npi_var": partial(_deviation, "var"),
    "_npi_std": partial(_deviation, "std"),
    "_npi_average": _average,
    "_npi_norm": _norm,
    "_np_cumsum": _cumsum,
    "_np_roll": partial(_method, "roll", "shift axis"),
    "_npi_tril": partial(_method, "tril", "k"),
    "_npi_flip": lambda call: f"{call.operands[0]}.flip({call.axis()})",
    "_np_squeeze": partial(_method, "squeeze", "axis"),
    "_np_moveaxis": partial(_method, "moveaxis", "source destination"),
    "_np_transpose": ARRAYS["transpose"],
    "_np_reshape": _reshape,
    "_npx_reshape": _reshape_by_codes,
    "reshape_like": _reshape_like,
    "_npi_broadcast_to": _broadcast_to,
    "_npi_concatenate": partial(joined, "cat", "axis", 0),
    "_npi_stack": partial(joined, "stack", "axis", 0),
    "_split_v2": _split,
    "_npi_full_like": lambda call: (
        f"torch.full_like({call.operands[0]}, {number(float(call.option('fill_value')))})"
    ),
    "_npi_where": partial(_where, "{0}, {1}"),
    "_npi_where_lscalar": partial(_where, "{numbers[0]}, {0}"),
    "_npi_where_rscalar": partial(_where, "{0}, {numbers[0]}"),
    "_npi_where_scalar2": partial(_where, "{numbers[1]}, {numbers[2]}"),
    "_np_dot": _dot,
    "_npi_matmul": lambda call: f"{call.operands[0]} @ {call.operands[1]}",
    "_npi_einsum": lambda call: (
        f"torch.einsum({call.node.value('subscripts')!r}, {', '.join(call.operands)})"
    ),
    "_npi_tensordot": _tensordot,
    "_npi_tensordot_int_axes": _tensordot,
    "_npi_pad": _pad,
}  # fmt: skip
NUMPY: Mapping[str, Translation] = {
    name: partial(_in_fp32, one) for name, one in _TRANSLATIONS.items()
}
"""The translations by the names of MXNet's operators."""
