"""Unpack an archive of CIFAR-10 into a folder per category; nothing to do if that is there.

Then: ``train_caltech.py --dataset folder --data-dir data/cifar10 --shifts --image-size 32``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes/ of this checkout

from mpgluon_tools.commands import exit_status

from recipes.data.cifar10 import ARCHIVES, unpack_cifar10


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, unpack, and print where the images are."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", help=f"{' or '.join(ARCHIVES)}; see data/README.md")
    parser.add_argument(
        "--data-dir", default="data/cifar10", help="the folder to make (default: %(default)s)"
    )
    options = parser.parse_args(arguments)

    def unpack() -> None:
        folder = unpack_cifar10(options.archive, options.data_dir, progress=True)
        print(f"CIFAR-10 is in {folder}: 50,000 images for training, 10,000 for testing")

    return exit_status(unpack, "interrupted: run the same command again")


if __name__ == "__main__":
    sys.exit(main())
