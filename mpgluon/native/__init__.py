"""The package's own MXNet operators, in C++: 16-bit formats on a CPU at FP32's speed.

They are compiled once on the machine where they run, for its processor and its MXNet, unless the
installed package carries prebuilt ones. They give the same bits as MXNet's own operators, which do
their work where there is neither. MXNet itself is not changed: it gains operators whose names begin
with ``_mpgluon_``.

:func:`load` finds or compiles them; a cast on a CPU calls it. :func:`available` and :func:`status`
only report. ``python -m mpgluon.native`` tries again what failed before and prints the outcome.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from functools import cache
from typing import Optional

import mxnet as mx
from mxnet.base import _LIB, OpHandle, check_call
from mxnet.ndarray._internal import _imperative_invoke

from mpgluon.native.library import Status, build, status
from mpgluon.numerics.formats import FLOAT16, FloatFormat

__all__ = [
    "Status",
    "available",
    "build",
    "invoke",
    "load",
    "load_library",
    "node_name",
    "operator",
    "status",
]

_logger = logging.getLogger(__name__)
_loaded: list[ctypes.CDLL] = []


def available() -> bool:
    """Whether MXNet has the operators, because :func:`load` has found them in this process."""
    return bool(_loaded)


@cache
def load() -> bool:
    """Give MXNet the operators, and return whether there are any.

    The first call on a machine compiles them, which takes up to a minute; later calls in the same
    process return the same answer. :func:`mpgluon.cast_block` and ``amp.autocast`` call this for a
    network on a CPU. Where there is no library, a warning says why, once on a machine.
    ``MPGLUON_NATIVE`` in the environment may switch the operators off (``0``) or name the level of
    processors that they are compiled for (``x86-64-v3``).
    """
    found = build()
    _logger.log(logging.WARNING if found.is_news else logging.INFO, "%s", found.sentence)
    if found.path is None:
        return False
    try:
        load_library(str(found.path))
    except OSError as error:  # it was removed in the meantime
        _logger.warning("No native operators: %s cannot be loaded: %s", found.path, error)
        return False
    return True


def load_library(path: str) -> None:
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


@cache
def operator(name: str, fmt: FloatFormat) -> str:
    """Return MXNet's name of an operator that rounds to a format, after registering the format.

    Parameters
    ----------
    name : str
        Without the format, such as ``"plain_both"``; operators.cc has the list.
    fmt : FloatFormat
        Any that FP32 can hold. Operators that read or write 16-bit codes take formats with up to 8
        significant bits, or float16.
    """
    _register(fmt.significand_bits, fmt.exponent_bits)
    return f"_mpgluon_{name}_{fmt.significand_bits}_{fmt.exponent_bits}"


@cache
def _register(significand_bits: int, exponent_bits: int) -> None:
    mx.nd.waitall()  # MXNet's tables of operators grow, and operators that run read them
    _loaded[-1].mpgluon_register_format(significand_bits, exponent_bits)


def node_name(name: str, *settings: float) -> str:
    """Return the name of a node whose operator has settings; settings.h says why they are there.

    Parameters
    ----------
    name : str
    settings : float or bool
        Of a convolution or dense layer: whether the gradient of the data is rounded. Of a batch
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
        Of an operator that takes the place of one of MXNet's, that one's.
    """
    values = tuple(map(str, options.values()))
    return _imperative_invoke(_handle(name), operands, tuple(options), values, out, False, False)


@cache
def _handle(name: str) -> int:
    handle = OpHandle()
    check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    number: int = handle.value
    return number
