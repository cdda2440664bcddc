"""The order in which a lent GPU is used: without one, steps fail or are left out, and say so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import module_from, soon_ends, starting_a_sleeper

ROOT = Path(__file__).resolve().parents[2]
script = module_from(ROOT / "study" / "scripts" / "record_gpu.py")


def test_steps_name_files_that_exist_most_valuable_first(tmp_path, capsys):
    planned = script.steps(tmp_path)
    assert planned[0].name == "truth"
    for step in planned:
        files = [part for part in step.arguments if part.endswith(".py")]
        assert files or step.name == "doctor"  # which is a command of mpgluon
        assert all((ROOT / file).is_file() for file in files)
    assert sum(step.seconds for step in planned if step.name in ("truth", "times")) < 600
    assert script.main(["--list", "--only", "truth"]) == 0
    assert capsys.readouterr().out == "truth                90 s at most, needs torch\n"
    assert {step.needs for step in planned if "pytest" in step.arguments} == {"mxnet and pytest"}


def test_the_times_need_pytorch_and_the_script_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert module_from(ROOT / "study" / "scripts" / "record_tensor_core_times.py").main([]) == 2
    assert "error: this needs PyTorch and torchvision" in capsys.readouterr().err


def test_a_step_that_fails_does_not_stop_the_next(tmp_path, capsys, monkeypatch):
    steps = [
        script.Step("good", "sys", 60, ("-c", "print('recorded')")),
        script.Step("bad", "sys", 60, ("-c", "raise SystemExit(3)")),
        script.Step("slow", "sys", 1, ("-c", starting_a_sleeper(tmp_path / "sleeper"))),
        script.Step("unavailable", "sys and no_such_package", 60, ("-c", "")),
        script.Step("last", "sys", 60, ("-c", "print('recorded too')")),
    ]
    monkeypatch.setattr(script, "steps", lambda _: steps)
    assert script.main(["--output", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    results = [line.split(" s  ")[1] for line in lines[:-1]]
    assert results[:3] == ["done", "failed with status 3; see bad.log", "out of time; see slow.log"]
    assert results[3].startswith("left out: no_such_package cannot be imported by ")
    assert results[4] == "done"
    assert lines[-1] == f"2 of 5 steps done; logs and records in {tmp_path}"
    assert (tmp_path / "last.log").read_text() == "recorded too\n"
    assert soon_ends(tmp_path / "sleeper")


def test_steps_for_which_no_time_is_left_are_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "steps", lambda _: [script.Step("one", "sys", 60, ("-c", ""))])
    assert script.main(["--output", str(tmp_path), "--minutes", "0"]) == 1
    assert "left out: no time left" in capsys.readouterr().out


@pytest.mark.parametrize("minutes", ["nan", "-1"])
def test_minutes_that_are_none_are_refused(minutes, capsys):
    with pytest.raises(SystemExit):
        script.main([f"--minutes={minutes}"])
    assert f"--minutes must not be negative, received {minutes}" in capsys.readouterr().err


def test_an_unknown_step_is_refused(capsys):
    with pytest.raises(SystemExit):
        script.main(["--only", "trut"])
    assert "there is no step trut" in capsys.readouterr().err
