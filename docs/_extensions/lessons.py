"""The page of lessons, what each of them needs, and descriptions of their pictures."""

from __future__ import annotations

import ast
import base64
import html
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import nbformat
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from PIL import Image
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
INDEX = NOTEBOOKS / "README.md"
_THUMBNAIL_PIXELS = (480, 270)
_ROW = re.compile(r"^\| \[(\d\d) ([^]]+)\]\(([^)]+)\) \| (.*) \| ([\d, -]+) \| (\d+) \|$", re.M)
_WORDS_PER_MINUTE = 200  # of a reader
_ABILITIES = re.compile(r"## What you will be able to do\n\n((?:- .+\n?(?:  .+\n?)*)+)")
_EXERCISE = re.compile(r"^\*\*(\d\d\.\d)\*\* \(level ([123])\)", re.M)
_IMAGES = "imshow("  # in the code of a picture of images
_ANSWER = re.compile(r"^(?:answer = |check\().*\n?", re.M)


class Lesson(NamedTuple):
    """A row of the table in notebooks/README.md."""

    number: str
    title: str
    file: str
    teaches: str
    needs: tuple[str, ...]  # numbers of the lessons before it that it builds on
    minutes: int  # to run it on two cores


class Lessons(SphinxDirective):
    """``{lessons}``: a card for each row of the table in notebooks/README.md."""

    def run(self) -> list[nodes.Node]:
        """Return the cards, in the table's order."""
        self.env.note_dependency(str(INDEX))
        items = []
        for lesson in read_lessons():
            self.env.note_dependency(str(NOTEBOOKS / lesson.file))
            items.append(_card(lesson, nbformat.read(NOTEBOOKS / lesson.file, as_version=4)))
        return [nodes.raw("", f'<ul class="lessons">{"".join(items)}</ul>', format="html")]


class LessonPicture(SphinxDirective):
    """``{lesson-picture} 03 2``: the second picture of lesson 03, with its description."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Return the picture as the stored notebook has it."""
        number, place = self.arguments[0], int(self.arguments[1])
        path = NOTEBOOKS / next(one.file for one in read_lessons() if one.number == number)
        self.env.note_dependency(str(path))
        cell, png = list(pictures(nbformat.read(path, as_version=4)))[place - 1]
        text = html.escape(_description_of(cell))
        data = base64.b64encode(png).decode()
        picture = f'<img alt="{text}"{_class_of(cell)} src="data:image/png;base64,{data}">'
        return [nodes.raw("", f"<p>{picture}</p>", format="html")]


