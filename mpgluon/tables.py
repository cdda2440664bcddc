"""Tables of text: aligned for a terminal, and for a Markdown document.

It knows no report: those have a ``table()``, and whoever draws or writes takes headings and rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Table"]

_FIGURE = re.compile(r"[-+<>≤≥~]?[\d.,]+([eE][-+]?\d+)?( ?[%a-zA-Z]{1,3})?|inf|nan|-|")


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
        """Which columns hold figures only, and are read best when aligned to the right."""
        return [
            bool(self.rows) and all(_FIGURE.fullmatch(row[column]) for row in self.rows)
            for column in range(len(self.headings))
        ]

    def __str__(self) -> str:
        return "\n".join("  ".join(cells).rstrip() for cells in self._padded())

    def to_markdown(self) -> str:
        """Return the table for a document."""
        heading, *rows = self._padded()
        ends = ("-:" if right else "--" for right in self.numeric)
        rule = ["-" * (len(cell) - 2) + end for cell, end in zip(heading, ends)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, rule, *rows))

    def _padded(self) -> list[list[str]]:
        lines = [list(self.headings), *(list(row) for row in self.rows)]
        widths = [max(2, *(len(line[c]) for line in lines)) for c in range(len(self.headings))]
        return [
            [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, self.numeric)
            ]
            for line in lines
        ]
