"""Show the effect of 16 bits on a network: ranges, errors, shapes, on one HTML page.

    mpgluon diagnose mymodule:make_net --image-size 32
    mpgluon diagnose mymodule:make_translator --input-shape 4,20 --input-shape 4,18
    mpgluon diagnose runs/latest

The function may return (network, mpgluon.diagnostics.Batch(inputs, labels, loss)) to be examined on
its own batch, and a run is examined on images of its data set; otherwise the input is noise, and
each output has a loss of its own.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from mpgluon.base.files import disk_error
from mpgluon_tools.commands.arguments import (
    add_input_shape,
    add_network,
    add_zoo_network,
    positive,
    width,
)
from mpgluon_tools.progress import progress_line

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = ""
_STEPS = 7  # of diagnose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_network(parser, returns=" or (network, batch)")
    add_zoo_network(parser)
    add_input_shape(parser, "in place of --image-size and --batch-size")
    parser.add_argument("--batch-size", type=positive, default=8, help="(default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=["float16", "bfloat16"],
        default="float16",
        help="the format to compare with FP32 (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or gpu:0 (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of random weights and input (default: 0)"
    )
    parser.add_argument(
        "--output", metavar="FILE", default="report.html", help="(default: %(default)s)"
    )


def run(options: argparse.Namespace, import_all_of_mpgluon: Callable[[], None]) -> int:
    """Examine the network, print the tables, and write the page."""
    import_all_of_mpgluon()
    from mpgluon_tools.commands.networks import batch_of, one_device, open_network
    from mpgluon_tools.report import diagnose

    import mxnet as mx
    import numpy as np

    output = Path(options.output)
    try:
        os.scandir(output.parent).close()
    except OSError as error:  # found before the work
        raise disk_error(error, output, "examine the network again") from error
    device = one_device(options.device)
    mx.random.seed(options.seed)
    np.random.seed(options.seed)
    with progress_line(_STEPS + 1) as show:
        show("the network and its batch")
        opened = open_network(options, device)
        batch, about_batch = batch_of(opened, options, device)
        page = diagnose(
            opened.net,
            batch,
            title=f"{options.network} in {options.dtype}",
            about=[*opened.about, *about_batch],
            dtype=options.dtype,
            progress=show,
        )
    print(page.text(width()))
    page.write(output)
    print(f"\nwritten to {output}")
    return 0
