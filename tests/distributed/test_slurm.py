"""The job script of docs/distributed.md in a real Slurm of one node: `make test WITH=slurm`."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from distributed_helpers import HERE, LIMIT_S, block_of_page, find_mpirun
from slurm_cluster import cluster

ROOT = HERE.parents[1]
OPTIONS = {
    "model": "cifar_resnet20_v1", "dataset": "shapes", "images_per_class": 6, "train_per_class": 4,
    "image_size": 32, "batch_size": 2, "dtype": "float16", "workers": 1,
}  # fmt: skip
AS_ROOT = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """Return the environment of a Slurm's users."""
    find_mpirun()
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    try:
        with cluster(folder) as environment:
            yield {**environment, **AS_ROOT}
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Return a folder like the checkout's, with the page's script and this environment."""
    (tmp_path / "job.sh").write_text(block_of_page("bash"))
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    return tmp_path


def submit(slurm: dict[str, str], checkout: Path, tasks: int, **more: object) -> str:
    """Submit the script, and return the job's number."""
    options = {**OPTIONS, "data_dir": checkout / "data", "output_dir": checkout / "run", **more}
    command = ["sbatch", "--parsable", f"--ntasks-per-node={tasks}", "--output=log", "job.sh"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return subprocess.check_output(command, cwd=checkout, env=slurm, text=True).strip()


def wait_until(is_so: Callable[[], bool], checkout: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, (checkout / "log").read_text()
        time.sleep(0.5)


def ended(slurm: dict[str, str], job: str, checkout: Path, status: int) -> list[dict[str, Any]]:
    """Wait for a job that ends with a status, and return the events of its run."""

    def fact(name: str) -> str:
        facts = subprocess.check_output(["scontrol", "show", "job", job], env=slurm, text=True)
        return re.search(rf"\b{name}=(\S+)", facts)[1]

    wait_until(lambda: fact("JobState") not in ("PENDING", "RUNNING", "COMPLETING"), checkout)
    assert fact("ExitCode") == f"{status}:0", (checkout / "log").read_text()
    lines = (checkout / "run" / "history.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("tasks", [2, 4])
def test_a_job_trains_in_as_many_processes_as_it_has_tasks(slurm, checkout, tasks):
    events = ended(slurm, submit(slurm, checkout, tasks, epochs=1), checkout, 0)
    assert [one["processes"] for one in events if one["event"] == "start"] == [tasks]
    steps = [one["images"] for one in events if one["event"] == "step"]
    assert steps == [2 * tasks] * (40 // (2 * tasks))


def test_slurms_signal_stops_a_job_with_a_checkpoint_and_the_same_script_goes_on(slurm, checkout):
    history, before = checkout / "run" / "history.jsonl", 0
    for _ in range(2):
        job = submit(slurm, checkout, 2, epochs=1000)
        wait_until(
            lambda before=before: (
                history.exists() and history.read_text().count('"event": "step"') > before
            ),
            checkout,
        )
        subprocess.run(["scancel", "--batch", "--signal=USR1", job], env=slurm, check=True)
        events = ended(slurm, job, checkout, 128 + signal.SIGUSR1)
        steps = [one["step"] for one in events if one["event"] == "step"]
        assert steps == list(range(1, len(steps) + 1))
        assert [one["step"] for one in events if one["event"] == "start"][-1] == before
        before = len(steps)
        assert (checkout / "run" / "checkpoints" / f"step-{before:08}.npz").exists()
