"""The FP32 values of 16-bit parameters.

The FP32 values of a parameter that a cast has rounded are kept on the parameter: first those from
before the cast, then the optimizer's master weights. MXNet has float16 arrays; a parameter of any
other format is an FP32 array of that format's numbers. Only this module touches either fact.
"""

from __future__ import annotations

from typing import Optional

from mpgluon import kernels
from mpgluon.base.blocks import forget_symbol, set_value
from mpgluon.cast.network_cast import cast_of
from mpgluon.formats.float_format import FLOAT16, FLOAT32, FloatFormat
from mpgluon.kernels.dtypes import cast, round_array

import mxnet as mx
import numpy as np
from mxnet import gluon

__all__ = [
    "format_of",
    "fp32_value",
    "is_rounded",
    "known",
    "mark_rounded",
    "narrow",
    "remember",
    "restore",
]

_ATTRIBUTE = "mpgluon_fp32"
_GRID = "mpgluon_grid"  # the format of a parameter that MXNet has no arrays of
_ROUNDED = "mpgluon_rounded"


def format_of(parameter: gluon.Parameter) -> FloatFormat:
    """Return the format of a parameter's numbers; wider ones count as FP32."""
    is_float16 = np.dtype(parameter.dtype) == np.float16
    return FLOAT16 if is_float16 else vars(parameter).get(_GRID, FLOAT32)


def known(parameter: gluon.Parameter) -> Optional[mx.nd.NDArray]:
    """Return the FP32 values that are remembered for a parameter, ``None`` if none are.

    Elements of the parameter that were written since then are not among them; see
    :func:`fp32_value`.
    """
    return vars(parameter).get(_ATTRIBUTE)


def remember(parameter: gluon.Parameter, value: mx.nd.NDArray) -> None:
    """Remember the array, not a copy, as the FP32 values of a cast network's parameter.

    A parameter outside of cast networks is left alone: no restore would discard its values.
    """
    if cast_of(parameter) is not None:
        vars(parameter)[_ATTRIBUTE] = value


def mark_rounded(parameter: gluon.Parameter) -> None:
    """Mark an FP32 parameter that only ever holds numbers of the format its block computes in.

    Graphs that are traced later do not round it again.
    """
    vars(parameter)[_ROUNDED] = True


def is_rounded(parameter: gluon.Parameter) -> bool:
    """Whether a parameter was marked so."""
    return _ROUNDED in vars(parameter)


def narrow(parameter: gluon.Parameter, fmt: FloatFormat) -> None:
    """Round an FP32 parameter to a format, and remember a copy of its values on the CPU."""
    value = _on_cpu(parameter) if parameter._data is not None else None
    if fmt == FLOAT16:
        _cast(parameter, "float16")
    else:
        vars(parameter)[_GRID] = fmt
        for array in parameter._data or ():
            round_array(array.as_nd_ndarray(), fmt, out=array.as_nd_ndarray())
    vars(parameter)[_ATTRIBUTE] = value


def restore(parameter: gluon.Parameter) -> None:
    """Make a parameter FP32 again, with its remembered FP32 values, and discard those.

    Only where :func:`narrow` or :func:`remember` was called; others are left as they are.
    """
    if _ATTRIBUTE not in vars(parameter):
        return
    value, fmt = vars(parameter).pop(_ATTRIBUTE), format_of(parameter)
    vars(parameter).pop(_GRID, None)
    if value is not None:
        value = fp32_value(_on_cpu(parameter), value, fmt)
    _cast(parameter, "float32")
    if value is not None:
        set_value(parameter, value)


def fp32_value(
    weight: mx.nd.NDArray, known: Optional[mx.nd.NDArray], fmt: FloatFormat = FLOAT16
) -> mx.nd.NDArray:
    """Return known FP32 values of a 16-bit weight, with elements widened where it was written.

    Parameters
    ----------
    weight : NDArray, float16, or FP32 for another format
    known : NDArray of the same shape, FP32, on any device; or None
        An element counts where it rounds to the element of ``weight``.
    fmt : FloatFormat
        The format of ``weight``.

    Returns
    -------
    NDArray
        On the device of ``weight``; ``known`` itself, brought up to date, if it is there.
    """
    weight = weight.as_nd_ndarray()
    if known is None:
        return cast(weight, "float32")
    known = known.as_in_context(weight.context)
    if fmt == FLOAT16 and weight.context.device_type == "cpu" and kernels.available():
        differences = kernels.invoke("_mpgluon_count_differences", weight, known)
        if differences.asscalar() == 0:  # as a rule; what follows takes three times its memory
            return known
    wide = cast(weight, "float32")
    return mx.nd.where(round_array(known, fmt) == wide, known, wide, out=known)


def _cast(parameter: gluon.Parameter, dtype: str) -> None:
    """Cast as Gluon does, which keeps the symbol of before."""
    type(parameter).cast(parameter, dtype)  # its own refuses that to users
    forget_symbol(parameter)


def _on_cpu(parameter: gluon.Parameter) -> mx.nd.NDArray:
    """Return a copy; devices hold equal values, and averaging them could round."""
    return parameter.list_data()[0].as_nd_ndarray().copyto(mx.cpu())
