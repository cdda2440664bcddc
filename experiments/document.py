"""docs/results.md, its pictures and README.md's block, from the records alone.

A record whose config is no longer the experiment's counts as missing.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

from experiments.experiment import Group, Record
from experiments.readme_block import readme_block
from experiments.records import Repetition, is_current, read_records, read_repetitions
from mpgluon.errors import DataError
from mpgluon.files import disk_error
from mpgluon.tables import Table

__all__ = ["BEGIN", "END", "fill_readme", "out_of_date", "page", "write_document"]

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
_BLOCK = re.compile(f"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.DOTALL)
_COLUMNS = 100
# What begins a line that is no prose: tables, headings, pictures, lists, code, comments.
_MARK = re.compile(r"\s*(\||#|!\[|[-*+>] |\d+\. |```|<)")
_HEAD = """# Results

Written by `python scripts/evidence.py document` from the records in
[results/evidence](../results/evidence); every measured number below comes from there, and so do the
sentences that depend on numbers. `make evidence` runs all of it (hours; what is done is not done
again, and an interrupted run goes on where it was). One row: the command beside it, with
`--data-dir` for the folder with Caltech 101 or caltech101-mini (`data`), and `--output` for a
folder of your own, since what has a record in this one counts as done. Each record holds the
config, the versions, the processor and the curves of its run."""


def page(
    groups: Sequence[Group], records: Mapping[str, Record], repetitions: Sequence[Repetition]
) -> tuple[str, dict[str, Callable[[Any], None]]]:
    """Return the page in Markdown, and what draws its pictures, by name.

    Parameters
    ----------
    groups : sequence of Group
        In the order of the page.
    records : mapping
        Current ones.
    repetitions : sequence of Repetition
    """
    parts = [_HEAD, _origins(records)]
    figures: dict[str, Callable[[Any], None]] = {}
    for group in groups:
        section = group.section(records)
        parts += [f"## {group.title}", section.text]
        figures.update(section.figures)
    parts += ["## Repeated from scratch", _repeated(repetitions)]
    return _wrapped("\n\n".join(part.strip() for part in parts if part)) + "\n", figures


def _wrapped(text: str) -> str:
    """Return Markdown with its paragraphs in lines of a readable length; all else as it is."""
    blocks, is_code = [], False
    for block in text.split("\n\n"):
        filled = textwrap.fill(block, _COLUMNS, break_long_words=False, break_on_hyphens=False)
        # A word that begins a line must not make it a list either.
        is_prose = not is_code and not any(map(_MARK.match, f"{block}\n{filled}".splitlines()))
        blocks.append(filled if is_prose else block)
        is_code ^= block.count("```") % 2 == 1
    return "\n\n".join(blocks)


def _origins(records: Mapping[str, Record]) -> str:
    """Return on what and when the records were made."""
    made: dict[tuple[str, ...], list[Record]] = {}
    for record in records.values():
        versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        flags = " ".join(record.machine["cpu_flags"])
        origin = (f"{record.machine['processor']} ({flags})", versions)
        made.setdefault(origin, []).append(record)
    rows = []
    for (processor, versions), ones in made.items():
        days = sorted({one.date[:10] for one in ones})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        rows.append([str(len(ones)), processor, versions, when])
    return Table(["records", "processor", "versions", "date"], rows).to_markdown() if rows else ""


def _repeated(repetitions: Sequence[Repetition]) -> str:
    text = (
        "`python scripts/evidence.py repeat` chooses an experiment by chance, runs it again from "
        "scratch in fresh folders with the same number of threads, and compares every figure and "
        "every point of its curves for equality, bit for bit; times are not compared."
    )
    if not repetitions:
        return f"{text} Nothing has been repeated yet."
    rows = [
        [
            f"`{one.name}`",
            "asked for by name" if one.seed is None else f"by chance, `--seed {one.seed}`",
            one.date[:10],
            "the same" if one.difference is None else one.difference,
        ]
        for one in repetitions
    ]
    same = sum(one.difference is None for one in repetitions)
    table = Table(["experiment", "chosen", "date", "outcome"], rows).to_markdown()
    return f"{text} {same} of {len(repetitions)} came out the same.\n\n{table}"


def fill_readme(text: str, block: str) -> str:
    """Return README.md with the block in its place.

    Raises
    ------
    ValueError
        If the place is not there once.
    """
    if len(_BLOCK.findall(text)) != 1:
        raise ValueError(f"README.md needs one place for results, between {BEGIN} and {END}")
    return _BLOCK.sub(lambda place: f"{place[1]}{block}\n{place[2]}", text)


def _texts(
    groups: Sequence[Group], folder: Path, root: Path
) -> tuple[dict[Path, str], dict[str, Callable[[Any], None]]]:
    """Return what is to be in which file, and the pictures."""
    found = read_records(folder)
    experiments = [one for group in groups for one in group.experiments()]
    current = {
        one.name: found[one.name] for one in experiments if is_current(found.get(one.name), one)
    }
    text, figures = page(groups, current, read_repetitions(folder))
    readme = root / "README.md"
    try:
        before = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {readme}: {error.strerror}; see --root") from error
    return {
        root / "docs" / "results.md": text,
        readme: fill_readme(before, _wrapped(readme_block(current))),
    }, figures


def out_of_date(groups: Sequence[Group], folder: Path, root: Path) -> list[Path]:
    """Return the files that are not what the records in ``folder`` make of them.

    Markdown only: other versions of Matplotlib draw other pixels.
    """
    texts, _ = _texts(groups, folder, root)
    return [
        path
        for path, text in texts.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def write_document(groups: Sequence[Group], folder: Path, root: Path) -> list[Path]:
    """Write page, block and pictures, and return their paths.

    Raises
    ------
    DataError
        If a record is damaged, or a file cannot be written.
    ValueError
        If README.md has no place for the block.
    """
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display needed

    texts, figures = _texts(groups, folder, root)
    pictures = root / "docs" / "results"
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        for name, draw in figures.items():
            figure = Figure(figsize=(10, 5), layout="constrained")
            draw(figure)
            figure.savefig(pictures / f"{name}.png", dpi=110)
    except OSError as error:
        raise disk_error(error, root / "docs", "run it again") from error
    return [*texts, *(pictures / f"{name}.png" for name in figures)]
