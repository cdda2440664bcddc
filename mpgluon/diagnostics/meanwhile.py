"""Changing a network for a time, and restoring it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mpgluon.checkpoint.scale_histories import scale_histories, set_scale_histories

import mxnet as mx
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["having", "untouched"]


@contextmanager
def having(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Temporarily set an attribute of several objects."""
    before = [(one, vars(one).get(name, having)) for one in objects]  # itself: not set
    try:
        for one, _ in before:
            setattr(one, name, value)
        yield
    finally:
        for one, original in before:
            if original is having:
                delattr(one, name)
            else:
                setattr(one, name, original)


@contextmanager
def untouched(net: gluon.Block) -> Iterator[None]:
    """Restore gradients, running statistics and scales after the block of code."""
    mx.nd.waitall()  # a static graph's running statistics can be read before they are written
    histories = scale_histories(net)
    saved: list[tuple[NDArray, NDArray, Any]] = []
    for parameter in net.collect_params().values():
        if parameter.grad_req == "null":
            saved += [(array, array.copy(), None) for array in parameter.list_data()]
        else:
            pairs = zip(parameter.list_data(), parameter.list_grad())
            saved += [(grad, grad.copy(), (data, data._fresh_grad)) for data, grad in pairs]
    try:
        yield
    finally:
        for array, copy, freshness in saved:
            copy.copyto(array)
            if freshness is not None:
                data, data._fresh_grad = freshness[0], freshness[1]
        set_scale_histories(net, histories)
        mx.nd.waitall()
