"""docs/results.md and README.md agree with the records in results/evidence."""

from __future__ import annotations

import re
from pathlib import Path

from mpgluon.errors import DataError

import pytest
from PIL import Image
from tiny_groups import DOCUMENT as TINY
from tiny_groups import EXPERIMENTS
from tiny_groups import PAGES as TINY_PAGES

from study.experiments import parity
from study.experiments.claims import CLAIMS
from study.experiments.experiment import Outcome
from study.experiments.groups import DOCUMENT, GROUPS
from study.experiments.page import (
    PAGES,
    fill,
    out_of_date,
    unsupported,
    views_of,
    visible,
    write_document,
)
from study.experiments.records import Repetition, write_record
from study.experiments.tables import ROWS

ROOT = Path(__file__).resolve().parents[2]


def test_pages_say_what_the_records_say():
    folder = ROOT / "study" / "results" / "evidence"
    assert out_of_date(DOCUMENT, folder, ROOT) == [], "run study/scripts/evidence.py document"
    assert unsupported(DOCUMENT, folder, ROOT) == []


def test_each_conclusion_has_a_condition():
    for page in PAGES[:2]:
        claims = [words.replace("**", "") for words in CLAIMS[page]]
        for words in re.findall(r"\*\*(.*?)\*\*", visible((ROOT / page).read_text("utf-8"))):
            is_question = words.endswith("?")
            assert is_question or any(words in one or one in words for one in claims), words


def test_each_group_has_a_finding_with_a_picture_and_a_link_to_the_details():
    docs = ROOT / "docs"
    findings = (docs / "results.md").read_text().split("\n## ")[1:]
    titles = re.findall("^##+ (.*)", (docs / "results-details.md").read_text(), re.MULTILINE)
    anchors = {re.sub("[^a-z0-9 -]", "", one.lower()).replace(" ", "-") for one in titles}
    assert len(findings) == len(GROUPS)
    for section in findings:
        assert section.count("**") == 2, section
        pictures = re.findall(r"!\[[^]]*\]\((results/[^)]+\.png)\)", section)
        assert len(pictures) == section.count("](results/") == 1, section
        for name in pictures:
            with Image.open(docs / name) as image:
                assert image.width >= 900
        (link,) = re.findall(r"\(results-details\.md#([^)]*)\)", section)
        assert link in anchors


def test_a_network_is_compared_once_all_its_runs_have_a_record(record_of):
    outcome = Outcome(
        {"test_accuracy": 0.5, "train_loss": 1.0, "skipped_steps": 0, "steps": 9,
         "final_loss_scale": 1.0, "test_images": 200},
        times={"training_seconds": 1.0},
    )  # fmt: skip
    runs = {one.name: record_of(one, outcome) for one in parity.GROUP.experiments}
    added = parity.NETWORKS[len(parity.FIRST_NETWORKS) :]
    assert parity.Parity(runs).later_networks == list(added) != []
    del runs[f"parity/{added[0].name}/bfloat16/seed-4"]
    view = parity.Parity(runs)
    assert added[0] not in view.networks
    assert len(view.networks) == len(parity.NETWORKS) - 1
    assert f"{added[0].name}, " in str(view.table())
    assert view.pooled["float16"].pairs == len(view.networks) * len(parity.SEEDS)
    assert view.first_in("float16", parity.FIRST_SEEDS).pairs == 3 * len(parity.FIRST_NETWORKS)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "docs").mkdir()
    for page, text in TINY_PAGES.items():
        (tmp_path / page).write_text(text)
    return tmp_path


@pytest.fixture
def records_of(record_of, root):
    """Return a function that writes a record of each tiny experiment, with changes to one."""

    def write(changed: int = 0, **changes) -> Path:
        for number, one in enumerate(EXPERIMENTS):
            record = record_of(one, Outcome({}), **(changes if number == changed else {}))
            write_record(record, root / "records")
        return root / "records"

    return write


