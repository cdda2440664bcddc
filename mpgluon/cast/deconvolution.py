"""Deconvolutions on a CPU whose weight is the result of a cast.

The backward pass of oneDNN's fails then ("could not execute a primitive"), and MXNet's own in
float64 has one and two dimensions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from mpgluon.graph.nodes import option_value
from mpgluon.kernels.dtypes import Array

import mxnet as mx
from mxnet.symbol import Symbol

__all__ = ["deconvolution"]


def deconvolution(
    data: Array, weight: Array, bias: Optional[Array] = None, **options: Any
) -> Array:
    """Compute ``F.Deconvolution`` of FP32 operands: MXNet's own in float64, or in 3-D in FP32.

    In three dimensions it is a convolution of the data, with zeros between their elements, by the
    weight with its axes turned. The zeros multiply the operations by the product of the strides.

    Parameters
    ----------
    data : NDArray or Symbol
        Shape (batch, channels, …).
    weight : NDArray or Symbol
        Shape (channels, filters / groups, …).
    bias : NDArray or Symbol, optional
        Shape (filters,).
    **options
        The options of ``F.Deconvolution``, as values or as texts.
    """
    functions = mx.sym if isinstance(data, Symbol) else mx.nd
    operands = [data, weight] if bias is None else [data, weight, bias]
    kernel = _numbers(options, "kernel", ())
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    stride, pad, more = (
        _numbers(options, *option) for option in (("stride", ones), ("pad", zeros), ("adj", zeros))
    )
    # MXNet refuses a dilation in 3-D, and more than the stride after the end.
    others = any(_numbers(options, "target_shape", zeros)) or (
        _numbers(options, "dilate", ones) != ones or any(a >= s for a, s in zip(more, stride))
    )
    if len(kernel) < 3 or others:
        wide = (array.astype("float64") for array in operands)
        return functions.Deconvolution(*wide, **options).astype("float32")
    around = [side - 1 - border for side, border in zip(kernel, pad)]
    for axis, (step, extra, border) in enumerate(zip(stride, more, around), start=2):
        data = _spread(functions, data, axis, step, extra)
        if border < 0:
            data = functions.slice_axis(data, axis=axis, begin=-border, end=border)
    groups = int(options.get("num_group", 1))
    return functions.Convolution(
        data,
        _turned(functions, weight, groups),
        *operands[2:],
        kernel=kernel,
        pad=tuple(max(border, 0) for border in around),
        num_filter=options["num_filter"],
        num_group=groups,
        no_bias=bias is None,
    )


def _numbers(options: Mapping[str, Any], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = options.get(name)
    return tuple((option_value(value) if isinstance(value, str) else value) or default)


def _spread(functions: Any, data: Array, axis: int, step: int, extra: int) -> Array:
    """Put ``step - 1`` zeros between the elements along an axis, and ``extra`` after the last."""
    if step > 1:
        apart = functions.expand_dims(data, axis=axis + 1)
        zeros = functions.zeros_like(apart)
        apart = functions.concat(apart, *[zeros] * (step - 1), dim=axis + 1)
        data = functions.reshape(apart, shape=(*(0,) * axis, -3, -2))
    end = extra - (step - 1)
    return functions.slice_axis(data, axis=axis, begin=0, end=end) if end else data


def _turned(functions: Any, weight: Array, groups: int) -> Array:
    """Return the weight of the convolution: (filters, channels / groups, …), mirrored."""
    mirrored = functions.reverse(weight, axis=(2, 3, 4))
    of_groups = functions.reshape(mirrored, shape=(-4, groups, -1, -2))
    return functions.reshape(functions.swapaxes(of_groups, dim1=1, dim2=2), shape=(-3, -2))
