"""MXNet operators of our own, in C++: 16-bit formats on a CPU at FP32's speed.

They are compiled on the machine where they run, once, for its processor and its MXNet, unless the
installed package carries prebuilt ones, and give the same bits as MXNet's own operators do, which
take their place where there is neither. Nothing of MXNet is changed: it gains operators whose names
begin with ``_mpgluon_``.

``status()`` says which library is used; ``python -m mpgluon.native`` tries again what failed before
and says how that went.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Optional

import mxnet as mx
from mxnet.base import _LIB, OpHandle, check_call
from mxnet.ndarray._internal import _imperative_invoke

from mpgluon.native.library import Status, status
from mpgluon.numerics.formats import FLOAT16, FloatFormat

__all__ = ["Status", "available", "invoke", "load", "operator", "status"]

_logger = logging.getLogger(__name__)


@cache
def available() -> bool:
    """Whether the operators are there; the first call compiles them if that was not done before.

    Where they are not, a warning says why, once on a machine. ``MPGLUON_NATIVE`` in the environment
    may switch them off (``0``) or name the level that they are compiled for (``x86-64-v3``).
    """
    found = status()
    _logger.log(logging.WARNING if found.is_news else logging.INFO, "%s", found.sentence)
    if found.path is None:
        return False
    try:
        load(str(found.path))
    except OSError as error:  # somebody took it away since then
        _logger.warning("No native operators: %s cannot be loaded: %s", found.path, error)
        return False
    return True


def load(path: str) -> None:
    """Give MXNet the operators of a compiled library.

    Raises
    ------
    OSError
        If it cannot be loaded.
    """
    library = ctypes.CDLL(path)
    library.mpgluon_register()
    _loaded.append(library)
    _register(FLOAT16.significand_bits, FLOAT16.exponent_bits)


_loaded: list[ctypes.CDLL] = []


@cache
def operator(name: str, fmt: FloatFormat) -> str:
    """Return the name under which MXNet has an operator that rounds to a format.

    Parameters
    ----------
    name : str
        Without the format, such as ``"round_both"``; operators.cc has the list.
    fmt : FloatFormat
        Any that FP32 can hold. Those that read or write 16-bit codes take formats with up to 8
        significant bits, or float16.
    """
    _register(fmt.significand_bits, fmt.exponent_bits)
    return f"_mpgluon_{name}_{fmt.significand_bits}_{fmt.exponent_bits}"


@cache
def _register(significand_bits: int, exponent_bits: int) -> None:
    mx.nd.waitall()  # MXNet's tables of operators grow, and operators that run read them
    _loaded[-1].mpgluon_register_format(significand_bits, exponent_bits)


def invoke(
    name: str, *operands: mx.nd.NDArray, out: Optional[mx.nd.NDArray] = None
) -> mx.nd.NDArray:
    """Call one of the operators on arrays on a CPU; does not wait.

    Parameters
    ----------
    name : str
        Such as ``"_mpgluon_narrow"``.
    operands : NDArray
        As many as it takes, of the formats that it takes.
    out : NDArray, optional
        Where to write the result.
    """
    return _imperative_invoke(_handle(name), operands, (), (), out, False, False)


@cache
def _handle(name: str) -> int:
    handle = OpHandle()
    check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    number: int = handle.value
    return number
