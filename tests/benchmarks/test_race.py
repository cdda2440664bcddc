"""Races of processes: whose turn it is, what counts, and what becomes of those that go wrong."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import contestant as contestant_module
from benchmarks.contestant import Contestant, ContestantError, Process
from benchmarks.race import Case, CaseResult, Conditions, Failure, Result, race
from benchmarks.timing import Quartiles

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


def test_seconds_are_those_of_the_run(tmp_path):
    one = tiny("notes", path=str(tmp_path / "order"), letter="a", seconds=0.25)
    (result,) = run_case(one).results
    assert result.seconds[0] >= 0.25  # sleeping takes no less
    assert result.images_per_second == 4 / result.seconds[0]


def test_a_run_may_be_several_calls_of_which_one_is_timed(tmp_path):
    path = tmp_path / "order"
    one = tiny("notes", path=str(path), letter="a", seconds=0.05, calls=3)
    (result,) = run_case(one).results
    assert path.read_text() == "aaa"
    assert 0.05 <= result.seconds[0] < 0.15  # three take more
    assert result.images_per_second == 4 / result.seconds[0]


@pytest.mark.parametrize("names", [[], ["a", "b", "a"]])
def test_contestants_without_a_name_of_their_own_are_refused(names):
    with pytest.raises(ValueError, match=r"need a name each.*'a tiny case'"):
        run_case(*(tiny("tells", name) for name in names))


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"threads": 0}, {"warm_up": -1}, {"limit_s": 0.0}]
)
def test_conditions_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        Conditions(**{"threads": 1, **wrong})


# --- processes -------------------------------------------------------------------------------


def test_every_contestant_has_a_process_of_its_own_and_the_same_number_of_threads(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")  # a core for each that waits
    monkeypatch.setenv("GOMP_SPINCOUNT", "infinite")
    facts = [one.facts for one in run_case(tiny("tells", "a"), tiny("tells", "b")).results]
    assert facts[0]["pid"] != facts[1]["pid"]
    for one in facts:
        assert one["environment"] == {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def test_a_contestant_may_ask_for_threads_of_its_own():
    own = Contestant("own", f"{TINY}:tells", threads=3)
    (result,) = run_case(own).results
    assert result.facts["environment"]["OMP_NUM_THREADS"] == "3"


def test_the_modules_beside_the_childs_program_cannot_be_mistaken_for_others():
    (result,) = run_case(tiny("tells")).results
    assert str(Path(contestant_module.__file__).parent) not in result.facts["path"]


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


def test_what_contestants_print_is_not_taken_for_an_answer():
    result = run_case(tiny("prints"), conditions=Conditions(threads=1, rounds=2, limit_s=60))
    assert len(result.results[0].seconds) == 2


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

# A contestant, and why it has no result; then the last line of what it printed.
WRONG = {
    "it cannot be prepared": (
        tiny("raises_at_once"),
        "ended with status 1",
        "ValueError: this cannot be prepared",
    ),
    "it raises in its second run": (
        tiny("raises", run_number=2),
        "ended with status 1",
        "RuntimeError: went wrong in run 2",
    ),
    "it exits": (tiny("exits", status=7), "ended with status 7", ""),
    "it is killed": (tiny("is_killed"), "was ended by SIGKILL, perhaps for lack of memory", ""),
    "there is no such module": (
        Contestant("lost", "no_such_module:function"),
        "ended with status 1",
        "ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "its options are wrong": (
        tiny("exits", state=7),
        "ended with status 1",
        "TypeError: exits() got an unexpected keyword argument 'state'",
    ),
    "there is no such interpreter": (
        Contestant("lost", f"{TINY}:tells", python="/nowhere/python"),
        "could not be started: [Errno 2] No such file or directory: '/nowhere/python'",
        "",
    ),
}


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


def test_what_it_printed_before_is_reported_too():
    (failure,) = run_case(tiny("raises_at_once")).failures
    assert failure.output.splitlines()[0] == "before it went wrong"


@pytest.mark.parametrize(
    ("function", "what"), [("hangs", "for a run"), ("hangs_at_once", "to start")]
)
def test_one_that_hangs_is_ended_when_its_time_is_over(function, what):
    # Long enough for the others to start on a busy machine.
    conditions = Conditions(threads=1, rounds=2, warm_up=0, limit_s=5)
    result = run_case(tiny(function), tiny("tells", "b"), conditions=conditions)
    assert [one.name for one in result.results] == ["b"]
    assert [one.reason for one in result.failures] == [f"took longer than 5 s {what}"]


def test_one_that_dies_is_noticed_although_a_process_it_left_keeps_its_pipes_open(tmp_path):
    path = tmp_path / "pid"
    began = time.monotonic()
    (failure,) = run_case(tiny("leaves_a_process_behind", path=str(path))).failures
    assert failure.reason == "ended with status 3"
    assert time.monotonic() - began < ONCE.limit_s  # it was not taken for one that hangs
    pid = int(path.read_text())
    while is_running(pid) and time.monotonic() - began < ONCE.limit_s:
        time.sleep(0.01)  # it was killed, which takes a moment
    assert not is_running(pid)


def test_one_that_closes_its_pipes_and_stays_is_ended(monkeypatch):
    monkeypatch.setattr(contestant_module, "_END_S", 0.2)
    with Process(tiny("falls_silent"), threads=1, limit_s=60) as process:
        process.wait_until_ready()
        with pytest.raises(ContestantError, match="closed its output without ending"):
            process.run()


def test_the_end_of_the_block_ends_the_process_even_if_it_is_busy(monkeypatch):
    monkeypatch.setattr(contestant_module, "_END_S", 0.2)
    with Process(tiny("tells"), threads=1, limit_s=60) as process:
        process.wait_until_ready()
    assert not is_running(process.facts["pid"])
    with Process(tiny("hangs_at_once"), threads=1, limit_s=60) as process:
        pid = process._process.pid
        assert is_running(pid)
    assert not is_running(pid)
    process.close()  # again, which does no harm


def test_a_contestant_ends_when_the_process_that_started_it_is_killed():
    code = f"""
import os, signal
from benchmarks.contestant import Contestant, Process
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


# --- results ---------------------------------------------------------------------------------


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


def test_without_the_baseline_there_are_no_ratios():
    other = result_of("b", 2.0)
    case = CaseResult("name", "title", {}, "a", [other], [Failure("a", "died")])
    assert case.relative(other) is None
