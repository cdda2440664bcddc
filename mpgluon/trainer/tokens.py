"""The factors S of losses, as arrays with a gradient of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from mpgluon.graph.output_operators import mark_factor
from mpgluon.kernels.dtypes import dtype_name
from mpgluon.trainer.gradient_flags import Weights, flags_down

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray import NDArray

__all__ = ["Tokens", "nan_of"]

_LARGE = 2**12  # elements, from which on a sum over them costs more than a copy


class Tokens:
    """Multiplies losses by S with arrays whose flags show whether each loss has gone backward."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[object, ...], tuple[float, NDArray]] = {}

    def multiply(
        self, losses: Sequence[NDArray], scale: float, nan: Sequence[Union[NDArray, float]]
    ) -> tuple[list[NDArray], Weights]:
        """Return S times each loss, with the bits of ``loss * scale``, and their tokens.

        ``nan`` is added to the factor S: -0, or what :func:`nan_of` returns.
        """
        tokens = [self._token(number, loss, scale) for number, loss in enumerate(losses)]
        by_id = {id(token): token for token in tokens}
        flags_down(by_id)
        return [_times(*one, scale) for one in zip(losses, tokens, nan)], by_id

    def _token(self, number: int, loss: NDArray, scale: float) -> NDArray:
        numpy_like = isinstance(loss, mx.np.ndarray)
        key = (number, loss.ctx, loss.dtype, numpy_like, numpy_like and loss.ndim == 0)
        known_scale, token = self._tokens.get(key, (None, None))
        if token is None or known_scale != scale:
            shape = () if key[-1] else (1,)
            ones = (mx.np if numpy_like else mx.nd).ones(shape, dtype=loss.dtype, ctx=loss.ctx)
            token = ones * scale
            token.attach_grad()
            mark_factor(token)
            self._tokens[key] = (scale, token)
        return token


def _times(loss: NDArray, token: NDArray, nan: Union[NDArray, float], scale: float) -> NDArray:
    if loss.size < _LARGE or dtype_name(loss) != "float32" or isinstance(loss, mx.np.ndarray):
        return loss * (token + nan)
    # The token's gradient in a product is a sum over the whole loss; here it is a copy.
    return mx.nd.amp_multicast(loss * (nan + scale), token, num_outputs=2)[0]


def nan_of(loss: NDArray) -> NDArray:
    """Return NaN where a loss is NaN, elsewhere -0, which changes nothing that it is added to.

    The gradient of a NaN can be a number, such as 0 for its absolute value: a factor of NaN makes
    it NaN, so that the step is skipped, by all processes. Does not wait.
    """
    with autograd.pause():
        if isinstance(loss, mx.np.ndarray):
            return mx.np.sqrt(-mx.np.isnan(loss).astype(loss.dtype))
        return mx.nd.sqrt(-mx.nd.contrib.isnan(loss))
