"""Fixtures of this folder: made-up records, and the pages that records fill."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from study.experiments.claims import CLAIMS
from study.experiments.experiment import Experiment, Outcome, Record
from study.experiments.groups import GROUPS
from study.experiments.page import fill, views_of
from study.experiments.tables import ROWS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def record_of() -> Callable[..., Record]:
    """Return a function that makes a record of an experiment from an outcome."""

    def make(experiment: Experiment, outcome: Outcome, **changes: Any) -> Record:
        content = {
            "name": experiment.name,
            "config": experiment.config,
            "outcome": outcome,
            "command": f"python study/scripts/evidence.py run {experiment.name}",
            "threads": 1,
            "seconds": 2.5,
            "date": "2026-01-02T03:04:05+00:00",
            "source": {"commit": "0123", "has_changes": False},
            "machine": {"processor": "a processor", "cpu_flags": ["avx2"]},
            "versions": {"mxnet": "1.9.1"},
        }
        return Record(**{**content, **changes})

    return make


@pytest.fixture
def page_of() -> Callable[..., str]:
    """Return a function that fills a section of a page from records, without the marks.

    Lines of prose are joined; lines of tables are kept.
    """

    def make(records: dict[str, Record], title: str, page: str = "docs/results-details.md") -> str:
        section = (ROOT / page).read_text("utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
        text = fill(section, ROWS, views_of(GROUPS, records, []))
        text = re.sub("<!-- .*? -->", "", text)
        blocks = [
            one if one.startswith("|") else " ".join(one.split()) for one in text.split("\n\n")
        ]
        return "\n\n".join(blocks)

    return make


@pytest.fixture
def supported() -> Callable[[dict[str, Record], str], bool]:
    """Return a function that says whether records support the claim with these words."""

    def holds(records: dict[str, Record], words: str) -> bool:
        return bool(CLAIMS["docs/results.md"][words](views_of(GROUPS, records, [])))

    return holds
