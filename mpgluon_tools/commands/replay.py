"""Run a training step again that was skipped: where it overflowed, and what would have saved it."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from mpgluon.base.processor import recorded_threads, unasked_threads, usable_cores
from mpgluon_tools.commands.arguments import width
from mpgluon_tools.commands.checkout import is_run
from mpgluon_tools.progress import progress_line

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = "Exit status: 0 if the gradients have the recorded bits, 1 if not, 2 for an error.\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "file",
        help="of mpgluon.diagnostics.FlightRecorder or train_caltech.py --record-overflows, or the "
        "folder of a run, whose newest one is taken; the function that it names as its network is "
        "imported and called",
    )
    parser.add_argument(
        "--network",
        metavar="NAME",
        help="module:function or like resnet18_v1(classes=10), instead of the one that it names",
    )
    parser.add_argument(
        "--loss",
        metavar="NAME",
        help="module:function or a loss of mxnet.gluon.loss, instead of the one that it names",
    )
    parser.add_argument("--no-cures", action="store_true", help="do not try what would have helped")


def run(options: argparse.Namespace, import_all_of_mpgluon: Callable[[], None]) -> int:
    """Run the step again, and print the findings; return 1 if gradients have other bits."""
    from mpgluon.base.archive import RECORDED_STEP, read_archive

    file = _file_of(Path(options.file))
    header, _ = read_archive(file, only_header=True, kind=RECORDED_STEP)
    threads = recorded_threads(header) or unasked_threads(usable_cores(), platform.machine())
    if "mxnet" not in sys.modules:  # which reads it at its import
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    import_all_of_mpgluon()
    from mpgluon_tools.diagnostics import replay

    sys.path.insert(0, "")  # modules of the current folder, as with python -m
    with progress_line() as show:
        tried = "" if options.no_cures else ", and with up to 25 cures"
        show(f"running the step again{tried}")
        result = replay(file, options.network, loss_fn=options.loss, cures=not options.no_cures)
    print(result.text(width()))
    return int(not result.same_bits)


def _file_of(path: Path) -> Path:
    """Return the newest recorded step of a run's folder, or any other path unchanged."""
    newest = max(path.glob("overflows/overflow-*.npz"), default=path)
    if newest.is_dir() and is_run(str(newest)):
        raise ValueError(
            f"the run {path} has no recorded step: no step was skipped, or train_caltech.py ran "
            "without --record-overflows; give it --record-overflows=1 in the next run"
        )
    return newest
