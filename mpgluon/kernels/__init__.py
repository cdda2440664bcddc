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
import inspect
import logging
import struct
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, wraps
from itertools import count
from threading import RLock
from typing import Any, Callable, ClassVar, Optional

from mpgluon.formats.float_format import FLOAT16, FloatFormat
from mpgluon.formats.scaling import SHARED_BY, ScaledOperands
from mpgluon.formats.tensor_core import ACCUMULATIONS
from mpgluon.kernels.library import Status, build, status

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet.base import _LIB, OpHandle, _Null, check_call
from mxnet.ndarray._internal import _imperative_invoke
from mxnet.ndarray.register import _make_ndarray_function
from mxnet.symbol.register import _make_symbol_function

__all__ = [
    "FLAG_DEVICES",
    "FLAG_SLOTS",
    "LAYER",
    "ScaleHistories",
    "ScaleHistory",
    "Status",
    "accumulating_operator",
    "available",
    "build",
    "count_underflow",
    "function",
    "invoke",
    "invoke_as",
    "load",
    "load_library",
    "node_name",
    "operands_and_options",
    "operator",
    "scaled_operator",
    "status",
    "take_flags",
]

LAYER = "__mpgluon_layer__"
"""The option of an operator that names the slot of the layer whose flags it raises."""

FLAG_SLOTS, FLAG_DEVICES = 2**15, 16  # as flags.h has them

_logger = logging.getLogger(__name__)
_loaded: list[ctypes.CDLL] = []
_registering = RLock()  # the library and MXNet's tables of operators grow by one thread at a time


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is run once for each list of arguments, by one thread at a time."""
    known = cache(function)

    @wraps(function)
    def locked(*args: Any) -> Any:
        with _registering:
            return known(*args)

    return locked


def available() -> bool:
    """Whether MXNet has the operators, because :func:`load` has found them in this process."""
    return bool(_loaded)


@_once
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
    operator("narrow", FLOAT16)


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
    _register(suffix, _numbers(fmt))
    return f"_mpgluon_{name}{suffix}"


class ScaleHistory:
    """The largest absolute values of one product's operands in earlier steps.

    Its operators note them there and make scales of them. A step ends where a forward pass
    follows a backward pass.

    Parameters
    ----------
    steps : int
        How many are kept.

    Attributes
    ----------
    number : int
        By which the library knows it.
    shape : tuple of int
        (3, steps): of data, weight and gradient, oldest first, 0 where nothing is known.
    """

    _unused: ClassVar[dict[int, list[int]]] = defaultdict(list)  # by steps

    def __init__(self, steps: int) -> None:
        self.shape = (3, steps)
        mx.nd.waitall()
        unused = self._unused[steps]
        with _registering:
            if not unused:
                unused.append(_loaded[-1].mpgluon_make_history(steps))
            self.number = unused.pop()
        _loaded[-1].mpgluon_clear_history(self.number)
        weakref.finalize(self, unused.append, self.number)

    def values(self, device_id: int) -> npt.NDArray[np.float32]:
        """Return the values of a device; those of a step without a backward pass are not in it."""
        made = np.empty(self.shape, np.float32)
        mx.nd.waitall()
        _loaded[-1].mpgluon_read_history(self.number, device_id, ctypes.c_void_p(made.ctypes.data))
        return made

    def set_values(self, device_id: int, values: npt.NDArray[np.float32]) -> None:
        """Set what :meth:`values` returns, and discard the values of a step in progress."""
        given = np.array(values, np.float32, order="C").reshape(self.shape)
        mx.nd.waitall()
        address = ctypes.c_void_p(given.ctypes.data)
        _loaded[-1].mpgluon_write_history(self.number, device_id, address)


class ScaleHistories(list[ScaleHistory]):
    """The histories of a block's products, in the order of its forward pass; none for 0 steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def values(self, device_ids: Sequence[int]) -> tuple[int, list[dict[int, npt.NDArray[Any]]]]:
        """Return the number of steps, and the values of each history by device."""
        return self.steps, [{one: h.values(one) for one in device_ids} for h in self]

    @classmethod
    def of(cls, steps: int, values: Sequence[Mapping[int, npt.NDArray[Any]]]) -> ScaleHistories:
        """Return histories with values; none without the native operators, which alone use them."""
        made = cls(steps)
        for of_devices in values if available() else ():
            made.append(ScaleHistory(steps))
            for device_id, one in of_devices.items():
                made[-1].set_values(device_id, one)
        return made

    def in_turn(self) -> Iterator[Optional[int]]:
        """Yield their numbers without end, and make what is missing; ``None`` for 0 steps."""
        for product in count():
            if self.steps and product == len(self):
                self.append(ScaleHistory(self.steps))
            yield self[product].number if self.steps else None


