"""Telling blocks the format that they compute in, as ``Block.cast`` would.

A block that fills a mask with the lowest number, or makes arrays itself, learns the format from
its own ``cast``, or reads it in ``_dtype``: ``-1e18`` is finite in FP32 and infinite in float16.
The cast of a network does not call ``Block.cast``, which would cast parameters that stay FP32. The
block's own ``cast`` is called while its parameters and children are replaced by ones that do
nothing, and the attributes that it has set are kept.

bfloat16 is never set: it has FP32's range, its arrays are FP32, and ``Block.cast`` refuses it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from mpgluon.base.blocks import is_mxnets_own

import numpy as np
from mxnet import gluon
from mxnet.gluon.parameter import ParameterDict

__all__ = ["Attributes", "learned_format", "tell", "untell"]

Attributes = dict[str, Any]
"""Attributes of a block by name; ``_NOTHING`` for those that it did not have."""


class _Missing(Enum):
    """The value of an attribute that a block did not have; its copies are the same object."""

    NOTHING = "nothing"


_NOTHING = _Missing.NOTHING
_OF_GLUON = frozenset(vars(gluon.HybridBlock()))


class _Inert:
    """Replaces a parameter or another block while its owner is cast; it does nothing."""

    def __getattr__(self, name: str) -> _Inert:
        if name.startswith("__"):  # what Python looks for, such as __deepcopy__
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> _Inert:
        return self

    def __iter__(self) -> Any:
        return iter(())


def learned_format(block: gluon.Block, dtype: str) -> Attributes:
    """Return the attributes that a block's own ``cast`` to a format would set; changes nothing.

    MXNet's own layers have none. An error in the block's own ``cast`` is raised as it is.

    Parameters
    ----------
    block : gluon.Block
    dtype : {"float32", "float16", "bfloat16"}
    """
    if dtype != "float16" or is_mxnets_own(type(block)):
        return {}
    learned: Attributes = {}
    if _is_fp32(vars(block).get("_dtype")):
        learned["_dtype"] = np.float16
    defined_in = next(kind for kind in type(block).__mro__ if "cast" in vars(kind))
    if not is_mxnets_own(defined_in):
        learned |= _learned_in_cast(block)
    return learned


def tell(block: gluon.Block, learned: Attributes) -> Attributes:
    """Set attributes of a block, and return those that it had, for :func:`untell`."""
    before = {name: vars(block).get(name, _NOTHING) for name in learned}
    vars(block).update(learned)
    return before


def untell(block: gluon.Block, before: Attributes) -> None:
    """Restore the attributes that a block had before :func:`tell`."""
    for name, value in before.items():
        if value is _NOTHING:
            vars(block).pop(name, None)
        else:
            vars(block)[name] = value


def _learned_in_cast(block: gluon.Block) -> Attributes:
    """Return the attributes that a block's own ``cast`` sets, and take them off again."""
    original = dict(vars(block))
    before = {name: _without_parts(value) for name, value in original.items()}
    before |= {"_children": type(block._children)(), "_params": ParameterDict(), "_reg_params": {}}
    vars(block).update(before)
    try:
        block.cast("float16")
        after = dict(vars(block))
    finally:
        vars(block).clear()
        vars(block).update(original)
    return {
        name: value
        for name, value in after.items()
        if name not in _OF_GLUON and value is not before.get(name, _NOTHING)
        if not isinstance(value, (_Inert, gluon.Block, gluon.Parameter))
    }


def _without_parts(value: Any) -> Any:
    """Return an attribute, with all that a cast could change in place replaced."""
    if isinstance(value, (gluon.Block, gluon.Parameter, ParameterDict)):
        return _Inert()
    if type(value) in (list, tuple):
        return type(value)(map(_without_parts, value))
    if type(value) is dict:
        return {key: _without_parts(inner) for key, inner in value.items()}
    return value


def _is_fp32(value: Any) -> bool:
    """Whether an attribute is "float32", in any way of writing a dtype."""
    if isinstance(value, str):
        return value == "float32"
    return isinstance(value, (type, np.dtype)) and value == np.float32
