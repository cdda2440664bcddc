"""The script: the experiments that it runs, leaves out and repeats, and its exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import module_from
from tiny_groups import EXPERIMENTS, PAGES

from study.experiments.experiment import Outcome
from study.experiments.records import read_records, read_repetitions, write_record

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "study" / "scripts" / "evidence.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # for the processes that it starts
    return module_from(SCRIPT)


@pytest.fixture
def evidence(script, tmp_path):
    """Return a function that runs the script on tiny experiments in folders of its own."""

    def run(command: str, *arguments: str) -> int:
        places = [f"--output={tmp_path / 'records'}"]
        if command in ("run", "repeat"):
            places += [f"--work-dir={tmp_path / 'work'}"]
            if not any(one.startswith("--data-dir") for one in arguments):
                places += [f"--data-dir={tmp_path / 'data'}"]
        before = signal.getsignal(signal.SIGTERM)
        try:
            return script.main([command, "--groups=tiny_groups", *places, *arguments])
        finally:
            signal.signal(signal.SIGTERM, before)

    return run


@pytest.fixture
def recorded(record_of, tmp_path):
    """Return a function that writes a made-up record of a tiny experiment."""

    def write(name: str, outcome: Outcome, **changes) -> None:
        (one,) = (one for one in EXPERIMENTS if one.name == name)
        write_record(record_of(one, outcome, **changes), tmp_path / "records")

    return write


@pytest.fixture(autouse=True)
def machine_of_made_up_records(script, monkeypatch):
    """Make the script describe this machine as the machine of made-up records."""
    machine = {"processor": "a processor", "cpu_flags": ["avx2"]}
    monkeypatch.setattr(script, "describe_machine", lambda: machine)


@pytest.mark.slow
def test_records_from_another_kind_of_processor_are_not_mixed_with_new_ones(
    evidence, recorded, capsys, tmp_path
):
    machine = {"processor": "a processor", "cpu_flags": ["avx2", "avx512f"]}
    recorded("tiny/threads", Outcome({}), machine=machine)
    assert evidence("run", "tiny") == 2
    message = capsys.readouterr().err
    assert "the records of tiny would be from a processor (avx2 avx512f) and a processor" in message
    assert f"delete {tmp_path / 'records' / 'tiny'} to run all of it again" in message
    assert evidence("run", "tiny/threads") == 0  # there is nothing to run
    assert evidence("run", "other/differs") == 0  # another group


@pytest.mark.slow
def test_all_is_run_that_can_be_and_what_has_a_record_is_not_run_again(
    evidence, recorded, capsys, tmp_path
):
    recorded("other/differs", Outcome({"was": "there"}))
    recorded("tiny/threads", Outcome({"was": "there"}), config={"size": 2})  # of another config
    assert evidence("run") == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("1 with a record: other/differs\n")
    assert "left out other/photographs: " in printed.out
    assert "has photographs of 0 categories, and 101 are needed" in printed.out
    assert "tiny/fails: it ended with status 2" in printed.out
    assert "    error: it went wrong" in printed.out
    assert printed.err == "1 failed: tiny/fails\n"
    records = read_records(tmp_path / "records")
    assert sorted(records) == ["other/differs", "tiny/threads"]
    assert records["other/differs"].outcome.figures == {"was": "there"}
    assert records["tiny/threads"].outcome.figures == {"threads": 1, "runs here": 1}
    evidence("list")
    assert capsys.readouterr().out.splitlines() == [
        "done  tiny/threads",
        "      tiny/fails",
        "done  other/differs",
        "      other/photographs",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "other/photographs", "tiny"], "error: cannot run other/photographs: "),
        (["run", "nothing"], "there is no experiment 'nothing'"),
        (["repeat"], "has no record of an experiment that could be repeated"),
        (["repeat", "tiny/threads"], "there is no record of 'tiny/threads'"),
    ],
)
def test_what_cannot_be_run_or_repeated_is_an_error(evidence, capsys, arguments, message):
    assert evidence(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_repetition_is_from_scratch_with_the_same_threads_and_is_written_down(
    evidence, recorded, capsys, tmp_path
):
    outcome = Outcome({"threads": 2, "runs here": 1}, {"curve": [1, 0.1, None]}, {"clock": 1.0})
    recorded("tiny/threads", outcome, threads=2)
    recorded("other/differs", Outcome({}, {"curve": [0, "other"]}))  # times at best: no figures
    left = tmp_path / "work" / "tiny" / "threads" / "count"
    left.parent.mkdir(parents=True)
    left.write_text("7")
    assert evidence("repeat", "--seed=5") == 0
    printed = capsys.readouterr().out
    assert "one of 1, chosen with --seed 5" in printed
    assert "tiny/threads once more, with 2 threads" in printed
    assert evidence("repeat", "other/differs") == 1
    assert "not the same: curve[1] was other, is " in capsys.readouterr().err
    chance, named = read_repetitions(tmp_path / "records")
    assert (chance.name, chance.seed, chance.difference) == ("tiny/threads", 5, None)
    assert (named.name, named.seed) == ("other/differs", None)
    assert named.difference.startswith("curve[1] was other, is ")
    assert not list((tmp_path / "work").glob("repeated-*"))
    assert left.read_text() == "7"


def test_the_pages_are_filled_and_checked(evidence, recorded, capsys, tmp_path):
    (tmp_path / "docs").mkdir()
    for page, text in PAGES.items():
        (tmp_path / page).write_text(text)
    root = f"--root={tmp_path}"
    assert evidence("document", root) == 2
    assert "has no record of tiny, other; run `python study" in capsys.readouterr().err
    for one in EXPERIMENTS:
        recorded(one.name, Outcome({}))
    assert evidence("document", root, "--check") == 1
    assert f"out of date: {tmp_path / 'docs' / 'results.md'}" in capsys.readouterr().err
    assert evidence("document", root) == 0
    assert evidence("document", root, "--check") == 0
    page = tmp_path / "docs" / "results.md"
    page.write_text(page.read_text().replace("It has run.", "It was fast."))
    assert evidence("document", root, "--check") == evidence("document", root) == 1
    assert "the records do not support: docs/results.md: It has run." in capsys.readouterr().err
    page.write_text("<!-- table: names() -->")
    assert evidence("document", root) == 2
    assert "a marked place has no <!-- end -->" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_processes_and_is_said_in_one_line(number, tmp_path):
    (tmp_path / "slow_groups.py").write_text(
        "import time\n"
        "from study.experiments.experiment import *\n"
        "def run(place):\n"
        "    try:\n"
        "        (place.work_dir / 'began').touch()\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        (place.work_dir / 'saved').touch()\n"
        "        raise\n"
        "one = Experiment('slow/one', {}, run)\n"
        "GROUPS = [Group('slow', [one], dict)]\n"
    )
    places = [f"--{name}={tmp_path / name}" for name in ("output", "work-dir", "data-dir")]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "run", "--groups=slow_groups", *places],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    folder = tmp_path / "work-dir" / "slow" / "one"
    while not (folder / "began").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "stopped; `run` resumes from here\n"
    assert (folder / "saved").exists()


@pytest.mark.parametrize(
    "wrong", [["run", "--jobs=0"], ["run", "--threads=x"], [], ["dance"], ["repeat", "--seed=x"]]
)
def test_wrong_options_are_refused(wrong, script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(wrong)
    assert stop.value.code == 2
    assert "usage" in capsys.readouterr().err
