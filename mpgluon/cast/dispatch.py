"""Operators of a cast network that are called in another way than through its ``F``.

Each function of ``mx.nd``, ``mx.np`` and ``mx.npx``, and each method of their arrays, ends in
``mxnet.ndarray.register._imperative_invoke``, which receives an operator and its operands;
functions of ``mx.sym`` and methods of symbols end in ``mxnet.symbol.register._symbol_creator``, and
``mx.np.tensordot`` in ``mxnet.ndarray.numpy._api_internal.tensordot``. While a block of a cast
network computes, or one that is observed, these three are exchanged, in the whole process. Each
replacement looks first whether this thread computes such a block: there, the operator follows the
operator table; in any other thread, MXNet's function is called with the same arguments. When the
last such block ends, also by an error, the three are MXNet's own again.

The arithmetic itself is ``mx.nd``'s: operands of the NumPy interface are taken out of it
without a copy, and results are put back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Optional

from mpgluon import kernels
from mpgluon.cast.arithmetic import Arithmetic
from mpgluon.cast.arrays import format_of, mark, number_in_float16
from mpgluon.cast.calls import (
    AT_WORK,
    ROUNDING_RULES,
    OperatorCall,
    at_work,
    each_output,
    rule_here,
    settled,
    ungoverned,
)
from mpgluon.cast.numpy_arrays import as_nd, as_np
from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import FLOAT16
from mpgluon.graph.nan import KEPT_NAN, keeping_nan
from mpgluon.graph.operators import Rule, dtype_in_numpy, lost_numbers, name_in_f
from mpgluon.kernels.dtypes import Array, cast, dtype_name

import mxnet as mx
import mxnet.ndarray.numpy._op as numpy_functions
from mxnet.ndarray import register as array_register
from mxnet.ndarray.register import _imperative_invoke
from mxnet.symbol import Symbol
from mxnet.symbol import register as symbol_register
from mxnet.symbol.register import _symbol_creator

__all__ = ["FP32_OPERATORS", "PLAIN_OPERATORS", "governed"]

# Called as functions of F with their options, since others may take their place.
_BY_FUNCTION = frozenset({
    *("Convolution", "Deconvolution", "FullyConnected", "batch_dot"),
    *KEPT_NAN,
})  # fmt: skip
# Write their operands, or a part of them, to an array, in its format.
_WRITING = frozenset({
    *("_copyto", "_slice_assign", "_scatter_set_nd"),
    *("_npi_boolean_mask_assign_scalar", "_npi_boolean_mask_assign_tensor"),
})  # fmt: skip
# Python's arithmetic, by the names in F; a number in it is rounded to float16 by a float16 kernel.
_ARITHMETIC = frozenset(f"broadcast_{name}" for name in ("add", "sub", "mul", "div", "mod"))
# In a graph MXNet no longer knows the shapes of these operators' operands. The axis on which they
# join them, and by the number of axes that operands have: where they get new ones.
_STACKS: dict[str, tuple[int, dict[int, tuple[int, ...]]]] = {
    "_npi_vstack": (0, {1: (0,)}),
    "_npi_hstack": (1, {}),
    "_npi_column_stack": (1, {1: (1,)}),
    "_npi_dstack": (2, {1: (0, 2), 2: (2,)}),
}
_LOOPS = frozenset({"_foreach", "_while_loop", "_cond"})
_DROPPING = frozenset({"Dropout", "RNN"})  # with the probability p
_numpy_library = numpy_functions._api_internal  # another door, of one operator
_tensordot = _numpy_library.tensordot


class _Fp32Operators(Arithmetic):
    """MXNet's operators as they are, for a block that is kept in FP32."""

    def compute(self, call: OperatorCall) -> Any:
        return mark(call.run(), None)

    normalize = follow = move = compute

    def apply(self, _rule: Rule, call: OperatorCall) -> Any:
        """Run a call, whatever the rule."""
        return self.compute(call)


FP32_OPERATORS = _Fp32Operators()
"""For a block of a cast network that computes in FP32: its operators keep NaN."""
PLAIN_OPERATORS = _Fp32Operators()
"""For a block that is not cast, to observe it: its operators are MXNet's own."""


@contextmanager
def governed(**about: Any) -> Iterator[None]:
    """Make operators that this thread calls by name follow the table, as :func:`at_work` says.

    Without an ``arithmetic``, they are MXNet's own.
    """
    with _INSTALLED, at_work(**about):
        yield


class _Installed:
    """The exchange of MXNet's three functions, while at least one thread needs it."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                array_register._imperative_invoke = _invoke
                symbol_register._symbol_creator = _create
                _numpy_library.tensordot = _tensordot_of_arrays

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                array_register._imperative_invoke = _imperative_invoke
                symbol_register._symbol_creator = _symbol_creator
                _numpy_library.tensordot = _tensordot


_INSTALLED = _Installed()


def _invoke(
    handle: int,
    arrays: Sequence[Any],
    keys: Sequence[str],
    values: Sequence[Any],
    out: Any,
    is_numpy: bool,
    returns_list: bool,
) -> Any:
    """Run an operator on arrays, in the place of MXNet's function."""
    if "drops_nothing" in vars(AT_WORK) and kernels.name_of(handle) in _DROPPING:
        options = {**dict(zip(keys, values)), "p": 0}
        keys, values = list(options), list(options.values())
    arithmetic = vars(AT_WORK).get("arithmetic")
    if arithmetic is None or not arrays:
        return _imperative_invoke(handle, arrays, keys, values, out, is_numpy, returns_list)

    def run(*operands: Any, **_: Any) -> Any:
        return _imperative_invoke(handle, operands, keys, values, None, False, returns_list)

    name, legacy = kernels.name_of(handle), as_nd(arrays)
    if name in _STACKS and arrays[0].ndim and out is None:
        name, run = "concat", partial(_stacked, mx.nd, name, arrays[0].ndim)
    options = dict(zip(keys, values))
    values = _values_received(name, options, legacy)
    if out is not None and name in _WRITING:
        with ungoverned():
            dtype = str(dtype_name(out))
            if dtype in ("float16", "float32"):
                legacy = [cast(array, dtype) for array in legacy]
            _imperative_invoke(handle, legacy, keys, values, out, False, False)
        if name == "_copyto" and type(out) is mx.np.ndarray:
            out.__class__ = type(arrays[0])
        return out
    result = _apply(arithmetic, name, mx.nd, run, legacy, {}, options, is_numpy)
    if out is None:
        return as_np(result) if is_numpy else result
    for target, value in zip(_as_list(out), _as_list(result)):
        with ungoverned():
            value = value.astype(target.dtype)
            target[:] = as_np(value) if is_numpy else value
    return out


