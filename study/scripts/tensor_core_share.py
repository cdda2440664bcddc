"""Report the share of a GPU's time on Tensor Cores, and the layers that did not use them.

nsys profile --trace cuda,nvtx --output run python scripts/train_caltech.py --dtype float16 …
nsys export --type sqlite --output run.sqlite run.nsys-rep
python study/scripts/tensor_core_share.py run.sqlite
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # study/benchmarks/ is not installed

from mpgluon_tools.commands import exit_status

from study.benchmarks.nsys import read_export


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, read the export, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", type=Path, help="a file that nsys export --type sqlite wrote")
    options = parser.parse_args(arguments)
    return exit_status(lambda: print(read_export(options.export)))


if __name__ == "__main__":
    sys.exit(main())
