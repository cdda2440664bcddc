"""What a float16 parameter stands for in FP32.

The FP32 values of a parameter that a cast has made float16 are kept on the parameter: first those
from before the cast, then the optimizer's master weights. Only this module touches them.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Optional

import mxnet as mx
from mxnet import gluon

from mpgluon import native
from mpgluon.cast.network_cast import cast_of
from mpgluon.numerics.dtypes import cast

__all__ = [
    "fp32_value",
    "give_memory_back",
    "is_rounded",
    "known",
    "mark_rounded",
    "narrow",
    "remember",
    "restore",
]

_ATTRIBUTE = "mpgluon_fp32"
_ROUNDED = "mpgluon_rounded"


def known(parameter: gluon.Parameter) -> Optional[mx.nd.NDArray]:
    """Return the FP32 values that are remembered for a parameter, ``None`` if none are.

    Elements of the parameter that were written since then are not among them; see
    :func:`fp32_value`.
    """
    return vars(parameter).get(_ATTRIBUTE)


def remember(parameter: gluon.Parameter, value: mx.nd.NDArray) -> None:
    """Remember the array, not a copy, as the FP32 values of a cast network's parameter.

    A parameter that belongs to no cast network is left alone: no restore would forget its values.
    """
    if cast_of(parameter) is not None:
        vars(parameter)[_ATTRIBUTE] = value


def mark_rounded(parameter: gluon.Parameter) -> None:
    """Say that an FP32 parameter only ever holds numbers of the format that its block computes in.

    Graphs that are traced later do not round it again.
    """
    vars(parameter)[_ROUNDED] = True


def is_rounded(parameter: gluon.Parameter) -> bool:
    """Whether a parameter was marked so."""
    return _ROUNDED in vars(parameter)


def narrow(parameter: gluon.Parameter) -> None:
    """Cast an FP32 parameter to float16, and remember a copy of its values on the CPU."""
    value = _on_cpu(parameter) if parameter._data is not None else None
    parameter.cast("float16")
    vars(parameter)[_ATTRIBUTE] = value


def give_memory_back() -> None:
    """Let the system have the memory of former FP32 arrays, which glibc would keep for new ones."""
    mx.nd.waitall()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def restore(parameter: gluon.Parameter) -> None:
    """Make a parameter FP32 again with the values it stands for, and forget them.

    Only where :func:`narrow` or :func:`remember` was called; others are left as they are.
    """
    if _ATTRIBUTE not in vars(parameter):
        return
    value = vars(parameter).pop(_ATTRIBUTE)
    if value is not None:
        value = fp32_value(_on_cpu(parameter), value)
    parameter.cast("float32")
    if value is not None:
        parameter.set_data(value)


def fp32_value(weight: mx.nd.NDArray, known: Optional[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Return known FP32 values of a float16 weight, with elements widened where it was written.

    Parameters
    ----------
    weight : NDArray, float16
    known : NDArray of the same shape, FP32, on any device; or None
        An element counts where it rounds to that of ``weight``.

    Returns
    -------
    NDArray
        On the device of ``weight``; ``known`` itself, brought up to date, if it is there.
    """
    if known is None:
        return cast(weight, "float32")
    known = known.as_in_context(weight.context)
    if weight.context.device_type == "cpu" and native.available():
        differences = native.invoke("_mpgluon_count_differences", weight, known)
        if differences.asscalar() == 0:  # as a rule; what follows takes three times its memory
            return known
    wide, rounded = cast(weight, "float32"), cast(cast(known, "float16"), "float32")
    return mx.nd.where(rounded == wide, known, wide, out=known)


def _on_cpu(parameter: gluon.Parameter) -> mx.nd.NDArray:
    """Return a copy; devices hold equal values, and averaging them could round."""
    return parameter.list_data()[0].copyto(mx.cpu())
