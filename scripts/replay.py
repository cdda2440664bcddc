"""Run a training step again that was skipped: where it overflowed, and what would have saved it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Optional

from mpgluon.diagnostics import replay
from mpgluon.errors import MpgluonError

import mxnet as mx


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, run the step again, and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Exit status: 0 if the gradients have the recorded bits, 1 if not, 2 for an error.",
    )
    parser.add_argument(
        "file",
        help="of mpgluon.diagnostics.FlightRecorder or train_caltech.py --record-overflows; the "
        "function that it names as its network is imported and called",
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
    options = parser.parse_args(arguments)
    sys.path.insert(0, "")  # modules of the current folder, as with python -m
    try:
        found = replay(
            options.file, options.network, loss_fn=options.loss, cures=not options.no_cures
        )
    except (ValueError, TypeError, ImportError, mx.MXNetError, MpgluonError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(found)
    return int(not found.same_bits)


if __name__ == "__main__":
    sys.exit(main())
