"""A run that was ended goes on to the weights that it would have had."""

import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from mpgluon import CheckpointError

import pytest
from helpers import assert_same_bits
from training_helpers import (
    DEADLINE_S,
    STEPS,
    Run,
    command_of,
    quick_config,
    run,
    run_interrupted,
    wait_until,
)

from recipes.training.checkpoints import RunCheckpoints
from recipes.training.interruption import Interruption


def assert_same_course(one: Run, other: Run) -> None:
    """Compare all results of two runs but for times and places."""
    assert_same_bits(one.parameters, other.parameters)
    assert_same_bits(one.arrays, other.arrays)
    for kind, times in (
        ("step", ("images_per_second", "image_wait")),
        ("epoch", ("training_seconds",)),
    ):
        first, second = one.events(kind), other.events(kind)
        assert all(event.pop(time) > 0 for event in first + second for time in times)
        assert first == second
    for name in ("test_accuracy", "train_loss", "steps", "skipped_steps", "final_loss_scale"):
        assert one.results[name] == other.results[name]


@pytest.mark.parametrize(
    "after_step", [3, 4, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 5, 8))]
)
def test_a_run_interrupted_after_any_step_ends_as_whole(shapes, tmp_path, float16_run, after_step):
    resumed = run_interrupted(shapes, tmp_path, after_step=after_step, dtype="float16")
    assert_same_course(resumed, float16_run)
    assert [event["step"] for event in resumed.events("start")] == [0, after_step]


BFLOAT16_WEIGHTS = "params=bfloat16,compute=bfloat16"
EMULATED = f"{BFLOAT16_WEIGHTS},emulate=true"
ADAM = {"dtype": "float16", "optimizer": "adam", "learning_rate": 1e-3}
WAYS = [
    {"dtype": "float32"},
    {"dtype": "float16", "amp": True},
    {"dtype": BFLOAT16_WEIGHTS},
    *({"dtype": EMULATED, "update_rounding": w} for w in ("nearest", "stochastic", "kahan")),
    {"dtype": "bfloat16"},
    ADAM,
    {"dtype": "float16", "ema": 0.75, "loss_scale": "128"},  # at which no step is skipped
    {"dtype": "float16", "batch_size": 5, "accumulate": 2},
    {"model": "mobilenetv3_small", "image_size": 32},  # with dropout
    *({**ADAM, "optimizer": name} for name in ("nadam", "nag", "rmsprop")),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", WAYS, ids=lambda options: " ".join(map(str, options.values())))
def test_every_way_to_train_can_be_interrupted(shapes, tmp_path, options):
    whole = run(shapes, tmp_path / "whole", **options)
    resumed = run_interrupted(shapes, tmp_path / "resumed", after_step=3, **options)
    assert_same_course(resumed, whole)


def start(shapes, output: Path, **changes) -> subprocess.Popen:
    return subprocess.Popen(
        command_of(quick_config(shapes, output, **changes)),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        start_new_session=True,  # so that a signal to its group is Ctrl-C in its terminal
    )


def wait_for_steps(process: subprocess.Popen, history: Path, steps: int) -> None:
    def are_done() -> bool:
        return history.exists() and history.read_text().count('"event": "step"') >= steps

    wait_until(are_done, process, lambda: process.communicate()[1])


LONGER = {"images_per_class": 12, "train_per_class": 10, "dtype": "float16"}
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_the_script_after_a_step_with_a_checkpoint_to_resume_from(tmp_path, number):
    whole = run(tmp_path, tmp_path / "whole", **LONGER)
    process = start(tmp_path, tmp_path / "run", **LONGER, workers=2)
    wait_for_steps(process, tmp_path / "run" / "history.jsonl", 2)
    os.killpg(process.pid, number)  # to the workers too, as terminals and batch systems do
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + number, errors
    assert f"stopped by {number.name}; continue with --resume from" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    resumed = run(tmp_path, tmp_path / "run", resume=True, **LONGER)
    assert 2 <= resumed.events("start")[1]["step"] < 20
    assert_same_course(resumed, whole)


@pytest.mark.multiprocess
def test_a_run_that_was_killed_goes_on_from_its_last_epoch(shapes, tmp_path, float16_run):
    process = start(shapes, tmp_path, dtype="float16")
    wait_for_steps(process, tmp_path / "history.jsonl", 6)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)
    (tmp_path / "results.json").unlink(missing_ok=True)
    with open(tmp_path / "history.jsonl", "a") as file:
        file.write('{"event": "st')  # as if killed within a line
    resumed = run(shapes, tmp_path, resume=True, dtype="float16")
    assert resumed.events("start")[1]["step"] in (4, STEPS)
    assert_same_course(resumed, float16_run)


