"""The pages of results: their marked places are filled from the records, their pictures drawn.

People write the pages. Generated text stands between two comments:

- ``<!-- table: caltech101.table() -->``, a row of headings, and ``<!-- end -->``: the rows;
- ``<!-- {caltech101.mean("float32"):.1f} -->41.7<!-- end -->``, within a line: a number, from what
  the braces of an f-string hold.

Names are the groups' names, for the results of their ``view``; ``records``, ``repetitions``,
``together``; the functions of `study/experiments/cells.py`, and of `study/experiments/tables.py`
without their argument.

A record counts as missing if its config differs from the experiment's, and no page is filled
until every record is there. Words that depend on the records are in `study/experiments/claims.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

from mpgluon.base.files import disk_error
from mpgluon.errors import DataError
from mpgluon_tools.tables import Table

from study.experiments import cells
from study.experiments.experiment import Group, Records, is_below
from study.experiments.figures import WIDTH
from study.experiments.gpu_records import GpuRecords
from study.experiments.ports import Ports
from study.experiments.quotes import PLACE, WRONG_EXPRESSION, quoted, read_text, shown, unquoted
from study.experiments.records import (
    Repetition,
    current_records,
    read_repetitions,
    refuse_mixtures,
)
from study.experiments.timings import CONTESTANTS, Timings
from study.experiments.together import Together
from study.experiments.training_runs import PER_CLASS

__all__ = ["PAGES", "Document", "fill", "out_of_date", "unsupported", "views_of",
           "visible", "write_document"]  # fmt: skip

PAGES = ("docs/results.md", "docs/results-details.md", "README.md")  # that have claims
_END = "<!-- end -->"
_ANY_MARK = re.compile(r"<!-- (?:table:|\{|end -->)")
_PICTURE = re.compile(r"\]\(results/([^)]+)\.png\)")


@dataclass(frozen=True)
class Document:
    """The contents of the pages, besides their records.

    Attributes
    ----------
    groups : sequence of Group
    rows : mapping of str to callable
        By name; each makes the rows of a table of what :func:`views_of` returns.
    claims : mapping of str to mapping of str to callable
        By page and by words of that page, as a reader sees them in one line; each returns whether
        the records support the words, from what :func:`views_of` returns.
    quotes : mapping of str to sequence of str
        By page or notebook; see `study.experiments.quotes`.
    more_pages : sequence of str
        Pages with marked places besides `PAGES`.
    pictures : mapping of str to callable
        By name, besides the groups' pictures; each draws values of the views on an empty figure.
    """

    groups: Sequence[Group]
    rows: Mapping[str, Callable[[Any], list[list[str]]]]
    claims: Mapping[str, Mapping[str, Callable[[Any], bool]]]
    quotes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    more_pages: Sequence[str] = ()
    pictures: Mapping[str, Callable[[Any, Any], None]] = field(default_factory=dict)


def views_of(
    groups: Sequence[Group],
    records: Records,
    repetitions: Sequence[Repetition],
    benchmarks: Path = Path("study/results"),
) -> SimpleNamespace:
    """Return each group's view under its name, and others that belong to no group.

    These are ``records``, ``repetitions``, ``together``, and ``timings``, ``gpu`` and ``ports`` of
    the records in the folder ``benchmarks``, which are read when they are used.
    """
    views = {group.name: group.view(records) for group in groups}
    found = SimpleNamespace(**views, records=records, repetitions=repetitions)
    found.together = Together(found)
    found.timings, found.gpu = Timings(benchmarks), GpuRecords(benchmarks, records)
    found.ports = Ports(benchmarks)
    return found


def _names(
    rows: Mapping[str, Callable[[Any], list[list[str]]]], views: SimpleNamespace
) -> dict[str, Any]:
    """Return the names that an expression on a page may use."""
    return {
        **{name: getattr(cells, name) for name in cells.__all__},
        **{name: partial(function, views) for name, function in rows.items()},
        **CONTESTANTS,
        "PER_CLASS": PER_CLASS,
        **vars(views),
    }


def fill(
    text: str,
    rows: Mapping[str, Callable[[Any], list[list[str]]]],
    views: SimpleNamespace,
) -> str:
    """Return Markdown with its marked places filled.

    Raises
    ------
    ValueError
        If a place has no end, begins a line of prose, where it would be no part of the sentence,
        or cannot be filled.
    """
    names = _names(rows, views)

    def filled(place: re.Match[str]) -> str:
        expression = place["table"] or f"f'''{place['number']}'''"
        try:
            found = eval(expression, dict(names))  # the pages are as much ours as the code is
            if place["table"] is not None:
                heading, *_ = place["text"].strip().splitlines()
                table = Table([cell.strip() for cell in heading[1:-1].split("|")], found)
                found = f"\n\n{table.to_markdown()}\n\n"
        except WRONG_EXPRESSION as error:
            message = f"cannot fill {place['mark']}: {type(error).__name__}: {error}"
            raise ValueError(message) from error
        return f"{place['mark']}{found}{_END}"

    if len(_ANY_MARK.findall(text)) != 2 * len(PLACE.findall(text)):
        raise ValueError(f"a marked place has no {_END}, or there is one without a place")
    at_the_beginning = re.search(r"^\s*<!-- \{.*", text, re.MULTILINE)
    if at_the_beginning:
        raise ValueError(f"a number must not begin a line: {at_the_beginning[0].strip()}")
    return PLACE.sub(filled, text)


def visible(text: str) -> str:
    """Return Markdown in one line, without the marks."""
    return " ".join(PLACE.sub(lambda place: place["text"], text).split())


def _read(document: Document, root: Path) -> dict[Path, str]:
    pages = [root / page for page in (*PAGES, *document.more_pages)]
    try:
        return {page: page.read_text(encoding="utf-8") for page in pages}
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; see --root") from error


def _views(groups: Sequence[Group], folder: Path) -> SimpleNamespace:
    """Return the views of the records in a folder.

    Raises
    ------
    DataError
        If an experiment has no record, or a block has records from several kinds of processor.
    """
    everything = [one for group in groups for one in group.experiments]
    records = current_records(folder, everything)
    refuse_mixtures(everything, records, folder)
    names = [one.name for one in everything]
    missing = _shortest([name for name in names if name not in records], names)
    if missing:
        raise DataError(
            f"{folder} has no record of {', '.join(missing)}; run "
            f"`python study/scripts/evidence.py run {' '.join(missing)}`"
        )
    return views_of(groups, records, read_repetitions(folder), folder.parent)


def _shortest(missing: Sequence[str], everything: Sequence[str]) -> list[str]:
    """Return names of experiments, with a common prefix in place of all that are below it."""
    found = []
    for name in missing:
        parts = name.split("/")
        prefixes = ("/".join(parts[: length + 1]) for length in range(len(parts)))
        found.append(
            next(
                prefix
                for prefix in prefixes
                if all(one in missing for one in everything if is_below(one, prefix))
            )
        )
    return list(dict.fromkeys(found))


def out_of_date(document: Document, folder: Path, root: Path) -> list[Path]:
    """Return the pages that differ from the text that the records in ``folder`` give.

    Markdown only: other versions of Matplotlib draw other pixels.
    """
    views = _views(document.groups, folder)
    return [
        path
        for path, text in _read(document, root).items()
        if fill(text, document.rows, views) != text
    ]


def unsupported(document: Document, folder: Path, root: Path) -> list[str]:
    """Return the claims and numbers that the records in ``folder`` do not support.

    Claims and quotes that a page does not make count too, and numbers that are neither marked nor
    quoted in a paragraph with a link to a record.
    """
    views = _views(document.groups, folder)
    on_pages = {path: visible(text) for path, text in _read(document, root).items()}
    found = [
        f"{page}: {words}"
        for page, claims in document.claims.items()
        for words, holds in claims.items()
        if words not in on_pages[root / page] or not holds(views)
    ]
    names = _names(document.rows, views)
    for page in dict.fromkeys([*_written_pages(root), *document.quotes]):
        text, texts = read_text(root / page), quoted(document.quotes.get(page, ()), names)
        as_read = shown(text)
        found += [f"{page}: {one}" for one in texts if one not in as_read]
        found += [f"{page}: {one}, where a record is named" for one in unquoted(text, texts)]
    return found


def _written_pages(root: Path) -> list[str]:
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    return [page.relative_to(root).as_posix() for page in sorted(pages)]


def write_document(document: Document, folder: Path, root: Path) -> list[Path]:
    """Fill the pages, and draw the pictures that they show; return the paths of written files.

    Parameters
    ----------
    document : Document
    folder : Path
        The folder of records.
    root : Path
        The folder of README.md and docs.

    Raises
    ------
    DataError
        If a record is missing or damaged, a block has records from several kinds of processor, or
        a page cannot be read or written.
    ValueError
        If a marked place cannot be filled.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    views = _views(document.groups, folder)
    texts = {path: fill(text, document.rows, views) for path, text in _read(document, root).items()}
    draw = {name: draw for group in document.groups for name, draw in group.pictures.items()}
    written = list(texts)
    try:
        (root / "docs" / "results").mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        for name in dict.fromkeys(_PICTURE.findall("".join(texts.values()))):
            figure = Figure(figsize=(WIDTH, 4), layout="constrained")
            if name in document.pictures:
                document.pictures[name](figure, views)
            else:
                draw[name](figure, views.records)
            written.append(root / "docs" / "results" / f"{name}.png")
            figure.savefig(written[-1], dpi=160)
    except OSError as error:
        raise disk_error(error, root / "docs", "run it again") from error
    return written
