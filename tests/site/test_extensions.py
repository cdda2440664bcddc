"""What `make docs` adds to Sphinx: it describes what there is, and notices each kind of mistake."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import mpgluon
from mpgluon.graph import operators
from mpgluon_tools.commands import COMMANDS

import pytest
import yaml

pytest.importorskip("sphinx", reason="`make docs` installs Sphinx, and runs this")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))
import lessons  # noqa: E402
import nbformat  # noqa: E402
import reference  # noqa: E402
from parsers import parser_of  # noqa: E402

PUBLIC = re.findall(
    r'^    "((?:mpgluon|recipes)[\w.]*)",$', (ROOT / "docs" / "conf.py").read_text("utf-8"), re.M
)

GOOD = '<h1 id="top">A</h1><img src="a.png" alt="A curve"><a href="b.html#there">b</a>'


@pytest.fixture
def site(tmp_path):
    (tmp_path / "a.png").touch()
    (tmp_path / "a.html").write_text(GOOD)
    (tmp_path / "b.html").write_text(
        '<p id="there"><a href="https://example.org/x?y=1#z">x</a></p>'
    )
    return tmp_path


def test_each_public_module_has_its_page():
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    assert sorted(re.findall(r"^```\{public-names\} (.*)$", pages, re.M)) == sorted(PUBLIC)


def test_what_the_pages_and_lessons_import_is_in_the_reference():
    sources = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    sources += (ROOT / "notebooks" / "source").glob("*.py")
    imported: set[str] = set()
    for path in sources:
        imported |= set(re.findall(IMPORT, path.read_text("utf-8"), re.M))
    assert sorted(imported - set(PUBLIC) - INTERNAL) == []


IMPORT = r"^from ((?:mpgluon|recipes|study)[\w.]*) import"
# Some lessons look into these, which are not promised to users.
INTERNAL = {
    "mpgluon.graph.description",
    "mpgluon.tools",
    "recipes.data.augment",
    "recipes.data.shapes",
    "mpgluon_tools.timing",
}


SCRIPTS = [*ROOT.glob("scripts/*.py"), *ROOT.glob("study/scripts/*.py")]
EVERY = [*(path.stem for path in SCRIPTS), *(f"mpgluon {one}" for one in COMMANDS)]


@pytest.mark.parametrize("script", sorted(EVERY))
def test_each_command_and_script_has_its_options_in_the_reference(script):
    page = (ROOT / "docs" / "reference" / "commands.md").read_text("utf-8")
    assert f"```{{command-line}} {script}\n" in page
    text = "\n".join(reference._command(parser_of(script)))
    for option in re.findall(r"(--[\w-]+)", parser_of(script).format_usage()):
        assert f"`{option}`" in text


def test_every_operator_of_the_table_is_listed():
    assert operators.listed_operators() >= {"Convolution", "softmax", "Embedding", "Reshape"}
    assert {operators.rule_of(name) for name in operators.listed_operators()} == set(operators.Rule)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_each_picture_of_a_lesson_has_a_description(path):
    source = [path.read_text("utf-8")]
    lessons.describe_pictures(None, f"notebooks/{path.stem}", source)
    for cell, _ in lessons.pictures(nbformat.reads(source[0], as_version=4)):
        assert cell.metadata["mystnb"]["image"]["alt"], cell.source


def test_each_lesson_has_a_card():
    files = {lesson.file for lesson in lessons.read_lessons()}
    assert files == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == mpgluon.__version__