def test_places_and_pictures_are_filled_and_checked(root, records_of):
    folder = records_of()
    page, details, readme = (root / name for name in PAGES)
    assert out_of_date(TINY, folder, root) == [page, readme]
    written = write_document(TINY, folder, root)
    assert written[:3] == [page, details, readme]
    assert [path.name for path in written[3:]] == ["tiny.png", "other.png"]
    assert "There are <!-- {len(records)} -->4<!-- end --> records." in page.read_text()
    assert "| tiny/threads      |\n" in page.read_text()
    assert visible(readme.read_text()) == "Of tiny experiments, 4 have run."
    for path in written[3:]:
        with Image.open(path) as image:
            assert image.format == "PNG"
    assert out_of_date(TINY, folder, root) == []
    page.write_text(page.read_text().replace("-->4<", "-->5<"))
    assert out_of_date(TINY, folder, root) == [page]


def test_a_page_that_lacks_the_words_of_a_claim_is_named(root, records_of):
    folder = records_of()
    assert unsupported(TINY, folder, root) == []
    page = root / PAGES[0]
    page.write_text(page.read_text().replace("It has run", "It ran"))
    assert unsupported(TINY, folder, root) == ["docs/results.md: It has run."]


def test_without_the_record_of_an_experiment_there_is_no_page(root, records_of):
    folder = records_of(changed=1, config={"was": "another"})
    for work in (write_document, out_of_date, unsupported):
        with pytest.raises(DataError, match=r"has no record of tiny/fails; run `python .* run ti"):
            work(TINY, folder, root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("it is <!-- {1} -->2", "a marked place has no <!-- end -->"),
        ("it is 2<!-- end -->", "or there is one without a place"),
        ("<!-- table: names() -->\n\n<!-- table: names() --><!-- end -->", "has no <!-- end -->"),
        ("it is\n<!-- {1} -->2<!-- end -->", "a number must not begin a line"),
        ("it is <!-- {unknown} -->2<!-- end -->", "cannot fill <!-- {unknown} -->: NameError"),
        ("<!-- table: none() -->\n<!-- end -->", "cannot fill <!-- table: none() -->: NameError"),
        (
            "<!-- table: names() -->\n<!-- end -->",
            "cannot fill <!-- table: names() -->: ValueError",
        ),
        ("<!-- table: [[1]] -->\n| a | b |\n<!-- end -->", "a row has 2 cells, received [1]"),
    ],
)
def test_a_place_that_cannot_be_filled_is_named(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fill(text, TINY.rows, views_of(TINY.groups, {}, []))


def test_a_group_with_records_from_two_kinds_of_processor_makes_no_page(root, records_of):
    folder = records_of(machine={"processor": "processor 1", "cpu_flags": []})
    with pytest.raises(DataError, match=r"records of tiny would be from a processor .* and .*1 "):
        write_document(TINY, folder, root)


def test_origins_and_repetitions_are_shown(record_of):
    one = EXPERIMENTS[0]
    records = {
        one.name: record_of(one, Outcome({})),
        "b": record_of(
            one,
            Outcome({}),
            date="2026-01-04T00:00:00+00:00",
            source={"commit": "a", "has_changes": False, "of_an_earlier_run": True},
        ),
    }
    made = [
        Repetition("a/b", "2026-01-02T00:00:00+00:00", 7, None),
        Repetition("a/c", "2026-01-03T00:00:00+00:00", None, "loss was 1, is 2"),
    ]
    views = views_of(GROUPS, records, made)
    days = "2026-01-02 to 2026-01-04"
    assert ROWS["origins"](views) == [["2", "a processor (avx2)", "mxnet 1.9.1", days, "0", "1"]]
    section = (ROOT / PAGES[1]).read_text("utf-8").split("\n## Repeated from scratch\n")[1]
    text = fill(section, ROWS, views)
    assert "Of 2 repetitions, 1 gave the same result." in visible(text)
    assert "| `a/b`      | at random, `--seed 7` | 2026-01-02 | the same         |" in text
    assert "| `a/c`      | by name               | 2026-01-03 | loss was 1, is 2 |" in text
