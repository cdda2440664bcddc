"""Copies of a cast network: what ``copy.deepcopy`` and ``pickle`` take from blocks and parameters.

MXNet's copies of arrays have no gradients, and its compiled graphs and kvstores cannot be copied.
So the copy of a block compiles its graph again, and the copy of a parameter gets a gradient, and
belongs to no Trainer until one is made for it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Union

from mxnet import autograd, gluon

__all__ = ["make_copyable", "make_uncopyable"]

Part = Union[gluon.Block, gluon.Parameter]

_LEFT_OUT = {"_trainer": None, "_cached_op": None, "_cached_graph": ()}


def make_copyable(part: Part) -> None:
    """Make a block or parameter of a cast network copyable and picklable."""
    vars(part)["__reduce_ex__"] = partial(_reduce, part)


def make_uncopyable(part: Part) -> None:
    """Undo :func:`make_copyable`, which leaves copies to MXNet."""
    vars(part).pop("__reduce_ex__", None)


def _reduce(part: Part, _: int) -> tuple[Any, ...]:
    """Return the values that Python's protocol for copies asks for."""
    state = {name: _LEFT_OUT.get(name, value) for name, value in vars(part).items()}
    del state["__reduce_ex__"]
    return _new, (type(part),), state


def _new(kind: type[Part]) -> Part:
    part = object.__new__(kind)
    vars(part)["__setstate__"] = partial(_fill, part)  # a copy may be found in its own attributes
    return part


def _fill(part: Part, state: dict[str, Any]) -> None:
    del vars(part)["__setstate__"]
    vars(part).update(state)
    make_copyable(part)
    if isinstance(part, gluon.Parameter) and part._data is not None:
        for arrays in filter(None, (part._data, part._grad)):
            arrays[:] = [a if a.ctx == c else a.copyto(c) for a, c in zip(arrays, part._ctx_list)]
        if part._grad is not None:
            autograd.mark_variables(part._data, part._grad, part.grad_req)
