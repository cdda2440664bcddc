"""Download Caltech 101 into a folder: verified, and nothing to do if it is there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes/ of this checkout

from mpgluon_tools.commands import exit_status

from recipes.data.caltech101 import CALTECH101, download_caltech101, list_images


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, download, and print where the images are."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"The archive ({CALTECH101.outer.size / 1e6:.0f} MB) is {CALTECH101.url}",
    )
    parser.add_argument(
        "--data-dir", default="data", help="the folder to put the images in (default: data)"
    )
    data_dir = parser.parse_args(arguments).data_dir

    def download() -> None:
        tree = download_caltech101(data_dir, progress=True)
        folder = list_images(tree)
        print(f"Caltech 101 is in {tree}: {len(folder):,} images, {len(folder.classes)} categories")
        expected = CALTECH101.contents.category_images
        if len(folder) != expected:
            print(
                f"warning: the archive has {expected:,} in its categories, and this folder was "
                "there before; for all of them, give another --data-dir",
                file=sys.stderr,
            )

    return exit_status(download, "interrupted: run the same command again to continue")


if __name__ == "__main__":
    sys.exit(main())