@pytest.fixture
def copy_of_run(tmp_path, float16_run) -> Path:
    """Return a copy of the finished float16 run's folder, to be resumed or damaged."""
    shutil.copytree(float16_run.folder, tmp_path / "copy")
    return tmp_path / "copy"


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_named_and_passed_over(shapes, copy_of_run, float16_run, caplog):
    newest = copy_of_run / "checkpoints" / "step-00000008.npz"
    damage(newest)
    resumed = run(shapes, copy_of_run, resume=True, dtype="float16")
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert str(newest) in warning
    assert "damaged" in warning
    assert warning.endswith("trying the one before")
    assert resumed.events("start")[1]["step"] == 4
    assert_same_course(resumed, float16_run)


def test_without_a_good_checkpoint_nothing_is_continued_and_each_is_named(shapes, copy_of_run):
    for path in (copy_of_run / "checkpoints").iterdir():
        damage(path)
    before = contents(copy_of_run)
    with pytest.raises(CheckpointError, match="no checkpoint can be continued") as error:
        run(shapes, copy_of_run, resume=True, dtype="float16")
    assert "step-00000004.npz" in str(error.value)
    assert "step-00000008.npz" in str(error.value)
    assert contents(copy_of_run) == before


def test_a_folder_in_which_a_process_trains_is_refused_and_left_as_it_is(shapes, tmp_path):
    checkpoints = RunCheckpoints(quick_config(shapes, tmp_path), resume=False)
    part = tmp_path / "checkpoints" / ".step-00000004.npz.1.part"
    part.touch()
    lock = "import fcntl, sys; file = open('.lock', 'w'); fcntl.lockf(file, fcntl.LOCK_EX)"
    command = [sys.executable, "-c", f"{lock}; print(flush=True); sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as other:
        other.stdout.readline()
        for resume in (False, "auto"):
            with pytest.raises(CheckpointError, match=f"another process trains in {tmp_path}; wa"):
                run(shapes, tmp_path, resume=resume)
        assert part.exists()
        other.kill()
    with checkpoints.alone():
        assert not part.exists()
    assert os.listdir(tmp_path) == ["checkpoints"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_config_is_refused_by_what_differs(shapes, copy_of_run):
    before = contents(copy_of_run)
    with pytest.raises(ValueError, match="written by a run with another config") as error:
        run(shapes, copy_of_run, resume=True, dtype="float16", learning_rate=0.1, seed=3)
    assert "learning_rate was 0.05, is 0.1; seed was 0, is 3;" in str(error.value)
    assert "--output-dir" in str(error.value)
    with pytest.raises(CheckpointError, match="holds a run already; continue it with --resume"):
        run(shapes, copy_of_run, dtype="float16")
    assert contents(copy_of_run) == before


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_first_signal_is_noted_and_a_second_ctrl_c_interrupts_at_once(number):
    handlers = {n: signal.getsignal(n) for n in SIGNALS}
    with Interruption() as interruption:
        assert interruption.signal is None
        signal.raise_signal(number)
        assert interruption.signal is number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interruption.signal is number
    assert {n: signal.getsignal(n) for n in handlers} == handlers
