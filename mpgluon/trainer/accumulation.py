"""FP32 sums of float16 gradients that accumulate (``grad_req="add"``).

MXNet adds a gradient to a float16 one in float16, where it may vanish. Here each backward pass
writes into an empty array that is then added in FP32; the float16 gradient is the rounded sum.
"""

from __future__ import annotations

from mpgluon.cast.fp32 import fp32_value
from mpgluon.kernels.dtypes import cast, dtype_name
from mpgluon.trainer import inside

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

__all__ = ["GradientSums"]


class GradientSums:
    """The FP32 sums of one Trainer's float16 gradients.

    Parameters
    ----------
    trainer : gluon.Trainer
    """

    def __init__(self, trainer: gluon.Trainer) -> None:
        self._trainer = trainer
        self._sums: dict[int, tuple[NDArray, NDArray]] = {}  # by the gradient's ``id``

    def set_aside(self) -> None:
        """Empty the gradients, before a backward pass. Does not wait.

        An element that was written since the latest sum, a zero too, replaces that of the sum.
        """
        sums = {}
        with autograd.pause():
            for gradient in inside.accumulated_gradients(self._trainer):
                if gradient.stype != "default" or dtype_name(gradient) != "float16":
                    continue
                _, known = self._sums.get(id(gradient), (None, None))
                value = fp32_value(gradient, known)
                value = mx.nd.where(gradient.astype("float32") == 0, mx.nd.zeros_like(value), value)
                sums[id(gradient)] = (gradient, value)
                gradient[:] = 0
        self._sums = sums

    def add(self) -> None:
        """Add the gradients to their sums, after a backward pass. Does not wait."""
        with autograd.pause():
            for gradient, value in self._sums.values():
                value += cast(gradient, "float32")
                cast(value, "float16").copyto(gradient)
