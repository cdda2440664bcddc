"""Options as fields of a dataclass, each declared once: its default, meaning and bounds.

The command line (`add_options`), the checks (`check_options`) and the documentation
(`document_options`) come from that declaration. No option is declared here.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, Callable, Optional, TypeVar, get_args, get_type_hints

from mpgluon_tools.commands.arguments import positive

__all__ = [
    "add_options",
    "at_least",
    "check_options",
    "document_options",
    "in_options",
    "option",
    "positive",
]

Class = TypeVar("Class", bound=type)

_DOCUMENTATION_WIDTH = 92


def option(
    default: Any,
    meaning: str,
    *,
    within: str = "",
    choices: Optional[tuple[str, ...]] = None,
    check: Optional[Callable[[Any], object]] = None,
    metavar: Optional[str] = None,
    **more: Any,
) -> Any:
    """Return a field of a dataclass that is an option.

    Parameters
    ----------
    default : bool, int, float, str or None
        With the default None, the value None is good, and the help text shows no default.
    meaning : str
        The help text, without the default.
    within : str
        The interval of good values in mathematical notation, such as ``"[0, 1)"``.
    choices : tuple of str, optional
        The only good values.
    check : callable, optional
        Raises ValueError for a bad value; called by the parser too.
    metavar : str, optional
        The placeholder of a value in the help text.
    **more
        Further metadata of the field.
    """
    metadata = {"help": meaning, "within": within, "choices": choices, "check": check}
    return field(default=default, metadata={**metadata, "metavar": metavar, **more})


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """Add every option of a dataclass to a parser; the default ``False`` makes it a flag."""
    annotations = get_type_hints(config)
    for one in fields(config):
        how: dict[str, Any]
        if one.default is False:
            how = {"action": "store_true"}
        else:
            # Optional[int] gives int.
            kind = (*get_args(annotations[one.name]), annotations[one.name])[0]
            how = {name: one.metadata[name] for name in ("choices", "metavar")}
            how["type"] = kind if one.metadata["check"] is None else _checked(one.metadata["check"])
        shown = "" if one.default is None or one.default is False else f" (default: {one.default})"
        parser.add_argument(
            _option_of(one.name), default=one.default, help=one.metadata["help"] + shown, **how
        )


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    def convert(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    return convert


def check_options(config: Any) -> None:
    """Raise ValueError if a field of a dataclass has a value that its option does not take."""
    for one in fields(config):
        value, choices = getattr(config, one.name), one.metadata["choices"]
        if value is None and one.default is None:
            continue
        if choices and value not in choices:
            raise ValueError(f"{one.name} must be one of {', '.join(choices)}; received {value!r}")
        interval = one.metadata["within"]
        if interval and not _is_within(value, interval):
            words = _in_words(interval) + " and finite" * (value == math.inf)
            raise ValueError(f"{one.name} must be {words}, received {value}")
        if one.metadata["check"] is not None:
            one.metadata["check"](value)


def in_options(message: str, config: type, values: Mapping[str, Any]) -> str:
    """Return an error's message with the options of a command line in place of fields' names.

    Parameters
    ----------
    message : str
    config : type
        The dataclass whose fields are the options.
    values : mapping from a field's name to its value
        Where a message names no field, it is about the option whose text it contains.
    """
    names = {one.name: one for one in fields(config)}
    words = "|".join(names)
    long = "|".join(name for name in names if "_" in name)
    verbs = "=| must | computes | was | is for "
    pattern = rf"(?<![\w-])(?:({long})(?!\w)|({words})(?={verbs})|(?<=choose )({words})(?= ))"
    told = re.sub(pattern, lambda match: _option_of(match[0]), message)
    if "--" not in told:
        found = [
            name
            for name, value in values.items()
            if name in names
            and names[name].metadata["choices"] is None  # words that messages have too
            and value != names[name].default
            and _is_told(value, message)
        ]
        if found:  # the longest one: a folder rather than the word that is a part of its name
            return f"{_option_of(max(found, key=lambda name: len(values[name])))}: {message}"
    return told


def _is_told(value: Any, message: str) -> bool:
    """Whether a message is about a text, such as a path: it has it as a whole word."""
    if not isinstance(value, str) or not value:
        return False
    return re.search(rf"(?<![\w.-]){re.escape(value)}(?![\w-])", message) is not None


def _option_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_within(value: float, interval: str) -> bool:
    least, most = map(float, interval[1:-1].split(","))
    above = value >= least if interval[0] == "[" else value > least
    below = value <= most if interval[-1] == "]" else value < most
    return above and below


def _in_words(interval: str) -> str:
    if interval == "(0, inf)":
        return "positive"
    if interval.startswith("[") and interval.endswith(", inf)"):
        return f"at least {interval[1 : -len(', inf)')]}"
    return f"in {interval}"


def document_options(config: Class) -> Class:
    """Append a section with every option to the docstring of a dataclass; a decorator."""
    lines = [inspect.cleandoc(config.__doc__ or ""), "", "Attributes", "----------"]
    for one in fields(config):
        choices, interval = one.metadata["choices"], one.metadata["within"]
        kind = f"{{{', '.join(map(repr, choices))}}}" if choices else str(one.type)
        kind += f", {_in_words(interval)}" if interval else ""
        meaning = textwrap.wrap(one.metadata["help"], _DOCUMENTATION_WIDTH)
        lines.append(f"{one.name} : {kind}, default {one.default!r}")
        lines += textwrap.indent("\n".join(meaning), "    ").splitlines()
    config.__doc__ = "\n".join(lines)
    return config


def at_least(least: int, **values: float) -> None:
    """Raise ValueError, naming it, for the first value that is less than ``least``."""
    for name, value in values.items():
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}, received {value}")