def take_flags(slots: Sequence[int], device_id: int) -> list[list[tuple[int, int]]]:
    """Return the flags that layers have raised on a device, and clear them; does not wait.

    Returns
    -------
    list of [(int, int), (int, int)]
        For each slot, of forward and backward passes: 1 for overflow plus 2 for invalid, and the
        number of results that became zero, where they are counted.
    """
    if not _loaded:
        return [[(0, 0), (0, 0)] for _ in slots]
    raised = np.empty((len(slots), 2), np.uint8)
    lost = np.empty((len(slots), 2), np.int64)
    numbers = (ctypes.c_int * len(slots))(*slots)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (raised, lost))
    _loaded[-1].mpgluon_take_flags(numbers, len(slots), device_id, *pointers)
    return [list(zip(*one)) for one in zip(raised.tolist(), lost.tolist())]


def count_underflow(slot: int, counts: bool) -> None:
    """Let a layer count its results that become zero, or not."""
    _loaded[-1].mpgluon_count_lost(slot, int(counts))


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
        The number of the :class:`ScaleHistory` from which its scales follow; without one they
        follow from the values that they scale.
    """
    formats = (between, scaling.value, scaling.gradient)
    number = -1 if history is None else history
    suffix = "".join(map(_suffix, formats)) + f"_{scaling.shared_by}" + f"_{number}" * (number >= 0)
    sharing = list(SHARED_BY).index(scaling.shared_by)
    _register_scaled(suffix, sharing, number, *map(_numbers, formats))
    return f"_mpgluon_scaled{suffix}_{name}"


@cache
def function(name: str, *, of_symbols: bool) -> Callable[..., Any]:
    """Return a function of arrays, or of symbols, for one of the operators, as ``mx.nd`` has."""
    make = _make_symbol_function if of_symbols else _make_ndarray_function
    made: Callable[..., Any] = make(OpHandle(_handle(name)), name, name)
    return made


def _suffix(fmt: FloatFormat) -> str:
    """Return what tells a format's operators from those of others."""
    if not fmt.fits_float32:
        raise ValueError(
            f"operators compute in FP32, which cannot hold every {fmt} number; use a format with "
            "at most 24 significant bits and 8 exponent bits (7 with finite_only)"
        )
    suffix = f"_{fmt.significand_bits}_{fmt.exponent_bits}"
    flags = {"finite": fmt.finite_only, "saturating": fmt.saturates, "without_nan": not fmt.has_nan}
    return suffix + "".join(f"_{flag}" for flag, is_set in flags.items() if is_set)


def _numbers(fmt: FloatFormat) -> tuple[float, ...]:
    """Return what the native library knows of a format, as format.h takes it."""
    return fmt.significand_bits, fmt.min_exponent, fmt.max, fmt.overflow


@_once
def _register(suffix: str, numbers: tuple[float, ...]) -> None:
    mx.nd.waitall()  # MXNet's tables of operators grow, and operators that run read them
    _loaded[-1].mpgluon_register_format(suffix.encode(), (ctypes.c_float * 4)(*numbers))


@_once
def _register_scaled(suffix: str, sharing: int, history: int, *formats: tuple[float, ...]) -> None:
    mx.nd.waitall()
    numbers = [(ctypes.c_float * 4)(*one) for one in formats]
    _loaded[-1].mpgluon_register_scaled(suffix.encode(), *numbers, sharing, history)


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
    _register_accumulation(_numbers(fmt), *numbers)
    return "_".join(map(str, ("_mpgluon", name, *numbers)))


@_once
def _register_accumulation(fmt: tuple[float, ...], *numbers: int) -> None:
    mx.nd.waitall()
    _loaded[-1].mpgluon_register_accumulation((ctypes.c_float * 4)(*fmt), *numbers)


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
    return _imperative_invoke(_handle(name), operands, tuple(options), values, out, False, False)


def invoke_as(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> mx.nd.NDArray:
    """Call one of the operators on what one of MXNet's functions was to be called with.

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
    given = _signature(function).bind(*args, **kwargs).arguments
    values = [v for value in given.values() for v in (value if type(value) is tuple else [value])]
    operands = [value for value in values if isinstance(value, mx.nd.NDArray)]
    options = {
        key: value
        for key, value in {**given, **given.pop("kwargs", {})}.items()
        if not isinstance(value, (mx.nd.NDArray, type(None), type(_Null))) and key != "name"
    }
    return operands, options


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


@cache
def _handle(name: str) -> int:
    handle = OpHandle()
    check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    number: int = handle.value
    return number
