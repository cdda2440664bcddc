"""Helpers of this folder: the smallest run, and ways to look at its files."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from recipes.training import InterruptedRunError, TrainingConfig, train
from recipes.training.history import History

# 4 of 6 images of 10 classes train, in batches of 10: two epochs of four steps.
STEPS_PER_EPOCH, STEPS = 4, 8
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_caltech.py"
DEADLINE_S = 120
_QUICK = {
    **{"model": "cifar_resnet20_v1", "dataset": "shapes", "images_per_class": 6},
    **{"train_per_class": 4, "image_size": 32, "batch_size": 10, "epochs": 2},
    **{"warmup_epochs": 1, "workers": 0},
}


@dataclass(frozen=True)
class Run:
    config: TrainingConfig
    results: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.config.output_path

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        loaded = mx.nd.load(str(self.folder / "final.params"))
        return {name: array.asnumpy() for name, array in loaded.items()}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of the newest checkpoint, less values from before the cast.

        A run that was resumed has no such value of a weight without a master that moved and came
        back.
        """
        with np.load(self.folder / "checkpoints" / self.checkpoints[-1]) as file:
            return {n: file[n] for n in file.files if not n.startswith(("header", "fp32/"))}

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "history.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def quick_config(shapes: Path, output: Path, **changes) -> TrainingConfig:
    return TrainingConfig(
        **{**_QUICK, "data_dir": str(shapes), "output_dir": str(output), **changes}
    )


def command_of(config: TrainingConfig) -> list[str]:
    """Return the command line of the script that stands for a config."""
    given = {k: v for k, v in config.as_dict().items() if v is not None and v is not False}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return [sys.executable, "-W", "ignore", str(SCRIPT), *options]


def wait_until(condition: Callable[[], object], process: subprocess.Popen, log: Callable) -> None:
    """Wait; ``log`` returns what the process, which must not end, has said."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, log()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def run(shapes: Path, output: Path, *, resume=False, **changes) -> Run:
    config = quick_config(shapes, output, **changes)
    return Run(config, train(config, resume=resume))


def run_interrupted(shapes: Path, output: Path, *, after_step: int, **changes) -> Run:
    """Train with Ctrl-C at the end of one step, and then to the end by resuming."""
    config = quick_config(shapes, output, **changes)
    add = History.add

    def add_and_interrupt(history: History, event: str, **values: Any) -> None:
        add(history, event, **values)
        if event == "step" and values["step"] == after_step:
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(History, "add", add_and_interrupt)
        with pytest.raises(InterruptedRunError) as stop:
            train(config)
    assert stop.value.signal == signal.SIGINT
    assert stop.value.checkpoint.name == f"step-{after_step:08d}.npz"
    assert not (config.output_path / "results.json").exists()
    return run(shapes, output, resume=True, **changes)
