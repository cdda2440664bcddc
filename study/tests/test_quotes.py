"""A number that a page takes from a record is compared with it, wherever it stands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from study.experiments.groups import DOCUMENT
from study.experiments.page import out_of_date, unsupported
from study.experiments.quotes import quoted, unquoted

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "study" / "results" / "evidence"
RECORD = "[record](../study/results/some.json)"


@pytest.fixture
def root(tmp_path):
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *map(ROOT.joinpath, DOCUMENT.quotes),
    ]:
        copy = tmp_path / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, copy)
    return tmp_path


def test_a_wrong_number_is_found_in_each_kind_of_place(root):
    more = f"\n\nA step takes 0.57 of FP32's time ({RECORD.replace('../', '')}).\n\n## "
    for page, right, wrong in (
        ("docs/performance.md", "AlexNet takes 1.28 times", "AlexNet takes 1.82 times"),
        ("CONTRIBUTING.md", "\n## ", more),  # which nothing quotes
        ("docs/performance.md", "takes 0.50, contrib.amp's 0.59", "takes 0.50, contrib.amp's 0.95"),
        ("notebooks/07_speed_and_memory.ipynb", "geometric mean 0.88", "geometric mean 0.98"),
    ):
        text = (root / page).read_text("utf-8")
        assert right in text, right
        (root / page).write_text(text.replace(right, wrong, 1), "utf-8")
    found = unsupported(DOCUMENT, FOLDER, root)
    for words in ("performance.md: AlexNet takes 1.28", "CONTRIBUTING.md: 0.57, where a record",
                  "performance.md: mpgluon's native BF16",
                  "07_speed_and_memory.ipynb: mpgluon float16"):  # fmt: skip
        assert any(words in one for one in found), (words, found)


def test_a_wrong_number_in_a_table_is_found(root):
    page = root / "docs" / "gpu.md"
    text = page.read_text("utf-8")
    page.write_text(text.replace("|              4663 |", "|              4763 |"), "utf-8")
    assert page.read_text("utf-8") != text
    assert out_of_date(DOCUMENT, FOLDER, root) == [page]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"It takes 0.57 of the time ({RECORD}).", ["0.57"]),
        (f"It takes 0.75 of the time ({RECORD}).", []),
        ("It takes 0.57 of the time, and nothing is named.", []),
        (f"As follows ({RECORD}):\n\n| a | 1.25 |\n\nA later paragraph has 3.5.", ["1.25"]),
        ("![A step takes 0.57](../study/results/some.png)", ["0.57"]),
        (f"MXNet 1.9.1, x86-64-v3, 2 cores ({RECORD})", []),
        (f"<!-- {{a:.2f}} -->0.57<!-- end --> ({RECORD})", []),
    ],
)
def test_numbers_where_a_record_is_named_are_marked_or_quoted(text, left):
    assert unquoted(text, ["It takes 0.75 of the time"]) == left


def test_a_quote_that_cannot_be_filled_is_named():
    assert quoted(["{a:.1f}  of\n it"], {"a": 0.25}) == ["0.2 of it"]
    with pytest.raises(ValueError, match=r"cannot fill the quote '\{b\}': NameError"):
        quoted(["{b}"], {})
