"""Numbers that a text takes from records, where no mark can stand: in sentences, captions, outputs.

A quote is a text with the expressions of an f-string in it, under the names that
`study.experiments.page` fills marks with. Its page must contain the text that the records give. And
a paragraph or caption with a link to a record must contain no other numbers with a decimal point:
:func:`unquoted` finds the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PLACE", "WRONG_EXPRESSION", "quoted", "read_text", "shown", "unquoted"]

_MARK = r"<!-- (?:table: (?P<table>[^\n]+?)|(?P<number>\{[^\n]+?\})) -->"
PLACE = re.compile(f"(?P<mark>{_MARK})(?P<text>(?:(?!<!--).)*?)<!-- end -->", re.DOTALL)
"""A marked place of a page; see `study.experiments.page`."""
WRONG_EXPRESSION = (
    ArithmeticError, AttributeError, LookupError, NameError, StopIteration, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip
"""The errors of an expression that cannot be evaluated."""
_LINK = re.compile(r"!?\[((?:[^][]|\[[^][]*\])*)\]\([^()]*\)")
_RECORD = re.compile(r"\]\((?:\.\./)*study/results/[^)]+\.(?:json|png)\)")
_DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)")
_PARAGRAPHS = re.compile(r"\n\s*\n")


def read_text(path: Path) -> str:
    """Return the Markdown of a page, or a notebook's cells with their printed outputs."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n\n".join(_cells(json.loads(text)))


def _cells(notebook: Mapping[str, Any]) -> Iterator[str]:
    for cell in notebook["cells"]:
        yield "".join(cell["source"])
        for output in cell.get("outputs", []):
            yield "".join(output.get("text", ""))


def shown(text: str) -> str:
    """Return a text in one line as a reader sees it: the words of links, no marks, one typeface."""
    text = re.sub(r"<!--.*?-->|[`*]", "", text, flags=re.DOTALL)
    return " ".join(_LINK.sub(r"\1", text).split())


def quoted(quotes: Sequence[str], names: Mapping[str, Any]) -> list[str]:
    """Return the texts that the records give.

    Raises
    ------
    ValueError
        If an expression cannot be evaluated.
    """
    texts = []
    for quote in quotes:
        try:
            texts.append(" ".join(eval(f"f'''{quote}'''", dict(names)).split()))
        except WRONG_EXPRESSION as error:
            message = f"cannot fill the quote {quote!r}: {type(error).__name__}: {error}"
            raise ValueError(message) from error
    return texts


def unquoted(text: str, texts: Sequence[str]) -> list[str]:
    """Return the numbers with a decimal point that nothing checks where a record is named.

    Parameters
    ----------
    text : str
        The text of a page.
    texts : sequence of str
        Its quotes, as :func:`quoted` returns them.
    """
    found: list[str] = []
    names_a_record = False
    for paragraph in _PARAGRAPHS.split(PLACE.sub("", text)):
        names_a_record = bool(_RECORD.search(paragraph)) or (
            names_a_record and paragraph.lstrip().startswith("|")  # its table
        )
        if names_a_record:
            rest = shown(paragraph)
            for one in texts:
                rest = rest.replace(one, "")
            found += _DECIMAL.findall(rest)
    return found
