"""Findings: what is the case, why it matters, how to change it; and a report of several.

A check of a Trainer's weights yields findings: ``init_trainer`` raises or logs them, and the doctor
prints them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

__all__ = ["LEVELS", "DoctorReport", "Finding", "error", "examples", "note", "ok", "warning"]

LEVELS = ("ok", "note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes
    ----------
    level : {"ok", "note", "warning", "error"}
        An error stops training or spoils it silently; a warning costs accuracy or speed; a note is
        worth knowing.
    topic : str
        Subject of the check, in a word or two.
    what, why, fix : str
        The finding, why it matters, and how to change it; the last two are empty for ``"ok"``.
    """

    level: str
    topic: str
    what: str
    why: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}; received {self.level!r}")
        if (self.level == "ok") != (not self.why and not self.fix):
            raise ValueError(f"a finding has a why and a fix unless it is ok; received {self}")

    @property
    def sentence(self) -> str:
        """The finding as the message of an error or a log."""
        return f"{self.what}: {self.why}; {self.fix}"


ok, note, warning, error = (partial(Finding, level) for level in LEVELS)


@dataclass(frozen=True)
class DoctorReport:
    """Findings in the order in which they were made; ``print`` it."""

    findings: tuple[Finding, ...]

    def at_level(self, level: str) -> tuple[Finding, ...]:
        """Return the findings of one level."""
        return tuple(finding for finding in self.findings if finding.level == level)

    @property
    def has_errors(self) -> bool:
        """Whether any finding is an error."""
        return bool(self.at_level("error"))

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 100) -> str:
        """Return the findings in lines of at most ``width`` characters, paths aside."""
        level = max((len(one.level) for one in self.findings), default=0)
        topic = max((len(one.topic) for one in self.findings), default=0)
        lines = []
        for one in self.findings:
            lines += _wrapped(f"{one.level:<{level}}  {one.topic:<{topic}}  ", one.what, width)
            for word, text in (("why", one.why), ("fix", one.fix)):
                if text:
                    lines += _wrapped(f"{'':{level + topic + 4}}{word}: ", text, width)
        counts = [(len(self.at_level(name)), name) for name in reversed(LEVELS)]
        total = ", ".join(
            f"{count} {name}{'s' * (count != 1 and name != 'ok')}" for count, name in counts
        )
        return "\n".join([*lines, "", total])


def examples(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _wrapped(start: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width=width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,  # paths and commands are copied
        break_on_hyphens=False,
    )
