"""The refusal of an operator, or of an option of it, that another format has no equal for."""

from __future__ import annotations

__all__ = ["UnsupportedError", "require"]


class UnsupportedError(ValueError):
    """The format, or its translation, has no equal for one use of an operator; says why."""


def require(condition: bool, otherwise: str) -> None:
    """Raise UnsupportedError with a reason unless a condition holds."""
    if not condition:
        raise UnsupportedError(otherwise)
