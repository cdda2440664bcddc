"""MXNet operators of our own, in C++: float16 on a CPU at FP32's speed, bfloat16 without copies.

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

__all__ = ["Status", "available", "invoke", "load", "status"]

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
    ctypes.CDLL(path).mpgluon_register()


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
