"""Serve a page on which to try a trained network.

    python scripts/serve.py runs/latest

Drop a photograph on it: the five likeliest categories appear, with their probabilities from the
network in FP32, float16 and bfloat16, and how long a forward pass of each takes. Nothing that is
sent is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recipes/ is not installed

from mpgluon_command import import_mpgluon

import_mpgluon()  # with a thread for each core

from mpgluon_tools.commands import Door, run

from recipes.opened_runs import RUNS, open_a_run
from recipes.training.networks import load_pretrained


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run ``mpgluon serve``, for runs too."""
    return run("serve", arguments, Door("serve.py", __doc__, RUNS, open_a_run, load_pretrained))


if __name__ == "__main__":
    sys.exit(main())
