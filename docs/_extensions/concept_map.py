"""The map of the lessons: which lesson and which concept is needed for which.

Lessons 02, 03 and 04 each answer one of the three accidents of lesson 01. Every later lesson needs
some of these three answers; which ones, the column "needed before" in notebooks/README.md says.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from docutils import nodes
from lessons import INDEX, Lesson, read_lessons
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

WIDTH = 340  # of the drawing; a telephone shows it in nearly this many pixels
_TOP, _ROW, _GAP = 44, 46, 10
_BOX_LEFT = 84  # of the later lessons; the lines of the answers are to the left of it


class Answer(NamedTuple):
    """An accident, the lesson about it, and the concept that answers it."""

    accident: str
    lesson: str
    concept: str
    centre: int  # of its column
    line: int  # where its line goes down, left of the later lessons
    style: str  # of that line


ANSWERS = (
    Answer("lost update", "02", "master weights", 56, 14, "one"),
    Answer("underflow", "03", "loss scale", 170, 34, "two"),
    Answer("overflow", "04", "cast", 284, 54, "three"),
)
NAMES = {
    "00": "Ten minutes: all of it, once",
    "01": "Which numbers 16 bits hold",
    "02": "Updates",
    "03": "Gradients",
    "04": "Casting",
    "05": "ResNet-50 in three formats",
    "06": "Which layer breaks",
    "07": "Time and memory",
    "08": "Several devices",
    "09": "A loop of your own",
    "10": "After training",
    "11": "Eight bits and fewer",
}
CONCEPTS = {
    "00": ("mixed precision",),
    "01": ("significant bits", "exponent bits", "TF32"),
    "05": ("checkpoint", "fine-tuning"),
    "06": ("status flags", "skipped step"),
    "07": ("Tensor Core", "native operators"),
    "08": ("replica", "all-reduce"),
    "09": ("gradient clipping",),
    "10": ("running statistics",),
    "11": ("E4M3", "MX format", "stochastic rounding"),
}


def edges(lessons: Sequence[Lesson]) -> Iterator[tuple[str, str]]:
    """Yield pairs of lessons and concepts of which the first is needed for the second.

    Raises
    ------
    ValueError
        If a lesson after 04 needs one that the map has no line for.
    """
    for answer in ANSWERS:
        yield "01", answer.accident
        yield answer.accident, answer.lesson
        yield answer.lesson, answer.concept
    concepts = {answer.lesson: answer.concept for answer in ANSWERS}
    for lesson in lessons:
        yield from ((lesson.number, concept) for concept in CONCEPTS.get(lesson.number, ()))
        if lesson.number <= "04":
            continue
        for needed in lesson.needs:
            if needed in concepts:
                yield concepts[needed], lesson.number
            elif needed != "01":  # which the three answers need
                raise ValueError(f"the map has no line from lesson {needed} to {lesson.number}")


def drawing(lessons: Sequence[Lesson]) -> str:
    """Return the map as SVG, whose nodes are links to lessons and to the glossary."""
    page = {lesson.number: f"../notebooks/{lesson.file[:-6]}.html" for lesson in lessons}
    later = [lesson for lesson in lessons if lesson.number > "04"]
    needed = set(edges(lessons))
    lines, marks, boxes = [], [], []

    def box(number: str, left: float, top: float, width: float, height: float) -> None:
        concepts = CONCEPTS.get(number, ())
        title = f'<tspan class="number">{number}</tspan> {html.escape(NAMES[number])}'
        middle, below = left + width / 2, top + (18 if concepts else height / 2 + 4.5)
        boxes.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="4"/>'
            f'<a href="{page[number]}"><text x="{middle}" y="{below}">{title}</text></a>'
        )
        words = " · ".join(
            f'<a href="{_definition(one)}">{html.escape(one)}</a>' for one in concepts
        )
        if words:
            boxes.append(f'<text class="words" x="{middle}" y="{top + height - 8}">{words}</text>')

    def pill(concept: str, centre: float, top: float, style: str = "") -> None:
        boxes.append(
            f'<a href="{_definition(concept)}"><rect class="concept {style}" x="{centre - 54}" '
            f'y="{top}" width="108" height="28" rx="14"/>'
            f'<text x="{centre}" y="{top + 18.5}">{concept}</text></a>'
        )

    def arrow_down(x: float, top: float, bottom: float) -> None:
        lines.append(f'<path d="M{x} {top}V{bottom}"/>')
        marks.append(f'<path class="tip" d="M{x} {bottom}l-5 -8h10z"/>')

    def arrow_right(left: float, right: float, y: float) -> None:
        lines.append(f'<path d="M{left} {y}H{right}"/>')
        marks.append(f'<path class="tip" d="M{right} {y}l-8 -5v10z"/>')

    box("00", 0, 2, WIDTH, _TOP)
    box("01", 0, 64, WIDTH, _TOP)
    for answer in ANSWERS:
        arrow_down(answer.centre, 64 + _TOP, 136)
        pill(answer.accident, answer.centre, 136)
        arrow_down(answer.centre, 164, 188)
        box(answer.lesson, answer.centre - 54, 188, 108, 32)
        arrow_down(answer.centre, 220, 244)
        pill(answer.concept, answer.centre, 244, answer.style)
    top = 320
    for place, lesson in enumerate(later):
        y = top + place * (_ROW + _GAP)
        box(lesson.number, _BOX_LEFT, y, WIDTH - _BOX_LEFT, _ROW)
        used = [one for one in ANSWERS if (one.concept, lesson.number) in needed]
        arrow_right(used[0].line, _BOX_LEFT, y + _ROW / 2)
        marks += [
            f'<circle class="{one.style}" cx="{one.line}" cy="{y + _ROW / 2}" r="5"/>'
            for one in used
        ]
    for place, answer in enumerate(ANSWERS):
        last = max(n for n, one in enumerate(later) if (answer.concept, one.number) in needed)
        path = f"M{answer.centre} 272V{282 + 10 * place}H{answer.line}"
        path += f"V{top + last * (_ROW + _GAP) + _ROW / 2}"
        lines.append(f'<path class="line {answer.style}" d="{path}"/>')
    height = top + len(later) * (_ROW + _GAP)
    return (
        f'<svg class="concept-map" viewBox="-1 0 {WIDTH + 2} {height}" role="group" '
        f'aria-label="{html.escape(description(lessons))}">'
        f"{''.join([*lines, *boxes, *marks])}</svg>"
    )


def description(lessons: Sequence[Lesson]) -> str:
    """Return the map in sentences, for a reader who cannot see it."""
    after = {answer.lesson: answer for answer in ANSWERS}
    sentences = ["Lesson 00 stands alone", "lesson 01 shows three accidents"]
    sentences += [
        f"lesson {one.lesson} answers the {one.accident} with the {one.concept}" for one in ANSWERS
    ]
    for lesson in lessons:
        words = [after[one].concept for one in lesson.needs if one in after]
        if words and lesson.number > "04":
            sentences.append(f"lesson {lesson.number} needs {' and '.join(words)}")
    return "Map of the lessons. " + "; ".join(sentences) + "."


def _definition(concept: str) -> str:
    return f"glossary.html#term-{concept.replace(' ', '-')}"


class ConceptMap(SphinxDirective):
    """``{concept-map}``: the map of the lessons."""

    def run(self) -> list[nodes.Node]:
        """Return the drawing."""
        self.env.note_dependency(str(INDEX))
        return [nodes.raw("", drawing(read_lessons()), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("concept-map", ConceptMap)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
