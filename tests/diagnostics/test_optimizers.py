"""The table of optimizers: its figures on known cases, and whether the documentation tells them."""

from __future__ import annotations

from pathlib import Path

from mpgluon_tools.diagnostics.optimizers import optimizer_names, report_on_optimizer

import mxnet as mx
import pytest
from helpers import module_from

ROOT = Path(__file__).resolve().parents[2]


def documented() -> dict[str, list[str]]:
    lines = (ROOT / "docs" / "optimizers.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {row[0]: row for row in rows[2:]}


@pytest.fixture(scope="module")
def script():
    return module_from(ROOT / "study" / "scripts" / "optimizer_table.py")


def kind(cell: str) -> str:
    """Return a cell as it is on every processor: words, zeros, and that there is a figure."""
    return "a figure" if cell[0].isdigit() and cell != "0" else cell


def test_every_optimizer_of_mxnet_is_in_the_table():
    registry = mx.optimizer.Optimizer.opt_registry
    own = [name for name, entry in registry.items() if entry.__module__.startswith("mxnet")]
    assert optimizer_names() == sorted(own) == list(documented())
    assert len(own) == 19


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", optimizer_names())
def test_each_optimizer_is_exact_with_masters_and_bfloat16_and_documented_as_it_is(name, script):
    report = report_on_optimizer(name)
    assert report.masters == report.bfloat16 == 0
    assert report.mxnet_masters > 0  # rounded before they began
    assert (report.mxnet > 1.5) is (name == "lars")
    assert list(map(kind, script._row(report))) == list(map(kind, documented()[name]))


@pytest.mark.parametrize(("name", "failure"), [("adam", "NaN"), ("rmsprop", "raises")])
def test_known_failures_without_masters_have_names(name, failure):
    assert report_on_optimizer(name).without_masters == failure
    assert report_on_optimizer("sgd").without_masters > 1


def test_the_script_prints_the_named_optimizers_and_refuses_unknown_ones(
    script, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    assert script.main(["sgd", "adam"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["optimizer", "sgd", "adam"]
    assert script.main(["--markdown", "sgd"]) == 0
    heading, dashes, row = capsys.readouterr().out.splitlines()
    assert heading.startswith("| optimizer ")
    assert set(dashes) == {"|", "-", " ", ":"}
    assert row.startswith("| sgd ")
    assert script.main(["sdg"]) == 2
    assert "MXNet has no optimizer 'sdg'; it has adadelta" in capsys.readouterr().err