class Exercises(SphinxDirective):
    """``{exercises}``: the exercises of all lessons with room to write, or with ``:solutions:``."""

    option_spec: ClassVar = {"solutions": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Return a section for each lesson."""
        sections: list[nodes.Node] = []
        for lesson in read_lessons():
            path = NOTEBOOKS / lesson.file
            self.env.note_dependency(str(path))
            section = nodes.section(ids=[f"lesson-{lesson.number}"], names=[lesson.title])
            link = nodes.container()
            self._parse(f"[{lesson.number} {lesson.title}](../notebooks/{lesson.file})", link)
            section += nodes.title("", "", *link[0].children)
            for level, text, solution in tasks(nbformat.read(path, as_version=4)):
                if "solutions" in self.options:
                    box, text = nodes.container(), f"{text}\n\nSolution:\n\n{solution}"
                else:
                    box = nodes.container(classes=["exercise", f"level-{level}"])
                self._parse(text, box)
                section += box
            sections.append(section)
        return sections

    def _parse(self, text: str, node: nodes.Element) -> None:
        self.state.nested_parse(StringList(text.splitlines()), self.content_offset, node)


def read_lessons() -> list[Lesson]:
    """Return the rows of the table in notebooks/README.md."""
    rows = _ROW.findall(INDEX.read_text("utf-8"))
    return [
        Lesson(*row[:4], tuple(re.findall(r"\d\d", needs)), int(minutes))
        for *row, needs, minutes in rows
    ]


def exercises(notebook: Any) -> dict[str, int]:
    """Return the numbers of a lesson's exercises and their levels."""
    return {number: int(level) for number, level in _EXERCISE.findall(_text_of(notebook))}


def tasks(notebook: Any) -> Iterator[tuple[int, str, str]]:
    """Yield of each exercise its level, its Markdown with the code to begin with, its solution."""
    for cell, after, solution in zip(notebook.cells, notebook.cells[1:], notebook.cells[2:]):
        found = _EXERCISE.match(cell.source)
        if cell.cell_type == "markdown" and found:
            code = _ANSWER.sub("", after.source).strip()
            text = cell.source + (f"\n\n{_as_code(code)}" if code else "")
            yield int(found[2]), text, _as_code(solution.source.removeprefix("%%checked\n"))


def _as_code(text: str) -> str:
    return f"```python\n{text}\n```"


def abilities(notebook: Any) -> list[str]:
    """Return what a lesson says that one can do after it."""
    found = _ABILITIES.search(_text_of(notebook))
    if found is None:
        raise ValueError("a lesson does not say what one will be able to do")
    return [" ".join(one.split()) for one in re.split(r"^- ", found[1], flags=re.M)[1:]]


def times(lesson: Lesson, notebook: Any) -> str:
    """Return how long a lesson takes, in words."""
    reading = max(1, round(len(_text_of(notebook).split()) / _WORDS_PER_MINUTE))
    minutes = "1 minute" if lesson.minutes == 1 else f"{lesson.minutes} minutes"
    return f"{reading} minutes to read, {minutes} to run on two cores"


def _text_of(notebook: Any) -> str:
    """Return the Markdown of a notebook."""
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def _card(lesson: Lesson, notebook: Any) -> str:
    page = f"../notebooks/{lesson.file.removesuffix('.ipynb')}.html"
    after = "".join(f"<li>{_inline_code(one)}</li>" for one in abilities(notebook))
    needed = (
        f"Needed before: {', '.join(lesson.needs)}" if lesson.needs else "Nothing needed before"
    )
    return (
        f'<li><a href="{page}">{_thumbnail(notebook)}<span class="title">{lesson.number} '
        f"{html.escape(lesson.title)}</span></a>"
        f"<p>{_inline_code(lesson.teaches)}</p><p>{needed}; {times(lesson, notebook)}</p>"
        f"<details><summary>Afterwards you can</summary><ul>{after}</ul></details></li>"
    )


def _inline_code(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _thumbnail(notebook: Any) -> str:
    """Return the first picture of a notebook, small; decoration, since the title is beside it."""
    for cell, png in pictures(notebook):
        picture, small = Image.open(io.BytesIO(png)), io.BytesIO()
        picture.thumbnail(_THUMBNAIL_PIXELS)
        picture.convert("RGB").quantize(64).save(small, "png", optimize=True)
        data = base64.b64encode(small.getvalue()).decode()
        source = f"data:image/png;base64,{data}"
        return f'<img alt="" role="presentation"{_class_of(cell)} src="{source}">'
    return ""


def _class_of(cell: Any) -> str:
    """Return an attribute for a picture of images, which the dark theme must not invert."""
    return ' class="photograph"' if _IMAGES in cell.source else ""


def pictures(notebook: Any) -> Iterator[tuple[Any, bytes]]:
    """Yield the cell and the PNG file of each picture among a notebook's outputs."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            png = output.get("data", {}).get("image/png")
            if png:
                yield cell, base64.b64decode(png)


def describe_picture(code: str) -> str:
    """Return a sentence about what a cell draws, from its titles, axes and labels."""
    named: dict[str, list[str]] = {"title": [], "xlabel": [], "ylabel": [], "label": []}
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("set_title", "suptitle", "title") and node.args:
            named["title"] += _text(node.args[0])
        elif name in ("set_xlabel", "set_ylabel", "xlabel", "ylabel") and node.args:
            named[name.removeprefix("set_")] += _text(node.args[0])
        for keyword in node.keywords:
            if keyword.arg in named:
                named[keyword.arg] += _text(keyword.value)
    words = {"title": "", "xlabel": "horizontally ", "ylabel": "vertically ", "label": "curves: "}
    parts = [
        words[kind] + ", ".join(dict.fromkeys(texts)) for kind, texts in named.items() if texts
    ]
    return "; ".join(parts)


def _text(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [
            "".join("…" if not isinstance(v, ast.Constant) else str(v.value) for v in node.values)
        ]
    return []


def _description_of(cell: Any) -> str:
    return str(cell.metadata.get("alt") or describe_picture(cell.source))


def describe_pictures(_: Sphinx, docname: str, source: list[str]) -> None:
    """Give each picture its text, ``alt`` or what the code names; images are not inverted."""
    if not is_lesson(docname):
        return
    notebook = nbformat.reads(source[0], as_version=4)
    for cell, _ in pictures(notebook):
        text = _description_of(cell)
        if text:
            image = {"alt": text}
            if _IMAGES in cell.source:
                image["classes"] = "photograph"
            cell.metadata.setdefault("mystnb", {})["image"] = image
    source[0] = nbformat.writes(notebook)


def say_what_is_needed(_: Sphinx, docname: str, source: list[str]) -> None:
    """Write below a lesson's title how long it takes, what it needs, and its exercises' levels."""
    if not is_lesson(docname):
        return
    lessons = {lesson.number: lesson for lesson in read_lessons()}
    lesson = lessons[Path(docname).name[:2]]
    notebook = nbformat.reads(source[0], as_version=4)
    links = ", ".join(f"[{one}]({lessons[one].file})" for one in lesson.needs)
    levels = ", ".join(map(str, sorted(set(exercises(notebook).values()))))
    title, _, text = notebook.cells[0].source.partition("\n")
    notebook.cells[0].source = (
        f"{title}\n\n*{times(lesson, notebook)}. "
        f"Lessons needed before: {links or 'none'}. "
        f"Exercises of [levels](../docs/lessons.md#exercises) {levels}.*\n{text}"
    )
    source[0] = nbformat.writes(notebook)


def add_talk(app: Sphinx, docname: str, *_: object) -> None:
    """Let the page of the talk be presented."""
    if docname == "docs/talk":
        app.add_css_file("talk.css")
        app.add_js_file("talk.js", loading_method="defer", priority=900)  # after the figures


def is_lesson(docname: str) -> bool:
    """Return whether a page is made from a lesson's notebook."""
    return docname.startswith("notebooks/") and (NOTEBOOKS / f"{Path(docname).name}.ipynb").exists()


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives, the texts of pictures, and what is said of each lesson."""
    app.add_directive("lessons", Lessons)
    app.add_directive("exercises", Exercises)
    app.add_directive("lesson-picture", LessonPicture)
    app.connect("html-page-context", add_talk)
    app.connect("source-read", describe_pictures)
    app.connect("source-read", say_what_is_needed)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
