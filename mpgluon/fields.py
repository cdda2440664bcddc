"""The fields of a header in JSON, compared with what they should be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Union

__all__ = ["Kind", "check_fields", "is_count", "is_number", "is_text", "is_texts", "optional"]

Kind = Union[Callable[[Any], bool], Mapping[Any, Any]]
"""A condition on a value; or the kinds of a dictionary's fields by name, or one for all, by str."""


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0 upward."""
    return type(value) is int and value >= 0


def is_number(value: Any) -> bool:
    """Whether a value is a number, truth values and infinity included."""
    return isinstance(value, (int, float))


def is_text(value: Any) -> bool:
    """Whether a value is text."""
    return isinstance(value, str)


def is_texts(value: Any) -> bool:
    """Whether a value is a list of texts."""
    return isinstance(value, list) and all(map(is_text, value))


def optional(condition: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a condition that ``None`` meets too."""
    return lambda value: value is None or condition(value)


def check_fields(value: Any, kind: Kind, place: str = "") -> None:
    """Raise ValueError, with the place, unless a value is of a kind; further fields are allowed."""
    if not isinstance(kind, Mapping):
        if not kind(value):
            raise ValueError(f"its {place} cannot be {value!r}")
        return
    if not isinstance(value, dict):
        raise ValueError(f"its {place or 'header'} should be a dictionary, not {value!r}")
    for name in value if str in kind else kind:
        inner = f"{place}/{name}".lstrip("/")
        if name not in value:
            raise ValueError(f"its {inner} is missing")
        check_fields(value[name], kind.get(str, kind.get(name)), inner)
