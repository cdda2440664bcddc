"""Train an image classifier on Caltech 101 in float32, float16 or bfloat16.

    python scripts/train_caltech.py --dtype float16

Results go to a folder: results.json, history.jsonl, curves.png, predictions.jpg, final.params and
checkpoints.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes/ of this checkout

from mpgluon_command import import_mpgluon

import_mpgluon()  # with a thread for each core

from mpgluon.distributed import MpiProcesses, OneProcess, Processes

from recipes.console import run
from recipes.options import add_options, in_options
from recipes.training import TrainingConfig


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


if __name__ == "__main__":
    sys.exit(main())
