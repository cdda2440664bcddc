"""docs/results.md and README.md agree with the records in results/evidence."""

from __future__ import annotations

import re
from pathlib import Path

from mpgluon.errors import DataError

import pytest
from PIL import Image
from tiny_groups import EXPERIMENTS
from tiny_groups import GROUPS as TINY

from study.experiments import imagenet_weights, parity
from study.experiments.experiment import Outcome
from study.experiments.groups import GROUPS
from study.experiments.page import BEGIN, END, PAGES, out_of_date, render, write_document
from study.experiments.records import Repetition, write_record

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
TEMPLATES = ROOT / "study" / "experiments"


def test_page_and_readme_say_what_the_records_say():
    records = ROOT / "study" / "results" / "evidence"
    old = out_of_date(GROUPS, TEMPLATES, records, ROOT)
    assert old == [], "run python study/scripts/evidence.py document"
    # And the records support the conclusions that a person wrote.
    for path in (*(ROOT / "docs" / name for name in PAGES), ROOT / "README.md"):
        assert "no longer support the conclusion" not in " ".join(path.read_text().split())


def test_without_records_every_section_says_so_and_shows_no_picture(page_of):
    for page in PAGES:
        text = page_of({}, template=page.removesuffix(".md"))
        for group in GROUPS:
            assert f"Not run yet: {group.name}." in text
        assert "](results/" not in text
        assert "**" not in text  # no conclusion
    runs = len(imagenet_weights.GROUP.experiments)
    assert " ".join(page_of({}, template="readme").split()) == (
        f"{runs} of {runs} runs of a network with ImageNet's weights are not done yet; "
        "docs/results.md names them."
    )


def test_each_group_has_a_finding_with_a_picture_and_a_link_to_the_details():
    docs = ROOT / "docs"
    findings = (docs / "results.md").read_text().split("\n## ")[1:]
    titles = re.findall("^##+ (.*)", (docs / "results-details.md").read_text(), re.MULTILINE)
    anchors = {re.sub("[^a-z0-9 -]", "", one.lower()).replace(" ", "-") for one in titles}
    assert len(findings) == len(GROUPS)
    for section in findings:
        has_run = "Not run yet" not in section
        assert section.count("**") == 2 * has_run, section
        pictures = re.findall(r"!\[[^]]*\]\((results/[^)]+\.png)\)", section)
        assert len(pictures) == section.count("](results/") == has_run, section
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
    text = render(TEMPLATES / "results-details.md.jinja", GROUPS, runs, [])
    assert f"Not run yet: parity/{added[0].name}/bfloat16/seed-4." in text


@pytest.fixture
def root(tmp_path):
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    return tmp_path


def test_page_block_and_pictures_are_written_and_checked(root, record_of):
    folder = root / "records"
    text = render(HERE / "results.md.jinja", TINY, {}, [])
    assert "It has run" not in text
    assert "The records no longer support the conclusion" in text
    current, other = EXPERIMENTS[0], EXPERIMENTS[1]
    write_record(record_of(current, Outcome({})), folder)
    write_record(record_of(other, Outcome({}), config={"was": "another"}), folder)
    page, details = (root / "docs" / name for name in PAGES)
    readme = root / "README.md"
    assert out_of_date(TINY, HERE, folder, root) == [page, details, readme]
    written = write_document(TINY, HERE, folder, root)
    assert [path.name for path in written] == [*PAGES, "README.md", "tiny.png", "other.png"]
    # The other record is of another config.
    assert "1 origins. Records: tiny/threads.\n" in page.read_text()
    assert "**It has run.**" in page.read_text()
    assert page.read_text().endswith("Not run: tiny/fails, other.\n")
    assert readme.read_text() == f"before\n{BEGIN}\n2 tiny experiments.\n{END}\nafter\n"
    for path in written[3:]:
        with Image.open(path) as image:
            assert image.format == "PNG"
    assert out_of_date(TINY, HERE, folder, root) == []
    page.write_text(page.read_text() + "typed by hand\n")
    assert out_of_date(TINY, HERE, folder, root) == [page]


def test_a_group_with_records_from_two_kinds_of_processor_makes_no_page(root, record_of):
    for number, one in enumerate(EXPERIMENTS[:2]):
        machine = {"processor": f"processor {number}", "cpu_flags": []}
        write_record(record_of(one, Outcome({}), machine=machine), root / "records")
    with pytest.raises(DataError, match=r"records of tiny would be from processor 0 .* and .*1 "):
        write_document(TINY, HERE, root / "records", root)


def test_origins_and_repetitions_are_shown(record_of):
    one = EXPERIMENTS[0]
    records = {
        one.name: record_of(one, Outcome({})),
        "b": record_of(one, Outcome({}), date="2026-01-04T00:00:00+00:00"),
    }
    made = [
        Repetition("a/b", "2026-01-02T00:00:00+00:00", 7, None),
        Repetition("a/c", "2026-01-03T00:00:00+00:00", None, "loss was 1, is 2"),
    ]
    text = render(TEMPLATES / "results-details.md.jinja", GROUPS, records, made)
    assert "|       2 | a processor (avx2) | mxnet 1.9.1 | 2026-01-02 to 2026-01-04 |" in text
    assert "1 of 2 repetitions gave the same result" in text
    assert "| `a/b`      | at random, `--seed 7` | 2026-01-02 | the same         |" in text
    assert "| `a/c`      | by name               | 2026-01-03 | loss was 1, is 2 |" in text
