"""The package's own MXNet operators, in C++: 16-bit formats on a CPU at FP32's speed.

They are compiled once on the machine where they run, for its processor and its MXNet, unless the
installed package carries prebuilt ones. They give the same bits as MXNet's own operators, which do
their work where there is neither. MXNet itself is not changed: it gains operators whose names begin
with ``_mpgluon_``.

:func:`load` finds or compiles them; a cast on a CPU calls it. :func:`available` and :func:`status`
only report. ``python -m mpgluon.kernels`` tries again what failed before and prints the outcome.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache, wraps
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

from mpgluon.formats.float_format import FLOAT16, FloatFormat
from mpgluon.formats.scaling import SHARED_BY, ScaledOperands
from mpgluon.formats.tensor_core import ACCUMULATIONS
from mpgluon.kernels.calls import (
    function,
    handle_of,
    invoke,
    invoke_as,
    name_of,
    node_name,
    operands_and_options,
)

import mxnet as mx
import numpy as np

if TYPE_CHECKING:
    from mpgluon.kernels.library import Status, build, status

__all__ = [
    "FLAG_DEVICES",
    "FLAG_SLOTS",
    "LAYER",
    "Status",
    "accumulating_operator",
    "available",
    "build",
    "function",
    "handle_of",
    "invoke",
    "invoke_as",
    "load",
    "load_library",
    "name_of",
    "node_name",
    "note_more",
    "operands_and_options",
    "operator",
    "scaled_operator",
    "status",
    "take_flags",
    "take_largest",
    "why_not_loaded",
]

LAYER = "__mpgluon_layer__"
"""The option of an operator that names the slot of the layer whose flags it raises."""

FLAG_SLOTS, FLAG_DEVICES = 2**15, 16  # as flags.h has them

registering = RLock()
"""Held while the library or MXNet's tables of operators grow."""

_OF_THE_LIBRARY = ("Status", "build", "status")  # imported when one of them is first used

_logger = logging.getLogger(__name__)
_loaded: list[ctypes.CDLL] = []
_reasons: list[str] = []  # for which load has found none


def __getattr__(name: str) -> Any:
    if name not in _OF_THE_LIBRARY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("mpgluon.kernels.library"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_THE_LIBRARY})


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is run once for each list of arguments, by one thread at a time."""
    remembered = cache(function)

    @wraps(function)
    def locked(*args: Any) -> Any:
        with registering:
            return remembered(*args)

    return locked


def available() -> bool:
    """Whether MXNet has the operators, because :func:`load` has found them in this process."""
    return bool(_loaded)


@_once
def load() -> bool:
    """Give MXNet the operators, and return whether there are any.

    The first call on a machine compiles them, which takes up to a minute; later calls in the same
    process return the same answer. :func:`mpgluon.cast_block` and ``amp.autocast`` call this for a
    network on a CPU, and a network that :func:`mpgluon.prepare` left in FP32 does when it is first
    called, if it has operators to replace. If they cannot be had, a warning says why, once on a
    machine. ``MPGLUON_NATIVE`` in the environment may switch the operators off (``0``) or name the
    level of processors that they are compiled for (``x86-64-v3``).
    """
    from mpgluon.kernels.library import build  # with the compiler: for a network on a CPU

    outcome = build()
    _logger.log(logging.WARNING if outcome.is_news else logging.INFO, "%s", outcome.sentence)
    if outcome.path is None:
        _reasons.append(outcome.sentence)
        return False
    try:
        load_library(str(outcome.path))
    except OSError as error:  # it was removed in the meantime
        _reasons.append(f"No native operators: {outcome.path} cannot be loaded: {error}")
        _logger.warning("%s", _reasons[-1])
        return False
    return True


def why_not_loaded() -> str:
    """Return the reason for which :func:`load` has found no operators."""
    return _reasons[-1] if _reasons else ""


def load_library(path: str) -> None:
    """Give MXNet the operators of a compiled library.

    Raises
    ------
    OSError
        If it cannot be loaded.
    """
    library = ctypes.CDLL(path)
    mx.nd.waitall()  # as before any change of MXNet's tables of operators
    library.mpgluon_register()
    _loaded.append(library)
    operator("narrow", FLOAT16)


def loaded_library() -> ctypes.CDLL:
    """Return the library; :func:`load` has found it."""
    return _loaded[-1]


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

    Raises
    ------
    ValueError
        If FP32 cannot hold the format.
    """
    suffix = _suffix(fmt)
    _register("format", suffix, _numbers(fmt))
    return f"_mpgluon_{name}{suffix}"


