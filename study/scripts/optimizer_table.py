"""Run each optimizer on float16 weights, and print the errors: the table of docs/optimizers.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Optional

from mpgluon_tools.commands import exit_status
from mpgluon_tools.commands.arguments import width
from mpgluon_tools.diagnostics.optimizers import (
    STEPS,
    OptimizerReport,
    optimizer_names,
    report_on_optimizer,
)
from mpgluon_tools.tables import Table

from tqdm import tqdm

HEADINGS = (
    "optimizer",
    "float16, no masters",
    "MXNet's multi_precision",
    "its masters",
    "mpgluon's masters",
    "bfloat16",
    "use",
)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, run the optimizers, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"Largest errors over {STEPS} steps against FP32 training on the same gradients, "
        "in units of the last place: of float16 in the first two columns of figures (0.5 is "
        "rounding alone), of FP32 in the others (0 is equal bit for bit).",
    )
    parser.add_argument(
        "optimizers", nargs="*", metavar="OPTIMIZER", help="default: all that MXNet has"
    )
    parser.add_argument("--markdown", action="store_true", help="print a table for a document")
    options = parser.parse_args(arguments)

    def work() -> None:
        names = options.optimizers or optimizer_names()
        reports = [report_on_optimizer(name) for name in tqdm(names, leave=False, disable=None)]
        table = Table(HEADINGS, [_row(report) for report in reports])
        print(table.to_markdown() if options.markdown else table.fitted(width()))

    return exit_status(work)


def _row(report: OptimizerReport) -> tuple[str, ...]:
    return (
        report.name,
        *(
            _figure(value)
            for value in (
                report.without_masters,
                report.mxnet,
                report.mxnet_masters,
                report.masters,
                report.bfloat16,
            )
        ),
        report.advice,
    )


def _figure(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.1f}" if value else "0"


if __name__ == "__main__":
    sys.exit(main())
