"""The stand-in for ``F`` that a block's ``hybrid_forward`` receives.

It has everything that ``mx.nd`` or ``mx.sym`` has, under the same names; its operators
follow the operator table in the arithmetic of one compute format. So do ``x + y`` and
``x.mean()`` of the arrays that it returns. ``mx.nd`` and ``mx.sym`` themselves are not changed.
"""

from __future__ import annotations

from functools import cache, wraps
from numbers import Number
from types import ModuleType
from typing import Any, Callable, Union

from mpgluon.cast.arithmetic import Arithmetic, arithmetic_of, emulated
from mpgluon.cast.arrays import FormatArray, FormatSymbol, GridArray, number_in_float16
from mpgluon.cast.calls import AT_WORK, LOOPS, OperatorCall, is_inside, rule_here, ungoverned
from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import FLOAT16, FloatFormat
from mpgluon.graph.nan import keeping_nan
from mpgluon.graph.operators import Rule
from mpgluon.kernels.dtypes import is_array

import mxnet as mx
from mxnet.symbol import Symbol

__all__ = ["Fp32Namespace", "NumPyInterfaceError", "OperatorNamespace", "namespace_of"]


class NumPyInterfaceError(PrecisionError):
    """A cast network has used ``F.np`` or ``F.npx``."""


RUN_BODIES = frozenset({*LOOPS, "contrib.cond"})
"""Operators that call functions of the user's."""


class OperatorNamespace:
    """``mx.nd`` or ``mx.sym`` (or a part of it, such as ``F.contrib``) in another arithmetic.

    Parameters
    ----------
    module : module
        The namespace that it replaces.
    arithmetic : Arithmetic
        Runs operators by the rules of the table.
    prefix : str
        The path of ``module`` below ``F``, such as ``"contrib."``.
    """

    def __init__(self, module: ModuleType, arithmetic: Arithmetic, prefix: str = "") -> None:
        self.module = module
        self._arithmetic = arithmetic
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.module, name)
        if name in ("np", "npx"):
            raise NumPyInterfaceError(
                f"a cast network computes with mx.nd and mx.sym operators, received a call of "
                f"F.{name}, MXNet's NumPy interface; keep that block in FP32 with keep_fp32"
            )
        if isinstance(member, ModuleType):
            member = OperatorNamespace(member, self._arithmetic, f"{self._prefix}{name}.")
        elif callable(member) and not isinstance(member, type):
            member = self._wrap(self._prefix + name, member)
        setattr(self, name, member)  # so that the next access does not come here
        return member

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        arithmetic, function = self._arithmetic, keeping_nan(name, function)

        @wraps(function)
        def operator(*args: Any, **kwargs: Any) -> Any:
            call = OperatorCall(name, function, args, kwargs)
            if name in RUN_BODIES:
                return arithmetic.apply(Rule.OTHER, call)
            with ungoverned():
                return arithmetic.apply(rule_here(name, kwargs), call)

        return operator


