"""Calling MXNet's operators by their names, the package's own among them."""

from __future__ import annotations

import ctypes
import inspect
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Callable, Optional

import mxnet as mx
from mxnet.base import _LIB, OpHandle, _Null, check_call
from mxnet.ndarray._internal import _imperative_invoke
from mxnet.ndarray.register import _make_ndarray_function
from mxnet.symbol.register import _make_symbol_function

__all__ = [
    "function",
    "handle_of",
    "invoke",
    "invoke_as",
    "name_of",
    "node_name",
    "operands_and_options",
]

_signature = cache(inspect.signature)


@cache
def function(name: str, *, of_symbols: bool, in_numpy: bool = False) -> Callable[..., Any]:
    """Return a function of arrays, or of symbols, for one of the operators, as ``mx.nd`` has.

    With ``in_numpy``, it takes and returns arrays or symbols of MXNet's NumPy interface. Either is
    possible for every operator.
    """
    make = _make_symbol_function if of_symbols else _make_ndarray_function
    # MXNet tells the interfaces apart by the prefix.
    called = f"_npx_{name}" if in_numpy else name.replace("_np", "np", 1)
    made_function: Callable[..., Any] = make(OpHandle(handle_of(name)), called, called)
    return made_function


def node_name(name: str, *settings: float) -> str:
    """Return the name of a node whose operator has settings; settings.h says why they are there.

    Parameters
    ----------
    name : str
    settings : float or bool
        For a convolution or dense layer: whether the gradient of the data is rounded. For a batch
        normalization: eps, momentum, fix_gamma, use_global_stats.
    """
    return name + "".join(f"|{struct.pack('>d', setting).hex()}" for setting in settings)


def invoke(
    name: str, *operands: mx.nd.NDArray, out: Optional[mx.nd.NDArray] = None, **options: float
) -> mx.nd.NDArray:
    """Call one of the operators on arrays on a CPU; does not wait.

    Parameters
    ----------
    name : str
        Such as ``"_mpgluon_narrow_11_5"``.
    operands : NDArray
        As many as it takes, of the dtypes that it takes.
    out : NDArray, optional
        Where to write the result.
    **options : float
        Options of the MXNet operator that this one replaces.
    """
    values = tuple(map(str, options.values()))
    return _imperative_invoke(handle_of(name), operands, tuple(options), values, out, False, False)


def invoke_as(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> mx.nd.NDArray:
    """Call one of the operators with the arguments for one of MXNet's functions.

    Parameters
    ----------
    name : str
        Name of the operator that replaces ``function``.
    function : callable
        Such as ``mx.nd.Convolution``.
    args, kwargs
        Its arguments.
    """
    operands, options = operands_and_options(function, args, kwargs)
    return invoke(name, *operands, **options)


def operands_and_options(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[mx.nd.NDArray], dict[str, Any]]:
    """Return the arrays of a call of one of MXNet's functions, in its order, and its options.

    Parameters
    ----------
    function : callable
        Such as ``mx.nd.Convolution``.
    args, kwargs
        Its arguments; ``out`` would be taken for one of the arrays.
    """
    arguments = _signature(function).bind(*args, **kwargs).arguments
    values = [
        v for value in arguments.values() for v in (value if type(value) is tuple else [value])
    ]
    operands = [value for value in values if isinstance(value, mx.nd.NDArray)]
    options = {
        key: value
        for key, value in {**arguments, **arguments.pop("kwargs", {})}.items()
        if not isinstance(value, (mx.nd.NDArray, type(None), type(_Null))) and key != "name"
    }
    return operands, options


@cache
def handle_of(name: str) -> int:
    """Return MXNet's handle of an operator."""
    handle = OpHandle()
    check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    number: int = handle.value
    return number


@cache
def name_of(handle: int) -> str:
    """Return the name in a graph of the operator with a handle, which may have other names too."""
    name = ctypes.c_char_p()
    check_call(_LIB.MXSymbolGetAtomicSymbolName(OpHandle(handle), ctypes.byref(name)))
    return (name.value or b"").decode()
