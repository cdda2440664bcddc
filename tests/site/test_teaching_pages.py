"""The pages for readers who learn and teach: glossary, talk, lessons and their map, first page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="`make docs` installs Sphinx, and runs this")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_extensions"))
import concept_map  # noqa: E402
import lessons  # noqa: E402
import nbformat  # noqa: E402

PAGES = {path: path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))}
TERM = re.compile(r"\{term\}`(?:[^`<]*<)?([^`<>]+)>?`")
DEFINITION = re.compile(r"^(\S.*)\n((?:  \S.*\n?)+)", re.M)
GLOSSARY = DOCS / "glossary.md"
DEFINED = DEFINITION.findall(re.search(r"```\{glossary\}\n(.*?)```", PAGES[GLOSSARY], re.S)[1])

TALK = DOCS / "talk.md"
SLIDES = re.split(r"^## ", PAGES[TALK], flags=re.M)[1:]
LINK = re.compile(r"(?<!!)\[[^]]+\]\(([^)#]+)(?:#[^)]*)?\)")
FIGURE = re.compile(r"^```(\{live\}|\{lesson-picture\}|python|diff|text)", re.M)
PICTURE = re.compile(r"!\[([^]]*)\]\(([^)]+)\)")

LESSONS = lessons.read_lessons()
NOTEBOOKS = {
    one.number: nbformat.read(lessons.NOTEBOOKS / one.file, as_version=4) for one in LESSONS
}


def plain(text: str) -> str:
    """Return Markdown in one line, with the words of its links and without marks."""
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
    return " ".join(re.sub(r"\*\*|^> ?", "", text, flags=re.M).split())


def test_each_word_is_defined_once_with_a_place_where_it_is_taught():
    words = [word for word, _ in DEFINED]
    assert len(words) == len(set(words)) == 42
    assert words == sorted(words, key=str.lower)
    for word, definition in DEFINED:
        assert LINK.search(definition), word
        sentences = plain(re.sub(r"\[[^]]*\]\([^)]*\)", "", definition))
        assert 8 <= len(sentences.split()) <= 55, word


def test_each_word_is_linked_from_another_page_and_on_each_page_once():
    used = {path: TERM.findall(text) for path, text in PAGES.items() if path != GLOSSARY}
    words = {word for word, _ in DEFINED}
    assert set().union(*used.values()) == words
    for path, terms in used.items():
        assert len(terms) == len(set(terms)), path


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "data/README.md"])
def test_files_that_are_read_on_github_have_no_roles_of_sphinx(name):
    assert "{term}" not in (ROOT / name).read_text("utf-8")


def test_the_talk_has_twenty_five_numbered_slides():
    assert [int(slide.partition(".")[0]) for slide in SLIDES] == list(range(1, 26))


@pytest.mark.parametrize("slide", SLIDES, ids=lambda text: text.partition("\n")[0])
def test_a_slide_has_a_figure_or_code_a_question_and_a_lesson(slide):
    figure = PICTURE.search(slide) or re.search(
        r"^```(\{live\}|\{lesson-p|python|diff|text)", slide, re.M
    )
    assert figure
    assert slide.count("**Say:**") == 1
    assert any("notebooks/" in link for link in LINK.findall(slide))
    for text, path in PICTURE.findall(slide):
        assert (DOCS / path).is_file(), path
        assert len(text.split()) >= 5, path
    for number, place in re.findall(r"^```\{lesson-picture\} (\d\d) (\d)$", slide, re.M):
        cell, _ = list(lessons.pictures(NOTEBOOKS[number]))[int(place) - 1]
        assert cell.metadata["alt"]
    lines = [line for line in slide.splitlines() if line.startswith(("- ", "> "))]
    assert len(lines) <= 5


@pytest.mark.parametrize(
    "slide", [s for s in SLIDES if "\n> " in s], ids=lambda text: text.partition("\n")[0]
)
def test_what_a_slide_quotes_stands_on_a_page_that_it_links_to(slide):
    linked = ""
    for link in LINK.findall(slide):
        path = (DOCS / link).resolve()
        if path.suffix == ".ipynb":
            notebook = nbformat.read(path, as_version=4)
            linked += plain(lessons._text_of(notebook)) + "\n"
        else:
            text = re.sub("<!--.*?-->", "", path.read_text("utf-8"))  # places of filled numbers
            linked += plain(text) + "\n"
    for quotation in re.findall(r"^> (.+)$", slide, re.M):
        assert plain(quotation).strip("… ") in linked


def test_a_live_figure_has_the_same_content_without_javascript_on_each_page():
    shown: dict[str, set[str]] = {}
    for path, text in PAGES.items():
        found = re.findall(r"^```\{live\} (\w+)\n(.*?)^```$", text, re.M | re.S)
        assert len({name for name, _ in found}) == len(found), path  # each works once on a page
        for name, content in found:
            shown.setdefault(name, set()).add(content)
    assert {name for name, contents in shown.items() if len(contents) > 1} == set()
    assert "number" in shown


@pytest.mark.parametrize("page", [DOCS / "index.md", TALK], ids=lambda path: path.stem)
def test_the_changed_lines_are_those_of_the_readme(page):
    (readme,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert re.findall(r"```diff\n(.*?)```", PAGES[page], re.S) == [readme]


def test_the_first_table_of_the_readme_is_what_the_first_page_includes():
    start, end = re.findall(
        r'^:(?:start-after|end-before): "(.*)"$', PAGES[DOCS / "index.md"], re.M
    )
    readme = (ROOT / "README.md").read_text("utf-8")
    assert (readme.count(start), readme.count(end)) == (1, 1)
    included = readme.partition(start)[2].partition(end)[0]
    assert [included.count(f"\n| {name}") for name in ("FP32", "FP16", "BF16", "FP8")] == [1] * 4


def test_each_lesson_says_what_it_needs_takes_and_gives():
    numbers = [lesson.number for lesson in LESSONS]
    assert numbers == sorted(numbers)
    for lesson in LESSONS:
        notebook = NOTEBOOKS[lesson.number]
        assert all(needed < lesson.number for needed in lesson.needs)
        assert 3 <= len(lessons.abilities(notebook)) <= 6
        assert re.match(r"\d+ minutes to read, ", lessons.times(lesson, notebook))
        checked = re.findall(r'^check\("(\d\d\.\d)", answer\)', "\n".join(
            cell.source for cell in notebook.cells if cell.cell_type == "code"), re.M)  # fmt: skip
        assert sorted(lessons.exercises(notebook)) == sorted(checked) != []
    levels = [set(lessons.exercises(notebook).values()) for notebook in NOTEBOOKS.values()]
    assert all(len(one) > 1 for one in levels)


def test_the_sheet_of_exercises_has_each_with_its_code_and_without_its_solution():
    for notebook in NOTEBOOKS.values():
        tasks = list(lessons.tasks(notebook))
        texts = [text for _, text, _ in tasks]
        assert [text[2:6] for text in texts] == list(lessons.exercises(notebook))
        assert not re.search(r"answer = |check\(|<details>", "".join(texts))
        for number, (_, _, solution) in zip(lessons.exercises(notebook), tasks):
            assert f'assert check("{number}", ' in solution
    (repaired,) = [t for _, t, _ in lessons.tasks(NOTEBOOKS["09"]) if "**09.3**" in t]
    assert repaired.endswith("    trainer.step(batch_size)\n```")


def test_a_lesson_page_says_below_its_title_what_is_needed():
    source = [nbformat.writes(NOTEBOOKS["05"])]
    lessons.say_what_is_needed(None, "notebooks/05_resnet50_on_caltech101", source)
    first = nbformat.reads(source[0], as_version=4).cells[0].source.split("\n")
    assert first[0].startswith("# Does ResNet-50")
    assert "Lessons needed before: [02](02_lost_updates.ipynb), [03](03_lost_grad" in first[2]
    assert "4 minutes to run" in first[2]
    assert "levels](../docs/lessons.md#exercises) 1, 2, 3." in first[2]


def test_the_map_leads_to_each_lesson_from_all_that_it_needs():
    pairs = list(concept_map.edges(LESSONS))

    def before(node: str) -> set[str]:
        direct = {first for first, second in pairs if second == node}
        return direct.union(*map(before, direct))

    needs = {lesson.number: set(lesson.needs) for lesson in LESSONS}
    for lesson in LESSONS:
        expected = set(lesson.needs)
        while any(needs[one] - expected for one in expected):
            expected |= set().union(*(needs[one] for one in expected))
        assert {one for one in before(lesson.number) if one in needs} == expected
    concepts = {node for pair in pairs for node in pair} - set(needs)
    assert concepts <= {word for word, _ in DEFINED}


def test_the_map_has_a_link_for_each_lesson_and_concept_and_says_itself_in_words():
    drawn = concept_map.drawing(LESSONS)
    links = re.findall(r'<a href="([^"]+)"', drawn)
    pages = {f"../notebooks/{one.file.removesuffix('.ipynb')}.html" for one in LESSONS}
    assert pages < set(links)
    concepts = {node for pair in concept_map.edges(LESSONS) for node in pair if node[0].isalpha()}
    assert {f"glossary.html#term-{one.replace(' ', '-')}" for one in concepts} <= set(links)
    assert "lesson 06 needs loss scale and cast" in drawn


def test_the_map_refuses_a_need_that_it_cannot_draw():
    wrong = [one._replace(needs=("06",)) if one.number == "07" else one for one in LESSONS]
    with pytest.raises(ValueError, match="no line from lesson 06 to 07"):
        list(concept_map.edges(wrong))
