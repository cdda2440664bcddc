"""The pages of results, their pictures and README.md's block, rendered from the records alone.

The prose and its conclusions are in templates; a conclusion is shown as long as the records support
it. A record whose config is no longer the experiment's counts as missing.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from mpgluon.base.files import disk_error
from mpgluon.errors import DataError
from mpgluon_tools.tables import Table

import jinja2

from study.experiments import cells
from study.experiments.experiment import Group, Records, is_below
from study.experiments.figures import WIDTH
from study.experiments.records import (
    Repetition,
    current_records,
    processor_of,
    read_repetitions,
    refuse_mixtures,
)
from study.experiments.statistics import CONFIDENCE

__all__ = ["BEGIN", "END", "PAGES", "out_of_date", "render", "write_document"]

PAGES = ("results.md", "results-details.md")
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
_BLOCK = re.compile(f"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.DOTALL)
_PICTURE = re.compile(r"\]\(results/([^)]+)\.png\)")
_COLUMNS = 100
# The beginning of a line that is not prose: tables, headings, pictures, lists, code, comments.
_MARK = re.compile(r"\s*(\||#|!\[|[-*+>] |```|<)")
_NUMBERED = re.compile(r"^\d+\. ", re.MULTILINE)
_NO_CONCLUSION = (
    "**The records no longer support the conclusion that was written here: see the tables.**\n"
)


def render(
    template: Path, groups: Sequence[Group], records: Records, repetitions: Sequence[Repetition]
) -> str:
    """Return a template in Markdown, filled from the records.

    A template has the view of each group under the group's name, ``records``, ``repetitions``,
    ``origins`` (rows of processor and versions), and these functions: ``table(headings, rows)``;
    ``command(name)``, the command line that runs an experiment; ``names(prefix)``, the experiments
    below a prefix; ``missing(prefix)``, the ones without a record, by their shortest common
    names; and the call block ``conclusion(holds)``, whose text is replaced by a notice if the
    records do not support it.

    Parameters
    ----------
    template : Path
    groups : sequence of Group
    records : mapping
        Current ones.
    repetitions : sequence of Repetition
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    everything = [one.name for group in groups for one in group.experiments]

    def names(prefix: str) -> list[str]:
        return [name for name in everything if is_below(name, prefix)]

    def missing(prefix: str) -> list[str]:
        return _shortest([name for name in names(prefix) if name not in records], everything)

    environment.globals.update(
        table=lambda headings, rows: Table(headings, rows).to_markdown(),
        command=lambda name: f"`python study/scripts/evidence.py run {name}`",
        conclusion=lambda holds, caller: caller() if holds else _NO_CONCLUSION,
        names=names,
        missing=missing,
        records=records,
        repetitions=repetitions,
        origins=_origins(records),
        confidence=f"{100 * CONFIDENCE:g} %",
        **{group.name: group.view(records) for group in groups},
    )
    environment.filters.update(
        number=cells.number,
        percent=cells.percent,
        signed=cells.signed,
        interval=cells.interval,
        mean_and_interval=cells.mean_and_interval,
        as_text=format,
        ln=math.log,
        log2=math.log2,
    )
    return _wrapped(environment.get_template(template.name).render())


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


def _origins(records: Records) -> list[list[str]]:
    """Return on what and when the records were made: number, processor, versions and dates."""
    made: dict[tuple[str, str], list[str]] = {}
    for record in records.values():
        versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        origin = (processor_of(record.machine), versions)
        made.setdefault(origin, []).append(record.date[:10])
    return [
        [str(len(days)), *origin, " to ".join(sorted({min(days), max(days)}))]
        for origin, days in made.items()
    ]


def _wrapped(text: str) -> str:
    """Return Markdown with its paragraphs in lines of a readable length; all else as it is."""
    blocks, is_code = [], False
    for block in re.split(r"\n{2,}", text.strip()):
        if not is_code and not any(map(_MARK.match, block.splitlines())):
            prose = " ".join(block.split())
            filled = textwrap.fill(prose, _COLUMNS, break_long_words=False, break_on_hyphens=False)
            # A word at the beginning of a new line must not make it a list.
            makes_list = any(map(_MARK.match, filled.splitlines())) or _NUMBERED.search(filled)
            block = prose if makes_list else filled
        blocks.append(block)
        is_code ^= block.count("```") % 2 == 1
    return "\n\n".join(blocks)


def _texts(
    groups: Sequence[Group], templates: Path, records: Records, folder: Path, root: Path
) -> dict[Path, str]:
    """Return the text of each file that is made from the records."""
    readme = root / "README.md"
    try:
        before = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {readme}: {error.strerror}; see --root") from error
    if len(_BLOCK.findall(before)) != 1:
        raise ValueError(f"README.md needs one place for results, between {BEGIN} and {END}")
    repetitions = read_repetitions(folder)
    *pages, block = (
        render(templates / f"{name}.jinja", groups, records, repetitions)
        for name in (*PAGES, "readme.md")
    )
    return {
        **{root / "docs" / name: f"{page}\n" for name, page in zip(PAGES, pages)},
        readme: _BLOCK.sub(lambda place: f"{place[1]}{block}\n{place[2]}", before),
    }


def out_of_date(groups: Sequence[Group], templates: Path, folder: Path, root: Path) -> list[Path]:
    """Return the files that differ from the ones made from the records in ``folder``.

    Markdown only: other versions of Matplotlib draw other pixels.
    """
    records = _current(groups, folder)
    return [
        path
        for path, text in _texts(groups, templates, records, folder, root).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def _current(groups: Sequence[Group], folder: Path) -> Records:
    records = current_records(folder, [one for group in groups for one in group.experiments])
    kinds: dict[str, set[str]] = {}
    for name, record in records.items():
        kinds.setdefault(name.split("/")[0], set()).add(processor_of(record.machine))
    refuse_mixtures(kinds, folder)
    return records


def write_document(
    groups: Sequence[Group], templates: Path, folder: Path, root: Path
) -> list[Path]:
    """Write the pages, README's block and the pictures that the pages show; return their paths.

    Parameters
    ----------
    groups : sequence of Group
    templates : Path
        The folder of results.md.jinja, results-details.md.jinja and readme.md.jinja.
    folder : Path
        The folder of records.
    root : Path
        The folder of README.md and docs.

    Raises
    ------
    DataError
        If a record is damaged, a group has records from several kinds of processor, or a file
        cannot be written.
    ValueError
        If README.md has no place for the block.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    records = _current(groups, folder)
    texts = _texts(groups, templates, records, folder, root)
    draw = {name: draw for group in groups for name, draw in group.pictures.items()}
    written = list(texts)
    try:
        (root / "docs" / "results").mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        pages = "".join(texts[root / "docs" / name] for name in PAGES)
        for name in dict.fromkeys(_PICTURE.findall(pages)):
            figure = Figure(figsize=(WIDTH, 4), layout="constrained")
            draw[name](figure, records)
            written.append(root / "docs" / "results" / f"{name}.png")
            figure.savefig(written[-1], dpi=160)
    except OSError as error:
        raise disk_error(error, root / "docs", "run it again") from error
    return written