def _create(
    handle: int,
    args: Optional[Sequence[Any]],
    operands: dict[str, Any],
    keys: Sequence[str],
    values: Sequence[Any],
    name: str,
    is_numpy: bool,
    returns_list: bool = False,
) -> Any:
    """Make the symbol of an operator, in the place of MXNet's function."""
    arithmetic = vars(AT_WORK).get("arithmetic")
    if arithmetic is None or not (args or operands):
        return _symbol_creator(handle, args, operands, keys, values, name, is_numpy, returns_list)

    def run(*args: Any, **operands: Any) -> Any:
        return _symbol_creator(handle, args, operands, keys, values, name, False, returns_list)

    operator = kernels.name_of(handle)
    if operator in _LOOPS and not (is_numpy or mx.util.is_np_array()):
        return run(*(args or ()), **operands)
    if operator in _LOOPS:
        raise PrecisionError(
            f"{name} is a loop or a branch of MXNet's NumPy interface, which a hybridized cast "
            "network cannot contain; do not hybridize its block, or keep it in FP32 with keep_fp32"
        )
    have_one_shape = vars(AT_WORK).get("have_one_shape")
    if operator == "_npi_add" and have_one_shape and have_one_shape(*operands.values()):
        operator, run = "elemwise_add", partial(_add, name)  # which has native operators
    axes_of = vars(AT_WORK).get("axes_of")
    axes = axes_of(args[0]) if axes_of and args and operator in _STACKS else 0
    if axes:
        operator, run = "concat", partial(_stacked, mx.sym, operator, axes, name=name)
    options = dict(zip(keys, values))
    legacy = {key: as_nd(operand) for key, operand in operands.items()}
    values = _values_received(operator, options, legacy.values())
    args, options["name"] = as_nd(args or ()), name
    result = _apply(arithmetic, operator, mx.sym, run, args, legacy, options, is_numpy)
    if not is_numpy:
        return result
    result = as_np(each_output(result))
    return [result] if returns_list and not isinstance(result, list) else result


def _values_received(name: str, options: Mapping[str, Any], operands: Iterable[Array]) -> list[Any]:
    """Return the values of options; a number that a float16 operand meets is rounded."""
    is_arithmetic = name.endswith("_scalar") and name_in_f(name) in _ARITHMETIC
    is_lost = is_arithmetic and lost_numbers(FLOAT16, name, options)  # FP32 computes with it
    if is_arithmetic and not is_lost and "float16" in map(format_of, operands):
        options = {**options, "scalar": number_in_float16(options["scalar"])}
    return list(options.values())


def _add(name: str, **operands: Symbol) -> Symbol:
    return mx.sym.elemwise_add(*operands.values(), name=name)


def _stacked(functions: Any, operator: str, axes: int, *operands: Array, **name: str) -> Array:
    axis, new = _STACKS[operator][0], _STACKS[operator][1].get(axes, ())
    for place in new:
        operands = tuple(functions.expand_dims(one, axis=place) for one in operands)
    return functions.concat(*operands, dim=min(axis, axes + len(new) - 1), **name)


def _tensordot_of_arrays(a: Any, b: Any, axes: Any) -> Any:
    """Run ``mx.np.tensordot``, in the place of MXNet's function, as its symbols do."""
    if vars(AT_WORK).get("arithmetic") is None:
        return _tensordot(a, b, axes)
    operator = mx.nd.numpy._internal  # generated functions of the registry
    if isinstance(axes, int):
        return operator.tensordot_int_axes(a, b, axes)
    first, second = ((one,) if isinstance(one, int) else tuple(one) for one in axes)
    return operator.tensordot(a, b, first, second)


def _apply(
    arithmetic: Arithmetic,
    name: str,
    namespace: Any,
    run: Any,
    args: Sequence[Any],
    operands: dict[str, Any],
    options: dict[str, Any],
    is_numpy: bool,
) -> Any:
    """Run an operator on operands of ``mx.nd`` or ``mx.sym``, by its rule."""
    in_f = name_in_f(name)
    if name in _BY_FUNCTION and arithmetic is not PLAIN_OPERATORS:
        run = keeping_nan(name, getattr(namespace, name))
        operands = {**operands, **options}
    dtype = dtype_in_numpy(in_f) if is_numpy else None
    rule = Rule.FLOAT32 if dtype else rule_here(in_f, options)
    call = OperatorCall(in_f, run, tuple(args), operands, options)
    with ungoverned():
        result = arithmetic.apply(rule, call)
        dtype = dtype or options.get("dtype")
        if dtype not in (None, "None") and rule not in ROUNDING_RULES:
            result = settled(result, str(dtype))
        if "observer" in vars(AT_WORK):
            AT_WORK.observer(call, result)
        return result


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
