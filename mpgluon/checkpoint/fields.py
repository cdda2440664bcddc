"""The fields of a header in JSON, compared with the expected ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Union

__all__ = [
    "Kind",
    "Maybe",
    "check_fields",
    "is_count",
    "is_finite",
    "is_number",
    "is_numbers",
    "is_seed",
    "is_text",
    "is_texts",
    "is_word",
    "is_words",
]


def is_count(value: Any) -> bool:
    """Whether a value counts steps; MXNet's schedules take one after the other, up to it."""
    return is_seed(value) and value < 2**31


def is_seed(value: Any) -> bool:
    """Whether a value is an integer from 0 upward."""
    return type(value) is int and value >= 0


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number, and not a truth value."""
    return is_number(value) and type(value) is not bool and math.isfinite(value)


def is_number(value: Any) -> bool:
    """Whether a value is a number, truth values and infinity included."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def is_numbers(value: Any) -> bool:
    """Whether a value is a list of numbers."""
    return isinstance(value, list) and all(map(is_number, value))


def is_text(value: Any) -> bool:
    """Whether a value is text."""
    return isinstance(value, str)


def is_word(value: Any) -> bool:
    """Whether a value is an integer of 32 bits without a sign."""
    return is_seed(value) and value < 2**32


def is_words(value: Any) -> bool:
    """Whether a value is a list of such integers."""
    return isinstance(value, list) and all(map(is_word, value))


def is_texts(value: Any) -> bool:
    """Whether a value is a list of texts."""
    return isinstance(value, list) and all(map(is_text, value))


class Maybe(NamedTuple):
    """The kind of a field that may also be ``None``, or missing."""

    kind: Union[Callable[[Any], bool], Mapping[Any, Any]]


Kind = Union[Callable[[Any], bool], Mapping[Any, Any], Maybe]
"""A condition on a value; or the kinds of a dictionary's fields by name, and of others, by str."""


def check_fields(value: Any, kind: Kind, place: str = "") -> None:
    """Raise ValueError, with the place, unless a value is of a kind; further fields are allowed."""
    if isinstance(kind, Maybe):
        if value is None:
            return
        kind = kind.kind
    if not isinstance(kind, Mapping):
        if not kind(value):
            raise ValueError(f"its {place} cannot be {value!r}")
        return
    if not isinstance(value, dict):
        raise ValueError(f"its {place or 'header'} should be a dictionary, not {value!r}")
    for name in value if str in kind else kind:
        inner, expected = f"{place}/{name}".lstrip("/"), kind.get(name, kind.get(str))
        if name not in value and not isinstance(expected, Maybe):
            raise ValueError(f"its {inner} is missing")
        check_fields(value.get(name), expected, inner)
