"""Processes of experiments: how many at a time, who waits for quiet, and what ends them."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing

import pytest
from tiny_groups import EXPERIMENTS, GROUPS

from benchmarks.machine import usable_cores
from experiments import runner
from experiments.experiment import Experiment, Outcome, Place
from experiments.runner import run_apart, run_here, select


def experiments(*names: str, needs_quiet: bool = False) -> list[Experiment]:
    return [Experiment(f"g/{n}", {}, lambda _: Outcome({}), needs_quiet=needs_quiet) for n in names]


def python(program: str):
    """Return a command line for each experiment, with its name as the first argument."""
    return lambda one: [sys.executable, "-c", program, one.name]


def run_all(chosen, command, tmp_path, *, jobs=2, threads=1):
    return list(run_apart(chosen, command, jobs=jobs, threads=threads, logs=tmp_path / "logs"))


# Appends a line as it begins and as it ends.
INTERVALS = """
import sys, time
def note(word):
    with open({path!r}, "a") as file: file.write(word + " " + sys.argv[1] + "\\n")
note("begin"); time.sleep(0.3); note("end")
"""


def most_at_a_time(lines: list[str]) -> int:
    running = most = 0
    for line in lines:
        running += 1 if line.startswith("begin") else -1
        most = max(most, running)
    return most


@pytest.mark.parametrize("jobs", [1, 3])
def test_so_many_run_at_a_time(jobs, tmp_path):
    path = tmp_path / "lines"
    program = INTERVALS.format(path=str(path), together=jobs)
    ended = run_all(experiments(*"abcd"), python(program), tmp_path, jobs=jobs)
    assert sorted(one.experiment.name for one in ended) == ["g/a", "g/b", "g/c", "g/d"]
    assert all(one.reason is None and one.seconds > 0 for one in ended)
    assert most_at_a_time(path.read_text().splitlines()) == jobs


def test_those_that_need_quiet_come_last_and_alone(tmp_path):
    path = tmp_path / "lines"
    chosen = experiments("x", "y", needs_quiet=True) + experiments("a", "b")
    run_all(chosen, python(INTERVALS.format(path=str(path), together=2)), tmp_path, jobs=4)
    lines = path.read_text().splitlines()
    assert {line.split()[1] for line in lines[:4]} == {"g/a", "g/b"}
    assert lines[4:] == ["begin g/x", "end g/x", "begin g/y", "end g/y"]


def test_threads_reach_the_process_and_quiet_ones_have_all_cores(tmp_path):
    program = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])"
    chosen = experiments("a") + experiments("q", needs_quiet=True)
    outputs = [one.output for one in run_all(chosen, python(program), tmp_path, threads=7)]
    assert outputs == ["7 7", f"{usable_cores()} {usable_cores()}"]


def test_a_variable_that_changes_arithmetic_does_not_reach_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("MXNET_SAFE_ACCUMULATION", "1")
    program = "import os; print('MXNET_SAFE_ACCUMULATION' in os.environ)"
    (ended,) = run_all(experiments("a"), python(program), tmp_path)
    assert ended.output == "False"


def test_one_that_fails_does_not_stop_the_others_and_its_last_words_are_kept(tmp_path):
    program = """
import os, signal, sys
print("\\n".join(f"line {n}" for n in range(99)))
if sys.argv[1] == "g/fails": sys.exit("no luck")
if sys.argv[1] == "g/killed": os.kill(os.getpid(), signal.SIGKILL)
"""
    found = {
        one.experiment.name: one
        for one in run_all(experiments("fails", "killed", "good"), python(program), tmp_path)
    }
    assert found["g/good"].reason is None
    assert found["g/fails"].reason == "ended with status 1"
    assert found["g/fails"].output.splitlines()[-2:] == ["line 98", "no luck"]
    assert found["g/killed"].reason == "was ended by SIGKILL, perhaps for lack of memory"
    assert "line 0\n" in (tmp_path / "logs" / "g" / "fails.log").read_text()


STUBBORN = """
import signal, sys, time
path = {path!r}
def stop(*_):
    open(path + "-saved", "w").close()
    {then}
signal.signal(signal.SIGINT, stop)
open(path, "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize("then", ["sys.exit(130)", "time.sleep(60)"])
def test_closing_interrupts_what_runs_and_kills_what_does_not_end(then, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_PATIENCE_S", 0.5)
    path = tmp_path / "ready"
    # The first ends when the second is ready.
    wait = f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.01)"
    programs = {"g/a": wait, "g/b": STUBBORN.format(path=str(path), then=then)}
    began = time.perf_counter()
    runs = run_apart(
        experiments("a", "b", "c"),
        lambda one: python(programs[one.name])(one),
        jobs=2,
        threads=1,
        logs=tmp_path,
    )
    with closing(runs):
        assert next(runs).experiment.name == "g/a"
    assert (tmp_path / "ready-saved").exists()
    assert time.perf_counter() - began < 30


def test_names_choose_what_is_below_them():
    assert select(GROUPS, []) == EXPERIMENTS
    assert [one.name for one in select(GROUPS, ["tiny/fails", "other/"])] == [
        "tiny/fails",
        "other/differs",
        "other/photographs",
    ]
    with pytest.raises(ValueError, match="no experiment 'tin'; the groups are tiny, other"):
        select(GROUPS, ["tiny", "tin"])


def test_a_record_says_with_what_it_was_made(tmp_path):
    experiment = Experiment("g/a", {"x": 1}, lambda place: Outcome({"is": place.work_dir.is_dir()}))
    record = run_here(experiment, Place(tmp_path, tmp_path / "new" / "work"), threads=3)
    assert record.outcome.figures == {"is": True}
    assert (record.name, record.config, record.threads) == ("g/a", {"x": 1}, 3)
    assert record.command == "python scripts/evidence.py run g/a"
    assert record.versions["mxnet"] == "1.9.1"
    assert record.machine["cores"] == len(os.sched_getaffinity(0))
    assert record.source.keys() == {"commit", "has_changes"}
    assert record.date.endswith("+00:00")
    assert str(tmp_path) not in str(record)
