"""Show the effect of 16 bits on a network: ranges, errors, shapes, on one HTML page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recipes/ is not installed

from mpgluon_command import import_mpgluon

import_mpgluon()  # with a thread for each core

from mpgluon_tools.commands import Door, run

from recipes.opened_runs import RUNS, open_a_run_with_images
from recipes.training.networks import load_pretrained


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run ``mpgluon diagnose``, for runs too."""
    runs = f"{RUNS}, which is examined on images of its data set"
    opening = (runs, open_a_run_with_images, load_pretrained)
    return run("diagnose", arguments, Door("diagnose.py", __doc__, *opening, {"classes": 101}))


if __name__ == "__main__":
    sys.exit(main())
