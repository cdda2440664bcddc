"""Record facts that need a GPU, most valuable first, on a machine that is lent for minutes.

    python study/scripts/record_gpu.py --minutes 10 --output gpu-record

Each step has a time limit and a log; one that fails or runs out of time does not stop the next.
Steps that need PyTorch, MXNet's CUDA build or pytest say so and are left out without it. --list
shows the steps and starts nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]


class Step(NamedTuple):
    """One thing to record: its name, its requirements, its seconds, its command after Python."""

    name: str
    needs: str
    seconds: int
    arguments: tuple[str, ...]


TRAINING = (
    *("scripts/train_caltech.py", "--dataset", "shapes", "--devices", "gpu:0", "--epochs", "3"),
    *("--image-size", "64", "--batch-size", "20", "--train-per-class", "40"),
)


def steps(output: Path) -> list[Step]:
    """Return the steps, most valuable first."""
    return [
        Step(
            "truth",
            "torch",
            90,
            ("study/scripts/record_tensor_core_truth.py", "--output", str(output / "truth")),
        ),
        Step("doctor", "mxnet", 60, ("-m", "mpgluon_command", "doctor")),
        Step("tensor-cores", "mxnet and pytest", 90, _tests("tensor_cores")),
        Step("times", "mxnet and pytest", 180, _tests("speed")),
        Step("precision", "mxnet and pytest", 120, _tests("precision")),
        *(
            Step(
                f"training-{dtype}",
                "mxnet",
                90,
                (*TRAINING, "--dtype", dtype, "--output-dir", str(output / f"training-{dtype}")),
            )
            for dtype in ("float16", "float32")
        ),
        Step("scaling", "mxnet and pytest", 120, _tests("scaling")),
        Step("checkpoints", "mxnet and pytest", 120, _tests("checkpoint")),
        Step("runs", "mxnet and pytest", 300, _tests("training")),
        Step(
            "torch-times",
            "torchvision",
            360,
            ("study/scripts/record_tensor_core_times.py", "--output", str(output)),
        ),
        Step(
            "torch-training",
            "torch",
            900,
            ("study/scripts/record_tensor_core_training.py", "--output", str(output)),
        ),
    ]


def _tests(name: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-rs", f"tests/gpu/test_gpu_{name}.py")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, run the steps in order, and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of all steps, default: 10")
    parser.add_argument("--output", type=Path, default=Path("gpu-record"), metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="show the steps and start nothing")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="names of steps, see --list")
    options = parser.parse_args(arguments)
    if not options.minutes >= 0:
        parser.error(f"--minutes must not be negative, received {options.minutes:g}")
    output = options.output.resolve()
    planned = steps(output)
    unknown = set(options.only or ()) - {step.name for step in planned}
    if unknown:
        parser.error(f"--only: there is no step {', '.join(sorted(unknown))}; see --list")
    planned = [step for step in planned if not options.only or step.name in options.only]
    if options.list:
        for step in planned:
            print(f"{step.name:18} {step.seconds:4} s at most, needs {step.needs}")
        return 0
    output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    results = [_run(step, output, end) for step in planned]
    print(f"{results.count('done')} of {len(results)} steps done; logs and records in {output}")
    return int(results.count("done") < len(results))


def _run(step: Step, output: Path, end: float) -> str:
    """Run one step, print its result, and return it: done, failed, out of time, or left out."""
    began = time.monotonic()
    log = output / f"{step.name}.log"
    left = min(step.seconds, end - began)
    if left <= 0:
        result = "left out: no time left"
    elif lacking := [name for name in step.needs.split(" and ") if not _has(name)]:
        result = f"left out: {lacking[0]} cannot be imported by {sys.executable}"
    else:
        with log.open("wb") as file:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            if "mxnet" in step.needs:  # cuDNN may otherwise take TF32 for its FP32, from Ampere on
                environment["NVIDIA_TF32_OVERRIDE"] = "0"
            process = subprocess.Popen(
                [sys.executable, *step.arguments],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(left)
                result = "done" if code == 0 else f"failed with status {code}; see {log.name}"
            except subprocess.TimeoutExpired:
                result = f"out of time; see {log.name}"
            finally:  # processes that it started would take the GPU's time from the next step
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGINT)  # it ends those in sessions of their own
                    process.wait(5)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    print(f"{step.name:18} {time.monotonic() - began:6.1f} s  {result}", flush=True)
    return result


def _has(package: str) -> bool:
    """Whether a package can be imported, which for MXNet's CUDA builds needs CUDA's libraries."""
    name = "mpgluon" if package == "mxnet" else package
    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, capture_output=True, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
