"""Train an image classifier on Caltech 101 in float32, float16 or bfloat16.

    python scripts/train_caltech.py --dtype float16

Results go to a folder: results.json, history.jsonl, curves.png, final.params and checkpoints.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn, Optional

import mpgluon
from mpgluon.distributed import MpiProcesses, OneProcess, Processes
from mpgluon.training import InterruptedRunError, TrainingConfig, train


def _dtype(text: str) -> str:
    """Return a format or policy, or refuse it as the parser refuses what it does not know."""
    try:
        return TrainingConfig(dtype=text).dtype
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# Option, what it takes, and what it means; defaults are the config's.
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (
        {"metavar": "{float32,float16,bfloat16,POLICY}", "type": _dtype},
        "float16 is the cast network with FP32 master weights; bfloat16 is autocast; a policy is "
        "mixed_float16, emulated_bfloat16 or like params=float32,compute=bfloat16",
    ),
    "amp": ({"action": "store_true"}, "autocast for float16 too: FP32 parameters"),
    "loss_scale": (
        {"metavar": "{auto,dynamic,none,N}"},
        "auto is dynamic for float16 and none otherwise; N is a power of two",
    ),
    "growth_interval": (
        {"type": int, "metavar": "STEPS"},
        "finite steps before a dynamic scale grows (a tenth of the run, at most 2000)",
    ),
    "model": ({}, "a name in MXNet's or gluoncv's model zoo"),
    "pretrained": (
        {"metavar": "FILE"},
        "start from a parameter file, or a state dict with torchvision's names (.safetensors, "
        ".pth); its head may have another number of classes",
    ),
    "dataset": (
        {"choices": ("caltech101", "shapes")},
        "shapes is a rendered stand-in that needs no download",
    ),
    "classes": ({"type": int}, "classes of the stand-in, 10 to 101"),
    "images_per_class": ({"type": int}, "images per class of the stand-in"),
    "data_dir": ({"metavar": "DIR"}, "where the images are, or are rendered to"),
    "output_dir": ({"metavar": "DIR"}, "where results and checkpoints go"),
    "train_per_class": ({"type": int}, "training images per class; the rest is for testing"),
    "image_size": ({"type": int, "metavar": "PIXELS"}, "side of the network's square input"),
    "min_crop_area": ({"type": float}, "least share of an image that a training crop covers"),
    "batch_size": ({"type": int}, "images per device and step"),
    "epochs": ({"type": int}, "passes over the training images"),
    "warmup_epochs": ({"type": int}, "epochs in which the learning rate climbs"),
    "learning_rate": ({"type": float}, "its peak; a cosine takes it down to zero"),
    "reference_batch_size": (
        {"type": int, "metavar": "N"},
        "the global batch that the learning rate is meant for; it is scaled to the one there is",
    ),
    "momentum": ({"type": float}, "for optimizers that have one"),
    "weight_decay": ({"type": float}, "L2 penalty"),
    "optimizer": ({}, "any of MXNet's"),
    "devices": ({}, "cpu, gpu (of several processes, each its own), gpu:0,1"),
    "kvstore": (
        {"choices": ("device", "mpi")},
        "what sums gradients: mpi joins the processes that mpirun starts",
    ),
    "timeout": (
        {"type": float, "metavar": "SECONDS"},
        "how long a process waits for the others before it ends them all",
    ),
    "sync_batch_norm": (
        {"action": "store_true"},
        "BatchNorm over the devices of a process together",
    ),
    "workers": ({"type": int}, "processes that decode images"),
    "seed": ({"type": int}, "of everything random"),
    "skip_unreadable": (
        {"action": "store_true"},
        "leave out images that cannot be decoded, and list them, instead of ending",
    ),
    "keep_checkpoints": ({"type": int}, "how many of the newest stay"),
    "tensorboard": (
        {"action": "store_true"},
        "write the history for TensorBoard too (pip install tensorboard)",
    ),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line once, and not once per process of mpirun."""

    def error(self, message: str) -> NoReturn:
        if _rank() > 0:
            self.exit(0)  # rank 0 has the same command line, and its status is the job's
        super().error(message)


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Return the parsed command line; exits with status 2 on one that is wrong."""
    parser = _Parser(description="Train an image classifier on Caltech 101.")
    defaults = {field.name: field.default for field in fields(TrainingConfig)}
    for name, (how, meaning) in _OPTIONS.items():
        shown = "" if defaults[name] in (None, False) else f" (default: {defaults[name]})"
        parser.add_argument(
            f"--{name.replace('_', '-')}", default=defaults[name], help=meaning + shown, **how
        )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in --output-dir"
    )
    return parser.parse_args(arguments)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Train, print the result and return the exit status."""
    options = vars(parse(arguments))
    resume = options.pop("resume")
    try:
        config = TrainingConfig(**options)
        processes = start_processes(config)
    except ValueError as error:
        if _rank() > 0:
            return 0  # as in the parser
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        with processes:
            return run(config, processes, resume=resume)
    except ValueError as error:  # MPI is missing, perhaps on this machine only
        print(f"error: {error}", file=sys.stderr)
        return 2


def _rank() -> int:
    """Return which of mpirun's processes this is, before MPI is started; 0 without mpirun."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))  # Open MPI's


def start_processes(config: TrainingConfig) -> Processes:
    """Return the processes that train together, not yet started."""
    if config.kvstore == "mpi":
        return MpiProcesses(config.timeout)
    started = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))  # Open MPI's
    if started > 1:
        raise ValueError(
            f"mpirun has started {started} processes, and without --kvstore mpi each of them would "
            "train alone and write the same files; add --kvstore mpi"
        )
    return OneProcess()


def run(config: TrainingConfig, processes: Processes, *, resume: bool) -> int:
    """Train, let rank 0 print the result, and return the exit status."""
    several = processes.world_size > 1
    logging.basicConfig(
        format=f"rank {processes.rank}: %(message)s" if several else "%(message)s",
        level=logging.INFO if processes.is_first else logging.WARNING,
    )
    who = f"rank {processes.rank}: " if several else ""
    if processes.is_first:
        policy = config.policy
        print(
            f"{config.model} on {config.dataset}: parameters {policy.param_dtype}, computation "
            f"{policy.compute_dtype}, result {policy.output_dtype}",
            file=sys.stderr,
        )
    try:
        results = train(config, resume=resume, progress=True, processes=processes)
    except (ValueError, OSError, mpgluon.MpgluonError) as error:
        print(f"{who}error: {error}", file=sys.stderr)
        processes.end_all(2)
        return 2
    except InterruptedRunError as stop:
        if processes.is_first:
            print(stop, file=sys.stderr)
        return 128 + int(stop.signal)
    except KeyboardInterrupt:
        print(f"{who}stopped before the first step; nothing to resume", file=sys.stderr)
        processes.end_all(130)
        return 130
    if not processes.is_first:
        return 0
    print(
        f"test accuracy {results['test_accuracy']:.3f} on {config.dataset}, "
        f"{results['steps']} steps ({results['skipped_steps']} skipped) in "
        f"{results['training_seconds']:.0f} s, final loss scale "
        f"{results['final_loss_scale']:g}; results in {config.output_dir}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
