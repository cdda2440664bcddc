"""The table of optimizers: its figures on known cases, and whether the documentation tells them."""

from __future__ import annotations

from pathlib import Path

from mpgluon.diagnostics.optimizers import optimizer_names, report_on_optimizer

import mxnet as mx
import pytest
from helpers import module_from

ROOT = Path(__file__).resolve().parents[2]


def load_script():
    return module_from(ROOT / "scripts" / "optimizer_table.py")


def documented() -> dict[str, list[str]]:
    lines = (ROOT / "docs" / "optimizers.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {row[0]: row for row in rows[2:]}


def kind(cell: str) -> str:
    """Return a cell as it is on every processor: words, zeros, and that there is a figure."""
    return "a figure" if cell[0].isdigit() and cell != "0" else cell


def test_every_optimizer_of_mxnet_is_in_the_table():
    registry = mx.optimizer.Optimizer.opt_registry
    own = [name for name, entry in registry.items() if entry.__module__.startswith("mxnet")]
    assert optimizer_names() == sorted(own) == list(documented())
    assert len(own) == 19


@pytest.mark.parametrize("name", optimizer_names())
def test_the_documented_row_of_each_optimizer_is_what_running_it_gives(name):
    row = load_script()._row(report_on_optimizer(name))
    assert [kind(cell) for cell in row] == [kind(cell) for cell in documented()[name]]


@pytest.mark.parametrize("name", optimizer_names())
def test_masters_and_bfloat16_have_no_error_with_any_optimizer(name):
    report = report_on_optimizer(name)
    assert report.masters == report.bfloat16 == 0
    assert report.mxnet_masters > 0  # rounded before they began
    assert (report.mxnet > 1.5) is (name == "lars")


def test_known_failures_without_masters_are_told_apart():
    found = {name: report_on_optimizer(name).without_masters for name in ("adam", "rmsprop", "sgd")}
    assert found["adam"] == "NaN"
    assert found["rmsprop"] == "raises"
    assert found["sgd"] > 1


def test_the_script_prints_the_optimizers_that_it_is_asked_for(capsys):
    script = load_script()
    assert script.main(["sgd", "adam"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["optimizer", "sgd", "adam"]
    assert script.main(["--markdown", "sgd"]) == 0
    heading, dashes, row = capsys.readouterr().out.splitlines()
    assert heading.startswith("| optimizer ")
    assert set(dashes) == {"|", "-", " ", ":"}
    assert row.startswith("| sgd ")


def test_the_script_refuses_an_optimizer_that_mxnet_does_not_have(capsys):
    assert load_script().main(["sdg"]) == 2
    assert "MXNet has no optimizer 'sdg'; it has adadelta" in capsys.readouterr().err
