"""Many gradients in a few FP32 arrays, summed over the devices of this process.

ResNet-50's 161 gradients become a dozen messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mpgluon.kernels.dtypes import cast, dtype_name

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray
from numpy import typing as npt

__all__ = ["BUCKET_ELEMENTS", "Bucket", "Gradient", "make_buckets"]

# 8 MiB in FP32: large enough to hide a message's latency, small enough for the caches.
BUCKET_ELEMENTS = 2**21

_SUMMED_IN = {"float16": "float32", "float32": "float32", "float64": "float64"}


@dataclass(frozen=True)
class Gradient:
    """The description of a gradient, by which buckets are planned."""

    key: int
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, key: int, array: NDArray) -> Gradient:
        """Return the description of a gradient array."""
        return cls(key, tuple(array.shape), str(dtype_name(array)))

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


class Bucket:
    """Memory for gradients that are summed in the same dtype: FP32, or float64 for float64 ones.

    Attributes
    ----------
    values : ndarray, shape (sum of the sizes,)
        The sums over devices, to be added to other processes' in place; valid after `wait`.
    """

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        dtype = _SUMMED_IN[gradients[0].dtype]
        self.values: npt.NDArray[Any] = np.empty(sum(g.size for g in gradients), dtype=dtype)
        # MXNet's view of the same memory; from_numpy makes its argument read-only, hence the slice.
        self._shared = mx.nd.from_numpy(self.values[:])
        self._views: list[tuple[int, NDArray]] = []  # by key
        begin = 0
        for gradient in gradients:
            view = self._shared[begin : begin + gradient.size].reshape(gradient.shape)
            self._views.append((gradient.key, view))
            begin += gradient.size

    def pack(self, gradients: dict[int, Sequence[NDArray]]) -> None:
        """Write the sum over devices of each gradient, widened exactly; does not wait.

        ``gradients`` maps keys to the gradient on each device.
        """
        with autograd.pause():
            for key, view in self._views:
                first, *others = gradients[key]
                _copy(first, view)
                for other in others:
                    wide = mx.nd.empty(view.shape, dtype=view.dtype)
                    _copy(other, wide)
                    mx.nd.elemwise_add(view, wide, out=view)

    def wait(self) -> None:
        """Wait until ``values`` holds all sums."""
        self._shared.wait_to_read()

    def unpack(self, gradients: dict[int, Sequence[NDArray]]) -> None:
        """Write ``values`` into the gradients, rounded once to their dtype; does not wait.

        A sum beyond float16's range becomes infinite, as in any other float16 arithmetic.
        """
        with autograd.pause():
            for key, view in self._views:
                for one in gradients[key]:
                    _copy(view, one)


def _copy(source: NDArray, target: NDArray) -> None:
    """Write a source into a target of another dtype or device, one of them in a bucket."""
    source = source.as_in_context(mx.cpu())  # before the cast: half the bytes from a GPU
    if dtype_name(source) == dtype_name(target):
        source.copyto(target)
    elif target.ctx == mx.cpu():
        mx.nd.amp_cast(source, dtype=dtype_name(target), out=target)  # allocates nothing
    else:
        cast(source, str(dtype_name(target))).copyto(target)


def make_buckets(gradients: Sequence[Gradient]) -> list[Bucket]:
    """Distribute gradients over buckets, the last ones first, which backward computes first.

    Raises
    ------
    TypeError
        If one is neither float16 nor float32 nor float64.
    """
    for gradient in gradients:
        if gradient.dtype not in _SUMMED_IN:
            raise TypeError(
                f"gradient {gradient.key} is {gradient.dtype}; float16, float32 and float64 can be "
                "summed over processes"
            )
    full: list[list[Gradient]] = []
    open_: dict[str, list[Gradient]] = {}
    for gradient in reversed(gradients):
        dtype = _SUMMED_IN[gradient.dtype]
        bucket = open_.get(dtype)
        if bucket is None or sum(g.size for g in bucket) + gradient.size > BUCKET_ELEMENTS:
            bucket = open_[dtype] = []
            full.append(bucket)
        bucket.append(gradient)
    return [Bucket(bucket) for bucket in full]
