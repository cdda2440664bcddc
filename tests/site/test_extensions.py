"""What `make docs` adds to Sphinx: it describes what there is, and notices each kind of mistake."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import mpgluon
from mpgluon.graph import operators

import pytest
import yaml

pytest.importorskip("sphinx", reason="Sphinx is in the environment of `make docs`, which runs this")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))
import finished_site  # noqa: E402 - beside the site's configuration
import lessons  # noqa: E402
import nbformat  # noqa: E402
import reference  # noqa: E402
from parsers import SCRIPTS, parser_of  # noqa: E402

PUBLIC = re.findall(
    r'^    "((?:mpgluon|recipes)[\w.]*)",$', (ROOT / "docs" / "conf.py").read_text("utf-8"), re.M
)

GOOD = '<h1 id="top">A</h1><img src="a.png" alt="A curve"><a href="b.html#there">b</a>'
MISTAKES = {
    '<a href="missing.html">x</a>': "a link to a file that is not there",
    '<a href="b.html#nowhere">x</a>': "a link to a place that is not on that page",
    '<a href="#nowhere">x</a>': "a link to a place that is not on that page",
    '<a href="https://">x</a>': "is not an address of a page",
    '<a href="htp://example.org">x</a>': "is not an address of a page",
    '<a href="https://[example.org">x</a>': "is not an address",
    '<img src="a.png">': "a picture without a text alternative",
    '<img src="a.png" alt="">': "a picture without a text alternative",
    '<script src="https://cdn.example.org/x.js"></script>': "from another host",
    '<link rel="stylesheet" href="//cdn.example.org/x.css">': "from another host",
}


@pytest.fixture
def site(tmp_path):
    (tmp_path / "a.png").touch()
    (tmp_path / "a.html").write_text(GOOD)
    (tmp_path / "b.html").write_text(
        '<p id="there"><a href="https://example.org/x?y=1#z">x</a></p>'
    )
    return tmp_path


def test_good_pages_have_no_problems(site):
    assert list(finished_site.problems(site)) == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_of_a_page_is_named(site, mistake):
    (site / "a.html").write_text(GOOD + mistake)
    (problem,) = finished_site.problems(site)
    assert problem.startswith("a.html: ")
    assert MISTAKES[mistake] in problem


def warnings_without(monkeypatch, name: str) -> list[str]:
    """Return the warnings about a reference that describes all public names but one."""
    described = set(reference.homes(PUBLIC).values()) | set(PUBLIC)
    given: list[str] = []
    monkeypatch.setattr(reference.logger, "warning", lambda text, *args: given.append(text % args))
    domain = SimpleNamespace(objects=described - {name})
    reference.check_public_names(
        SimpleNamespace(config=SimpleNamespace(public_modules=PUBLIC)),
        SimpleNamespace(get_domain=lambda _: domain),
    )
    return given


@pytest.mark.parametrize("name", ["mpgluon.amp.scale_loss", "mpgluon.cast_block"])
def test_a_public_name_without_a_page_is_a_warning(monkeypatch, name):
    assert f"public name without a page: {name}" in warnings_without(monkeypatch, name)


def test_a_public_module_without_a_page_is_a_warning(monkeypatch):
    given = warnings_without(monkeypatch, "mpgluon.tools.plots")
    assert given == ["public module without a page: mpgluon.tools.plots"]


def test_a_complete_reference_has_no_warning(monkeypatch):
    assert warnings_without(monkeypatch, "") == []


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


IMPORT = r"^from ((?:mpgluon|recipes|benchmarks)[\w.]*) import"
# What some lessons look into, and what is no promise to users.
INTERNAL = {
    "mpgluon.graph.description",
    "mpgluon.tools",
    "recipes.data.augment",
    "recipes.data.shapes",
    "benchmarks.timing",
}


def test_names_in_docstrings_are_found_where_they_are():
    assert reference.name_exists("mpgluon.cast.arithmetic", None, None)
    assert reference.name_exists("init_trainer", "mpgluon.amp", None)
    assert reference.name_exists("update", "mpgluon", "DynamicLossScale")
    assert reference.name_exists("ValueError", "mpgluon.amp", None)
    assert not reference.name_exists("init_trainers", "mpgluon.amp", None)
    assert not reference.name_exists("mpgluon.nowhere", None, None)


@pytest.mark.parametrize("script", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_each_script_has_its_options_in_the_reference(script):
    page = (ROOT / "docs" / "reference" / "commands.md").read_text("utf-8")
    assert f"```{{command-line}} {script}\n" in page
    text = "\n".join(reference._command(parser_of(script)))
    for option in re.findall(r"(--[\w-]+)", parser_of(script).format_usage()):
        assert f"`{option}`" in text


def test_the_choices_and_default_of_an_option_are_shown():
    text = "\n".join(reference._command(parser_of("train_caltech")))
    (row,) = [line for line in text.splitlines() if line.startswith("| `--dataset`")]
    assert "`folder`" in row
    assert row.endswith("| `caltech101` |")
    assert "default:" not in row


def test_every_operator_of_the_table_is_listed():
    assert operators.listed_operators() >= {"Convolution", "softmax", "Embedding", "Reshape"}
    assert {operators.rule_of(name) for name in operators.listed_operators()} == set(operators.Rule)


def test_a_picture_is_described_by_what_its_cell_names():
    code = 'ax.plot(x, y, label="float16")\nax.set_xlabel(f"step of {n}")\nax.set_title("Loss")'
    assert lessons.describe_picture(code) == "Loss; horizontally step of …; curves: float16"
    assert lessons.describe_picture("plt.plot(x)") == ""


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_each_picture_of_a_lesson_has_a_description(path):
    source = [path.read_text("utf-8")]
    lessons.describe_pictures(None, f"notebooks/{path.stem}", source)
    for cell, _ in lessons.pictures(nbformat.reads(source[0], as_version=4)):
        assert cell.metadata["mystnb"]["image"]["alt"], cell.source


def test_each_lesson_has_a_card():
    rows = lessons._ROW.findall((ROOT / "notebooks" / "README.md").read_text("utf-8"))
    files = {file for _, _, file, _, _ in rows}
    assert files == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == mpgluon.__version__
