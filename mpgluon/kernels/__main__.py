"""Find or compile the native library, trying again what failed before, and print the outcome."""

from __future__ import annotations

import argparse
import logging
import sys

from mpgluon.kernels.library import build

argparse.ArgumentParser(prog="python -m mpgluon.kernels", description=__doc__).parse_args()
logging.basicConfig(level=logging.INFO, format="%(message)s")
outcome = build(again=True)
if outcome.words:
    sys.stderr.write(f"{outcome.words}\n")
sys.stdout.write(f"{outcome.sentence}\n")
sys.exit(0 if outcome.path or outcome.state == "switched off" else 1)
