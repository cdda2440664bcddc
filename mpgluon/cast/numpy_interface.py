"""Whether a network computes with MXNet's NumPy interface, ``mx.np``, which no cast governs."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any, Optional

import mxnet as mx
from mxnet import gluon

from mpgluon.cast.forward import is_hybrid

__all__ = ["numpy_interface_of"]

_MODULES = ("np", "npx")
_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})  # of F, not of a global name such as NumPy's


def numpy_interface_of(block: gluon.Block) -> Optional[str]:
    """Say what of a block belongs to the NumPy interface, ``None`` if nothing is known to.

    Looks at the block itself and not at what it contains. A forward method that calls it out of
    sight, in another function, is found when it runs.

    Returns
    -------
    str or None
        The middle of a sentence about the block.
    """
    if any(_is_numpy_array(parameter) for parameter in block._reg_params.values()):
        return "has parameters that are mx.np arrays"
    names = ("hybrid_forward", "forward") if is_hybrid(block) else ("forward",)
    for name in names:
        own = inspect.unwrap(getattr(type(block), name))
        if own.__module__.startswith("mxnet."):
            continue  # written for both; the parameters and the switch tell
        if any(_switches_on(layer) for layer in _layers(getattr(type(block), name))):
            return "is decorated with use_np"
        code = getattr(own, "__code__", None)
        if name == "hybrid_forward" and code is not None:
            for module in _modules_read(code):
                return f"calls F.{module}"
    return None


def _is_numpy_array(parameter: gluon.Parameter) -> bool:
    return any(isinstance(array, mx.np.ndarray) for array in parameter._data or ())


def _layers(function: Any) -> Iterator[Any]:
    """Yield a function and those that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _switches_on(function: Any) -> bool:
    """Whether a function is what ``mx.util.use_np_array`` makes of another one."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_name == "_with_np_array"


def _modules_read(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS and instruction.argval in _MODULES:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _modules_read(constant)
