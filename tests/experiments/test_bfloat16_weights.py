"""bfloat16 weights without masters: runs that differ from parity's in their updates alone."""

from __future__ import annotations

import re

import pytest

from experiments import bfloat16_weights, parity
from experiments.experiment import Outcome
from experiments.groups import GROUPS

TITLE = "bfloat16 weights without masters"
PARITY = {one.name: one for one in parity.GROUP.experiments}


def test_a_run_differs_from_paritys_in_its_weights_and_updates_alone():
    assert len(bfloat16_weights.GROUP.experiments) == 3 * 3 * 5
    for one in bfloat16_weights.GROUP.experiments:
        _, network, way, seed = one.name.split("/")
        base = dict(PARITY[f"parity/{network}/bfloat16/{seed}"].config)
        config = dict(one.config)
        assert config.pop("update_rounding") == way
        assert config.pop("dtype") == "params=bfloat16,compute=bfloat16"
        assert base.pop("dtype") == "bfloat16"
        assert config == base


@pytest.fixture
def records(record_of):
    """Return made-up records: all of both groups; Kahan as masters, nearest 20 points below."""

    def outcome(seed, points):
        accuracy = (60 + seed % 3 + points) / 100
        return Outcome({"test_accuracy": accuracy, "train_loss": 0.5, "skipped_steps": 0,
                        "steps": 240, "final_loss_scale": 1.0, "test_images": 200},
                       {"loss": [1.0], "loss_scale": [], "test_accuracy": [accuracy]},
                       {"training_seconds": 1.0})  # fmt: skip

    below = {"nearest": -20, "stochastic": -0.5, "kahan": 0}
    found = {}
    for one in (*PARITY.values(), *bfloat16_weights.GROUP.experiments):
        row, seed = one.name.split("/")[2:]
        noise = int(seed[-1]) * 0.01 * (row in below)
        found[one.name] = record_of(one, outcome(int(seed[-1]), below.get(row, 0) + noise))
    return found


def table_rows(text):
    """Return the lines of a table without its heading."""
    return [line for line in text.splitlines() if line.startswith("| ")][2:]


def test_the_pages_compare_each_way_with_masters(records, page_of):
    details = page_of(records, TITLE)
    assert "| alexnet" in details
    assert "`python scripts/evidence.py run bfloat16_weights/resnet50_v2/kahan`" in details
    assert "Not run yet" not in details
    pooled = page_of(records, TITLE, template="results")
    rows = re.findall(r"\| (\w+) +\| +(\d+) \| ([-+.\d]+) ", pooled)
    assert [row[:2] for row in rows] == [(way, "15") for way in bfloat16_weights.WAYS]
    assert [float(row[2]) for row in rows] == [-19.98, -0.48, 0.02]


def test_some_of_the_runs_are_shown_and_the_rest_named(records, page_of):
    some = {name: one for name, one in records.items() if "kahan" not in name}
    details = page_of(some, TITLE)
    assert "Not run yet: bfloat16_weights/alexnet/kahan, " in details
    assert len(table_rows(details)) == 3 * 2
    assert bfloat16_weights.GROUP in GROUPS
