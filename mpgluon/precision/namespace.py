"""The stand-in for ``F`` that a block's ``hybrid_forward`` is handed.

It offers everything that ``mx.nd`` or ``mx.sym`` offers, under the same names; its operators
follow the operator table in the arithmetic of one compute format. MXNet itself is not changed.
"""

from __future__ import annotations

from functools import cache, wraps
from types import ModuleType
from typing import Any, Callable

from mpgluon.errors import PrecisionError
from mpgluon.precision.arithmetic import Arithmetic, Call
from mpgluon.precision.operators import rule_of

__all__ = ["OperatorNamespace", "namespace_of"]


class OperatorNamespace:
    """``mx.nd`` or ``mx.sym`` (or a part of it, such as ``F.contrib``) in another arithmetic.

    Parameters
    ----------
    module : module
        What ``F`` would have been.
    arithmetic : Arithmetic
        Carries out the rules of the table.
    prefix : str
        The path of ``module`` below ``F``, such as ``"contrib."``.
    """

    def __init__(self, module: ModuleType, arithmetic: Arithmetic, prefix: str = "") -> None:
        self.module = module
        self._arithmetic = arithmetic
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        if name in ("np", "npx"):
            raise PrecisionError(
                "a cast network computes with mx.nd and mx.sym operators; this one asked for "
                f"F.{name}, MXNet's NumPy interface. Keep that block in FP32 with keep_fp32"
            )
        if isinstance(found, ModuleType):
            found = OperatorNamespace(found, self._arithmetic, f"{self._prefix}{name}.")
        elif callable(found) and not isinstance(found, type):
            found = self._wrap(self._prefix + name, found)
        setattr(self, name, found)  # so that the next access comes here no more
        return found

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        rule, arithmetic = rule_of(name), self._arithmetic

        @wraps(function)
        def operator(*args: Any, **kwargs: Any) -> Any:
            return arithmetic.apply(rule, Call(name, function, args, kwargs))

        return operator


@cache
def namespace_of(module: ModuleType, arithmetic: Arithmetic) -> OperatorNamespace:
    """Return the stand-in for a module, the same object each time."""
    return OperatorNamespace(module, arithmetic)
