"""docs/results.md and README.md are what the records in results/evidence make of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image
from tiny_groups import EXPERIMENTS
from tiny_groups import GROUPS as TINY

from experiments.document import BEGIN, END, fill_readme, out_of_date, page, write_document
from experiments.experiment import Group, Outcome, Section
from experiments.groups import GROUPS
from experiments.records import Repetition, write_record

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "results" / "evidence"


def test_page_and_readme_say_what_the_records_say():
    assert out_of_date(GROUPS, RECORDS, ROOT) == [], "run python scripts/evidence.py document"


def test_each_picture_of_the_page_is_there_and_is_a_picture():
    docs = ROOT / "docs"
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", (docs / "results.md").read_text()):
        with Image.open(docs / name) as image:
            assert image.width >= 900


def test_the_experiments_of_all_groups_have_names_of_their_own_below_their_groups():
    names = [(group.name, one.name) for group in GROUPS for one in group.experiments()]
    assert len({name for _, name in names}) == len(names)
    assert all(name.startswith(f"{group}/") for group, name in names)


def test_every_group_has_a_section_without_any_record():
    for group in GROUPS:
        assert group.section({}).text


@pytest.fixture
def root(tmp_path):
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    return tmp_path


def test_sections_come_in_the_order_of_groups_and_pictures_are_drawn(root, record_of):
    folder = root / "records"
    current, other = EXPERIMENTS[0], EXPERIMENTS[1]
    write_record(record_of(current, Outcome({})), folder)
    write_record(record_of(other, Outcome({}), config={"was": "another"}), folder)
    assert out_of_date(TINY, folder, root) == [root / "docs" / "results.md", root / "README.md"]
    written = write_document(TINY, folder, root)
    assert [path.name for path in written] == ["results.md", "README.md", "tiny.png", "other.png"]
    text = written[0].read_text()
    headings = ["# Results", "## About tiny", "## About other", "## Repeated from scratch"]
    assert re.findall("^#.*", text, re.MULTILINE) == headings
    assert text.count("Records: tiny/threads.\n") == 2  # the other is no longer what it was
    assert "|       1 | a processor (avx2) | mxnet 1.9.1 | 2026-01-02 |" in text
    for path in written[2:]:
        with Image.open(path) as image:
            assert image.format == "PNG"
    assert out_of_date(TINY, folder, root) == []
    written[0].write_text(text + "typed by hand\n")
    assert out_of_date(TINY, folder, root) == [written[0]]


def test_the_readmes_block_is_replaced_and_nothing_else(root):
    text = (root / "README.md").read_text()
    assert fill_readme(text, r"new \1") == f"before\n{BEGIN}\nnew \\1\n{END}\nafter\n"
    for wrong in ("no place", text + text):
        with pytest.raises(ValueError, match=r"README\.md needs one place"):
            fill_readme(wrong, "new")


def test_repetitions_are_shown_with_what_came_of_them():
    made = [
        Repetition("a/b", "2026-01-02T00:00:00+00:00", 7, None),
        Repetition("a/c", "2026-01-03T00:00:00+00:00", None, "loss was 1, is 2"),
    ]
    text, _ = page([], {}, made)
    assert "1 of 2 came out the same" in text
    assert "| `a/b`      | by chance, `--seed 7` | 2026-01-02 | the same         |" in text
    assert "| `a/c`      | asked for by name     | 2026-01-03 | loss was 1, is 2 |" in text
    assert "Nothing has been repeated yet" in page([], {}, [])[0]


def test_only_prose_is_wrapped():
    word = "word " * 40
    special = [
        f"- {word}",
        f"intro:\n- {word}",
        f"| {word} |",
        f"![{word}](x.png)",
        f"```\n{word}",
        f"{word}\n```",
        f"{'x' * 98} 1. {word}",  # whose second line would be a list
    ]
    group = Group("a", "A", lambda: [], lambda _: Section("\n\n".join([word, *special])))
    text = page([group], {}, [])[0]
    for block in special:
        assert block.strip() in text
    prose = text.split("## A\n\n")[1].split("\n\n")[0]
    assert prose.split() == word.split()
    assert 90 < max(map(len, prose.splitlines())) <= 100
