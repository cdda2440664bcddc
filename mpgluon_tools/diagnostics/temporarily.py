"""Change a network temporarily, and restore it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from mpgluon.cast.status_flags import muted
from mpgluon.checkpoint.scale_histories import scale_histories, set_scale_histories

import mxnet as mx
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["temporarily", "untouched"]


@contextmanager
def temporarily(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Set an attribute of several objects inside the block of code."""
    with ExitStack() as stack:
        for one in objects:
            if name in vars(one):
                stack.callback(setattr, one, name, vars(one)[name])
            else:
                stack.callback(delattr, one, name)
            setattr(one, name, value)
        yield


@contextmanager
def untouched(net: gluon.Block) -> Iterator[None]:
    """Restore gradients, running statistics and scales after the block of code.

    Its passes raise no status flags. Parameters without values are left out.
    """
    mx.nd.waitall()  # a static graph's running statistics can be read before they are written
    histories = scale_histories(net)
    saved: list[tuple[NDArray, NDArray, Any]] = []
    for parameter in net.collect_params().values():
        if parameter._data is None:
            continue
        if parameter.grad_req == "null":
            saved += [(array, array.copy(), None) for array in parameter.list_data()]
        else:
            pairs = zip(parameter.list_data(), parameter.list_grad())
            saved += [(grad, grad.copy(), (data, data._fresh_grad)) for data, grad in pairs]
    try:
        with muted():
            yield
    finally:
        for array, copy, freshness in saved:
            copy.copyto(array)
            if freshness is not None:
                data, data._fresh_grad = freshness[0], freshness[1]
        set_scale_histories(net, histories)
        mx.nd.waitall()
