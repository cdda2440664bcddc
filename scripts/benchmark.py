"""Time cases side by side in one interleaved run. Ratios are per round, so noise mostly cancels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Optional

from mpgluon.benchmark.cases import StepCase, loss_scaling
from mpgluon.benchmark.timing import interleave, quartiles, ratios
from mpgluon.errors import PrecisionError

CASES = {"loss-scaling": loss_scaling}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, time, and print a table for each format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument(
        "--dtype", nargs="+", default=["float32"], choices=["float32", "float16", "bfloat16"]
    )
    parser.add_argument("--model", default="resnet50_v1", help="of MXNet's or gluoncv's zoo")
    parser.add_argument("--batch-size", type=_positive, default=8)
    parser.add_argument("--image-size", type=_positive, default=224, help="pixels")
    parser.add_argument("--device", default="cpu", help="cpu or gpu:0")
    parser.add_argument("--rounds", type=_positive, default=15, help="runs of each")
    options = parser.parse_args(arguments)
    for dtype in options.dtype:
        case = StepCase(
            options.model, dtype, options.batch_size, options.image_size, options.device
        )
        try:
            seconds = interleave(CASES[options.case](case), rounds=options.rounds)
        except (ValueError, PrecisionError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(
            f"{options.case}: {case.model}, {dtype}, batch {case.batch_size}, "
            f"{case.image_size} px, {case.device}, {options.rounds} rounds"
        )
        base = next(iter(seconds.values()))
        for name, values in seconds.items():
            time, ratio = quartiles(values), quartiles(ratios(values, base))
            print(
                f"  {name:16} {time.median:8.3f} s  [{time.lower:.3f}, {time.upper:.3f}]"
                f"   x {ratio.median:.3f}  [{ratio.lower:.3f}, {ratio.upper:.3f}]"
            )
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, received {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
