"""Train an image classifier on Caltech 101 in float32, float16 or bfloat16.

    python scripts/train_caltech.py --dtype float16

Results go to a folder: results.json, history.jsonl, curves.png, predictions.jpg, final.params and
checkpoints.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recipes/ is not installed

from mpgluon_command import import_mpgluon

import_mpgluon()  # with a thread for each core

import mpgluon
from mpgluon.distributed import MpiProcesses, OneProcess, Processes
from mpgluon_tools.tables import counted

from recipes.options import add_options, in_options
from recipes.training import InterruptedRunError, TrainingConfig, train
from recipes.training.checkpoints import Resume, checkpoints_of


class _Parser(argparse.ArgumentParser):
    """Reports an error of the command line once, not once per process of mpirun."""

    def error(self, message: str) -> NoReturn:
        if _rank() > 0:
            self.exit(0)  # rank 0 has the same command line, and its status is the job's
        super().error(message)


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Return the parsed command line; exits with status 2 on one that is wrong."""
    parser = _Parser(description="Train an image classifier on Caltech 101.")
    add_options(parser, TrainingConfig)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        choices=("auto",),
        metavar="auto",
        help="continue from the newest checkpoint in --output-dir; with auto, only if there is one",
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
        print(f"error: {in_options(str(error), TrainingConfig, options)}", file=sys.stderr)
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


def run(config: TrainingConfig, processes: Processes, *, resume: Resume) -> int:
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
        for sentence in config.without_effect():
            warning = in_options(sentence, TrainingConfig, config.as_dict())
            print(f"warning: {warning}", file=sys.stderr)
    try:
        results = train(config, resume=resume, progress=True, processes=processes)
    except (ValueError, OSError, mpgluon.MpgluonError) as error:
        message = in_options(str(error), TrainingConfig, config.as_dict())
        print(f"{who}error: {message}", file=sys.stderr)
        processes.end_all(2)
        return 2
    except InterruptedRunError as stop:
        if processes.is_first:
            print(stop, file=sys.stderr)
        return 128 + int(stop.signal)
    except KeyboardInterrupt:
        kept = checkpoints_of(config.output_path)
        advice = "continue with --resume" if kept else "there is no checkpoint to resume"
        print(f"{who}stopped; {advice}", file=sys.stderr)
        processes.end_all(130)
        return 130
    if not processes.is_first:
        return 0
    of_average = "" if config.ema is None else " of the average"
    print(
        f"test accuracy{of_average} {results['test_accuracy']:.3f} (mean of the classes "
        f"{results['test_accuracy_per_class']:.3f}) on {config.dataset}, "
        f"{counted(results['steps'], 'step')} ({results['skipped_steps']} skipped) in "
        f"{results['training_seconds']:.0f} s, final loss scale "
        f"{results['final_loss_scale']:g}; results in {config.output_dir}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