class Fp32Namespace(OperatorNamespace):
    """``mx.nd`` for a block of a cast network that computes in FP32: its operators keep NaN."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return keeping_nan(name, getattr(self.module, name))


@cache
def namespace_of(module: ModuleType, arithmetic: Arithmetic) -> OperatorNamespace:
    """Return the stand-in for a module, the same object each time."""
    return OperatorNamespace(module, arithmetic)


_COMPARISONS = {
    **{"__eq__": "__eq__", "__ne__": "__ne__"},
    **{"__lt__": "__gt__", "__gt__": "__lt__", "__le__": "__ge__", "__ge__": "__le__"},
}
"""Each comparison, and the one with its operands swapped."""
_BINARY = {
    f"__{reflected}{name}__": operator
    for reflected in ("", "r")
    for name, operator in {
        "add": "broadcast_add",
        "sub": "broadcast_sub",
        "mul": "broadcast_mul",
        "truediv": "broadcast_div",
        "mod": "broadcast_mod",
        "pow": "broadcast_power",
    }.items()
}
_REFLECTED = frozenset(name for name in _BINARY if name.startswith("__r"))
_UNARY = {"__neg__": "negative", "__abs__": "abs"}
# With a number, they have the bits of MXNet's float16 kernels where FP32 computes and one rounding
# ends them, which raises flags.
_ROUNDED_ONCE = frozenset(
    ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__")
)
_FLUENT = [name for name in dir(Symbol) if name[0] != "_" and callable(getattr(mx.sym, name, None))]


def _method(base: type, method_name: str, operator: str) -> Callable[..., Any]:
    plain = getattr(base, method_name)
    # Python calls this for "other + self" if self's class derives from other's. MXNet's own method
    # would swap two arrays, and the order in which gradients are added follows the operands'.
    unreflected = getattr(base, f"__{method_name[3:]}", None) if method_name in _REFLECTED else None
    is_rounded_once = base is mx.nd.NDArray and method_name in _ROUNDED_ONCE

    @wraps(plain)
    def method(self: Union[FormatArray, FormatSymbol], *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.format, FloatFormat) and not is_inside():
            return plain(self, *args, **kwargs)
        rule = rule_here(operator)
        call = OperatorCall(operator, plain, (self, *args), kwargs)
        if unreflected is not None and is_array(args[0]):
            call = call._replace(function=unreflected, args=(args[0], self))
        if isinstance(self.format, FloatFormat):
            arithmetic: Arithmetic = emulated(self.format)
        else:
            has_number = rule is Rule.FOLLOW and args and isinstance(args[0], Number)
            if has_number and not call.loses_number(FLOAT16):
                if is_rounded_once:
                    call = call._replace(args=(self, number_in_float16(args[0])))
                else:
                    rule = Rule.MOVE  # MXNet's kernel rounds the number too, as on a GPU
            is_narrow = self.format in ("float16", "bfloat16")  # others follow the block at work
            here = None if is_narrow else vars(AT_WORK).get("arithmetic")
            dtype = self.format if is_narrow else "float16"
            arithmetic = here or arithmetic_of(dtype, mx.current_context().device_type)
        with ungoverned():
            result = arithmetic.apply(rule, call)
        observer = vars(AT_WORK).get("observer")
        if observer is not None:
            observer(call, result)
        return result

    return method


def _swapping(compare: Callable[..., Any], swapped: str) -> Callable[..., Any]:
    """Return a comparison of symbols with the operands in the order of an imperative run.

    For an FP32 array and one of another format, Python asks the latter: its class derives from
    MXNet's. The order decides in which order gradients of earlier values are added.
    """

    @wraps(compare)
    def method(self: FormatSymbol, other: Any) -> Any:
        if isinstance(other, FormatSymbol) and self.format == "float32" != other.format:
            return getattr(other, swapped)(self)
        return compare(self, other)

    return method


def _in_place(name: str) -> Callable[..., Any]:
    def method(self: GridArray, other: Any) -> GridArray:
        self[:] = getattr(self, name)(other)
        return self

    return method


for _class, _base in ((FormatArray, mx.nd.NDArray), (FormatSymbol, Symbol)):
    for _name, _operator in (_BINARY | _UNARY).items():
        if _base is Symbol and _operator == "broadcast_add":
            _operator = "elemwise_add"  # symbols do not broadcast
        if hasattr(_base, _name):
            setattr(_class, _name, _method(_base, _name, _operator))
    for _name in _COMPARISONS:
        setattr(_class, _name, _method(_base, _name, "broadcast_equal"))
    for _name in _FLUENT:
        setattr(_class, _name, _method(_base, _name, _name))
for _name, _swapped in _COMPARISONS.items():
    setattr(FormatSymbol, _name, _swapping(getattr(FormatSymbol, _name), _swapped))
for _name in _BINARY:
    if hasattr(mx.nd.NDArray, f"__i{_name[2:]}"):
        setattr(GridArray, f"__i{_name[2:]}", _in_place(_name))
