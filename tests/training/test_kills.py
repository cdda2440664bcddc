"""A run that is killed again and again ends with the weights of one that never was.

SIGKILL leaves no time to tidy up: a run goes on from the files that were on the disk already.
"""

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from test_resume import assert_same_course
from training_helpers import DEADLINE_S, STEPS_PER_EPOCH, Run, command_of, quick_config, wait_until

from recipes.training import TrainingConfig

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

KILLS, EPOCHS = 30, 40
EVERY_THIRD = 3  # kill comes while a checkpoint is written, which a random moment seldom hits
# The others come within the first ten steps and a little: most of them after a checkpoint, and on
# average after so few that the run outlives all.
LONGEST_WAIT_STEPS, STEP_S = 10, 0.05
WRITING_S = 0.005  # less than it takes to write these two megabytes to a fast disk


@contextmanager
def running(config: TrainingConfig, log: Path) -> Iterator[subprocess.Popen]:
    """Run the script with --resume=auto; it does not outlive the block."""
    command = [*command_of(config), "--resume=auto"]
    with open(log, "w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(config: TrainingConfig, log: Path) -> Run:
    with running(config, log) as process:
        assert process.wait(timeout=DEADLINE_S) == 0, log.read_text()
    return Run(config, json.loads((config.output_path / "results.json").read_text()))


class Traces:
    """The new files and events of a run on the disk."""

    def __init__(self, folder: Path) -> None:
        self._checkpoints, self._history = folder / "checkpoints", folder / "history.jsonl"
        names = [path.stem for path in self._checkpoints.glob("step-*.npz")]
        self.saved_step = max((int(name.removeprefix("step-")) for name in names), default=0)
        self._old_parts = self._parts()
        self._old_change_ns = self._history.stat().st_mtime_ns if self._history.exists() else 0
        # A run that resumes keeps the history up to its checkpoint, with the starts there.
        self._kept_starts = len(self._starts(self._events())) if self.saved_step else 0

    def _parts(self) -> dict[tuple[str, int], int]:
        sizes = {}
        for path in self._checkpoints.glob(".*.part"):
            with suppress(FileNotFoundError):  # complete and renamed
                status = path.stat()
                sizes[path.name, status.st_mtime_ns] = status.st_size
        return sizes

    def unfinished(self) -> list[int]:
        """Return the size in bytes of the checkpoint that was begun and is not complete."""
        return [size for part, size in self._parts().items() if part not in self._old_parts]

    def _events(self) -> list[dict]:
        lines = self._history.read_text().split("\n")[:-1] if self._history.exists() else []
        return [json.loads(line) for line in lines]

    @staticmethod
    def _starts(events: list[dict]) -> list[int]:
        return [place for place, event in enumerate(events) if event["event"] == "start"]

    def events(self) -> list[dict]:
        """Return the history since the start of the process that runs now."""
        if not self._history.exists() or self._history.stat().st_mtime_ns <= self._old_change_ns:
            return []
        events = self._events()
        new_starts = self._starts(events)[self._kept_starts :]
        return events[new_starts[0] :] if new_starts else []

    def steps(self) -> int:
        return sum(event["event"] == "step" for event in self.events())


@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        *(pytest.param(one, marks=pytest.mark.left_out) for one in ("float32", "bfloat16")),
    ],
)
def test_a_run_killed_at_thirty_random_moments_ends_as_whole(shapes, tmp_path, monkeypatch, dtype):
    # Sums are the same only in as many threads, and several on busy cores wait for each other.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    moments = random.Random(f"kills of {dtype}")
    log = tmp_path / "output"
    whole = quick_config(shapes, tmp_path / "whole", dtype=dtype, epochs=EPOCHS)
    # With one checkpoint on the disk there is none before it to go on from.
    config = replace(whole, output_dir=str(tmp_path / "killed"), keep_checkpoints=1)
    resumed_from, unfinished = [], []
    for kill in range(KILLS):
        traces = Traces(config.output_path)
        with running(config, log) as process:
            steps = moments.randint(1, LONGEST_WAIT_STEPS)
            wait_until(lambda n=steps, t=traces: t.steps() >= n, process, log.read_text)
            if kill % EVERY_THIRD == 0:
                wait_until(traces.unfinished, process, log.read_text)
            time.sleep(moments.uniform(0, STEP_S if kill % EVERY_THIRD else WRITING_S))
        assert process.returncode == -signal.SIGKILL, log.read_text()
        assert traces.events()[0]["step"] == traces.saved_step
        resumed_from.append(traces.saved_step)
        unfinished += traces.unfinished()
    killed, uninterrupted = finish(config, log), finish(whole, log)
    assert_same_course(killed, uninterrupted)
    resumed_from.append(killed.events("start")[-1]["step"])
    assert resumed_from == sorted(resumed_from)
    all_steps = EPOCHS * STEPS_PER_EPOCH
    assert len(killed.events("step")) == all_steps
    assert killed.checkpoints == uninterrupted.checkpoints[-1:]  # nothing half-written stays
    assert len(unfinished) >= KILLS / EVERY_THIRD / 2
    size = (killed.folder / "checkpoints" / killed.checkpoints[0]).stat().st_size
    print(  # noqa: T201 - for the documentation
        f"{dtype}: {KILLS} kills, {len(unfinished)} of them in the middle of writing a checkpoint "
        f"({', '.join(f'{part / size:.0%}' for part in sorted(unfinished))} of it written); "
        f"resumed from steps {', '.join(map(str, resumed_from[1:]))} of {all_steps}; "
        f"identical: {len(killed.parameters)} arrays, {len(killed.events('step'))} steps"
    )
