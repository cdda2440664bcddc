"""Train a ResNet-20 on CIFAR-10 on a GPU's Tensor Cores, in FP32, FP16, BF16 and FP8.

    python study/scripts/record_tensor_core_training.py --data cifar-10-batches-bin --output results

The recipe is as in ``python study/scripts/evidence.py run cifar10``. In FP8 the operands of
convolutions are E4M3 and their gradients E5M2, each with a scale of its own; the sums are FP32, or
as Tensor Cores add in FP8, without and with fast accumulation. It needs PyTorch, NumPy and an
NVIDIA GPU that PyTorch supports (FP8: Ada or later), and neither mpgluon nor MXNet; and the folder
in https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz. All runs take each step together: the
six of a seed need 5 minutes on an H200. A record that exists keeps its other runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, train, and write one file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", metavar="FOLDER", type=Path, default=Path("cifar-10-batches-bin"))
    parser.add_argument("--device", default="cuda", help="PyTorch's name for it, default: cuda")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="some of them; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], metavar="SEED")
    parser.add_argument("--steps", type=int, help="stop early, to try it")
    parser.add_argument("--output", metavar="FOLDER", type=Path, default=Path("."))
    options = parser.parse_args(arguments)
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]

        from study.experiments.tensor_core_training import ROWS, Run, read
    except ImportError as error:
        print(f"error: this needs PyTorch ({error}); pip install torch numpy", file=sys.stderr)
        return 2
    rows = options.rows or list(ROWS)
    if unknown := set(rows) - set(ROWS):
        parser.error(f"--rows are {', '.join(ROWS)}; received {min(unknown)}")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "error: PyTorch sees no NVIDIA GPU; run this where torch.cuda.is_available() is true, "
            "or try it with --device cpu --steps 20",
            file=sys.stderr,
        )
        return 2
    try:
        train, test = (read(options.data, part, device) for part in ("data", "test"))
    except (OSError, ValueError) as error:
        print(f"error: {options.data} is not the folder of CIFAR-10: {error}", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    recorded: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    runs = [Run(row, seed, train) for seed in options.seeds for row in rows]
    steps = options.steps or runs[0].steps
    seconds = _train(runs, steps, torch.cuda.synchronize if device.type == "cuda" else None)
    found = [
        {**run.record(steps, test), "steps": steps, "seconds": seconds, "runs_at_a_time": len(runs)}
        for run in runs
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"gpu-{re.sub('[^a-z0-9]+', '-', name.lower())}-cifar10-pytorch.json"
    recorded["runs"] = [*_others(path, recorded, found), *found]
    path.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"\n{path}: {name}")
    for one in found:
        print(f"{one['row']:18} seed {one['seed']}: {one['correct_test_images']} of 10,000 right")
    return 0


def _train(runs: Sequence[Any], steps: int, wait: Any) -> int:
    """Take the steps of all runs, which stay near each other, and return the seconds."""
    begun = time.monotonic()
    for step in range(1, steps + 1):
        for run in runs:
            run.step()
        if step % 100 == 0 or step == steps:
            if wait is not None:
                wait()
            left = (time.monotonic() - begun) / step * (steps - step)
            print(f"\rstep {step:,} of {steps:,}, {left:,.0f} s left ", end="", flush=True)
    return round(time.monotonic() - begun)


def _others(path: Path, recorded: dict[str, Any], found: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the runs of a record that exists, of the same device and versions, without these."""
    if not path.exists():
        return []
    before = json.loads(path.read_text())
    if any(before[key] != value for key, value in recorded.items()):
        return []
    ours = {(one["row"], one["seed"]) for one in found}
    return [one for one in before["runs"] if (one["row"], one["seed"]) not in ours]


if __name__ == "__main__":
    sys.exit(main())
