"""Name photographs with a trained network (extra serve; of a run, extra recipes).

    mpgluon predict runs/finetune cat.jpg dog.jpg
    mpgluon predict mymodule:make_net cat.jpg --image-size 64 --class-names names.txt
    mpgluon predict resnet50_v2 --parameters resnet50.params --top 1 *.jpg

A line for each photograph: its likeliest categories with their probabilities. On the error stream
are a line about the network, and files that cannot be read; the status is 1 then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from mpgluon.errors import DataError
from mpgluon_tools.commands.arguments import (
    add_network,
    add_preprocessing,
    add_zoo_network,
    positive,
)

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_network(parser)
    parser.add_argument("photographs", nargs="+", metavar="PHOTO", help="image files")
    add_zoo_network(parser)
    add_preprocessing(parser)
    parser.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        default="float32",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--top", type=positive, default=3, help="categories of each (default: %(default)s)"
    )


def run(options: argparse.Namespace, import_all_of_mpgluon: Callable[[], None]) -> int:
    """Open the network, and print a line for each photograph."""
    import_all_of_mpgluon()
    from mpgluon_tools.commands.networks import open_network

    import mxnet as mx

    opened = open_network(options, mx.cpu(), all_values=True)  # which may name another extra
    from mpgluon_tools.serving.classifier import PhotographClassifier

    metadata = opened.metadata(options.image_size)
    classify = PhotographClassifier(opened.net, metadata, options.dtype)
    print(*opened.about, metadata.preprocessing, sep="\n", file=sys.stderr)
    failed = False
    for photograph in options.photographs:
        try:
            guesses = classify(photograph)[: options.top]
        except (DataError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            print(f"{photograph}: {reason}", file=sys.stderr)
            failed = True
        else:
            answers = ", ".join(f"{category} {share:.3f}" for category, share in guesses)
            print(f"{photograph}: {answers}")
    return int(failed)
