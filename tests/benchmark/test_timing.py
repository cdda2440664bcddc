"""Interleaved timing: order, rounds, and the arithmetic of quartiles and ratios."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mpgluon.benchmark.timing import Quartiles, interleave, quartiles, ratios

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmark.py"


def test_every_case_runs_once_a_round_in_an_order_that_is_reversed_each_time():
    calls = []
    cases = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = interleave(cases, rounds=3, warm_up=1)
    assert "".join(calls) == "abc" + "abc" + "cba" + "abc"
    assert list(seconds) == ["a", "b", "c"]
    assert all(len(times) == 3 and min(times) >= 0 for times in seconds.values())


@pytest.mark.parametrize(("cases", "rounds"), [({}, 3), ({"a": lambda: None}, 0)])
def test_nothing_to_time_is_refused(cases, rounds):
    with pytest.raises(ValueError, match="nothing to time"):
        interleave(cases, rounds=rounds)


def test_a_slow_round_cancels_in_its_ratio():
    assert ratios([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == [2, 2, 2]


def test_quartiles_are_those_of_the_sorted_values():
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == Quartiles(2, 3, 4)
    assert quartiles([7.0]) == Quartiles(7, 7, 7)


def load_script():
    spec = importlib.util.spec_from_file_location("benchmark_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_prints_a_table_for_each_format(capsys):
    options = ["--model", "cifar_resnet20_v1", "--image-size", "8", "--batch-size", "2"]
    given = ["loss-scaling", *options, "--rounds", "2", "--dtype", "float32", "float16", "bfloat16"]
    assert load_script().main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2].rstrip(",") for line in lines[::3]] == [
        "float32",
        "float16",
        "bfloat16",
    ]
    assert [line.split()[0] for line in lines[1::3]] == ["stock"] * 3
    assert all("x 1.000  [1.000, 1.000]" in line for line in lines[1::3])
    assert [line.split()[0] for line in lines[2::3]] == ["amp"] * 3


@pytest.mark.parametrize(
    "wrong", [["--batch-size", "0"], ["--rounds", "-1"], ["--image-size", "none"], ["--dtype", "f"]]
)
def test_wrong_options_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        load_script().main(["loss-scaling", *wrong])
    assert stop.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_network_that_no_zoo_has_is_refused_in_one_line(capsys):
    assert load_script().main(["loss-scaling", "--model", "no_such_network"]) == 2
    assert capsys.readouterr().err.startswith("error: no model zoo has a network called")
