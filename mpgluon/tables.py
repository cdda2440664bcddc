"""Tables of text: aligned for a terminal, and for a Markdown document. tabulate aligns them.

This module knows no report: a report has a method ``table()`` that returns headings and rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import DataRow, TableFormat, tabulate

__all__ = ["Table", "percent"]

_NUMBER = re.compile(r"[-+<>≤≥~]?[\d.,]+([eE][-+]?\d+)?( ?[%a-zA-Z]{1,3})?|inf|nan|-|")
_PLAIN = TableFormat(None, None, None, None, DataRow("", "  ", ""), DataRow("", "  ", ""), 0, None)
_PIPES = _PLAIN._replace(headerrow=DataRow("| ", " | ", " |"), datarow=DataRow("| ", " | ", " |"))


@dataclass(frozen=True)
class Table:
    """Headings and rows of text, units in the headings.

    Attributes
    ----------
    headings : sequence of str
    rows : sequence of sequences of str
        Each as long as the headings.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        uneven = [row for row in self.rows if len(row) != len(self.headings)]
        if uneven:
            raise ValueError(f"a row has {len(self.headings)} cells, received {uneven[0]!r}")

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers only; these are aligned to the right."""
        return [
            bool(self.rows) and all(_NUMBER.fullmatch(row[column]) for row in self.rows)
            for column in range(len(self.headings))
        ]

    def __str__(self) -> str:
        heading, _, *rows = self._aligned(_PLAIN)
        return "\n".join(line.rstrip() for line in (heading, *rows))

    def to_markdown(self) -> str:
        """Return the table for a document."""
        heading, rule, *rows = self._aligned(_PIPES)
        return "\n".join((heading, re.sub(r"(?<!\|) (?!\|)", "-", rule), *rows))

    def _aligned(self, layout: TableFormat) -> list[str]:
        """Return the headings, a row with the ends of Markdown's rule, and the rows."""
        numeric = self.numeric
        rule = ["-:" if right else "--" for right in numeric]
        return tabulate(
            [self.headings, rule, *self.rows],
            tablefmt=layout,
            disable_numparse=True,
            colalign=["right" if right else "left" for right in numeric],
        ).split("\n")


def percent(share: float) -> str:
    """Return a share in [0, 1] in percent, with two decimals."""
    return f"{share:.2%}".replace("%", " %")
