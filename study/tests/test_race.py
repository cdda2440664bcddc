"""Races of processes: whose turn it is, what counts, and what becomes of those that go wrong."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from pathlib import Path

from mpgluon_tools.timing import Quartiles

import pytest

from study.benchmarks import contestant as contestant_module
from study.benchmarks.contestant import Contestant
from study.benchmarks.race import Case, CaseResult, Conditions, Result, race

TINY = str(Path(__file__).with_name("tiny_contestants.py"))
ONCE = Conditions(threads=1, rounds=1, warm_up=0, limit_s=60)


def tiny(function: str, name: str = "", **options) -> Contestant:
    return Contestant(name or function, f"{TINY}:{function}", options)


def run_case(*contestants: Contestant, conditions: Conditions = ONCE) -> CaseResult:
    return race(Case("tiny", "a tiny case", contestants, {"size": 1}), conditions)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"  # a zombie has ended
    except FileNotFoundError:
        return False


# --- turns -----------------------------------------------------------------------------------


def test_each_runs_once_a_round_in_an_order_that_is_reversed_and_warm_up_does_not_count(tmp_path):
    path = tmp_path / "order"
    result = run_case(
        *(tiny("notes", letter, path=str(path), letter=letter) for letter in "abc"),
        conditions=Conditions(threads=1, rounds=3, warm_up=2, limit_s=60),
    )
    assert path.read_text() == "abc" + "cba" + "abc" + "cba" + "abc"
    assert [one.name for one in result.results] == ["a", "b", "c"]
    assert all(len(one.seconds) == 3 and min(one.seconds) > 0 for one in result.results)
    assert (result.baseline, result.failures) == ("a", [])
    assert (result.name, result.title, result.settings) == ("tiny", "a tiny case", {"size": 1})


# --- processes -------------------------------------------------------------------------------


def test_every_contestant_has_a_process_of_its_own_and_the_same_number_of_threads(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")  # a core for each that waits
    monkeypatch.setenv("GOMP_SPINCOUNT", "infinite")
    facts = [one.facts for one in run_case(tiny("tells", "a"), tiny("tells", "b")).results]
    assert facts[0]["pid"] != facts[1]["pid"]
    for one in facts:
        assert one["environment"] == {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def test_the_memory_is_the_contestants_own_and_not_that_of_this_process():
    (result,) = run_case(tiny("takes_memory", mebibytes=200)).results
    # A bare interpreter has about 15 MiB; this process has imported MXNet, which takes 190.
    assert result.imported_mib < 60
    # Linux counts pages in batches, so that either figure may be off by a little.
    assert 195 < result.peak_memory_mib - result.imported_mib < 215


def test_a_contestant_that_waits_for_its_turn_takes_no_processor_time(tmp_path):
    slow = tiny("notes", "slow", path=str(tmp_path / "order"), letter="s", seconds=0.5)
    conditions = Conditions(threads=1, rounds=2, warm_up=0, limit_s=60)
    result = run_case(slow, tiny("tells", "idle"), conditions=conditions)
    # It waits half a second a round. Looking out for its turn would take most of that.
    assert result.results[1].idle_cpu_s < 0.05


def test_the_programs_of_other_interpreters_import_nothing_of_ours():
    folder = Path(contestant_module.__file__).parent
    for name in ("child.py", "pytorch_peer.py"):
        nodes = list(ast.walk(ast.parse((folder / name).read_text())))
        modules = {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
        modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert len(modules) > 3
        # Nor what PyTorch's interpreter may lack; "" is a relative import.
        assert {one.split(".")[0] for one in modules}.isdisjoint({"mpgluon", "mxnet", "numpy", ""})


# --- what goes wrong -------------------------------------------------------------------------

# A contestant, and why it has no result; then the last line of its output.
WRONG = {
    "it cannot be prepared": (tiny("raises_at_once"), "ended with status 1",
        "ValueError: this cannot be prepared"),
    "it raises in its second run": (tiny("raises", run_number=2), "ended with status 1",
        "RuntimeError: went wrong in run 2"),
    "it exits": (tiny("exits", status=7), "ended with status 7", ""),
    "it is killed": (tiny("is_killed"), "was ended by SIGKILL, perhaps for lack of memory", ""),
    "there is no such module": (Contestant("lost", "no_such_module:function"),
        "ended with status 1", "ModuleNotFoundError: No module named 'no_such_module'"),
    "its options are wrong": (tiny("exits", state=7), "ended with status 1",
        "TypeError: exits() got an unexpected keyword argument 'state'"),
    "there is no such interpreter": (Contestant("lost", f"{TINY}:tells", python="/nowhere/python"),
        "could not be started: [Errno 2] No such file or directory: '/nowhere/python'", ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_goes_wrong_is_reported_by_name_and_the_others_go_on(kind, caplog):
    wrong, reason, last_line = WRONG[kind]
    conditions = Conditions(threads=1, rounds=2, warm_up=1, limit_s=60)
    result = run_case(tiny("tells", "a"), wrong, tiny("tells", "b"), conditions=conditions)
    assert [(one.name, len(one.seconds)) for one in result.results] == [("a", 2), ("b", 2)]
    (failure,) = result.failures
    assert (failure.name, failure.reason) == (wrong.name, reason)
    assert (failure.output.splitlines() or [""])[-1] == last_line
    assert f"a tiny case: {wrong.name} {reason}; it is left out" in caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "what"), [("hangs", "for a run"), ("hangs_at_once", "to start")]
)
def test_one_that_hangs_is_ended_when_its_time_is_over(function, what):
    # Long enough for the others to start on a busy machine.
    conditions = Conditions(threads=1, rounds=2, warm_up=0, limit_s=5)
    result = run_case(tiny(function), tiny("tells", "b"), conditions=conditions)
    assert [one.name for one in result.results] == ["b"]
    assert [one.reason for one in result.failures] == [f"took longer than 5 s {what}"]


def test_a_contestant_ends_when_the_process_that_started_it_is_killed():
    code = f"""
import os, signal
from study.benchmarks.contestant import Contestant, Process
process = Process(Contestant("tells", {TINY + ":tells"!r}), threads=1, limit_s=60)
process.wait_until_ready()
print(process.facts["pid"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 60
    while is_running(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(int(done.stdout))


def result_of(name: str, *seconds: float, **facts) -> Result:
    return Result(name, seconds, peak_memory_mib=1.0, imported_mib=0.5, idle_cpu_s=0, facts=facts)


def test_ratios_are_taken_round_by_round():
    base, other = result_of("a", 1.0, 10.0, 2.0), result_of("b", 2.0, 20.0, 8.0, images=16)
    case = CaseResult("name", "title", {}, "a", [base, other])
    assert case.relative(base) == Quartiles(1, 1, 1)
    assert case.relative(other) == Quartiles(2, 2, 3)  # of 2, 2 and 4
    assert other.time == Quartiles(5, 8, 14)
    assert other.images_per_second == 2
    assert base.images_per_second is None
