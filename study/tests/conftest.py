"""Fixtures of this folder: made-up records, and the page that records make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from study.experiments.experiment import Experiment, Outcome, Record
from study.experiments.groups import GROUPS
from study.experiments.page import render

TEMPLATES = Path(__file__).resolve().parents[2] / "study" / "experiments"


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
    """Return a function that makes a section of a page, or README's block, from records.

    Lines of prose are joined; lines of tables are kept.
    """

    def make(records: dict[str, Record], title: str = "", template: str = "results-details") -> str:
        text = render(TEMPLATES / f"{template}.md.jinja", GROUPS, records, [])
        if title:
            text = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
        blocks = [
            one if one.startswith("|") else " ".join(one.split()) for one in text.split("\n\n")
        ]
        return "\n\n".join(blocks)

    return make
