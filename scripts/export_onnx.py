"""Write a network as an ONNX file that onnxruntime serves without MXNet.

    python scripts/export_onnx.py runs/latest --dtype float16 --output net.onnx
    python scripts/export_onnx.py resnet50_v1b --parameters resnet50.pth --classes 1000

The file's metadata names the categories and says how a photograph becomes the network's input.
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
    """Run ``mpgluon export``, for runs too."""
    door = Door("export_onnx.py", __doc__, RUNS, open_a_run, load_pretrained)
    return run("export", arguments, door)


if __name__ == "__main__":
    sys.exit(main())
