"""Tables of text, aligned for a terminal and for a Markdown document.

A report has a method ``table()`` that returns one.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Callable

__all__ = ["Result", "Table", "counted", "percent"]

_NARROWEST = 6  # characters of a column
_NUMBER = re.compile(r"[-+<>≤≥~]?[\d.,]+([eE][-+]?\d+)?( ?[%a-zA-Z]{1,3})?|inf|nan|-|")


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
        return "\n".join("  ".join(cells).rstrip() for cells in self._aligned())

    def fitted(self, width: int = 80) -> str:
        """Return the table in lines of at most ``width`` characters, as far as numbers allow it.

        Long cells take several lines: the widest columns become narrower, and break at spaces and
        after underscores. Numbers are not broken.
        """
        columns = list(zip(self.headings, *self.rows))
        widths = [max(2, *map(len, column)) for column in columns]
        whole = [max(len(part) for cell in column for part in _parts(cell)) for column in columns]
        broken = [
            max([_NARROWEST, *map(len, column[1:])]) if number else _NARROWEST
            for column, number in zip(columns, self.numeric)
        ]
        # Words stay whole, if that is enough.
        for least in (list(map(max, whole, broken)), broken):
            while sum(widths) + 2 * (len(widths) - 1) > width:
                spare = [size if size > small else 0 for size, small in zip(widths, least)]
                if not any(spare):
                    break
                widths[spare.index(max(spare))] -= 1
        lines = []
        for row in (self.headings, *self.rows):
            cells = [_broken(cell, size) for cell, size in zip(row, widths)]
            for parts in zip_longest(*cells, fillvalue=""):
                placed = [
                    part.rjust(size) if right else part.ljust(size)
                    for part, size, right in zip(parts, widths, self.numeric)
                ]
                lines.append("  ".join(placed).rstrip())
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return the table for a notebook or a page."""
        head, *body = ([html.escape(cell) for cell in row] for row in (self.headings, *self.rows))
        aligned = ["right" if right else "left" for right in self.numeric]

        def line(cells: list[str], tag: str) -> str:
            styled = (
                f'<{tag} style="text-align: {side}">{cell}</{tag}>'
                for side, cell in zip(aligned, cells)
            )
            return f"<tr>{''.join(styled)}</tr>"

        rows = "".join(line(cells, "td") for cells in body)
        return f"<table><thead>{line(head, 'th')}</thead><tbody>{rows}</tbody></table>"

    def to_markdown(self) -> str:
        """Return the table for a document."""
        headings, *rows = self._aligned()
        rule = [
            "-" * (len(heading) - 1) + (":" if right else "-")
            for heading, right in zip(headings, self.numeric)
        ]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))

    def _aligned(self) -> list[list[str]]:
        """Return the headings and the rows, the cells of a column equally wide."""
        lines = [self.headings, *self.rows]
        widths = [max(2, *map(len, column)) for column in zip(*lines)]
        return [
            [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, self.numeric)
            ]
            for line in lines
        ]


def _parts(cell: str) -> list[str]:
    """Return a cell in parts that stay whole: its words, names between their underscores."""
    return re.split(r"(?<=_)(?=[^_])|(?<=[A-Za-z]-)|(?= )", cell)


def _broken(cell: str, width: int) -> list[str]:
    """Return the lines of a cell."""
    lines = [""]
    for part in _parts(cell):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        rest = part if lines[-1] else part.lstrip()
        while len(rest) > width:
            lines[-1], rest = rest[:width], rest[width:]
            lines.append("")
        lines[-1] += rest
    return lines


def counted(count: int, thing: str) -> str:
    """Return a number and its noun, as in "1 step" and "1,200 steps"."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def percent(share: float) -> str:
    """Return a share in [0, 1] in percent, with two decimals."""
    return f"{share:.2%}".replace("%", " %")


class Result:
    """A base of results that a notebook shows as tables."""

    table: Callable[..., Table]

    def _repr_html_(self) -> str:
        says_more = type(self).__str__ is not object.__str__
        above = str(self).partition(str(self.table()))[0].strip() if says_more else ""
        return f"<p>{html.escape(above)}</p>" * bool(above) + self.table().to_html()