def take_flags(slots: Sequence[int], device_id: int) -> list[list[tuple[int, int]]]:
    """Return the flags of layers on a device, and clear them; does not wait.

    For each slot, of forward and backward passes: 1 for overflow plus 2 for invalid, and the number
    of results that became zero, where they are counted.
    """
    if not _loaded:
        return [[(0, 0), (0, 0)] for _ in slots]
    raised = np.empty((len(slots), 2), np.uint8)
    lost = np.empty((len(slots), 2), np.int64)
    numbers = (ctypes.c_int * len(slots))(*slots)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (raised, lost))
    loaded_library().mpgluon_take_flags(numbers, len(slots), device_id, *pointers)
    return [list(zip(*one)) for one in zip(raised.tolist(), lost.tolist())]


def take_largest(slots: Sequence[int], device_id: int) -> float:
    """Return the largest finite magnitude that backward passes of layers have rounded to float16.

    It is cleared, and 0 where it is not measured; does not wait.
    """
    if not _loaded:
        return 0.0
    numbers = (ctypes.c_int * len(slots))(*slots)
    bits = loaded_library().mpgluon_take_largest(numbers, len(slots), device_id)
    return float(np.int32(bits).view(np.float32))


def note_more(slot: int, *, underflow: bool, largest: bool) -> None:
    """Switch a layer's count of results that become zero, and its largest number, on or off."""
    loaded_library().mpgluon_count_lost(slot, int(underflow))
    loaded_library().mpgluon_measure_largest(slot, int(largest))


@cache
def scaled_operator(
    name: str, between: FloatFormat, scaling: ScaledOperands, history: Optional[int] = None
) -> str:
    """Return MXNet's name of a product that rounds its operands to scaled formats.

    Parameters
    ----------
    name : {"Convolution", "FullyConnected"}
        It takes the arguments of the replaced operator.
    between : FloatFormat
        Format of the operands and results, which are FP32 arrays. It has an operator on codes too:
        its name begins with ``_mpgluon_scaled_codes``.
    scaling : ScaledOperands
    history : int, optional
        The number of the ``ScaleHistory`` from which its scales follow; without one they
        follow from the values that they scale.
    """
    formats = (between, scaling.value, scaling.gradient)
    number = -1 if history is None else history
    suffix = "".join(map(_suffix, formats)) + f"_{scaling.shared_by}" + f"_{number}" * (number >= 0)
    sharing = list(SHARED_BY).index(scaling.shared_by)
    _register("scaled", suffix, *map(_numbers, formats), sharing, number)
    return f"_mpgluon_scaled{suffix}_{name}"


def _suffix(fmt: FloatFormat) -> str:
    """Return the part of the names of a format's operators that no other format has."""
    if not fmt.fits_float32:
        raise ValueError(
            f"operators compute in FP32, which cannot hold every {fmt} number; use a format with "
            "at most 24 significant bits and 8 exponent bits (7 with finite_only)"
        )
    suffix = f"_{fmt.significand_bits}_{fmt.exponent_bits}"
    flags = {"finite": fmt.finite_only, "saturating": fmt.saturates, "without_nan": not fmt.has_nan}
    return suffix + "".join(f"_{flag}" for flag, is_set in flags.items() if is_set)


def _numbers(fmt: FloatFormat) -> tuple[float, ...]:
    """Return a format's numbers for the native library, as format.h takes them."""
    return fmt.significand_bits, fmt.min_exponent, fmt.max, fmt.overflow


@_once
def _register(kind: str, *arguments: Union[str, int, tuple[float, ...]]) -> None:
    """Register operators of a kind in the library; tuples are the numbers of formats."""
    mx.nd.waitall()  # MXNet's tables of operators grow, and operators that run read them
    getattr(loaded_library(), f"mpgluon_register_{kind}")(*map(_as_c, arguments))


def _as_c(argument: Union[str, int, tuple[float, ...]]) -> Any:
    if isinstance(argument, tuple):
        return (ctypes.c_float * 4)(*argument)
    return argument.encode() if isinstance(argument, str) else argument


@cache
def accumulating_operator(name: str, fmt: FloatFormat, accumulation: str) -> str:
    """Return MXNet's name of a product that is summed as in a Tensor Core.

    Parameters
    ----------
    name : str
        ``"on_values_"`` and a name of MXNet's, for FP32 arrays of numbers of the format:
        ``Convolution``, ``FullyConnected``, ``dot`` or ``batch_dot``. Without that, the name of an
        operator on codes, such as ``"convolution"``.
    fmt : {FLOAT16, BFLOAT16}
    accumulation : str
        A name in :data:`mpgluon.formats.tensor_core.ACCUMULATIONS`.
    """
    numbers = (fmt.significand_bits, fmt.exponent_bits, *ACCUMULATIONS[accumulation])
    _register("accumulation", _numbers(fmt), *numbers)
    return "_".join(map(str, ("_mpgluon", name, *numbers)))
