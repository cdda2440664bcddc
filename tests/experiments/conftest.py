"""What the tests of this folder share: records that nobody ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from experiments.experiment import Experiment, Outcome, Record


@pytest.fixture
def record_of() -> Callable[..., Record]:
    """Return what makes a record of an experiment from an outcome."""

    def make(experiment: Experiment, outcome: Outcome, **changes: Any) -> Record:
        content = {
            "name": experiment.name,
            "config": experiment.config,
            "outcome": outcome,
            "command": f"python scripts/evidence.py run {experiment.name}",
            "threads": 1,
            "seconds": 2.5,
            "date": "2026-01-02T03:04:05+00:00",
            "source": {"commit": "0123", "has_changes": False},
            "machine": {"processor": "a processor", "cpu_flags": ["avx2"]},
            "versions": {"mxnet": "1.9.1"},
        }
        return Record(**{**content, **changes})

    return make
